import os
import shutil
from pathlib import Path

import pytest

from openrlhf_gtpo.tasks.build_once import MARKER, build_once


def _builder(calls, text="content"):
    def build(directory):
        calls.append(directory)
        (directory / "sub").mkdir()
        (directory / "sub" / "file.txt").write_text(text)

    return build


def test_is_built_once_and_leaves_nothing_beside_it(tmp_path):
    calls = []
    first = build_once(tmp_path / "a" / "out", {"seed": 1}, _builder(calls))
    second = build_once(tmp_path / "a" / "out", {"seed": 1}, _builder(calls))
    assert first == second and len(calls) == 1
    assert (first / "sub" / "file.txt").read_text() == "content"
    assert [path.name for path in first.parent.iterdir()] == ["out"]


def test_another_account_can_read_all_of_a_result_whatever_the_umask(tmp_path):
    umask = os.umask(0o077)
    try:
        out = build_once(tmp_path / "out", {}, _builder([]))
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out, *out.rglob("*"))}
    assert modes == {"out": 0o755, "sub": 0o755, "file.txt": 0o644, MARKER: 0o644}


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    build_once(tmp_path / "out", {}, _builder([]))
    assert (tmp_path / "out" / MARKER).is_file()


def test_an_interrupted_build_leaves_no_directory_and_is_redone(tmp_path):
    def interrupted(directory):
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "out", {}, interrupted)
    assert list(tmp_path.iterdir()) == []
    assert (build_once(tmp_path / "out", {}, _builder([])) / "sub" / "file.txt").is_file()


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_damaged_result_is_built_again(tmp_path, damage):
    calls = []
    out = build_once(tmp_path / "out", {}, _builder(calls))
    file = out / "sub" / "file.txt"
    file.unlink() if damage == "missing" else file.write_text("con")
    build_once(out, {}, _builder(calls))
    assert len(calls) == 2 and file.read_text() == "content"


def test_a_directory_of_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not made by this command"):
        build_once(tmp_path, {}, _builder([]))
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / MARKER).write_text('{"recipe": ')  # by an older tool, or cut off
    with pytest.raises(ValueError, match="not made by this command"):
        build_once(tmp_path / "list", {}, _builder([]))
    with pytest.raises(ValueError, match="is a file"):
        build_once(tmp_path / "thesis.txt", {}, _builder([]))
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_first_of_two_processes_wins(tmp_path):
    def slow(directory):
        (directory / "who").write_text("second")
        build_once(tmp_path / "out", {}, lambda other: (other / "who").write_text("first"))

    assert (build_once(tmp_path / "out", {}, slow) / "who").read_text() == "first"


def test_the_first_of_two_processes_wins_at_the_last_moment(tmp_path, monkeypatch):
    replace = os.replace

    def late(partial, target):
        monkeypatch.setattr(os, "replace", replace)
        build_once(target, {}, _builder([], "first"))
        replace(partial, target)

    monkeypatch.setattr(os, "replace", late)
    out = build_once(tmp_path / "out", {}, _builder([], "second"))
    assert (out / "sub" / "file.txt").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_kill_while_a_damaged_result_is_deleted_is_made_good(tmp_path, monkeypatch):
    """Whatever is deleted first, the remains are not where the result belongs."""
    out = build_once(tmp_path / "out", {}, _builder([]))
    (out / "sub" / "file.txt").write_text("con")

    def killed(path, **options):
        (Path(path) / MARKER).unlink(missing_ok=True)
        raise SystemExit

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(shutil, "rmtree", killed)
        build_once(out, {}, _builder([]))
    assert (build_once(out, {}, _builder([])) / "sub" / "file.txt").read_text() == "content"
