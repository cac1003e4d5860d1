"""A program of a model's does what it may, and ends where it must not go on."""

import asyncio
import time
from pathlib import Path

import pytest

from openrlhf_gtpo.tasks.sandbox import run_python, why_no_sandbox

pytestmark = pytest.mark.skipif(why_no_sandbox() is not None, reason=f"no sandbox here: {why_no_sandbox()}")


def run(program: str, seconds: float = 10.0) -> str:
    return asyncio.run(run_python(program, seconds=seconds, disk_mb=4))


def test_an_engine_asks_for_a_sandbox_in_its_event_loop() -> None:
    """It imports the agent's file there."""

    async def ask() -> str | None:
        why_no_sandbox.cache_clear()
        return why_no_sandbox()

    assert asyncio.run(ask()) is None


def test_a_program_computes_prints_and_writes_into_its_folder() -> None:
    assert run("open('a', 'w').write('7'); print(6 * int(open('a').read()), flush=True); 1/0").splitlines()[::3] == [
        "42",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError: [Errno 1] Operation not permitted"),
        ("import threading; threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
        ("open('f', 'wb').write(bytes(8 << 20))", "OSError: [Errno 27] File too large"),
        ("for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))", "OSError: [Errno 28] No space left on device"),
        ("'a' * (1 << 30)", "MemoryError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 1)", "Network is unreachable"),
        ("import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))", "1"),
        ("while True: print('x' * 99)", "[ended after 2000 bytes of output]"),
    ],
)
def test_what_it_may_not_do(program: str, end: str) -> None:
    assert run(program).endswith(end)


@pytest.mark.parametrize(
    "change", ["open({0!r}, 'w')", "import os; os.remove({0!r})", "import os; os.chmod({0!r}, 0)"]
)
def test_the_hosts_disk_is_read_only(change: str, tmp_path: Path) -> None:
    """Also where this user may write, and after a try to make it writable again. The tests' own folder is in /tmp,
    which the program does not see."""
    file = Path(__file__)
    before = file.read_bytes()
    remount = "import ctypes; ctypes.CDLL(None).mount(b'none', b'/', None, 32 | 4096, None); "
    for first in ("", remount):
        assert run(first + change.format(str(file))).endswith(f"[Errno 30] Read-only file system: {str(file)!r}")
    assert file.read_bytes() == before and run(f"open({str(tmp_path)!r} + '/a', 'w')").endswith("/a'")


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(60)", "import sys; sys.stdin.read(1)"]
)
def test_a_program_that_hangs_ends(program: str) -> None:
    began = time.monotonic()
    said = run(program, seconds=1.0)
    assert said.endswith("[ended after 1 s]") or program.startswith("import sys")
    assert time.monotonic() - began < 20
