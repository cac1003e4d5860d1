"""The input of ``cli.score``: JSON lines to token rows, each refused by file and line where it cannot be scored."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.checks import load_tokenizer

_FORMS = 'write {"tokens": [...]} or {"prompt": "...", "response": "..."}'


@dataclass(frozen=True)
class Row:
    """One sequence.

    Fields:
        line: its line in the file, from 1.
        tokens: ids.
        first: index of the first token to score; all behind it are scored too. At least 1: nothing predicts token 0.
        kept: entries of the input that the output repeats.
    """

    line: int
    tokens: list[int]
    first: int
    kept: dict[str, Any]

    @property
    def scored(self) -> int:
        """Number of tokens to score."""
        return max(0, len(self.tokens) - self.first)


@dataclass(frozen=True)
class RowFile:
    """The rows of ``path``, read a line at a time.

    Fields:
        path: JSON lines.
        model: folder of the tokenizer, which is loaded where a line holds text.
        vocab_size: token ids are below it.
        max_length: longest sequence in tokens; None where the model names no limit.
        trust_remote_code: run the Python code that the tokenizer brings.
    """

    path: Path
    model: str
    vocab_size: int
    max_length: int | None
    trust_remote_code: bool = False

    def rows(self) -> Iterator[Row]:
        """Raises UsageError at the first line that cannot be scored, with its number."""
        tokenizer = None
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{self.path}:{number}"
                entry = _entry(line, where)
                if "tokens" not in entry and tokenizer is None:
                    tokenizer = load_tokenizer(self.model, "--model", self.trust_remote_code)
                tokens, first = (
                    _from_tokens(entry, where) if "tokens" in entry else _from_text(entry, tokenizer, where)
                )
                self._check(tokens, where)
                yield Row(number, tokens, first, {"id": entry["id"]} if "id" in entry else {})

    def _check(self, tokens: list[int], where: str) -> None:
        for place, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise UsageError(
                    f"{where}: token {place} is {token}, outside of the model's vocabulary of {self.vocab_size} "
                    f"(0 to {self.vocab_size - 1}); were these tokens made for this model?"
                )
        if self.max_length is not None and len(tokens) > self.max_length:
            raise UsageError(
                f"{where} has {len(tokens)} tokens, and the model reads at most {self.max_length} "
                "(max_position_embeddings); shorten it."
            )


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}); {_FORMS}.") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not a JSON object; {_FORMS}.")
    text = {"prompt", "response"} & entry.keys()
    if "tokens" in entry and text:
        raise UsageError(f"{where} has tokens and {' and '.join(sorted(text))}; give one of the two forms.")
    if "tokens" not in entry and len(text) < 2:
        missing = "response" if "prompt" in text else "prompt"
        what = f"{text.pop()} and no {missing}" if text else "neither tokens nor a prompt with its response"
        raise UsageError(f"{where} has {what}; {_FORMS}.")
    return entry


def _from_tokens(entry: dict[str, Any], where: str) -> tuple[list[int], int]:
    tokens = entry["tokens"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UsageError(f"{where}: tokens must be a list of whole numbers.")
    if not tokens:
        raise UsageError(f"{where}: tokens is empty; give at least one.")
    return tokens, 1


def _from_text(entry: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], int]:
    """Prompt and response are tokenised apart, so that the response's tokens do not depend on where the prompt ends."""
    parts = []
    for name in ("prompt", "response"):
        if not isinstance(entry[name], str):
            raise UsageError(f"{where}: {name} must be text; apply a chat template before.")
        parts.append(tokenizer(entry[name], add_special_tokens=False)["input_ids"])
    prompt, response = parts
    if not prompt:
        raise UsageError(f"{where}: prompt has no token, so nothing predicts the response's first; give a prompt.")
    return prompt + response, len(prompt)
