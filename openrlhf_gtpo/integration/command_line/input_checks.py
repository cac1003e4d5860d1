"""Checks a run's inputs before any engine starts: models, rewards and data sets."""

import importlib.util
import inspect
import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.platform.files import model_folder, shards_of, weight_shapes

# Files in which a checkpoint may name its own Python code.
_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

_TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


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
        except (OSError, ValueError, RecursionError):
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
        folder = model_folder(name, weights=False)
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from error
    # Transformers makes a list with an item per layer, however little memory there is.
    if found := re.search(r'"\w*layers?"\s*:\s*\d{5,}', (folder / "config.json").read_text(errors="replace")):
        raise UsageError(
            f"{flag} {name} is not a Hugging Face checkpoint that can be read: its config.json has {found[0]:.99}."
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a configuration's own class may raise anything
        raise UsageError(
            f"{flag} {name} is not a Hugging Face checkpoint that can be read: {one_line(error)}"
        ) from error
    _check_weights(path, flag)
    return config


def check_weights_fit(model: str, flag: str) -> None:
    """Refuse a local language model that lacks weights, which Transformers would make up, or has some of wrong sizes.

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
        _, found = AutoModelForCausalLM.from_pretrained(
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


def _check_weights(path: Path, flag: str) -> None:
    """Refuse local safetensors that are cut off or missing; only their headers are read."""
    try:
        for index in path.glob("*.safetensors.index.json"):
            for shard in shards_of(index):
                if not os.path.isfile(path / shard):  # not Path.is_file, which raises for a name that is too long
                    raise UsageError(f"{path} lacks {one_line(shard):.255}, which its {index.name} lists.")
        weight_shapes(path)
    except UsageError as error:
        raise UsageError(f"{flag} {error}") from error


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


def check_reward(args: SimpleNamespace) -> None:
    """Refuse an agent, reward function, server or model that is missing or cannot be used."""
    if args.train.agent_func_path:
        import_file(args.train.agent_func_path, "--train.agent_func_path", "AgentExecutor")
    elif args.reward.remote_url:
        if len(args.reward.remote_url) > 1 and any(url.endswith(".py") for url in args.reward.remote_url):
            raise UsageError(
                f"--reward.remote_url {','.join(args.reward.remote_url)}: servers take turns, but OpenRLHF calls only "
                "one Python file; give one."
            )
        for url in args.reward.remote_url:
            if url.endswith(".py"):
                reward_func = import_file(url, "--reward.remote_url", "reward_func")
                try:
                    inspect.signature(reward_func).bind([], [], [])
                except TypeError as error:
                    raise UsageError(
                        f"--reward.remote_url {url}: reward_func is called with three lists, (queries, prompts, "
                        f"labels), which it does not take: {error}."
                    ) from error
                except ValueError:  # a compiled function may have no signature to read
                    pass
                if inspect.iscoroutinefunction(reward_func):
                    raise UsageError(
                        f"--reward.remote_url {url}: OpenRLHF does not await reward_func; write it without async."
                    )
                continue
            if Path(url).exists():
                raise UsageError(
                    f"--reward.remote_url {url} is {'a folder' if Path(url).is_dir() else 'not a .py file'}; give a "
                    "Python file with reward_func, or the URL of a server."
                )
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"Expected --reward.remote_url to be a .py file or to begin with http://, got {url}.")
            try:
                connect(url, 443 if url.startswith("https:") else 80)
            except (OSError, ValueError) as error:
                raise UsageError(f"--reward.remote_url {url}: no reward server answers there ({error}).") from error
    else:
        check_model(args.reward.model_name_or_path, "--reward.model_name_or_path", args.actor.trust_remote_code)


def import_file(file: str, flag: str, name: str) -> Callable[..., Any]:
    """Return ``name`` from a Python file; refuse a file that is missing, cannot be imported, or lacks it."""
    if not Path(file).is_file():
        raise UsageError(f"{flag} {file} does not exist.")
    if not file.endswith(".py"):
        raise UsageError(f"{flag} {file} is not a .py file; give a Python file with {name}.")
    spec = importlib.util.spec_from_file_location("openrlhf_gtpo_checked_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{flag} {file} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        where = "the README" if name == "reward_func" else "OpenRLHF's openrlhf/utils/agent.py"
        raise UsageError(f"{flag} {file} defines no {name}; {where} shows its signature.")
    return found


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
    except (ValueError, RecursionError):  # a number that is too long, or too many brackets
        pass
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if not line.strip() or isinstance(json.loads(line), dict):
                continue
            reason = ""
        except (ValueError, RecursionError) as error:
            reason = f" ({getattr(error, 'msg', error)})"
        raise UsageError(f"{flag} {file}: line {number} is not a JSON object{reason}; give one row per line.")


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
        except KeyError as error:  # datasets raises it for a name with a NUL within a column
            raise UsageError(f"{flag} {name} has a column with a name in it that cannot be read: {error}.") from error
        local.append(table)
    try:
        if local:
            datasets.concatenate_datasets(local)
    except ValueError as error:
        raise UsageError(
            f"{flag} {names}: a column has different types in them ({one_line(error)}); convert or drop it."
        ) from error


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


def connect(url: str, default_port: int | None = None) -> None:
    """Check that something listens at the host and port of ``url``; do nothing without a port.

    Raises:
        OSError, ValueError: nothing listens there, or the port is invalid.
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    port = parts.port or default_port
    if port is not None:
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
