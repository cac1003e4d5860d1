"""What can be known to fail before any engine starts: data, model, reward and modes, each refused in one sentence.

What fails, or does nothing, with every estimator is refused for all. Beyond that only runs with GTPO or GRPO-S are held to
rules; what upstream's own estimators do with such input is upstream's. The Megatron actor has rules of its own, in
``megatron_checks``.
"""

import importlib.util
import json
import os
import socket
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.errors import UsageError

_TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}

# Where a checkpoint may name Python code of its own.
_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def check_every_run(args: SimpleNamespace) -> None:
    """Raise UsageError for the first thing that works with no estimator and no backend, and for code of a checkpoint's own
    without ``--actor.trust_remote_code``: upstream's workers and vLLM would run it unasked."""
    if args.ds.lora.rank > 0:
        raise UsageError(
            f"--ds.lora.rank {args.ds.lora.rank} wraps the weights that are sent to vLLM, which knows no weight by the "
            "names they get and fails at the first transfer; leave it out to train all weights."
        )
    if args.ds.load_in_4bit:
        raise UsageError(
            "--ds.load_in_4bit packs the weights into bytes, which are not trained and which vLLM cannot load at the first "
            "transfer; leave it out."
        )
    if not 0 < args.rollout.top_p <= 1:
        raise UsageError(
            f"--rollout.top_p {args.rollout.top_p:g} must be above 0 and at most 1; give 1 to sample from all."
        )
    if args.actor.trust_remote_code:
        return
    for role in ("actor", "critic") if args.reward.remote_url else ("actor", "critic", "reward"):
        name = getattr(args, role).model_name_or_path
        refuse_own_code(name, f"--{role}.model_name_or_path", "--actor.trust_remote_code")


def check_inputs(args: SimpleNamespace) -> None:
    """Raise UsageError for the first thing that cannot work with this run's estimator."""
    if args.algo.advantage.estimator not in ESTIMATORS:
        if args.train.async_enable:
            _check_async(args)
        return
    _check_modes(args)
    trust = args.actor.trust_remote_code
    config = check_model(args.actor.model_name_or_path, "--actor.model_name_or_path", trust)
    if hasattr(config, "vision_config"):
        raise UsageError(
            f"--actor.model_name_or_path {args.actor.model_name_or_path} is a vision-language model, whose image "
            "positions have no entropy credit yet; use a text model or one of OpenRLHF's own estimators."
        )
    _check_reward(args)
    _check_dataset(args, args.data.prompt_dataset, args.data.prompt_split, "--data.prompt_dataset")
    if args.eval.dataset:
        _check_dataset(args, args.eval.dataset, args.eval.split, "--eval.dataset")


def check_cluster() -> None:
    """Refuse a RAY_ADDRESS at which nothing listens: Ray would try for minutes and then abort the process."""
    address = os.environ.get("RAY_ADDRESS", "")
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        if parts.port is None:  # "auto" and "local" are not addresses
            return
        with socket.create_connection((parts.hostname or "", parts.port), timeout=5):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No Ray cluster answers at RAY_ADDRESS={address} ({error}); start one there, or unset RAY_ADDRESS to use "
            "a Ray of this host's own."
        ) from error


def _check_async(args: SimpleNamespace) -> None:
    """Refuse what this package's controller does: asynchronous training keeps upstream's."""
    for given, flag, remedy in (
        (args.logger.entropy_enable, "--logger.entropy_enable", "leave it out"),
        (args.logger.metrics_path, "--logger.metrics_path", "give --logger.tensorboard_dir or --logger.wandb.key"),
        (args.eval.before_training, "--eval.before_training", "leave it out, or give --eval.steps"),
    ):
        if given:
            raise UsageError(
                f"{flag} does not go with --train.async_enable, whose controller is OpenRLHF's; {remedy}."
            )


def _check_modes(args: SimpleNamespace) -> None:
    estimator = f"--algo.advantage.estimator {args.algo.advantage.estimator}"
    samples = args.rollout.n_samples_per_prompt
    if samples < 2:
        raise UsageError(
            f"--rollout.n_samples_per_prompt {samples} leaves nothing to compare a response with, but {estimator} "
            "compares the responses to one prompt; give at least 2."
        )
    if not args.vllm.num_engines:
        raise UsageError(
            f"--vllm.num_engines {args.vllm.num_engines} starts no engine to sample from; give at least 1."
        )
    if args.train.async_enable:
        raise UsageError(
            f"--train.async_enable does not go with {estimator}: asynchronous rollouts come from an older policy, and "
            "the entropies must be those of the policy that sampled; leave it out."
        )
    if args.data.max_images_per_prompt > 0:
        raise UsageError(
            f"--data.max_images_per_prompt {args.data.max_images_per_prompt} does not go with {estimator}: image "
            "positions have no entropy credit yet; use text prompts or one of OpenRLHF's own estimators."
        )
    buffer = args.reward.overlong_buffer_len
    longest = args.rollout.max_new_tokens
    if buffer is not None and not longest:
        raise UsageError(
            f"--reward.overlong_buffer_len {buffer:g} counts back from the longest response, which nothing limits but "
            "--data.max_len, the prompt included; give --rollout.max_new_tokens too."
        )
    if buffer is not None and not 0 < buffer < longest:
        raise UsageError(
            f"--reward.overlong_buffer_len {buffer:g} must lie between 0 and the longest response ({longest} tokens)."
        )
    if args.rollout.max_new_tokens and args.rollout.max_new_tokens >= args.data.max_len:
        raise UsageError(
            f"--rollout.max_new_tokens {args.rollout.max_new_tokens} leaves no room for a prompt within "
            f"--data.max_len {args.data.max_len}; raise --data.max_len."
        )
    if not args.rollout.temperature > 0:
        raise UsageError(
            f"--rollout.temperature {args.rollout.temperature:g} makes every response to a prompt the same and leaves "
            "the policy no entropy; give a value above 0."
        )
    if args.rollout.top_p != 1:
        raise UsageError(
            f"--rollout.top_p {args.rollout.top_p:g} does not go with {estimator}: it cuts the distribution that is sampled "
            "from, and the entropies are those of the whole; leave it at 1."
        )
    coefficient = args.reward.stop_properly_penalty_coef
    if coefficient is not None and not coefficient <= 1:
        raise UsageError(
            f"--reward.stop_properly_penalty_coef {coefficient:g} would reward truncation; give a factor in [0, 1], or "
            "a negative reward."
        )
    _check_loss(args)


def _check_loss(args: SimpleNamespace) -> None:
    """Refuse what the constructor of upstream's loss would refuse, where no trainer holds a GPU yet."""
    from openrlhf.models.loss import PolicyLoss

    from openrlhf_gtpo.integration.credit.loss import loss_options

    try:
        PolicyLoss(**loss_options(args))
    except (AssertionError, ValueError) as error:
        raise UsageError(f"--actor.dual_clip or --algo.advantage.is_correction_*: {error}") from error


def refuse_own_code(name: str | None, flag: str, trust_flag: str) -> None:
    """Refuse a checkpoint, a folder or a hub name, that brings Python code of its own. Nothing of it is run here, and a
    checkpoint that cannot be read is left to whoever loads it.

    Args:
        flag: the one that names the checkpoint.
        trust_flag: the one that allows its code.

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
                f"{flag} {name} brings Python code of its own (auto_map in its {Path(file).name}), which every worker would "
                f"run; read that code and give {trust_flag}, or choose a checkpoint without."
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
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a configuration's own class may raise anything
        raise UsageError(
            f"{flag} {name} is not a Hugging Face checkpoint that can be read: {_reason(error)}"
        ) from error
    _check_weights(path, flag)
    return config


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
        raise UsageError(f"{flag} {name} has no tokenizer that can be read: {_reason(error)}") from error


def _check_weights(path: Path, flag: str) -> None:
    """Refuse local safetensors that are cut off or missing; only their headers are read."""
    from safetensors import SafetensorError, safe_open

    for index in path.glob("*.safetensors.index.json"):
        for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
            if not (path / shard).exists():
                raise UsageError(f"{flag} {path} lacks {shard}, which its {index.name} lists.")
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{flag} {path}: {file.name} cannot be read: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """An error's message in one line; its kind where it has none."""
    text = " ".join(str(error).split())
    return text if text else type(error).__name__


def _check_reward(args: SimpleNamespace) -> None:
    if args.train.agent_func_path:
        _import_file(args.train.agent_func_path, "--train.agent_func_path", "AgentExecutor")
        return
    if not args.reward.remote_url:
        if not args.reward.model_name_or_path:
            raise UsageError(
                "There is no reward: give --reward.remote_url FILE.py (a reward function) or URL, "
                "--reward.model_name_or_path, or --train.agent_func_path."
            )
        for name in args.reward.model_name_or_path.split(","):
            check_model(name, "--reward.model_name_or_path", args.actor.trust_remote_code)
        return
    for url in args.reward.remote_url:
        if url.endswith(".py"):
            _import_file(url, "--reward.remote_url", "reward_func")
        else:
            _check_server(url)


def _import_file(file: str, flag: str, name: str) -> None:
    """Refuse a Python file that is missing, cannot be imported, or lacks ``name``."""
    if not Path(file).is_file():
        raise UsageError(f"{flag} {file} does not exist.")
    spec = importlib.util.spec_from_file_location("openrlhf_gtpo_checked_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UsageError(f"{flag} {file} cannot be imported: {type(error).__name__}: {_reason(error)}") from error
    if not callable(getattr(module, name, None)):
        raise UsageError(f"{flag} {file} defines no {name}; see the README for its signature.")


def _check_server(url: str) -> None:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"--reward.remote_url {url}: no reward server answers there ({error}).") from error


def _check_dataset(args: SimpleNamespace, names: str | None, split: str, flag: str) -> None:
    """Refuse local tables that are missing, unreadable, empty, lack a column, or hold a prompt that does not fit."""
    if not names:
        raise UsageError(f"{flag} is missing; give a data set.")
    for name in (part.strip() for part in names.split(",")):
        path = Path(name.split("@")[0])
        kind = _TABLES.get(path.suffix)
        if kind is None:
            if not path.exists() and (path.is_absolute() or name.startswith(".")):
                raise UsageError(f"{flag} {name} does not exist.")
            continue  # a hub name or a saved data set: loading it is upstream's
        if not path.is_file():
            raise UsageError(f"{flag} {name} does not exist.")
        _check_rows(args, _load_table(kind, path, split, flag), f"{flag} {name}")


def table_rows(names: str, split: str, flag: str) -> int | None:
    """Rows of the local tables that ``flag`` names, together; None where one is no local table.

    Raises:
        UsageError: a table that cannot be read.
    """
    rows = 0
    for name in (part.strip() for part in names.split(",")):
        path = Path(name.split("@")[0])
        if path.suffix not in _TABLES or not path.is_file():
            return None
        rows += len(_load_table(_TABLES[path.suffix], path, split, flag))
    return rows


def _load_table(kind: str, path: Path, split: str, flag: str) -> Any:
    import datasets

    if path.stat().st_size == 0:
        raise UsageError(f"{flag} {path} is empty.")
    progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(kind, data_files=str(path))
    except Exception as error:  # datasets wraps parsers that raise their own kinds
        if "corresponds to no data" in str(error):
            raise UsageError(f"{flag} {path} has no rows.") from error
        reason = _reason(error.__cause__ or error)
        raise UsageError(f"{flag} {path} cannot be read as {path.suffix[1:]}: {reason}") from error
    finally:
        if progress:
            datasets.enable_progress_bars()
    if split not in loaded:
        split_flag = flag.replace("_dataset", "_split").replace(".dataset", ".split")
        raise UsageError(f"{flag} {path} has no split {split!r} ({split_flag}); it has {', '.join(loaded)}.")
    table = loaded[split]
    if len(table) == 0:
        raise UsageError(f"{flag} {path} has no rows.")
    return table


def _check_rows(args: SimpleNamespace, table: Any, where: str) -> None:
    for flag, column in (("--data.input_key", args.data.input_key), ("--data.label_key", args.data.label_key)):
        if column is not None and column not in table.column_names:
            raise UsageError(f"{where} has no column {column!r} ({flag}); it has {', '.join(table.column_names)}.")
    room = args.data.max_len - (args.rollout.max_new_tokens or 1)
    row, length = _first_too_long(args, table, room, where)
    if row is not None:
        raise UsageError(
            f"{where}: the prompt of row {row} has {length} tokens, but --data.max_len {args.data.max_len} with "
            f"--rollout.max_new_tokens {args.rollout.max_new_tokens} leaves {room}; raise --data.max_len or drop it."
        )


def _first_too_long(args: SimpleNamespace, table: Any, room: int, where: str) -> tuple[int | None, int]:
    """Row and length of the first prompt over ``room`` tokens. A token is at least one byte, so most rows need no
    tokenizer."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    trust = args.actor.trust_remote_code
    tokenizer = load_tokenizer(args.actor.model_name_or_path, "--actor.model_name_or_path", trust)
    template = tokenizer.apply_chat_template if args.data.apply_chat_template else None
    for row, data in enumerate(islice(table, args.data.max_samples)):
        try:
            prompt, _ = preprocess_data(data, args.data.input_template, args.data.input_key, None, template)
        except Exception as error:  # templates are programs
            raise UsageError(f"{where}: the prompt of row {row} cannot be made: {_reason(error)}") from error
        if not isinstance(prompt, str):
            raise UsageError(f"{where}: the prompt of row {row} is not text but a {type(prompt).__name__}.")
        if len(prompt.encode()) > room:
            length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            if length > room:
                return row, length
    return None, 0
