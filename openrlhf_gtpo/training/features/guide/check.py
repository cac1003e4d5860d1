"""Checks of the guide (``--algo.guide.*``)."""

import math
from collections.abc import Iterator

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.settings import Refusal, refuse

_FLAG = "--algo.guide.model_name_or_path"


def check_guide(args: Arguments, policy: Model) -> None:
    """Refuse a guide that is missing, that this run cannot learn from, or that does not fit.

    Raises:
        UsageError: the first problem.
    """
    if not args.algo.guide.model_name_or_path:
        return
    refuse(*_settings(args))
    guide = Model(args.algo.guide.model_name_or_path, _FLAG, args.actor.trust_remote_code)
    guide.check_code("--actor.trust_remote_code")
    if not args.algo.guide.endpoint:
        guide.check_weights()
        guide.check_length(args.data.max_len)
    _check_same_tokenizer(policy, guide)
    if args.algo.guide.endpoint:
        from openrlhf_gtpo.training.features.guide.endpoint_requests import check_endpoint

        check_endpoint(args)


def _settings(args: Arguments) -> Iterator[Refusal]:
    # Terms that would treat the guide's rows as the policy's.
    guide, samples, kl = args.algo.guide, args.rollout.n_samples_per_prompt, args.algo.kl
    for broken, other, why in (
        (
            args.algo.advantage.estimator == "gae",
            "--algo.advantage.estimator gae",
            "whose critic must learn from the policy's own responses",
        ),
        (
            kl.unbiased_gradient and kl.use_loss and kl.init_coef > 0,
            "--algo.kl.unbiased_gradient",
            "which treats all responses as the old policy's",
        ),
        (
            kl.target and kl.init_coef > 0,
            "--algo.kl.target",
            "which would follow the KL of the guide's rows too",
        ),
        (
            args.train.partial_rollout_enable,
            "--train.partial_rollout_enable",
            "as its rows are of no version of the policy",
        ),
    ):
        yield broken, f"{_FLAG} cannot be combined with {other}, {why}; leave one of them out."
    # Numbers of rows and of GPUs.
    yield (
        math.ceil(guide.fraction * samples - 1e-6) >= samples,
        f"Expected --algo.guide.fraction <= {samples - 1}/{samples}, which leaves the policy one of a group's "
        f"{samples} responses (--rollout.n_samples_per_prompt), got {guide.fraction:g}.",
    )
    yield (
        guide.rescue_batch and not args.algo.dynamic_filtering_enable,
        f"--algo.guide.rescue_batch {guide.rescue_batch} takes prompts that dynamic filtering drops; give "
        "--algo.dynamic_filtering_enable too, or leave the flag out.",
    )
    if guide.endpoint or not args.train.colocate_all:
        return
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    yield (
        guide.num_engines * guide.tensor_parallel_size > gpus,
        f"--algo.guide.num_engines {guide.num_engines} of {guide.tensor_parallel_size} GPUs each do not fit on the "
        f"{gpus} GPUs that --train.colocate_all shares; give fewer, or leave --train.colocate_all out.",
    )


def _check_same_tokenizer(policy: Model, guide: Model) -> None:
    """Refuse a guide with another tokenizer: the policy trains on its token ids, so each must mean the same."""
    ours, theirs = ({i: token for token, i in model.tokenizer.get_vocab().items()} for model in (policy, guide))
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    if differing:
        i = differing[0]
        raise UsageError(
            f"{guide} has a different tokenizer from the policy: token {i} is {theirs.get(i)!r} for the guide and "
            f"{ours.get(i)!r} for the policy; give a guide of the policy's family."
        )
