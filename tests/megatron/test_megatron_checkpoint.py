"""Checkpoints on 4 ranks: training goes on bit for bit at the same layout and within rounding at others, a failed or
killed save leaves the previous one, and any that is damaged or of another model is refused before anything changes.
"""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import check_checkpoint, newest_whole
from openrlhf_gtpo.megatron.checkpoint import state
from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support import checkpoint_program as program
from tests.support.families import SHALLOW, SMALLEST, make_checkpoint
from tests.support.rank_pool import RankPool

SAVED_AT = Layout(tensor_model_parallel_size=2)
RESUMED_AT = {
    "DP4": Layout(),
    "TP4": Layout(tensor_model_parallel_size=4),
    "TP2xPP2-SP": Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
}
# Family, vocabulary, other fields, dtype, distributed optimizer. At TP4 the padded vocabulary is larger than at TP2.
# The second has two layers per stage at PP2.
VARIANTS = {
    "llama": ("llama", 151, SHALLOW, "float32", True),
    "qwen2-tied-bf16": ("qwen2", 896, {"tie_word_embeddings": True}, "bfloat16", True),
    "qwen3-plain-optimizer": ("qwen3", 151, SHALLOW, "float32", False),
    "mistral-plain-optimizer-bf16": ("mistral", 896, SHALLOW, "bfloat16", False),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Callable[[str], tuple[Path, list]]:
    """Maps a variant to a folder (its model, another of the same shape to load into, and its checkpoints) and to every
    rank's answer of ``save_and_go_on``. Each is made once."""

    @functools.cache
    def write(variant: str) -> tuple[Path, list]:
        family, vocab_size, fields, dtype, distributed = VARIANTS[variant]
        folder = tmp_path_factory.mktemp(variant)
        source = make_checkpoint(folder / "source", family, vocab_size, **fields)
        make_checkpoint(folder / "other", family, vocab_size, seed=1, **fields)
        return folder, ranks.run(program.save_and_go_on, str(source), SAVED_AT, str(folder), dtype, distributed)

    return write


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_goes_on_bit_for_bit_at_the_same_layout(written: Callable, variant: str, ranks: RankPool) -> None:
    folder, before = written(variant)
    dtype, distributed = VARIANTS[variant][3:]
    folders = [str(folder / how) for how in ("now", "later", "whole")[: 2 + distributed]]
    after = ranks.run(program.resume, str(folder / "other"), SAVED_AT, folders, dtype, distributed)
    for old, resumed in zip(before, after, strict=True):
        for new in resumed:
            assert new["reports"] == old["reports"]
            assert new["draws"] == old["draws"]
            assert not new.get("different")
            position = {"position": [0, 1, 2]}
            assert new["client_state"] == program.CLIENT_STATE | {"data_loader_state_dict": position}
    assert before[0]["draws"] != before[1]["draws"]
    assert {(answer["before"], answer["latest"]) for answer in before} == {(None, "step3")}


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("llama", name) for name in RESUMED_AT),
        ("qwen2-tied-bf16", "TP2xPP2-SP"),
        ("qwen3-plain-optimizer", "TP4"),
        ("mistral-plain-optimizer-bf16", "DP4"),
    ],
)
def test_training_goes_on_at_another_layout(written: Callable, variant: str, name: str, ranks: RankPool) -> None:
    folder, before = written(variant)
    dtype, distributed = VARIANTS[variant][3:]
    other, folders = str(folder / "other"), [str(folder / how) for how in ("now", "whole")[: 1 + distributed]]
    after, *whole = ranks.run(program.resume, other, RESUMED_AT[name], folders, dtype, distributed)[0]
    assert not after.get("different") and all(found["reports"] == after["reports"] for found in whole)
    exact = dtype == "float32"
    for i, tolerance in enumerate([1e-6, 1e-5] if exact else [1e-2, 1e-2]):
        old, new = before[0]["reports"][i], after["reports"][i]
        assert new[0] == pytest.approx(old[0], abs=tolerance)
        assert new[1] == pytest.approx(old[1], rel=1e-4 if exact else 5e-2)
        assert new[2] == old[2]


def test_training_goes_on_from_a_checkpoint_of_megatron_core_0_16_1(tmp_path: Path, one_rank: RankPool) -> None:
    source = make_checkpoint(tmp_path / "other", "llama", seed=1, **SMALLEST)
    shutil.unpack_archive(Path(__file__).with_name("checkpoint_of_0.16.1.tar.xz"), tmp_path / "old")
    [(old, new)] = one_rank.run(program.next_report, str(source), str(tmp_path / "old"))
    assert new == pytest.approx(old, rel=1e-6)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_resumed_run_has_its_own_optimizers_settings(
    distributed: bool, model: Path, tmp_path: Path, one_rank: RankPool
) -> None:
    [((same, smaller, again), settings)] = one_rank.run(program.resume_slower, str(model), str(tmp_path), distributed)
    assert same == pytest.approx([5e-3 * 0.8**2, 5e-3 * 0.8**3])
    assert smaller == pytest.approx([rate / 100 for rate in same])
    assert again == pytest.approx([rate * 0.8 for rate in smaller])
    assert settings == [((0.5, 0.6), 1e-2)] * len(settings) != []


@pytest.mark.parametrize(("shape", "most"), [((7,), 1), ((3, 4), 3), ((3, 3, 3), 5), ((1, 5), 1)])
def test_a_flat_range_is_a_few_boxes(shape: tuple[int, ...], most: int, one_rank: RankPool) -> None:
    assert one_rank.run(program.boxes_of, shape) == [most]


def test_a_save_takes_14_bytes_a_parameter_over_all_replicas(tmp_path: Path, ranks: RankPool) -> None:
    """BF16 weights, float32 weights and two moments, each copied on only one rank; 24 bytes if the first rank gathers
    the states. Megatron's plan would copy most tensors of a host without CUDA once more."""
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "head_dim": 64}
    source = str(make_checkpoint(tmp_path / "model", "llama", **shape))
    for tensor in (1, 2):
        layout, replicas = Layout(tensor_model_parallel_size=tensor), 4 // tensor
        for peak, kept in ranks.run(program.peak_of_save, source, layout, str(tmp_path / f"TP{tensor}")):
            assert peak <= 14 and kept == pytest.approx(14 / replicas, rel=0.05)


def test_weights_that_replicas_gather_late_are_saved(model: Path, tmp_path: Path, ranks: RankPool) -> None:
    answers = ranks.run(program.save_while_parameters_are_gathered_late, str(model), Layout(), str(tmp_path))
    assert answers == [True] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "hf", "llama", **SHALLOW)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("other") / "hf", "llama", seed=1, **SHALLOW)


@pytest.mark.parametrize("distributed", [True, False])
def test_an_optimizer_that_has_not_stepped(
    model: Path, other: Path, tmp_path: Path, distributed: bool, one_rank: RankPool
) -> None:
    (reports,) = one_rank.run(program.before_any_step, str(model), str(other), Layout(), str(tmp_path), distributed)
    assert reports[0] == reports[1]


class FusedAdam(torch.optim.SGD):
    """Counts steps in its groups and reads ``bias_correction`` there, as Transformer Engine's does."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))])
        self.defaults = {"lr": 0.5, "bias_correction": True}


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("saved_by", ["torch", "fused"])
@pytest.mark.parametrize("loaded_by", ["torch", "fused"])
def test_torchs_adam_and_transformer_engines_go_on_from_each_others_checkpoints(
    saved_by: str, loaded_by: str, distributed: bool, steps: int
) -> None:
    """A plain optimizer of Megatron has torch's count in common, unless it is 0; a distributed one in its groups."""
    group: dict[str, Any] = {"lr": 0.25} | ({"step": steps} if saved_by == "fused" else {})
    saved: dict[str, Any] = {"param_groups": [group, dict(group)]}
    if distributed:
        for one in saved["param_groups"]:
            one.setdefault("step", float(steps))
    else:
        saved["state"] = {"common_step": torch.tensor(float(steps))} if saved_by == "torch" and steps else {}
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]) if loaded_by == "torch" else FusedAdam()
    loaded: list[dict[str, Any]] = []
    config = SimpleNamespace(lr=0.5, min_lr=0.0)
    megatrons = SimpleNamespace(optimizer=adam, config=config, load_state_dict=loaded.append)
    state._load_optimizer(megatrons, {"optimizer": saved} | ({"param_state": {}} if distributed else {}))
    found = loaded[0]["optimizer"]
    if loaded_by == "torch" and not distributed:
        assert float(found["state"]["common_step"]) == steps
        return
    assert "common_step" not in found.get("state", {})  # which Megatron would give each parameter as a state
    for one in found["param_groups"]:
        assert one["lr"] == 0.25 and type(one["step"]) is int and one["step"] == steps
        assert loaded_by == "torch" or one["bias_correction"] is True


def test_a_model_takes_the_weights_of_a_training_run(
    model: Path, other: Path, tmp_path: Path, one_rank: RankPool
) -> None:
    assert one_rank.run(program.weights_alone, str(model), str(other), Layout(), str(tmp_path)) == [True]


def test_a_failed_save_is_reported_and_leaves_the_previous_one(model: Path, tmp_path: Path, ranks: RankPool) -> None:
    for answer in ranks.run(program.failing_saves, str(model), SAVED_AT, str(tmp_path)):
        sync_error, after_sync, async_error, after_async, loaded, at_last = answer
        for error in (sync_error, async_error):
            assert "step1 could not be written" in error and "No space left on device" in error and "\n" not in error
        assert after_sync == ("step0", ["latest", "step0"])
        assert after_async == ("step2", ["latest", "step0", "step2"])
        assert loaded == 2
        assert at_last == ("step3", ["latest", "step0", "step2", "step3"])


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_the_previous_one(
    model: Path, tmp_path: Path, one_rank: RankPool
) -> None:
    with RankPool(1) as pool, pytest.raises(AssertionError, match="^rank 0:\nno answer$"):
        pool.run(program.die_while_writing, str(model), str(tmp_path))
    assert newest_whole(tmp_path) == tmp_path / "step1"
    check_checkpoint(tmp_path / "step1", AutoConfig.from_pretrained(model), for_training=True)
    assert [path.name.split(".tmp-")[0] for path in tmp_path.iterdir() if ".tmp-" in path.name] == ["step2"]
    assert one_rank.run(program.resume_and_save, str(model), str(tmp_path), "step3") == ["step1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step1", "step3"]


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*/*.distcp"))[0]


def _remove(folder: Path) -> None:
    _first_shard(folder).unlink()


def _truncate(folder: Path) -> None:
    shard = _first_shard(folder)
    os.truncate(shard, shard.stat().st_size - 1)


def _change(folder: Path) -> None:
    shard = _first_shard(folder)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _truncate_manifest(folder: Path) -> None:
    manifest = next(folder.glob("*/checkpoint.json"))
    os.truncate(manifest, 100)


def _delete_all(folder: Path) -> None:
    shutil.rmtree(folder / "step3")


# Fields of other models, with the message that refuses them; the ranks refuse the last model too.
FOREIGN = [
    ({"num_hidden_layers": 4}, "of another model: it has num_hidden_layers 2 and not 4."),
    ({"vocab_size": 152, "tie_word_embeddings": True}, "vocab_size 151 and not 152, tie_word_embeddings False and"),
    ({"hidden_size": 128}, "of another model: it has hidden_size 64 and not 128."),
]
DAMAGES = {
    "missing": (_remove, "is incomplete: its file __0_0.distcp is missing"),
    "truncated": (_truncate, "is incomplete: its file __0_0.distcp has"),
    "changed": (_change, "is damaged: its file __0_0.distcp has changed"),
    "manifest": (_truncate_manifest, "checkpoint.json cannot be read"),
    "gone": (_delete_all, "has no checkpoint 'step3'; it has none."),
}


def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    written: Callable, tmp_path: Path, ranks: RankPool
) -> None:
    trained, _ = written("llama")
    folders = []
    for name, (damage, _) in DAMAGES.items():
        folders.append(str(shutil.copytree(trained / "now", tmp_path / name)))
        damage(tmp_path / name)
    for answer in ranks.run(program.refused, str(trained / "source"), SAVED_AT, folders, "float32", True, "step3"):
        for (message, unchanged), (_, sentence) in zip(answer, DAMAGES.values(), strict=True):
            assert "Error: " in message and sentence in message and "\n" not in message
            assert unchanged


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_loaded(
    model: Path, tmp_path: Path, ranks: RankPool
) -> None:
    """A bit of a large file is flipped, and ``latest`` names a checkpoint that does not exist."""
    for loaded, alone, unloadable in ranks.run(program.fall_back, str(model), SAVED_AT, str(tmp_path)):
        assert loaded == "step1"
        assert "step2.corrupt" in unloadable and "--ckpt.load_tag" in unloadable
        assert alone == ["latest", "step1", "step2.corrupt"]


def test_a_checkpoint_of_another_model_is_refused(written: Callable, tmp_path: Path, ranks: RankPool) -> None:
    trained = written("llama")[0] / "now"
    for i, (fields, sentence) in enumerate(FOREIGN):
        foreign = make_checkpoint(tmp_path / str(i), "llama", **(SHALLOW | fields))
        with pytest.raises(CheckpointError, match=sentence):
            check_checkpoint(trained / "step3", AutoConfig.from_pretrained(foreign), dtype="float32")
    for ((message, unchanged),) in ranks.run(program.refused, str(foreign), SAVED_AT, [str(trained)]):
        assert message.startswith("CheckpointError: ") and sentence in message
        assert unchanged


@pytest.mark.parametrize(
    ("dtype", "distributed", "sentence"),
    [
        ("bfloat16", True, "was written in float32 and this run is in bfloat16; run it in float32."),
        ("float32", False, "was saved with the distributed optimizer; resume with it."),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_refused(
    written: Callable, dtype: str, distributed: bool, sentence: str, ranks: RankPool
) -> None:
    trained, _ = written("llama")
    source, folders = str(trained / "source"), [str(trained / "now")]
    for ((message, unchanged),) in ranks.run(program.refused, source, SAVED_AT, folders, dtype, distributed):
        assert message.endswith(sentence)
        assert unchanged
