"""A model on Megatron's ranks to a Hugging Face folder: safetensors shards, their index, and the files beside them."""

import json
import os
import shutil
import uuid
from pathlib import Path

import torch
from safetensors.torch import save_file

from openrlhf_gtpo.megatron.checkpoint.files import CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint.side_files import copy_side_files
from openrlhf_gtpo.megatron.checkpoint.state import dtype_name, model_and_trainer
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.agreement import from_first_rank, message_of, raise_together
from openrlhf_gtpo.megatron.train.trainer import Trainer

INDEX = "model.safetensors.index.json"
BUCKET_BYTES = 64 * 2**20  # gathered at once


def save_hf(
    target: Trainer | LoadedModel, source: str | Path, directory: str | Path, *, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model as a Hugging Face folder, in its own dtype (collective; the first rank writes).

    FP8 primary weights come from a trainer's float32 ones, and from a model alone as what FP8 has left of them.

    The first rank holds one shard at a time in host memory. A new or empty ``directory`` appears whole or not at all;
    in one that exists, the model's files are replaced and whatever else is there stays.

    Args:
        source: the model's folder or name on the Hub, or a folder of its tokenizer and configuration alone.
        shard_bytes: greatest size of a weight file, unless a single tensor is larger.

    Raises:
        CheckpointWriteError: a file could not be read or written.
    """
    model, trainer = model_and_trainer(target)
    read = in_high_precision if trainer is None else trainer.exact_weight
    directory = Path(directory)
    temporary = from_first_rank(lambda: _begin(directory), CheckpointWriteError)
    shards = _Shards(temporary, shard_bytes) if torch.distributed.get_rank() == 0 else None
    failure: str | None = None
    for name, tensor in FullWeights(model, BUCKET_BYTES, read).tensors():
        # The other ranks go on gathering whatever happens here, so this one does too.
        if shards is not None and failure is None:
            try:
                shards.add(name, tensor)
            except Exception as error:
                failure = message_of(error)
    if shards is not None:
        try:
            if failure is None:
                shards.finish()
                copy_side_files(source, temporary, dtype=dtype_name(model))
                _publish(temporary, directory)
        except Exception as error:
            failure = message_of(error)
        if failure is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            failure = f"The model could not be written into {directory}: {failure}."
    raise_together(failure, CheckpointWriteError)


class _Shards:
    """Weight files of at most ``limit`` bytes."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._written: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._limit:
            self._write()
        # A copy: its memory is the next but one bucket's.
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self._total_bytes += size

    def finish(self) -> None:
        if self._held:
            self._write()
        if len(self._written) == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._written):
            file = f"model-{i + 1:05d}-of-{len(self._written):05d}.safetensors"
            self._path(i).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _path(self, number: int) -> Path:
        return self._directory / f"shard-{number}"

    def _write(self) -> None:
        save_file(self._held, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._held, self._held_bytes = {}, 0


def _begin(directory: Path) -> Path:
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file")
    # Inside a folder that exists, as what is beside it may be on another disk.
    parent = directory if directory.is_dir() else directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / f"{directory.name}.tmp-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def _publish(temporary: Path, directory: Path) -> None:
    if temporary.parent != directory:
        temporary.rename(directory)
        return
    new = {path.name for path in temporary.iterdir()}
    stale = [path for path in directory.iterdir() if _is_weight_file(path.name) and path.name not in new]
    for path in temporary.iterdir():
        os.replace(path, directory / path.name)
    for path in stale:
        path.unlink()
    temporary.rmdir()


def _is_weight_file(name: str) -> bool:
    return name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))
