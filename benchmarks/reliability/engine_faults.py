"""A long run whose engines are killed and stopped, and whose reward raises, at random instants, beside an undisturbed
one of the same seed. Writes JSON: each fault with the seconds until a fresh engine serves, prompts that were lost, and
the rewards of both runs.

    python benchmarks/reliability/engine_faults.py --faults 20 --output docs/results/reliability/engine_faults.json
"""

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from openrlhf_gtpo.cli import prepare
from openrlhf_gtpo.tasks import reasoning_gym_reward

STALL_TIMEOUT = 15
ROWS, PROMPTS, SAMPLES = 64, 8, 4

# Raises about one call in forty, and hangs more seldom, as long as the file `faults` is there.
REWARD = """
import importlib.util, random, time
from pathlib import Path

spec = importlib.util.spec_from_file_location("reward", {reward!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
chance = random.Random()


def reward_func(queries, prompts, labels):
    if Path({folder!r}, "faults").exists():
        draw = chance.random()
        if draw < 0.002:
            time.sleep(10_000)
        if draw < 0.025:
            raise ConnectionError("the grader is away")
    return module.reward_func(queries, prompts, labels)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="of engines; rewards fail beside them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare.main(["tiny-model", "--output", str(place / "model")])
        words = ["--task", "products", "--train-size", str(ROWS), "--eval-size", "8", "--output", str(place / "task")]
        prepare.main(["task", *words])
        disturbed = train(place, "disturbed", args)
        undisturbed = train(place, "undisturbed", args)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
        "stall_timeout": STALL_TIMEOUT,
        "disturbed": disturbed,
        "undisturbed": undisturbed,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in disturbed.items() if name != "faults"}, indent=1))


def train(place: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run to its end, with faults where it is the disturbed one."""
    folder = place / name
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD.format(reward=reasoning_gym_reward.__file__, folder=str(folder)))
    flags: dict[str, Any] = {
        "--actor.model_name_or_path": place / "model",
        "--actor.num_gpus_per_node": 1,
        "--actor.adam.lr": 1e-3,
        "--algo.advantage.estimator": "gtpo",
        "--algo.advantage.is_correction_level": "token",
        "--algo.kl.init_coef": 0,
        "--vllm.num_engines": 2,
        "--reward.remote_url": folder / "reward.py",
        "--data.prompt_dataset": place / "task" / "train.jsonl",
        "--data.label_key": "scorer_label",
        "--data.max_len": 64,
        "--rollout.batch_size": PROMPTS,
        "--rollout.n_samples_per_prompt": SAMPLES,
        "--rollout.max_new_tokens": 8,
        "--rollout.micro_batch_size": 8,
        "--train.batch_size": PROMPTS * SAMPLES,
        "--train.micro_batch_size": 8,
        "--train.num_episodes": -(-args.steps * PROMPTS // ROWS),
        "--train.seed": args.seed,
        "--train.max_restarts": 10_000,
        "--train.stall_timeout": STALL_TIMEOUT,
        "--ckpt.output_dir": folder / "model",
        "--ckpt.path": folder / "checkpoints",
        "--ckpt.save_steps": 1,
        "--ckpt.max_num": 1,
        "--ckpt.best_metric_key": "none",
        "--logger.metrics_path": folder / "metrics.jsonl",
    }
    argv = [*(str(word) for pair in flags.items() for word in pair), "--data.apply_chat_template"]
    faults: list[dict[str, Any]] = []
    starts, began, log = 0, time.monotonic(), folder / "log"
    chance = random.Random(args.seed)
    while True:
        resume = ["--ckpt.load_enable"] if starts else []
        with log.open("a") as output:
            run = psutil.Popen(
                [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv, *resume],
                cwd=folder, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        starts += 1
        if name == "disturbed":
            disturb(run, folder, args.faults, faults, chance)
        code = run.wait()
        # A fault in the middle of a transfer of weights ends the run, which goes on from its last checkpoint.
        if code == 0 or starts > 5:
            break
    text = log.read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if row["kind"] == "train"}
    dropped = sum(row["rollout/dropped_prompts"] for row in steps.values())
    rows_trained = sum(row["rollout/num_samples"] for row in steps.values())
    rewards = [steps[step]["reward/mean"] for step in sorted(steps)]
    recovery = [fault["seconds"] for fault in faults if fault.get("seconds")]
    return {
        "status": code,
        "starts": starts,
        "seconds": round(time.monotonic() - began),
        "steps": len(steps),
        "engine_faults": len(faults),
        "reward_retries": len(re.findall("failed and is tried again", text)),
        "dropped_prompts": dropped,
        "lost_prompts": len(steps) * PROMPTS - dropped - rows_trained / SAMPLES,
        "largest_vllm_kl": max(abs(row["vllm_kl"]) for row in steps.values()),
        "recovery_seconds": {
            "median": statistics.median(recovery) if recovery else None,
            "largest": max(recovery, default=None),
        },
        "reward_of_the_last_ten_steps": statistics.mean(rewards[-10:]),
        "stopped_by": re.findall("train_ppo_ray.*", text),
        "faults": faults,
    }


def disturb(run: psutil.Popen, folder: Path, count: int, faults: list[dict[str, Any]], chance: random.Random) -> None:
    """Until ``count`` faults or the run's end: a signal to the actor of an engine or to vLLM's process of one."""
    until(lambda: (folder / "metrics.jsonl").exists() and steps_of(folder) > 0, run)
    (folder / "faults").touch()
    while len(faults) < count and run.poll() is None:
        until(lambda: len(engines_of(run)) == 2, run)
        time.sleep(chance.uniform(1, 12))
        engines = engines_of(run)
        if len(engines) < 2:
            continue
        actor, core = chance.choice(sorted(engines.items()))
        which, number = chance.choice(["actor", "core"]), chance.choice(
            [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
        )
        with suppress(ProcessLookupError):
            os.kill(actor if which == "actor" else core, number)
        fault = {"signal": number.name, "process": which, "after_step": steps_of(folder)}
        faults.append(fault)
        print(f"{fault}", flush=True)
        began = time.monotonic()
        # A new actor with a new process of vLLM in the place of both.
        old = {actor, core}
        until(partial(replaced, run, old), run)
        if run.poll() is None:
            fault["started_seconds"] = round(time.monotonic() - began, 1)
            until(lambda: (folder / "log").read_text().count("are back") >= len(back(faults)) + 1, run)
        if run.poll() is None:
            fault["seconds"] = round(time.monotonic() - began, 1)
    (folder / "faults").unlink(missing_ok=True)


def back(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fault for fault in faults if "seconds" in fault]


def replaced(run: psutil.Popen, old: set[int]) -> bool:
    found = engines_of(run)
    return len(found) == 2 and not old & {*found, *found.values()}


def steps_of(folder: Path) -> int:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return sum('"kind": "train"' in line or '"kind":"train"' in line for line in lines)


def engines_of(run: psutil.Popen) -> dict[int, int]:
    """Each engine's actor to vLLM's process under it, of those that have one."""
    found = {}
    with suppress(psutil.Error):
        for process in run.children(recursive=True):
            with suppress(psutil.Error):
                if "EngineCore" in " ".join(process.cmdline()):
                    found[process.ppid()] = process.pid
    return found


def until(condition: Any, run: psutil.Popen) -> None:
    deadline = time.monotonic() + 600
    while run.poll() is None and not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.2)


if __name__ == "__main__":
    main()
