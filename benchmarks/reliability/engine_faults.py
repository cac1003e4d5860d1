"""Kills and stops the engines of a supervised run, and makes its reward raise and hang, at random times; compares it
with an undisturbed run.

    python3 -m benchmarks.reliability.engine_faults --faults 50 --output docs/results/reliability/engine_faults.json

On CPU, through Ray and vLLM, with the tiny model: a rank, two engines, a checkpoint after every step. With ``--engines
1`` a fault leaves none, and requests wait for the next engine's weights. ``--backend`` and ``--mode`` select other
runs. A fault is SIGKILL or SIGSTOP to an engine's actor or to vLLM's process under it, up to six seconds after the
last recovery. After the last fault the run is asked to stop (status 75), and must have every step and prompt. The
undisturbed run makes as many steps.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import psutil

from benchmarks.reliability.tiny_runs import (
    SAMPLES,
    STALL_TIMEOUT,
    cmdline,
    end,
    inputs,
    notices_of,
    restarts_of,
    rows,
    spread_by_fault,
    start,
    until,
)
from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.errors import STOPPED_STATUS
from openrlhf_gtpo.report import names
from openrlhf_gtpo.tasks import reasoning_gym_reward

ROWS, PROMPTS = 64, 8
EPISODES = 1000  # the longest run
AHEAD = ("--train.async_enable", "--rollout.entropy", "sampler", "--rollout.entropy_audit_steps", "0")
MODES = {"in turns": (), "one step off": AHEAD, "in flight": (*AHEAD, "--train.partial_rollout_enable")}

# Raises in about one call of forty, and hangs more rarely, while the file `faults` exists.
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
        if draw < 0.0005:
            time.sleep(10_000)
        if draw < 0.025:
            raise ConnectionError("the grader is away")
    return module.reward_func(queries, prompts, labels)
"""


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="of engines; rewards fail beside them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after so many")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--backend", choices=("deepspeed", "megatron"), default="deepspeed")
    parser.add_argument("--mode", choices=MODES, default="in turns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with inputs(ROWS) as place:
        disturbed = train(place, "disturbed", args)
        print(json.dumps(disturbed), flush=True)
        undisturbed = train(place, "undisturbed", args, disturbed["steps"])
        results = {"stall_timeout": STALL_TIMEOUT, "disturbed": disturbed, "undisturbed": undisturbed}
        write_results(args.output, args, results)
        if disturbed["status"] != STOPPED_STATUS or disturbed["steps_missing"] or disturbed["prompts_lost"]:
            sys.exit("Something was lost.")


def train(place: Path, name: str, args: argparse.Namespace, steps: int | None = None) -> dict[str, Any]:
    """Train until the faults are done, or for a number of steps."""
    folder = place / name
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD.format(reward=reasoning_gym_reward.__file__, folder=str(folder)))
    flags = {
        "actor.backend": args.backend,
        "actor.num_gpus_per_node": 1,
        "actor.adam.lr": 1e-3,
        "algo.advantage.is_correction_level": "token",
        "algo.kl.init_coef": 0,
        "vllm.num_engines": args.engines,
        "reward.remote_url": folder / "reward.py",
        "rollout.batch_size": PROMPTS,
        "rollout.micro_batch_size": 8,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.micro_batch_size": 8,
        "train.num_episodes": EPISODES,
        "train.seed": args.seed,
        "train.max_restarts": 1000,
        "train.stall_timeout": STALL_TIMEOUT,
        "ckpt.save_steps": 1,
        "ckpt.max_num": 1,
        "ckpt.best_metric_key": "none",
    }
    began = time.monotonic()
    run = start(place, folder, flags, *MODES[args.mode])
    try:
        until(lambda: rows(folder), run)
        faults = [] if steps else disturb(run, folder, args)
        until(lambda: rows(folder)[-1]["step"] >= (steps or 0), run)
        (folder / "checkpoints" / "stop").touch()
        run.wait()
    finally:
        end(run)
    return summary(folder, run.returncode, round(time.monotonic() - began), faults)


def summary(folder: Path, status: int, seconds: int, faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a run that has ended."""
    text = (folder / "log").read_text()
    steps = {row["step"]: row for row in rows(folder)}  # a repeated step's last row
    rewards = [row["reward/mean"] for _, row in sorted(steps.items())]
    dropped = sum(row[names.DROPPED_PROMPTS] for row in steps.values())
    trained = sum(row["rollout/num_samples"] for row in steps.values()) / SAMPLES
    return {
        "status": status,
        "seconds": seconds,
        "steps": len(steps),
        "steps_missing": max(steps) - len(steps),
        "prompts_dropped": dropped,
        "prompts_lost": len(steps) * PROMPTS - dropped - trained,
        "engine_faults": len(faults),
        "run_restarts": restarts_of(folder),
        "rewards_tried_again": text.count("failed; trying again"),
        "largest_vllm_kl": max(abs(row["vllm_kl"]) for row in steps.values()),
        "reward_and_its_standard_error": [statistics.mean(rewards), statistics.stdev(rewards) / len(rewards) ** 0.5],
        "of_each": spread_by_fault(faults, "noticed_seconds", "start_seconds", "recovered_seconds"),
        "faults": faults,
        "said": re.findall("^train_ppo_ray.*", text, re.MULTILINE),
    }


def disturb(run: psutil.Popen, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Inject ``args.faults`` faults, one after another, or as many as there is time for."""
    chance, deadline = random.Random(args.seed), time.monotonic() + args.seconds
    faults: list[dict[str, Any]] = []
    (folder / "faults").touch()
    while len(faults) < args.faults and time.monotonic() < deadline:
        until(lambda: len(engines_of(run)) == args.engines, run)
        time.sleep(chance.uniform(0, 6))
        engines = engines_of(run)
        actor = chance.choice(sorted(engines))
        which, number = chance.choice(["actor", "core"]), chance.choice([SIGKILL, SIGKILL, SIGSTOP])
        kind = f"{which} {'stopped' if number == SIGSTOP else 'killed'}"
        faults.append({"fault": kind, **strike(run, folder, actor if which == "actor" else engines[actor], number)})
        print(faults[-1], flush=True)
    (folder / "faults").unlink()
    return faults


def strike(run: psutil.Popen, folder: Path, victim: int, number: int) -> dict[str, Any]:
    """Inject one fault. ``start_seconds`` run from the start of the new actor's process to the engine's return,
    ``noticed_seconds`` until then, to a second, because Linux records starts of processes.

    A fault during a weight transfer ends the run, which resumes from its last checkpoint. ``recovered_seconds`` then
    run until the first new step.
    """
    before, back = rows(folder)[-1]["step"], returns_of(folder)
    notices, restarts = notices_of(folder), restarts_of(folder)
    fault = {"doing": (folder / "metrics.jsonl.phase").read_text(), "after_step": before}
    struck = time.time()
    os.kill(victim, number)
    until(lambda: returns_of(folder) > back or notices_of(folder) > notices, run)
    if notices_of(folder) > notices:
        fault |= {"run_noticed_after_seconds": round(time.time() - struck, 1)}
    until(lambda: returns_of(folder) > back or restarts_of(folder) > restarts, run)
    if restarts_of(folder) > restarts:
        fault["run_restarted_after_seconds"] = round(time.time() - struck, 1)
        until(lambda: rows(folder)[-1]["step"] > before, run)
    else:
        started = max(psutil.Process(actor).create_time() for actor in engines_of(run))
        fault |= {"noticed_seconds": round(started - struck, 1), "start_seconds": round(time.time() - started, 1)}
    return fault | {"recovered_seconds": round(time.time() - struck, 1)}


def returns_of(folder: Path) -> int:
    return len(re.findall("vLLM engines .* (?:is|are) back", (folder / "log").read_text()))


def engines_of(run: psutil.Popen) -> dict[int, int]:
    """Map each engine's actor to vLLM's process under it, if it has one."""
    engines = {}
    for process in run.children(recursive=True):
        with suppress(psutil.Error):
            # A dead actor's process has another parent by now.
            if "EngineCore" in cmdline(process) and "Rollout" in cmdline(process.parent()):
                engines[process.ppid()] = process.pid
    return engines


if __name__ == "__main__":
    main()
