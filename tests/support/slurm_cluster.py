"""A real SLURM on this machine: munged, slurmctld and two slurmd, with all of their files in one folder.

The nodes n1 and n2 have the addresses 127.0.0.2 and 127.0.0.3, so that what runs on them can use the same port on
both, as on two hosts. There are no cgroups and no accounting. Any user may run it, and several may run at once: their
ports differ, and so do the numbers of their jobs, by which a job's processes are found.
"""

import getpass
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
FirstJobId={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
SlurmctldTimeout=300
SlurmdTimeout=300
KillWait=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={n1} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.3 Port={n2} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_daemons() -> list[str]:
    """The daemons that are not installed."""
    return [name for name in DAEMONS if _program(name) is None]


_ports = itertools.count(15000 + os.getpid() % 400 * 30, 3)  # 30 for each process that tests


def three_free_ports() -> list[int]:
    """Three consecutive ports that nobody listens on now, below those that the system hands out; new each time."""
    while True:
        first = next(_ports)
        ports = [first, first + 1, first + 2]
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                assert first < 30000
                continue
        return ports


def until(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Wait for an event; the limit is for one that never comes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what() if callable(what) else what}"
        time.sleep(0.5)


class SlurmCluster:
    """A cluster that runs until :meth:`stop`; ``environment`` makes SLURM's commands talk to it.

    Raises:
        AssertionError: its daemons do not come up on this host.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        controller, n1, n2 = three_free_ports()
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        text = _CONFIGURATION.format(folder=folder, host=host, user=user, controller=controller, n1=n1, n2=n2)
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "RAY"))}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self._daemons: dict[str, subprocess.Popen] = {}
        try:
            self._bring_up()
        except BaseException:
            self._end_daemons()
            raise

    def _bring_up(self) -> None:
        folder = self.folder
        self._key()
        munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        until((folder / "munge.socket").exists, 600, "munged")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the slurmd of ``node`` and wait until jobs can run there."""
        self._start(node, "slurmd", "-D", "-N", node)
        up = ("idle", "mix", "alloc", "comp")  # with a trailing *, the node does not answer
        until(lambda: self.node_state(node).startswith(up) and self.node_state(node)[-1] != "*", 600, f"{node} is up")

    def kill_node(self, node: str) -> None:
        """End the slurmd of ``node`` at once, as when a host loses power."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--nodes", node, "--format", "%T", check=False).strip()

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Run a SLURM command and return what it prints."""
        ended = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, cwd=self.folder
        )
        said = f"{ended.stdout}{ended.stderr}"
        assert not check or ended.returncode == 0, f"{command} ended with {ended.returncode}: {said}"
        return ended.stdout

    def job_state(self, job: str) -> str:
        """Such as RUNNING, PENDING or COMPLETED."""
        return self._job(job)["JobState"]

    def restarts(self, job: str) -> int:
        return int(self._job(job)["Restarts"])

    def _job(self, job: str) -> dict[str, str]:
        """What SLURM shows of a job. On a busy host scontrol has ended without a word, and is asked again then."""
        show = ("scontrol", "show", "job", job, "--oneliner")
        shown = self.run(*show, check=False) or self.run(*show)
        return dict(word.partition("=")[::2] for word in shown.split())

    def stop(self) -> None:
        """End jobs, then daemons."""
        try:
            for node in NODES:
                if node not in self._daemons:  # a test ended between its death and its return
                    self.start_node(node)
            jobs = self.run("squeue", "--noheader", "--format", "%i", check=False).split()
            if jobs:
                self.run("scancel", *jobs, check=False)
                until(lambda: not self.run("squeue", "--noheader", check=False).strip(), 600, "jobs end")
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(timeout=600)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _key(self) -> None:
        path = self.folder / "munge.key"
        path.touch(0o600)
        path.write_bytes(os.urandom(1024))

    def _start(self, name: str, program: str, *arguments: str) -> None:
        found = _program(program)
        assert found is not None
        with (self.folder / f"{name}.out").open("a") as out:
            self._daemons[name] = subprocess.Popen(
                [found, *arguments], env=self.environment, stdout=out, stderr=subprocess.STDOUT, cwd=self.folder
            )


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")
