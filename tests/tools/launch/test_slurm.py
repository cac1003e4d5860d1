"""Jobs in a real SLURM of two nodes on this machine: the batch script loses track of no node or process of its own.

Nothing is trained: the launcher is a stand-in, and so is Ray where a job ends before Ray matters.
"""

import os
import shlex
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.slurm_cluster import SlurmCluster, until
from tests.tools.launch.conftest import Job, submit

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# Processes that have left their parents and their session, beside one that has not.
LEAVE = 'setsid bash -c "sleep 4321 & sleep 4322" & sleep 4323'

ON_RAY = """
while [[ "$1" != --submit ]]; do shift; done
exec ray job submit --address "$2" -- bash -c 'cd {folder}; python3 look.py >said; touch started; {leave}'
"""

# What the trainer does first: it has each node of the cluster look for its files.
LOOK = """
import ray
from openrlhf_gtpo.training.controller.cluster_checks import check_shared_folder

ray.init(address="auto", log_to_driver=False)
for folder in {folders!r}:
    try:
        check_shared_folder(folder, ray.nodes())
        print("shared by all:", folder)
    except ValueError as error:
        print(error)
"""

# A training run that makes a step a second, follows a request to stop, and finishes once it is requeued.
STOPPABLE = """
while [[ "$1" != --ckpt.stop_file ]]; do shift; done
((SLURM_RESTART_COUNT == 0)) || exit 0
touch {started}
until [[ -e "$2" ]]; do sleep 1; done
rm "$2"
exit 75
"""

# A Ray whose nodes join by a file in a folder; its dashboard takes every job.
STAND_IN = """#!{python}
import http.server, json, os, signal, sys
flags = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[2:])
open(os.path.join({folder!r}, flags["node-name"]), "w").close()

class Dashboard(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        nodes = [{{"node_name": name, "state": "ALIVE"}} for name in os.listdir({folder!r})]
        answer = json.dumps({{"data": {{"result": {{"result": nodes}}}}, "status": "SUCCEEDED", "submission_id": "1"}})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer.encode())
    do_POST = do_GET

if "head" in flags:
    http.server.HTTPServer(("127.0.0.1", int(flags["dashboard-port"])), Dashboard).serve_forever()
signal.pause()
"""


def _listening(processes: list[psutil.Process]) -> list[tuple[str, str, int]]:
    """Program, address and port of each server among ``processes``."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("tcp")
            name = process.name()  # read last: a Ray worker takes its name shortly before it listens
            found += [(name, c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
    return [server for server in found if server[0] != "srun"]  # SLURM's own, protected by munge


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module", autouse=True)
def lost(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job on a real Ray, beside the others: it loses the node n2 as soon as there is a file ``die``. If root runs
    the tests, the folder ``alone`` is a different one on each node, as root may give a node its own file system."""
    folder = tmp_path_factory.mktemp("lost")
    shared, alone, launcher, look, die = (
        folder / name for name in ("shared", "alone", "launcher.sh", "look.py", "die")
    )
    shared.mkdir()
    alone.mkdir()
    look.write_text(LOOK.format(folders=[str(shared), str(alone)]))
    launcher.write_text(ON_RAY.format(folder=folder, leave=LEAVE))
    # As when memory runs out: kill the raylet, a grandchild of the process that this shell becomes, under `ray start`.
    raylet = "for child in $(pgrep -P $$); do pgrep -P $child raylet; done"
    dies = f"(until [[ -e {die} ]]; do sleep 0.2; done; kill -9 $({raylet})) &"
    mount = f"mount -t tmpfs none {shlex.quote(str(alone))}"
    own = f"""exec unshare --mount bash -c '{mount}; exec "$@"' step "$@";""" if os.geteuid() == 0 else ""
    setup = f"export PATH={Path(sys.executable).parent}:$PATH; [[ $SLURMD_NODENAME != n2 ]] || {{ {dies} {own} }}"
    return submit(cluster, folder, launcher, SETUP=setup, MAX_REQUEUES="0")


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs on the stand-in for Ray, all at once, as each mostly waits."""
    on_n2 = {"stuck": "sleep 600", "broken": "exit 3"}
    trainings = {"stuck": "touch {started}", "broken": "touch {started}", "cancelled": LEAVE, "stopped": STOPPABLE}
    submitted = {}
    for name, training in trainings.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "bin").mkdir()
        (folder / "joined").mkdir()
        ray, launcher = folder / "bin" / "ray", folder / "launcher.sh"
        ray.write_text(STAND_IN.format(python=sys.executable, folder=str(folder / "joined")))
        ray.chmod(0o755)
        launcher.write_text(training.format(started=folder / "started"))
        path = f"export PATH={ray.parent}:{Path(sys.executable).parent}:$PATH"
        setup = f"{path}; [[ $SLURMD_NODENAME != n2 ]] || {on_n2.get(name, 'true')}"
        limits = {"JOIN_TIMEOUT": "120" if name == "stuck" else "600"}
        limits["MAX_REQUEUES"] = "0" if name == "stopped" else "5"
        submitted[name] = submit(cluster, folder, launcher, SETUP=setup, **limits)
    return submitted


def test_a_request_to_stop_is_handed_on_and_requeues_whatever_the_limit(
    cluster: SlurmCluster, jobs: dict[str, Job]
) -> None:
    job = jobs["stopped"]
    until(lambda: (job.folder / "started").exists() or job.ended(), 600, "training starts")
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)
    until(lambda: cluster.restarts(job.number) == 1 or job.ended(), 600, "a requeue")
    until(job.ended, 600, "the job ends")
    assert job.state() == "COMPLETED" and cluster.restarts(job.number) == 1, job.everything
    assert not [*job.folder.glob("run/slurm/*/stop")] and len([*job.folder.glob("run/slurm/*-[01]")]) == 2


def test_a_cancelled_job_leaves_no_process(cluster: SlurmCluster, jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    started = [["sleep", seconds] for seconds in ("4321", "4322", "4323")]
    until(
        lambda: sum(p.info["cmdline"] in started for p in job.processes()) == 3 or job.ended(), 300, "training starts"
    )
    before = job.processes()
    assert before, job.everything
    token = next((job.folder / "run" / "slurm").glob("*/ray_token"))
    cluster.run("scancel", job.number)
    until(lambda: job.state() == "CANCELLED", 600, "the job ends")
    _all_end(job, before)
    assert "cancelled" in job.log and not token.exists()


def test_a_job_that_loses_a_node_leaves_no_process_and_a_folder_of_one_node_is_refused(
    cluster: SlurmCluster, lost: Job
) -> None:
    job = lost
    until(lambda: (job.folder / "started").exists() or job.ended(), 600, "training starts")
    assert (job.folder / "started").exists(), job.everything
    assert "2 nodes joined" in job.log
    shared, refused = (job.folder / "said").read_text().splitlines()
    assert shared == f"shared by all: {job.folder}/shared"
    is_another = f"--ckpt.path {job.folder}/alone is another folder on node n2, but all 2 nodes must"
    assert refused.startswith(is_another if os.geteuid() == 0 else "shared by all: ")
    assert not [name for folder in ("shared", "alone") for name in (job.folder / folder).iterdir()]
    before = job.processes()
    names = [process.info["name"] for process in before]
    assert names.count("raylet") >= 2 and "gcs_server" in names  # a raylet's child has its name at first
    listening = _listening(before)
    assert {address for _, address, port in listening if port == job.port + 1} == {"127.0.0.1"}
    # Ray's own servers cannot be bound to one address; they ask for the token. Nothing else is open.
    assert not [name for name, address, _ in listening if address == "0.0.0.0"]
    assert all(
        name.startswith(("gcs_server", "raylet", "ray::")) for name, address, _ in listening if address == "::"
    ), listening
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{job.port + 1}/api/jobs/")
    token = next((job.folder / "run" / "slurm").glob("*/ray_token"))
    assert os.stat(token).st_mode & 0o077 == 0

    (job.folder / "die").touch()
    until(job.ended, 600, lambda: f"the job ends: {job.everything}")
    assert job.state() == "FAILED" and cluster.restarts(job.number) == 0
    assert "Ray on the node n2 has ended" in job.log, job.everything
    assert "the job has lost nodes (n2), and MAX_REQUEUES is 0: look at n2" in job.log
    _all_end(job, before)
    assert not token.exists()


def test_a_node_that_does_not_join_is_named_and_the_job_ends(jobs: dict[str, Job]) -> None:
    job = jobs["stuck"]
    until(job.ended, 600, "the job ends")
    assert job.state() == "FAILED" and not (job.folder / "started").exists()
    assert "After 120 s 1 of 2 nodes have not joined the Ray cluster: n2;" in job.log, job.everything
    until(lambda: not job.processes(), 600, "its steps end")


def _all_end(job: Job, before: list[psutil.Process]) -> None:
    until(lambda: not job.processes(), 600, "its steps end")
    assert not [process for process in before if process.is_running() and not _is_zombie(process)]
