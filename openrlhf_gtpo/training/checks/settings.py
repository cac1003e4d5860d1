"""What settings contradict each other, or fail whatever the model and the data are.

What fails with every estimator, such as a file that is missing, is refused for all, and what does nothing is named.
Beyond that, only runs with GTPO or GRPO-S are held to rules; what upstream's own estimators do with such a data set's
rows, or such settings, is up to upstream.
"""

import math
from operator import attrgetter
from types import SimpleNamespace

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks.data import check_dataset, check_prompt_probs
from openrlhf_gtpo.training.checks.models import (
    check_length,
    check_model,
    load_tokenizer,
    refuse_own_code,
    refuse_untransferable,
)
from openrlhf_gtpo.training.checks.reward import check_reward
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.credit.old_policy import count_rows
from openrlhf_gtpo.training.settings.flags import SETTINGS

# vLLM 0.29's default for an engine that an actor makes: ENGINE_CONTEXT is not in its table of defaults
# (engine/arg_utils.py, get_batch_defaults), so the one in config/scheduler.py counts.
_VLLM_BATCHED_TOKENS = 2048

# Transformers' learning-rate schedules, without those that want numbers or metrics which OpenRLHF does not give them.
_SCHEDULES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("cosine_with_min_lr", "cosine_warmup_with_min_lr"),
)


def check_every_run(args: SimpleNamespace) -> None:
    """Raise UsageError for the first thing that fails with every estimator and backend, and for a checkpoint's own
    code without ``--actor.trust_remote_code``: upstream's workers and vLLM would run it without asking."""
    entropy_credit(args)
    if args.ds.lora.rank > 0:  # until https://github.com/OpenRLHF/OpenRLHF/issues/1349 is solved
        raise UsageError(
            f"--ds.lora.rank {args.ds.lora.rank} wraps the weights, and vLLM does not know the names that they get; "
            "leave it out to train all weights."
        )
    if args.ds.load_in_4bit:
        raise UsageError("--ds.load_in_4bit packs the weights into bytes, which vLLM cannot load; leave it out.")
    for role in ("actor", "critic") if args.critic.model_name_or_path else ("actor",):
        if (schedule := getattr(args, role).lr_scheduler) not in _SCHEDULES:
            raise UsageError(f"Expected --{role}.lr_scheduler to be one of {', '.join(_SCHEDULES)}, got {schedule}.")
    rows, tokens = args.vllm.max_num_seqs, args.vllm.max_num_batched_tokens
    if rows is not None and rows > (tokens or _VLLM_BATCHED_TOKENS):
        raise UsageError(
            f"--vllm.max_num_seqs {rows} decodes a token of each response in a step, but "
            f"--vllm.max_num_batched_tokens {tokens or f'is {_VLLM_BATCHED_TOKENS} by default and'} allows fewer; "
            f"give it at least {rows}."
        )
    for given, flag, why in (
        (args.vllm.sync_with_ray, "--vllm.sync_with_ray", "whose transfer is OpenRLHF's own"),
        (args.actor.freeze_visual_encoder, "--actor.freeze_visual_encoder", "which sends a part of the model"),
    ):
        if args.vllm.sync_checksum and given:
            raise UsageError(f"--vllm.sync_checksum cannot be combined with {flag}, {why}; leave one of them out.")
    refuse_untransferable(args.actor.model_name_or_path, "--actor.model_name_or_path")
    if not args.actor.trust_remote_code:
        roles = {"actor": args.actor, "critic": args.critic, "algo.guide": args.algo.guide}
        roles |= {} if args.reward.remote_url else {"reward": args.reward}
        for role, section in roles.items():
            refuse_own_code(section.model_name_or_path, f"--{role}.model_name_or_path", "--actor.trust_remote_code")


def check_inputs(args: SimpleNamespace) -> None:
    """Raise UsageError for the first checkpoint, reward, data set or setting that cannot work with this run's
    estimator or surrogate."""
    _check_loss(args)
    _check_optimizer(args)
    _check_batch_size(args)
    entropy_weighted = args.algo.advantage.estimator in ESTIMATORS
    if entropy_weighted:
        _check_modes(args)
    elif args.train.async_enable:
        _check_async(args)
    model = (args.actor.model_name_or_path, "--actor.model_name_or_path", args.actor.trust_remote_code)
    config = check_model(*model)
    if entropy_weighted and hasattr(config, "vision_config"):
        raise UsageError(
            f"--actor.model_name_or_path {model[0]} is a vision-language model, whose image positions have no entropy "
            "credit yet; use a text model or one of OpenRLHF's own estimators."
        )
    replays = args.train.replay_rollouts  # such a run neither samples nor scores
    if not replays:
        check_reward(args)
    tokenizer = load_tokenizer(*model)
    # Without added tokens: Gemma 3 has a few that its text models never see.
    embedded = getattr(config.get_text_config(), "vocab_size", math.inf)
    if tokenizer.vocab_size > embedded:
        raise UsageError(
            f"--actor.model_name_or_path {model[0]} has embeddings for {embedded} tokens (vocab_size in its "
            f"config.json), but its tokenizer has {tokenizer.vocab_size}; give the model its own tokenizer."
        )
    if replays:
        return
    check_length(config, args.data.max_len, f"{model[1]} {model[0]}")
    of_rows = None if hasattr(config, "vision_config") else tokenizer
    json_for = None  # why labels must fit into JSON
    if args.algo.guide.rescue_batch:  # as part of a checkpoint
        json_for = "--algo.guide.rescue_batch"
    elif not args.train.agent_func_path and args.reward.remote_url and not args.reward.remote_url[0].endswith(".py"):
        json_for = "--reward.remote_url"
    for names, split, flag in (
        (args.data.prompt_dataset, args.data.prompt_split, "--data.prompt_dataset"),
        (args.eval.dataset, args.eval.split, "--eval.dataset"),
    ):
        if names or flag != "--eval.dataset":
            check_dataset(args, of_rows, names, split, flag, entropy_weighted, json_for)
    check_prompt_probs(args)


def _trained_on_deepspeed(args: SimpleNamespace) -> list[str]:
    roles = ["actor"] if args.actor.backend == "deepspeed" else []
    return [*roles, "critic"] if args.critic.model_name_or_path else roles


def _check_optimizer(args: SimpleNamespace) -> None:
    """Refuse combinations on which DeepSpeed 0.19.6 fails once engines are up, or trains otherwise without a word:
    Muon is plain SGD outside zero/stage_1_and_2.py and stage3.py, a loss in fp16 is not scaled without ZeRO
    (engine.py, backward), and gradients are not added up in fp32 where ZeRO 2 divides them (stage_1_and_2.py)."""
    ds, stage = args.ds, args.ds.zero_stage
    added = f"--ds.grad_accum_dtype {ds.grad_accum_dtype}"
    if ds.grad_accum_dtype not in (None, "bf16", "fp16", "fp32"):
        raise UsageError(f"Expected {added.split()[0]} to be bf16, fp16 or fp32, got {ds.grad_accum_dtype}.")
    in_fp32, zero = ds.grad_accum_dtype == "fp32", f"--ds.zero_stage {stage}"
    for role in _trained_on_deepspeed(args):
        muon, optim = getattr(args, role).optim == "muon", f"--{role}.optim muon"
        for refused, one, other, remedy in (
            (muon and stage in (0, 3), optim, zero, "give 2"),
            (muon and in_fp32, optim, added, "leave that out"),
            (muon and ds.param_dtype == "fp16", optim, "--ds.param_dtype fp16", "give bf16"),
            (muon and ds.adam_offload, optim, "--ds.adam_offload", "leave that out"),
            (in_fp32 and stage in (0, 2), added, zero, "give 1 or 3"),
            (ds.param_dtype == "fp16" and stage == 0, "--ds.param_dtype fp16", zero, "give 2"),
            (ds.adam_offload and stage == 0, "--ds.adam_offload", zero, "give 2"),
            (ds.enable_sleep and stage == 0, "--ds.enable_sleep", zero, "give 2"),
            (ds.enable_sleep and stage == 1 and in_fp32, "--ds.enable_sleep", f"{zero} and {added}", "give 3"),
        ):
            if refused:
                raise UsageError(f"{one} does not work with {other}; {remedy}.")


def _check_batch_size(args: SimpleNamespace) -> None:
    """Refuse an optimizer step in which some replicas of a DeepSpeed group have no row: steps would be larger, and
    fewer than the learning rate's schedule counts."""
    for role in _trained_on_deepspeed(args):
        section = getattr(args, role)
        replicas = section.num_nodes * section.num_gpus_per_node
        replicas //= args.ds.ring_attn_size * args.ds.tensor_parallel_size
        needed = min(replicas, count_rows(args))
        if args.train.batch_size < needed:
            raise UsageError(
                f"Expected --train.batch_size >= {needed}, so that every replica of the {role} has a row, got "
                f"{args.train.batch_size}."
            )


def _check_loss(args: SimpleNamespace) -> None:
    """Refuse what this package's loss would refuse on construction, in an actor that has loaded the model by then."""
    from openrlhf_gtpo.training.credit.loss import make_policy_loss

    if args.actor.dual_clip == math.inf:  # which upstream takes
        raise UsageError("Expected a finite --actor.dual_clip > 1, got inf; leave it out to bound nothing.")
    try:
        make_policy_loss(args)
    except UsageError:
        raise
    except (AssertionError, ValueError) as error:
        raise UsageError(
            "--actor.eps_clip, --actor.eps_clip_low_high, --actor.dual_clip or --algo.advantage.is_correction_*: "
            f"{error}"
        ) from error


def _check_modes(args: SimpleNamespace) -> None:
    """Refuse modes that GTPO and GRPO-S do not have."""
    estimator, rollout, images = args.algo.advantage.estimator, args.rollout, args.data.max_images_per_prompt
    samples = rollout.n_samples_per_prompt
    if samples < 2:
        raise UsageError(f"Expected --rollout.n_samples_per_prompt >= 2, which {estimator} compares, got {samples}.")
    for given, flag, reason in (
        (args.train.async_enable, "--train.async_enable", "the entropies must be those of the policy that sampled"),
        (images > 0, f"--data.max_images_per_prompt {images}", "image positions have no entropy credit yet"),
        (rollout.top_p != 1, f"--rollout.top_p {rollout.top_p:g}", "entropies are those of the whole distribution"),
    ):
        if given:
            raise UsageError(
                f"{flag} cannot be combined with --algo.advantage.estimator {estimator}: {reason}; leave it out."
            )
    if ESTIMATORS[estimator].leaves_out and args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss:
        raise UsageError(
            f"--algo.advantage.estimator {estimator} leaves out the tokens that it gives no credit, and the KL in the "
            "reward brings them back; give --algo.kl.use_loss, or --algo.kl.init_coef 0."
        )
    buffer, longest = args.reward.overlong_buffer_len, rollout.max_new_tokens
    if buffer is not None and not longest:
        raise UsageError(
            f"--reward.overlong_buffer_len {buffer:g} counts back from the longest response, which nothing limits but "
            "--data.max_len, the prompt included; give --rollout.max_new_tokens too."
        )
    if buffer is not None and not 0 < buffer < longest:
        raise UsageError(f"Expected 0 < --reward.overlong_buffer_len < {longest} tokens, got {buffer:g}.")
    check_a_prompt_fits(longest, args.data.max_len)
    if not rollout.temperature > 0:  # all responses to a prompt would be the same
        raise UsageError(f"Expected --rollout.temperature > 0, got {rollout.temperature:g}.")


def _check_async(args: SimpleNamespace) -> None:
    """Refuse what only this package's controller does: asynchronous training keeps upstream's."""
    loss_type = args.actor.policy_loss_type
    by_outcome = loss_type in SURROGATES and "correct" in SURROGATES[loss_type].reads  # of the experience maker
    given = [f"--{flag}" for flag, setting in SETTINGS.items() if setting.synchronous and attrgetter(flag)(args)]
    if by_outcome:
        given.append(f"--actor.policy_loss_type {loss_type}")
    if given:
        raise UsageError(
            f"{given[0]} cannot be combined with --train.async_enable, whose controller is OpenRLHF's; leave one of "
            "them out."
        )
    rows = count_rows(args)
    if rows % args.train.batch_size:  # a rollout makes whole steps here: see count_all_steps
        raise UsageError(
            f"Expected --train.batch_size to divide a rollout's {rows} rows, as OpenRLHF's controller "
            f"(--train.async_enable) plans learning rates by its batches, got {args.train.batch_size}."
        )


def check_a_prompt_fits(longest: int | None, max_len: int) -> None:
    """Raise UsageError if the longest response, ``--rollout.max_new_tokens``, leaves no token for a prompt."""
    if longest and longest >= max_len:
        raise UsageError(
            f"Expected --rollout.max_new_tokens < --data.max_len {max_len}, for a prompt to fit, got {longest}."
        )


def check_shared_gpus(args: SimpleNamespace) -> None:
    """Refuse groups that do not fit on the GPUs that they share, which upstream's ``train`` finds only once Ray has
    started, and for critic and reward the engines too.

    Raises:
        UsageError: the first group that does not fit.
    """
    train, gpus = args.train, args.actor.num_nodes * args.actor.num_gpus_per_node
    engines, size = args.vllm.num_engines, args.vllm.tensor_parallel_size
    if train.colocate_all and not train.async_enable and engines and engines * size != gpus:
        raise UsageError(
            f"Expected --vllm.num_engines × --vllm.tensor_parallel_size to be {gpus}, as the engines share the "
            f"actor's GPUs (--train.colocate_all), got {engines} × {size}."
        )
    pairs = []
    if (train.colocate_all or train.colocate_actor_ref) and args.algo.kl.init_coef > 0:
        pairs.append(("actor", "ref"))
    if train.colocate_critic_reward and args.critic.model_name_or_path:
        pairs.append(("critic", "reward"))
    elif train.colocate_all:
        for name, there in (("critic", args.critic.model_name_or_path), ("reward", not args.reward.remote_url)):
            section = getattr(args, name)
            if there and section.num_nodes * section.num_gpus_per_node > gpus:
                raise UsageError(
                    f"Expected --{name}.num_nodes × --{name}.num_gpus_per_node to be at most {gpus}, as the {name} "
                    f"shares the actor's GPUs (--train.colocate_all), got {section.num_nodes} × "
                    f"{section.num_gpus_per_node}."
                )
    for first, second in pairs:
        one, other = getattr(args, first), getattr(args, second)
        if (one.num_nodes, one.num_gpus_per_node) != (other.num_nodes, other.num_gpus_per_node):
            raise UsageError(
                f"Expected --{second}.num_nodes {one.num_nodes} and --{second}.num_gpus_per_node "
                f"{one.num_gpus_per_node}, as the {second} shares the {first}'s GPUs (--train.colocate_*), got "
                f"{other.num_nodes} and {other.num_gpus_per_node}."
            )
