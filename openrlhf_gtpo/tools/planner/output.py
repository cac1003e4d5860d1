"""A plan as text, as JSON, and as a launch script: the variables of ``examples/scripts/train.sh``."""

import re
from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.candidate import Candidate
from openrlhf_gtpo.tools.planner.cluster import GIB

ALGORITHMS = ("gtpo", "grpo_s", "dapo", "grpo")
LAUNCHER = "examples/scripts/train.sh"
_ROOM = 3 * GIB  # a plan with less to spare is risky (docs/results/planner.md)
_FP8_MEASURED = "a 3B model's step on one H200 gained 1.01 (blockwise) to 1.17 × (delayed) over BF16 (docs/fp8.md)"
# Clearer names for parts.
_PARTS = {
    "bf16_copies": "BF16 copies",
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


def layout_words(plan: Candidate) -> str:
    """Describe the layout, such as "TP4 PP2 CP1 DP4, e4m3 blockwise, recompute full"."""
    training, fp8 = plan.training, plan.training.fp8
    words = f"TP{training.tensor} PP{training.pipeline} CP{training.layout.context_parallel_size}"
    expert = training.layout.expert_model_parallel_size
    words += f" EP{expert}" if expert > 1 else ""
    precision = "bf16" if fp8 is None else f"{fp8.mode} {fp8.recipe}{' weights' if fp8.primary_weights else ''}"
    lora = f", LoRA {training.lora_rank}" if training.lora_rank else ""
    return f"{words} DP{training.data_parallel}, {precision}, recompute {training.recompute}{lora}"


def ranking(plans: list[Candidate], most: int) -> str:
    """Format a table with a line for each of the first ``most`` candidates."""
    width = max(58, *(len(layout_words(plan)) + 1 for plan in plans[:most]))
    lines = [
        f"{'layout':{width}}{'engines':>9}{'train GiB':>11}{'rollout GiB':>13}{'step s':>8}{'rollout':>9}"
        f"{'forward':>9}{'train':>8}{'other':>7}{'tok/s/GPU':>11}{'MFU':>6}"
    ]
    for plan in plans[:most]:
        memory = {phase: sum(parts.values()) / GIB for phase, parts in plan.memory.items()}
        engines = f"{plan.engines.count}×TP{plan.engines.tensor}"
        trainer = max(memory["train"], memory["forward"])
        line = f"{layout_words(plan):{width}}{engines:>9}{trainer:11.1f}{memory['rollout']:13.1f}"
        if plan.fits:
            seconds = plan.seconds
            line += (
                f"{plan.step_seconds:8.0f}{seconds['rollout']:9.0f}{seconds['forward']:9.0f}{seconds['train']:8.0f}"
            )
            line += f"{seconds['sync'] + seconds['between']:7.0f}{plan.tokens_per_second:11.0f}{plan.mfu:6.0%}"
        else:
            phase, over = plan.breaks
            line += f"   does not fit: {phase} {over / GIB:.1f} GiB too large"
        lines.append(line)
    return "\n".join(lines)


def details(plan: Candidate) -> str:
    """Format memory by phase and part, what breaks first, and seconds by phase if the engines have room for a row."""
    count, size = plan.engines.count, plan.engines.tensor
    lines = [f"{layout_words(plan)}; {count} engine{'s' * (count > 1)} of {size} GPU{'s' * (size > 1)}"]
    lines.append(f"memory of the fullest GPU, GiB (of {plan.limit / GIB:.1f} usable)")
    # Memory by phase and part, and the phase that breaks first.
    for phase, parts in plan.memory.items():
        named = ", ".join(
            f"{_PARTS.get(name, name)} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB
        )
        lines.append(f"  {phase:8}{sum(parts.values()) / GIB:7.1f}  {named}")
    if plan.host_bytes:
        on_node = plan.host_bytes * plan.cluster.gpus_per_node / GIB
        lines.append(f"pinned host memory per node for offloading: {on_node:.0f} GiB")
    activations = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in plan.activations().items())
    lines.append(f"activations by recompute: {activations}")
    phase, over = plan.breaks
    room = f"{-over / GIB:.1f} GiB to spare" if over <= 0 else f"{over / GIB:.1f} GiB too large"
    lines.append(f"what breaks first: {_PARTS.get(phase, phase)} ({room})")
    if -_ROOM < over <= 0:
        lines.append(
            f"risk: less than {_ROOM / GIB:.0f} GiB to spare, and the plan may be off by that much; if training "
            "runs out of memory, plan with a smaller --max-tokens-per-gpu"
        )
    # Times, which need room for at least one row.
    engines = plan.engines
    if engines.fits:
        again = f"; it fills up, and {engines.recomputed:.0%} as many tokens as the responses have are computed again"
        lines.append(
            f"an engine decodes up to {engines.most_rows} of its {engines.rows} rows at once; its KV cache holds "
            f"{engines.cache_tokens:,.0f} tokens{again if engines.recomputed else ''}"
        )
        step = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in plan.seconds.items())
        lines.append(
            f"a step takes {plan.step_seconds:.0f} s ({step}): {plan.tokens_per_second:.0f} tokens/s/GPU, "
            f"MFU of training {plan.mfu:.0%}"
        )
        if plan.training.fp8 is not None:
            lines.append(f"FP8's times are of large products; measured: {_FP8_MEASURED}")
        update = ", ".join(f"{part} {seconds:.2f}" for part, seconds in plan.speed.optimizer_step().items())
        steps = engines.workload.optimizer_steps
        lines.append(f"{f'each of its {steps} optimizer steps' if steps > 1 else 'its optimizer step'}: {update}")
    return "\n".join(lines)


def beside(plan: Candidate, measured: Mapping[str, float]) -> str:
    """Format a table of a run's median seconds, the plan's, and their ratio, by phase.

    Args:
        measured: from :func:`openrlhf_gtpo.tools.planner.measured.seconds`.
    """
    planned = plan.seconds | {"step": plan.step_seconds}
    lines = [f"{'seconds':10}{'measured':>10}{'planned':>10}{'ratio':>8}"]
    for phase, took in measured.items():
        ratio = f"{took / planned[phase]:.2f}" if planned[phase] else "-"
        lines.append(f"{phase:10}{took:10.3g}{planned[phase]:10.3g}{ratio:>8}")
    return "\n".join(lines)


def as_json(plan: Candidate) -> dict[str, Any]:
    """Return everything that the tables show, in bytes and seconds."""
    training, fp8, engines = plan.training, plan.training.fp8, plan.engines
    phase, over = plan.breaks
    return {
        "layout": {
            "tensor": training.tensor,
            "pipeline": training.pipeline,
            "context": training.layout.context_parallel_size,
            "expert": training.layout.expert_model_parallel_size,
            "data": training.data_parallel,
        },
        "fp8": None if fp8 is None else {"mode": fp8.mode, "recipe": fp8.recipe, "param": fp8.primary_weights},
        "recompute": training.recompute,
        "lora_rank": training.lora_rank,
        "training_gpus": plan.cluster.gpus,
        "engines": {"count": engines.count, "tensor": engines.tensor, "gpus": engines.gpus},
        "fits": plan.fits,
        "memory_bytes": plan.memory,
        "activation_bytes": plan.activations(),
        "limit_bytes": plan.limit,
        "host_bytes_per_gpu": plan.host_bytes,
        "breaks_first": {"phase": phase, "bytes_over": over},
        "seconds": plan.seconds if plan.fits else None,
        "optimizer_step_seconds": plan.speed.optimizer_step() if plan.fits else None,
        "step_seconds": plan.step_seconds if plan.fits else None,
        "tokens_per_second_per_gpu": plan.tokens_per_second if plan.fits else None,
        "mfu": plan.mfu if plan.fits else None,
    }


def launch_script(plan: Candidate, *, algorithm: str, model: str, command: str) -> str:
    """Write a bash script to run from the project's root. The environment can override every variable.

    Args:
        algorithm: one of :data:`ALGORITHMS`.
        model: the launcher's MODEL.
        command: the planner's command line, for the script's header.
    """
    training, engines, work, fp8 = plan.training, plan.engines, plan.engines.workload, plan.training.fp8
    context = training.layout.context_parallel_size
    variables: dict[str, dict[str, object]] = {
        "What is trained": {"ALGORITHM": algorithm, "MODEL": model},
        "Where": {
            "PLACEMENT": "colocated" if plan.colocated else "split",
            "ASYNC": 1 if plan.async_enable else "",
            "NODES": plan.cluster.nodes,
            "GPUS_PER_NODE": plan.cluster.gpus_per_node,
        },
        "The actor on Megatron": {
            "TENSOR_PARALLEL": training.tensor,
            "PIPELINE_PARALLEL": training.pipeline,
            "CONTEXT_PARALLEL": context,
            "FP8": "" if fp8 is None else fp8.mode,
            "FP8_RECIPE": "blockwise" if fp8 is None else fp8.recipe,
            "FP8_PARAM": 1 if fp8 is not None and fp8.primary_weights else "",
            "RECOMPUTE": training.recompute,
            "LORA_RANK": training.lora_rank or "",
            "MAX_TOKENS_PER_GPU": -(-work.micro_batch_tokens(context) // context),
        },
        "The engines": {
            "VLLM_ENGINES": engines.count,
            "VLLM_TENSOR_PARALLEL": engines.tensor,
            "VLLM_GPU_MEMORY": f"{engines.memory_share:g}",
            "VLLM_MAX_NUM_SEQS": engines.assumptions.vllm_rows,
            "VLLM_MAX_NUM_BATCHED_TOKENS": engines.assumptions.vllm_tokens,
        },
        "A step": {
            "SAMPLES_PER_PROMPT": work.samples_per_prompt,
            "PROMPTS_PER_STEP": work.prompts_per_step,
            "TRAIN_BATCH": work.batch,
            "PROMPT_LENGTH": work.prompt_length,
            "RESPONSE_LENGTH": work.response_length,
        },
    }
    groups = "".join(
        f"\n# {title}\n" + "".join(f'export {name}="${{{name}-{_inside(value)}}}"\n' for name, value in group.items())
        for title, group in variables.items()
    )
    flags = trainer_flags(plan)
    extra = f"""
# Trainer flags that {LAUNCHER} has no variable for; it puts them before those that are given after --.
# shellcheck disable=SC2034
planned=({" ".join(flags)})
"""
    header = "".join(f"#   {line}\n" for line in command.splitlines())
    return f"""\
#!/usr/bin/env bash
# Run from the project's root; written by
{header}# Planned: {layout_words(plan)}; a step of {plan.step_seconds:.0f} s, {plan.tokens_per_second:.0f} tokens/s \
on each of {plan.gpus} GPUs.
# Every variable can be overridden from the environment; those not listed here keep the defaults of train.sh.
{groups}{extra if flags else ""}
if [[ ! -f {LAUNCHER} ]]; then
    echo "{LAUNCHER} is not here: run this from the root of openrlhf_gtpo" >&2
    exit 2
fi
# shellcheck source=/dev/null
source {LAUNCHER} gtpo_colocated "$@"
"""


def trainer_flags(plan: Candidate) -> list[str]:
    """Trainer flags that the plan needs and the launcher has no variable for."""
    expert, work = plan.training.layout.expert_model_parallel_size, plan.engines.workload
    flags = []
    if expert > 1:
        flags.append(f"--megatron.expert_model_parallel_size {expert}")
    if not plan.training.distributed_optimizer:
        flags.append("--no-megatron.use_distributed_optimizer")
    if not plan.engines.assumptions.overlap:
        flags.append("--megatron.ddp overlap_grad_reduce=false --megatron.ddp overlap_param_gather=false")
    if work.entropy != "actor":
        flags.append(f"--rollout.entropy {work.entropy}")
    if work.kl:  # the user chooses the coefficient
        flags.append('--algo.kl.init_coef "${KL:?must be set to the coefficient of the planned KL term}"')
    if work.kl and not plan.training.lora_rank:  # the actor is its own reference
        flags.append('--ref.num_nodes "$NODES" --ref.num_gpus_per_node "$GPUS_PER_NODE"')
        flags += [] if plan.colocated else ["--train.colocate_actor_ref"]
    if work.kl:
        flags += [] if work.entropy == "actor" else ["--algo.kl.use_loss"]
    if work.log_probs != "actor":  # with the required correction
        flags.append(f"--rollout.log_probs {work.log_probs} --algo.advantage.is_correction_level token")
    if plan.engines.assumptions.lm_head_mb != Assumptions.lm_head_mb:
        flags.append(f"--megatron.lm_head_mb {plan.engines.assumptions.lm_head_mb}")
    return flags


def _inside(value: object) -> str:
    """Quote ``value`` as the default of a parameter expansion between double quotes."""
    return re.sub(r'([\\"$`}])', r"\\\1", str(value))
