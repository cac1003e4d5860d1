"""Kills and stops processes of a supervised run, one after another, and writes the cost of each fault.

    python3 -m benchmarks.reliability.rank_faults --rounds 3 --output docs/results/reliability/rank_faults.json

On CPU, through Ray and vLLM, with the tiny model: two DeepSpeed ranks, a reference rank, an engine, a checkpoint after
every step. Each round has every fault once, in random order, at a random time of up to two steps after the first step
since the last restart. The run restarts by itself. It must end with status 0, with every step, and without a process
left behind. A start takes half a minute on two idle cores.
"""

import random
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.reliability.tiny_runs import (
    STALL_TIMEOUT,
    cmdline,
    end,
    inputs,
    notices_of,
    rows,
    spread_by_fault,
    start,
    until,
)
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.report import names
from openrlhf_gtpo.tasks import reasoning_gym_reward

PROMPTS, QUESTIONS = 4, 32
# The signal, and a part of its target's command line. Ray changes a process's command line from the name of its class
# to the name of the class that declares the running method.
FAULTS = {
    "rank killed": (signal.SIGKILL, r"ray::\w*Policy"),
    "rank stopped": (signal.SIGSTOP, r"ray::\w*Policy"),
    "reference rank killed": (signal.SIGKILL, r"ray::\w*Reference"),
    "controller killed": (signal.SIGKILL, r"ray::\w*Controller"),
    "controller stopped": (signal.SIGSTOP, r"ray::\w*Controller"),
    "raylet killed": (signal.SIGKILL, "raylet/raylet "),
    "GCS killed": (signal.SIGKILL, "gcs/gcs_server "),
    "driver killed": (signal.SIGKILL, "openrlhf_gtpo.cli.train_ppo_ray"),
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1, help="of order and instants")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    order = [fault for _ in range(args.rounds) for fault in chance.sample(args.faults, len(args.faults))]
    with inputs(QUESTIONS) as place:
        result = train(place, order, chance)
        write_results(args.output, args, {"stall_timeout": STALL_TIMEOUT, **result})
        print(args.output.read_text(), end="")
        if result["status"] or result["steps_missing"] or result["processes_left"]:
            sys.exit("Something was lost or left behind.")


def train(place: Path, order: list[str], chance: random.Random) -> dict[str, Any]:
    """Train with one fault after another."""
    episodes = -(-40 * len(order) * PROMPTS // QUESTIONS)
    flags = {
        "actor.num_gpus_per_node": 2,
        "actor.adam.lr": 1e-4,
        "algo.kl.init_coef": 0.01,
        "ref.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "reward.remote_url": reasoning_gym_reward.__file__,
        "rollout.batch_size": PROMPTS,
        "rollout.micro_batch_size": 8,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "train.num_episodes": episodes,
        "train.max_restarts": 2 * len(order),
        "train.stall_timeout": STALL_TIMEOUT,
        "ckpt.save_steps": 1,
        "ckpt.max_num": 2,
        "ckpt.best_metric_key": "none",
    }
    # Inject one fault after another, then wait for the end of the run.
    run = start(place, place, flags)
    faults = []
    began = time.monotonic()
    try:
        until(lambda: rows(place), run)  # the first start is not a restart
        looked = run.children()[0].create_time() - run.create_time()
        idle, since = cpu_seconds(run), time.monotonic()
        for fault in order:
            measured = strike(run, place, fault, chance)
            faults.append(measured)
            print(measured, flush=True)
        family = run.children(recursive=True)
        share = 0.0
        while run.poll() is None:
            with suppress(psutil.Error):
                share = (cpu_seconds(run) - idle) / (time.monotonic() - since)
                family = run.children(recursive=True) or family
            time.sleep(0.5)
    finally:
        end(run)
    _, survivors = psutil.wait_procs(family, timeout=5)
    steps = {row["step"] for row in rows(place)}
    return {
        "status": run.returncode,
        "seconds": round(time.monotonic() - began),
        "seconds_of_the_supervisor_before_the_first_start": round(looked, 1),
        "share_of_a_core_that_the_supervisor_takes": round(share, 4),
        "steps": max(steps),
        "steps_missing": len(set(range(1, episodes * QUESTIONS // PROMPTS + 1)) - steps),
        "processes_left": len(survivors),
        "of_each": spread_by_fault(faults, "noticed_seconds", "recovered_seconds", "steps_repeated"),
        "faults": faults,
        "said": re.findall("^train_ppo_ray.*", (place / "log").read_text(), re.MULTILINE),
    }


def strike(run: psutil.Popen, place: Path, fault: str, chance: random.Random) -> dict[str, Any]:
    """Inject one fault; return the seconds until it was noticed and until the first new step."""
    number, name = FAULTS[fault]
    time.sleep(chance.uniform(0, 2 * rows(place)[-1][names.TIMING_STEP_WALL]))
    before = rows(place)[-1]["step"]
    doing = (place / "metrics.jsonl.phase").read_text()
    notices = notices_of(place)
    victims = [process for process in run.children(recursive=True) if re.search(name, cmdline(process))]
    victim = chance.choice(victims) if "ray::" in name else victims[0]  # the driver comes before its children
    struck = time.monotonic()
    victim.send_signal(number)
    until(lambda: notices_of(place) > notices, run)
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


if __name__ == "__main__":
    main()
