"""A checkpoint that a flag names, with the checks of its files, tokenizer and weights."""

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.platform.files import WEIGHTS, model_folder, shards_of, weight_shapes

# Files that may name a checkpoint's own Python code.
_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
# Transformers 5.15 renames their experts, and vLLM 0.29's loaders know only the names in the checkpoints.
_EXPERTS_RENAMED = ("mixtral", "ernie4_5_moe")


class Model:
    """A checkpoint whose parts are read on first use.

    Args:
        name: a folder, or a name on the Hub, whose configuration and tokenizer are fetched.
        flag: the flag that names it, for messages.
        trust_remote_code: run the checkpoint's own Python code.

    Raises:
        UsageError: from any attribute that reads a file which is missing or broken.
    """

    def __init__(self, name: str | None, flag: str, trust_remote_code: bool = False) -> None:
        self.name = name or ""
        self.flag = flag
        self.trust_remote_code = trust_remote_code

    def __str__(self) -> str:
        return f"{self.flag} {self.name}"

    @cached_property
    def folder(self) -> Path:
        """Its folder on this host."""
        if not self.name:
            raise UsageError(f"{self.flag} is missing; give a Hugging Face checkpoint.")
        with self._named():
            return model_folder(self.name, weights=False)

    @cached_property
    def documents(self) -> dict[str, Any]:
        """The contents of its configuration files, by name."""
        with self._named():
            paths = [self.folder / name for name in _CONFIGURATIONS]
            return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()}

    @cached_property
    def config(self) -> Any:
        """Its configuration, of Transformers' class or, if trusted, of its own class."""
        from transformers import AutoConfig

        with self._named():
            return AutoConfig.from_pretrained(self._source, trust_remote_code=self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from transformers import AutoTokenizer

        with self._named("its tokenizer cannot be read: "):
            return AutoTokenizer.from_pretrained(
                self._source, config=self.config, trust_remote_code=self.trust_remote_code
            )

    @cached_property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its weights by name, from the headers of the safetensors on this host; empty without any.

        Raises:
            UsageError: a file is cut off or missing, or two have the same weight.
        """
        with self._named():
            for index in self.folder.glob("*.safetensors.index.json"):
                for shard in shards_of(index):
                    if self.is_local and not (self.folder / shard).is_file():
                        raise UsageError(f"it lacks {shard}, which its {index.name} lists.")
            return weight_shapes(self.folder)

    @property
    def parameters(self) -> int | None:
        """Number of its parameters; None if its safetensors are not on this host."""
        return sum(map(math.prod, self.weight_shapes.values())) or None if self.is_local else None

    @property
    def is_local(self) -> bool:
        """True for a folder, False for a name on the Hub."""
        return Path(self.name).is_dir()

    @property
    def reads_images(self) -> bool:
        """True for a vision-language model."""
        return hasattr(self.config, "vision_config")

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts; some configurations call the experts local."""
        return bool(getattr(self.config, "num_experts", 0) or getattr(self.config, "num_local_experts", 0))

    @property
    def _source(self) -> str:
        """What Transformers loads. If trusted, the name, because the checkpoint's own code is not fetched; otherwise
        the folder, because Transformers 5.15 spends half a minute on a name if the Hub cannot be reached."""
        return self.name if self.trust_remote_code else str(self.folder)

    @contextmanager
    def _named(self, what: str = "") -> Iterator[None]:
        """Turn any error into a UsageError with flag and checkpoint: its own classes may raise anything."""
        try:
            yield
        except Exception as error:
            said = one_line(error)
            rest = said.removeprefix(self.flag).strip().removeprefix(self.name or "\0")
            raise UsageError(f"{self}{rest}" if len(rest) < len(said) else f"{self}: {what}{said}") from error

    def check_code(self, trust_flag: str) -> None:
        """Refuse a checkpoint with Python code of its own, unless it is trusted. Runs none of that code.

        Args:
            trust_flag: the flag that allows it.

        Raises:
            UsageError: one of its configuration files has an ``auto_map``, at any depth.
        """
        for file, document in self.documents.items() if not self.trust_remote_code else ():
            if _has_auto_map(document):
                raise UsageError(
                    f"{self} brings its own Python code (auto_map in its {file}), which every worker would run; "
                    f"read that code and give {trust_flag}, or choose a checkpoint without code."
                )

    def check_transferable(self) -> None:
        """Refuse a policy whose trained weights vLLM cannot load, because vLLM would only fail after the first step.

        Raises:
            UsageError: it is quantized, or its experts have other names in vLLM than in training.
        """
        fields = self.documents.get("config.json", {})
        if fields.get("model_type") in _EXPERTS_RENAMED:
            raise UsageError(
                f"{self}: vLLM can load the experts of '{fields['model_type']}' only from files, not from training; "
                "use another model."
            )
        if fields.get("quantization_config") is not None:
            raise UsageError(
                f"{self} is quantized (quantization_config in its config.json). vLLM packs such weights when it loads "
                "them and cannot replace them with trained ones; give the checkpoint that it was made from."
            )

    def check_vocabulary(self) -> None:
        """Refuse a tokenizer with tokens that have no embedding, because training would only fail at such a token.

        Raises:
            UsageError: the tokenizer belongs to another model.
        """
        # Without added tokens: Gemma 3 has a few that its text models never see.
        embedded = getattr(self.config.get_text_config(), "vocab_size", math.inf)
        if self.tokenizer.vocab_size > embedded:
            raise UsageError(
                f"{self} has embeddings for {embedded} tokens (vocab_size in its config.json), but its tokenizer has "
                f"{self.tokenizer.vocab_size}; give the model its own tokenizer."
            )

    def check_length(self, max_len: int) -> None:
        """Refuse a ``--data.max_len`` beyond the model's positions. vLLM refuses it too, but a guide's only after the
        policy has loaded, and an experiment's model only once it is trained. A model with a scaled rotary embedding is
        left to vLLM, which knows the scale (0.29, config/model.py, _get_and_verify_max_len).

        Raises:
            UsageError: it has fewer positions.
        """
        text = self.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        ropes = [rope, *(parameters for parameters in rope.values() if isinstance(parameters, dict))]
        longest = getattr(text, "max_position_embeddings", None) or math.inf
        if max_len > longest and all(parameters.get("rope_type", "default") == "default" for parameters in ropes):
            raise UsageError(f"--data.max_len {max_len} exceeds the {longest} positions of {self}.")

    def check_files(self) -> None:
        """Refuse a checkpoint whose configuration, or whose weights' headers, cannot be read.

        Raises:
            UsageError: with the name of the broken file, if there is one.
        """
        _ = self.config, self.weight_shapes
        if self.is_local and not any(path.suffix in (".safetensors", ".bin") for path in self.folder.iterdir()):
            raise UsageError(f"{self} has no weights (*.safetensors or *.bin); give a complete checkpoint.")

    def check_safetensors(self) -> None:
        """Refuse a local checkpoint without safetensors, which the Megatron actor needs and vLLM does not.

        Raises:
            UsageError: there are none.
        """
        if self.is_local and not any(self.folder.glob(WEIGHTS)):
            raise UsageError(f"{self} has no {WEIGHTS} files, the only format that --actor.backend megatron reads.")

    def check_weights(self) -> None:
        """Refuse a local language model with missing, misshaped or wrongly tied weights.

        Transformers would initialize missing weights at random. If a head differs from the embedding that its
        configuration ties it to, Transformers would keep both, but vLLM and Megatron would tie them. The model is
        loaded without its tensors' values, in a fraction of a second. If that fails, as for a model with its own code,
        nothing is checked.

        Raises:
            UsageError: with the name of such a weight.
        """
        self.check_files()
        if not self.is_local:
            return
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        # Load it without values, quietly.
        verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            loaded, found = AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=copy.deepcopy(self.config),
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,  # None, the default, would ask on the terminal
            )
        except Exception:
            return
        finally:
            logging.set_verbosity(verbosity)
            if progress:
                logging.enable_progress_bar()
        # What is missing, has another shape, or is tied to something else.
        if found["missing_keys"]:
            raise UsageError(
                f"{self} lacks {len(found['missing_keys'])} of the weights that its config.json asks for, such as "
                f"{min(found['missing_keys'])}."
            )
        if found["mismatched_keys"]:
            weight, there, wanted = min(found["mismatched_keys"])
            raise UsageError(
                f"{self}: {weight} has shape {tuple(there)}, but its config.json asks for {tuple(wanted)}; give "
                "weights and config.json of the same model."
            )
        for head, embedding in loaded.all_tied_weights_keys.items():
            if {head, embedding} <= self.weight_shapes.keys() and not _same(self.folder, head, embedding):
                raise UsageError(
                    f"{self}: {head} and {embedding} differ, but config.json ties them (tie_word_embeddings); set it "
                    "to false."
                )


@lru_cache
def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of special tokens by id, including tokens without a role, such as a tool call's."""
    named = zip(tokenizer.all_special_ids, getattr(tokenizer, "all_special_tokens", ()), strict=False)
    added = getattr(tokenizer, "added_tokens_decoder", {})  # of a fast or slow tokenizer, as against a processor
    return dict(named) | {token: entry.content for token, entry in added.items() if entry.special}


@lru_cache
def special_texts(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern that finds the text of special tokens, which a tokenizer turns into those tokens. It leaves out
    single letters, which are ordinary tokens too."""
    texts = sorted((text for text in special_tokens(tokenizer).values() if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokenize ``text`` as training does, which adds no token, such as the BOS that a chat template brings anyway
    (openrlhf 0.11.2, utils/agent.py, SingleTurnAgentExecutor.execute)."""
    return tokenizer(text=text, add_special_tokens=False)["input_ids"]


def _has_auto_map(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value.get("auto_map")) or any(map(_has_auto_map, value.values()))
    return isinstance(value, list) and any(map(_has_auto_map, value))


def _same(folder: Path, *pair: str) -> bool:
    """True if these two weights in the folder's safetensors are equal."""
    from safetensors import safe_open

    weights: dict[str, Any] = {}
    for file in folder.glob(WEIGHTS):
        with safe_open(file, framework="pt") as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in pair}
    first, second = weights.values()
    return bool(first.equal(second))
