"""Drops this process's rights that a model's program must not have, then runs the program from stdin. ``sandbox``
starts it as a script: ``confined.py PARENT SECONDS MEMORY_MB DISK_MB FOLDER SITE_PACKAGES…``.

Two kernel mechanisms need no privilege and also work in a container: Landlock for files, and a filter that lists the
allowed system calls. Where namespaces are allowed, the folder is also a disk in memory.
"""

import ctypes
import os
import resource
import signal
import site
import struct
import sys
from fcntl import F_DUPFD, F_DUPFD_CLOEXEC, F_SETLKW
from types import ModuleType

_libc = ctypes.CDLL(None, use_errno=True)

# The allowed system calls. None of them starts a process or thread, reaches another one, opens a socket, changes a
# file's mode, owner or times, or takes memory that RLIMIT_AS does not count. Names that only x86-64 has are listed
# with their newer equivalents.
CALLS = """
    access brk chdir clock_getres clock_gettime clock_nanosleep close close_range copy_file_range dup dup2 dup3
    epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat faccessat2 fadvise64 fallocate
    fchdir fdatasync fstat fstatfs fsync ftruncate futex getcpu getcwd getdents64 getegid geteuid getgid getgroups
    getitimer getpeername getpgid getpgrp getpid getppid getrandom getresgid getresuid getrusage getsid getsockname
    getsockopt gettid gettimeofday getuid lseek lstat madvise mkdir mkdirat mmap mprotect mremap msync munmap nanosleep
    newfstatat pause pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 pwritev read readlink readlinkat readv
    recvfrom rename renameat renameat2 restart_syscall rmdir rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sched_getaffinity sched_yield select sendfile setitimer shutdown sigaltstack stat
    statfs statx sysinfo timerfd_create timerfd_gettime timerfd_settime times umask uname unlink unlinkat write writev
""".split()
_ANY = 2**64 - 1  # a mask: the whole argument
# Also allowed, if an argument matches: (its position, mask, value under the mask).
CALLS_IF: list[tuple[str, tuple[tuple[int, int, int], ...]]] = [
    # Landlock misses files opened for neither reading nor writing (3) and, before Linux 6.2, O_TRUNC.
    ("openat", ((2, os.O_ACCMODE | os.O_TRUNC, os.O_RDONLY),)),
    ("openat", ((2, os.O_ACCMODE, os.O_WRONLY),)),
    ("openat", ((2, os.O_ACCMODE, os.O_RDWR),)),
    # A pair's ends can only reach each other. No datagrams, which can go anywhere.
    ("socketpair", ((0, _ANY, 1), (1, 0xF, 1))),  # AF_UNIX, SOCK_STREAM
    ("sendto", ((4, _ANY, 0),)),
    # Signals to itself.
    ("kill", ((0, _ANY, os.getpid()),)),
    ("tgkill", ((0, _ANY, os.getpid()),)),
    ("prlimit64", ((0, _ANY, 0),)),
    # Without F_SETOWN, which sends signals to another process, F_NOTIFY and leases.
    *(("fcntl", ((1, _ANY, command),)) for command in (*range(F_DUPFD, F_SETLKW + 1), F_DUPFD_CLOEXEC)),
    # TCGETS, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX of asm-generic/ioctls.h.
    *(("ioctl", ((1, _ANY, command),)) for command in (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)),
]
_ALLOW, _EPERM, _MASKED_EQUAL = 0x7FFF0000, 0x00050001, 7  # seccomp.h of libseccomp

# linux/landlock.h
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _REFER, _TRUNCATE = (
    1 << bit for bit in (1, 2, 3, 4, 5, 7, 8, 13, 14)
)
_OWN_FOLDER = _WRITE_FILE | _READ_DIR | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE


def _check(failed: bool, what: str) -> None:
    if failed:
        sys.exit(f"{what} ({os.strerror(ctypes.get_errno())})")


def _enter_namespaces(folder: str, disk_mb: int) -> None:
    """Mount a private disk in memory over ``folder``, which disappears with this process, and drop the network and
    System V's memory as a second barrier. Where namespaces are not allowed, the folder stays as it is."""
    uid, gid = os.getuid(), os.getgid()
    if _libc.unshare(0x10000000 | 0x20000 | 0x40000000 | 0x08000000):  # CLONE_NEWUSER, NEWNS, NEWNET, NEWIPC
        return
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:  # no /proc
        return
    _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 2 | 4, f"size={disk_mb}m,nr_inodes=1000,mode=700".encode())


def _limit_files(folder: str, readable: list[str]) -> None:
    version = _libc.syscall(444, None, 0, 1)  # landlock_create_ruleset; 445 is add_rule, 446 restrict_self
    _check(
        version < 1,
        "Landlock is missing here: it needs Linux 5.13 or newer with landlock in lsm= on the kernel's command line "
        "and, in a container, seccomp rules that allow it, as Docker has since version 23",
    )
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = _libc.syscall(444, struct.pack("Q", handled), 8, 0)
    _check(rules < 0, "Landlock cannot make rules")
    rights = dict.fromkeys(filter(os.path.exists, readable), _READ_FILE | _READ_DIR)
    for path, right in {**rights, folder: _READ_FILE | _OWN_FOLDER, "/dev/null": _READ_FILE | _WRITE_FILE}.items():
        if not os.path.isdir(path):
            right &= _READ_FILE | _WRITE_FILE
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check(_libc.syscall(445, rules, 1, struct.pack("=Qi", right & handled, place), 0), f"Landlock and {path}")
        os.close(place)
    _check(_libc.syscall(446, rules, 0), "Landlock cannot restrict this process")
    os.close(rules)


def _limit_calls() -> None:
    try:
        seccomp = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        sys.exit("libseccomp is missing here: install libseccomp2 (Debian, Ubuntu) or libseccomp (Fedora, RHEL)")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(_EPERM))
    for name, arguments in [*((name, ()) for name in CALLS), *CALLS_IF]:
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        fits = b"".join(struct.pack("IIQQ", place, _MASKED_EQUAL, mask, value) for place, mask, value in arguments)
        failed = number != -1 and seccomp.seccomp_rule_add_array(rules, _ALLOW, number, len(arguments), fits)
        _check(failed, f"libseccomp knows no rule for {name}")
    _check(seccomp.seccomp_load(rules), "The kernel accepts no filter of system calls: it needs CONFIG_SECCOMP_FILTER")


def _confine(parent: int, seconds: int, memory_mb: int, disk_mb: int, folder: str, packages: list[str]) -> None:
    # End with the parent.
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    _enter_namespaces(folder, disk_mb)
    os.chdir(folder)
    limits = {"AS": memory_mb << 20, "FSIZE": disk_mb << 20, "NOFILE": 64, "MSGQUEUE": 0}
    limits["CORE"] = 1  # not 0, which core dumps through a pipe ignore
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))  # SIGXCPU, then SIGKILL
    # Drop all capabilities: root's, and the namespace's.
    _check(_libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "Capabilities remain")
    _check(_libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS is refused")
    prefixes = (sys.prefix, sys.base_prefix, "/usr", "/")
    libraries = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64")]
    others = ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/zero", "/dev/urandom"]
    _limit_files(folder, [*packages, *libraries, *others])
    _limit_calls()


# Parts of the errors that a limit raises.
_MET = (
    *("not permitted", "Permission denied", "new thread"),
    *("failed to map segment", "allocate memory", "No space left", "too large"),
    *("MemoryError", "bad_alloc"),  # in the error of a library that caught it
)


def main(parent: str, seconds: str, memory_mb: str, disk_mb: str, folder: str, *packages: str) -> None:
    """Run the program on stdin, confined. If it hits a limit, the last line lists the limits."""
    source = sys.stdin.buffer.read()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path += packages  # without site's .pth files, which may run any code
    site.setquit()
    _confine(int(parent), int(seconds), int(memory_mb), int(disk_mb), folder, list(packages))
    sys.argv = ["-"]
    sys.modules["__main__"] = module = ModuleType("__main__")
    try:
        exec(compile(source, "<stdin>", "exec", dont_inherit=True), vars(module))
    except Exception as error:
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # the traceback without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, MemoryError) or any(words in str(error) for words in _MET):
            print(
                f"[A program has {memory_mb} MB of memory, {seconds} s, {disk_mb} MB of files in its working folder, "
                "one process and one thread; no network.]",
                file=sys.stderr,
            )
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
