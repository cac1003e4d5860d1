"""A SLURM of two nodes for the tests in one file, and jobs in it that run this project's batch script."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.slurm_cluster import SlurmCluster, missing_daemons, three_free_ports

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "scripts" / "train_gtpo_slurm.sh"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    missing = missing_daemons()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)")
    # Sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder:
        try:
            slurm = SlurmCluster(Path(folder))
        except AssertionError as error:
            pytest.skip(f"SLURM is installed, but does not come up on this host: {error}")
        try:
            yield slurm
        finally:
            slurm.stop()


@dataclass
class Job:
    """One job of the batch script, and what it leaves in its folder."""

    cluster: SlurmCluster
    number: str
    folder: Path
    port: int

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    @property
    def everything(self) -> str:
        """The ends of all its logs, for a failed assertion to show."""
        paths = [self.folder / "job.log", *sorted((self.folder / "run").glob("slurm/*/*.log"))]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in paths if path.exists())

    def state(self) -> str:
        return self.cluster.job_state(self.number)

    def ended(self) -> bool:
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

    def processes(self) -> list[psutil.Process]:
        """The job's processes, with their ``info["name"]``: the trees under SLURM's step daemons."""
        found: set[int] = set()
        all_processes = list(psutil.process_iter(["cmdline", "name", "ppid"]))
        roots = [p for p in all_processes if " ".join(p.info["cmdline"] or []).startswith(self._step_daemon)]
        pending = {process.pid for process in roots}
        while pending:
            pending = {p.pid for p in all_processes if p.info["ppid"] in pending} - found
            found |= pending
        return [process for process in all_processes if process.pid in found]

    @property
    def _step_daemon(self) -> str:
        return f"slurmstepd: [{self.number}."


def submit(cluster: SlurmCluster, folder: Path, launcher: Path, *trainer_flags: str, **environment: str) -> Job:
    """Submit a job with ``sbatch`` and what a user would change in the header for these two nodes."""
    logical = "--num-gpus=2 --num-cpus=8"  # a host without GPUs just counts them
    port = three_free_ports()[0]
    settings = {
        "LAUNCHER": str(launcher),
        "OUTPUT": str(folder / "run"),
        "SETUP": f"export PATH={Path(sys.executable).parent}:$PATH",
        "RAY_FLAGS": logical,
        "PORT": str(port),
        "ROOT": str(ROOT),
        "NODE_TMP": str(cluster.folder),  # where a killed node leaves its files
    }
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=0", "--exclusive=user"]
    sbatch += [f"--output={folder}/job.log", str(SCRIPT), "--", *trainer_flags]
    number = cluster.run(*sbatch, **(settings | environment)).strip()
    return Job(cluster, number, folder, port)
