"""The cost of the safeguards in a run without faults, as shares: an asynchronous checkpoint at every step, the
checksums of a save, and the supervising process.

    python3 -m benchmarks.reliability.shares --output docs/results/reliability/shares.json

One Megatron rank on this host, with the quickstart's model and batch (135M parameters, 16 x 8 responses). A step here
is log-probs, advantages and training, without the rollout, so the share of a whole step is smaller. Steps with and
without the checkpoint alternate in one process, and a share is taken within a turn: of the seconds, and of the
processor time of all threads, which other load on the machine disturbs less. Checksums are timed within each save.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from openrlhf_gtpo import platform

os.environ.setdefault(platform.PLATFORM_VARIABLE, "cpu")
platform.activate()

import xxhash  # noqa: E402

from benchmarks.suite.harness import measure, ratios, spread  # noqa: E402
from benchmarks.suite.random_model import random_model  # noqa: E402
from benchmarks.suite.results import write_results  # noqa: E402
from benchmarks.suite.train_step import Step  # noqa: E402
from openrlhf_gtpo.cli import Parser  # noqa: E402
from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints  # noqa: E402
from openrlhf_gtpo.megatron.model.policy import ModelOptions  # noqa: E402
from openrlhf_gtpo.megatron.parallel import groups  # noqa: E402
from openrlhf_gtpo.megatron.parallel.layout import Layout  # noqa: E402
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer  # noqa: E402
from openrlhf_gtpo.platform.processes import run_processes  # noqa: E402
from openrlhf_gtpo.report.heartbeat import Heartbeat  # noqa: E402
from openrlhf_gtpo.tools.launch.process_tree import run_and_clear  # noqa: E402

_PROCESSES = 16  # a small run with Ray and an engine
_SHAPE = {  # SmolLM2-135M, the quickstart's model
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30, help="with fewer, bytes and arithmetic shrink alike")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each comparison")
    parser.add_argument("--seconds", type=float, default=60.0, help="of supervision")
    parser.add_argument("--output", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = {"supervision": supervision_share(args.seconds), **run_processes(checkpoint_shares, 1, args)}
    for name, numbers in results.items():
        print(name, numbers, flush=True)
    write_results(args.output, args, results)


def checkpoint_shares(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the checkpoint's shares, in the one rank of the default group."""
    batch = {"prompts": 16, "samples": 8, "prompt_tokens": 32, "response_tokens": 32, "max_tokens": 1024, "seed": 1}
    groups.initialize(Layout(), seed=1)
    shape: dict[str, Any] = _SHAPE | {"num_hidden_layers": args.layers}
    trainer = Trainer(random_model(shape, ModelOptions(), 1), OptimizerOptions())
    step = Step(trainer, argparse.Namespace(**batch), shape["vocab_size"])

    def one_step() -> None:
        step.old_policy(), step.advantages(), step.train()

    with tempfile.TemporaryDirectory() as folder:
        later = Checkpoints(Path(folder, "later"), asynchronous=True, max_num=1)
        now = Checkpoints(Path(folder, "now"), max_num=1)
        step.new_batch(0)
        one_step()  # creates the optimizer's states
        later.save("first", trainer, {})
        later.finish()

        def step_with_save() -> None:
            later.save("step", trainer, {})
            one_step()
            later.finish()

        def checksums() -> list[float]:
            """Measure, for each save, the hash's share of its processor time."""
            shares = []
            for _ in range(args.repeat):
                TimedHash.seconds, began = 0.0, time.process_time()
                with mock.patch.object(xxhash, "xxh3_64", TimedHash):
                    now.save("step", trainer, {})
                shares.append(TimedHash.seconds / (time.process_time() - began))
            return shares

        return {
            "asynchronous_checkpoint_of_the_step": compared(one_step, step_with_save, args.repeat),
            "checksums_of_a_save": {"share_of_processor_seconds": spread(checksums())},
            "bytes_of_a_checkpoint": sum(path.stat().st_size for path in Path(folder, "now/step").rglob("*")),
        }


class TimedHash:
    seconds = 0.0
    new = xxhash.xxh3_64

    def __init__(self) -> None:
        self._hash = self.new()

    def update(self, data: Any) -> None:
        began = time.thread_time()
        self._hash.update(data)
        TimedHash.seconds += time.thread_time() - began

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def compared(without: Callable[[], Any], with_it: Callable[[], Any], repeat: int) -> dict[str, Any]:
    """Relative extra cost of ``with_it`` over ``without``: lowest, median, highest turn."""
    used: dict[str, list[float]] = {"without": [], "with": []}  # processor seconds

    def counted(name: str, run: Callable[[], Any]) -> None:
        began = time.process_time()
        run()
        used[name].append(time.process_time() - began)

    sides = {"without": {"": partial(counted, "without", without)}, "with": {"": partial(counted, "with", with_it)}}
    seconds = {name: side.seconds[""] for name, side in measure(sides, repeat, warm_up=0).items()}
    result: dict[str, Any] = {}
    for clock, by_side in (("seconds", seconds), ("processor_seconds", used)):
        result[clock] = {name: statistics.median(values) for name, values in by_side.items()}
        result[f"share_of_{clock}"] = spread(ratio - 1 for ratio in ratios(by_side["with"], by_side["without"]))
    return result


def supervision_share(seconds: float) -> dict[str, float]:
    """Measure the supervising process's share of one core while it watches a healthy run."""
    waiting = f"sleep {seconds} & " * _PROCESSES + "wait"
    with tempfile.TemporaryDirectory() as folder:
        run, supervisor = Heartbeat(folder), Heartbeat(folder)
        run.beat()
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        status = run_and_clear(["bash", "-c", waiting], os.environ, hangs=lambda: 0 < 1e9 < supervisor.silence())
        after, took = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    assert status == 0, status
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"share_of_a_core": used / took, "seconds": took}


if __name__ == "__main__":
    main()
