"""Checks of settings and models that cannot have adapters."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import MANIFEST, newest_whole, read_manifest
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.lora import ALL_LINEAR, LoraOptions
from openrlhf_gtpo.lora.folder import fingerprint, refusal, without_comparison
from openrlhf_gtpo.megatron.families import FAMILIES
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.settings import Refusal, refuse

_SMALL_LR = 5e-6
_HEADS = {"lm_head", "embed_tokens", "wte", "embed_out"}


def check_lora(args: Arguments, model: Model) -> None:
    """Refuse settings, models and checkpoints that do not fit the run's adapters.

    Raises:
        UsageError: the first of them.
    """
    refuse(*_settings(args), *_modules(args, model))
    if args.ckpt.load_enable:
        _check_checkpoint(args, model)
    if model.has_experts:
        print(
            "Experts and routers of a mixture of experts get no adapters; attention, shared experts and dense "
            "layers do.",
            file=sys.stderr,
        )
    if args.actor.adam.lr < _SMALL_LR:
        print(
            f"Adapters need about ten times the learning rate of full training; this run has {args.actor.adam.lr:g} "
            "(--actor.adam.lr).",
            file=sys.stderr,
        )


def _check_checkpoint(args: Arguments, model: Model) -> None:
    """Refuse to resume from adapters with another rank, scale, targets or base."""
    folder, tag, lora = Path(args.ckpt.path) / "_actor", args.ckpt.load_tag, args.actor.lora
    assert lora is not None
    try:
        path = folder / tag if tag else newest_whole(folder)
        if path is None or not (path / MANIFEST).is_file():
            return
        own: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha}
        if lora.targets != ALL_LINEAR:  # the ranks know which modules these are
            own["targets"] = sorted(lora.targets)
        if model.is_local:
            own["base"] = fingerprint(model.folder)
        saved = read_manifest(path).get("lora")
        found = refusal(saved, own)
    except CheckpointError as error:
        raise UsageError(f"--ckpt.load_enable: {error}") from error
    if found:
        raise UsageError(f"--ckpt.load_enable: {path} {found}")
    if saved and (note := without_comparison(saved)):
        print(f"{path} {note}", file=sys.stderr)


def _modules(args: Arguments, model: Model) -> Iterator[Refusal]:
    """Refusals that depend on the model. A target that names no module would silently be ignored."""
    megatron, flag, lora = args.actor.backend == "megatron", "--ds.lora.target_modules", args.actor.lora
    assert lora is not None
    yield (
        megatron and model.has_experts,
        f"--ds.lora.rank {lora.rank} is not offered for mixtures of experts with --actor.backend megatron; give "
        "deepspeed, or leave it out.",
    )
    kind = model.config.model_type
    yield (
        megatron and kind in FAMILIES and FAMILIES[kind].is_stacked,
        f"--ds.lora.rank {lora.rank} does not work with {kind} on --actor.backend megatron, because its checkpoints "
        "have query, key and value in one matrix; give deepspeed, or leave it out.",
    )
    matrices = [name.removesuffix(".weight") for name, shape in model.weight_shapes.items() if len(shape) == 2]
    known = {name.rsplit(".", 1)[-1] for name in matrices if LoraOptions(1, 1).adapts(name)}
    unknown = sorted({*lora.targets} - known) if known and lora.targets != ALL_LINEAR else []
    yield (
        bool(unknown),
        f"{flag} {' '.join(unknown)}: {model} has no such matrix"
        f"{' beside its experts and routers, which get no adapters' if model.has_experts else ''}; it has "
        f"{', '.join(sorted(known - _HEADS))}.",
    )


def _settings(args: Arguments) -> Iterator[Refusal]:
    # Targets and dropout.
    lora, ds = args.actor.lora, args.ds
    assert lora is not None
    rank, megatron = f"--ds.lora.rank {lora.rank}", args.actor.backend == "megatron"
    heads = sorted(_HEADS.intersection(lora.targets))
    yield (
        bool(heads),
        f"--ds.lora.target_modules {' '.join(heads)}: head and embeddings cannot have adapters, because the LM head's "
        "kernels and tied weights read only their weights; leave it out, or give all-linear.",
    )
    yield (
        ds.lora.dropout > 0,
        f"--ds.lora.dropout {ds.lora.dropout:g} would train another policy than the engines sample from; leave it at "
        "0.",
    )
    # Flags that do not know adapters.
    for broken, flag, remedy in (
        (args.train.enable_ema, "--train.enable_ema", "leave it out"),
        (args.actor.optim != "adam", f"--actor.optim {args.actor.optim}", "give adam"),
        (args.critic.model_name_or_path, "a critic", "choose an estimator without one (gtpo, grpo_s, rloo, …)"),
        (args.vllm.sync_with_ray, "--vllm.sync_with_ray", "leave it out"),
        (not megatron and ds.param_dtype == "fp16", "--ds.param_dtype fp16", "give bf16"),
        (
            not megatron and ds.tensor_parallel_size > 1,
            f"--ds.tensor_parallel_size {ds.tensor_parallel_size}",
            "leave it at 1",
        ),
        (ds.use_universal_ckpt, "--ds.use_universal_ckpt", "leave it out"),
        (megatron and args.megatron.fp8 is not None, f"--megatron.fp8 {args.megatron.fp8}", "leave it out"),
    ):
        yield broken, f"{rank} does not work with {flag}; {remedy}."
