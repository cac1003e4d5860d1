"""Kills real processes that load, train a little and save in a loop, at random times: is a checkpoint ever lost?

    python3 -m benchmarks.reliability.checkpoint_kills --kills 200 --output checkpoint_kills.json

Two gloo ranks on this host, forked from a process that has imported everything. Each kill ends both with SIGKILL.
Afterwards the newest checkpoint must be at least the last one that a rank reported as saved, every byte must be as
written, and the next two ranks must load it, with its step's weights. All kills of a kind share one folder, with
--ckpt.max_num 2, so rotation and leftovers of earlier kills are covered. A kill keeps the page cache, so it tests a
dead process, not a power cut.
"""

import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from openrlhf_gtpo import platform  # noqa: E402

os.environ.setdefault(platform.PLATFORM_VARIABLE, "cpu")
platform.activate()

import deepspeed  # noqa: E402
import torch  # noqa: E402

from benchmarks.suite.results import write_results  # noqa: E402
from openrlhf_gtpo.checkpoints.files import check_file  # noqa: E402
from openrlhf_gtpo.checkpoints.folder import newest_whole, read_manifest  # noqa: E402
from openrlhf_gtpo.cli import Parser  # noqa: E402
from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints  # noqa: E402
from openrlhf_gtpo.megatron.parallel import groups  # noqa: E402
from openrlhf_gtpo.megatron.parallel.layout import Layout  # noqa: E402
from openrlhf_gtpo.training.actors.strategy import Strategy  # noqa: E402
from tests.support.checkpoint_program import make_trainer  # noqa: E402
from tests.support.families import make_checkpoint  # noqa: E402

RANKS = 2
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "head_dim": 64}  # 14 M parameters
LONGEST = 1.5  # seconds between a load and the kill
Say = Callable[[int], None]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill of a kind after so many")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the counts to this JSON file")
    args = parser.parse_args()
    by_kind = {}
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = name  # killed ranks do not clean up
        source = str(make_checkpoint(Path(name) / "model", "llama", 2048, **SHAPE))
        for kind in args.kinds:
            folder = Path(name) / kind / "_actor"
            by_kind[kind] = kill_repeatedly(KINDS[kind], source, folder, args.kills, args.seconds, args.seed)
            print(kind, by_kind[kind], flush=True)
            shutil.rmtree(folder)
    write_results(args.output, args, {"kinds": by_kind})
    if any(counts["lost"] or counts["damaged"] or counts["not_loaded"] for counts in by_kind.values()):
        sys.exit("A checkpoint was lost.")


def kill_repeatedly(
    work: Callable, source: str, folder: Path, kills: int, seconds: float, seed: int
) -> dict[str, float]:
    """Kill one kind of ranks repeatedly, and return the counts; see the top of this file."""
    instants, began = random.Random(seed), time.monotonic()
    counts = {"kills": 0, "lost": 0, "damaged": 0, "not_loaded": 0, "saves": 0, "left_unfinished": 0}
    saved = 0  # the last step reported as saved
    while counts["kills"] < kills and time.monotonic() - began < seconds:
        pids, pipe = start_ranks(partial(work, source, folder))
        loaded = next_step(pipe)  # None where the ranks ended
        counts["not_loaded"] += loaded is None or loaded < saved
        time.sleep(instants.uniform(0, LONGEST))
        for pid in instants.sample(pids, len(pids)):
            os.kill(pid, signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        assert all(os.WTERMSIG(status) == signal.SIGKILL for status in statuses), f"a rank failed: {statuses}"
        while (step := next_step(pipe)) is not None:
            counts["saves"] += step > saved
            saved = max(saved, step)
        os.close(pipe)
        newest = newest_whole(folder)
        counts["kills"] += 1
        counts["left_unfinished"] += any(".tmp-" in path.name for path in folder.iterdir())
        if newest is None:
            counts["lost"] += saved > 0
            continue
        counts["lost"] += int(newest.name.removeprefix("step")) < saved
        try:
            for file, entry in read_manifest(newest)["files"].items():
                check_file(newest, file, entry, checksum=True)
        except ValueError as error:
            counts["damaged"] += 1
            print(error, flush=True)
    return counts | {"seconds": time.monotonic() - began}


def start_ranks(work: Callable[[Say], None]) -> tuple[list[int], int]:
    """Fork the ranks; return their process ids, and a pipe from the first one for :func:`next_step`."""
    reader, writer = os.pipe()
    rendezvous = tempfile.mktemp()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            os.close(reader)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
            sys.stdout = open(os.devnull, "w")
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
            )
            work(partial(_say, writer if rank == 0 else None))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)  # reached only after an error
    os.close(writer)
    return pids, reader


def _say(pipe: int | None, step: int) -> None:
    if pipe is not None:
        os.write(pipe, struct.pack("q", step))


def next_step(pipe: int) -> int | None:
    data = os.read(pipe, 8)
    return struct.unpack("q", data)[0] if data else None


def on_megatron(asynchronous: bool, source: str, folder: Path, say: Say) -> None:
    groups.initialize(Layout(), seed=1)
    trainer = make_trainer(source, Layout())
    checkpoints = Checkpoints(folder, asynchronous=asynchronous, max_num=2)
    parameters = list(trainer.model.stage.parameters())
    step = checkpoints.load(trainer).get("step", 0)
    assert_are(parameters, step)
    say(step)
    while True:
        step += 1
        set_to(parameters, step)
        checkpoints.save(f"step{step}", trainer, {"step": step})
        say(step - asynchronous)
        while checkpoints._pending is not None:  # training goes on
            set_to(parameters, -1)
            time.sleep(0.005)
            checkpoints.finish(wait=False)
        say(step)


def on_deepspeed(source: str, folder: Path, say: Say) -> None:
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # as CpuStrategy
    deepspeed.init_distributed("gloo")
    size = 1024
    module = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(14)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), lr_scheduler=schedule, config=config
    )
    strategy: Any = object.__new__(Strategy)
    strategy.use_ds_universal_ckpt = False
    strategy.arguments = SimpleNamespace(
        critic=SimpleNamespace(model_name_or_path=None),
        ckpt=SimpleNamespace(load_tag=None, path=folder.parent),
    )
    parameters = list(engine.module.parameters())
    _, states = strategy.load_ckpt(engine, str(folder))
    step = states.get("step", 0)
    assert_are(parameters, step)
    say(step)
    while True:
        step += 1
        set_to(parameters, step)
        strategy.save_ckpt(engine, str(folder), f"step{step}", 2, 1000, {"step": step})
        say(step)


def set_to(parameters: list[torch.nn.Parameter], step: int) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(step % 128)  # exact in bfloat16


def assert_are(parameters: list[torch.nn.Parameter], step: int) -> None:
    assert step == 0 or all((parameter == step % 128).all() for parameter in parameters), f"not of step {step}"


KINDS: dict[str, Callable] = {
    "deepspeed": on_deepspeed,
    "megatron": partial(on_megatron, False),
    "megatron-asynchronous": partial(on_megatron, True),
}

if __name__ == "__main__":
    main()
