"""Trains with weights in flight, and compares each token's entropy with `cli.score` under the weights that sampled it.

    python3 -m benchmarks.reliability.in_flight --output docs/results/async/in_flight.json

On CPU, through Ray and vLLM: a run with `--train.partial_rollout_enable` and responses of 64 to 768 tokens, in which
every step writes a dump and exports its model, at a learning rate that makes two versions differ. Then every version's
model scores all dumped responses in float32. A token of version v should have the entropy of step v's model. The next
step's model is the control.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.tiny_runs import inputs, rows, start
from benchmarks.suite import long_tail_agent
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser, score
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import FOLDER, read_dump

BOUND = 0.05  # nats, on average


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=3)
    args = parser.parse_args()
    with inputs(args.steps * 2) as place:
        found = measure(place, args.steps, args.staleness)
    write_results(args.output, args, found)
    print(json.dumps(found, indent=2))
    return 0 if found["without_version"] == 0 and found["own"]["mean"] <= BOUND else 1


def measure(place: Path, steps: int, staleness: int) -> dict[str, Any]:
    folder = place / "run"
    flags: dict[str, Any] = {
        "vllm.num_engines": 1,
        "actor.num_gpus_per_node": 1,
        "rollout.batch_size": 2,
        "train.batch_size": 8,
        "rollout.max_new_tokens": 768,
        "data.max_len": 832,
        "train.agent_func_path": Path(long_tail_agent.__file__),
        "actor.adam.lr": 1e-3,
        "algo.kl.init_coef": 0,
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_mode": "clip",
        "algo.advantage.is_correction_threshold": 5,
        "rollout.entropy": "sampler",
        "rollout.entropy_audit_steps": 0,
        "train.max_staleness": staleness,
        "ckpt.save_steps": 1,
        "logger.dump_rollouts": 1,
    }
    run = start(place, folder, flags, "--train.async_enable", "--train.partial_rollout_enable", "--ckpt.save_hf")
    assert run.wait() == 0, (folder / "log").read_text()[-4000:]
    trained = rows(folder)
    responses = list(dumped(folder / "checkpoints" / FOLDER))
    models = {0: place / "model"} | {
        step: folder / "checkpoints" / f"global_step{step}_hf" for step in range(1, len(trained))
    }
    scored = {version: scores(model, responses, folder / f"{version}") for version, model in models.items()}
    by_own, by_next, unknown, crossing = [], [], 0, 0
    for place_of, response in enumerate(responses):
        said, versions = response["entropy"], response["versions"]
        unknown += int((versions < 0).sum())
        crossing += len(set(versions)) > 1
        for version in set(versions[versions >= 0].tolist()):
            at = versions == version
            by_own.append(np.abs(said - scored[version][place_of])[at])
            other = version + 1 if version + 1 in scored else version - 1
            by_next.append(np.abs(said - scored[other][place_of])[at])
    return {
        "steps": len(trained),
        "responses": len(responses),
        "of_several_versions": crossing,
        "tokens": int(sum(map(len, by_own))),
        "without_version": unknown,
        "own": spread(by_own),  # |difference| in nats
        "next": spread(by_next),
        "staleness_max": max(row[names.STALENESS_MAX] for row in trained),
    }


def dumped(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return each response's tokens with its prompt, and the entropy and version of each response token."""
    found = []
    for path in sorted(folder.iterdir()):
        dump = read_dump(path)
        columns = {name: dump.columns[name].rows() for name in ("prompt_tokens", "tokens", "entropy", "versions")}
        for prompt, tokens, entropy, versions in zip(*columns.values(), strict=True):
            found.append({"tokens": prompt + tokens, "entropy": np.array(entropy), "versions": np.array(versions)})
    return found


def scores(model: Path, responses: Sequence[Mapping[str, Any]], name: Path) -> list[np.ndarray]:
    """Score each response's tokens with ``model``; return their entropies."""
    given, output = name.with_suffix(".in.jsonl"), name.with_suffix(".out.jsonl")
    given.write_text("".join(json.dumps({"tokens": response["tokens"]}) + "\n" for response in responses))
    argv = ["--model", str(model), "--input", str(given), "--output", str(output), "--dtype", "float32"]
    assert score.main(argv) == 0
    lines = map(json.loads, output.read_text().splitlines())
    return [
        np.array(line["entropies"])[-len(response["entropy"]) :]
        for line, response in zip(lines, responses, strict=True)
    ]


def spread(parts: Sequence[np.ndarray]) -> dict[str, float]:
    found = np.concatenate(parts)
    return {"mean": float(found.mean()), "p99": float(np.quantile(found, 0.99)), "max": float(found.max())}


if __name__ == "__main__":
    sys.exit(main())
