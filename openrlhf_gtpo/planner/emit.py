"""The launch script of a candidate: the variables of ``examples/scripts/train_gtpo_colocated.sh``."""

import shlex
from dataclasses import dataclass

from openrlhf_gtpo.planner.candidate import Candidate
from openrlhf_gtpo.planner.table import layout_words

ALGORITHMS = ("gtpo", "grpo_s", "dapo", "grpo")
LAUNCHER = "examples/scripts/train_gtpo_colocated.sh"


@dataclass(frozen=True)
class Job:
    """What a plan does not decide.

    Fields:
        model: what the launcher is given as MODEL.
        command: the words that made the plan, for the script's header.
        algorithm: one of :data:`ALGORITHMS`.
    """

    model: str
    command: str
    algorithm: str = "gtpo"


def script(candidate: Candidate, job: Job) -> str:
    """A bash script to be run from the project's root; every variable can be overridden from the environment."""
    work, layout, fp8 = candidate.workload, candidate.training.layout, candidate.training.fp8
    seconds, rate = candidate.step_seconds, candidate.tokens_per_second
    groups: dict[str, dict[str, object]] = {
        "What is trained": {"ALGORITHM": job.algorithm, "MODEL": job.model},
        "Where": {
            "PLACEMENT": "colocated" if candidate.colocated else "split",
            "NODES": candidate.cluster.nodes,
            "GPUS_PER_NODE": candidate.cluster.gpus // candidate.cluster.nodes,
        },
        "The actor on Megatron": {
            "TENSOR_PARALLEL": layout.tensor_model_parallel_size,
            "PIPELINE_PARALLEL": layout.pipeline_model_parallel_size,
            "CONTEXT_PARALLEL": layout.context_parallel_size,
            "FP8": "" if fp8 is None else fp8.mode,
            "FP8_RECIPE": "blockwise" if fp8 is None else fp8.recipe,
            "FP8_PARAM": 1 if fp8 is not None and fp8.primary_weights else "",
            "RECOMPUTE": candidate.training.recompute,
            "MAX_TOKENS_PER_GPU": work.micro_batch_tokens,
        },
        "The engines": {
            "VLLM_ENGINES": candidate.engines.count,
            "VLLM_TENSOR_PARALLEL": candidate.engines.tensor,
            "VLLM_GPU_MEMORY": f"{candidate.engines.memory_share:g}",
        },
        "A step": {
            "SAMPLES_PER_PROMPT": work.samples_per_prompt,
            "PROMPTS_PER_STEP": work.prompts_per_step,
            "TRAIN_BATCH": work.batch,
            "PROMPT_LENGTH": work.prompt_length,
            "RESPONSE_LENGTH": work.response_length,
        },
    }
    lines = [
        "#!/usr/bin/env bash",
        "# Run from the project's root; written by",
        *(f"#   {line}" for line in job.command.splitlines()),
        f"# Planned: {layout_words(candidate)}; a step of {seconds:.0f} s, {rate:.0f} tokens/s on each of {candidate.gpus} GPUs.",
        "# Every variable can be overridden from the environment; those that are not here keep what train_gtpo_colocated.sh gives them.",
    ]
    for title, variables in groups.items():
        lines += ["", f"# {title}"]
        lines += [f'export {name}="${{{name}:-{_inside(value)}}}"' for name, value in variables.items()]
    flags = _trainer_flags(candidate)
    if flags:
        lines += [
            "",
            "# Flags of the trainer that the launch scripts have no variable for.",
            '[[ " $* " == *" -- "* ]] || set -- "$@" --',
            f'set -- "$@" {" ".join(flags)}',
        ]
    lines += [
        "",
        f"if [[ ! -f {LAUNCHER} ]]; then",
        f'    echo "{LAUNCHER} is not here: run this from the root of openrlhf_gtpo" >&2',
        "    exit 2",
        "fi",
        "# shellcheck source=/dev/null",
        f"source {LAUNCHER}",
    ]
    return "\n".join(lines) + "\n"


def _trainer_flags(candidate: Candidate) -> list[str]:
    """What the plan rests on and the launcher has no variable for."""
    layout, flags = candidate.training.layout, []
    if layout.expert_model_parallel_size > 1:
        flags.append(f"--megatron.expert_model_parallel_size {layout.expert_model_parallel_size}")
    if not candidate.training.distributed_optimizer:
        flags.append("--no-megatron.use_distributed_optimizer")
    return flags


def _inside(value: object) -> str:
    """``value`` as the default of a parameter expansion between double quotes."""
    text = str(value)
    for special in ("\\", '"', "$", "`", "}"):
        text = text.replace(special, "\\" + special)
    return text


def command_of(words: list[str]) -> str:
    """The planner's command line, without the flag that writes the script."""
    kept = [word for i, word in enumerate(words) if word != "--emit" and (i == 0 or words[i - 1] != "--emit")]
    kept = [word for word in kept if not word.startswith("--emit=")]
    return shlex.join(["python3", "-m", "openrlhf_gtpo.cli.plan", *kept])
