"""What can be known to fail with ``--actor.backend megatron`` before any engine starts. Holds for every estimator."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.checks import check_model
from openrlhf_gtpo.integration.command_line.megatron_flags import fp8_of, layout_of
from openrlhf_gtpo.integration.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointError
from openrlhf_gtpo.megatron.checkpoint.folder import check_latest
from openrlhf_gtpo.megatron.fp8.options import check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError, ModelError, WorldSizeError, check_layout
from openrlhf_gtpo.megatron.train.overrides import OverrideError, parse_overrides

_BACKEND = "--actor.backend megatron"


def check_megatron(args: SimpleNamespace) -> None:
    """Raise UsageError for the first thing that the Megatron actor cannot do; nothing with another backend."""
    if args.actor.backend != "megatron":
        return
    layout = layout_of(args)
    _check_modes(args, layout)
    trust = args.actor.trust_remote_code
    config = check_model(args.actor.model_name_or_path, "--actor.model_name_or_path", trust)
    if hasattr(config, "vision_config"):
        raise UsageError(
            f"--actor.model_name_or_path {args.actor.model_name_or_path} is a vision-language model, which "
            f"{_BACKEND} does not train; use --actor.backend deepspeed."
        )
    _check_layout(config, layout, args.actor, "actor")
    if args.algo.kl.init_coef > 0:
        _check_layout(config, layout, args.ref, "ref")
    _check_fp8(args, config, layout)
    _check_batch(args, layout)
    if args.ckpt.load_enable:
        _check_checkpoint(args, config)
    try:
        parse_overrides(args.megatron.override)
    except OverrideError as error:
        raise UsageError(str(error)) from error


def _check_layout(config: Any, layout: Layout, section: SimpleNamespace, name: str) -> None:
    """Refuse a layout that the model or the processes of one group do not allow."""
    world_size = section.num_nodes * section.num_gpus_per_node
    try:
        check_layout(config, layout, world_size, cuda=platform.chosen_platform() == "cuda")
    except WorldSizeError as error:
        raise UsageError(
            f"--{name}.num_nodes {section.num_nodes} × --{name}.num_gpus_per_node {section.num_gpus_per_node}: {error}"
        ) from error
    except ModelError as error:
        raise UsageError(f"{_BACKEND}: {error}") from error
    except LayoutError as error:
        raise UsageError(str(error)) from error


def _check_fp8(args: SimpleNamespace, config: Any, layout: Layout) -> None:
    fp8 = fp8_of(args)
    if fp8 is None:
        return
    try:
        check_fp8(fp8, config, layout, cuda=platform.chosen_platform() == "cuda")
    except LayoutError as error:
        raise UsageError(str(error)) from error
    if fp8.primary_weights and not args.megatron.use_distributed_optimizer:
        raise UsageError(
            "--megatron.fp8_param needs Megatron's distributed optimizer, which quantises its float32 shards; leave "
            "--no-megatron.use_distributed_optimizer out."
        )
    steps, gate = args.megatron.fp8_audit_steps, args.megatron.fp8_audit_gate
    if steps < 0:
        raise UsageError(f"Expected --megatron.fp8_audit_steps >= 0, got {steps}; 0 means no audit.")
    if steps and entropy_credit(args) is None:
        raise UsageError(
            f"--megatron.fp8_audit_steps {steps} compares entropy credit, which --algo.advantage.estimator "
            f"{args.algo.advantage.estimator} does not give; choose gtpo or grpo_s, or leave it out."
        )
    if gate is not None and not 0 <= gate <= 1:
        raise UsageError(f"Expected --megatron.fp8_audit_gate from 0 to 1, got {gate:g}.")
    if gate is not None and not steps:
        raise UsageError(
            f"--megatron.fp8_audit_gate {gate:g} is read at audits; give --megatron.fp8_audit_steps N too."
        )


def _check_checkpoint(args: SimpleNamespace, config: Any) -> None:
    """Refuse a checkpoint that this run cannot go on from."""
    try:
        check_latest(Path(args.ckpt.path) / "_actor", config, dtype="bfloat16")
    except CheckpointError as error:
        raise UsageError(f"--ckpt.load_enable: {error}") from error


def _check_batch(args: SimpleNamespace, layout: Layout) -> None:
    replicas = layout.data_parallel_size(args.actor.num_nodes * args.actor.num_gpus_per_node)
    if args.train.batch_size % replicas:
        raise UsageError(
            f"--train.batch_size {args.train.batch_size} cannot be shared evenly by the {replicas} data-parallel "
            f"replicas of the actor; give a multiple of {replicas}."
        )
    if args.train.max_tokens_per_gpu < 1:
        raise UsageError(
            f"--train.max_tokens_per_gpu {args.train.max_tokens_per_gpu} leaves no room for a token, and {_BACKEND} "
            "fills its micro-batches by it; give at least 1."
        )


def _check_modes(args: SimpleNamespace, layout: Layout) -> None:
    """Refuse what OpenRLHF's DeepSpeed actor offers and the Megatron actor does not."""
    if args.critic.model_name_or_path:
        raise UsageError(
            f"--algo.advantage.estimator {args.algo.advantage.estimator} trains a critic beside the actor, which "
            f"{_BACKEND} does not; choose an estimator without one (gtpo, grpo_s, group_norm, rloo, …)."
        )
    if args.reward.model_name_or_path and not args.reward.remote_url and layout.model_parallel_size > 1:
        raise UsageError(
            f"--reward.model_name_or_path {args.reward.model_name_or_path} runs on DeepSpeed and takes a batch for "
            f"each process, while --megatron.*_parallel_size gives each batch to {layout.model_parallel_size} of them; "
            "serve it behind --reward.remote_url URL, or leave these sizes at 1."
        )
    for unwanted, flag, remedy in (
        (args.train.async_enable, "--train.async_enable", "leave it out"),
        (args.train.enable_ema, "--train.enable_ema", "leave it out"),
        (
            args.ds.adam_offload,
            "--ds.adam_offload",
            "leave it out, or give --megatron.offload to move the states to host memory between phases",
        ),
        (args.ds.param_dtype != "bf16", f"--ds.param_dtype {args.ds.param_dtype}", "give bf16"),
        (args.actor.optim != "adam", f"--actor.optim {args.actor.optim}", "give adam"),
        (args.actor.aux_loss_coef > 0, f"--actor.aux_loss_coef {args.actor.aux_loss_coef:g}", "leave it at 0"),
        (args.vllm.sync_with_ray, "--vllm.sync_with_ray", "leave it out"),
        (
            args.data.max_images_per_prompt > 0,
            f"--data.max_images_per_prompt {args.data.max_images_per_prompt}",
            "use text prompts",
        ),
    ):
        if unwanted:
            raise UsageError(f"{flag} is not offered by {_BACKEND}; {remedy}, or use --actor.backend deepspeed.")
