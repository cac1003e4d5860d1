"""A checkpoint's files are data: when DeepSpeed reads them, it runs no code that they contain."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from openrlhf.utils.deepspeed import DeepspeedStrategy

from openrlhf_gtpo.training.actors.strategy import Strategy, TorchCheckpointEngine


class Command:
    """An object as a hostile file may contain: unpickling it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def engine() -> TorchCheckpointEngine:
    return TorchCheckpointEngine.__new__(TorchCheckpointEngine)


def test_what_deepspeed_writes_is_read(engine: TorchCheckpointEngine, tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "scaler": LossScaler(1.0), "at": fragment_address(2, 3), "names": {"a"}}
    torch.save(state, tmp_path / "states.pt")
    found = engine.load(str(tmp_path / "states.pt"), map_location="cpu")
    assert found["at"] == state["at"] and found["scaler"].cur_scale == 1.0 and torch.equal(found["w"], torch.ones(2))


def test_a_universal_checkpoint_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    load = lambda self, model, folder, tag: asked.append(tag) or (folder, {})  # noqa: E731
    monkeypatch.setattr(DeepspeedStrategy, "load_ckpt", load)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    strategy = Strategy.__new__(Strategy)
    strategy.use_ds_universal_ckpt = True
    schedule = SimpleNamespace(base_lrs=[1.0], optimizer=SimpleNamespace(param_groups=[{"lr": 1.0}]))
    for tag in ("global_step4_universal", None):  # None: the one that DeepSpeed's latest_universal names
        strategy.arguments = SimpleNamespace(ckpt=SimpleNamespace(load_tag=tag))
        strategy.load_ckpt(SimpleNamespace(lr_scheduler=schedule, optimizer=None), "_actor")
    assert asked == ["global_step4_universal", None]


def test_code_in_a_file_is_not_run(engine: TorchCheckpointEngine, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Command(tmp_path / "ran")}, tmp_path / "states.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        engine.load(str(tmp_path / "states.pt"))
    assert not (tmp_path / "ran").exists()
