"""Checks of the data sets that a command line names, and of every row of local ones."""

import json
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.look import show_prompt
from openrlhf_gtpo.training.checks.model import Model, special_texts, token_ids

PROMPTS = "--data.prompt_dataset"
_COLUMNS = ("data.tools_key", "data.chat_template_kwargs_key")  # flags that name optional columns


def check_data(args: Arguments, model: Model) -> None:
    """Refuse rows of the run's local data sets that would teach it something else, or end it later. For a model that
    reads images, check only the first row, and only for what ends the run."""
    from openrlhf_gtpo.training.checks.prompts import check_label

    strict, tokenizer = args.algo.advantage.estimator in ESTIMATORS, None if model.reads_images else model.tokenizer
    fits = partial(check_label, args=args)
    assert args.data.prompt_dataset is not None  # see check_settings
    check_dataset(args, tokenizer, args.data.prompt_dataset, args.data.prompt_split, PROMPTS, strict, fits)
    if args.eval.dataset:
        check_dataset(args, tokenizer, args.eval.dataset, args.eval.split, "--eval.dataset", strict, fits, needs=())
    _, rows = next(_tables(args, args.data.prompt_dataset, args.data.prompt_split, PROMPTS))
    if rows is not None and tokenizer is not None:
        print(show_prompt(next(rows), args, tokenizer), file=sys.stderr)


def first_prompt(args: Arguments, tokenizer: Any, flag: str) -> tuple[str, Any] | None:
    """Return the first prompt of the data sets that ``flag`` names, and its label; None if they are on the Hub."""
    from openrlhf_gtpo.training.checks.prompts import prompt_and_label

    of = ("data.prompt_dataset", "data.prompt_split") if flag == PROMPTS else ("eval.dataset", "eval.split")
    names, split = attrgetter(*of)(args)
    assert names is not None  # see check_settings
    _, rows = next(_tables(args, names, split, flag))
    return None if rows is None else prompt_and_label(next(rows), args, tokenizer)


def check_dataset(
    args: Arguments,
    tokenizer: Any,
    names: str,
    split: str,
    flag: str,
    strict: bool = True,
    fits: Callable[[Any], None] | None = None,
    needs: Collection[str] = _COLUMNS,
) -> None:
    """Refuse local data sets that are unreadable or empty, that lack a column, or whose prompts cannot be made. Print
    which ones have no column of tools or variables.

    Args:
        tokenizer: the model's tokenizer; None checks only the first row, as for a model that reads images.
        strict: also refuse null labels and prompts that leave no room to respond; upstream's estimators take both.
        fits: raises UsageError, whose text is a clause, for a label that cannot be passed on.
        needs: flags of optional columns. If such a flag is given, at least one data set must have its column.
    """
    lacks: dict[str, set[str]] = {}  # flags of missing columns by data set; a data set on the Hub may have all
    for name, rows in _tables(args, names, split, flag):
        lacks[name] = set()
        if rows is not None and tokenizer is None:
            next(rows)
        elif rows is not None:
            lacks[name] = _check_rows(args, tokenizer, rows, f"{flag} {name}", strict, fits)
    for column in _COLUMNS:
        key, without = attrgetter(column)(args), [name for name in lacks if column in lacks[name]]
        if without and column in needs and len(without) == len(lacks):
            raise UsageError(
                f"{flag} {names}: no row has a column {key!r} (--{column}); correct its name, or leave the flag out."
            )
        for name in without:
            print(f"{flag} {name}: no row has a column {key!r} (--{column}).", file=sys.stderr)


def table_rows(args: Arguments, names: str, split: str, flag: str) -> int | None:
    """Count the rows of the local data sets that ``flag`` names; None if one of them is on the Hub.

    Raises:
        UsageError: a data set that is missing or cannot be read.
    """
    tables = [rows for _, rows in _tables(args, names, split, flag)]
    return None if None in tables else sum(1 for rows in tables for _ in rows or ())


def _tables(
    args: Arguments, names: str, split: str, flag: str
) -> Iterator[tuple[str, Iterator[dict[str, Any]] | None]]:
    """Yield each data set that ``flag`` names with its rows; None instead of rows for a name on the Hub."""
    from openrlhf_gtpo.training.checks.prompts import is_local, rows_of

    for name in (part.strip() for part in names.split(",")):
        yield name, rows_of(args, name, split, flag) if is_local(name) else None


def _check_rows(
    args: Arguments,
    tokenizer: Any,
    rows: Iterator[dict[str, Any]],
    where: str,
    strict: bool,
    fits: Callable[[Any], None] | None,
) -> set[str]:
    """Check every row as :func:`check_dataset` says; returns the flags of columns that no row has."""
    from openrlhf_gtpo.training.checks.prompts import name_unread, prompt_and_label, variables_of

    unseen = {flag: attrgetter(flag)(args) for flag in _COLUMNS if args.data.apply_chat_template}
    unseen = {flag: key for flag, key in unseen.items() if key}
    variables: set[str] = set()
    marked: dict[int, str] = {}  # rows with a special token in the letters of their messages
    longest = args.rollout.max_new_tokens
    room = args.data.max_len - (longest or 1)
    keys = args.data.input_key, args.data.label_key
    for row, data in enumerate(islice(rows, args.data.max_samples), start=1):
        # The prompt as training makes it.
        try:
            prompt, label = prompt_and_label(data, args, tokenizer)
            variables |= variables_of(data, args.data).keys()
            size = len(prompt.encode())
        except Exception as error:  # templates are programs
            raise UsageError(f"{where}: the prompt of row {row} cannot be made: {one_line(error)}") from error
        # Note optional columns, and messages that contain the text of a special token.
        unseen = {flag: key for flag, key in unseen.items() if key not in data}
        if args.data.apply_chat_template:
            given = data[keys[0]]
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
            if found := special_texts(tokenizer).search(text):
                marked[row] = found[0]
        if not prompt or data[keys[0]] == "":
            raise UsageError(f"{where}: the prompt of row {row} is empty; drop that row.")
        # The label.
        try:
            if fits is not None:
                fits(label)
        except UsageError as error:
            raise UsageError(f"{where}: the label of row {row} {error}") from error
        if label is None and strict:
            raise UsageError(
                f"{where}: row {row} has no label ({keys[1]!r} of --data.label_key is null); drop that row."
            )
        # The length. Only a prompt with more bytes than there is room for tokens has to be tokenized.
        if size <= room or not strict:
            continue
        length = len(token_ids(tokenizer, prompt))
        if length > room:
            with_responses = f" with --rollout.max_new_tokens {longest}" if longest else ""
            raise UsageError(
                f"{where}: the prompt of row {row} has {length} tokens, but --data.max_len {args.data.max_len}"
                f"{with_responses} leaves room for {room}; raise --data.max_len or drop that row."
            )
    if args.data.apply_chat_template:
        name_unread(variables, tokenizer)
    for row, token in islice(marked.items(), 1):
        print(
            f"Note: {where}: the messages of {len(marked)} rows contain the text of a special token, such as {token} "
            f"in row {row}. The model reads it as that token, which may end a message; change it unless you mean it.",
            file=sys.stderr,
        )
    return {*unseen}
