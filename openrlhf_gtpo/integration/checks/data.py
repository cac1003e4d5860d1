"""The data sets that a command line names, and every row of those that are local."""

import json
import math
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line

_TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def check_dataset(args: SimpleNamespace, tokenizer: Any, names: str | None, split: str, flag: str) -> None:
    """Refuse local data sets that are missing, unreadable, empty, lack a column, a prompt or a label, hold a prompt
    that does not fit, or cannot be concatenated. Without a tokenizer no row is looked at."""
    import datasets

    if not names:
        raise UsageError(f"{flag} is missing; give a data set.")
    local = []
    for name, table in _tables(names, split, flag):
        if table is None:
            continue
        for column_flag, column in (("input_key", args.data.input_key), ("label_key", args.data.label_key)):
            if column is not None and column not in table.column_names:
                columns = one_line(", ".join(table.column_names))
                raise UsageError(f"{flag} {name} has no column {column!r} (--data.{column_flag}); it has {columns}.")
        try:
            if tokenizer is not None:
                _check_rows(args, tokenizer, table, f"{flag} {name}")
        except UnicodeDecodeError as error:  # datasets decodes text as it is read
            raise UsageError(
                f"{flag} {name} is not in UTF-8 ({error}); convert it, for example with iconv."
            ) from error
        local.append(table)
    try:
        if local:
            datasets.concatenate_datasets(local)
    except ValueError as error:
        raise UsageError(
            f"{flag} {names}: a column has different types in them ({one_line(error)}); convert or drop it."
        ) from error


def check_prompt_probs(args: SimpleNamespace) -> None:
    if args.data.prompt_probs is None:
        return
    count = len(args.data.prompt_dataset.split(","))
    try:
        probs = [float(word) for word in args.data.prompt_probs.split(",")]
    except ValueError:
        probs = []
    if len(probs) != count or min(probs) < 0 or not math.isclose(sum(probs), 1, abs_tol=1e-8):
        raise UsageError(
            f"Expected --data.prompt_probs to be {count} probabilities that add up to 1, one for each data set of "
            f"--data.prompt_dataset, got {args.data.prompt_probs}."
        )


def table_rows(names: str, split: str, flag: str) -> int | None:
    """Total rows of the local data sets that ``flag`` names; None if one of them is on the hub.

    Raises:
        UsageError: a data set that is missing or cannot be read.
    """
    tables = [table for _, table in _tables(names, split, flag)]
    return None if None in tables else sum(map(len, tables))


def _tables(names: str, split: str, flag: str) -> Iterator[tuple[str, Any]]:
    """Each data set that ``flag`` names, and its rows, or None for a hub name, which upstream loads."""
    for name in (part.strip() for part in names.split(",")):
        path = Path(name.split("@")[0])
        if not path.exists() and (path.suffix in _TABLES or path.is_absolute() or name.startswith(".")):
            raise UsageError(f"{flag} {name} does not exist.")
        yield name, _load_table(name, split, flag) if path.exists() else None


def _load_table(name: str, split: str, flag: str) -> Any:
    """The rows of one split of a local file or folder, loaded as upstream's ``blending_datasets`` does; refuses one
    that cannot be read or is empty."""
    import datasets

    folder, _, data_dir = name.partition("@")
    path = Path(folder)
    if path.is_file() and path.suffix not in _TABLES:  # upstream would ask the Hub for it
        raise UsageError(f"{flag} {path} is not one of {', '.join(_TABLES)}; convert or rename it.")
    if path.is_file() and path.stat().st_size == 0:
        raise UsageError(f"{flag} {path} is empty.")
    files = [path] if path.is_file() else sorted((path / data_dir).rglob("*"))
    of_json = [file for file in files if _TABLES.get(file.suffix) == "json" and file.is_file()]
    for file in of_json:
        _refuse_null_rows(file, flag)
    progress, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises
    try:
        if path.suffix in _TABLES:
            loaded = datasets.load_dataset(_TABLES[path.suffix], data_files=str(path))
        elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():  # written by save_to_disk
            loaded = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(folder, data_dir=data_dir or None)
    except Exception as error:  # datasets wraps parsers that raise their own types
        if "corresponds to no data" in str(error):
            raise UsageError(f"{flag} {path} has no rows.") from error
        for file in of_json:
            _refuse_bad_line(file, flag)
        kind = path.suffix[1:] if path.suffix in _TABLES else "a data set"
        raise UsageError(f"{flag} {path} cannot be read as {kind}: {one_line(error.__cause__ or error)}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if progress:
            datasets.enable_progress_bars()
    if isinstance(loaded, dict):  # of splits
        if split not in loaded:
            split_flag = flag.replace("_dataset", "_split").replace(".dataset", ".split")
            raise UsageError(f"{flag} {path} has no split {split!r} ({split_flag}); it has {', '.join(loaded)}.")
        loaded = loaded[split]
    if len(loaded) == 0:
        raise UsageError(f"{flag} {path} has no rows.")
    return loaded


def _refuse_null_rows(file: Path, flag: str) -> None:
    """Refuse a null row, which kills the process that reads it: https://github.com/apache/arrow/issues/47409"""
    with file.open("rb") as rows:
        first, number = rows.read(4096), None
        if re.match(rb"(\xef\xbb\xbf)?[\s\[]*null", first):
            number = 1
        elif not first.lstrip().startswith(b"["):  # one row per line
            rows.seek(0)
            number = next((n for n, row in enumerate(rows, 1) if row.lstrip().startswith(b"null")), None)
    if number is not None:
        raise UsageError(f"{flag} {file}: row {number} is null; drop it.")


def _refuse_bad_line(file: Path, flag: str) -> None:
    """Refuse the first line to blame of a JSON file that ``datasets`` could not read; its own words count rows from
    0, or name none."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
        json.loads(text)
        return
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{flag} {file}: line {number} is not in UTF-8; convert the file, for example with iconv."
        ) from error
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("[") and error.msg != "Extra data":  # a list of rows
            raise UsageError(f"{flag} {file}: line {error.lineno} is not JSON ({error.msg}).") from error
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if not line.strip() or isinstance(json.loads(line), dict):
                continue
            reason = ""
        except json.JSONDecodeError as error:
            reason = f" ({error.msg})"
        raise UsageError(f"{flag} {file}: line {number} is not a JSON object{reason}; give one row per line.")


def _check_rows(args: SimpleNamespace, tokenizer: Any, table: Any, where: str) -> None:
    """Refuse prompts that are empty, or neither text nor messages, labels that are null or of different types, and the
    first prompt that leaves no room to respond."""
    import datasets
    from openrlhf.datasets.prompts_dataset import preprocess_data

    template = tokenizer.apply_chat_template if args.data.apply_chat_template else None
    longest = args.rollout.max_new_tokens
    room = args.data.max_len - (longest or 1)
    keys = args.data.input_key, args.data.label_key
    if args.data.apply_chat_template and tokenizer.chat_template is None:
        raise UsageError(
            f"--data.apply_chat_template: {args.actor.model_name_or_path} has no chat template; leave the flag out, "
            "or give a model that has one."
        )
    # datasets 5 keeps a column of several types as JSON text, from which "3" comes back as 3.
    mixed = isinstance(table.features.get(keys[1]), getattr(datasets, "Json", ()))
    for row, data in enumerate(islice(table, args.data.max_samples), start=1):
        given = data[keys[0]]
        if given is None:
            raise UsageError(
                f"{where}: row {row} has no prompt ({keys[0]!r} of --data.input_key is null); drop that row."
            )
        messages = isinstance(given, list) and all(isinstance(message, dict) for message in given)
        if template and not messages and not isinstance(given, str):
            raise UsageError(
                f"{where}: the prompt of row {row} is {one_line(repr(given)):.60}, not text or a list of messages."
            )
        try:
            prompt, label = preprocess_data(data, args.data.input_template, *keys, template)
        except Exception as error:  # templates are programs
            raise UsageError(f"{where}: the prompt of row {row} cannot be made: {one_line(error)}") from error
        if not isinstance(prompt, str):
            raise UsageError(f"{where}: the prompt of row {row} is {one_line(repr(given)):.60}, not text.")
        if not prompt or given == "":
            raise UsageError(f"{where}: the prompt of row {row} is empty; drop that row.")
        if label is None:
            raise UsageError(
                f"{where}: row {row} has no label ({keys[1]!r} of --data.label_key is null); drop that row."
            )
        if mixed and not isinstance(label, list | dict):
            raise UsageError(
                f"{where}: labels ({keys[1]!r} of --data.label_key) have different types, which would turn text such "
                'as "3" into numbers; write all of them as text.'
            )
        if len(prompt.encode()) <= room:  # a token is at least one byte
            continue
        length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if length > room:
            with_responses = f" with --rollout.max_new_tokens {longest}" if longest else ""
            raise UsageError(
                f"{where}: the prompt of row {row} has {length} tokens, but --data.max_len {args.data.max_len}"
                f"{with_responses} leaves {room}; raise --data.max_len or drop it."
            )
