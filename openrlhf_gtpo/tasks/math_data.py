"""Data sets of problems and answers as the train.jsonl and eval.jsonl that OpenRLHF reads.

The flags that fit: `--data.prompt_dataset DIR/train.jsonl --data.input_key input --data.label_key label
--data.apply_chat_template`, with `math_verify_reward.py` as `--reward.remote_url`. Knows datasets and math_verify; must
not know openrlhf, vllm or ray.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_gtpo.tasks.math_grading import parse_answer

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
_FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Columns:
    """Where a row has its problem and its answer: a column's name, or `a.b` for field b of column a.

    `answer_after`: the answer is what follows the last occurrence of this text, where it occurs (GSM8K's "####").
    """

    problem: str = "problem"
    answer: str = "answer"
    answer_after: str | None = None


@dataclass(frozen=True)
class Counts:
    """Rows by what became of them."""

    written: int
    held_out: int
    repeated: int
    without_answer: int

    def __str__(self) -> str:
        return (
            f"{self.written} problems to train on, {self.held_out} held out; left out: {self.repeated} that were there "
            f"before, {self.without_answer} whose answer is not a mathematical expression"
        )


def load_table(source: str, config: str | None = None, split: str = "train") -> Iterable[Mapping[str, Any]]:
    """The rows of a file, or of a data set on the Hugging Face hub.

    Raises:
        ValueError: a file that is missing or cannot be read, or a data set that cannot be loaded.
    """
    import datasets

    path = Path(source)
    kind = _FILES.get(path.suffix)
    if kind is not None and not path.is_file():
        raise ValueError(f"--source {source} does not exist")
    try:
        if kind is not None:
            return datasets.load_dataset(kind, data_files=str(path), split="train")
        return datasets.load_dataset(source, config, split=split)
    except Exception as error:  # the library's readers raise whatever their parsers do
        raise ValueError(
            f"--source {source} cannot be read as {', '.join(_FILES)} or as a data set of the Hugging Face hub: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from error


def write_math_files(
    table: Iterable[Mapping[str, Any]],
    output_dir: str | Path,
    columns: Columns,
    instruction: str = INSTRUCTION,
    system: str = "",
    eval_size: int = 0,
    seed: int = 1,
) -> tuple[Path, Counts]:
    """Write `train.jsonl`, and `eval.jsonl` where rows are held out, and return their folder.

    A row has `input` (the problem, or chat messages) and `label` (the answer). A problem that was there before and one
    whose answer Math-Verify cannot read are left out: the reward would not know what to compare with.

    Args:
        table: rows with the `columns`.
        instruction: appended to each problem that is a text; messages are taken as they are.
        system: system message before a problem that is a text.
        eval_size: problems to hold out, drawn with `seed`.

    Raises:
        ValueError: a column that is not there, an output folder that is not empty, or too few problems.
    """
    directory = Path(output_dir).expanduser().resolve()
    if directory.exists() and any(directory.iterdir()):  # before the answers are read, which may take minutes
        raise ValueError(f"--output {directory} is not empty; name a new folder or remove it")
    problems: dict[str, dict[str, Any]] = {}
    repeated = without_answer = 0
    for number, row in enumerate(table):
        problem = _field(row, columns.problem, "--problem-key", number)
        answer = str(_field(row, columns.answer, "--answer-key", number))
        if columns.answer_after is not None:
            answer = answer.rpartition(columns.answer_after)[2].strip()
        key = json.dumps(problem, sort_keys=True, ensure_ascii=False)
        if key in problems:
            repeated += 1
        elif not parse_answer(answer):
            without_answer += 1
        else:
            problems[key] = {"input": _prompt(problem, instruction, system), "label": answer}
    rows = list(problems.values())
    if eval_size < 0 or eval_size >= len(rows):
        raise ValueError(
            f"--eval-size {eval_size} leaves nothing to train on: {len(rows)} problems have an answer that can be "
            f"checked ({repeated} more were repeated, {without_answer} had none)"
        )
    held_out = set(random.Random(seed).sample(range(len(rows)), eval_size))
    parts = {"train": [row for index, row in enumerate(rows) if index not in held_out]}
    if eval_size:
        parts["eval"] = [rows[index] for index in sorted(held_out)]
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return directory, Counts(len(parts["train"]), eval_size, repeated, without_answer)


def _field(row: Mapping[str, Any], key: str, flag: str, number: int) -> Any:
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"{flag} {key}: row {number + 1} has no such column; it has {', '.join(row)}")
        value = value[name]
    return value


def _prompt(problem: Any, instruction: str, system: str) -> Any:
    if not isinstance(problem, str):
        return problem
    text = f"{problem.strip()} {instruction}".strip()
    return [{"role": "system", "content": system}, {"role": "user", "content": text}] if system else text
