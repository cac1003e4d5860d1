"""A host with GPUs is told apart from one without."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from openrlhf_gtpo import platform


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this process look like another host: a CPU build of torch without devices, unless said otherwise."""
    for name in (platform.PLATFORM_VARIABLE, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)

    def pretend(cuda: str | None = None, hip: str | None = None, devices: int = 0, driver: bool = False) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(platform, "Path", lambda name: SimpleNamespace(exists=lambda: driver))

    pretend()
    return pretend


def test_a_torch_without_cuda_serves_no_gpu_anywhere(
    host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert platform.detect() == "cpu"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert platform.detect() == "cpu"


@pytest.mark.parametrize("build", [{"cuda": "12.9"}, {"hip": "6.3"}], ids=str)
def test_a_torch_with_cuda_or_rocm_serves_the_gpus_that_are_there(host: Callable[..., None], build: dict) -> None:
    host(**build, devices=2)
    assert platform.detect() == "cuda"
    host(**build)
    assert platform.detect() == "cpu"
    host(**build, driver=True)  # a driver with devices that CUDA_VISIBLE_DEVICES hides
    assert platform.detect() == "cuda"


def test_a_head_node_without_gpus_starts_runs_for_its_cluster(
    host: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(cuda="12.9")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert platform.detect() == "cuda"


@pytest.mark.parametrize("choice", ["cpu", "cuda"])
def test_an_explicit_choice_wins(host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, choice)
    assert platform.detect() == platform.chosen_platform() == choice
    host(cuda="12.9", devices=8)
    assert platform.detect() == platform.chosen_platform() == choice
