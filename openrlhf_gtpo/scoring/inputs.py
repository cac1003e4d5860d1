"""The inputs of scoring: the model with its settings, and the rows of a file; and checks for what cannot work."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, WorldSizeError, check_layout
from openrlhf_gtpo.training.checks.models import (
    check_model,
    check_weights_fit,
    load_tokenizer,
    refuse_own_code,
    token_ids,
)
from openrlhf_gtpo.training.settings.megatron_flags import megatron_flag, refusals_name_flags
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides

_FORMS = 'write {"tokens": [...]} or {"prompt": "...", "response": "..."}'


@dataclass(frozen=True)
class ScoreModel:
    """The policy that gives the numbers, and how it runs.

    Fields:
        folder: a Hugging Face checkpoint.
        backend: deepspeed (Transformers, a whole model in each process) or megatron.
        layout: parallel sizes of the Megatron backend.
        overrides: FIELD=VALUE of the Megatron backend's TransformerConfig.
        fp8: FP8 products in the Megatron backend; None for none.
        dtype: of weights and activations, bfloat16 or float32; log-probs and entropies are float32 in either case.
        temperature: of the policy, whose probabilities are softmax(logits / temperature).
        max_tokens: of a micro-batch.
        trust_remote_code: run the Python code that comes with the checkpoint.
    """

    folder: str
    backend: str = "deepspeed"
    layout: Layout = Layout()
    overrides: tuple[str, ...] = ()
    fp8: Fp8Options | None = None
    dtype: str = "bfloat16"
    temperature: float = 1.0
    max_tokens: int = 8192
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Row:
    """One sequence.

    Fields:
        line: its line in the file, from 1.
        tokens: ids.
        first: index of the first token to score; all after it are scored too. At least 1: nothing predicts token 0.
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
        model: folder of the tokenizer, which is loaded if a line holds text.
        vocab_size: token ids are below it.
        max_length: longest sequence in tokens; None where the model names no limit.
        trust_remote_code: run the Python code that comes with the tokenizer.
    """

    path: Path
    model: str
    vocab_size: int
    max_length: int | None
    trust_remote_code: bool = False

    def rows(self) -> Iterator[Row]:
        """Yield the rows; raises UsageError at the first line that cannot be scored, with its number."""
        tokenizer = None
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{self.path}:{number}"
                entry = _entry(line, where)
                if "tokens" in entry:
                    tokens, first = entry["tokens"], 1
                else:
                    if tokenizer is None:
                        tokenizer = load_tokenizer(self.model, "--model", self.trust_remote_code)
                    # Separately, so that the response's tokens do not depend on where the prompt ends.
                    prompt, response = (token_ids(tokenizer, entry[name]) for name in ("prompt", "response"))
                    if not prompt:
                        raise UsageError(
                            f"{where}: prompt has no token, so nothing predicts the response's first; give a prompt."
                        )
                    tokens, first = prompt + response, len(prompt)
                for place, token in enumerate(tokens):
                    if not 0 <= token < self.vocab_size:
                        raise UsageError(
                            f"{where}: token {place} is {token}, outside of the model's vocabulary of "
                            f"{self.vocab_size} (0 to {self.vocab_size - 1}); were these tokens made for this model?"
                        )
                if self.max_length is not None and len(tokens) > self.max_length:
                    raise UsageError(
                        f"{where} has {len(tokens)} tokens, and the model reads at most {self.max_length} "
                        "(max_position_embeddings); shorten it."
                    )
                yield Row(number, tokens, first, {"id": entry["id"]} if "id" in entry else {})


def _entry(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line, which must have one of the two forms, with values of the right types."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error}); {_FORMS}.") from error
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is not a JSON object; {_FORMS}.")
    text = sorted({"prompt", "response"} & entry.keys())
    if "tokens" in entry:
        tokens = entry["tokens"]
        if text:
            raise UsageError(f"{where} has tokens and {' and '.join(text)}; give one of the two forms.")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UsageError(f"{where}: tokens must be a list of whole numbers.")
        if not tokens:
            raise UsageError(f"{where}: tokens is empty; give at least one.")
    elif len(text) < 2:
        missing = "response" if "prompt" in text else "prompt"
        what = f"a {text[0]} but no {missing}" if text else "neither tokens nor a prompt with its response"
        raise UsageError(f"{where} has {what}; {_FORMS}.")
    for name in text:
        if not isinstance(entry[name], str):
            raise UsageError(f"{where}: {name} must be text; apply a chat template before.")
    return entry


def check(model: ScoreModel, source: Path, target: Path, processes: int) -> RowFile:
    """Check everything but the input's lines; return the input, with the model's vocabulary and longest sequence.

    Raises:
        UsageError: the first thing that cannot work.
    """
    if model.max_tokens < 1:
        raise UsageError(f"Expected --max-tokens >= 1, got {model.max_tokens}.")
    if not (model.temperature > 0 and math.isfinite(model.temperature)):
        raise UsageError(f"--temperature {model.temperature:g} gives no probabilities; give a value above 0.")
    if processes < 1:
        raise UsageError(f"Expected --processes >= 1, got {processes}.")
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "is not a file, which is read twice" if source.exists() else ""
        raise UsageError(f"--input {source} {what or 'does not exist'}; give a file.")
    if not target.parent.is_dir():
        raise UsageError(f"--output {target}: the folder {target.parent} does not exist; create it first.")
    if not Path(model.folder).is_dir():
        raise UsageError(f"--model {model.folder} is not a folder; download the checkpoint and give the path to it.")
    if not model.trust_remote_code:
        refuse_own_code(model.folder, "--model", "--trust-remote-code")
    config = check_model(model.folder, "--model", model.trust_remote_code)
    if hasattr(config, "vision_config"):
        raise UsageError(f"--model {model.folder} is a vision-language model; give a text model.")
    if model.backend == "megatron":
        if not any(Path(model.folder).glob("*.safetensors")):
            raise UsageError(
                f"--model {model.folder} has no *.safetensors files, the one format --actor.backend megatron reads."
            )
        with refusals_name_flags():
            parse_overrides(model.overrides)
            try:
                check_layout(config, model.layout, processes)
            except WorldSizeError as error:
                raise UsageError(f"--processes {processes}: {error.with_flags(megatron_flag)}") from error
            if model.fp8 is not None:
                check_fp8(model.fp8, config, model.layout, cuda=platform.chosen_platform() == "cuda")
    check_weights_fit(model.folder, "--model")
    max_length = getattr(config, "max_position_embeddings", None)
    return RowFile(source, model.folder, config.vocab_size, max_length, model.trust_remote_code)
