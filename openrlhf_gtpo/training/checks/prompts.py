"""Prompts and labels, made from data files for OpenRLHF's prompt loader, for checks and for ``cli.evaluate``."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.datasets import PromptDataset, prompts_dataset, utils

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.platform.json_values import to_json
from openrlhf_gtpo.platform.tables import csv_rows, json_rows
from openrlhf_gtpo.training.arguments import Arguments, Data
from openrlhf_gtpo.training.settings.prompts import template_variables

TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_SPLIT_FLAGS = {"--data.prompt_dataset": " (--data.prompt_split)", "--eval.dataset": " (--eval.split)"}
_content_of, _preprocess = prompts_dataset._str_to_content_list, prompts_dataset.preprocess_data  # upstream's


class Rows(list[dict[str, Any]]):
    """The part of a data set's interface that upstream's prompt loader uses."""

    def select(self, indices: Iterable[int]) -> "Rows":
        """Return the rows at ``indices``."""
        return Rows(self[index] for index in indices)


class Prompts(PromptDataset):
    """Upstream's prompt data set, with prompts by :func:`prompt_and_label` and a digest of its rows.

    Attributes:
        variables: the chat template's variables by prompt, for rows that bring their own.
    """

    def __init__(self, dataset: Any, tokenizer: Any, strategy: Any, input_template: str | None = None) -> None:
        self.variables: dict[str, dict[str, Any]] = {}
        own, args = strategy.arguments.data.chat_template_kwargs_key, strategy.arguments

        def made(row: Mapping[str, Any], *_: Any) -> tuple[str, Any]:
            prompt, label = prompt_and_label(row, args, tokenizer)
            if own and row.get(own):
                self.variables[prompt] = variables_of(row, args.data)
            return prompt, label

        prompts_dataset.preprocess_data = made
        try:
            super().__init__(dataset, tokenizer, strategy, input_template)
        except UsageError as error:
            raise UsageError(f"Cannot make the prompt of row {len(self.prompts) + 1}: {error}.") from error
        finally:
            prompts_dataset.preprocess_data = _preprocess
        data = strategy.arguments.data
        keys = (data.input_key, data.label_key, self.image_key, data.tools_key, data.chat_template_kwargs_key)
        self._rows = [_digest([row.get(key) for key in keys]) for row in dataset]

    def check_labels(self) -> None:
        """Raise UsageError for a label that cannot be passed on. Data sets on the Hub are checked only here."""
        for row, label in enumerate(self.labels, start=1):
            try:
                check_label(label, self.strategy.arguments)
            except UsageError as error:
                raise UsageError(f"The label of row {row} {error}") from error

    def digest(self, rows: int) -> str:
        """Return a digest of the first ``rows`` as the data have them; prompts would not do, as they may have a
        date."""
        return hashlib.sha256(b"".join(self._rows[:rows])).hexdigest()


def _digest(values: Sequence[Any]) -> bytes:
    digest = hashlib.sha256()
    for value in values:
        try:
            digest.update(to_json(value))
        except TypeError as error:  # an image, say; its text may have an address
            digest.update(str(error).encode())
    return digest.digest()


def prompt_and_label(row: Mapping[str, Any], args: Arguments, tokenizer: Any) -> tuple[str, Any]:
    """Make a row's prompt, as the model reads it, and its label. Every command makes its prompts here.

    Both are upstream's, but ``<image>`` stays text for a text model. Upstream turns every content with these letters
    into a list of parts, which many templates print as Python does (openrlhf 0.11.2, datasets/prompts_dataset.py,
    preprocess_data). A chat template gets its variables from the settings of ``settings/prompts.py``.

    Args:
        tokenizer: the model's tokenizer; its processor, if it reads images.

    Raises:
        UsageError: as a clause. The prompt is neither text nor messages; or its content is not text, and model or
            template do not read it; or the template does not print the system prompt or the tools.
    """
    data = args.data
    if not data.apply_chat_template:
        return _made(row, args, tokenizer, None)
    row = {**row, data.input_key: _without_null_keys(row[data.input_key])}
    messages, tools = _messages(row, data), _tools(row, data)
    template = partial(tokenizer.apply_chat_template, **variables_of(row, data))
    with_tools = partial(template, tools=tools) if tools else template
    prompt, label = _made({**row, data.input_key: messages}, args, tokenizer, with_tools)
    if messages is not row[data.input_key] and (data.system_prompt or "").strip() not in prompt:
        raise UsageError("the chat template does not print the message of --data.system_prompt; leave it out")
    if tools and _made({**row, data.input_key: messages}, args, tokenizer, template)[0] == prompt:
        raise UsageError(
            f"the chat template does not print tools (--data.tools_key {data.tools_key}); write them into the messages"
        )
    return prompt, label


def check_label(label: Any, args: Arguments) -> None:
    """Raise UsageError, as a clause, for a label that this run cannot pass on: to a reward server as JSON, or into a
    checkpoint with rows and prompts that are trained on later."""
    rewards = [] if args.train.agent_func_path else args.reward.remote_url or []
    server = "--reward.remote_url" if rewards and not rewards[0].endswith(".py") else None
    in_flight = "--train.partial_rollout_enable" if args.train.partial_rollout_enable else None
    ways = ((server, "JSON", json.dumps), (args.rollout.joined_by or in_flight, "a checkpoint", to_json))
    for flag, what, write in ways:
        try:
            if flag is not None:
                write(label)
        except TypeError as error:
            raise UsageError(f"does not fit into {what}, as {flag} needs ({error}); write it as text.") from error


def variables_of(row: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Return the chat template's variables for ``row``; raises UsageError, as a clause."""
    own = row.get(data.chat_template_kwargs_key) if data.chat_template_kwargs_key else None
    try:
        return template_variables(data.chat_template_kwargs) | template_variables(own or None)
    except ValueError as error:
        raise UsageError(
            f"its {data.chat_template_kwargs_key!r} (--data.chat_template_kwargs_key): {error}"
        ) from error


def name_unread(names: Iterable[str], tokenizer: Any) -> None:
    """Print one line that names the variables which no template of ``tokenizer`` reads."""
    from jinja2 import Environment

    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [templates or ""]
    read = {value for text in texts for _, kind, value in Environment().lex(text) if kind == "name"}
    if unread := sorted({*names} - read):
        print(f"The chat template does not read {', '.join(unread)}; setting it has no effect.", file=sys.stderr)


def _tools(row: Mapping[str, Any], data: Data) -> list[dict[str, Any]] | None:
    given = row.get(data.tools_key) if data.tools_key else None
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given or "null")
        except ValueError as error:
            raise UsageError(
                f"its {data.tools_key!r} (--data.tools_key) is not JSON ({error}): {given:.60}"
            ) from error
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return tools or None
    raise UsageError(
        f"its {data.tools_key!r} (--data.tools_key) is {one_line(repr(given)):.60}, not a list of JSON schemas"
    )


def _without_null_keys(given: Any) -> Any:
    """Remove null keys from messages, because templates ask whether a message has ``tool_calls`` or a ``name``; Arrow
    and some programs write nulls. Null content stays; beside tool calls, missing content becomes null."""
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        return given
    messages = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in given]
    return [{"content": None} | message if "tool_calls" in message else message for message in messages]


def _messages(row: Mapping[str, Any], data: Data) -> Any:
    """Return the row's prompt, after the run's system prompt unless it begins with one of its own."""
    given = row[data.input_key]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    has_messages = isinstance(messages, list) and messages and isinstance(messages[0], dict)
    if not data.system_prompt or not has_messages or messages[0].get("role") == "system":
        return given
    return [{"role": "system", "content": data.system_prompt}, *messages]


def _made(row: Mapping[str, Any], args: Arguments, tokenizer: Any, template: Any) -> tuple[str, Any]:
    given = row[args.data.input_key]
    keys = args.data.input_template, args.data.input_key, args.data.label_key, template
    if hasattr(tokenizer, "image_processor"):
        return _preprocess(row, *keys)
    messages = isinstance(given, list) and all(isinstance(message, dict) for message in given)
    if not isinstance(given, str) and not (template and messages):
        kinds = "text or a list of messages" if template else "text"
        raise UsageError(f"it is {one_line(repr(given)):.60}, not {kinds}")
    prompts_dataset._str_to_content_list = str
    try:
        prompt, label = _preprocess(row, *keys)
        if messages and any(not isinstance(message.get("content", ""), str) for message in given):
            texts = [message | {"content": _text_of(message)} for message in given]
            plain, _ = _preprocess({**row, args.data.input_key: texts}, *keys)
            # Beside tool calls null may mean more than no text, but a template must not print it as Python's None.
            empty = [message | {"content": message["content"] or ""} for message in texts]
            without_none, _ = _preprocess({**row, args.data.input_key: empty}, *keys)
            prints_none = prompt.count("None") > without_none.count("None")
            if prints_none or "".join(plain.split()) != "".join(prompt.split()):
                raise UsageError(
                    "the chat template does not print content that is null or a list of parts; write it as text"
                )
    finally:
        prompts_dataset._str_to_content_list = _content_of
    return prompt, label


def _text_of(message: Mapping[str, Any]) -> Any:
    """Return a message's content as one text; beside tool calls, which may stand alone, unchanged."""
    content = message.get("content")
    if "tool_calls" in message:
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if text is not None and not isinstance(text, str | int | float):
            raise UsageError(f"the model reads only text, and the content has {one_line(repr(part)):.60}; remove it")
        texts.append("" if text is None else str(text))
    return "".join(texts)


def blending_datasets(
    datasets: str,
    probabilities: str | None = None,
    strategy: Any = None,
    seed: int = 42,
    max_count: float = 1e8,
    stopping_strategy: str = "all_exhausted",
    dataset_split: str = "train",
) -> Rows:
    """Like upstream's function of this name, but read rows as files have them (:func:`rows_of`), and only the columns
    that prompts need. Data sets may differ in their types.

    Raises:
        UsageError: a data set cannot be read, or a row lacks a column.
    """
    from datasets import Dataset, interleave_datasets

    tables = [
        list(islice(rows_of(strategy.arguments, name.strip(), dataset_split), int(max_count)))
        for name in datasets.split(",")
    ]
    if probabilities is None:
        return Rows(chain.from_iterable(tables))
    drawn = interleave_datasets(
        [Dataset.from_dict({"row": [*range(len(t))], "table": [i] * len(t)}) for i, t in enumerate(tables)],
        probabilities=[float(probability) for probability in probabilities.split(",")],
        seed=seed,
        stopping_strategy=stopping_strategy,
    )
    return Rows(tables[place["table"]][place["row"]] for place in drawn)


def is_local(name: str) -> bool:
    """True if ``name`` is a data set on this host's disk, or looks like one, rather than a name on the Hub."""
    path = Path(name.partition("@")[0].strip())
    return path.exists() or path.suffix in TABLES or path.is_absolute() or name.startswith(".")


def rows_of(args: Arguments, name: str, split: str, flag: str = "data set") -> Iterator[dict[str, Any]]:
    """Yield the rows of one data set with the columns that prompts need: JSON values and CSV cells unchanged, Parquet
    and Arrow values by each file's own types.

    Args:
        args: the arguments with the names of the columns.
        name: a file, a folder or a name on the Hub, perhaps with ``@`` and a folder within.
        split: which split, if the data set has several.
        flag: the flag that named the data set, for messages.

    Raises:
        UsageError: it cannot be read or is empty, or a row lacks the column of prompts or labels.
    """
    folder = name.partition("@")[0].strip()
    keys = {"input_key": args.data.input_key, "label_key": args.data.label_key}
    wanted = [args.data.input_key, args.data.label_key, getattr(args.data, "image_key", "images"), "datasource"]
    wanted += [args.data.chat_template_kwargs_key, args.data.tools_key]
    number = 0
    try:
        for number, row in enumerate(_rows(args, name, split, flag, wanted), 1):
            for key_flag, key in keys.items():
                if key is not None and key not in row:
                    columns = one_line(", ".join(row))
                    raise UsageError(
                        f"{folder}: row {number} has no column {key!r} (--data.{key_flag}); it has {columns}."
                    )
            yield {key: row[key] for key in wanted if key is not None and key in row}
        if not number:
            raise UsageError(f"{folder} has no rows; give a data set with some.")
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from error
    except Exception as error:  # datasets wraps parsers that raise their own types
        if not is_local(name):  # on the Hub, which may be reached the next time
            raise
        kind = TABLES.get(Path(folder).suffix, "a data set")
        raise UsageError(f"{flag} {folder} cannot be read as {kind}: {one_line(error.__cause__ or error)}") from error


def _rows(
    args: Arguments, name: str, split: str, flag: str, wanted: Sequence[str | None]
) -> Iterator[Mapping[str, Any]]:
    import datasets

    # Find its splits: files of tables, or what save_to_disk, ModelScope or a builder of datasets gives.
    folder, _, data_dir = (part.strip() for part in name.partition("@"))
    path, config = Path(folder), None
    splits: Mapping[str, Any]
    if path.suffix in TABLES and not path.is_dir():
        path.stat()  # raises if there is no such file
        kind, splits = TABLES[path.suffix], {"train": [str(path)]}
    elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():  # written by save_to_disk
        kind, loaded = "", datasets.load_from_disk(folder)
        splits = loaded if isinstance(loaded, dict) else {split: loaded}
    elif args.use_ms and not path.exists():
        quiet = SimpleNamespace(args=args, print=lambda *_: None, is_rank_0=lambda: False)
        kind, splits = "", {split: utils.blending_datasets(name, None, quiet, dataset_split=split)}
    else:
        with _quiet():
            builder = datasets.load_dataset_builder(folder, data_dir=data_dir or None)
            config, kind = builder.config, builder.name if _is_plain(builder.config) else ""
            is_table = kind in TABLES.values()
            splits = config.data_files if is_table else datasets.load_dataset(folder, data_dir=data_dir or None)
    if split not in splits:
        raise UsageError(f"{folder} has no split {split!r}{_SPLIT_FLAGS.get(flag, '')}; it has {', '.join(splits)}.")
    # Read files of tables here: datasets would convert the values to the types of the first rows.
    if kind not in TABLES.values():
        yield from _table_rows(splits[split], wanted)
        return
    manager = datasets.DownloadManager()
    for file in manager.iter_files(manager.download_and_extract(list(splits[split]))):
        if kind == "json":
            yield from json_rows(file)
        elif kind == "csv":
            yield from csv_rows(file, getattr(config, "sep", ","))
        else:  # one at a time: datasets would convert all files to the types of the first
            with _quiet():
                table = datasets.load_dataset(kind, data_files=file, split="train")
            yield from _table_rows(table, wanted)


def _is_plain(config: Any) -> bool:
    """True if a data set's README.md changes nothing but the separator in how its files are read."""
    default = vars(type(config)())
    elsewhere = ("name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter")
    return all(value == default[name] for name, value in vars(config).items() if name not in elsewhere)


def _table_rows(table: Any, wanted: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    from datasets.features import features

    features.ujson_loads = json.loads  # pandas' rounds floats
    if {*filter(None, wanted[:2])} <= {*table.column_names}:  # or the row is refused, with its columns
        table = table.select_columns([name for name in wanted if name in table.column_names])
    prompt, made_from = wanted[0], (wanted[0], *wanted[-2:])
    for row in table:
        yield {
            name: _without_nulls(value, outer=name != prompt) if name in made_from else value
            for name, value in row.items()
        }


def _without_nulls(value: Any, outer: bool) -> Any:
    """Remove null keys, which Arrow adds to an object because another row has them. Without ``outer``, keys of the
    outermost objects, which are messages, stay (:func:`_without_null_keys`)."""
    if isinstance(value, dict):
        return {key: _without_nulls(part, True) for key, part in value.items() if part is not None or not outer}
    return [_without_nulls(part, outer) for part in value] if isinstance(value, list) else value


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets

    progress, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if progress:
            datasets.enable_progress_bars()
