"""The checkpoints that a command line names: whether they can be loaded, and what of them must not be run."""

import json
import math
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.platform.files import WEIGHTS, model_folder, shards_of, weight_shapes

# Files in which a checkpoint may name its own Python code.
_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def refuse_own_code(name: str | None, flag: str, trust_flag: str) -> None:
    """Refuse a checkpoint (a folder or a hub name) that brings its own Python code. None of it is run here, and a
    checkpoint that cannot be read is left to whoever loads it.

    Args:
        flag: the flag that names the checkpoint.
        trust_flag: the flag that allows its code.

    Raises:
        UsageError: one of its configuration files has an ``auto_map``.
    """
    from transformers.utils.hub import cached_files

    auto_maps: list[Any] = []

    def note(entry: dict[str, Any]) -> dict[str, Any]:
        auto_maps.append(entry.get("auto_map"))
        return entry

    try:
        files = cached_files(
            name or "",
            list(_CONFIGURATIONS),
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return
    for file in files or []:
        try:
            json.loads(Path(file).read_text(encoding="utf-8"), object_hook=note)
        except (OSError, ValueError):
            continue
        if any(auto_maps):
            raise UsageError(
                f"{flag} {name} brings Python code of its own (auto_map in its {Path(file).name}), which every worker "
                f"would run; read that code and give {trust_flag}, or choose a checkpoint without."
            )


def refuse_untransferable(name: str | None, flag: str) -> None:
    """Refuse a checkpoint (a folder or a hub name) as the policy if vLLM cannot take its weights from training. One
    that cannot be read is left to whoever loads it.

    Raises:
        UsageError: by its config.json it is quantized, or has experts under other names than in training.
    """
    from transformers import PretrainedConfig

    try:
        # By its folder: asked for a name, Transformers 5.15 tries a Hub that cannot be reached for half a minute.
        config = PretrainedConfig.get_config_dict(model_folder(name, weights=False))[0] if name else {}
    except Exception:  # whatever is wrong with it
        return
    # Transformers 5.15 renames their experts, and vLLM 0.29's loaders know only the names in the checkpoints.
    if config.get("model_type") in ("mixtral", "ernie4_5_moe"):
        raise UsageError(
            f"{flag} {name}: vLLM cannot take the experts of '{config['model_type']}' from training, only from files; "
            "use another model."
        )
    if config.get("quantization_config") is not None:
        raise UsageError(
            f"{flag} {name} is quantized (quantization_config in its config.json): vLLM packs such weights when it "
            "loads them, and cannot take trained ones in their place; give the checkpoint that it was made from."
        )


def check_model(name: str | None, flag: str, trust_remote_code: bool = False) -> Any:
    """The configuration of the checkpoint that ``flag`` names.

    Args:
        trust_remote_code: run the code that it brings.

    Raises:
        UsageError: it is missing or cannot be read, or its weights are cut off.
    """
    from transformers import AutoConfig

    if not name:
        raise UsageError(f"{flag} is missing; give a Hugging Face checkpoint.")
    path = Path(name)
    if not path.exists() and (path.is_absolute() or name.startswith(".")):
        raise UsageError(f"{flag} {name} does not exist.")
    if path.is_dir() and not (path / "config.json").exists():
        raise UsageError(f"{flag} {name} is a folder without config.json, so not a Hugging Face checkpoint.")
    weights = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
    if path.is_dir() and not any(found for pattern in weights for found in path.glob(pattern)):
        raise UsageError(f"{flag} {name} has a config.json but no weights (*.safetensors or *.bin).")
    try:
        model_folder(name, weights=False)
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from error
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a configuration's own class may raise anything
        raise UsageError(
            f"{flag} {name} is not a Hugging Face checkpoint that can be read: {one_line(error)}"
        ) from error
    _check_weights(path, flag)
    return config


def _check_weights(path: Path, flag: str) -> None:
    """Refuse local safetensors that are cut off or missing; only their headers are read."""
    try:
        for index in path.glob("*.safetensors.index.json"):
            for shard in shards_of(index):
                if not (path / shard).is_file():
                    raise UsageError(f"{path} lacks {shard}, which its {index.name} lists.")
        weight_shapes(path)
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from error


def check_weights_fit(model: str, flag: str) -> None:
    """Refuse a local language model that lacks weights, which Transformers would make up, or has some of wrong sizes,
    or a head that its configuration ties to the embedding, but which is another: Transformers would not tie them, vLLM
    and Megatron would.

    It is loaded without its tensors' values, in a fraction of a second. A model for which that fails, such as one with
    its own code, is left to whoever loads it.

    Raises:
        UsageError: names one of those weights.
    """
    path = Path(model)
    if not path.is_dir():
        return
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(
            path,
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
    if found["missing_keys"]:
        raise UsageError(
            f"{flag} {path} lacks {len(found['missing_keys'])} of the weights that its config.json asks for, such as "
            f"{min(found['missing_keys'])}."
        )
    if found["mismatched_keys"]:
        weight, there, wanted = min(found["mismatched_keys"])
        raise UsageError(
            f"{flag} {path}: {weight} is {tuple(there)}, and its config.json asks for {tuple(wanted)}; are weights "
            "and config.json of the same model?"
        )
    stored = weight_shapes(path).keys()
    for head, embedding in loaded.all_tied_weights_keys.items():
        if {head, embedding} <= stored and not _same(path, head, embedding):
            raise UsageError(
                f"{flag} {path}: {head} and {embedding} differ, and config.json says that they are one "
                "(tie_word_embeddings); set it to false."
            )


def _same(folder: Path, *pair: str) -> bool:
    """True if the weights with these two names, which are in the folder's safetensors, are equal."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in folder.glob(WEIGHTS):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in pair}
    first, second = found.values()
    return bool(first.equal(second))


def load_tokenizer(name: str, flag: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the checkpoint that ``flag`` names.

    Args:
        trust_remote_code: run the code that it brings.

    Raises:
        UsageError: it has none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a tokenizer's own class may raise anything
        raise UsageError(f"{flag} {name} has no tokenizer that can be read: {one_line(error)}") from error


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of ``text`` as training reads it: none is added, such as the BOS that a chat template has anyway
    (openrlhf 0.11.2, utils/agent.py, SingleTurnAgentExecutor.execute)."""
    return tokenizer(text=text, add_special_tokens=False)["input_ids"]


def check_length(config: Any, max_len: int, model: str) -> None:
    """Refuse a ``--data.max_len`` beyond the positions of a ``model``, which vLLM would only refuse after its start.
    A model whose rotary embedding is scaled is left to vLLM, which knows by how much (0.29,
    config/model.py, _get_and_verify_max_len)."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))]
    longest = getattr(text, "max_position_embeddings", None) or math.inf
    if max_len > longest and all(one.get("rope_type", "default") == "default" for one in ropes):
        raise UsageError(
            f"--data.max_len {max_len} exceeds the {longest} positions of {model} (max_position_embeddings)."
        )
