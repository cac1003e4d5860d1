"""Prompts and labels reach the model and the reward as their files say them."""

import asyncio
import csv
import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.scoring.answers import questions_of
from openrlhf_gtpo.training.checks.data import check_data
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.prompts import Prompts, Rows, blending_datasets
from openrlhf_gtpo.training.rollout.rewards import Patience, StrictRewardExecutor
from openrlhf_gtpo.training.run import check, parse
from openrlhf_gtpo.training.settings.frozen import changed
from tests.support.command_lines import argv_of, table

pytestmark = pytest.mark.usefixtures("no_engine")

LABELS: list[list[Any]] = [
    ["2024-01-01", "2024-01-02"],
    [3, 3.5],
    [10**20, 1],
    [True, 1, 1.0],
    ["3", 3, ["3", 3, None, {"is": 3.0}]],
    [{"a": 1}, {"b": {"c": 2}}, {}],
    [-0.0, 0, 1e23, 0.12345678901234568, 2**53 + 1],
    ["", " 7 ", "007", "NA", "null"],
    [math.inf, -math.inf, math.nan],
    [[{"at": "2024-01-01T00:00:00Z"}], [{"at": "2024-01-01T00:00:00Z", "by": None}]],
]


def loaded(command: dict[str, Any], **flags: Any) -> Prompts:
    """The prompts of a command line that passes the checks, as the controller loads them."""
    args = parse(argv_of(command | {f"--data.{name}": value for name, value in flags.items()}))
    check(args)
    strategy = SimpleNamespace(args=args, arguments=args, print=print, is_rank_0=lambda: False)
    data = args.data
    rows = blending_datasets(
        data.prompt_dataset, data.prompt_probs, strategy, max_count=data.max_samples, dataset_split=data.prompt_split
    )
    rows = rows.select(range(min(data.max_samples, len(rows))))
    tokenizer = Model(args.actor.model_name_or_path, "--actor.model_name_or_path").tokenizer
    return Prompts(rows, tokenizer, strategy, input_template=data.input_template)


@pytest.mark.parametrize("labels", LABELS, ids=str)
@pytest.mark.parametrize("form", ["lines", "list", "indented", "folder"])
def test_labels_of_json_reach_the_reward(
    command: dict[str, Any], tmp_path: Path, labels: list[Any], form: str
) -> None:
    rows = [{"question": f"q{i}", "answer": label} for i, label in enumerate(labels)]
    path = tmp_path / "folder" / "labels.json"
    path.parent.mkdir()
    if form == "indented":
        path.write_text("".join(json.dumps(row, indent=1) + "\n" for row in rows))
    elif form == "list":
        path.write_text(json.dumps(rows))
    else:
        table(path, rows)
    prompts = loaded(command, prompt_dataset=path.parent if form == "folder" else path)
    assert repr(prompts.labels) == repr(labels)  # 3 is not 3.0, and NaN is NaN
    assert prompts.prompts == [row["question"] for row in rows]
    assert repr([rewarded(tmp_path, label) for label in labels]) == repr(labels)


def rewarded(tmp_path: Path, label: Any) -> Any:
    """The label that a reward function was given."""
    path = tmp_path / "noting.py"
    path.write_text(
        "given = []\ndef reward_func(queries, prompts, labels):\n    given.extend(labels)\n    return {'rewards': 1.0}"
    )
    executor = StrictRewardExecutor([str(path)], Patience())
    asyncio.run(executor._fetch_rewards_via_func(["q"], ["p"], [label]))
    return executor.reward_func.__globals__["given"][0]


def test_a_label_of_another_type_after_megabytes_stays_what_it_is(command: dict[str, Any], tmp_path: Path) -> None:
    """datasets reads 10 MB at a time."""
    labels: list[Any] = [*["1" * 10_000] * 1100, 3, "2024-01-01"]
    path = table(tmp_path / "long.jsonl", [{"question": "a", "answer": label} for label in labels])
    assert loaded(command, prompt_dataset=path).labels == labels


def test_cells_of_csv_are_text(command: dict[str, Any], tmp_path: Path) -> None:
    cells = ["007", "1e3", "3", "3.0", "true", "NA", "2024-01-01", "10000000000000000000000", " a ", 'x "y", z\nw']
    path = tmp_path / "cells.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], *(["2024-01-01", cell] for cell in cells)])
    prompts = loaded(command, prompt_dataset=path)
    assert prompts.labels == cells and set(prompts.prompts) == {"2024-01-01"}
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.tsv").write_text("question\tanswer\na, b\t007\n")
    prompts = loaded(command, prompt_dataset=folder)
    assert (prompts.prompts, prompts.labels) == (["a, b"], ["007"])


def test_an_empty_cell_is_no_label(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("question,answer\na,1\nb,\n")
    assert "row 2 has no label" in refused({"--data.prompt_dataset": path})


def test_labels_of_parquet_have_the_types_of_their_own_file(command: dict[str, Any], tmp_path: Path) -> None:
    when = datetime(2024, 1, 1)
    for name, labels in (("a", [3, 4]), ("b", [3.5]), ("c", [when]), ("d", [{"a": None}])):
        pq.write_table(pa.table({"question": ["q"] * len(labels), "answer": labels}), tmp_path / f"{name}.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.parquet").write_bytes((tmp_path / f"{name}.parquet").read_bytes())
    assert repr(loaded(command, prompt_dataset=folder).labels) == "[3, 4, 3.5]"
    both = f"{tmp_path}/c.parquet,{tmp_path}/d.parquet"
    assert loaded(command, prompt_dataset=both).labels == [when, {"a": None}]


def test_labels_of_a_saved_data_set(command: dict[str, Any], tmp_path: Path) -> None:
    """JSON in it is read as JSON in a file is."""
    labels = [0.12345678901234568, {"a": 1e23}]
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.Json()})
    rows = [{"question": "q", "answer": json.dumps(label)} for label in labels]
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "saved.parquet")
    for name in ("saved", "saved.parquet"):
        assert repr(loaded(command, prompt_dataset=tmp_path / name).labels) == repr(labels)


def test_labels_that_json_lacks_are_refused_where_json_carries_them(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openrlhf_gtpo.training.run.check_reward", lambda args: None)
    path = tmp_path / "when.parquet"
    pq.write_table(pa.table({"question": ["q"], "answer": [datetime(2024, 1, 1)]}), path)
    server = {"--data.prompt_dataset": path, "--reward.remote_url": "http://127.0.0.1:9"}
    assert "the label of row 1 does not fit into JSON, as --reward.remote_url needs" in refused(server)


class Text(str):
    """A label that no checkpoint can hold."""


@pytest.mark.parametrize("flag", ["--train.partial_rollout_enable", "--algo.guide.rescue_batch"])
def test_labels_that_a_checkpoint_lacks_are_refused_where_it_keeps_them(
    flag: str, command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that JSON lacks are kept. The rows of a data set on the Hub are looked at once the run has loaded them."""
    path = table(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a"}] * 2)
    args = parse(argv_of(command | {"--data.prompt_dataset": path}))
    in_flight = flag == "--train.partial_rollout_enable"
    kept = {"train.partial_rollout_enable": in_flight, "rollout.joined_by": None if in_flight else flag}
    plain, args = args, changed(args, kept)
    policy = Model(args.actor.model_name_or_path, "--actor.model_name_or_path")
    labels: list[Any] = [{1: {"a", b"\xff"}}, datetime(2024, 1, 1)]

    def rows(*given: Any) -> Rows:
        return Rows({"question": "q", "answer": label} for label in labels)

    monkeypatch.setattr("openrlhf_gtpo.training.checks.prompts.rows_of", lambda *given: iter(rows()))
    strategy = SimpleNamespace(args=args, arguments=args, print=print, is_rank_0=lambda: False)
    said = f"abel of row 2 does not fit into a checkpoint, as {flag} needs .Object of type .*Text is not serializable"
    for fits in (True, False):
        for check_labels in (
            lambda: check_data(args, policy),
            Prompts(rows(), policy.tokenizer, strategy).check_labels,
        ):
            with nullcontext() if fits else pytest.raises(UsageError, match=said):
                check_labels()
        labels[1] = Text("a")
    check_data(plain, policy)


def test_data_are_known_by_their_rows(command: dict[str, Any], tmp_path: Path) -> None:
    """And not by their prompts, which a template may write the date into."""
    rows = [{"question": f"{i}", "answer": label, "more": i} for i, label in enumerate([1, "1", 0.0, [1.0]])]

    def digest(count: int, given: list[dict[str, Any]], **flags: Any) -> str:
        return loaded(command, prompt_dataset=table(tmp_path / "rows.jsonl", given), **flags).digest(count)

    known = digest(3, rows)
    assert known == digest(3, [{**row, "more": 0} for row in rows], input_template="Today {}")
    assert known == digest(3, rows[:3]) != digest(4, rows)
    for place, key, value in ((0, "answer", "1"), (1, "question", "01"), (2, "answer", 0)):
        other = [dict(row) for row in rows]
        other[place][key] = value
        assert digest(3, other) != known
    assert digest(3, [rows[1], rows[0], *rows[2:]]) != known


def test_blending(command: dict[str, Any], tmp_path: Path) -> None:
    """Files of different types can be concatenated, and drawn from as upstream does."""
    kinds: dict[str, list[Any]] = {"words": ["a", "b", "c"], "numbers": [1, 2.5, 3]}
    paths = [
        table(tmp_path / f"{name}.jsonl", [{"question": str(label), "answer": label} for label in labels])
        for name, labels in kinds.items()
    ]
    both = ",".join(map(str, paths))
    assert repr(loaded(command, prompt_dataset=both).labels) == "['a', 'b', 'c', 1, 2.5, 3]"
    assert repr(loaded(command, prompt_dataset=both, max_samples=2).labels) == "['a', 'b']"
    drawn = datasets.interleave_datasets(
        [datasets.Dataset.from_list([{"l": str(label)} for label in labels]) for labels in kinds.values()],
        probabilities=[0.3, 0.7],
        seed=42,
        stopping_strategy="all_exhausted",
    )
    assert loaded(command, prompt_dataset=both, prompt_probs="0.3,0.7").prompts == drawn["l"][:]


def test_evaluation_gives_the_same_labels(command: dict[str, Any], tmp_path: Path) -> None:
    path = table(tmp_path / "labels.jsonl", [{"question": "a", "answer": 3}, {"question": "b", "answer": 3.5}])
    args = parse(argv_of(command))
    tokenizer = Model(args.actor.model_name_or_path, "--model").tokenizer
    assert repr(questions_of(args, tokenizer, str(path), "train")) == "[('a', 3), ('b', 3.5)]"


def chat(command: dict[str, Any], model: Path, tmp_path: Path, content: str) -> dict[str, Any]:
    path = tmp_path / "chat"
    shutil.copytree(model, path)
    (path / "chat_template.jinja").write_text("{% for m in messages %}" + content + "|{% endfor %}")
    return command | {"--data.apply_chat_template": True, "--actor.model_name_or_path": path}


@pytest.mark.parametrize("estimator", ["gtpo", "reinforce"])
@pytest.mark.parametrize("content", ["{{ m.content | trim }}", "{{ m.content }}", "{{ m['content'] + '' }}"])
def test_text_stays_text(command: dict[str, Any], model: Path, tmp_path: Path, content: str, estimator: str) -> None:
    text = "a <image> b"
    given: list[Any] = [text, [{"role": "user", "content": text}], "2024-01-01"]
    path = table(tmp_path / "images.jsonl", [{"question": one, "answer": "b"} for one in given])
    command |= {"--algo.advantage.estimator": estimator}
    prompts = loaded(chat(command, model, tmp_path, content), prompt_dataset=path)
    assert prompts.prompts == [f"{text}|", f"{text}|", "2024-01-01|"]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_a_message_has_no_key_that_is_null(command: dict[str, Any], model: Path, tmp_path: Path, form: str) -> None:
    """Arrow adds each key of any row to all rows, and templates ask which a message has."""
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "a", "name": "c"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "tool_calls": [{"type": "d"}], "name": None}],
    ]
    rows, path = [{"question": messages, "answer": "b"} for messages in chats], tmp_path / f"rows.{form}"
    if form == "jsonl":
        table(path, rows)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    content = (
        "{{ m.content or '' }}{{ ' by ' + m.name | string if 'name' in m }}"
        "{% if m.tool_calls is defined %}{{ m.content is none }} {{ m.tool_calls | tojson }}{% endif %}"
    )
    prompts = loaded(chat(command, model, tmp_path, content), prompt_dataset=path, max_len=256).prompts
    assert prompts == [f"a by c|True [{json.dumps(CALL)}]|", 'b|True [{"type": "d"}]|']


@pytest.mark.parametrize("given", [{"content": None}, {}])
def test_content_beside_tool_calls_is_not_printed_as_none(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "None?"}, {"role": "assistant", "tool_calls": [CALL]} | given]
    path = table(tmp_path / "calls.jsonl", [{"question": messages, "answer": "b"}])
    flags = chat(command, model, tmp_path, "{{ m.content }}") | {"--data.prompt_dataset": path}
    assert "does not print content that is null" in refused(flags)


PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}\n{% endfor %}{% endif %}"
)


def test_parts_that_a_template_prints(command: dict[str, Any], model: Path, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    path = table(tmp_path / "parts.jsonl", [{"question": [{"role": "user", "content": parts}], "answer": "b"}])
    assert loaded(chat(command, model, tmp_path, PARTS), prompt_dataset=path).prompts == ["a\nb\n|"]


@pytest.mark.parametrize("estimator", ["gtpo", "reinforce"])
@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ m.content | trim }}", [{"type": "text", "text": "a"}]),
        ("{{ m.content | tojson }}", [{"type": "text", "text": "a"}]),
        ("{{ m.content if m.content is string }}", [{"type": "text", "text": "a"}]),
        ("{{ m.content }}", None),
        ("{{ m.content }}", {"text": "a"}),
        ("{{ m.content }}", ["a", "b"]),
        (PARTS, [{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}]),
    ],
)
def test_parts_that_a_template_does_not_print(
    command: dict[str, Any],
    refused: Callable[..., str],
    model: Path,
    tmp_path: Path,
    template: str,
    content: Any,
    estimator: str,
) -> None:
    given = [[{"role": "user", "content": "a"}], [{"role": "user", "content": content}]]
    path = table(tmp_path / "parts.jsonl", [{"question": one, "answer": "b"} for one in given])
    flags = chat(command, model, tmp_path, template) | {"--algo.advantage.estimator": estimator}
    message = refused(flags | {"--data.prompt_dataset": path})
    assert "the prompt of row 2 cannot be made: " in message and (
        "write it as text" in message or "remove it" in message
    )
