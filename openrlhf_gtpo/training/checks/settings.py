"""Settings that contradict each other with any model and data: tables of conditions, each with its sentence.

A row is here if training would silently learn something else, or fail only after engines and models have loaded.
OpenRLHF, vLLM and DeepSpeed refuse other mistakes themselves within a minute. What upstream's own estimators do with a
setting is up to upstream.
"""

from collections.abc import Iterator

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.credit.old_policy import count_rows

Refusal = tuple[object, str]  # whether the rule is broken, and the sentence that says so


def refuse(*rules: Refusal) -> None:
    """Raise UsageError with the sentence of the first broken rule."""
    for broken, sentence in rules:
        if broken:
            raise UsageError(sentence)


def check_settings(args: Arguments) -> None:
    """Refuse settings that contradict each other with every backend.

    Raises:
        UsageError: the first contradiction.
    """
    refuse(*_every_run(args), *_deepspeed(args), *_shared_gpus(args))
    if args.train.async_enable:
        refuse(*_asynchronous(args))
    if args.algo.advantage.estimator in ESTIMATORS:
        refuse(*_entropy_weighted(args))
    _check_algorithm(args)


def check_images(args: Arguments, policy: Model) -> None:
    """Refuse images where a run would silently drop them, or lose them with a checkpoint.

    Raises:
        UsageError: the run would, or it asks for entropy credit with a policy that reads images.
    """
    estimator, images = args.algo.advantage.estimator, args.data.max_images_per_prompt
    if estimator in ESTIMATORS and (images or policy.reads_images):
        raise UsageError(
            f"--algo.advantage.estimator {estimator} does not support images yet, which {policy} with "
            f"--data.max_images_per_prompt {images} reads; use a text model, or one of OpenRLHF's own estimators."
        )
    without = ["--train.async_enable"] if args.train.async_enable else []  # its checkpoints hold rows
    without += [f"{group.flags}.*" for group in args.vllm.others]
    without += [] if args.rollout.is_sampled else ["rows that the run does not sample"]
    if images and without:
        raise UsageError(
            f"--data.max_images_per_prompt {images} cannot be combined with {without[0]}, which drops images; leave "
            "one of them out."
        )


def _every_run(args: Arguments) -> Iterator[Refusal]:
    """Settings that fail or mislead with every estimator."""
    from transformers import SchedulerType

    transfer = "because OpenRLHF's own transfer has no checksums; leave one of them out."
    schedules = [kind.value for kind in SchedulerType]
    for role in ("actor", "critic") if args.critic.model_name_or_path else ("actor",):
        schedule = getattr(args, role).lr_scheduler
        yield (
            schedule not in schedules,
            f"Expected --{role}.lr_scheduler to be one of {', '.join(schedules)}, got {schedule}.",
        )
    yield args.ds.load_in_4bit, "--ds.load_in_4bit packs weights into bytes that vLLM cannot load; leave it out."
    yield (
        args.vllm.sync_checksum and args.vllm.sync_with_ray,
        f"--vllm.sync_checksum cannot be combined with --vllm.sync_with_ray, {transfer}",
    )
    yield (
        args.vllm.sync_checksum and args.actor.freeze_visual_encoder,
        "--vllm.sync_checksum cannot be combined with --actor.freeze_visual_encoder, which sends only a part of the "
        "model; leave one of them out.",
    )
    yield (
        args.rollout.is_sampled and not args.data.prompt_dataset,
        "--data.prompt_dataset is missing; give a data set.",
    )


def _deepspeed(args: Arguments) -> Iterator[Refusal]:
    """Settings with which DeepSpeed 0.19.6 fails once engines are up, or silently trains otherwise. Outside
    zero/stage_1_and_2.py and stage3.py Muon is plain SGD. Without ZeRO a loss in fp16 is not scaled (engine.py,
    backward). Where ZeRO 2 divides gradients, it does not add them up in fp32 (stage_1_and_2.py)."""
    ds, stage, zero = args.ds, args.ds.zero_stage, f"--ds.zero_stage {args.ds.zero_stage}"
    in_fp32, added = ds.grad_accum_dtype == "fp32", f"--ds.grad_accum_dtype {ds.grad_accum_dtype}"
    yield (
        ds.grad_accum_dtype not in (None, "bf16", "fp16", "fp32"),
        f"Expected --ds.grad_accum_dtype to be bf16, fp16 or fp32, got {ds.grad_accum_dtype}.",
    )
    # For each model on DeepSpeed: optimizer, precision and offload against the ZeRO stage.
    roles = ["actor"] if args.actor.backend == "deepspeed" else []
    for role in [*roles, "critic"] if args.critic.model_name_or_path else roles:
        section = getattr(args, role)
        muon, optim = section.optim == "muon", f"--{role}.optim muon"
        for broken, setting, other, remedy in (
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
            yield broken, f"{setting} does not work with {other}; {remedy}."
        # Otherwise steps would be larger, and fewer than the learning rate's schedule counts.
        replicas = section.num_nodes * section.num_gpus_per_node // (ds.ring_attn_size * ds.tensor_parallel_size)
        needed = min(replicas, count_rows(args))
        yield (
            args.train.batch_size < needed,
            f"Expected --train.batch_size >= {needed}, so that every replica of the {role} has a row, got "
            f"{args.train.batch_size}.",
        )


def _shared_gpus(args: Arguments) -> Iterator[Refusal]:
    """Groups that would need more GPUs than they share, for which Ray would wait. Upstream compares the other
    sizes."""
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    if not args.train.colocate_all or (args.train.colocate_critic_reward and args.critic.model_name_or_path):
        return
    for name, there in (("critic", args.critic.model_name_or_path), ("reward", not args.reward.remote_url)):
        nodes, per_node = getattr(args, name).num_nodes, getattr(args, name).num_gpus_per_node
        yield (
            there and nodes * per_node > gpus,
            f"Expected --{name}.num_nodes × --{name}.num_gpus_per_node to be at most {gpus}, as the {name} shares the "
            f"actor's GPUs (--train.colocate_all), got {nodes} × {per_node}.",
        )


def _entropy_weighted(args: Arguments) -> Iterator[Refusal]:
    """Settings with which GTPO, GRPO-S and the like would learn nothing, or from wrong numbers."""
    # Sampling: several responses, from the whole distribution.
    estimator, rollout = args.algo.advantage.estimator, args.rollout
    yield (
        rollout.n_samples_per_prompt < 2,
        f"Expected --rollout.n_samples_per_prompt >= 2, because {estimator} compares a prompt's responses, got "
        f"{rollout.n_samples_per_prompt}.",
    )
    yield (
        rollout.top_p != 1,
        f"--rollout.top_p {rollout.top_p:g} cannot be combined with --algo.advantage.estimator {estimator}, whose "
        "entropies cover the whole distribution; leave it out.",
    )
    yield (
        ESTIMATORS[estimator].leaves_out and args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss,
        f"--algo.advantage.estimator {estimator} leaves tokens without credit out of training, but the KL in the "
        "reward gives them some; give --algo.kl.use_loss, or --algo.kl.init_coef 0.",
    )
    # Lengths: the penalty counts back from a limit, and a prompt has to fit beside the response.
    buffer, longest = args.reward.overlong_buffer_len, rollout.max_new_tokens
    yield (
        buffer is not None and not longest,
        f"--reward.overlong_buffer_len {buffer or 0:g} counts back from the longest response, but only --data.max_len "
        "limits it, together with its prompt; give --rollout.max_new_tokens too.",
    )
    yield (
        buffer is not None and longest and not 0 < buffer < longest,
        f"Expected 0 < --reward.overlong_buffer_len < {longest} tokens, got {buffer or 0:g}.",
    )
    yield (
        longest and longest >= args.data.max_len,
        f"Expected --rollout.max_new_tokens < --data.max_len {args.data.max_len}, for a prompt to fit, got {longest}.",
    )
    yield (  # 0 would make all responses to a prompt equal
        not rollout.temperature > 0,
        f"Expected --rollout.temperature > 0, got {rollout.temperature:g}.",
    )


def _asynchronous(args: Arguments) -> Iterator[Refusal]:
    """Settings that mislead training on rows of the previous step's policy, or that sampling ahead does not honor."""
    estimator, train, batch = args.algo.advantage.estimator, args.train, args.rollout.vllm_generate_batch_size
    yield (
        estimator in ESTIMATORS and args.rollout.entropy != "sampler",
        f"--train.async_enable with --algo.advantage.estimator {estimator} needs the entropies of the policy that "
        "sampled a token, but the actor has changed since; give --rollout.entropy sampler.",
    )
    yield (
        args.algo.advantage.is_correction_level == "off",
        "--train.async_enable trains on rows of an earlier policy and needs a correction for that; give "
        "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
        "--algo.advantage.is_correction_threshold 5 too.",
    )
    if train.partial_rollout_enable:
        yield from _in_flight(args)
    for broken, flag, why in (
        (train.async_queue_size > 1, f"--train.async_queue_size {train.async_queue_size}", "one rollout is ahead"),
        (
            batch > args.rollout.batch_size,
            f"--rollout.vllm_generate_batch_size {batch}",
            f"a rollout has --rollout.batch_size {args.rollout.batch_size} prompts",
        ),
    ):
        yield broken, f"{flag} cannot be combined with --train.async_enable: {why}; leave one of them out."


def _in_flight(args: Arguments) -> Iterator[Refusal]:
    """Settings that weights changing within a response would make random, or unknown."""
    yield (
        args.rollout.entropy != "sampler",
        "--train.partial_rollout_enable needs to know which weights drew a token, which only vLLM's sampler reports, "
        "with entropies; give --rollout.entropy sampler, and with OpenRLHF's estimators --logger.entropy_enable too.",
    )
    for broken, flag, why in (
        (
            args.train.full_determinism_enable and args.train.max_staleness > 0,
            "--train.full_determinism_enable",
            "timing decides where weights change within a response; leave one of them out, or give "
            "--train.max_staleness 0",
        ),
        (
            args.vllm.sync_with_ray,
            "--vllm.sync_with_ray",
            "OpenRLHF's transfer does not tell engines the step of the weights; leave one of them out",
        ),
    ):
        yield broken, f"{flag} cannot be combined with --train.partial_rollout_enable: {why}."


def _check_algorithm(args: Arguments) -> None:
    """Refuse what estimator or loss would refuse later, in processes that have loaded a model by then."""
    from openrlhf_gtpo.training.credit.loss import make_policy_loss

    entropy_credit(args)
    try:
        make_policy_loss(args)
    except UsageError:
        raise
    except (AssertionError, ValueError) as error:
        raise UsageError(
            "--actor.eps_clip, --actor.eps_clip_low_high, --actor.dual_clip or --algo.advantage.is_correction_*: "
            f"{error}"
        ) from error
