"""Which checkpoints of a folder are removed, in which order; a crash at any moment leaves a readable latest one."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from openrlhf_gtpo.checkpoints import folder as checkpoint_folder
from openrlhf_gtpo.checkpoints.files import DamagedError
from openrlhf_gtpo.checkpoints.folder import (
    CheckpointError,
    candidate,
    check_checkpoint,
    newest_whole,
    write_manifest,
)

MODEL = {"model": {}, "dtype": "float32", "optimizer": True}


def write(folder: Path, tag: str, metric: float | None = None, *, size: int = 10, content: bytes = b"x") -> Path:
    """Write a checkpoint as the first rank does in a save."""
    temporary = checkpoint_folder.begin(folder / tag, whole_folder=True)
    (temporary / "shard").write_bytes(content * size)
    write_manifest(temporary, {**MODEL, "metric": {"key": "eval", "value": metric}})
    checkpoint_folder.publish(temporary, folder / tag)
    checkpoint_folder.set_latest(folder, tag)
    # Set times that tell ages apart even on a file system with coarse clocks.
    number = len(list(folder.iterdir()))
    os.utime(folder / tag, (number, number))
    return folder / tag


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def test_the_oldest_goes_first(tmp_path: Path) -> None:
    """Whatever its metric, which upstream gives it from the evaluation before."""
    for i, metric in enumerate([0.9, None, 0.1, 0.5]):
        write(tmp_path, f"t{i}", metric)
    assert checkpoint_folder.rotate(tmp_path, "t3", max_num=2, max_mem_gb=1) == ["t0", "t1"]
    assert tags(tmp_path) == ["t2", "t3"]


def test_a_clock_that_goes_back_makes_none_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a requeued job's first node is another one."""
    for i, now in enumerate([7200.0, 7260.0, 3600.0, 3660.0]):
        monkeypatch.setattr(checkpoint_folder.time, "time", lambda now=now: now)
        write(tmp_path, f"t{i}")
    assert newest_whole(tmp_path) == tmp_path / "t3"
    assert checkpoint_folder.rotate(tmp_path, "t3", max_num=2, max_mem_gb=1) == ["t0", "t1"]


def test_a_folder_that_may_not_be_entered_is_no_hindrance() -> None:
    """As of another user, beside the one that convert writes."""
    with tempfile.TemporaryDirectory() as shared:  # tmp_path is closed to all but its owner
        Path(shared).chmod(0o777)
        closed = Path(shared, "closed")
        closed.mkdir(mode=0)
        user = os.geteuid()
        if user == 0:  # to whom nothing is closed
            os.seteuid(65534)
        try:
            mine = Path(shared, "mine")
            mine.mkdir()
            write_manifest(mine, MODEL)
        finally:
            os.seteuid(user)
            closed.chmod(0o700)
        assert check_checkpoint(mine)["model"] == {}


def test_the_best_is_protected_and_alone(tmp_path: Path) -> None:
    for tag in ("t0", "best_t0", "t1"):
        write(tmp_path, tag, 0.0)
    assert checkpoint_folder.rotate(tmp_path, "t1", max_num=1, max_mem_gb=1) == ["t0"]
    write(tmp_path, "best_t1", 1.0)
    assert checkpoint_folder.rotate(tmp_path, "best_t1", max_num=1, max_mem_gb=1) == ["best_t0"]
    assert tags(tmp_path) == ["best_t1", "t1"]


def test_size_counts_and_the_new_one_always_stays(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, f"t{i}", size=2**20)
    assert checkpoint_folder.rotate(tmp_path, "t2", max_num=9, max_mem_gb=2.5 / 1024) == ["t0"]
    assert checkpoint_folder.rotate(tmp_path, "t2", max_num=9, max_mem_gb=0) == ["t1"]
    assert tags(tmp_path) == ["t2"]


def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").write_bytes(b"x" * 2**20)
    for i in range(3):
        write(tmp_path, f"t{i}")
    checkpoint_folder.rotate(tmp_path, "t2", max_num=1, max_mem_gb=0.5 / 1024)
    assert tags(tmp_path) == ["notes", "t2"]


def test_leftovers_of_crashes_go_with_the_next_write(tmp_path: Path) -> None:
    write(tmp_path, "t0")
    unfinished = checkpoint_folder.begin(tmp_path / "t1", whole_folder=True)
    (unfinished / "shard").write_bytes(b"x")
    assert newest_whole(tmp_path) == tmp_path / "t0"
    write(tmp_path, "t2")
    assert tags(tmp_path) == ["t0", "t2"]
    mine = tmp_path / "elsewhere.tmp-12345678"
    mine.mkdir()
    checkpoint_folder.begin(tmp_path / "converted", whole_folder=False)
    assert mine.exists()


def test_a_crash_between_the_renames_of_a_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "t0", content=b"a")
    temporary = checkpoint_folder.begin(tmp_path / "t0", whole_folder=True)
    write_manifest(temporary, {**MODEL, "metric": {}})
    whole = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path == temporary:
            raise KeyboardInterrupt
        return whole(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_folder.publish(temporary, tmp_path / "t0")
    monkeypatch.undo()
    there = newest_whole(tmp_path)
    assert there is not None and there.name.startswith("t0")
    check_checkpoint(there)
    assert (there / "shard").read_bytes() == b"a" * 10
    write(tmp_path, "t1")
    assert tags(tmp_path) == ["t0", "t1"]
    write(tmp_path, "t0", content=b"b")
    assert (tmp_path / "t0" / "shard").read_bytes() == b"b" * 10
    assert tags(tmp_path) == ["t0", "t1"]


def test_a_crash_while_the_replaced_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest may be the first file to go."""

    def crash(path: Path) -> None:
        (path / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    write(tmp_path, "t0", content=b"a")
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "t0", content=b"b")
    monkeypatch.undo()
    write(tmp_path, "t1")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["t0", "t1"]
    write(tmp_path, "t0", content=b"c")
    assert (tmp_path / "t0" / "shard").read_bytes() == b"c" * 10


def test_a_path_may_be_a_checkpoint_or_the_folder_of_several(tmp_path: Path) -> None:
    write(tmp_path, "t0"), write(tmp_path, "t1")
    assert checkpoint_folder.resolve(tmp_path) == tmp_path / "t1"
    assert checkpoint_folder.resolve(tmp_path / "t0") == tmp_path / "t0"
    (tmp_path / "empty").mkdir()
    for path, sentence in ((tmp_path / "empty", "it has no checkpoint.json"), (tmp_path / "no", "There is no")):
        with pytest.raises(CheckpointError, match=sentence):
            checkpoint_folder.resolve(path)


def test_the_newest_whole_one_is_found_without_latest(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none") is None and candidate([tmp_path / "none"]) is None
    for tag in ("t5", "t10", "t7"):  # in the order of writing, in which numbers may go back
        write(tmp_path, tag)
    for latest in ("t5", "gone"):
        (tmp_path / "latest").write_text(latest)
        assert newest_whole(tmp_path) == tmp_path / "t7"
    (tmp_path / "latest").unlink()
    os.truncate(tmp_path / "t7" / "shard", 3)
    assert newest_whole(tmp_path) == tmp_path / "t10"
    (tmp_path / "t10" / "checkpoint.json").write_text("{")
    assert newest_whole(tmp_path) == tmp_path / "t5"
    assert candidate([tmp_path]) == tmp_path / "t7"  # which the ranks will set aside
    with pytest.raises(DamagedError, match="t7 is incomplete"):
        candidate([tmp_path], "t7")


def test_folders_that_belong_together_have_the_newest_in_common(tmp_path: Path) -> None:
    """After a kill between the actor's save and the critic's, max_num 1 lets neither remove the older one."""
    actor, critic = tmp_path / "_actor", tmp_path / "_critic"
    write(actor, "t1")
    with pytest.raises(CheckpointError, match=r"known to be whole and that .*_critic has too \(t1\)"):
        candidate([actor, critic])
    critic.mkdir()  # before its first save was over: the run has no checkpoint yet, whichever of them has saved
    assert candidate([actor, critic]) is candidate([critic, actor]) is None
    write(critic, "t1"), write(actor, "t2")
    assert newest_whole(actor, critic) == actor / "t1" and newest_whole(actor) == actor / "t2"
    (critic / "t2").mkdir()  # an empty folder is not a checkpoint
    with pytest.raises(CheckpointError, match="_critic has no checkpoint 't2'; it has t1.$"):
        candidate([actor, critic], "t2")
    assert checkpoint_folder.rotate(actor, "t2", [critic], max_num=1, max_mem_gb=1) == []
    write(critic, "t2")
    assert checkpoint_folder.rotate(critic, "t2", [actor], max_num=1, max_mem_gb=1) == ["t1"]
    assert newest_whole(actor, critic) == actor / "t2"


def test_checkpoints_of_an_earlier_version_are_taken_as_latest_names_them(tmp_path: Path) -> None:
    for tag in ("t1", "t2"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "latest").write_text("t1")
    assert newest_whole(tmp_path) == candidate([tmp_path]) == tmp_path / "t1"
    assert "of an earlier version" in checkpoint_folder.announcement(tmp_path / "t1")
    (tmp_path / "latest").unlink()
    assert newest_whole(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"no checkpoint that is known to be whole \(t1, t2\).*--ckpt.load_tag"):
        candidate([tmp_path])
    assert candidate([tmp_path], "t2") == tmp_path / "t2"
    with pytest.raises(CheckpointError, match="has no checkpoint 't9'; it has t1, t2."):
        candidate([tmp_path], "t9")
    write(tmp_path, "t2")  # replaces one that may not be whole
    assert checkpoint_folder.rotate(tmp_path, "t2", max_num=1, max_mem_gb=1) == ["t1"]
    assert tags(tmp_path) == ["t2"]


def test_what_is_set_aside_is_neither_found_nor_removed(tmp_path: Path) -> None:
    write(tmp_path, "t1")
    aside = checkpoint_folder.set_aside(tmp_path / "t1")
    assert aside.name == "t1.corrupt" and newest_whole(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"known to be whole \(t1\.corrupt\)"):
        candidate([tmp_path])
    write(tmp_path, "t2")
    assert checkpoint_folder.rotate(tmp_path, "t2", max_num=1, max_mem_gb=0) == []
    assert checkpoint_folder.names(tmp_path) == ["t1.corrupt", "t2"]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The manifest of the newest of two checkpoints."""
    write(tmp_path, "t1"), write(tmp_path, "t2")
    manifest = tmp_path / "t2" / checkpoint_folder.MANIFEST
    manifest.write_text("{")
    os.utime(manifest.parent)  # which its age is now taken from
    return manifest


def test_a_folder_in_which_nothing_can_be_set_aside(
    lone_rank: None, damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks fail, not the first alone."""
    from openrlhf_gtpo.checkpoints.together import choose

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Read-only file system: '.*t2'"):
        choose([damaged.parent.parent])
