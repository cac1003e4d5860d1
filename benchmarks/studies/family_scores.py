"""Measures how far `cli.score` is from Transformers in float64, for each model family, backend and layout.

    python3 -m benchmarks.studies.family_scores --output docs/results/megatron/families.json --png FILE

Runs without CUDA, in about seven minutes on two cores. The models are the tests', small and with random weights, in
float32. The error is the largest over all tokens of 12 ragged sequences.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.megatron.families import FAMILIES
from openrlhf_gtpo.report.curves import COLORS, STYLE, save
from tests.support.families import make_checkpoint, ragged_rows
from tests.support.moe_program import make_mixture

VOCABULARY = 151
TENSOR = ("--megatron.tensor_model_parallel_size", "2", "--megatron.sequence_parallel")
PIPELINE = ("--megatron.pipeline_model_parallel_size", "2")
WAYS: dict[str, tuple[str, ...]] = {
    "Transformers": (),
    "Megatron": ("--actor.backend", "megatron"),
    "TP2": ("--actor.backend", "megatron", *TENSOR),
    "PP2": ("--actor.backend", "megatron", *PIPELINE),
    "TP2 × PP2": ("--actor.backend", "megatron", *TENSOR, *PIPELINE),
}


def exact(model: Path, rows: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Compute log-probs and entropies of all tokens but each row's first in float64."""
    from transformers import AutoModelForCausalLM

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **eager).eval()
    found: dict[str, list[float]] = {"log_probs": [], "entropies": []}
    for row in rows:
        with torch.no_grad():
            scores = policy(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        found["log_probs"] += scores.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
        found["entropies"] += (-(scores.exp() * scores).sum(-1)).tolist()
    return found


def score(
    model: str | Path, rows: Sequence[Sequence[int]], flags: Sequence[str], folder: Path
) -> dict[str, list[float]]:
    """Score the rows with `cli.score`; return the log-probs and the entropies of all rows, one after another."""
    given, output = folder / "rows.jsonl", folder / "scores.jsonl"
    given.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    files = ["--model", str(model), "--input", str(given), "--output", str(output)]
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.score", *files, *flags]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    output.unlink()
    return {name: [value for line in lines for value in line[name]] for name in ("log_probs", "entropies")}


def plot(errors: dict[str, dict[str, dict[str, float]]], png_path: Path) -> Path:
    """Plot a group of bars for each family, and a bar for each way, in a panel of log-probs and one of entropies."""
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "y"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        panels = figure.subplots(2, sharex=True, sharey=True)
        for axes, name in zip(panels, ("log_probs", "entropies"), strict=True):
            for index, way in enumerate(WAYS):
                places = [place + 0.16 * (index - 2) for place in range(len(errors))]
                heights = [1e6 * ways[way][name] for ways in errors.values()]
                axes.bar(places, heights, 0.15, color=COLORS[index], label=way, zorder=3)
            axes.set_ylabel("largest error, 1e-6 nats")
            axes.set_title(name.replace("_", "-") + " in float32 against Transformers in float64")
        panels[1].set_xticks(range(len(errors)), list(errors))
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS), frameon=False
        )
        return save(figure, png_path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python3 -m benchmarks.studies.family_scores", description=__doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--png", required=True, type=Path, metavar="FILE", help="draw the largest errors")
    args = parser.parse_args(argv)
    lengths = [5, 2, 17, 9, 30, 3, 11, 64, 40, 7, 23, 51]
    rows = ragged_rows(VOCABULARY, lengths)
    errors: dict[str, Any] = {}
    for family in FAMILIES:
        errors[family] = {}
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model")
            if family == "qwen3_moe":
                make_mixture(model, "normalised")
            else:
                make_checkpoint(model, family, VOCABULARY)
            expected = exact(model, rows)
            for way, flags in WAYS.items():
                found = score(model, rows, ("--dtype", "float32", *flags), Path(folder))
                pairs = {name: zip(values, expected[name], strict=True) for name, values in found.items()}
                errors[family][way] = {name: max(abs(a - b) for a, b in both) for name, both in pairs.items()}
                print(family, way, errors[family][way], flush=True)
    write_results(args.output, args, {"tokens": sum(lengths) - len(lengths), "largest_errors": errors})
    print(plot(errors, args.png))


if __name__ == "__main__":
    main()
