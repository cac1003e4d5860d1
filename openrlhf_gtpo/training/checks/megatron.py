"""Checks for ``--actor.backend megatron``: settings that fail with it or that it would ignore."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import check_checkpoint, newest_whole
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, WorldSizeError, check_layout
from openrlhf_gtpo.training.arguments import Actor, Arguments, Ref
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.settings import Refusal, refuse
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of, layout_of, megatron_flag, refusals_name_flags
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides

_BACKEND = "--actor.backend megatron"


def check_megatron(args: Arguments, model: Model) -> None:
    """Refuse settings that the Megatron actor cannot honor; do nothing with another backend.

    Raises:
        UsageError: the first such setting.
    """
    if args.actor.backend != "megatron":
        return
    layout, fp8 = layout_of(args), fp8_of(args)
    refuse(*_settings(args, layout))
    parse_overrides(args.megatron.override)
    parse_overrides(args.megatron.ddp, "ddp")
    model.check_safetensors()
    with refusals_name_flags():
        _check_world_size(model.config, layout, args.actor, "actor")
        if args.algo.kl.init_coef > 0:
            _check_world_size(model.config, layout, args.ref, "ref")
        if fp8 is not None:
            check_fp8(fp8, model.config, layout, cuda=platform.chosen_platform() == "cuda")
    replicas = layout.data_parallel_size(args.actor.num_nodes * args.actor.num_gpus_per_node)
    if args.train.batch_size % replicas:
        raise UsageError(
            f"--train.batch_size {args.train.batch_size} cannot be shared evenly by the {replicas} data-parallel "
            f"replicas of the actor; give a multiple of {replicas}."
        )
    if args.ckpt.load_enable:
        _check_checkpoint(args, model.config)


def _settings(args: Arguments, layout: Layout) -> Iterator[Refusal]:
    # Other models beside the actor.
    megatron, in_fp8 = args.megatron, args.megatron.fp8 is not None
    yield (
        args.critic.model_name_or_path,
        f"--algo.advantage.estimator {args.algo.advantage.estimator} trains a critic beside the actor, which "
        f"{_BACKEND} cannot; choose an estimator without a critic (gtpo, grpo_s, group_norm, rloo, …).",
    )
    yield (
        args.reward.model_name_or_path and not args.reward.remote_url and layout.model_parallel_size > 1,
        f"--reward.model_name_or_path {args.reward.model_name_or_path} runs on DeepSpeed, where every process needs a "
        f"batch of its own, but with --megatron.*_parallel_size {layout.model_parallel_size} processes share each "
        "batch; serve it behind --reward.remote_url URL, or leave these sizes at 1.",
    )
    # Determinism, and flags of OpenRLHF that Megatron does not implement.
    nondeterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    yield (
        args.train.full_determinism_enable and nondeterministic != "0",
        f"--train.full_determinism_enable cannot be combined with NVTE_ALLOW_NONDETERMINISTIC_ALGO={nondeterministic} "
        "in the environment; unset it, or leave the flag out.",
    )
    aux_loss = args.actor.aux_loss_coef
    for broken, flag, remedy in (
        (args.train.enable_ema, "--train.enable_ema", "leave it out"),
        (args.ds.adam_offload, "--ds.adam_offload", "give --megatron.offload to move states to host memory"),
        (args.ds.param_dtype != "bf16", f"--ds.param_dtype {args.ds.param_dtype}", "give bf16"),
        (args.actor.optim != "adam", f"--actor.optim {args.actor.optim}", "give adam"),
        (aux_loss > 0, f"--actor.aux_loss_coef {aux_loss:g}", "leave it at 0"),
        (args.vllm.sync_with_ray, "--vllm.sync_with_ray", "leave it out"),
    ):
        yield broken, f"{flag} does not work with {_BACKEND}; {remedy}, or use --actor.backend deepspeed."
    yield (
        in_fp8 and megatron.fp8_param and not megatron.use_distributed_optimizer,
        "--megatron.fp8_param needs Megatron's distributed optimizer, which quantizes its float32 shards; leave out "
        "--no-megatron.use_distributed_optimizer.",
    )


def _check_world_size(config: Any, layout: Layout, section: Actor | Ref, name: str) -> None:
    """Refuse a layout that the model or the processes of one group do not allow."""
    try:
        check_layout(config, layout, section.num_nodes * section.num_gpus_per_node)
    except WorldSizeError as error:
        raise UsageError(
            f"--{name}.num_nodes {section.num_nodes} × --{name}.num_gpus_per_node {section.num_gpus_per_node}: "
            f"{error.with_flags(megatron_flag)}"
        ) from error


def _check_checkpoint(args: Arguments, config: Any) -> None:
    """Refuse to resume from a damaged checkpoint or from one of another model."""
    folder, tag = Path(args.ckpt.path) / "_actor", args.ckpt.load_tag
    try:
        path = folder / tag if tag else newest_whole(folder)
        if path is not None:
            check_checkpoint(path, config, dtype="bfloat16", for_training=True)
    except CheckpointError as error:
        raise UsageError(f"--ckpt.load_enable: {error}") from error
