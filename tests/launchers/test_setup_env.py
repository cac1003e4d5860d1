"""examples/scripts/setup_env.sh: what it refuses, what it leaves alone, and what it replaces.

No network: `host` has a Python that makes environments of a few files and whose pip only takes notes. Tests of a
real interpreter run only where the script made the environment that pytest runs in.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP_ENV = Path("examples/scripts/setup_env.sh")


PYTHON = r"""#!/bin/bash
# `-m venv` makes an environment whose interpreter is this file again; the checks of the host find what they look for.
last="${@: -1}"
case "$*" in
    *_base_executable*) echo "$0" ;;
    *gpus.py*) exec REAL_PYTHON "$@" ;;
    *"print("*) echo "${PYTHON_VERSION:-3.11}" ;;
    *"-m venv "*)
        mkdir -p "$last/bin"
        cp "$0" "$last/bin/python"
        echo "command = $*" >"$last/pyvenv.cfg"
        printf 'VIRTUAL_ENV=%s\nPROMPT=%s\n' "$last" "${last##*/}" >"$last/bin/activate"
        ;;
    *"-m pip "*)
        [[ "$*" != *"$PIP_FAILS_AT"* ]] || { echo "ERROR: no such package" && exit 1; }
        if [[ "$*" == *pins.txt* ]]; then # whole, or in two parts at once
            cat "$last" >>"${0%/*}/../pins"
            mkdir -p "${0%/*}/../lib/python3.12/site-packages/nvidia/cu13/lib" # what NVIDIA's wheels make
        fi
        [[ "$*" != *"$PIP_STOPS_AT"* ]] || { touch "${0%/*}/stopped" && sleep 600; }
        printf '#!%s\n' "$0" >"${0%/*}/ray"
        echo "Collecting $*"
        ! [[ "$*" == *--no-binary* ]] || env
        ;;
esac
""".replace("REAL_PYTHON", sys.executable)


def add_project(root: Path) -> Path:
    """A copy of what the set-up script reads, without an environment."""
    locks = ("requirements/cpu.lock", "requirements/cuda.lock")
    modules = ("openrlhf_gtpo/_version.py", "openrlhf_gtpo/platform/gpus.py")
    for name in ("setup.py", *locks, *modules, str(SETUP_ENV)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    script = root / SETUP_ENV
    script.write_text(script.read_text().replace("/usr/bin/python", f"{root}/system/python"))  # not this machine's
    return root


@pytest.fixture
def bare_project(tmp_path) -> Path:
    return add_project(tmp_path / "project")


@pytest.fixture
def host(tmp_path) -> dict[str, str]:
    """Environment variables of a host that has everything, and on which nothing is downloaded."""
    programs = {"python3.11": PYTHON, "g++": "#!/bin/bash\n", "df": disk(99999)}
    (tmp_path / "host").mkdir()
    for name, text in programs.items():
        (tmp_path / "host" / name).write_text(text)
        (tmp_path / "host" / name).chmod(0o755)
    path = f"{tmp_path / 'host'}:{os.environ['PATH']}"
    return {"PATH": path, "PIP_FAILS_AT": "nothing at all", "PIP_STOPS_AT": "nothing at all"}


@pytest.fixture
def cuda_host(host, tmp_path) -> dict[str, str]:
    """The same host with Python 3.12, on a system that is new enough."""
    programs = {"python3.12": PYTHON, "getconf": "#!/bin/bash\necho glibc 2.34\n"}
    for name, text in programs.items():
        (tmp_path / "host" / name).write_text(text)
        (tmp_path / "host" / name).chmod(0o755)
    return {**host, "PYTHON_VERSION": "3.12"}


def disk(free_mb: int) -> str:
    return f"#!/bin/bash\nprintf 'head\\nfs 9 9 {free_mb} 9%% /\\n'\n"


def run_setup_env(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(root / SETUP_ENV), *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def assert_made(result: subprocess.CompletedProcess[str], root: Path) -> None:
    """Assert that .venv is a whole environment whose files name its final path, and that nothing lies beside it."""
    assert result.returncode == 0, result.stderr
    assert result.stderr.endswith(f"[setup] {root}/.venv is ready\n")
    venv = root / ".venv"
    assert [path.name for path in sorted(root.glob(".venv*"))] == [".venv"]
    assert (venv / "bin" / "ray").read_text() == f"#!{venv}/bin/python\n"
    assert (venv / "bin" / "activate").read_text() == f"VIRTUAL_ENV={venv}\nPROMPT=.venv\n"
    assert (venv / "pyvenv.cfg").read_text().endswith(f"-m venv {venv}\n")
    assert "Collecting" in (venv / "pip.log").read_text() and not (venv / "tmp").exists()


def assert_ready(root: Path, host: dict[str, str]) -> None:
    again = run_setup_env(root, **{**host, "PIP_FAILS_AT": ""})
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def change_lock(root: Path) -> None:
    with (root / "requirements" / "cpu.lock").open("a") as lock:
        lock.write("one-more==1.0\n")


def test_an_environment_is_made_once_and_names_its_final_path(bare_project, host):
    assert_made(run_setup_env(bare_project, **host), bare_project)
    assert_ready(bare_project, host)


def test_a_linked_environment_is_refused_and_its_checkout_keeps_it(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    linking = add_project(tmp_path / "linking")
    (linking / ".venv").symlink_to(bare_project / ".venv")
    assert_refused(run_setup_env(linking, **host), f"is a link to {bare_project}/.venv", "remove the link")
    assert files(bare_project / ".venv") == before and (linking / ".venv").is_symlink()
    assert_ready(bare_project, host)


@pytest.mark.parametrize("step", ["download", "pins.txt.first", "pins.txt.second", "--find-links", "-e "])
def test_a_set_up_that_fails_leaves_the_old_environment_as_it_was(bare_project, host, step):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    change_lock(bare_project)
    failed = run_setup_env(bare_project, **{**host, "PIP_FAILS_AT": step})
    assert failed.returncode == 1
    assert "ERROR: no such package" in failed.stderr
    assert f"all of its output: {bare_project}/.venv.being_made/pip.log" in failed.stderr
    assert files(bare_project / ".venv") == before
    assert_made(run_setup_env(bare_project, **host), bare_project)
    assert_ready(bare_project, host)


def test_a_set_up_that_is_killed_leaves_the_old_environment_as_it_was(bare_project, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    change_lock(bare_project)
    killed = subprocess.Popen(
        ["/bin/bash", str(bare_project / SETUP_ENV)],
        env={**os.environ, **host, "PIP_STOPS_AT": "pins.txt"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    reached = bare_project / ".venv.being_made" / "bin" / "stopped"
    deadline = time.monotonic() + 600
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reached.exists() and files(bare_project / ".venv") == before
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert files(bare_project / ".venv") == before
    assert_made(run_setup_env(bare_project, **host), bare_project)


def test_a_set_up_that_is_killed_between_its_two_renames_is_mended(bare_project, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    (bare_project / ".venv").rename(bare_project / ".venv.replaced")
    assert_made(run_setup_env(bare_project, **host), bare_project)  # the old one fits the lock, so it is put back
    assert files(bare_project / ".venv") == before
    change_lock(bare_project)
    assert run_setup_env(bare_project, **{**host, "PIP_FAILS_AT": "-e "}).returncode == 1
    (bare_project / ".venv").rename(bare_project / ".venv.replaced")
    # The new one is whole except for the project, so nothing else is fetched.
    assert_made(run_setup_env(bare_project, **{**host, "PIP_FAILS_AT": "download"}), bare_project)


def cuda_pins(venv: Path) -> tuple[list[str], dict[str, dict[str, str]]]:
    """What was installed from wheels, and the environment variables of each package that was compiled."""
    log = (venv / "pip.log").read_text()
    compiled = re.findall(r"Collecting .* --no-cache-dir --no-binary (\S+) (\S+)\n((?:\w+=.*\n)+)", log)
    pins = [*(venv / "pins").read_text().splitlines(), *re.findall(r"(?:setuptools|wheel)==\S+", log)]
    pins += [pin for _, pin, _ in compiled]
    return pins, {name: dict(line.split("=", 1) for line in said.splitlines()) for name, _, said in compiled}


def test_the_cuda_environment_compiles_nothing_unless_asked(bare_project, cuda_host):
    """Each line of its lock comes once, but for those that take nvcc; the wheels' own toolkit is found at run time."""
    made = run_setup_env(bare_project, "--cuda", **cuda_host)
    assert made.returncode == 0, made.stderr
    venv = bare_project / ".venv-cuda"
    assert made.stderr.endswith(f"[setup] {venv} is ready\n") and "compiling" not in made.stderr
    assert [path.name for path in sorted(bare_project.glob(".venv*"))] == [".venv-cuda"]
    assert (venv / "bin" / "ray").read_text() == f"#!{venv}/bin/python\n"
    again = run_setup_env(bare_project, "--cuda", **{**cuda_host, "PIP_FAILS_AT": ""})
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    pins, compiled = cuda_pins(venv)
    lock = (ROOT / "requirements" / "cuda.lock").read_text().splitlines()
    kernels = ("flash-attn==", "transformer-engine==", "transformer-engine-cu13==", "transformer-engine-torch==")
    assert sorted(pins) == sorted(line for line in lock if "==" in line and not line.startswith(kernels))
    assert not compiled
    toolkit = venv / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    assert (toolkit / "lib64").is_dir() and os.readlink(toolkit / "lib" / "libcudart.so") == "libcudart.so.13"
    assert (venv / "bin" / "activate").read_text().endswith(f'export CUDA_HOME="{toolkit}"\n')


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("[setup] ") and result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize("notes", [".venv", ".venv/notes"])
def test_what_this_script_did_not_make_is_refused_and_kept(bare_project, notes):
    (bare_project / notes).parent.mkdir(exist_ok=True)
    (bare_project / notes).write_text("a user's notes")
    assert_refused(run_setup_env(bare_project), f"{bare_project}/.venv was not made by this script")
    assert (bare_project / notes).read_text() == "a user's notes"
