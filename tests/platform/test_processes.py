"""Ranks find each other, end with what started them, and say why one of them failed."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from openrlhf_gtpo import platform
from openrlhf_gtpo.platform.processes import ProcessFailed, run_processes
from tests.support import ROOT, process_functions

pytestmark = pytest.mark.slow


LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def host_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cpu")
    for name in (*LAUNCHER, *THREADS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_rank_is_left(host_without_cuda: None) -> Iterator[None]:
    """No child is left but those that other tests in this process started."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def test_ranks_are_joined_and_share_the_cores() -> None:
    """A module given as an argument is imported after the platform is prepared, ranks listen on loopback only, and
    rank 0 may end before the others."""
    before = dict(os.environ)
    listening = process_functions.listeners(psutil.Process())  # those of other tests
    seen = run_processes(
        process_functions.rank_0_ends_first, 2, 10, process_functions.Importing("flash_attn.bert_padding")
    )
    cores = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert seen.pop("pid") != os.getpid()
    addresses = {address for address, _ in seen.pop("listening") - listening}
    assert addresses and all(address.startswith("127.") or address == "::1" for address in addresses)
    assert seen == {
        "sum": 21,
        "backend": "gloo",
        "device": "cpu",
        "threads": int(cores),
        "module": "flash_attn.bert_padding",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": cores,
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    assert dict(os.environ) == before


def test_a_users_mistake_comes_out_as_it_was_raised() -> None:
    with pytest.raises(process_functions.Misprint, match="^line 3 is no number$") as raised:
        run_processes(process_functions.misprint_on, 2, 1)
    cause = raised.value.__cause__
    assert isinstance(cause, ProcessFailed) and cause.rank == 1
    assert "in misprint_on" in cause.reason


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exits", r"(?s)rank 1 failed: .*in interrupt_on.*SystemExit: 3$"),
        ("killed", "rank 1 failed: the process was ended by SIGKILL"),
        ("killed, its connections first", "rank 1 failed: the process was ended by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_named_not_one_that_lost_its_connection(how: str, message: str) -> None:
    with pytest.raises(ProcessFailed, match=message):
        run_processes(process_functions.interrupt_on, 2, 1, how)


def test_ranks_end_with_the_process_that_started_them() -> None:
    command = [sys.executable, "-m", process_functions.__name__, "sleep", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            ranks = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        finally:
            parent.kill()
        _, alive = psutil.wait_procs(ranks, timeout=600)
    assert not alive


def test_under_torchrun_the_function_runs_in_the_processes_that_are_there() -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "-m", process_functions.__name__]
    command = [sys.executable, "-m", *torchrun, "describe", "2", "10"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    assert len(lines) == 2 and all("'sum': 21" in line for line in lines)
    assert {rank for rank in "01" for line in lines if f"'RANK': '{rank}'" in line} == {"0", "1"}
