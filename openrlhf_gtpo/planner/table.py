"""A plan as text and as JSON."""

from typing import Any

from openrlhf_gtpo.planner.candidate import Candidate
from openrlhf_gtpo.planner.cluster import GIB

# Longer names of parts that are not clear by themselves.
_PARTS = {
    "fp8_caches": "FP8 weights",
    "head": "LM head",
    "temporary": "other temporaries",
    "vllm_asleep": "vLLM asleep",
    "vllm_weights": "vLLM weights",
    "vllm_working": "vLLM working",
    "kv_cache": "KV cache",
    "sync_bucket": "sync buckets",
    "context": "CUDA, NCCL",
}


def layout_words(one: Candidate) -> str:
    """TP4 PP2 CP1 DP4, e4m3 blockwise, recompute full."""
    layout, fp8 = one.training.layout, one.training.fp8
    words = f"TP{layout.tensor_model_parallel_size} PP{layout.pipeline_model_parallel_size} CP{layout.context_parallel_size}"
    expert = layout.expert_model_parallel_size
    words += f" EP{expert}" if expert > 1 else ""
    precision = "bf16" if fp8 is None else f"{fp8.mode} {fp8.recipe}{' weights' if fp8.primary_weights else ''}"
    return f"{words} DP{one.training.data_parallel}, {precision}, recompute {one.training.recompute}"


def ranking(found: list[Candidate], most: int) -> str:
    """A line for each of the first ``most``."""
    width = max(58, *(len(layout_words(one)) + 1 for one in found[:most]))
    head = (
        f"{'layout':{width}}{'engines':>9}{'train GiB':>11}{'rollout':>9}{'step s':>8}{'rollout':>9}{'forward':>9}{'train':>8}"
        f"{'other':>7}{'tok/s/GPU':>11}{'MFU':>6}"
    )
    lines = [head]
    for one in found[:most]:
        seconds = one.seconds
        memory = {phase: sum(parts.values()) / GIB for phase, parts in one.memory.items()}
        engines = f"{one.engines.count}×TP{one.engines.tensor}"
        line = f"{layout_words(one):{width}}{engines:>9}{max(memory['train'], memory['forward']):11.1f}{memory['rollout']:9.1f}"
        if one.fits:
            other = seconds["sync"] + seconds["between"]
            line += f"{one.step_seconds:8.0f}{seconds['rollout']:9.0f}{seconds['forward']:9.0f}{seconds['train']:8.0f}"
            line += f"{other:7.0f}{one.tokens_per_second:11.0f}{one.mfu:6.0%}"
        else:
            phase, over = one.breaks
            line += f"   does not fit: {phase} {over / GIB:.1f} GiB too large"
        lines.append(line)
    return "\n".join(lines)


def details(one: Candidate) -> str:
    """Memory by part and phase, what breaks first, and seconds by phase."""
    lines = [f"{layout_words(one)}; {one.engines.count} engines of {one.engines.tensor} GPUs"]
    lines.append(f"memory of the GPU that has the most, GiB (of {one.limit / GIB:.1f} that can be planned for)")
    for phase, parts in one.memory.items():
        named = ", ".join(
            f"{_PARTS.get(name, name)} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB
        )
        lines.append(f"  {phase:8}{sum(parts.values()) / GIB:7.1f}  {named}")
    kept = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in one.activations().items())
    lines.append(f"activations by recompute: {kept}")
    phase, over = one.breaks
    room = f"{-over / GIB:.1f} GiB to spare" if over <= 0 else f"{over / GIB:.1f} GiB too large"
    lines.append(f"what breaks first: {_PARTS.get(phase, phase)} ({room})")
    engines = one.engines
    if engines.fits:
        again = f"; it gets full, and {engines.recomputed:.0%} as many tokens as a rollout has are computed again"
        lines.append(
            f"an engine decodes up to {engines.most_rows} of its {engines.rows} rows at once; its KV cache holds "
            f"{engines.cache_tokens:,.0f} tokens{again if engines.recomputed else ''}"
        )
    step = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in one.seconds.items())
    lines.append(
        f"a step takes {one.step_seconds:.0f} s ({step}): {one.tokens_per_second:.0f} tokens/s/GPU, MFU of training {one.mfu:.0%}"
    )
    return "\n".join(lines)


def as_json(one: Candidate) -> dict[str, Any]:
    """Everything that the tables show, in bytes and seconds."""
    layout, fp8 = one.training.layout, one.training.fp8
    phase, over = one.breaks
    return {
        "layout": {
            "tensor": layout.tensor_model_parallel_size,
            "pipeline": layout.pipeline_model_parallel_size,
            "context": layout.context_parallel_size,
            "expert": layout.expert_model_parallel_size,
            "data": one.training.data_parallel,
        },
        "fp8": None if fp8 is None else {"mode": fp8.mode, "recipe": fp8.recipe, "param": fp8.primary_weights},
        "recompute": one.training.recompute,
        "training_gpus": one.cluster.gpus,
        "engines": {"count": one.engines.count, "tensor": one.engines.tensor, "gpus": one.engines.gpus},
        "fits": one.fits,
        "memory_bytes": one.memory,
        "activation_bytes": one.activations(),
        "limit_bytes": one.limit,
        "breaks_first": {"phase": phase, "bytes_over": over},
        "seconds": one.seconds if one.fits else None,
        "step_seconds": one.step_seconds if one.fits else None,
        "tokens_per_second_per_gpu": one.tokens_per_second if one.fits else None,
        "mfu": one.mfu if one.fits else None,
    }
