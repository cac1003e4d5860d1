"""The guard refuses every OpenRLHF but the one it knows, and costs next to nothing."""

from pathlib import Path

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings import guard
from openrlhf_gtpo.training.settings.guard import SUPPORTED_VERSIONS, check_openrlhf


def refusal() -> str:
    with pytest.raises(UsageError) as caught:
        check_openrlhf()
    message = str(caught.value)
    assert "\n" not in message and all(version in message for version in SUPPORTED_VERSIONS)
    return message


def test_the_installed_openrlhf_passes() -> None:
    check_openrlhf()


@pytest.mark.parametrize("version", ["0.11.1", "0.11.3", "0.12.0", "0.11.2.post1"])
def test_another_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(guard.metadata, "version", lambda name: version)
    assert refusal().startswith(f"OpenRLHF {version} is installed, but openrlhf_gtpo supports ")


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
    monkeypatch.setattr(guard.metadata, "version", lambda name: "0.33.0")
    known = "0.29, 0.30, 0.31, 0.32"
    assert guard.why_no_scheduler() == f"only the schedulers of vLLM {known} are known, and vLLM 0.33.0 is installed"
