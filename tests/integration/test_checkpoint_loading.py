"""A checkpoint's files are data: when DeepSpeed reads them, it runs no code that they contain."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address

from openrlhf_gtpo.integration.actors.strategy import TorchCheckpointEngine


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


def test_code_in_a_file_is_not_run(engine: TorchCheckpointEngine, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Command(tmp_path / "ran")}, tmp_path / "states.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        engine.load(str(tmp_path / "states.pt"))
    assert not (tmp_path / "ran").exists()
