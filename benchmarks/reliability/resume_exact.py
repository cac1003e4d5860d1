"""Kills runs at random times with SIGKILL, resumes them, and compares their results with an undisturbed run.

    python3 -m benchmarks.reliability.resume_exact --output docs/results/reliability/resume_exact.json --kills 2

On CPU, under `--train.full_determinism_enable`, through Ray and vLLM, on each backend: a whole run, and the same run
with `--kills` kills of all its processes, each a random time after the first step since the last start. Runs have two
episodes with a short last rollout each, a checkpoint every second step, an evaluation every third with the best
checkpoint, an adaptive KL coefficient, a filter, and two optimizer steps per rollout with shuffled rows. DeepSpeed
also has a moving average of the weights, Megatron asynchronous saves. Names that end in -async sample the next rollout
while a step trains. A run of the tiny model takes a minute on two cores.
"""

import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.reliability.tiny_runs import inputs, rows, start
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs

BACKENDS = {
    "deepspeed": ["--train.enable_ema", "--train.ema_beta", "0.5"],
    "megatron": ["--actor.backend", "megatron", "--train.max_tokens_per_gpu", "128", "--megatron.async_save"],
}
AHEAD = ["--train.async_enable", "--algo.advantage.is_correction_level", "token", "--rollout.entropy", "sampler"]
AHEAD += ["--algo.advantage.is_correction_mode", "clip", "--algo.advantage.is_correction_threshold", "5"]
BACKENDS |= {f"{backend}-async": [*flags, *AHEAD] for backend, flags in BACKENDS.items()}
TIMES = ("time", "idle/", names.TIMING_PREFIX, names.TOKENS_PER_SECOND_PREFIX, names.PEAK_MEMORY_PREFIX)
# Responses of even length are right, so that half of the tiny model's groups pass the filter.
REWARD = """
import json
from pathlib import Path

FOLDER = Path(__file__).parent


def reward_func(queries, prompts, labels):
    lines = (FOLDER / "metrics.jsonl").read_text().splitlines()
    step = [row["step"] for row in map(json.loads, lines) if row["kind"] != "eval"][-1]  # or of a start's state
    with open(FOLDER / "responses.jsonl", "a") as file:
        file.write(json.dumps([step + 1, prompts[0], queries[0]]) + "\\n")
    reward = float(len(queries[0]) % 2 == 0)
    return {"rewards": reward, "scores": reward}
"""


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--steps", type=int, default=4, help="about half of a run's, N of 2N")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    args = parser.parse_args()
    instants = random.Random(args.seed)
    results = {}
    with inputs(4 * args.steps + 2) as place:
        for backend in args.backends:
            whole, parts = place / f"{backend}-whole", place / f"{backend}-parts"
            finish(begin(backend, whole, place), whole)
            kills = [kill(begin(backend, parts, place), parts, instants) for _ in range(args.kills)]
            finish(begin(backend, parts, place), parts)
            results[backend] = {"kills": kills} | compare(whole, parts)
        write_results(args.output, args, results)
        differences = {backend: results[backend]["differences"] for backend in args.backends}
        print(json.dumps(differences, indent=1))
        if any(differences.values()):
            sys.exit(1)


def begin(backend: str, run: Path, place: Path) -> psutil.Popen:
    run.mkdir(exist_ok=True)
    (run / "reward.py").write_text(REWARD)
    flags = {
        "actor.num_gpus_per_node": 2,
        "ref.num_gpus_per_node": 2,
        "actor.adam.lr": 3e-4,
        "algo.kl.init_coef": 0.01,
        "algo.kl.target": 0.01,
        "algo.kl.horizon": 64,
        "algo.kl.estimator": "k3",
        "vllm.num_engines": 1,
        "reward.remote_url": run / "reward.py",
        "eval.dataset": place / "task" / "eval.jsonl",
        "eval.steps": 3,
        "rollout.batch_size": 4,
        "rollout.micro_batch_size": 4,
        "train.batch_size": 8,
        "train.micro_batch_size": 4,
        "train.num_episodes": 2,
        "train.seed": 7,
        "ckpt.save_steps": 2,
        "logger.tensorboard_dir": run / "tensorboard",
        "logger.wandb.run_name": "run",
    }
    switches = ("algo.kl.use_loss", "algo.dynamic_filtering_enable", "ckpt.load_enable")
    words = [f"--{name}" for name in (*switches, "train.full_determinism_enable")]
    return start(place, run, flags, *words, *BACKENDS[backend])


def finish(run: psutil.Popen, folder: Path) -> None:
    assert run.wait() == 0, (folder / "log").read_text()[-4000:]


def kill(run: psutil.Popen, folder: Path, instants: random.Random) -> dict[str, Any]:
    """Wait for a step of a started run, and kill all of its processes up to two steps later."""
    before = len(rows(folder))
    while len(rows(folder)) <= before:
        assert run.poll() is None, (folder / "log").read_text()[-4000:]
        time.sleep(0.05)
    seconds = instants.uniform(0, 6)
    time.sleep(seconds)
    assert run.poll() is None, "the run ended before it was killed; give it more --steps"
    processes = [run, *run.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait()
    steps = lines_of(folder)[before:]
    checkpoints = sorted(path.name for path in (folder / "checkpoints" / "_actor").glob("*global_step*"))
    return {"seconds_after_a_step": round(seconds, 2), "processes": len(processes), "steps_made": steps} | {
        "left_in_the_folder": checkpoints
    }


def lines_of(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


def compare(whole: Path, parts: Path) -> dict[str, Any]:
    """Compare two runs; return what was compared, and the names of what differs."""
    differences = []
    metrics, metrics_in_parts = (
        {(row["kind"], row["step"]): without_times(row) for row in read_runs(run)[-1] if row["kind"] != "run"}
        for run in (whole, parts)
    )
    differences += [
        f"metrics {key}"
        for key in metrics.keys() | metrics_in_parts.keys()
        if metrics.get(key) != metrics_in_parts.get(key)
    ]
    responses, responses_in_parts = responses_of(whole), responses_of(parts)
    differences += [
        f"responses of step {key}"
        for key in responses.keys() | responses_in_parts.keys()
        if responses.get(key) != responses_in_parts.get(key)
    ]
    weights, weights_in_parts = (load_file(run / "trained" / "model.safetensors") for run in (whole, parts))
    differences += [f"weight {name}" for name in weights if not torch.equal(weights[name], weights_in_parts[name])]
    scalars, scalars_in_parts = events_of(whole), events_of(parts)
    differences += [
        f"TensorBoard {tag}"
        for tag in scalars.keys() | scalars_in_parts.keys()
        if scalars.get(tag) != scalars_in_parts.get(tag)
    ]
    return {
        "steps": max(step for kind, step in metrics if kind == "train"),
        "steps_made_in_parts": lines_of(parts),
        "metrics": sum(len(row) for row in metrics.values()),
        "responses": sum(len(texts) for texts in responses.values()),
        "weights": len(weights),
        "tensorboard_scalars": sum(len(points) for points in scalars.values()),
        "best_checkpoint": sorted(path.name for path in (parts / "checkpoints" / "_actor").glob("best*")),
        "differences": sorted(differences),
    }


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


def responses_of(run: Path) -> dict[int, list[list[str]]]:
    """Return prompt and text of every response by step; a repeated step has each once."""
    by_step: dict[int, set[tuple[str, str]]] = {}
    for line in (run / "responses.jsonl").read_text().splitlines():
        with suppress(ValueError):  # truncated by the kill
            step, prompt, text = json.loads(line)
            by_step.setdefault(step, set()).add((prompt, text))
    return {step: sorted(map(list, texts)) for step, texts in by_step.items()}


def events_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard" / "run")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.split("/", 1)[1].startswith(TIMES)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


if __name__ == "__main__":
    main()
