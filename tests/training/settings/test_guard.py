"""The guard refuses every OpenRLHF but the one it knows, and costs next to nothing."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings import guard
from openrlhf_gtpo.training.settings.guard import RELIED_ON, SUPPORTED_VERSIONS, check_openrlhf

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the modules that we rely on, found in place of the installed OpenRLHF."""
    package = tmp_path / "openrlhf"
    for module in RELIED_ON:
        source = guard.source_path(module)
        copy = package.joinpath(*module.split(".")[1:]).with_suffix(".py")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    (package / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("openrlhf", package / "__init__.py")
    monkeypatch.setattr(guard.importlib.util, "find_spec", lambda name: spec if name == "openrlhf" else None)
    return package


def refusal() -> str:
    with pytest.raises(UsageError) as caught:
        check_openrlhf()
    message = str(caught.value)
    assert "\n" not in message and all(version in message for version in SUPPORTED_VERSIONS)
    return message


def edit(path: Path, old: str, new: str) -> None:
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))


def test_the_installed_openrlhf_passes() -> None:
    check_openrlhf()


def test_a_copy_of_it_passes(installed: Path) -> None:
    check_openrlhf()


@pytest.mark.parametrize("version", ["0.11.1", "0.11.3", "0.12.0", "0.11.2.post1"])
def test_another_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(guard.metadata, "version", lambda name: version)
    assert refusal().startswith(f"OpenRLHF {version} is installed, but openrlhf_gtpo supports ")


def test_a_name_that_is_gone(installed: Path) -> None:
    edit(installed / "trainer/ppo_utils/experience_maker.py", "def split_rollout_samples", "def split_samples")
    expected = (
        "experience_maker of OpenRLHF 0.11.2 has no such name, expected RemoteExperienceMaker.split_rollout_samples("
    )
    assert expected in refusal()


def test_a_signature_that_changed(installed: Path) -> None:
    path = installed / "trainer/ppo_utils/length_penalty.py"
    edit(path, "    stop_properly_penalty_coef: float,\n) -> int", "    coefficient: float,\n) -> int")
    assert (
        "length_penalty of OpenRLHF 0.11.2 has apply_stop_properly_penalty(experiences, coefficient), expected "
        "apply_stop_properly_penalty(experiences, stop_properly_penalty_coef): " in refusal()
    )


@pytest.mark.parametrize("module", RELIED_ON)
def test_every_name_that_is_relied_on_is_looked_for(installed: Path, module: str) -> None:
    path = installed.joinpath(*module.split(".")[1:]).with_suffix(".py")
    path.write_text("")
    assert any(wanted.partition("(")[0] in refusal() for wanted in RELIED_ON[module])


def test_a_scheduler_of_vllm_that_changed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.why_no_scheduler() is None
    for module, names in guard.VLLM_SCHEDULER.items():
        changed = tmp_path / "changed.py"
        changed.write_text(guard.source_path(module).read_text().replace("self, ", "self, more, "))
        monkeypatch.setattr(guard, "VLLM_SCHEDULER", {module: names})
        with monkeypatch.context() as patched:
            patched.setattr(guard, "source_path", lambda module, changed=changed: changed)
            guard.signatures.cache_clear()
            found = guard.why_no_scheduler()
        assert (found is None) == (names == ("AsyncScheduler",))
    monkeypatch.setattr(guard.metadata, "version", lambda name: "0.30.1")
    assert guard.why_no_scheduler() == "only the schedulers of vLLM 0.29 are known, and vLLM 0.30.1 is installed"


def test_few_names_go_without_their_parameters() -> None:
    """Without parameters only the name is checked, which a slip of the pen could extend to every entry."""
    bare = [wanted for names in RELIED_ON.values() for wanted in names if not wanted.endswith(")")]
    assert bare == ["create_vllm_engines", "WorkerWrap"]


def test_the_check_needs_neither_torch_nor_openrlhf_itself() -> None:
    program = (
        "import sys\nfrom openrlhf_gtpo.training.settings.guard import check_openrlhf\ncheck_openrlhf()\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert not set(ended.stdout.split()) & {"torch", "openrlhf", "ray", "vllm", "deepspeed", "transformers"}
