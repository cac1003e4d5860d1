"""The program of a trainer's ranks in the tests of the colocated transfer. Rank 0 starts the engines."""

import os
from typing import Any

import pytest
import torch

from openrlhf_gtpo.weight_sync import sender
from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, TensorBuckets
from openrlhf_gtpo.weight_sync.receipts import WeightSyncError
from tests.support.weight_workers import SHAPES, assert_arrived, start_engine, weights

PARAMETERS = [ParameterMeta(name, shape) for name, shape in SHAPES.items()]


def all_gather(mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


class Rank:
    """One rank of the trainer; the first one also has the engines."""

    def __init__(self, *sizes: int) -> None:
        self.rank = torch.distributed.get_rank()
        self.engines = [start_engine(size) for size in sizes] if self.rank == 0 else []

    def send(self, sent: list[torch.Tensor], bucket_bytes: int = 300, sync_checksum: bool = True) -> None:
        colocated = sender.ColocatedSender(self.engines, all_gather, torch.device("cpu"))
        colocated.send(TensorBuckets(PARAMETERS, iter(sent), bucket_bytes), sync_checksum)

    def tell(self, engine: int, method: str, *args: Any) -> None:
        if self.rank == 0:
            self.engines[engine](method, *args).result()
        torch.distributed.barrier()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def story() -> None:
    """All steps in one, because starting processes takes most of the time."""
    rank = Rank(1, 2)
    open_files = len(os.listdir("/proc/self/fd"))
    for bucket_bytes in (1, 10**6, 300, 700):  # every tensor alone, one bucket, some together
        for sync_checksum in (False, True):
            sent = weights(bucket_bytes + sync_checksum)
            rank.send(sent, bucket_bytes, sync_checksum)
            assert_arrived(rank.engines, sent)
    assert len(os.listdir("/proc/self/fd")) == open_files, "shared memory is left open"

    names = {
        "corrupt": "layers.0.proj.weight",
        "forget": "layers.0.scale",
        "stop": "head.weight",
        "fail": "head.weight",
    }
    expected = {
        "corrupt": (WeightSyncError, "layers.0.proj.weight reached worker 0 of vLLM engine 1 with other values"),
        "forget": (WeightSyncError, "layers.0.scale was not loaded completely by worker 0 of vLLM engine 1"),
        "stop": (WeightSyncError, "head.weight was not loaded completely by worker 0 of vLLM engine 1"),
        "fail": (RuntimeError, "cannot load head.weight"),
    }
    for silent in (False, True):
        rank.tell(1, "set_silent", silent)
        for kind, (error, sentence) in expected.items():
            rank.tell(1, "set_fault", kind, names[kind])
            with pytest.raises(error, match=sentence):  # on every rank
                rank.send(weights(5))
            rank.tell(1, "set_fault", None)
    rank.send(weights(6))
    assert_arrived(rank.engines, weights(6))

    # A rank that fails ends the sync on the other rank as well.
    broken = weights(7)
    if rank.rank == 1:
        broken[1] = torch.zeros(3)
    with pytest.raises((AssertionError, RuntimeError), match="layers.0.norm.weight"):
        rank.send(broken)

    # Engines that read late find what was sent: a buffer waits for them.
    rank.tell(0, "set_delay", 0.05)
    rank.send(weights(8))
    assert_arrived(rank.engines, weights(8))

    own_place(rank)

    if rank.rank == 0:
        rank.engines[0].processes[0].kill()
    torch.distributed.barrier()
    with pytest.raises((RuntimeError, EOFError, OSError)):
        rank.send(weights(9))
    rank.close()


def own_place(rank: Rank) -> None:
    """Each engine reads what the rank on its own GPU filled; an engine on neither rank's GPU says so."""
    sender.memory_of = lambda device: f"GPU {rank.rank}"
    for engine in range(2):
        rank.tell(engine, "set_place", f"GPU {engine}")
    rank.send(weights(rank.rank), sync_checksum=False)  # ranks send different weights, to show whose arrived
    if rank.rank == 0:
        for engine in range(2):
            assert_arrived(rank.engines[engine : engine + 1], weights(engine))
    rank.tell(1, "set_place", "GPU 7")
    with pytest.raises(RuntimeError, match=r"No trainer process shares weights with an engine on GPU 7"):
        rank.send(weights(2))
    rank.tell(1, "set_place", "GPU 1")
    rank.send(weights(2), sync_checksum=False)
