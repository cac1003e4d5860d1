"""Writes this rank's part of a checkpoint in a thread of its process, while training goes on.

megatron-core 0.16.1 forks for it: one process for each file even when it waits for them, and a manager process for
their results. A fork inside a Ray worker copies the locks of its gRPC, gloo and CUDA threads without the threads that
would release them, so the child may hang for ever. A thread needs no fork, and its file writes release the interpreter.
"""

import os
import queue
import threading
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from openrlhf_gtpo.megatron.parallel.agreement import message_of
from openrlhf_gtpo.megatron.parallel.host import on_cuda


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, planned by Megatron; ``writer`` is what is left to write after a save."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)  # one file a rank: a thread writes one at a time
        self.writer: Any = None

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plan the save (collective) and keep the writer; nothing is written yet."""
        # Megatron would start the manager process here if it had no queue for results.
        filesystem_async._results_queue = queue.SimpleQueue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer = writer
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


class RankWrite:
    """The files of this rank on their way to disk.

    Args:
        writer: Megatron's, with its write plan made.
        asynchronous: copy everything to host memory and return; otherwise return when it is written.
    """

    def __init__(self, writer: Any, *, asynchronous: bool) -> None:
        self._writer = writer
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._guard(self._stage)
            self._thread = threading.Thread(target=self._guard, args=(self._write,), name="checkpoint-writer")
            self._thread.start()
        else:
            self._guard(self._write)

    def done(self) -> bool:
        """True when nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> str | None:
        """Wait for the end; what went wrong, or None."""
        if self._thread is not None:
            self._thread.join()
        return self._failure

    def _guard(self, action: Any) -> None:
        if self._failure is not None:
            return
        try:
            action()
        except Exception as error:
            self._failure = message_of(error)

    def _stage(self) -> None:
        """Copies that the next training step does not change; one tensor's memory is freed before the next copy."""
        for _, _, (_, tensors) in self._writer.write_buckets:
            for i, (item, tensor) in enumerate(tensors):
                # Pinned memory makes the copies from a CUDA device several times faster.
                tensors[i] = (item, tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone())
        if on_cuda():
            torch.cuda.synchronize()

    def _write(self) -> None:
        results: dict[int, list[Any]] = {}
        for i, (path, storage_key, (objects, tensors)) in enumerate(self._writer.write_buckets):
            with open(path, "wb") as stream:
                results[i] = []
                for items in (objects, tensors):
                    while items:  # each is freed as soon as it is written
                        results[i].append(self._write_item(stream, storage_key, *items.pop(0)))
                stream.flush()
                os.fsync(stream.fileno())
        if results:
            self._writer.results_queue.put(results)

    def _write_item(self, stream: Any, storage_key: str, item: Any, data: Any) -> Any:
        data = data.cpu() if isinstance(data, torch.Tensor) else data
        return _write_item(
            self._writer.transforms,
            stream,
            data,
            item,
            storage_key,
            serialization_format=SerializationFormat.TORCH_SAVE,
        )
