"""Compares the planner with published measurements, and with this project's own on a GPU.

    python3 -m benchmarks.studies.planner_rows                                    the table of docs/results/planner.md
    python3 -m benchmarks.studies.planner_rows --measured benchmarks/results/gpu/*.json

The second reads files that ``cli.benchmark train-step --output`` wrote on one GPU, and prints measured and planned
memory and time. Needs neither a GPU nor a network.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.suite.synthetic import precisions
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.megatron.fp8.options import RECIPES, Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.tools.planner.cluster import GIB, GPUS, parse_cluster
from openrlhf_gtpo.tools.planner.plan import Request, candidates
from openrlhf_gtpo.tools.planner.rollout import Engines
from openrlhf_gtpo.tools.planner.training_memory import Training, step_bytes
from openrlhf_gtpo.tools.planner.training_speed import TrainingSpeed
from openrlhf_gtpo.tools.planner.workload import Workload


def _llama(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    same = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    return same | sizes | {"num_attention_heads": heads}


LLAMA_8B, LLAMA_70B = _llama(4096, 14336, 32, 32), _llama(8192, 28672, 80, 64)
# Llama 405B has 126 layers, split unevenly over 16 and 8 stages. Here the split is even.
LLAMA_405B = _llama(16384, 53248, 128, 128)
QWEN3_32B = {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
QWEN3_32B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3_32B |= {"max_position_embeddings": 40960}
QWEN_1_5B = {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
QWEN_1_5B |= {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 49152}
QWEN_1_5B |= {"max_position_embeddings": 8192, "tie_word_embeddings": False}

H200 = Path(__file__).resolve().parents[1] / "results" / "h200"


@dataclass(frozen=True)
class Row:
    """One published or measured number.

    Fields:
        fixes: the assumption that this row determined; empty if it only checks.
    """

    name: str
    unit: str
    published: float
    planned: float
    fixes: str = ""

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def rows() -> Iterator[Row]:
    """Return the rows in the order of docs/results/planner.md."""
    yield from _pre_training()
    yield from _inference()
    yield from _reinforcement_learning()
    yield from _rollouts()


def _pre_training() -> Iterator[Row]:
    fp8 = Fp8Options("hybrid", "tensorwise")
    llama3, bridge = "Llama 3 405B, {} H100, TP8 PP16 (arXiv 2407.21783)", "Megatron-Bridge 25.11, {}"
    # model, GPUs, (TP, PP, CP), rows of 8192 tokens, precision, interleaving
    pre_trainings: list[tuple] = [
        (llama3.format(8192), 430, "compute_bf16", LLAMA_405B, 8192, (8, 16, 1), 2048, None, 8),
        (llama3.format(16384), 400, "", LLAMA_405B, 16384, (8, 16, 1), 2048, None, 8),
        (bridge.format("8B FP8, 8 H100"), 744, "compute_fp8", LLAMA_8B, 8, (1, 1, 1), 128, fp8, 1),
        (bridge.format("70B FP8, 64 H100, TP4 PP8"), 719, "", LLAMA_70B, 64, (4, 8, 1), 128, fp8, 5),
        (bridge.format("405B FP8, 1024 H100, TP8 PP8 CP2"), 737, "", LLAMA_405B, 1024, (8, 8, 2), 512, fp8, 8),
    ]
    for name, published, fixes, model, gpus, sizes, batch, precision, interleaved in pre_trainings:
        layout = Layout(*sizes, sequence_parallel=sizes[0] > 1)
        one_row = {"samples_per_prompt": 1, "max_tokens_per_gpu": 8192 // sizes[2]}
        work = Workload(1, 8191, 1, 8191, prompts_per_step=batch, **one_row)
        training = Training(_shape(model), layout, layout.data_parallel_size(gpus), 8192, 8191, fp8=precision)
        speed = TrainingSpeed(training, parse_cluster("h100-80g", gpus), work, Assumptions(), interleaved)
        rate = speed.flops() / sum(speed.optimizer_step().values()) / gpus / 1e12
        yield Row(name, "TFLOP/s/GPU", published, rate, fixes)


def _inference() -> Iterator[Row]:
    name = "TensorRT-LLM, Llama 3.3 70B FP8, TP2, {}, {} in, {} out"
    assumed = replace(Assumptions(), vllm_rows=2048, engine_bytes=3 * GIB, decode_row=0)  # not vLLM
    inferences = [
        ("h100-80g", 1000, 1000, 2209),
        ("h200-141g", 1000, 1000, 2587),
        ("h200-141g", 1024, 8192, 2009),
        ("h100-80g", 8192, 1024, 398),
        ("h200-141g", 8192, 1024, 537),
    ]
    for gpu, prompt, response, published in inferences:
        work = Workload(prompt, response, prompt, response, samples_per_prompt=1, prompts_per_step=3000)
        engines = Engines(_shape(LLAMA_70B), parse_cluster(gpu, 2), 2, 2, 0.9, work, assumed, item=1)
        yield Row(name.format(gpu, prompt, response), "tokens/s/GPU", published, engines.saturated(), "decode_*")


def _reinforcement_learning() -> Iterator[Row]:
    """NeMo-RL's recipes: 64 prompts of 32 responses, 512 in an optimizer step, 4096 tokens in a row and a micro-batch,
    a reference model. Mean lengths are from its page."""
    runs: list[tuple] = [
        ("NeMo-RL, Llama 3.1 8B, 16 H100, PP2, recompute", 1581, LLAMA_8B, 16, (1, 2), 1, "full", 132, 1060),
        ("NeMo-RL, Qwen3 32B, 32 H100, TP4 PP4", 571, QWEN3_32B, 32, (4, 4), 4, "none", 110, 3206),
    ]
    for name, published, model, gpus, (tensor, pipeline), engine, recompute, prompt, response in runs:
        work = Workload(
            2 * prompt, 4096 - 2 * prompt, prompt, response, 32, 64, train_batch=512, max_tokens_per_gpu=4096, kl=True
        )
        chosen = {"tensor": tensor, "pipeline": pipeline, "context": 1, "vllm_tensor": engine, "vllm_memory": 0.6}
        chosen |= {"fp8": "off", "recompute": recompute}
        request = Request(SimpleNamespace(**model), parse_cluster("h100-80g", gpus), work, **chosen)
        yield Row(name, "tokens/s/GPU", published, candidates(request)[0].tokens_per_second)


def _rollouts() -> Iterator[Row]:
    """Rollouts of a model of Qwen2.5-1.5B's shape with vLLM on one H200 (docs/results/h200.md), from the sampler's
    study without values and from the last step of a whole run."""
    alone = json.loads((H200 / "sampler_rollout.json").read_text())["rollout"]["without"]["seconds"]["rollout"]
    last = json.loads((H200 / "train_1.5b.jsonl").read_text().splitlines()[-1])
    mean = last["response_length/mean"]
    studies = [
        ("256 rows of 128 tokens", statistics.median(alone), "decode_row", Workload(64, 128, 64, 128, 1, 256), 0.1),
        ("step 3 of a run", last["timing/generation"], "", Workload(512, 512, 42, mean, 16, 32), 0.4),
    ]
    for name, seconds, fixes, work, memory in studies:
        engines = Engines(_shape(QWEN_1_5B), parse_cluster("h200-141g", 1), 1, 1, memory, work, Assumptions())
        yield Row(f"vLLM, Qwen2.5-1.5B's shape on h200-141g, {name}", "s", seconds, engines.seconds, fixes)


def _shape(model: dict[str, Any]) -> ModelShape:
    return ModelShape.of(SimpleNamespace(**model))


def against_measured(results: dict[str, Any]) -> Iterator[Row]:
    """Compare peak memory and seconds with a ``benchmark train-step`` with Transformer Engine on one GPU, for every
    precision.

    Raises:
        ValueError: the file is from another setup, or from a GPU that the planner does not know.
    """
    machine, settings = results["machine"], results["settings"]
    gpu = kind_of(machine["gpus"])
    if gpu is None or "transformer-engine" not in machine["versions"]:
        raise ValueError(
            f"measured on {machine['gpus'] or 'no GPU'}, or without Transformer Engine: nothing to compare"
        )
    sizes = ("prompt_tokens", "response_tokens", "prompts", "samples", "max_tokens")
    prompt, most, prompts, samples, max_tokens = (int(settings[name]) for name in sizes)
    config = SimpleNamespace(**results["config"])
    chosen, _ = precisions(RECIPES, config, cuda=True, primary_weights=True)
    for precision, measured in results["measured"].items():
        if precision not in chosen:  # DeepSpeed
            continue
        response = statistics.mean(measured["tokens"]) / (prompts * samples) - prompt
        work = Workload(prompt, most, prompt, response, samples, prompts, max_tokens_per_gpu=max_tokens)
        tokens = work.micro_batch_tokens(context=1)
        training = Training(
            shape=ModelShape.of(config),
            layout=Layout(),
            data_parallel=1,
            tokens=tokens,
            response_tokens=int(tokens * response / (prompt + response)),
            recompute=settings["recompute"],
            fp8=chosen[precision],
        )
        speed = TrainingSpeed(training, parse_cluster(gpu, 1), work, Assumptions())
        name = f"{settings['shape']} on {gpu}, {precision}"
        planned = sum(step_bytes(training, 0).values())
        yield Row(f"{name}: peak memory", "GiB", measured["peak_bytes"] / GIB, planned / GIB)
        for phase, seconds in (("old_policy", speed.scoring()), ("train", sum(speed.optimizer_step().values()))):
            yield Row(f"{name}: {phase}", "s", statistics.median(measured["seconds"][phase]), seconds)


def kind_of(devices: Sequence[str]) -> str | None:
    """Find the planner's kind of GPU whose name has the most parts in common with the driver's name of equal
    ``devices``, such as "NVIDIA A100-SXM4-40GB"; None if even the family is unknown."""
    driver = " ".join(devices).lower()
    shared = {kind: [part in driver for part in kind.split("-")] for kind in GPUS}
    return max((kind for kind in GPUS if shared[kind][0]), key=lambda kind: sum(shared[kind]), default=None)


def _rows_of(path: Path) -> Iterator[Row]:
    try:
        yield from against_measured(json.loads(path.read_text()))
    except KeyError as error:
        raise ValueError(f"{path} was not written by benchmark train-step: it has no {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--measured", nargs="+", type=Path, metavar="FILE", help="results of benchmark train-step")
    args = parser.parse_args(argv)
    return exit_status("planner_rows", lambda: _print_table(args.measured), ValueError, OSError)


def _print_table(files: Sequence[Path] | None) -> None:
    compared = list(rows()) if files is None else [row for path in files for row in _rows_of(path)]
    print(f"{'':66}{'unit':>13}{'measured':>11}{'planned':>10}{'':>8}  used for")
    for row in compared:
        digits = 1 if row.published >= 10 else 2
        numbers = f"{row.published:11.{digits}f}{row.planned:10.{digits}f}{row.error:+8.0%}"
        print(f"{row.name:66}{row.unit:>13}{numbers}  {row.fixes}")


if __name__ == "__main__":
    sys.exit(main())
