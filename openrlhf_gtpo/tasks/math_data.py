"""Converts data sets of problems and answers to train.jsonl and eval.jsonl for OpenRLHF.

Matching flags: `--data.prompt_dataset DIR/train.jsonl --data.input_key input --data.label_key label
--data.apply_chat_template`, with `math_verify_reward.py` as `--reward.remote_url`.
"""

import json
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openrlhf_gtpo.errors import one_line
from openrlhf_gtpo.platform.tables import csv_rows, json_rows
from openrlhf_gtpo.tasks.math_verify_reward import parse_answer

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Benchmark:
    """A set of questions: its name on the Hugging Face hub, its columns, and the number of questions."""

    source: str
    split: str
    problem_key: str
    answer_key: str
    questions: int
    config: str | None = None


BENCHMARKS = {
    "aime2024": Benchmark("HuggingFaceH4/aime_2024", "train", "problem", "answer", 30),
    "aime2025": Benchmark("math-ai/aime25", "test", "problem", "answer", 30),
    "amc23": Benchmark("math-ai/amc23", "test", "question", "answer", 40),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", "problem", "answer", 500),
    "minerva": Benchmark("math-ai/minervamath", "test", "question", "answer", 272),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench", "train", "question", "final_answer", 674, "OE_TO_maths_en_COMP"
    ),
}


def write_benchmarks(
    names: Iterable[str], output_dir: str | Path, source_dir: Path | None = None, instruction: str = INSTRUCTION
) -> tuple[Path, str]:
    """Write each benchmark as ``NAME.jsonl`` for `cli.evaluate`; return the folder, and a text with the counts.

    Args:
        names: keys of BENCHMARKS.
        source_dir: folder with ``NAME.jsonl``, ``.json``, ``.csv`` or ``.parquet``, with the data set's own columns;
            None reads the hub.
        instruction: appended to each question.

    Raises:
        ValueError: a table is missing or cannot be read, or an output file already exists.
    """
    directory = Path(output_dir).expanduser().resolve()
    texts, counts = {}, []
    for name in names:
        if (directory / f"{name}.jsonl").exists():
            raise ValueError(f"--output {directory} already has {name}.jsonl; name another folder or remove it")
        benchmark = BENCHMARKS[name]
        if source_dir is None:
            table = load_table(benchmark.source, benchmark.config, benchmark.split)
        else:
            files = [path for kind in _FILES if (path := source_dir / f"{name}{kind}").is_file()]
            if not files:
                raise ValueError(f"--from {source_dir} has no {name}.jsonl, .json, .csv or .parquet")
            table = load_table(str(files[0]))
        columns = benchmark.problem_key, benchmark.answer_key
        try:
            rows, repeated, unread = _read_problems(table, *columns, None, instruction, "")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        texts[name] = _lines(rows)
        left_out = f"; left out: {repeated} repeated, {unread} with an answer that cannot be checked"
        counts.append(f"{name}: {len(rows)} of {benchmark.questions} questions{left_out if repeated + unread else ''}")
    _write_all(directory, texts)
    return directory, "\n".join(counts)


def load_table(source: str, config: str | None = None, split: str = "train") -> Iterable[Mapping[str, Any]]:
    """Load the rows of a file, or of a data set on the Hugging Face hub.

    Raises:
        ValueError: a file is missing, cannot be read, or is given with a configuration or a split; or a data set
            cannot be loaded.
    """
    import datasets

    path = Path(source)
    kind = _FILES.get(path.suffix)
    if kind is not None and not path.is_file():
        raise ValueError(f"--source {source} does not exist; check the path")
    if kind is not None and (config is not None or split != "train"):
        flag = f"--split {split}" if config is None else f"--config {config}"
        raise ValueError(f"--source {source} is a file, so {flag} has no effect; leave it out")
    if kind == "csv":
        return csv_rows(path)
    if kind == "json":
        rows = list(json_rows(path))
        columns = dict.fromkeys(name for row in rows for name in row)
        return [{**columns, **row} for row in rows]
    try:
        if kind is not None:
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        return datasets.load_dataset(source, config, split=split)
    except Exception as error:  # the library's readers pass on any exception of their parsers, and wrap some
        raise ValueError(
            f"--source {source} cannot be read as Parquet or as a data set of the Hugging Face hub: "
            f"{one_line(error.__cause__ or error)}"
        ) from error


def write_math_files(
    table: Iterable[Mapping[str, Any]],
    output_dir: str | Path,
    problem_key: str = "problem",
    answer_key: str = "answer",
    answer_after: str | None = None,
    instruction: str = INSTRUCTION,
    system: str = "",
    eval_size: int = 0,
    seed: int = 1,
) -> tuple[Path, str]:
    """Write `train.jsonl`, and `eval.jsonl` if rows are held out; return their folder and a summary of the rows.

    A row has `input` (the problem, or chat messages) and `label` (the answer). Left out are empty problems, repeated
    ones (the same text except for white space), and problems with an answer that Math-Verify cannot read, because the
    reward could not compare with it.

    Args:
        table: rows with these columns.
        problem_key, answer_key: a column's name, or `a.b` for field b of column a.
        answer_after: the answer follows the last occurrence of this text, if any (GSM8K's "####").
        instruction: appended to each problem that is text; chat messages are left as they are.
        system: system message put before each problem that is text.
        eval_size: number of problems to hold out, drawn with `seed`.

    Raises:
        ValueError: a column is missing, a problem is neither text nor messages, the output folder is not empty, or
            there are too few problems.
    """
    directory = Path(output_dir).expanduser().resolve()
    # Checked first, because reading the answers may take minutes.
    if eval_size < 0:
        raise ValueError(f"Expected --eval-size >= 0, got {eval_size}.")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--output {directory} is not an empty folder; name a new folder or remove it")
    rows, repeated, without_answer = _read_problems(table, problem_key, answer_key, answer_after, instruction, system)
    if eval_size >= len(rows):
        raise ValueError(
            f"--eval-size {eval_size} leaves nothing to train on: {len(rows)} problems have an answer that can be "
            f"checked ({repeated} more were repeated, {without_answer} had none); hold out fewer"
        )
    held_out = set(random.Random(seed).sample(range(len(rows)), eval_size))
    texts = {"train": _lines(row for index, row in enumerate(rows) if index not in held_out)}
    if eval_size:
        texts["eval"] = _lines(rows[index] for index in sorted(held_out))
    _write_all(directory, texts)
    return directory, (
        f"{len(rows) - eval_size} problems to train on, {eval_size} held out; left out: {repeated} repeated, "
        f"{without_answer} without a problem, or with an answer that is not a mathematical expression"
    )


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_all(directory: Path, texts: Mapping[str, str]) -> None:
    """Write ``NAME.jsonl`` for each text, or none of them if the disk has no room for all."""
    directory.mkdir(parents=True, exist_ok=True)
    # Inside the folder, which may be a disk of its own.
    with TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
        for name, text in texts.items():
            Path(partial, name).write_text(text, encoding="utf-8")
        for name in texts:
            os.replace(Path(partial, name), directory / f"{name}.jsonl")


def _read_problems(
    table: Iterable[Mapping[str, Any]],
    problem_key: str,
    answer_key: str,
    answer_after: str | None,
    instruction: str,
    system: str,
) -> tuple[list[dict[str, Any]], int, int]:
    """Read the rows of a table, with `input` and `label` (:func:`write_math_files`). Also count the problems that were
    left out: repeated ones, and ones with a missing or unreadable problem or answer. Several answers become one list.
    """
    problems: dict[str, dict[str, Any]] = {}
    repeated = without_answer = 0
    for number, row in enumerate(table, 1):
        # The answer as text; several become a list.
        problem = _field(row, problem_key, number)
        answers = _field(row, answer_key, number)
        answers = answers if isinstance(answers, list) else [answers]
        answer = ", ".join(str(part) for part in answers if part is not None and part == part)  # no empty cell, no NaN
        if answer_after is not None:
            answer = answer.rpartition(answer_after)[2].strip()
        problem = problem.strip() if isinstance(problem, str) else problem
        is_messages = isinstance(problem, list) and all(
            isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in problem
        )
        if not (problem is None or isinstance(problem, str) or is_messages):
            raise ValueError(
                f"row {number}: expected {problem_key} to be a text, or chat messages with role and content, got "
                f"{str(problem)[:60]!r}"
            )
        # Keep the first of equal problems, if its answer can be checked.
        contents = [message["content"] for message in problem] if isinstance(problem, list) else [problem or ""]
        key = "".join("".join(map(str, contents)).split())
        if key in problems:
            repeated += 1
        elif not problem or not parse_answer(answer):
            without_answer += 1
        else:
            if isinstance(problem, str):
                problem = f"{problem} {instruction}".strip()
                if system:
                    problem = [{"role": "system", "content": system}, {"role": "user", "content": problem}]
            problems[key] = {"input": problem, "label": answer}
    return list(problems.values()), repeated, without_answer


def _field(row: Mapping[str, Any], key: str, number: int) -> Any:
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            columns = " ".join(", ".join(row).split())  # on one line, even if column names have line breaks
            raise ValueError(f"row {number} has no column {key}; it has {columns}")
        value = value[name]
    return value
