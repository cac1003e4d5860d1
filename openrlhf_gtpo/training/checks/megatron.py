"""Refuses, before any engine starts, what is sure to fail with ``--actor.backend megatron``, for every estimator."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import check_checkpoint, newest_whole
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, WorldSizeError, check_layout, legal_tensor_parallel_sizes
from openrlhf_gtpo.platform.files import WEIGHTS
from openrlhf_gtpo.training.checks.models import check_model
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of, layout_of, megatron_flag, refusals_name_flags
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides

_BACKEND = "--actor.backend megatron"


def check_megatron(args: SimpleNamespace) -> None:
    """Raise UsageError for the first thing that the Megatron actor cannot do; do nothing with another backend."""
    if args.actor.backend != "megatron":
        return
    layout, fp8 = layout_of(args), fp8_of(args)
    _check_modes(args, layout)
    name = args.actor.model_name_or_path
    config = check_model(name, "--actor.model_name_or_path", args.actor.trust_remote_code)
    if Path(name).is_dir() and not any(Path(name).glob(WEIGHTS)):
        raise UsageError(
            f"--actor.model_name_or_path {name} has no {WEIGHTS} files, the one format that {_BACKEND} reads."
        )
    with refusals_name_flags():
        _check_world_size(config, layout, args.actor, "actor")
        if args.algo.kl.init_coef > 0:
            _check_world_size(config, layout, args.ref, "ref")
        if fp8 is not None:
            check_fp8(fp8, config, layout, cuda=platform.chosen_platform() == "cuda")
            if fp8.primary_weights and not args.megatron.use_distributed_optimizer:
                raise UsageError(
                    "--megatron.fp8_param needs Megatron's distributed optimizer, which quantizes its float32 shards; "
                    "leave --no-megatron.use_distributed_optimizer out."
                )
        replicas = layout.data_parallel_size(args.actor.num_nodes * args.actor.num_gpus_per_node)
        if args.train.batch_size % replicas:
            raise UsageError(
                f"--train.batch_size {args.train.batch_size} cannot be shared evenly by the {replicas} data-parallel "
                f"replicas of the actor; give a multiple of {replicas}."
            )
        if args.ckpt.load_enable:
            folder, tag = Path(args.ckpt.path) / "_actor", args.ckpt.load_tag
            try:
                path = folder / tag if tag else newest_whole(folder)
                if path is not None:
                    check_checkpoint(path, config, dtype="bfloat16", for_training=True)
            except CheckpointError as error:
                raise UsageError(f"--ckpt.load_enable: {error}") from error
        parse_overrides(args.megatron.override)
        parse_overrides(args.megatron.ddp, "ddp")


def _check_world_size(config: Any, layout: Layout, section: SimpleNamespace, name: str) -> None:
    """Refuse a layout that the model, the processes of one group or its nodes do not allow."""
    try:
        world_size = section.num_nodes * section.num_gpus_per_node
        check_layout(config, layout, world_size)
    except WorldSizeError as error:
        raise UsageError(
            f"--{name}.num_nodes {section.num_nodes} × --{name}.num_gpus_per_node {section.num_gpus_per_node}: "
            f"{error.with_flags(megatron_flag)}"
        ) from error
    size, on_node = layout.tensor_model_parallel_size, section.num_gpus_per_node
    if on_node % size and platform.chosen_platform() == "cuda":  # without CUDA, all nodes are one host
        fitting = [str(legal) for legal in legal_tensor_parallel_sizes(config) if on_node % legal == 0]
        raise UsageError(
            f"--megatron.tensor_model_parallel_size {size} does not divide --{name}.num_gpus_per_node {on_node}, so "
            f"tensor-parallel groups would cross nodes; sizes that fit: {', '.join(fitting)}."
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
            f"--reward.model_name_or_path {args.reward.model_name_or_path} runs on DeepSpeed, where every process "
            f"needs a batch of its own, but with --megatron.*_parallel_size {layout.model_parallel_size} processes "
            "share each batch; serve it behind --reward.remote_url URL, or leave these sizes at 1."
        )
    nondeterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if args.train.full_determinism_enable and nondeterministic != "0":
        raise UsageError(
            "--train.full_determinism_enable cannot be combined with NVTE_ALLOW_NONDETERMINISTIC_ALGO="
            f"{nondeterministic} in the environment; unset it, or leave the flag out."
        )
    images, aux_loss = args.data.max_images_per_prompt, args.actor.aux_loss_coef
    offload = "leave it out, or give --megatron.offload to move the states to host memory between phases"
    for unwanted, flag, remedy in (
        (args.train.async_enable, "--train.async_enable", "leave it out"),
        (args.train.enable_ema, "--train.enable_ema", "leave it out"),
        (args.ds.adam_offload, "--ds.adam_offload", offload),
        (args.ds.param_dtype != "bf16", f"--ds.param_dtype {args.ds.param_dtype}", "give bf16"),
        (args.actor.optim != "adam", f"--actor.optim {args.actor.optim}", "give adam"),
        (aux_loss > 0, f"--actor.aux_loss_coef {aux_loss:g}", "leave it at 0"),
        (args.vllm.sync_with_ray, "--vllm.sync_with_ray", "leave it out"),
        (images > 0, f"--data.max_images_per_prompt {images}", "use text prompts"),
    ):
        if unwanted:
            raise UsageError(f"{flag} is not offered by {_BACKEND}; {remedy}, or use --actor.backend deepspeed.")
