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

made_by_setup_env = pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(),
    reason="runs the interpreter of the environment that examples/scripts/setup_env.sh makes, and this is another one",
)

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
        timeout=200,
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


def test_packages_alone_are_made_first_and_the_project_is_added(bare_project, host):
    assert_made(run_setup_env(bare_project, "--packages-only", **host), bare_project)
    log = bare_project / ".venv" / "pip.log"
    assert str(bare_project / "setup.py") not in log.read_text() and f"-e {bare_project}" not in log.read_text()
    before = log.read_text()
    assert_made(run_setup_env(bare_project, **host), bare_project)
    added = log.read_text().removeprefix(before)
    assert added.count("Collecting") == 1 and f"-e {bare_project}" in added


def test_a_linked_environment_is_refused_and_its_checkout_keeps_it(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    linking = add_project(tmp_path / "linking")
    (linking / ".venv").symlink_to(bare_project / ".venv")
    assert_refused(run_setup_env(linking, **host), f"is a link to {bare_project}/.venv", "remove the link")
    assert files(bare_project / ".venv") == before and (linking / ".venv").is_symlink()
    assert_ready(bare_project, host)


def test_a_link_that_leads_nowhere_is_refused(bare_project, host):
    (bare_project / ".venv").symlink_to("/nowhere")
    assert_refused(run_setup_env(bare_project, **host), "is a link to /nowhere")


def test_a_copy_of_a_checkout_gets_an_environment_of_its_own(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project)
    copy = shutil.copytree(bare_project, tmp_path / "copy-2")
    assert_made(run_setup_env(copy, **host), copy)
    assert files(bare_project) == before


def test_a_moved_project_gets_a_new_environment(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    moved = bare_project.rename(tmp_path / "moved+renamed,é")
    assert_made(run_setup_env(moved, **host), moved)
    assert_ready(moved, host)


def test_a_checkout_that_is_reached_through_a_link_has_one_environment(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    (tmp_path / "link").symlink_to(bare_project)
    assert_ready(tmp_path / "link", host)


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
    deadline = time.monotonic() + 60
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


def test_what_is_left_of_a_replaced_environment_is_removed(bare_project, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    (bare_project / ".venv.replaced" / "lib").mkdir(parents=True)
    assert_made(run_setup_env(bare_project, **host), bare_project)


def test_the_disk_must_have_room_for_the_new_environment_beside_the_old_one(bare_project, tmp_path, host):
    assert run_setup_env(bare_project, **host).returncode == 0
    before = files(bare_project / ".venv")
    change_lock(bare_project)
    (tmp_path / "host" / "df").write_text(disk(7499))
    assert_refused(run_setup_env(bare_project, **host), "has 7499 MB of free disk", "needs 7500 MB")
    assert files(bare_project / ".venv") == before


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


def test_kernels_are_compiled_as_the_image_compiles_them(bare_project, cuda_host):
    """With the variables that docker/Dockerfile sets, beside an environment without; flash-attn is the image's."""
    assert run_setup_env(bare_project, "--cuda", **cuda_host).returncode == 0
    made = run_setup_env(bare_project, "--cuda", "--with-kernels", **cuda_host)
    assert made.returncode == 0, made.stderr
    venv = bare_project / ".venv-cuda"
    for words in (["--cuda"], ["--cuda", "--with-kernels"]):  # what has kernels is also what has none
        again = run_setup_env(bare_project, *words, **{**cuda_host, "PIP_FAILS_AT": ""})
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    pins, compiled = cuda_pins(venv)
    lock = (ROOT / "requirements" / "cuda.lock").read_text().splitlines()
    assert sorted(pins) == sorted(line for line in lock if "==" in line and not line.startswith("flash-attn=="))
    assert sorted(compiled) == ["deepspeed", "transformer-engine-torch"]
    dockerfile = re.sub(r"\\\n", " ", (ROOT / "docker" / "Dockerfile").read_text())
    runs = [run for run in re.findall(r"^RUN .*", dockerfile, re.MULTILINE) if "pip wheel" in run]
    packages = {package: run for run in runs for package in re.findall(r"--no-binary (\S+)", run)}
    for package, variables in compiled.items():
        for name, value in re.findall(r"\b([A-Z_]+)=(\S+)", packages[package].partition("pip wheel")[0]):
            assert variables[name] == value or "$" in value and variables[name], (package, name)
    nvidia = f"{venv}.being_made/lib/python3.12/site-packages/nvidia"
    found = compiled["transformer-engine-torch"]
    assert found["CPATH"] == f"{nvidia}/cudnn/include:{nvidia}/nccl/include"
    assert found["PATH"].startswith(f"{venv}.being_made/bin:")  # where ninja is
    assert all(each["CUDA_HOME"] == f"{nvidia}/cu13" for each in compiled.values())


def test_kernels_are_for_gpus(bare_project):
    assert_refused(run_setup_env(bare_project, "--with-kernels"), "--with-kernels compiles for GPUs; give --cuda too.")


@pytest.mark.parametrize(
    ("program", "text", "parts"),
    [
        ("getconf", "#!/bin/bash\necho glibc 2.28\n", ["need glibc 2.31 or newer, and this system has glibc 2.28"]),
        ("python3.12", "#!/bin/bash\nexit 127\n", ["Python 3.12 was not found on PATH", "module load python/3.12"]),
        ("df", disk(23999), ["has 23999 MB of free disk", "needs 24000 MB"]),
    ],
)
def test_what_the_cuda_environment_lacks_is_one_sentence(bare_project, cuda_host, tmp_path, program, text, parts):
    (tmp_path / "host" / program).write_text(text)
    assert_refused(run_setup_env(bare_project, "--cuda", **cuda_host), *parts)
    assert not list(bare_project.glob(".venv*"))


@pytest.mark.parametrize(
    ("driver", "capability", "message"),
    [
        ("535.183.01", "7.5", "[setup] Tesla T4 has driver 535.183.01, and CUDA 13 needs 580 or newer: update the"),
        ("580.65.06", "7.5", "[setup] Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0 (Ampere) or newer"),
        ("580.65.06", "8.0", None),
        ("580.65.06", "[N/A]", None),
    ],
)
def test_a_gpu_that_is_too_old_is_refused_before_the_download(
    bare_project, cuda_host, tmp_path, driver, capability, message
):
    smi = tmp_path / "host" / "nvidia-smi"
    smi.write_text(
        f'#!/bin/bash\n[[ $1 == *driver* ]] && echo "{driver}, Tesla T4" || echo "{capability}, Tesla T4"\n'
    )
    smi.chmod(0o755)
    refused = run_setup_env(bare_project, "--cuda", **cuda_host)
    assert (refused.returncode, bool(list(bare_project.glob(".venv*")))) == ((2, False) if message else (0, True))
    if message:
        assert refused.stderr.startswith(message) and refused.stderr.count("\n") == 1
        assert run_setup_env(bare_project, "--cuda", **cuda_host, CUDA_VISIBLE_DEVICES="").returncode == 0


def test_an_unknown_flag_is_refused(bare_project):
    assert_refused(run_setup_env(bare_project, "--cuda", "--gpu"), "unknown arguments --cuda --gpu; known: --cuda")


def test_help_is_the_scripts_header_and_makes_nothing(bare_project):
    printed = run_setup_env(bare_project, "--help")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.startswith("Makes .venv in the project's root") and "CUDA_HOME" in printed.stdout
    assert "BASH_SOURCE" not in printed.stdout and not (bare_project / ".venv").exists()


def path_with_only(directory: Path, *programs: str) -> str:
    """A PATH that has only these programs and basic tools."""
    directory.mkdir()
    for program in (
        *"bash cat cut dirname df awk find grep id ls mkdir rm sha256sum touch uname wc".split(),
        *programs,
    ):
        found = shutil.which(program)
        assert found is not None, program
        (directory / program).symlink_to(found)
    return str(directory)


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


def test_missing_python_is_one_sentence(bare_project):
    path = path_with_only(bare_project / "bin", "flock")
    assert_refused(run_setup_env(bare_project, PATH=path), "neither Python 3.11 nor 3.12 was found", "apt-get install")
    assert not (bare_project / ".venv").exists()


@pytest.mark.parametrize("complete", [True, False])
def test_the_systems_python_comes_first_where_it_can_make_an_environment(bare_project, host, complete):
    text = PYTHON.replace('case "$*" in\n', f'case "$*" in\n    *ensurepip*) exit {int(not complete)} ;;\n', 1)
    system = bare_project / "system" / "python3.11"
    system.parent.mkdir()
    system.write_text(text)
    system.chmod(0o755)
    assert_made(run_setup_env(bare_project, **host), bare_project)
    assert (bare_project / ".venv" / "bin" / "python").read_text() == (text if complete else PYTHON)


@made_by_setup_env
def test_missing_compiler_is_one_sentence(bare_project):
    path = path_with_only(bare_project / "bin", "flock", "python3.11")
    assert_refused(run_setup_env(bare_project, PATH=path), "g++ was not found", "apt-get install g++")
    assert not (bare_project / ".venv").exists()


@pytest.mark.parametrize("name", ["a b", "it's", "copy(1)", "[x]", "a\\b"])
def test_a_path_that_rays_shell_takes_apart_is_refused(tmp_path, host, name):
    root = add_project(tmp_path / "project").rename(tmp_path / name)
    assert_refused(run_setup_env(root, **host), f"{root} has blanks or other special characters, and from there Ray")


@made_by_setup_env
def test_full_disk_is_one_sentence_and_a_broken_environment_gets_that_far(bare_project):
    """A `.venv` whose interpreter is gone must be rebuilt; the disk check stops that here, before any download."""
    (bare_project / ".venv" / "bin").mkdir(parents=True)
    (bare_project / ".venv" / ".made_by_setup_env").touch()
    (bare_project / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    path = path_with_only(bare_project / "bin", "flock", "python3.11", "g++")
    (bare_project / "bin" / "df").unlink()
    (bare_project / "bin" / "df").write_text(disk(1234))
    (bare_project / "bin" / "df").chmod(0o755)
    assert_refused(run_setup_env(bare_project, PATH=path), "MB of free disk", "needs")


@made_by_setup_env
def test_second_run_is_quick_and_changes_nothing():
    stamps = [ROOT / ".venv" / ".environment_stamp", ROOT / ".venv" / ".project_stamp"]
    if not all(stamp.exists() for stamp in stamps):
        pytest.skip(".venv was put together by hand: it has no stamps")
    before = [stamp.stat().st_mtime_ns for stamp in stamps]
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        result = run_setup_env(ROOT)
        seconds.append(time.monotonic() - started)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    # A tenth of a second on an idle machine; whatever it should not do again (start pip) takes longer every time.
    assert min(seconds) < 2.0, seconds
    assert [stamp.stat().st_mtime_ns for stamp in stamps] == before


@made_by_setup_env
def test_sourcing_activates_and_spares_the_callers_shell():
    script = f'set +e; source "{ROOT / SETUP_ENV}"; false; echo "$VIRTUAL_ENV $- $(command -v python)"'
    printed = subprocess.run(["/bin/bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert printed[0] == str(ROOT / ".venv") and "e" not in printed[1]
    assert printed[2] == str(ROOT / ".venv" / "bin" / "python")
