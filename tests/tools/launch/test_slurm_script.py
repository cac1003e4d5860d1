"""The batch script without SLURM: a mistake in its header is found before the queue."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests.tools.launch.conftest import ROOT, SCRIPT

LAUNCHER = '#!/usr/bin/env bash\nprintf "launcher:"; printf " %s" "$@"; printf "\\n"\n'


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    path = tmp_path / "launcher.sh"
    path.write_text(LAUNCHER)
    return path


def run(*words: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=cwd, env=environment | settings, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


# One node, and a SLURM whose steps are processes of this host.
PROGRAMS = {
    "scontrol": "[[ $2 == hostnames ]] && echo n1 || echo 'x NodeAddr=127.0.0.1 x'",
    "srun": "while [[ $1 == --* ]]; do shift; done; "
    '[[ ! -v SLURM_EXPORT_ENV ]] || exec env -i PATH="$PATH" "$@"; exec "$@"',
    "squeue": "true",
    "scancel": "true",
    "python3": "case $2-$3 in *-wait) sleep 3 ;; *-head) echo a Ray that ends ;; *doctor-*) "
    'echo "ok       disk: $*"; [[ -z $FOUND ]] || { echo "$FOUND"; exit 1; } ;; esac',
}


@pytest.mark.parametrize("found", ["", "wrong    model: half of it\nwrong    ports: taken"])
def test_ray_starts_where_the_doctor_finds_nothing_wrong(found: str, launcher: Path, tmp_path: Path) -> None:
    """Otherwise the job ends with what the doctor found."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"LAUNCHER": str(launcher), "OUTPUT": str(tmp_path / "run"), "PORT": "7000", "MODEL": "a/model"}
    settings |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOUND": found}
    settings |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "8"}
    settings |= {"SLURM_EXPORT_ENV": "NONE"}  # of sbatch --export=NONE
    command = ["bash", str(SCRIPT)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert ended.returncode == 1
    log = tmp_path / "run" / "slurm" / "7-0" / "n1.log"
    checked, *others = log.read_text().splitlines()
    flags = f"--gpus 8 --shared {log.parent}/ray_token --temporary /tmp --model a/model --port 7000"
    assert checked == f"ok       disk: -m openrlhf_gtpo.cli.doctor {flags}"
    assert others == (found.splitlines() if found else ["a Ray that ends"])
    said = ended.stderr.splitlines()
    what = "the node n1 is not fit for a run" if found else "Ray on the node n1 has ended"
    at = said.index(f"[slurm] {what}; {log} says why. Its last lines:")
    assert said[at + 1 : -1] == (others if found else [checked, *others])
    assert "no training without all nodes: look at n1" in said[-1]


@pytest.mark.parametrize("holds", [True, False])
def test_two_jobs_do_not_train_into_one_folder(holds: bool, launcher: Path, tmp_path: Path) -> None:
    """Such as an array's tasks. The steps do not keep the lock beyond their job."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    settings = {"LAUNCHER": str(launcher), "OUTPUT": str(tmp_path / "run"), "SLURM_JOB_ID": "7"}
    with (tmp_path / "run" / "slurm" / "lock").open("a") as lock:
        if holds:
            fcntl.flock(lock, fcntl.LOCK_EX)
        ended = run(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n1", FOUND="", **settings)
    said = f"[slurm] another job trains in OUTPUT={tmp_path}/run; give this one its own, or wait for that one."
    assert (said in ended.stderr.splitlines()) == holds and ended.returncode == (2 if holds else 1)


def test_an_attempt_that_loses_several_nodes_counts_once(launcher: Path, tmp_path: Path) -> None:
    ray = f"until [[ -e {tmp_path}/trains ]]; do sleep 0.1; done"
    programs = PROGRAMS | {
        "scontrol": "case $2 in hostnames) printf 'n1\\nn2\\n' ;; node) echo 'x NodeAddr=127.0.0.1 x' ;; "
        '*) echo "requeued: $2" ;; esac',
        "python3": f"case $2-$3 in *cluster-head | *cluster-worker) {ray} ;; esac",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    launcher.write_text(f"touch {tmp_path}/trains; sleep 30")
    settings = {"LAUNCHER": str(launcher), "OUTPUT": str(tmp_path / "run"), "PORT": "7000", "MAX_REQUEUES": "1"}
    settings |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    settings |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}  # the array's last task, of the same number
    command = ["bash", str(SCRIPT)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    assert ended.returncode == 0 and "the job is back in the queue" in ended.stderr, ended.stderr
    assert ended.stdout == "requeued: 7_3\n"
    assert (tmp_path / "run" / "slurm" / "7-lost").read_text() == "n1 n2\n"


def test_a_request_before_anything_has_started_requeues_the_job(launcher: Path, tmp_path: Path) -> None:
    """As when a job is preempted while the script still asks SLURM for the nodes' addresses."""
    signals = "kill -USR1 $(ps -o ppid= $PPID); echo 'x NodeAddr=127.0.0.1 x'"  # the parent is the script's subshell
    programs = {"scontrol": f'case $2 in hostnames) echo n1 ;; node) {signals} ;; *) echo "requeued: $2" ;; esac'}
    for name, text in (PROGRAMS | programs).items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"LAUNCHER": str(launcher), "OUTPUT": str(tmp_path / "run"), "SLURM_JOB_ID": "7", "FOUND": ""}
    ended = run(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n1", **settings)
    assert ended.returncode == 0 and ended.stdout == "requeued: 7\n", ended.stderr


@pytest.mark.parametrize(
    ("last", "status"), [("Job 'raysubmit_1' was stopped", 1), ("Job 'raysubmit_1' succeeded", 0)], ids=str
)
def test_a_ray_job_that_was_stopped_is_not_over(last: str, status: int, launcher: Path, tmp_path: Path) -> None:
    """`ray job submit` ends with 0 either way."""
    ray = f"until [[ -e {tmp_path}/trained ]]; do sleep 0.1; done; sleep 8"
    programs = PROGRAMS | {"python3": f"case $2-$3 in *cluster-head) {ray} ;; esac"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    launcher.write_text(f'echo "{last}"; touch {tmp_path}/trained')
    settings = {"LAUNCHER": str(launcher), "OUTPUT": str(tmp_path / "run"), "MAX_REQUEUES": "0", "SLURM_JOB_ID": "7"}
    ended = run(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n1", **settings)
    assert ended.returncode == status, ended.stderr
    assert ("training is over" in ended.stderr) == (status == 0)
