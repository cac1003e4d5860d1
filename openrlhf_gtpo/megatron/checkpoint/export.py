"""Writes a model as a Hugging Face folder from Megatron's ranks: safetensors shards, their index and side files."""

import glob
import json
import os
import shutil
import uuid
from collections import defaultdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.lora.folder import ADAPTER, write_adapter
from openrlhf_gtpo.megatron.checkpoint.state import dtype_name, model_and_trainer
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.adapters import full_adapters
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.platform.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.platform.files import INDEX, SIDE_FILE_PATTERNS, model_folder, share_weights

BUCKET_BYTES = 64 * 2**20  # gathered at once


def save_hf(
    target: Trainer | LoadedModel, source: str | Path, directory: str | Path, *, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model as a Hugging Face folder, in its own dtype (collective; the first rank writes). Adapters are
    merged into it, and written beside it in ``adapter/``, as PEFT does.

    FP8 primary weights come from a trainer's float32 ones; a model alone gives what FP8 has left of them.

    The first rank holds one shard at a time in host memory. A new ``directory`` appears whole or not at all; in
    one that exists, the model's files are replaced and whatever else is there stays.

    Args:
        source: the model's folder or name on the Hub, or a folder with only its tokenizer and configuration.
        shard_bytes: largest size of a weight file, unless a single tensor is larger.

    Raises:
        CheckpointWriteError: a file could not be read or written.
    """
    model, trainer = model_and_trainer(target)
    read = in_high_precision if trainer is None else trainer.exact_weight
    directory = Path(directory)
    temporary = from_first_rank(lambda: _begin(directory), CheckpointWriteError)
    weights = FullWeights(model, BUCKET_BYTES, read)
    adapters = full_adapters(model.stage)
    dtype = model.options.dtype
    shapes = {
        name: torch.empty(shape, dtype=dtype, device="meta") for bucket in weights.buckets for name, shape in bucket
    }
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    unfinished: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # of files that are not complete yet

    def write(name: str, tensor: torch.Tensor) -> None:
        file = files.tensor_to_filename[name]
        # A copy, because the next bucket but one reuses its memory.
        unfinished[file][name] = tensor.detach().to("cpu", copy=True).contiguous()
        if len(unfinished[file]) == len(files.filename_to_tensors[file]):
            save_file(unfinished.pop(file), temporary / file, metadata={"format": "pt"})

    def finish() -> None:
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        copy_side_files(source, temporary, dtype=dtype_name(model))
        if model.options.lora is not None:
            write_adapter(temporary / ADAPTER, adapters, model.options.lora, str(source))
        share_weights(temporary)
        _publish(temporary, directory)

    is_first = torch.distributed.get_rank() == 0
    failure: str | None = None
    for name, tensor in weights.tensors():
        # The other ranks go on gathering whatever happens here, so this one does too.
        if is_first and failure is None:
            failure = failure_of(partial(write, name, tensor))
    if is_first:
        failure = failure or failure_of(finish)
        if failure is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            failure = f"The model could not be written into {directory}: {failure}."
    raise_together(failure, CheckpointWriteError)


def copy_side_files(source: str | Path, directory: Path, *, dtype: str | None = None) -> None:
    """Copy configuration, tokenizer and templates of the model ``source`` into the existing ``directory``.

    Args:
        source: the model's folder, or its name on the Hub, from which the files are fetched if need be.
        dtype: of the weights that come with them, such as "bfloat16", for the configuration; None leaves it as is.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the configuration is not JSON, or the model is not here and cannot be fetched.
    """
    for path in sorted(model_folder(source, weights=False).iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in SIDE_FILE_PATTERNS):
            shutil.copyfile(path, directory / path.name)
    if dtype is not None:
        path = directory / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        # transformers 5 writes "dtype" and reads both; before https://github.com/huggingface/transformers/pull/39782
        # (4.56) it knows only the longer name.
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _begin(directory: Path) -> Path:
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file")
    # Inside a folder that exists, because its parent may be on another disk.
    parent = directory if directory.is_dir() else directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    for place in {parent, directory.parent}:
        for left in place.glob(f"{glob.escape(directory.name)}.tmp-????????"):  # by an export that was killed
            shutil.rmtree(left, ignore_errors=True)
    temporary = parent / f"{directory.name}.tmp-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def _publish(temporary: Path, directory: Path) -> None:
    if temporary.parent != directory:
        temporary.rename(directory)
        return
    new = {path.name for path in temporary.iterdir()}
    stale = [path for path in (directory / INDEX, *directory.glob("model*.safetensors")) if path.name not in new]
    for path in temporary.iterdir():
        if path.is_dir():  # which replaces no folder that has files
            shutil.rmtree(directory / path.name, ignore_errors=True)
        os.replace(path, directory / path.name)
    for path in stale:
        path.unlink(missing_ok=True)
    temporary.rmdir()
