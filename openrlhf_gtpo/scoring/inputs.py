"""The inputs of scoring, a model with its settings and the rows of a file, and checks of both."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, WorldSizeError, check_layout
from openrlhf_gtpo.training.checks.model import Model, token_ids
from openrlhf_gtpo.training.checks.settings import refuse
from openrlhf_gtpo.training.settings.megatron_flags import megatron_flag, refusals_name_flags
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides
from openrlhf_gtpo.training.settings.prompts import NONE, kept_prompts

_FORMS = 'write {"tokens": [...]} or {"prompt": "...", "response": "..."}'


@dataclass(frozen=True)
class ScoreModel:
    """The policy that scores, and how it runs.

    Fields:
        folder: a Hugging Face checkpoint.
        backend: deepspeed (Transformers, a whole model in each process) or megatron.
        layout: parallel sizes of the Megatron backend.
        overrides: FIELD=VALUE of the Megatron backend's TransformerConfig.
        fp8: FP8 products in the Megatron backend; None for products in ``dtype``.
        dtype: of weights and activations, bfloat16 or float32. Log-probs and entropies are float32 in either case.
        temperature: the policy's probabilities are softmax(logits / temperature).
        max_tokens: maximum tokens of a micro-batch.
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
        first: index of the first token to score, as are all later ones. At least 1: nothing predicts token 0.
        kept: entries of the input to copy to the output.
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
        max_length: longest sequence in tokens; None if the model has no limit.
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
                        tokenizer = Model(self.model, "--model", self.trust_remote_code).tokenizer
                    # Tokenized separately, so that the response's tokens do not depend on the prompt's end.
                    texts = self._prompt(entry, tokenizer, where), entry["response"]
                    prompt, response = (token_ids(tokenizer, text) for text in texts)
                    if not prompt:
                        raise UsageError(
                            f"{where}: prompt has no tokens, so nothing predicts the response's first; give a prompt."
                        )
                    tokens, first = prompt + response, len(prompt)
                # Would the model accept these tokens?
                for place, token in enumerate(tokens):
                    if not 0 <= token < self.vocab_size:
                        raise UsageError(
                            f"{where}: token {place} is {token}, outside of the model's vocabulary of "
                            f"{self.vocab_size} (0 to {self.vocab_size - 1}); use this model's tokenizer."
                        )
                if self.max_length is not None and len(tokens) > self.max_length:
                    raise UsageError(
                        f"{where} has {len(tokens)} tokens, and the model reads at most {self.max_length} "
                        "(max_position_embeddings); shorten it."
                    )
                yield Row(number, tokens, first, {"id": entry["id"]} if "id" in entry else {})

    def _prompt(self, entry: dict[str, Any], tokenizer: Any, where: str) -> str:
        """The prompt's text. Messages go through the chat template, as in training."""
        from openrlhf_gtpo.training.checks.prompts import prompt_and_label

        if isinstance(entry["prompt"], str):
            return entry["prompt"]
        kept = kept_prompts(Path(self.model))
        settings = {flag.removeprefix("data."): value for flag, value in {**NONE, **kept}.items()}
        settings |= {"apply_chat_template": True, "input_template": None, "input_key": "prompt", "label_key": None}
        args: Any = SimpleNamespace(data=SimpleNamespace(**settings))
        try:
            return prompt_and_label(entry, args, tokenizer)[0]
        except Exception as error:  # templates are programs
            raise UsageError(f"{where}: the prompt cannot be made: {one_line(error)}") from error


def _entry(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line, which must have one of the two forms, with values of the right types."""
    entry = None
    with suppress(ValueError):
        entry = json.loads(line)
    if isinstance(entry, dict):
        tokens, text = entry.get("tokens"), [entry[name] for name in ("prompt", "response") if name in entry]
        are_tokens = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
        are_texts = "tokens" not in entry and len(text) == 2 and isinstance(text[1], str)
        are_texts = are_texts and isinstance(text[0], str | list)
        if are_texts or (are_tokens and not text):
            return entry
    raise UsageError(f"{where} is not a row to score; {_FORMS}.")


def check(model: ScoreModel, source: Path, target: Path, processes: int) -> RowFile:
    """Check everything except the input's lines; return the input, with the model's vocabulary and longest sequence.

    Raises:
        UsageError: the first thing that cannot work.
        OSError: the folder of ``target`` does not exist.
    """
    refuse(
        (model.max_tokens < 1, f"Expected --max-tokens >= 1, got {model.max_tokens}."),
        (not 0 < model.temperature < math.inf, f"Expected a finite --temperature > 0, got {model.temperature:g}."),
        (processes < 1, f"Expected --processes >= 1, got {processes}."),
        (not source.is_file(), f"--input {source} must be a regular file, because it is read twice."),
    )
    target.parent.stat()
    checkpoint = Model(model.folder, "--model", model.trust_remote_code)
    checkpoint.check_code("--trust-remote-code")
    if checkpoint.reads_images:
        raise UsageError(f"{checkpoint} is a vision-language model; give a text model.")
    config = checkpoint.config
    if model.backend == "megatron":
        checkpoint.check_safetensors()
        with refusals_name_flags():
            parse_overrides(model.overrides)
            try:
                check_layout(config, model.layout, processes)
            except WorldSizeError as error:
                raise UsageError(f"--processes {processes}: {error.with_flags(megatron_flag)}") from error
            if model.fp8 is not None:
                check_fp8(model.fp8, config, model.layout, cuda=platform.chosen_platform() == "cuda")
    checkpoint.check_weights()
    max_length = getattr(config, "max_position_embeddings", None)
    return RowFile(source, model.folder, config.vocab_size, max_length, model.trust_remote_code)
