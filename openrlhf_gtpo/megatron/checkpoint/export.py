"""Writes a model as a Hugging Face folder from Megatron's ranks: safetensors shards, their index and side files."""

import json
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from openrlhf_gtpo.checkpoints import hf_folder
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.lora.folder import ADAPTER, write_adapter
from openrlhf_gtpo.megatron.checkpoint.state import dtype_name, model_and_trainer
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.adapters import full_adapters
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.platform.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.platform.files import INDEX

BUCKET_BYTES = 64 * 2**20  # gathered at once


def save_hf(
    target: Trainer | LoadedModel, source: str | Path, directory: str | Path, *, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model as a Hugging Face folder, in its own dtype (collective; the first rank writes). Adapters are
    merged into it, and also written to ``adapter/`` in PEFT's format.

    FP8 primary weights are exported from a trainer's float32 ones. Without a trainer, they are as exact as FP8.

    The first rank holds one shard at a time in host memory. A new ``directory`` appears atomically. In an existing
    one, the model's files are replaced and other files stay.

    Args:
        source: the model's folder or name on the Hub, or a folder with only its tokenizer and configuration.
        shard_bytes: largest size of a weight file, unless a single tensor is larger.

    Raises:
        CheckpointWriteError: a file could not be read or written.
    """
    model, trainer = model_and_trainer(target)
    read = in_high_precision if trainer is None else trainer.exact_weight
    directory = Path(directory)
    temporary = from_first_rank(lambda: hf_folder.begin(directory), CheckpointWriteError)
    weights = FullWeights(model, BUCKET_BYTES, read)
    adapters = full_adapters(model.stage)
    dtype = model.options.dtype
    shapes = {
        name: torch.empty(shape, dtype=dtype, device="meta") for bucket in weights.buckets for name, shape in bucket
    }
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    unfinished: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)  # for incomplete files

    def write(name: str, tensor: torch.Tensor) -> None:
        file = files.tensor_to_filename[name]
        # A copy, because the bucket after the next reuses its memory.
        unfinished[file][name] = tensor.detach().to("cpu", copy=True).contiguous()
        if len(unfinished[file]) == len(files.filename_to_tensors[file]):
            save_file(unfinished.pop(file), temporary / file, metadata={"format": "pt"})

    def finish() -> None:
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        if model.options.lora is not None:
            write_adapter(temporary / ADAPTER, adapters, model.options.lora, str(source))
        hf_folder.publish(temporary, directory, source, dtype=dtype_name(model))

    is_first = torch.distributed.get_rank() == 0
    failure: str | None = None
    for name, tensor in weights.tensors():
        # The other ranks keep gathering after an error here, so this one must too.
        if is_first and failure is None:
            failure = failure_of(partial(write, name, tensor))
    if is_first:
        failure = failure or failure_of(finish)
        if failure is not None:
            shutil.rmtree(temporary, ignore_errors=True)
            failure = f"The model could not be written into {directory}: {failure}."
    raise_together(failure, CheckpointWriteError)
