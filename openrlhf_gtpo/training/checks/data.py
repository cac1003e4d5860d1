"""The data sets that a command line names, and every row of those that are local."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.checks.models import token_ids


def check_dataset(
    args: SimpleNamespace,
    tokenizer: Any,
    names: str | None,
    split: str,
    flag: str,
    strict: bool = True,
    json_for: str | None = None,
) -> None:
    """Refuse local data sets that are missing, unreadable or empty, or lack a column, and a prompt that cannot be
    made.

    Args:
        tokenizer: the model's; None looks at the first row alone, as for a model that reads images.
        strict: refuse null labels, and prompts that leave no room to respond, too; upstream's estimators take both.
        json_for: the flag because of which labels must fit into JSON, if any.
    """
    if not names:
        raise UsageError(f"{flag} is missing; give a data set.")
    for name, rows in _tables(args, names, split, flag):
        if rows is not None and tokenizer is None:
            next(rows)
        elif rows is not None:
            _check_rows(args, tokenizer, rows, f"{flag} {name}", strict, json_for)


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


def table_rows(args: SimpleNamespace, names: str, split: str, flag: str) -> int | None:
    """Total rows of the local data sets that ``flag`` names; None if one of them is on the hub.

    Raises:
        UsageError: a data set that is missing or cannot be read.
    """
    tables = [rows for _, rows in _tables(args, names, split, flag)]
    return None if None in tables else sum(1 for rows in tables for _ in rows or ())


def _tables(
    args: SimpleNamespace, names: str, split: str, flag: str
) -> Iterator[tuple[str, Iterator[dict[str, Any]] | None]]:
    """Each data set that ``flag`` names, and its rows, or None for a hub name, which the run loads."""
    from openrlhf_gtpo.training.checks.prompts import TABLES, rows_of

    for name in (part.strip() for part in names.split(",")):
        path = Path(name.split("@")[0])
        if not path.exists() and (path.suffix in TABLES or path.is_absolute() or name.startswith(".")):
            raise UsageError(f"{flag} {name} does not exist.")
        yield name, rows_of(args, name, split, flag) if path.exists() else None


def _check_rows(
    args: SimpleNamespace,
    tokenizer: Any,
    rows: Iterator[dict[str, Any]],
    where: str,
    strict: bool,
    json_for: str | None,
) -> None:
    from openrlhf_gtpo.training.checks.prompts import prompt_and_label

    longest = args.rollout.max_new_tokens
    room = args.data.max_len - (longest or 1)
    keys = args.data.input_key, args.data.label_key
    if args.data.apply_chat_template and tokenizer.chat_template is None:
        raise UsageError(
            f"--data.apply_chat_template: {args.actor.model_name_or_path} has no chat template; leave the flag out, "
            "or give a model that has one."
        )
    for row, data in enumerate(islice(rows, args.data.max_samples), start=1):
        if data[keys[0]] is None:
            raise UsageError(
                f"{where}: row {row} has no prompt ({keys[0]!r} of --data.input_key is null); drop that row."
            )
        try:
            prompt, label = prompt_and_label(data, args, tokenizer)
            size = len(prompt.encode())  # raises for half of a surrogate pair, which no tokenizer takes
        except Exception as error:  # templates are programs
            raise UsageError(f"{where}: the prompt of row {row} cannot be made: {one_line(error)}") from error
        if not prompt or data[keys[0]] == "":
            raise UsageError(f"{where}: the prompt of row {row} is empty; drop that row.")
        if json_for:
            try:
                json.dumps(label)
            except TypeError as error:
                raise UsageError(
                    f"{where}: the label of row {row} does not fit into JSON, as {json_for} needs ({error}); write it "
                    "as text."
                ) from error
        if label is None and strict:
            raise UsageError(
                f"{where}: row {row} has no label ({keys[1]!r} of --data.label_key is null); drop that row."
            )
        if size <= room or not strict:  # a token is at least one byte
            continue
        length = len(token_ids(tokenizer, prompt))
        if length > room:
            with_responses = f" with --rollout.max_new_tokens {longest}" if longest else ""
            raise UsageError(
                f"{where}: the prompt of row {row} has {length} tokens, but --data.max_len {args.data.max_len}"
                f"{with_responses} leaves {room}; raise --data.max_len or drop it."
            )
