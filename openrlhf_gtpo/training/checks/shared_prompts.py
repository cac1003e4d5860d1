"""Whether a run computes a group's prompt once (``--train.shared_prompts``): where the result is known to be the
same."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model

# OpenRLHF's default attention and its substitutes; any other was chosen on purpose.
_REPLACED = ("flash_attention_2", "sdpa", "varlen")
# Transformers' families whose decoder passes unknown arguments on to its attention.
FAMILIES = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "olmo3", "smollm3"}
)
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
_NAME = "shared_prompts"  # of the attention on DeepSpeed (actors/shared_prompts.py)


def decide(args: Arguments, models: Sequence[Model]) -> dict[str, Any]:
    """Decide ``train.shares_prompts``, and print whether prompts are shared unless off was chosen; returns it and, on
    DeepSpeed, the attention of all models, by flag.

    Args:
        models: the run's models, the policy's first. With Megatron the others stay on DeepSpeed and do not share.
    """
    if args.actor.backend == "megatron":
        models = models[:1]
    why = next(_hindrances(args, models), None)
    if why is None:
        print("A group's prompt is computed once for its responses (--train.shared_prompts).", file=sys.stderr)
    elif args.train.shared_prompts == "on":
        print(f"A group's prompt is computed with each response: {why}.", file=sys.stderr)
    changes: dict[str, Any] = {"train.shares_prompts": why is None}
    if why is None and args.actor.backend == "deepspeed":
        changes |= {"ds.attn_implementation": _NAME, "ds.packing_samples": True}
    return changes


def _hindrances(args: Arguments, models: Sequence[Model]) -> Iterator[str]:
    """Yield reasons to compute a prompt with each response."""
    if args.train.shared_prompts == "off":
        yield "--train.shared_prompts off"
    if args.actor.backend == "megatron":
        if args.megatron.context_parallel_size > 1:
            yield "--megatron.context_parallel_size cuts rows into chunks"
        if not host.is_installed("transformer-engine") and not _has_kernels():
            yield "neither Transformer Engine nor flash-attn nor torch 2.11 is installed"
    else:
        yield from _on_deepspeed(args)
    if args.ds.lora.rank and args.ds.lora.dropout:
        yield "--ds.lora.dropout drops different entries in each row"
    for model in models:
        yield from _of_model(model.config, str(model))
        if args.actor.backend == "deepspeed" and any(getattr(model.config, name, 0) for name in _DROPOUTS):
            yield f"{model} has dropout"
        if args.actor.trust_remote_code and getattr(model.config, "auto_map", None):
            yield f"{model} brings its own code"


def _on_deepspeed(args: Arguments) -> Iterator[str]:
    ds = args.ds
    if ds.attn_implementation not in _REPLACED:
        yield f"--ds.attn_implementation {ds.attn_implementation}"
    if ds.ring_attn_size > 1:
        yield "--ds.ring_attn_size cuts rows into chunks"
    if ds.tensor_parallel_size > 1:
        yield "DeepSpeed's tensor parallelism replaces layers"
    if ds.deepcompile:
        yield "--ds.deepcompile compiles the whole forward pass"
    if ds.use_liger_kernel:
        yield "Liger's kernels replace layers"
    if args.actor.aux_loss_coef > 0:
        yield "the balancing loss of --actor.aux_loss_coef counts a row's tokens"
    if platform.chosen_platform() == "cuda" and ds.param_dtype not in ("bf16", "fp16"):
        yield f"--ds.param_dtype {ds.param_dtype} has no FlashAttention"
    if not _has_kernels():
        yield "neither flash-attn nor torch 2.11 is installed"


def _has_kernels() -> bool:
    """True if this host has a kernel for attention with more keys than queries, or is a CPU, which needs none."""
    on_cuda = platform.chosen_platform() == "cuda"
    return not on_cuda or host.is_installed("flash-attn") or varlen_attention.is_available()


def _of_model(config: Any, name: str) -> Iterator[str]:
    if config.model_type not in FAMILIES:
        yield f"{name} is of the family {config.model_type}, with which shared prompts are untested"
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds - {"full_attention"} or (not kinds and window is not None):
        yield f"{name} has sliding-window layers"
