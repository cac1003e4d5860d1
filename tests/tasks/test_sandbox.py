"""A program of a model's computes what people compute with, reaches nothing else, and leaves nothing behind: run by
root and by an ordinary user, in what Docker allows, and where namespaces are not allowed."""

import asyncio
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from openrlhf_gtpo.platform import patience
from openrlhf_gtpo.tasks import confined, sandbox
from openrlhf_gtpo.tasks.sandbox import run_python, why_no_sandbox
from openrlhf_gtpo.training.rollout import rewards
from openrlhf_gtpo.training.rollout.rewards import Patience
from tests.support import command_of
from tests.support.slurm_cluster import until

pytestmark = pytest.mark.skipif(why_no_sandbox() is not None, reason=f"no sandbox here: {why_no_sandbox()}")

ROOT = Path(__file__).parents[2]
SANDBOXED = [sys.executable, str(ROOT / "tests" / "support" / "sandboxed.py")]
USER = 4711  # nobody's
# As a container masks /proc: a part of it is hidden, and /proc/sys cannot be written. Its first process goes on while
# something is left.
MASKED = "mount -t tmpfs -o ro none /proc/acpi 2>&- || mount -t tmpfs -o ro none /proc/irq; "
MASKED += "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys; "
MASKED += '"$@"; status=$?; while [ "$(ls -A "$TMPDIR")" ]; do sleep 0.1; done; exit $status'
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
IN_MASKED = ("unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c", MASKED, "-")
WITHOUT = ("unshare", "-U", "-r", "bash", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "-")
# Where programs run: words before the command, and after it.
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "here": ((), ()),
    "an ordinary user": (AS_USER, ()),
    "masked /proc": (IN_MASKED, ()),
    "Docker's rules": ((), ("--docker",)),
    "a container": (IN_MASKED, ("--docker",)),
    "a container, an ordinary user": ((*IN_MASKED, *AS_USER), ("--docker",)),
    "no namespaces": (WITHOUT, ()),
}

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def called(*arguments):
    if libc.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), "")
def tried(attempt):
    try: return attempt()
    except OSError as error: return errno.errorcode[error.errno]
pair = socket.socketpair()
open("mine", "w").close()
"""
HOST = f"/var/tmp/host_of_sandbox_tests_{os.getpid()}"  # a folder with a socket, a label and a link
REACHED: dict[str, list[str]] = {
    "sockets": [
        "socket.socket(socket.AF_UNIX)",
        "socket.socket()",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        f"pair[0].sendto(b'x', '{HOST}/socket')",
        f"pair[0].connect('{HOST}/socket')",
        "pair[0].connect(chr(0) + 'abstract')",
        "pair[0].sendmsg([b'x'])",
        "pair[0].bind('here')",
        "pair[0].listen()",
    ],
    "other processes": [
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.kill(0, 0)",
        "fcntl.fcntl(0, 8, os.getppid())",  # F_SETOWN: whom SIGIO, or another signal, goes to
        "fcntl.fcntl(0, 10, 9)",  # F_SETSIG
        "fcntl.fcntl(0, 15, bytes(8))",  # F_SETOWN_EX
        "fcntl.ioctl(pair[0], 0x8901, bytes(4))",  # FIOSETOWN
        "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "os.sched_setaffinity(os.getppid(), [0])",
        "os.nice(1)",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "os.setsid()",
    ],
    "memory beside its limit": [
        "os.memfd_create('x')",
        "open('/dev/shm/x', 'w')",
        "fcntl.fcntl(pair[0], 1031, 1 << 20)",
    ]
    + [f"os.open('{folder}', os.O_TMPFILE | os.O_RDWR)" for folder in ("/dev/shm", "/var/tmp", "/tmp")],
    "devices": [
        f"os.open('/dev/{name}', {mode} | os.O_NONBLOCK)"
        for name in ("kmsg", "kvm", "mem", "loop-control", "fuse", "ptmx", "tty", "full")
        for mode in ("os.O_RDONLY", "os.O_WRONLY", "os.O_RDWR", "3")
    ],
    "files": [
        *(
            f"open('{path}')"
            for path in ("/etc/passwd", "/proc/self/environ", "/proc/1/environ", f"{HOST}/train.jsonl")
        ),
        *(f"open({str(path)!r})" for path in (ROOT / "README.md", Path(sandbox.__file__), Path(__file__))),
        *(f"os.listdir({str(path)!r})" for path in ("/", "/home", "/proc", "/sys", "/tmp", "/var/tmp", "/etc", ROOT)),
        "os.open('etc/passwd', 0, dir_fd=os.open('/', os.O_PATH))",
        "os.chdir('/etc') or open('passwd')",
        f"os.link('{HOST}/train.jsonl', 'link')",
        f"os.rename('{HOST}/train.jsonl', 'link')",
        "os.symlink('/etc/passwd', 'link')",
        "os.mkfifo('fifo')",
    ],
    "changes": [
        *(f"open('{path}', 'w')" for path in (f"{HOST}/train.jsonl", "/dev/new", "/run/new")),
        "open(os.__file__, 'a')",
        "os.open(os.__file__, os.O_TRUNC)",  # for reading
        "open(os.path.join(sys.path[-1], 'sitecustomize.py'), 'w')",
        "os.remove(os.__file__)",
        *(
            f"{change}"
            for path in (f"'{HOST}/train.jsonl'", "os.__file__", "'mine'")
            for change in (
                f"os.chmod({path}, 0)",
                f"os.chown({path}, 1, 1)",
                f"os.utime({path}, (1, 1))",
                f"os.setxattr({path}, 'user.a', b'1')",
                f"os.truncate({path}, 0)",
            )
        ),
        "os.fchmod(open(os.__file__).fileno(), 0)",
    ],
    "a pseudoterminal's input": ["fcntl.ioctl(0, 0x5412, b'x')"],  # TIOCSTI
}
CALLS = """add_key bpf chroot clone clone3 execveat fanotify_init finit_module fsopen init_module inotify_init1
    io_setup io_uring_setup ioperm kcmp kexec_load keyctl landlock_restrict_self memfd_secret mlockall modify_ldt mount
    mount_setattr move_mount mq_open msgget name_to_handle_at open_by_handle_at open_tree openat2 perf_event_open
    personality pidfd_getfd pidfd_open pidfd_send_signal pivot_root prctl process_madvise process_vm_readv
    process_vm_writev ptrace quotactl reboot request_key rt_sigqueueinfo seccomp semget setns sethostname settimeofday
    setuid shmget swapon sync syslog timer_create umount2 unshare userfaultfd vmsplice"""
# What they must print, and their last line.
COMPUTED = {
    "print(6 * 7)": "42",
    "open('a', 'w').write('7'); print(6 * int(open('a').read()))": "42",
    "import numpy as n; a = n.eye(200); print((a @ a).shape, n.linalg.eigvals(a).shape)": "(200, 200) (200,)",
    "import scipy.optimize as o; print(round(o.brentq(lambda x: x * x - 4, 0, 9), 6))": "2.0",
    "import pandas; print(pandas.DataFrame({'a': [20, 22]}).a.sum())": "42",
    "import sympy; print(sympy.factor(sympy.Symbol('x') ** 2 - 1))": "(x - 1)*(x + 1)",
    "import asyncio; print(asyncio.run(asyncio.sleep(0.01, 42)))": "42",
    "import concurrent.futures as c; print(c.ThreadPoolExecutor.__name__, c.ProcessPoolExecutor.__name__)": (
        "ThreadPoolExecutor ProcessPoolExecutor"
    ),
    "import tempfile\nwith tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile(dir=d) as f:\n"
    "  f.write(b'x'); print(f.tell())": "1",
    "import datetime, zoneinfo; print(datetime.datetime.fromtimestamp(0, zoneinfo.ZoneInfo('Asia/Tokyo')).hour)": "9",
    "import sqlite3; c = sqlite3.connect('d'); c.execute('create table t (x)'); c.commit(); print(42)": "42",
    "import pickle\nclass A: x = 42\nprint(pickle.loads(pickle.dumps(A())).x)": "42",
    "import os; os.kill(os.getpid(), 0); print(len(os.sched_getaffinity(0)) > 0)": "True",
    "if __name__ == '__main__': print(42)\nexit()": "42",
    "import sys; sys.exit('42')": "42",
    "print(input())": "EOFError: EOF when reading a line",
    "1/0": "ZeroDivisionError: division by zero",
    "print(1); os": "NameError: name 'os' is not defined",
    "x = (": "SyntaxError: '(' was never closed",
}
NOTE = "[A program has 512 MB of memory, 60 s, 4 MB of files in its working folder, one process and one thread; no "
NOTE += "network.]"
ENDED = {
    "import subprocess; subprocess.run(['true'])": NOTE,
    "import threading; threading.Thread(target=print).start()": NOTE,
    "import urllib.request; urllib.request.urlopen('http://1.1.1.1')": NOTE,
    "import multiprocessing; multiprocessing.Pool(2)": NOTE,
    "'a' * (1 << 30)": NOTE,
    "try: 'a' * (1 << 30)\nexcept MemoryError as e: raise RuntimeError(f'a library: {e!r}')": NOTE,
    "raise RuntimeError('std::bad_alloc')": NOTE,
    "import mmap; [mmap.mmap(-1, 100 << 20) for _ in range(9)]": NOTE,
    "open('f', 'wb').write(bytes(8 << 20))": NOTE,
    "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))": "ValueError: not allowed to raise maximum limit",
    "while True: print('x' * 99)": "[ended after 9000 bytes of output]",
    "import ctypes; ctypes.string_at(0)": "[ended by SIGSEGV]",
    "import os; os.abort()": "[ended by SIGABRT]",
    "import os; print([fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')])": "[0, 1, 2]",
    "import os\ntry: print(os.write(0, b'x'))\nexcept OSError as e: print(e)": "[Errno 9] Bad file descriptor",
    "import os; print(*sorted(os.environ))": (
        "HOME JE_ARROW_MALLOC_CONF LANG MKL_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH TMPDIR"
    ),
}
WHERE = "import os; disk = os.statvfs('.'); print(disk.f_blocks * disk.f_frsize >> 20)"
SUMMED = (
    "for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))\nprint('written')",
    "for i in range(2000): open(str(i), 'w').close()\nprint('written')",
)


def attempts(expressions: list[str]) -> str:
    return PRELUDE + "".join(f"print(tried(lambda: {expression}), {expression!r})\n" for expression in expressions)


def numbered(names: str) -> list[str]:
    """Attempts of calls by their names, which have other numbers on each architecture."""
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    numbers = {name: resolve(name.encode()) for name in names.split()}
    return [f"called({number}, 0, 0, 0, 0, 0, 0) and {name!r}" for name, number in numbers.items() if number >= 0]


REACHING = {what: attempts(expressions) for what, expressions in (REACHED | {"calls": numbered(CALLS)}).items()}


@pytest.fixture(scope="module")
def host() -> Any:
    """A folder of the host's that everybody may read, with a server's socket and a label."""
    shutil.rmtree(HOST, ignore_errors=True)
    os.mkdir(HOST)
    with socket.socket(socket.AF_UNIX) as server, open(f"{HOST}/train.jsonl", "w") as data:
        server.bind(f"{HOST}/socket")
        server.listen()
        os.chmod(f"{HOST}/socket", 0o777)
        print('{"label": "2247"}', file=data, flush=True)
        os.chmod(f"{HOST}/train.jsonl", 0o666)
        before = os.stat(data.fileno())
        yield
        assert os.stat(data.fileno()) == before
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    shutil.rmtree(HOST)


@contextmanager
def started(
    place: str, programs: Sequence[str], seconds: float = 60.0
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The process that runs programs in a place, whose folder for temporary files must be empty in the end. Skips a
    test where this host has no such place."""
    before, after = PLACES[place]
    if os.getuid() and before and before is not WITHOUT:
        pytest.skip(f"{place}: takes root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as parent:  # not below pytest's, which others may not read
        os.chmod(parent, 0o755)
        (folder := Path(parent) / "temporary").mkdir()
        folder.chmod(0o777)
        calls = [{"program": program, "seconds": seconds, "disk_mb": 4, "output": 9000} for program in programs]
        (file := Path(parent) / "programs.json").write_text(json.dumps(calls))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": "/nonexistent"}
        tried = subprocess.run(
            [*before, sys.executable, "-c", ""], env=environment, cwd="/", capture_output=True, text=True
        )
        if tried.returncode:
            pytest.skip(f"{place}: {tried.stderr.strip()}")
        command = [*before, *SANDBOXED, *after, str(file)]
        with subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process, folder
                until(lambda: not [*folder.iterdir()], 600, "a folder is left")
            finally:
                process.kill()


def said(place: str, programs: Sequence[str]) -> list[str]:
    with started(place, programs) as (process, _):
        return json.loads(process.communicate()[0])


@pytest.mark.parametrize("place", PLACES)
def test_nothing_else_is_reached(place: str, host: None) -> None:
    """The sum of files is limited where namespaces are allowed."""
    *reached, where, many, large = said(place, [*REACHING.values(), WHERE, *SUMMED])
    for program, answer in zip(REACHING.values(), reached, strict=True):
        lines = answer.splitlines()
        assert len(lines) == program.count("print(tried")
        assert not [line for line in lines if line.split()[0] not in ("EPERM", "EACCES", "ENOENT", "ENXIO")]
    expected = NOTE if where == "4" else "written"
    assert [many.splitlines()[-1], large.splitlines()[-1]] == [expected, expected]
    assert where != "4" or place in ("here", "an ordinary user", "masked /proc")


@pytest.mark.parametrize("place", ["here", "a container, an ordinary user"])
def test_what_people_compute_with_runs_and_the_rest_ends_in_one_line(place: str) -> None:
    expected = {program: end for program, end in (COMPUTED | ENDED).items() if has_modules(program)}
    answers = dict(zip(expected, said(place, [*expected]), strict=True))
    assert {program: answer.splitlines()[-1] for program, answer in answers.items()} == expected


def has_modules(program: str) -> bool:
    return all(find_spec(name) for name in ("numpy", "scipy", "pandas", "sympy") if f"import {name}" in program)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_outlives_its_caller(place: str) -> None:
    program = "import os; os.mkdir('a', 0o300); open('a/b', 'w')\nwhile True: pass"
    with started(place, [program] * 2, seconds=600.0) as (process, folder):

        def below() -> list[psutil.Process]:
            return [child for child in psutil.Process(process.pid).children(recursive=True) if child.is_running()]

        until(lambda: sum("confined.py" in command_of(child) for child in below()) == 2, 600, "they start")
        until(lambda: len([*folder.iterdir()]) == 2, 600, "they have folders")
        processes = below()
        callers = [psutil.Process(process.pid), *processes]
        caller = next(child for child in callers if child.cmdline()[1:2] == SANDBOXED[1:])
        caller.kill()
        until(lambda: not any(lives(child) for child in processes), 600, "they end")


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(program: str, seconds: float = 10.0, **limits: Any) -> str:
    return asyncio.run(run_python(program, seconds=seconds, **limits))


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in {1, 2, 15, 24}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(60)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import time\nwhile True: print(1); time.sleep(0.01)",
        "import os\nos.mkdir('a', 0o300); open('a/b', 'w'); os.mkdir('a/c', 0)\nwhile True: pass",
    ],
)
def test_a_program_that_hangs_ends_and_leaves_nothing(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {*psutil.Process().children(recursive=True)}  # such as ranks that another file's tests share
    said = run(program, seconds=1.0, output=10**6).splitlines()[-1]
    assert said == "[ended after 1 s]" or "SIG_IGN" in program and said == "[ended by SIGKILL]"
    assert {*psutil.Process().children(recursive=True)} <= before and not [*tmp_path.iterdir()]


def test_time_is_the_programs_own() -> None:
    """Six of them share one processor, so that each takes thrice its limit."""
    program = "import time\nwhile time.process_time() < 1: pass\nprint('done')"
    calls = [{"program": program, "seconds": 2.0}] * 6
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(calls, file)
        file.flush()
        command = [*SANDBOXED, "--one-processor", file.name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert json.loads(subprocess.check_output(command, env=environment, text=True)) == ["done"] * 6


def test_a_program_that_runs_or_waits_is_no_silence_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in (rewards, patience):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def ask() -> list[str]:
        calls = (Patience(1, 0.2).ask(lambda: run_python("while True: pass", seconds=1.0), "it") for _ in range(9))
        asked = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.1)  # by then each is asked
        now[0] += 600
        return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == ["[ended after 1 s]"] * 9


def test_an_engine_asks_for_a_sandbox_in_its_event_loop() -> None:
    """It imports the agent's file there."""

    async def ask() -> str | None:
        return why_no_sandbox()

    assert asyncio.run(ask()) is None


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        ("landlock_create_ruleset", "ENOSYS", "Landlock is missing here: it needs Linux 5.13 or newer"),
        ("landlock_create_ruleset", "EOPNOTSUPP", "landlock in lsm= on the kernel's command line"),
        (
            "landlock_create_ruleset",
            "EPERM",
            "in a container, seccomp rules that allow it, as Docker has since version 23",
        ),
        ("pidfd_open", "ENOSYS", "Function not implemented"),
    ],
)
def test_a_host_without_it_is_refused_in_a_sentence(call: str, error: str, why: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([*SANDBOXED, "--refuse", call, error], env=environment, text=True)
    assert why in json.loads(said)[0] and "\n" not in json.loads(said)[0]


def test_every_call_of_the_list_has_a_number() -> None:
    """On x86-64; what aarch64 has not, it has a newer kin of. libseccomp lets an unknown name pass."""
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name_arch
    names = {*confined.CALLS, *(name for name, _ in confined.CALLS_IF)}
    assert not [name for name in names if resolve(0xC000003E, name.encode()) < 0]
    kin = {
        "access": "faccessat",
        "dup2": "dup3",
        "epoll_wait": "epoll_pwait",
        "getpgrp": "getpgid",
        "lstat": "newfstatat",
    }
    kin |= {"mkdir": "mkdirat", "pause": "ppoll", "pipe": "pipe2", "poll": "ppoll", "readlink": "readlinkat"}
    kin |= {
        "rename": "renameat",
        "rmdir": "unlinkat",
        "select": "pselect6",
        "stat": "newfstatat",
        "unlink": "unlinkat",
    }
    assert {name for name in names if resolve(0xC00000B7, name.encode()) < 0} == set(kin)
    assert set(kin.values()) <= names
