"""Checkpoints of the Megatron actor in Megatron's torch_dist format, readable at another TP × PP × DP.

Save: a temporary folder, every rank's shards (see ``writer``), rank 0's small files, the manifest, then a rename that
publishes all of it. Load: check every file, compare the keys, then read. ``folder`` says which are kept.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy, load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed import get_rank, get_world_size

from openrlhf_gtpo.checkpoints import folder as checkpoint_folder
from openrlhf_gtpo.checkpoints.files import CheckpointError, HashedFile
from openrlhf_gtpo.checkpoints.folder import (
    SIDE_FILES,
    TRAINING_STATE,
    CheckpointWriteError,
    check_checkpoint,
)
from openrlhf_gtpo.checkpoints.hf_folder import copy_side_files
from openrlhf_gtpo.checkpoints.together import agree, choose, publish, put_in_order, verify
from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.lora.folder import refusal
from openrlhf_gtpo.megatron.checkpoint import state as checkpoint_state
from openrlhf_gtpo.megatron.checkpoint.state import dtype_name, model_and_trainer
from openrlhf_gtpo.megatron.checkpoint.writer import RankWrite, ThreadStrategy
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import HostMemory, megatron_calls
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.platform.agreement import all_gather_objects, failure_of, from_first_rank, raise_together

_RESERVE_BYTES = 64 * 2**20


@dataclass(kw_only=True)
class Checkpoints:
    """The checkpoints of one folder. All ranks call every method, and ``finish`` at the end of a run.

    Args:
        folder: visible to all ranks.
        asynchronous: ``save`` returns once the state is copied to host memory; it is written while training continues.
        max_num: regular checkpoints to keep; the disk holds one more while a new one is written.
        max_mem_gb: their largest total size, including the best one's, in units of 2^30 bytes.
        hf_source: the model's folder or name on the Hub, whose tokenizer and configuration each checkpoint carries;
            None if nothing will be converted back.
        add_side_files: called with the folder of those, for more of them.
    """

    folder: str | Path = field(kw_only=False)
    asynchronous: bool = False
    max_num: int = 3
    max_mem_gb: float = math.inf
    hf_source: str | Path | None = None
    add_side_files: Callable[[Path], None] | None = None
    _pending: "PendingSave | None" = field(default=None, init=False)
    _host: HostMemory = field(default_factory=HostMemory, init=False)

    def save(
        self,
        tag: str,
        trainer: Trainer,
        client_state: dict[str, Any],
        *,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Write the checkpoint ``tag``, and remove those that are then in excess.

        Args:
            client_state: whatever else a resumed run needs, in plain values and tensors, which are all that a load
                accepts; the first rank's is kept.
            metric_value: of this checkpoint, for its manifest.

        Raises:
            CheckpointWriteError: this or the previous asynchronous save failed; neither failure keeps the other from
                being written, and earlier checkpoints are unchanged.
        """
        try:
            self.finish()
        finally:
            metric = {"key": metric_key, "value": metric_value}
            host = self._host if self.asynchronous else None
            path, source = Path(self.folder, tag), self.hf_source
            self._pending = PendingSave(path, trainer, client_state, source, metric, host, self.add_side_files)
            if not self.asynchronous:
                self.finish()

    def finish(self, wait: bool = True) -> None:
        """Wait for the asynchronous save, if there is one, and publish it; without ``wait``, only if all ranks have
        finished writing.

        Raises:
            CheckpointWriteError: it failed.
        """
        if self._pending is None or not (wait or all(all_gather_objects(self._pending.write.done()))):
            return
        pending, self._pending = self._pending, None
        put_in_order(pending.finish(), [], max_num=self.max_num, max_mem_gb=self.max_mem_gb)

    def load(self, target: Trainer | LoadedModel, tag: str | None = None) -> dict[str, Any]:
        """Load the newest checkpoint, or ``tag``, into a trainer or a model alone, and return the saved client state,
        which is empty if there is no checkpoint. Without ``tag``, damaged ones are renamed.

        Raises:
            CheckpointError: none of the existing ones is whole, ``tag`` is not there, or it does not fit ``target``,
                which is unchanged.
        """
        self.finish()
        path = choose([Path(self.folder)], tag)
        return {} if path is None else _load_verified(path, target)


class PendingSave:
    """One checkpoint on its way to ``path`` (collective); arguments as for :class:`Checkpoints` and ``RankWrite``.

    With a trainer, the folder of ``path`` is assumed to hold only checkpoints.

    Raises:
        CheckpointWriteError: no folder can be made there.
    """

    def __init__(
        self,
        path: Path,
        target: Trainer | LoadedModel,
        client_state: dict[str, Any],
        hf_source: str | Path | None,
        metric: dict[str, Any],
        host: HostMemory | None = None,
        add_side_files: Callable[[Path], None] | None = None,
    ) -> None:
        # A temporary folder, on a disk with room for what Megatron writes on the first rank.
        self._path = path
        model, trainer = model_and_trainer(target)
        begin = partial(checkpoint_folder.begin, path, whole_folder=trainer is not None)
        self._temporary = from_first_rank(begin, CheckpointWriteError)
        self._reserve = self._temporary / "reserve"
        agree(self._temporary, path, failure_of(self._take_reserve) if get_rank() == 0 else None)
        if get_rank() == 0:
            self._reserve.unlink()
        self._manifest = {
            "model": checkpoint_folder.describe_model(model.hf_config),
            "dtype": dtype_name(model),
            "layout": asdict(model.options.layout),
            "world_size": get_world_size(),
            "optimizer": trainer is not None,
            "distributed_optimizer": trainer is not None and trainer.options.distributed,
            "metric": metric,
            "origin": client_state.get("origin"),  # what a run that resumes must share with this one
            **({} if model.lora is None else {"lora": model.lora}),
        }
        # Megatron's plan of who writes what.
        strategy = ThreadStrategy()
        state = checkpoint_state.sharded_state(model, trainer, is_loading=False)
        with megatron_calls():
            request = dist_checkpointing.save(
                state,
                str(self._temporary),
                # Replicas share the writing of what they have in common.
                FullyParallelSaveStrategyWrapper(strategy, _replicas()),
                async_sharded_save=True,
            )
        del state  # the writer has its own references to what it writes
        self._finalize = request.finalize_fns
        # The first rank's small files, and every rank's shards.
        randoms = all_gather_objects(checkpoint_state.rank_random_state())

        def write_small_files() -> None:
            self._take_reserve()
            schedule = None if trainer is None else trainer.schedule_state()
            small = {"client_state": client_state, "trainer": schedule, "random": randoms}
            with HashedFile(self._temporary / TRAINING_STATE) as stream:
                torch.save(small, stream)
            if hf_source is not None:
                (self._temporary / SIDE_FILES).mkdir()
                copy_side_files(hf_source, self._temporary / SIDE_FILES)
                if add_side_files is not None:
                    add_side_files(self._temporary / SIDE_FILES)

        self._failure = failure_of(write_small_files) if get_rank() == 0 else None
        self.write = RankWrite(strategy.writer, host)

    def finish(self) -> Path:
        """Wait for every rank, give the checkpoint its name, and return where it is.

        Raises:
            CheckpointWriteError: some rank could not write its part; nothing is left of it.
        """
        agree(self._temporary, self._path, self.write.join() or self._failure)
        if get_rank() == 0:
            self._reserve.unlink()
        with megatron_calls():
            for finalize in self._finalize:
                finalize()
        publish(self._temporary, self._path, self._manifest, self.write.entries)
        return self._path

    def _take_reserve(self) -> None:
        """Reserve room for what Megatron writes next on the first rank only, where a failure would leave the others
        waiting for it: the common state in a save, and after it what ``save_state_dict_async_finalize`` does
        (megatron-core 0.16.1, 0.19.2)."""
        with open(self._reserve, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, _RESERVE_BYTES)


def lora_options(path: Path) -> LoraOptions | None:
    """Those of the checkpoint's adapters; None if it has all weights.

    Raises:
        CheckpointError: it cannot be read.
    """
    described = checkpoint_folder.read_manifest(path).get("lora")
    return described and LoraOptions(described["rank"], described["alpha"], tuple(described["targets"]))


def load_checkpoint(path: Path, target: Trainer | LoadedModel) -> dict[str, Any]:
    """Load one checkpoint into a trainer, or its weights into a model (collective); return the saved client state.

    With the layout and number of processes that it was written with, training continues bit for bit; with others, the
    random states stay as they are. Of Transformer Engine's delayed scales it has only the first replica's.

    Raises:
        CheckpointError: it is missing, damaged or of another model; nothing has changed.
    """
    from_first_rank(partial(checkpoint_folder.read_manifest, path), CheckpointError)
    verify(path)
    return _load_verified(path, target)


def _load_verified(path: Path, target: Trainer | LoadedModel) -> dict[str, Any]:
    model, trainer = model_and_trainer(target)
    hf_config, dtype, for_training = model.hf_config, dtype_name(model), trainer is not None
    check = partial(check_checkpoint, path, hf_config, dtype=dtype, for_training=for_training)
    manifest = from_first_rank(check, CheckpointError)
    if found := refusal(manifest.get("lora"), model.lora):
        raise CheckpointError(f"{path} {found}")
    if trainer is not None and trainer.options.distributed != manifest["distributed_optimizer"]:
        which = "with" if manifest["distributed_optimizer"] else "without"
        raise CheckpointError(f"{path} was saved {which} the distributed optimizer; resume {which} it.")
    state = checkpoint_state.sharded_state(model, trainer, is_loading=True)
    small: dict[str, Any] = {}

    def compare_and_read() -> None:
        missing = checkpoint_state.missing_keys(state, load_sharded_metadata(str(path)))
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} tensors that this run needs, such as {missing[0]}.")
        # Besides tensors and plain values, it makes the few classes of Megatron's core/safe_globals.py.
        small.update(torch.load(path / TRAINING_STATE, map_location="cpu", weights_only=True))
        if trainer is not None and (trainer.lr_schedule is None) != (small["trainer"]["lr_schedule"] is None):
            raise CheckpointError(f"{path} and this run do not both have a learning-rate schedule.")

    raise_together(failure_of(compare_and_read), CheckpointError)
    with megatron_calls():
        # What may be absent (Transformer Engine's states) is left as it is; all else is known to be there.
        read = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), _replicas())
        loaded = dist_checkpointing.load(state, str(path), read, strict="log_unexpected")
    checkpoint_state.apply(loaded, model, trainer)
    if trainer is not None:
        trainer.load_schedule_state(small["trainer"])
        if manifest["layout"] == asdict(model.options.layout) and manifest["world_size"] == get_world_size():
            checkpoint_state.apply_rank_random_state(small["random"][get_rank()])
    return small["client_state"]


def _replicas() -> torch.distributed.ProcessGroup:
    """The ranks that hold the same weights, among which Megatron divides what is to be written or read."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
