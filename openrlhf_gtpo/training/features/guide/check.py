"""Refuses a guide that a run cannot learn from (``--algo.guide.*``)."""

import math
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks.models import check_length, check_model, check_weights_fit, load_tokenizer


def check_guide(args: SimpleNamespace) -> None:
    """Refuse a guide that is missing, or that this run cannot learn from or has no room for.

    Raises:
        UsageError: the first thing that is wrong.
    """
    guide, samples, flag = args.algo.guide, args.rollout.n_samples_per_prompt, "--algo.guide.model_name_or_path"
    if not guide.model_name_or_path:
        return
    for given, other, why in (
        (
            args.algo.advantage.estimator == "gae",
            "--algo.advantage.estimator gae",
            "whose critic learns what the policy's own responses are worth",
        ),
        (
            args.algo.kl.unbiased_gradient and args.algo.kl.use_loss and args.algo.kl.init_coef > 0,
            "--algo.kl.unbiased_gradient",
            "which treats every response as the old policy's",
        ),
        (
            args.algo.kl.target and args.algo.kl.init_coef > 0,
            "--algo.kl.target",
            "which would follow the KL of the guide's rows too",
        ),
        (args.data.max_images_per_prompt > 0, "--data.max_images_per_prompt", "as the guide is given only text"),
    ):
        if given:
            raise UsageError(f"{flag} cannot be combined with {other}, {why}; leave one of them out.")
    if samples < 2:
        raise UsageError(f"Expected --rollout.n_samples_per_prompt >= 2, for the guide and the policy, got {samples}.")
    if math.ceil(guide.fraction * samples - 1e-6) >= samples:
        raise UsageError(
            f"Expected --algo.guide.fraction <= {samples - 1}/{samples}, which leaves the policy one of the "
            f"{samples} rows of a group (--rollout.n_samples_per_prompt), got {guide.fraction:g}."
        )
    if guide.rescue_batch and not args.algo.dynamic_filtering_enable:
        raise UsageError(
            f"--algo.guide.rescue_batch {guide.rescue_batch} takes what dynamic filtering drops; give "
            "--algo.dynamic_filtering_enable too, or leave it out."
        )
    name, trusted = guide.model_name_or_path, args.actor.trust_remote_code
    config = None if guide.endpoint else check_model(name, flag, trusted)
    tokenizer = load_tokenizer(name, flag, trusted)
    if config is not None:
        check_weights_fit(name, flag)
        check_length(config, args.data.max_len, f"{flag} {name}")
    _check_same_tokenizer(args, tokenizer, flag)
    if guide.endpoint:
        from openrlhf_gtpo.training.features.guide.endpoint_requests import check_endpoint

        check_endpoint(args)
    elif args.train.colocate_all:
        gpus, own = args.actor.num_nodes * args.actor.num_gpus_per_node, guide.num_engines * guide.tensor_parallel_size
        if own > gpus:
            raise UsageError(
                f"--algo.guide.num_engines {guide.num_engines} of {guide.tensor_parallel_size} GPUs each do not fit "
                f"on the {gpus} GPUs that --train.colocate_all shares; give fewer, or leave it out."
            )
        together = args.vllm.gpu_memory_utilization + guide.gpu_memory_utilization
        # Both are awake while they sample; rescues come when the policy's sleep, if they ever do.
        if (guide.fraction > 0 or not args.vllm.enable_sleep) and together > 1:
            raise UsageError(
                "Expected --vllm.gpu_memory_utilization and --algo.guide.gpu_memory_utilization of engines on the "
                f"same GPUs (--train.colocate_all) to be at most 1 together, got {together:g}."
            )


def _check_same_tokenizer(args: SimpleNamespace, tokenizer: Any, flag: str) -> None:
    """Refuse a guide with another tokenizer: its tokens are trained on as they are, so each id must mean the same."""
    policys = load_tokenizer(args.actor.model_name_or_path, "--actor.model_name_or_path", args.actor.trust_remote_code)
    ours, theirs = ({i: token for token, i in one.get_vocab().items()} for one in (policys, tokenizer))
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:
        i = differing[0]
        raise UsageError(
            f"{flag} {args.algo.guide.model_name_or_path} has a different tokenizer from the policy's: token {i} is "
            f"{theirs.get(i)!r} there and {ours.get(i)!r} here; give a guide of the policy's family."
        )
