"""Kills and stops processes of a supervised run, one after another, and writes what each fault cost.

    python3 benchmarks/reliability/rank_faults.py --rounds 3 --output docs/results/reliability/rank_faults.json

On CPU, through Ray and vLLM, with the tiny model: two DeepSpeed ranks, a reference rank, an engine, a checkpoint after
every step. Each round has every fault once, in an order of its own, each a random time of up to two steps after the
last restart has made a step. The run restarts by itself, and must end with status 0, with every step, and with none of
its processes left. A start takes half a minute on two idle cores.
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from openrlhf_gtpo.cli import prepare
from openrlhf_gtpo.report import names
from openrlhf_gtpo.tasks import reasoning_gym_reward

STALL_TIMEOUT = 30
PROMPTS = 4
# The signal, and what the command line of its target has in it; Ray's processes change theirs from the name of their
# class to that of the one which a running method is declared in.
FAULTS = {
    "rank killed": (signal.SIGKILL, r"ray::\w*Policy"),
    "rank stopped": (signal.SIGSTOP, r"ray::\w*Policy"),
    "reference rank killed": (signal.SIGKILL, r"ray::\w*Reference"),
    "controller killed": (signal.SIGKILL, r"ray::(EntropyTrainer|PPOTrainer)"),
    "controller stopped": (signal.SIGSTOP, r"ray::(EntropyTrainer|PPOTrainer)"),
    "raylet killed": (signal.SIGKILL, "raylet/raylet "),
    "GCS killed": (signal.SIGKILL, "gcs/gcs_server "),
    "driver killed": (signal.SIGKILL, "openrlhf_gtpo.cli.train_ppo_ray"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1, help="of order and instants")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    order = [fault for _ in range(args.rounds) for fault in chance.sample(args.faults, len(args.faults))]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare.main(["tiny-model", "--output", str(place / "model")])
        words = ["--task", "products", "--train-size", "32", "--eval-size", "8", "--output", str(place / "task")]
        prepare.main(["task", *words])
        result = {
            "command": " ".join(["python3", *sys.argv]),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
            "stall_timeout": STALL_TIMEOUT,
            **train(place, order, chance),
        }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if result["status"] or result["steps_missing"] or result["processes_left"]:
        sys.exit("Something was lost, or left.")


def train(place: Path, order: list[str], chance: random.Random) -> dict[str, Any]:
    """A run with a fault after another."""
    steps = 40 * len(order)
    flags: dict[str, Any] = {
        "--actor.model_name_or_path": place / "model",
        "--actor.num_gpus_per_node": 2,
        "--actor.adam.lr": 1e-4,
        "--algo.advantage.estimator": "gtpo",
        "--algo.kl.init_coef": 0.01,
        "--ref.num_gpus_per_node": 1,
        "--vllm.num_engines": 1,
        "--reward.remote_url": reasoning_gym_reward.__file__,
        "--data.prompt_dataset": place / "task" / "train.jsonl",
        "--data.label_key": "scorer_label",
        "--data.max_len": 64,
        "--rollout.batch_size": PROMPTS,
        "--rollout.n_samples_per_prompt": 4,
        "--rollout.max_new_tokens": 8,
        "--rollout.micro_batch_size": 8,
        "--train.batch_size": 16,
        "--train.micro_batch_size": 8,
        "--train.num_episodes": -(-steps * PROMPTS // 32),
        "--train.max_restarts": 2 * len(order),
        "--train.stall_timeout": STALL_TIMEOUT,
        "--ckpt.output_dir": place / "trained",
        "--ckpt.path": place / "checkpoints",
        "--ckpt.save_steps": 1,
        "--ckpt.max_num": 2,
        "--ckpt.best_metric_key": "none",
        "--logger.metrics_path": place / "metrics.jsonl",
    }
    argv = [*(str(word) for pair in flags.items() for word in pair), "--data.apply_chat_template"]
    with (place / "log").open("w") as log:
        run = psutil.Popen(
            [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv], stdout=log, stderr=subprocess.STDOUT
        )
    faults = []
    began = time.monotonic()
    try:
        until(lambda: rows(place), run)  # the first start is no restart
        looked = run.children()[0].create_time() - run.create_time()
        idle, since = cpu_seconds(run), time.monotonic()
        for fault in order:
            found = strike(run, place, fault, chance)
            faults.append(found)
            print(found, flush=True)
        family = run.children(recursive=True)
        share = 0.0
        while run.poll() is None:
            with suppress(psutil.Error):
                share = (cpu_seconds(run) - idle) / (time.monotonic() - since)
                family = run.children(recursive=True) or family
            time.sleep(0.5)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait()
    _, left = psutil.wait_procs(family, timeout=5)
    made = {row["step"] for row in rows(place)}
    return {
        "status": run.returncode,
        "seconds": round(time.monotonic() - began),
        "seconds_of_the_supervisor_before_the_first_start": round(looked, 1),
        "share_of_a_core_that_the_supervisor_takes": round(share, 4),
        "steps": max(made),
        "steps_missing": len(set(range(1, -(-steps * PROMPTS // 32) * 32 // PROMPTS + 1)) - made),
        "processes_left": len(left),
        "of_each": {
            fault: {
                "times": len(ours),
                **{
                    name: [min(values), statistics.median(values), max(values)]
                    for name in ("noticed_seconds", "recovered_seconds", "steps_repeated")
                    if (values := [one[name] for one in ours])
                },
            }
            for fault in dict.fromkeys(order)
            if (ours := [one for one in faults if one["fault"] == fault])
        },
        "faults": faults,
        "said": re.findall("^train_ppo_ray.*", (place / "log").read_text(), re.MULTILINE),
    }


def strike(run: psutil.Popen, place: Path, fault: str, chance: random.Random) -> dict[str, Any]:
    """One fault, and the seconds until it was noticed and until a step was made that was not made before."""
    number, name = FAULTS[fault]
    time.sleep(chance.uniform(0, 2 * rows(place)[-1][names.TIMING_STEP_WALL]))
    before = rows(place)[-1]["step"]
    doing = (place / "metrics.jsonl.phase").read_text()
    restarts = restarts_of(place)
    victims = [one for one in run.children(recursive=True) if re.search(name, " ".join(cmdline(one)))]
    victim = chance.choice(victims) if "ray::" in name else victims[0]  # the driver comes before what it started
    struck = time.monotonic()
    victim.send_signal(number)
    until(lambda: restarts_of(place) > restarts, run)
    noticed = time.monotonic() - struck
    lines = len(rows(place))
    until(lambda: len(rows(place)) > lines, run)
    first = rows(place)[lines]["step"]
    until(lambda: rows(place)[-1]["step"] > before, run)
    return {
        "fault": fault,
        "doing": doing,
        "after_step": before,
        "noticed_seconds": round(noticed, 1),
        "recovered_seconds": round(time.monotonic() - struck, 1),
        "steps_repeated": before - first + 1,
    }


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def cmdline(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def rows(place: Path) -> list[dict[str, Any]]:
    """Of the steps, in the order in which they were made; those that were made again too."""
    with suppress(OSError):
        text = (place / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, text) if row["kind"] == names.KIND_TRAIN]
    return []


def restarts_of(place: Path) -> int:
    return (place / "log").read_text().count("; restart ")


def until(condition: Callable[[], Any], run: psutil.Popen) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert run.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.1)


if __name__ == "__main__":
    main()
