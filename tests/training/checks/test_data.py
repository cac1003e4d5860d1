"""A run's data sets work, or are refused in one sentence before any engine starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from openrlhf_gtpo.training.run import check, parse
from tests.support.command_lines import ROWS, argv_of, table

pytestmark = pytest.mark.usefixtures("no_engine")

LINE = '{"question": "a", "answer": "b"}'


@pytest.fixture(params=["--data.prompt_dataset", "--eval.dataset"])
def data_flag(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_data_set_that_is_not_there(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    for name in (tmp_path / "no.jsonl", tmp_path / "no_folder", "./no_folder"):
        assert refused({data_flag: name}).startswith(f"{data_flag} {name} cannot be read as ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", "has no rows"),
        ("blank.jsonl", "\n\n", ""),
        ("header.csv", "question,answer\n", "has no rows"),
        ("null.jsonl", "null\n", "row 1 is null; drop it"),
        ("later.jsonl", '{"question": "a", "answer": "b"}\nnull\n', "row 2 is null; drop it"),
        ("list.json", '[\n null, {"question": "a", "answer": "b"}]', "row 1 is null; drop it"),
        (
            "broken.jsonl",
            '{"question": "a", "answer": \n',
            ": line 1 is not JSON (Expecting value); give one row per line.",
        ),
        (
            "python.jsonl",
            f"{LINE}\n\n{{'question': 'x'}}\n{LINE}",
            ": line 3 is not JSON (Expecting property name enclosed in double quotes);",
        ),
        ("brace.jsonl", f"{LINE[:-1]}\n{LINE}\n", ": line 2 is not JSON (Expecting ',' delimiter)"),
        ("commas.jsonl", f"{LINE},\n{LINE},\n", ": line 1 is not JSON (Expecting value)"),
        ("lists.jsonl", f"{LINE}\n" + '["a", "b"]\n' * 2, ": row 2 is not a JSON object;"),
        ("only_lists.jsonl", '["a", "b"]\n["c", "d"]\n', ": row 1 is not a JSON object;"),
        ("texts.jsonl", '"a"\n"b"\n', ": row 1 is not a JSON object;"),
        ("utf16.jsonl", "\xff\xfe{\0}\0\n\0", ": line 1 is not in UTF-8; convert it, for example with iconv."),
        ("byte.jsonl", f"{LINE}\n{{'question': 'caf\xe9'}}\n", ": line 2 is not in UTF-8;"),
        ("comma.json", f"[\n  {LINE},\n  {LINE}\n  {LINE}\n]", ": line 4 is not JSON (Expecting ',' delimiter);"),
        ("numbers.json", f"[\n{LINE},\n2]", ": row 2 is not a JSON object"),
        ("text.parquet", "this is no parquet file", "cannot be read as parquet"),
        ("text.arrow", "this is no arrow file", "cannot be read as arrow"),
        ("script.py", "import os\n", "cannot be read as a data set: Dataset scripts are no longer supported"),
        ("rows.txt", LINE, "cannot be read as a data set"),
        ("rows", LINE, "cannot be read as a data set"),
        ("latin.jsonl", '{"question": "caf\xe9", "answer": "a"}\n', ": line 1 is not in UTF-8;"),
        ("latin.csv", "question,answer\ncaf\xe9,a\n", "cannot be read as csv after line 0: 'utf-8'"),
        ("comma.csv", "question,answer\na, b,a\n", ": line 2 has more cells than the header; quote its commas."),
    ],
)
def test_a_data_set_that_cannot_be_read(
    refused: Callable[..., str], data_flag: str, tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    found = refused({data_flag: path})
    assert found.startswith(f"{data_flag} {path}") and message in found


def test_a_folder_of_data(
    refused: Callable[..., str], command: dict[str, Any], data_flag: str, tmp_path: Path
) -> None:
    """An empty folder is refused; the contents of a folder of files, or of one saved by datasets, are checked."""
    empty, files, saved = (tmp_path / name for name in ("empty", "files", "saved"))
    empty.mkdir()
    files.mkdir()
    assert refused({data_flag: empty}).startswith(f"{data_flag} {empty} cannot be read as a data set: ")
    rows = table(files / "train.jsonl", ROWS)
    check(parse(argv_of(command | {data_flag: files})))
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    check(parse(argv_of(command | {data_flag: saved})))
    splits = tmp_path / "splits"
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(splits)
    split = data_flag.replace("_dataset", "_split").replace(".dataset", ".split")
    assert refused({data_flag: splits, split: "test"}).endswith(f"no split 'test' ({split}); it has train.")
    table(rows, [{"text": "a"}])
    assert "has no column 'question'" in refused({data_flag: files})
    rows.write_text("null\n")
    assert refused({data_flag: files}) == f"{data_flag} {rows}: row 1 is null; drop it."


def test_a_data_set_without_the_columns(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    path = table(tmp_path / "other.jsonl", [{"text": "a", "answer": "b"}])
    assert refused({data_flag: path}).endswith("has no column 'question' (--data.input_key); it has text, answer.")
    path = table(tmp_path / "more.jsonl", [{"question": "a"}])
    assert refused({data_flag: path}).endswith("has no column 'answer' (--data.label_key); it has question.")
    path = table(tmp_path / "odd.jsonl", [{"a\nb": "a"}])
    assert refused({data_flag: path}).endswith("it has a b.")


def test_a_list_of_rows(command: dict[str, Any], data_flag: str, tmp_path: Path) -> None:
    for name, indent in (("line.json", None), ("lines.json", 2), ("list.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps(ROWS, indent=indent))
        check(parse(argv_of(command | {data_flag: tmp_path / name})))


@pytest.mark.parametrize("content", [7, ["a"]])
def test_a_prompt_that_is_no_text(
    refused: Callable[..., str], model: Path, data_flag: str, tmp_path: Path, content: Any
) -> None:
    path = table(tmp_path / "odd.jsonl", [{"question": content, "answer": "b"}])
    wrong = f"{data_flag} {path}: the prompt of row 1 cannot be made: it is {content}, not text"
    assert refused({data_flag: path}) == refused({data_flag: path, "--data.input_template": "Q: {}"}) == wrong
    chat = {"--data.apply_chat_template": True, "--actor.model_name_or_path": chat_model(model, tmp_path / "chat")}
    assert refused(chat | {data_flag: path}) == f"{wrong} or a list of messages"
    mixed = table(tmp_path / "mixed.jsonl", [*ROWS, {"question": content, "answer": "b"}])
    assert ": the prompt of row 5 cannot be made: it is " in refused(chat | {data_flag: mixed})


def test_prompts_may_be_texts_and_messages(command: dict[str, Any], model: Path, tmp_path: Path) -> None:
    chat = {"--data.apply_chat_template": True, "--actor.model_name_or_path": chat_model(model, tmp_path / "chat")}
    named = {"role": "user", "content": "a", "name": "b"}
    prompts: list[Any] = ["a", [{"role": "user", "content": "a"}], [named, {"role": "user", "content": "a"}]]
    path = table(tmp_path / "chats.jsonl", [{"question": prompt, "answer": "b"} for prompt in prompts])
    check(parse(argv_of(command | chat | {"--data.prompt_dataset": path})))


def chat_model(model: Path, path: Path) -> Path:
    shutil.copytree(model, path)
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "", "answer": "b"}, "the prompt of row 5 is empty; drop that row."),
        ({"question": None, "answer": "b"}, "the prompt of row 5 cannot be made: it is None, not text"),
        (
            {"question": "a", "answer": None},
            "row 5 has no label ('answer' of --data.label_key is null); drop that row.",
        ),
    ],
)
def test_a_row_with_a_gap(
    refused: Callable[..., str], data_flag: str, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = table(tmp_path / "gap.jsonl", [*ROWS, row])
    assert refused({data_flag: path}).startswith(f"{data_flag} {path}: {message}")


def test_a_prompt_that_does_not_fit(refused: Callable[..., str], data_flag: str, tmp_path: Path) -> None:
    path = table(tmp_path / "long.jsonl", [*ROWS, {"question": "x" * 49, "answer": ""}])
    said = f"{data_flag} {path}: the prompt of row 5 has 49 tokens, but"
    assert refused({data_flag: path}).startswith(
        f"{said} --data.max_len 64 with --rollout.max_new_tokens 16 leaves room for 48; "
    )
    unlimited = {data_flag: path, "--rollout.max_new_tokens": None, "--data.max_len": 49}
    assert refused(unlimited) == f"{said} --data.max_len 49 leaves room for 48; raise --data.max_len or drop that row."


def test_a_prompt_that_just_fits(command: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path / "fits.jsonl", [{"question": "x" * 48, "answer": ""}])
    check(parse(argv_of(command | {"--data.prompt_dataset": path})))


def test_every_one_of_several_data_sets_is_looked_at(refused: Callable[..., str], tmp_path: Path) -> None:
    good = table(tmp_path / "good.jsonl", ROWS)
    message = refused({"--data.prompt_dataset": f"{good},{tmp_path}/no.jsonl"})
    assert message.startswith(f"--data.prompt_dataset {tmp_path}/no.jsonl cannot be read as json")
