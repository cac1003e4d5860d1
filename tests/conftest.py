"""For every room: a test's outcome depends neither on how busy the machine is nor on who starts pytest."""

import fcntl
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.startup import sitecustomize
from tests.support import ROOT

# No time limits: a first example may import Megatron, and a shared machine may stall for seconds. The same examples
# every time: a rare input is found by whoever changes the test or runs it under another profile
# (--hypothesis-profile=default), not by whoever happens to push. No database, so that no earlier run counts.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# These make programs color or wrap their output as if they wrote to a terminal, or another pytest select other tests.
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE", "COLUMNS", "LINES", "PYTEST_ADDOPTS"):
    os.environ.pop(name, None)
# A container's image may set this; hundreds of processes would then compile this project's files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.update(
    # Nothing fetches a model or reports usage.
    {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
    | {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # With models this small, threads only wait for each other, and there are more processes than cores. What torch
    # compiles, such as vLLM's sampling, takes g++ half a minute on a new machine, and 2 s of each run.
    | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
)

_STARTUP = str(Path(sitecustomize.__file__).parent)  # read here, and by every process that the tests start
if _STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # a pytest worker has it already
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))
sys.path.append(_STARTUP)  # from which some processes get their PYTHONPATH


if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for processes that import `tests.support` as this one does

# Files that one worker has to itself, one after the other. Whole runs take some 4 GB of memory each and often wait, so
# two of the three workers are on these at a time. Ranks are forked by a server that imports Megatron, one per worker.
_CROSSINGS = "tests/e2e/test_crossings.py::test_a_run_with_many_features_keeps_to_each"
_QUEUES = {
    "tests/tools/launch/": "runs 0",  # these often wait too
    "tests/e2e/test_slurm_training.py": "runs 0",
    "tests/e2e/test_launch_scripts.py": "runs 0",
    f"{_CROSSINGS}[megatron": "runs 0",
    "tests/e2e/test_stop.py": "runs 1",
    f"{_CROSSINGS}[deepspeed": "runs 1",
    "tests/e2e/test_quickstart.py": "runs 1",
    "tests/weight_sync/test_vllm_sync.py": "runs 1",
    "tests/megatron/": "ranks",
    "tests/training/test_optimizer_steps.py": "ranks",
    "tests/training/test_checkpoint_files.py": "ranks",
    "tests/training/test_megatron_actor.py": "ranks",
    "tests/training/test_lora.py": "ranks",
    "tests/training/test_routes_of_engine.py": "ranks",
    "tests/tools/planner/test_training_memory.py": "ranks",
    "tests/scoring/": "ranks",
    "tests/lm_head/test_lm_head_sharded.py": "ranks",
}


def _place(nodeid: str) -> int:
    return next((place for place, path in enumerate(_QUEUES) if nodeid.startswith(path)), len(_QUEUES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling  # which a GPU machine does without

    class InQueues(LoadFileScheduling):
        """Gives a worker one file at a time, or a queue of files."""

        def _split_scope(self, nodeid: str) -> str:
            return [*_QUEUES.values(), super()._split_scope(nodeid)][_place(nodeid)]

    return InQueues(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what runs on a pool of ranks, or in its own process that imports torch. Put the queues first."""
    for item in items:
        if {"ranks", "one_rank", "four_ranks", "pools", "fresh"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    items.sort(key=lambda item: _place(item.nodeid))


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects garbage five times at the end, which takes seconds once torch is imported


def of_smoke_runs(name: str, *words: str) -> Path:
    """A smoke run's model, from the project's cache if a smoke run has already made this version."""
    from openrlhf_gtpo.cli import prepare

    folder = ROOT / ".cache" / "quickstart" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one pytest worker makes it, which takes 20 s
        assert prepare.main(["tiny-model", *words, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return of_smoke_runs("tiny-model")


@pytest.fixture(scope="session")
def tiny_mixture() -> Path:
    return of_smoke_runs("tiny-moe", "--moe")


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """This process is the only rank of a gloo group."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks again and again does so every 10 ms, whether it sleeps or waits for an event meanwhile."""
    sleep, wait = time.sleep, threading.Event.wait

    def wait_briefly(event: threading.Event, timeout: float | None = None) -> bool:
        return wait(event, None if timeout is None else min(timeout, 0.01))

    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(threading.Event, "wait", wait_briefly)


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left() -> Iterator[None]:
    """A Ray that a module leaves running would serve every later test, and when one of these ends its processes, Ray
    ends this process a minute later, with status 1 and no message."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        pytest.fail(
            "a test of this module started Ray in pytest's own process, or had Ray start itself, and left it up"
        )
