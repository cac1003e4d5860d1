"""Would catch a resume that forgets the optimizer, its step count, the schedule, a random state or the caller's state;
a tensor resharded into the wrong place; an asynchronous save that training writes into; a failed save that passes for a
good one or takes the good one with it; and a damaged or foreign checkpoint that is loaded.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint_program as program
import pytest
from families import make_checkpoint
from rank_pool import RankPool
from transformers import AutoConfig

from openrlhf_gtpo.megatron.checkpoint.files import CheckpointError, check_checkpoint
from openrlhf_gtpo.megatron.checkpoint.folder import check_latest, latest
from openrlhf_gtpo.megatron.parallel.layout import Layout

SAVED_AT = Layout(tensor_model_parallel_size=2)
RESUMED_AT = {
    "PP2": Layout(pipeline_model_parallel_size=2),
    "DP4": Layout(),
    "TP4": Layout(tensor_model_parallel_size=4),
    "TP2xPP2-SP": Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
}
# Family, vocabulary, other fields, dtype, distributed optimizer. At TP4 the padded vocabulary is larger than at TP2.
VARIANTS = {
    "llama": ("llama", 151, {}, "float32", True),
    "qwen2-tied-bf16": ("qwen2", 896, {"tie_word_embeddings": True}, "bfloat16", True),
    "qwen3-plain-optimizer": ("qwen3", 151, {}, "float32", False),
    "mistral-plain-optimizer-bf16": ("mistral", 896, {}, "bfloat16", False),
}


@pytest.fixture(scope="module", params=VARIANTS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> tuple:
    """Another model of the same shape to resume from, the checkpoints' folder, and what training went on with."""
    family, vocab_size, fields, dtype, distributed = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "source", family, vocab_size, **fields)
    other = make_checkpoint(folder / "other", family, vocab_size, seed=1, **fields)
    answers = ranks.run(program.save_and_go_on, str(source), SAVED_AT, str(folder), dtype, distributed)
    return str(other), folder, answers, dtype, distributed


@pytest.mark.parametrize("how", ["now", "later"])
def test_training_goes_on_bit_for_bit_at_the_same_layout(written: tuple, how: str, ranks: RankPool) -> None:
    other, folder, before, dtype, distributed = written
    after = ranks.run(program.resume, other, SAVED_AT, str(folder / how), dtype, distributed)
    for old, new in zip(before, after, strict=True):
        assert new["reports"] == old["reports"]
        assert new["draws"] == old["draws"]
        position = {"position": [0, 1, 2]}
        assert new["client_state"] == program.CLIENT_STATE | {"data_loader_state_dict": position}
    assert before[0]["draws"] != before[1]["draws"]
    assert {(answer["before"], answer["latest"]) for answer in before} == {(None, "step3")}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *(("llama", name) for name in RESUMED_AT),
        ("qwen2-tied-bf16", "TP2xPP2-SP"),
        ("qwen3-plain-optimizer", "TP4"),
        ("mistral-plain-optimizer-bf16", "DP4"),
    ],
    indirect=["written"],
)
def test_training_goes_on_at_another_layout(written: tuple, name: str, ranks: RankPool) -> None:
    other, folder, before, dtype, distributed = written
    after = ranks.run(program.resume, other, RESUMED_AT[name], str(folder / "now"), dtype, distributed)
    exact = dtype == "float32"
    for i, tolerance in enumerate([1e-6, 1e-5] if exact else [1e-2, 1e-2]):
        old, new = before[0]["reports"][i], after[0]["reports"][i]
        assert new[0] == pytest.approx(old[0], abs=tolerance)
        assert new[1] == pytest.approx(old[1], rel=1e-4 if exact else 5e-2)
        assert new[2] == old[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "hf", "llama")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("other") / "hf", "llama", seed=1)


@pytest.mark.parametrize("distributed", [True, False])
def test_an_optimizer_that_has_not_stepped(
    model: Path, other: Path, tmp_path: Path, distributed: bool, one_rank: RankPool
) -> None:
    (reports,) = one_rank.run(program.before_any_step, str(model), str(other), Layout(), str(tmp_path), distributed)
    assert reports[0] == reports[1]


def test_a_model_takes_the_weights_of_a_training_run(
    model: Path, other: Path, tmp_path: Path, one_rank: RankPool
) -> None:
    assert one_rank.run(program.weights_alone, str(model), str(other), Layout(), str(tmp_path)) == [True]


def test_a_failed_save_is_reported_and_leaves_the_previous_one(model: Path, tmp_path: Path, ranks: RankPool) -> None:
    for answer in ranks.run(program.failing_saves, str(model), SAVED_AT, str(tmp_path)):
        sync_error, after_sync, async_error, after_async, loaded, at_last = answer
        for error in (sync_error, async_error):
            assert "step1 could not be written" in error and "No space left on device" in error and "\n" not in error
        for tag, there in (after_sync, after_async):
            assert (tag, there) == ("step0", ["latest", "step0"])
        assert loaded == 0
        assert at_last == ("step3", ["latest", "step0", "step3"])


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_the_previous_one(model: Path, tmp_path: Path) -> None:
    def run(*args: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(Path(__file__).with_name("crash_program.py")), str(model), str(tmp_path), *args]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    ended = run("step2", "kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert latest(tmp_path) == "step1"
    check_checkpoint(tmp_path / "step1", AutoConfig.from_pretrained(model), for_training=True)
    assert [path.name.split(".tmp-")[0] for path in tmp_path.iterdir() if ".tmp-" in path.name] == ["step2"]
    ended = run("step3")
    assert ended.returncode == 0, ended.stderr
    assert "loaded step1" in ended.stdout
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


DAMAGES = {
    "missing": (_remove, "is not whole: its file __0_0.distcp is missing"),
    "truncated": (_truncate, "is not whole: its file __0_0.distcp has"),
    "changed": (_change, "is damaged: its file __0_0.distcp has changed"),
    "manifest": (_truncate_manifest, "checkpoint.json cannot be read"),
    "gone": (_delete_all, "latest names 'step3', which is not a checkpoint there"),
}


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(program.save_and_go_on, str(model), SAVED_AT, str(folder), "float32", True)
    return folder / "now"


@pytest.mark.parametrize("damage, sentence", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_anything_changes(
    trained: Path, model: Path, tmp_path: Path, damage: Callable[[Path], None], sentence: str, ranks: RankPool
) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    damage(folder)
    for message, unchanged in ranks.run(program.refused, str(model), SAVED_AT, str(folder)):
        assert message.startswith("CheckpointError: ") and sentence in message and "\n" not in message
        assert unchanged
    # The driver says the same before any engine starts.
    with pytest.raises(CheckpointError, match=sentence):
        check_latest(folder, AutoConfig.from_pretrained(model), dtype="float32")


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"hidden_size": 128}, "of another model: it has hidden_size 64 and not 128."),
        ({"num_hidden_layers": 2}, "of another model: it has num_hidden_layers 4 and not 2."),
        (
            {"vocab_size": 152, "tie_word_embeddings": True},
            "vocab_size 151 and not 152, tie_word_embeddings False and",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    trained: Path, tmp_path: Path, fields: dict, sentence: str, ranks: RankPool
) -> None:
    foreign = make_checkpoint(tmp_path / "foreign", "llama", **fields)
    for message, unchanged in ranks.run(program.refused, str(foreign), SAVED_AT, str(trained)):
        assert message.startswith("CheckpointError: ") and sentence in message
        assert unchanged
    with pytest.raises(CheckpointError, match=sentence):
        check_latest(trained, AutoConfig.from_pretrained(foreign), dtype="float32")


def test_a_checkpoint_in_another_dtype_is_refused(trained: Path, model: Path, ranks: RankPool) -> None:
    for message, unchanged in ranks.run(program.refused, str(model), SAVED_AT, str(trained), "bfloat16"):
        assert message.endswith("was written in float32 and this run is in bfloat16; run it in float32.")
        assert unchanged


def test_a_checkpoint_of_the_other_optimizer_is_refused(trained: Path, model: Path, ranks: RankPool) -> None:
    for message, unchanged in ranks.run(program.refused, str(model), SAVED_AT, str(trained), "float32", False):
        assert message.endswith("holds the states of a distributed optimizer; resume with a distributed one.")
        assert unchanged
