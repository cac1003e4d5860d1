"""Settings of the Megatron-core actor, and their consequences for OpenRLHF's flags."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import MODES, RECIPES, Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import RECOMPUTE, SIZES, Layout, LayoutError, ModelError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Ignored, Need, Setting, Values

_LAYOUT_HELP = {
    "tensor_model_parallel_size": "GPUs that share every matrix; must divide the model's attention heads and "
    "key-value heads. Keep them within one node",
    "pipeline_model_parallel_size": "stages to split the layers into; must divide the number of layers",
    "context_parallel_size": "GPUs that share every sequence, for long sequences",
    "expert_model_parallel_size": "GPUs that share the experts of a mixture of experts; must divide the number of "
    "experts and the data-parallel size, actor GPUs ÷ (tensor × pipeline × context)",
}

# Settings of :func:`layout_of`.
LAYOUT = (
    *(Setting(f"megatron.{name}", 1, help) for name, help in _LAYOUT_HELP.items()),
    Setting(
        "megatron.sequence_parallel",
        False,
        "also shard the activations between matrix products over the tensor-parallel GPUs: less memory, same result",
    ),
)


def fp8_of(args: Arguments) -> Fp8Options | None:
    """Return the options of ``--megatron.fp8*``; None if FP8 is off."""
    megatron = args.megatron
    if megatron.fp8 is None:
        return None
    return Fp8Options(
        megatron.fp8,
        megatron.fp8_recipe,
        megatron.num_layers_at_start_in_bf16,
        megatron.num_layers_at_end_in_bf16,
        megatron.fp8_param,
    )


def layout_of(args: Arguments) -> Layout:
    """Return the parallel sizes of ``--megatron.*``.

    Raises:
        UsageError: a size is below 1.
    """
    with refusals_name_flags():
        return Layout(**{name: getattr(args.megatron, name) for name in (*SIZES, "sequence_parallel")})


@contextmanager
def refusals_name_flags() -> Iterator[None]:
    """Turn a LayoutError of Megatron's rooms into a UsageError with ``--megatron.*`` flags."""
    try:
        yield
    except ModelError as error:
        raise UsageError(f"--actor.backend megatron: {error}") from error
    except LayoutError as error:
        raise UsageError(error.with_flags(megatron_flag)) from error


def megatron_flag(name: str) -> str:
    """Return the flag of the layout or FP8 setting ``name``."""
    return f"--megatron.{name}"


def refuse_stray(values: Values, given: Iterable[str]) -> None:
    """Raise UsageError for ``--megatron.*`` with another backend, or FP8 settings with FP8 off, among ``given``
    destinations."""
    megatron_flags = sorted(name for name in given if name.startswith("megatron."))
    if megatron_flags and values["actor.backend"] != "megatron":
        raise UsageError(f"--{megatron_flags[0]} needs --actor.backend megatron; add it, or leave the flag out.")
    fp8_flags = [name for name in megatron_flags if "fp8_" in name or name.endswith("_in_bf16")]
    if fp8_flags and values["megatron.fp8"] is None:
        raise UsageError(f"--{fp8_flags[0]} needs --megatron.fp8; add it, or leave the flag out.")


def translate_megatron(values: dict[str, Any], given: frozenset[str]) -> None:
    """Translate the Megatron actor's flags to OpenRLHF's, and vice versa.

    OpenRLHF sends each batch to ``ds.ring_attn_size * ds.tensor_parallel_size`` consecutive ranks, and counts its
    data-parallel ranks by them. With this backend those are the ranks of one model replica.
    """
    refuse_stray(values, given)
    if values["actor.backend"] != "megatron":
        return
    for flag, equivalent in (
        ("ds.tensor_parallel_size", "tensor_model_parallel_size"),
        ("ds.ring_attn_size", "context_parallel_size"),
    ):
        if values[flag] != 1:
            raise UsageError(
                f"--{flag} {values[flag]} works only on DeepSpeed; with --actor.backend megatron give "
                f"--megatron.{equivalent}."
            )
    with refusals_name_flags():
        layout = Layout(**{name: values[f"megatron.{name}"] for name in SIZES})
    values["ds.tensor_parallel_size"] = layout.model_parallel_size
    values["ds.enable_sleep"] = values["megatron.offload"] = values["ds.enable_sleep"] or values["megatron.offload"]
    values["ref.offload"] = values["ref.offload"] or values["megatron.offload"]
    if values["actor.gradient_checkpointing_enable"] and "megatron.recompute" not in given:
        values["megatron.recompute"] = "full"


def _scores_on_deepspeed(values: Values) -> bool:
    """True if a reward model runs on DeepSpeed beside the actor."""
    reward_url = values["reward.remote_url"] or values["train.agent_func_path"]
    return bool(values["reward.model_name_or_path"] and not reward_url)


MEGATRON = Group(
    "megatron",
    "training on Megatron-core with tensor, pipeline, context and expert parallelism",
    (
        Setting(
            "actor.backend",
            "deepspeed",
            "what trains the policy and runs the reference: OpenRLHF's DeepSpeed models, or Megatron-core with "
            "tensor, pipeline, context and expert parallelism (models in docs/megatron.md)",
            choices=("deepspeed", "megatron"),
        ),
        *LAYOUT,
        Setting(
            "megatron.recompute",
            "none",
            "activations to recompute in the backward pass instead of storing: none, the MLP's or experts' "
            "(selective), or all (full, also set by --actor.gradient_checkpointing_enable)",
            choices=RECOMPUTE,
        ),
        Setting(
            "megatron.lm_head_mb",
            None,
            "temporary memory of the LM head, in MiB (default: 1024; on a CPU host 256)",
            int,
            bounds=Bounds(at_least=64),
        ),
        Setting("megatron.use_distributed_optimizer", True, "shard optimizer states over the data-parallel GPUs"),
        Setting(
            "megatron.offload",
            False,
            "move parameters, gradients and optimizer states to host memory between phases of a colocated run, and "
            "the reference model between its forward passes (--ref.offload: only the latter)",
        ),
        Setting(
            "megatron.fp8",
            None,
            "compute the decoder's matrix products in FP8: hybrid (E4M3, gradients E5M2) or e4m3 on Hopper or Ada "
            "with Transformer Engine; emulated is slow and runs on any host (default: off)",
            choices=MODES,
            page="fp8.md",
        ),
        Setting(
            "megatron.fp8_recipe",
            "blockwise",
            "source of FP8's scales: earlier micro-batches (delayed), the whole tensor (tensorwise), or blocks of 1 x "
            "128 and 128 x 128 (blockwise: Hopper, torch built for CUDA 12.9+)",
            choices=RECIPES,
        ),
        Setting(
            "megatron.fp8_param",
            False,
            "keep the decoder's weights only in FP8, beside the optimizer's unchanged float32 copy: half the weight "
            "memory; not with the delayed recipe",
        ),
        *(
            Setting(
                f"megatron.num_layers_at_{end}_in_bf16",
                0,
                f"decoder layers at the {end} of the model that stay in BF16",
                metavar="N",
            )
            for end in ("start", "end")
        ),
        Setting(
            "megatron.override",
            [],
            "set a field of Megatron's TransformerConfig, such as moe_router_dtype=fp32; may be repeated",
            metavar="FIELD=VALUE",
        ),
        Setting(
            "megatron.ddp",
            [],
            "set a field of Megatron's DistributedDataParallelConfig, such as bucket_size=100000000; may be repeated. "
            "On GPUs overlap_grad_reduce and overlap_param_gather (distributed optimizer) default to true",
            metavar="FIELD=VALUE",
        ),
        Setting("megatron.async_save", True, "write checkpoints to disk while training continues"),
    ),
    ignored=(
        Ignored(  # DeepSpeed's flags, and flags of what is refused (moving average, Muon, images)
            (
                *("actor.freeze_visual_encoder", "actor.gradient_checkpointing_reentrant", "actor.muon.*"),
                *("ds.grad_accum_dtype", "ds.overlap_comm", "ds.ring_attn_head_stride", "ds.use_liger_kernel"),
                *("ds.use_universal_ckpt", "ds.zpg", "train.ema_beta"),
            ),
            Need(lambda values: values["actor.backend"] != "megatron", "not read by the Megatron actor"),
        ),
        Ignored(
            (
                *("ds.attn_implementation", "ds.deepcompile", "ds.experts_implementation", "ds.packing_samples"),
                *("ds.value_head_prefix", "ds.zero_stage"),
            ),
            Need(
                lambda values: values["actor.backend"] != "megatron" or _scores_on_deepspeed(values),
                "not read by the Megatron actor",
            ),
        ),
        Ignored(
            ("train.micro_batch_size",),
            Need(
                lambda values: values["actor.backend"] != "megatron" or _scores_on_deepspeed(values),
                "the Megatron actor fills micro-batches by --train.max_tokens_per_gpu",
            ),
        ),
    ),
    page="megatron.md",
)
