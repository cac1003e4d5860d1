"""The flags of the Megatron-core actor, and what they imply for OpenRLHF's own flags."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import MODES, RECIPES, Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import RECOMPUTE, SIZES, Layout, LayoutError, ModelError

# Prefixes of OpenRLHF's flags that the Megatron actor does not read: DeepSpeed's, and those of features that are
# refused with it (moving average, Muon, images).
NOT_READ = (
    "actor.freeze_visual_encoder",
    "actor.gradient_checkpointing_reentrant",
    "actor.muon.",
    "ds.grad_accum_dtype",
    "ds.overlap_comm",
    "ds.ring_attn_head_stride",
    "ds.use_liger_kernel",
    "ds.use_universal_ckpt",
    "ds.zpg",
    "train.ema_beta",
)
# It does not read these either, but a reward model beside it, which runs on DeepSpeed, does.
READ_BY_REWARD_MODEL = (
    "ds.attn_implementation",
    "ds.deepcompile",
    "ds.experts_implementation",
    "ds.packing_samples",
    "ds.value_head_prefix",
    "ds.zero_stage",
    "train.micro_batch_size",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--actor.backend`` and ``--megatron.*``."""
    group = parser.add_argument_group("openrlhf_gtpo megatron")
    group.add_argument(
        "--actor.backend",
        choices=["deepspeed", "megatron"],
        default="deepspeed",
        help="what trains the policy and scores with the reference: OpenRLHF's DeepSpeed models, or Megatron-core "
        "with tensor, pipeline, context and expert parallelism. Models: llama, mistral, qwen2, qwen3, qwen3_moe",
    )
    add_layout_flags(group)
    group.add_argument(
        "--megatron.recompute",
        choices=RECOMPUTE,
        default="none",
        help="activations to recompute in the backward pass instead of keeping them: none, those of the MLP "
        "or the experts (selective), or all of a layer's (full; --actor.gradient_checkpointing_enable asks for this)",
    )
    group.add_argument(
        "--megatron.lm_head_mb",
        type=int,
        help="MiB of temporary memory that the LM head works in (default: 1024, and 256 on a CPU host)",
    )
    group.add_argument(
        "--megatron.use_distributed_optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard the optimizer's states over the data-parallel GPUs",
    )
    group.add_argument(
        "--megatron.offload",
        action="store_true",
        help="move parameters, gradients and optimizer states to host memory between the phases of a colocated run, "
        "as --ds.enable_sleep does for DeepSpeed (and here too), and the reference model between its forward passes "
        "(--ref.offload does only the latter)",
    )
    group.add_argument(
        "--megatron.fp8",
        choices=MODES,
        help="compute the decoder's matrix products in FP8: hybrid (E4M3, gradients in E5M2) or e4m3 with Transformer "
        "Engine on Hopper or Ada; emulated gives the same numbers slowly on any host. Embedding and LM head stay in "
        "BF16, and so do the weights unless --megatron.fp8_param is given (default: off)",
    )
    group.add_argument(
        "--megatron.fp8_recipe",
        choices=RECIPES,
        default="blockwise",
        help="where FP8's scales come from: earlier micro-batches (delayed), the whole tensor (tensorwise), or blocks "
        "of 1 x 128 and 128 x 128 (blockwise; Hopper, torch built with CUDA 12.9 or above)",
    )
    group.add_argument(
        "--megatron.fp8_param",
        action="store_true",
        help="keep the weights of those products only in FP8, beside the optimizer's float32 ones, which are the same "
        "as without it: half the memory of weights; not with the recipe delayed",
    )
    for end in ("start", "end"):
        group.add_argument(
            f"--megatron.num_layers_at_{end}_in_bf16",
            type=int,
            default=0,
            metavar="N",
            help=f"decoder layers at the {end} of the model that stay in BF16",
        )
    group.add_argument(
        "--megatron.fp8_audit_steps",
        type=int,
        default=0,
        metavar="N",
        help="in every N-th batch, compute the old-policy forward in BF16 too, and log what FP8 does to entropies, "
        "shares and advantages as fp8/* (with credit that reads entropies; 0: never)",
    )
    group.add_argument(
        "--megatron.fp8_audit_gate",
        type=float,
        metavar="X",
        help="if an audit finds that more than this fraction of the advantages, such as 0.02, changes its sign, "
        "take entropies from a forward in BF16, beside FP8's for log-probs, until an audit finds fewer (default: "
        "never)",
    )
    group.add_argument(
        "--megatron.override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of Megatron's TransformerConfig, for example moe_router_dtype=fp32; may be repeated",
    )
    group.add_argument(
        "--megatron.ddp",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of Megatron's DistributedDataParallelConfig, for example bucket_size=100000000; may be "
        "repeated. On GPUs overlap_grad_reduce and, with the distributed optimizer, overlap_param_gather are true "
        "unless they are set",
    )
    group.add_argument(
        "--megatron.async_save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write checkpoints to disk while training goes on",
    )


def add_layout_flags(group: argparse._ArgumentGroup) -> None:
    """Add the parallel sizes, which :func:`layout_of` reads."""
    for name, description in (
        (
            "tensor_model_parallel_size",
            "GPUs that share every matrix; must divide the model's attention heads and key-value heads. Keep it "
            "within a node",
        ),
        ("pipeline_model_parallel_size", "stages that the layers are split into; must divide their number"),
        ("context_parallel_size", "GPUs that share every sequence, for long ones"),
        (
            "expert_model_parallel_size",
            "GPUs that share the experts of a mixture of experts; must divide them and the data-parallel size, which "
            "is --actor.num_nodes × --actor.num_gpus_per_node ÷ (tensor × pipeline × context)",
        ),
    ):
        group.add_argument(f"--megatron.{name}", type=int, default=1, help=description)
    group.add_argument(
        "--megatron.sequence_parallel",
        action="store_true",
        help="shard the activations between the matrices over the tensor-parallel GPUs too: less memory, same result",
    )


def fp8_of(args: SimpleNamespace) -> Fp8Options | None:
    """The options that ``--megatron.fp8*`` asks for; None without it."""
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


def adjust(args: argparse.Namespace, given: frozenset[str]) -> None:
    """Carry the Megatron actor's flags over to those that OpenRLHF reads, and vice versa.

    OpenRLHF hands each batch to ``ds.ring_attn_size * ds.tensor_parallel_size`` consecutive ranks, and counts its
    data-parallel ranks by them; with this backend those are the ranks of one model replica.

    Raises:
        UsageError: a flag of one backend given with the other, or a parallel size below 1.
    """
    refuse_stray(args, given)
    values = vars(args)  # by flag
    if values["actor.backend"] != "megatron":
        return
    for flag, ours in (
        ("ds.tensor_parallel_size", "tensor_model_parallel_size"),
        ("ds.ring_attn_size", "context_parallel_size"),
    ):
        if values[flag] != 1:
            raise UsageError(
                f"--{flag} {values[flag]} is DeepSpeed's; with --actor.backend megatron give --megatron.{ours}."
            )
    with refusals_name_flags():
        layout = Layout(**{name: values[f"megatron.{name}"] for name in SIZES})
    values["ds.tensor_parallel_size"] = layout.model_parallel_size
    values["ds.enable_sleep"] = values["megatron.offload"] = values["ds.enable_sleep"] or values["megatron.offload"]
    values["ref.offload"] = values["ref.offload"] or values["megatron.offload"]
    if values["actor.gradient_checkpointing_enable"] and "megatron.recompute" not in given:
        values["megatron.recompute"] = "full"


def refuse_stray(args: argparse.Namespace, given: Iterable[str]) -> None:
    """Refuse ``--megatron.*`` with another backend, and FP8 settings when FP8 is off.

    Raises:
        UsageError: one of the destinations ``given`` on the command line is such a flag.
    """
    ours = sorted(name for name in given if name.startswith("megatron."))
    if ours and getattr(args, "actor.backend") != "megatron":
        raise UsageError(f"--{ours[0]} needs --actor.backend megatron; add it, or leave the flag out.")
    of_fp8 = [name for name in ours if "fp8_" in name or name.endswith("_in_bf16")]
    if of_fp8 and getattr(args, "megatron.fp8") is None:
        raise UsageError(f"--{of_fp8[0]} needs --megatron.fp8; add it, or leave the flag out.")


def layout_of(args: SimpleNamespace) -> Layout:
    """The parallel sizes of ``--megatron.*``.

    Raises:
        UsageError: a size below 1.
    """
    with refusals_name_flags():
        return Layout(**{name: getattr(args.megatron, name) for name in (*SIZES, "sequence_parallel")})


@contextmanager
def refusals_name_flags() -> Iterator[None]:
    """Raise what Megatron's rooms refuse as a UsageError that names each setting by its ``--megatron.*`` flag.

    Raises:
        UsageError: a LayoutError was raised.
    """
    try:
        yield
    except ModelError as error:
        raise UsageError(f"--actor.backend megatron: {error}") from error
    except LayoutError as error:
        raise UsageError(error.with_flags(megatron_flag)) from error


def megatron_flag(name: str) -> str:
    """The flag for the layout or FP8 setting ``name``."""
    return f"--megatron.{name}"
