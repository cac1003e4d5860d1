import json

import pytest

from openrlhf_gtpo.cli.prepare import main


def test_task_prints_its_directory_and_is_done_once(tmp_path, capsys):
    arguments = [
        "task",
        "--task",
        "products",
        "--train-size",
        "8",
        "--eval-size",
        "4",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    written = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "produts"], "did you mean products"),
        (["--task", "products", "--task-config", "{max_digits: 2}"], "is not JSON"),
        (["--task", "products", "--train-rows", "9" * 20], "the train rows must be at least 1 and below 2^31"),
        (["--task", "products", "--task-config", "[1]"], "is not a JSON object"),
        ([], "name a task with --task, or a preset (quickstart, smoke)"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(tmp_path, capsys, arguments, message):
    assert main(["task", "--output", str(tmp_path / "out"), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"problem": "caf\xe9 1+1", "answer": "2"}\n', "a.jsonl is not UTF-8 text"),
        ("a.csv", b"problem,answer\ncaf\xe9,2\n", "a.csv is not UTF-8 text"),
        ("a.json", b"", "a.json is empty"),
        ("a.json", b"[null]", "a.json has a row that is null"),
        ("a.jsonl", b'{"problem": "1+1", "answer": "2"}\nnull\n', "a.jsonl has a row that is null"),
        ("a.jsonl", b"{\n", "a.jsonl cannot be read as"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert main(["math", "--source", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare")]
    assert len(said) == 1 and message in said[0] and "while generating" not in said[0]
    assert not (tmp_path / "out").exists()


def test_flags_override_a_preset(tmp_path):
    arguments = ["task", "--preset", "quickstart", "--system", "Multiply.", "--example", "1 * 1", "1"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    chat = json.loads((tmp_path / "out" / "train.jsonl").read_text().splitlines()[0])["input"]
    assert [turn["content"] for turn in chat[:3]] == ["Multiply.", "1 * 1", "1"]


def test_a_directory_in_use_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("smollm2", "tiny-model"):
        assert main([command, "--output", str(tmp_path)]) == 2
        assert "not made by this command" in capsys.readouterr().err
