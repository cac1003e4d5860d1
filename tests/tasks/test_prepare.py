import errno
import json
from pathlib import Path

from openrlhf_gtpo.cli.prepare import main
from openrlhf_gtpo.tasks.math_verify_reward import reward_func


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


def test_answers_are_written_as_the_table_says_them(tmp_path):
    answers = [3, 3.5, 10**20, "007", None]
    rows = [{"problem": f"{answer}?", "answer": answer} for answer in answers] + [{"problem": "none?"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.csv").write_text("problem,answer\n" + "".join(f"{answer}?,{answer or ''}\n" for answer in answers))
    for name in ("a.jsonl", "a.csv"):
        out = tmp_path / f"of {name}"
        assert main(["math", "--source", str(tmp_path / name), "--output", str(out)]) == 0
        labels = [json.loads(line)["label"] for line in (out / "train.jsonl").read_text().splitlines()]
        assert labels == ["3", "3.5", str(10**20), "007"]


def test_a_directory_in_use_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for command in ("smollm2", "tiny-model"):
        assert main([command, "--output", str(tmp_path)]) == 2
        assert "not made by this command" in capsys.readouterr().err


# The first row of each data set, shortened.
BENCHMARK_ROWS = {
    "aime2024": {
        "id": 60,
        "problem": "What is 2 * 102?",
        "solution": "…",
        "answer": "204",
        "url": "…",
        "year": "2024",
    },
    "aime2025": {"problem": "Find the sum of all such bases.", "answer": "70", "id": "0"},
    "amc23": {"id": 0, "question": "After how many miles do they meet?", "answer": 27.0, "url": "…"},
    "math500": {"problem": "Polar?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "…", "level": 2},
    "minerva": {"question": "How many kpc away is it?", "answer": "6.82e-5"},
    "olympiadbench": {"question": "Determine all $a$.", "final_answer": ["$1$", "$-1$"], "is_multiple_answer": True},
}


def test_benchmarks_become_files_that_evaluate_reads(tmp_path, capsys):
    hub = tmp_path / "hub"
    hub.mkdir()
    for name, row in BENCHMARK_ROWS.items():
        (hub / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["benchmarks", "--from", str(hub), "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "out")
    assert "aime2024: 1 of 30 questions\n" in captured.err and "olympiadbench: 1 of 674" in captured.err
    rows = {name: json.loads((tmp_path / "out" / f"{name}.jsonl").read_text()) for name in BENCHMARK_ROWS}
    assert rows["aime2025"]["input"].startswith("Find the sum of all such bases. Please reason step by step")
    labels = {"aime2024": "204", "amc23": "27.0", "minerva": "6.82e-5", "olympiadbench": "$1$, $-1$"}
    assert {name: rows[name]["label"] for name in labels} == labels
    for name, right, wrong in (
        ("amc23", "27", "2.7"),
        ("olympiadbench", "-1, 1", "1"),
        ("math500", "(3, \\pi/2)", "(3, \\pi)"),
    ):
        text, label = [rows[name]["input"]], [rows[name]["label"]]
        rewards = [reward_func([f"{text[0]} \\boxed{{{box}}}"], text, label)["rewards"] for box in (right, wrong)]
        assert rewards == [1, 0], name
    assert main(["benchmarks", "--names", "amc23", "--from", str(hub), "--output", str(tmp_path / "out")]) == 2
    assert "already has amc23.jsonl; name another folder" in capsys.readouterr().err
    assert main(["benchmarks", "--from", str(tmp_path), "--output", str(tmp_path / "new")]) == 2
    assert "has no aime2024.jsonl, .json, .csv or .parquet" in capsys.readouterr().err
    (hub / "amc23.jsonl").write_text('{"problem": "1 + 1?", "answer": 2}\n')
    assert main(["benchmarks", "--names", "amc23", "--from", str(hub), "--output", str(tmp_path / "new")]) == 2
    assert "amc23: row 1 has no column question; it has problem, answer" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_that_blocks_a_second_try(tmp_path, capsys, monkeypatch):
    (tmp_path / "hub").mkdir()
    for name in ("aime2024", "amc23"):
        (tmp_path / "hub" / f"{name}.jsonl").write_text(json.dumps(BENCHMARK_ROWS[name]) + "\n")
    (tmp_path / "a.jsonl").write_text('{"problem": "1 + 1?", "answer": 2}\n{"problem": "1 + 2?", "answer": 3}\n')
    math = ["math", "--source", str(tmp_path / "a.jsonl"), "--eval-size", "1", "--output", str(tmp_path / "math")]
    benchmarks = ["benchmarks", "--names", "aime2024", "amc23", "--from", str(tmp_path / "hub")]
    write_text = Path.write_text
    for arguments, second in ((math, "eval"), ([*benchmarks, "--output", str(tmp_path / "out")], "amc23")):

        def full(path, text, second=second, **options):
            write_text(path, "" if path.stem == second else text, **options)
            if path.stem == second:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", full)
            assert main(arguments) == 2
        assert capsys.readouterr().err.endswith("No space left on device\n")
        assert list(Path(arguments[-1]).iterdir()) == []
        assert main(arguments) == 0
        assert len(list(Path(arguments[-1]).iterdir())) == 2
