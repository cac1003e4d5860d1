"""The DeepSpeed actor's checkpoints are whole or absent, damage is noticed, and a full disk is named as the cause."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openrlhf_gtpo.checkpoints.files import DamagedError, HashedFile, check_file, describe
from tests.support import checkpoint_files_program as program
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
def test_deepspeed_saves_and_loads(actor_model: str, tmp_path: Path, two: RankPool) -> None:
    argv = ["--algo.preset", "grpo", "--algo.kl.init_coef", "0", "--train.batch_size", "8", "--ds.zero_stage", "2"]
    for found in two.run(program.run, actor_model, str(tmp_path), argv):
        assert found["earlier version"] == (1, ["global_step1"])
        assert found["rotated"] == (2, ["global_step2"])
        kind, sentence, there = found["full"]
        assert kind == "CheckpointWriteError" and "global_step3 could not be written" in sentence
        assert "No space left on device" in sentence and "unexpected pos" not in sentence
        assert there == ["global_step2"]
        chosen, missing, fallen_back, there = found["damaged"]
        assert "global_step3 is damaged: its file" in chosen and "has no checkpoint 'global_step9'" in missing
        assert fallen_back == 2 and there == ["global_step2", "global_step3.corrupt"]
        assert {*found["settings"]} == {0.25}
        assert found["saved again"] == ({"global_step": 2, "averages": []}, 2)


def test_what_is_written_is_what_is_described(tmp_path: Path) -> None:
    tensors = {"weights": torch.arange(3_000_000.0), "step": torch.tensor(1)}
    with HashedFile(tmp_path / "state.pt") as stream:
        torch.save(tensors, stream)
    assert describe(tmp_path / "state.pt") == stream.entry
    assert torch.equal(torch.load(tmp_path / "state.pt")["weights"], tensors["weights"])
    check_file(tmp_path, "state.pt", stream.entry, checksum=True)
    with open(tmp_path / "state.pt", "r+b") as file:
        file.seek(5_000_000)
        file.write(b"\x01")
    check_file(tmp_path, "state.pt", stream.entry, checksum=False)
    with pytest.raises(DamagedError, match="is damaged: its file state.pt has changed"):
        check_file(tmp_path, "state.pt", stream.entry, checksum=True)


def test_a_full_disk_is_the_error_of_a_torch_save() -> None:
    with pytest.raises(OSError, match="No space left on device"), HashedFile("/dev/full") as stream:
        torch.save({"weights": torch.zeros(1_000_000)}, stream)
