"""Writes this rank's part of a checkpoint in a thread of its process while training continues.

megatron-core 0.16.1 forks for it (``dist_checkpointing/strategies/filesystem_async.py``): one process per file, even
for a save that it waits for, and a manager for their results. A fork inside a Ray worker copies the locks of its gRPC,
gloo and CUDA threads without the threads that release them, so the child may hang forever. A thread needs no fork,
and its file writes release the interpreter. 0.19.2 writes files from threads. It still starts the manager and, for
an asynchronous save, a process around the threads (``async_utils.py``); the other needs nvidia-resiliency-ext.
Can go with a Megatron that writes in this process while training continues.
"""

import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import get_rank
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.overrides import TorchFunctionMode
from torch.utils.serialization import config as serialization

from openrlhf_gtpo.checkpoints.files import Entry, HashedFile
from openrlhf_gtpo.megatron.parallel.host import HostMemory, on_cuda
from openrlhf_gtpo.platform.agreement import failure_of

_ALIGNMENT = 64  # bytes, of each tensor's copy


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, planned by Megatron; ``writer`` has what is left to write after a save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)  # one file per rank: a thread writes one at a time
        self.writer: Any = None

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *strategy: str) -> AsyncRequest:
        """Plan the save (collective) and keep the writer; only the small common state is written now.

        Args:
            strategy: megatron-core 0.16.1 passes none. 0.19.2 passes nvidia-resiliency-ext's, and Megatron's own
                replaces it.
        """
        if strategy and get_rank() == 0:
            # 0.16.1 writes the common state to this file and reads only this file. 0.19.2 writes it with the tensors
            # and reads either. Can go with 0.16.1, like the asterisks.
            torch.save(sharded_state_dict["common_state"].data, Path(checkpoint_dir, COMMON_STATE_FNAME))
        # Megatron would start the manager process here if it had no queue for results.
        filesystem_async._results_queue = queue.SimpleQueue()
        with _NoClones():
            return super().async_save(sharded_state_dict, checkpoint_dir, *("mcore" for _ in strategy))

    def _get_save_and_finalize_callbacks(self, writer: Any, *others: Any) -> AsyncRequest:
        self.writer = writer
        return super()._get_save_and_finalize_callbacks(writer, *others)


class _NoClones(TorchFunctionMode):
    """Keeps Megatron from cloning all CPU tensors at once while it plans the write (filesystem_async.py)."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return args[0] if func is torch.Tensor.clone else func(*args, **(kwargs or {}))


class RankWrite:
    """This rank's files on their way to disk; ``entries`` has those already there, by name.

    Args:
        writer: Megatron's, with its write plan made.
        host: memory to copy everything to before returning, so that it is written while training continues; None
            returns once it is written.
    """

    def __init__(self, writer: Any, host: HostMemory | None) -> None:
        self._writer = writer
        self.entries: dict[str, Entry] = {}
        self._thread: threading.Thread | None = None
        self._failure = failure_of(self._write if host is None else partial(self._stage, host))
        if host is not None and self._failure is None:
            self._thread = threading.Thread(target=self._write_in_background, name="checkpoint-writer")
            self._thread.start()

    def done(self) -> bool:
        """True when nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> str | None:
        """Wait for the end, and return what went wrong, or None."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def _write_in_background(self) -> None:
        os.nice(10)  # of this thread alone (Linux): where cores are few, training goes first
        self._failure = failure_of(self._write)

    def _stage(self, host: HostMemory) -> None:
        """Replace the tensors to write with copies that the next training step does not change."""
        tensors = [tensors for _, _, (_, tensors) in self._writer.write_buckets]
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for bucket in tensors for _, tensor in bucket]
        memory, offsets = host.buffer(sum(sizes)).numpy(), accumulate(sizes, initial=0)
        for bucket in tensors:
            for i, (item, tensor) in enumerate(bucket):
                copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=next(offsets))
                bucket[i] = (item, copy.view(tensor.shape).copy_(tensor, non_blocking=True))
        if on_cuda():
            torch.cuda.synchronize()

    def _write(self) -> None:
        results: dict[int, list[Any]] = {}
        for i, (path, storage_key, (objects, tensors)) in enumerate(self._writer.write_buckets):
            with HashedFile(path) as stream, serialization.patch("save.compute_crc32", False):  # the files are hashed
                results[i] = []
                for items in (objects, tensors):
                    while items:  # each is freed as soon as it is written
                        item, data = items.pop(0)
                        data = _whole(data.cpu()) if isinstance(data, torch.Tensor) else data
                        written = _write_item(
                            self._writer.transforms,
                            stream,
                            data,
                            item,
                            storage_key,
                            serialization_format=SerializationFormat.TORCH_SAVE,
                        )
                        results[i].append(written)
            self.entries[os.path.basename(path)] = stream.entry
        if results:
            self._writer.results_queue.put(results)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with a storage of its own, because torch.save writes whole storages."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
