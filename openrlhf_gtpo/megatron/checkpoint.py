"""Checkpoints of the Megatron actor in Megatron's torch_dist format, readable at another TP × PP × DP.

A checkpoint is written beside its place and renamed into it once every rank has finished, so what a crash leaves behind
is never taken for one. See ``checkpoint_files`` for what is in it and ``checkpoint_folder`` for how many are kept.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from torch.distributed import get_rank, get_world_size

from openrlhf_gtpo.megatron import checkpoint_files, checkpoint_folder, checkpoint_state
from openrlhf_gtpo.megatron.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.megatron.checkpoint_files import CheckpointError, CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint_writer import RankWrite, ThreadStrategy
from openrlhf_gtpo.megatron.host import device, megatron_calls
from openrlhf_gtpo.megatron.model import LoadedModel
from openrlhf_gtpo.megatron.side_files import copy_side_files
from openrlhf_gtpo.megatron.trainer import Trainer


class Checkpoints:
    """The checkpoints of one folder. Every method but ``latest`` is called by all ranks.

    Args:
        folder: seen by all ranks.
        asynchronous: ``save`` returns once the state is copied to host memory; it is written while training goes on.
        max_num: regular checkpoints to keep; the disk holds one more while it is written.
        max_mem_gb: their greatest size, with the best one's, in units of 2^30 bytes.
        hf_source: the model's folder or name on the Hub, whose tokenizer and configuration each checkpoint carries;
            None where nothing will be converted back.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        asynchronous: bool = False,
        max_num: int = 3,
        max_mem_gb: float = math.inf,
        hf_source: str | Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.asynchronous = asynchronous
        self.max_num = max_num
        self.max_mem_gb = max_mem_gb
        self.hf_source = hf_source
        self._pending: _Save | None = None

    def save(
        self,
        tag: str,
        trainer: Trainer,
        client_state: dict[str, Any],
        *,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Write the checkpoint ``tag``, and remove what is then too much.

        Args:
            client_state: whatever else the run goes on from; picklable, the first rank's is kept.
            metric_value: of this checkpoint, greater is better; the worst go first.

        Raises:
            CheckpointWriteError: this or the previous asynchronous save failed; earlier checkpoints are as they were.
            CheckpointError: ``tag`` cannot name a folder.
        """
        checkpoint_folder.check_tag(tag)
        self.finish()
        self._pending = _Save(
            self.folder / tag,
            trainer,
            client_state,
            hf_source=self.hf_source,
            metric={"key": metric_key, "value": metric_value},
            asynchronous=self.asynchronous,
            whole_folder=True,
        )
        if not self.asynchronous:
            self.finish()

    def poll(self) -> bool:
        """Publish the asynchronous save if all ranks have finished writing; True while one is still under way.

        Raises:
            CheckpointWriteError: the save failed.
        """
        if self._pending is None:
            return False
        done = torch.tensor(int(self._pending.done()), device=device())
        torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MIN)
        if done:
            self.finish()
        return not done

    def finish(self) -> None:
        """Wait for the asynchronous save, if there is one, and publish it.

        Raises:
            CheckpointWriteError: it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None

        def publish(path: Path) -> None:
            checkpoint_folder.set_latest(self.folder, path.name)
            checkpoint_folder.rotate(self.folder, path.name, max_num=self.max_num, max_mem_gb=self.max_mem_gb)

        pending.finish(publish)

    def latest(self) -> str | None:
        """The tag of the last checkpoint that was written whole, or None."""
        return checkpoint_folder.latest(self.folder)

    def load(self, target: Trainer | LoadedModel, tag: str | None = None) -> dict[str, Any]:
        """Load the checkpoint ``tag``, or the latest, into a trainer or a model alone; the saved client state.

        Raises:
            CheckpointError: it is not there, not whole or of another model; nothing has changed.
        """
        self.finish()

        def find() -> Path:
            found = checkpoint_folder.latest(self.folder) if tag is None else tag
            if found is None:
                raise CheckpointError(f"There is no checkpoint in {self.folder}.")
            return checkpoint_folder.locate(self.folder, found)

        return load_checkpoint(from_first_rank(find, CheckpointError), target)


def save_checkpoint(path: Path, model: LoadedModel, *, hf_source: str | Path | None = None) -> None:
    """Write one checkpoint of weights alone (collective).

    Raises:
        CheckpointWriteError: it could not be written; nothing is left behind under ``path``.
    """
    save = _Save(path, model, {}, hf_source=hf_source, metric={}, asynchronous=False, whole_folder=False)
    save.finish()


def load_checkpoint(path: Path, target: Trainer | LoadedModel) -> dict[str, Any]:
    """Load one checkpoint into a trainer, or its weights into a model (collective); the saved client state.

    At the layout and number of processes it was written at, training goes on bit for bit; at others the random states
    stay as they are.

    Raises:
        CheckpointError: it is not there, not whole or of another model; nothing has changed.
    """
    model, trainer = _model_and_trainer(target)
    check = partial(
        checkpoint_files.check_checkpoint,
        path,
        model.bridge.hf_config,
        dtype=_dtype(model),
        for_training=trainer is not None,
    )
    manifest = from_first_rank(check, CheckpointError)
    state = checkpoint_state.sharded_state(model, trainer, is_loading=True)
    kept: dict[str, Any] = {}

    def compare_and_read() -> None:
        missing = checkpoint_state.missing_keys(state, load_sharded_metadata(str(path)))
        if missing:
            raise CheckpointError(f"{path} has no {missing[0]}, nor {len(missing) - 1} more that this run needs.")
        kept.update(torch.load(path / checkpoint_files.TRAINING_STATE, map_location="cpu", weights_only=False))
        if trainer is not None and (trainer.lr_schedule is None) != (kept["trainer"]["lr_schedule"] is None):
            raise CheckpointError(f"{path} and this run do not both have a learning-rate schedule.")

    raise_together(failure_of(compare_and_read), CheckpointError)
    with megatron_calls():
        # What may be absent (Transformer Engine's states) is left as it is; all else is known to be there.
        loaded = dist_checkpointing.load(state, str(path), strict="log_unexpected")
    checkpoint_state.apply(loaded, model, trainer)
    if trainer is not None:
        checkpoint_state.apply_training_state(kept["trainer"], trainer)
        if manifest["layout"] == asdict(model.options.layout) and manifest["world_size"] == get_world_size():
            checkpoint_state.apply_random_state(kept["random"][get_rank()])
    return kept["client_state"]


class _Save:
    """One checkpoint on its way to ``path`` (collective)."""

    def __init__(
        self,
        path: Path,
        target: Trainer | LoadedModel,
        client_state: dict[str, Any],
        *,
        hf_source: str | Path | None,
        metric: dict[str, Any],
        asynchronous: bool,
        whole_folder: bool,
    ) -> None:
        self._path = path
        model, trainer = _model_and_trainer(target)
        begin = partial(checkpoint_folder.begin, path, whole_folder=whole_folder)
        self._temporary = from_first_rank(begin, CheckpointWriteError)
        self._contents = {
            "model": checkpoint_files.describe_model(model.bridge.hf_config),
            "dtype": _dtype(model),
            "layout": asdict(model.options.layout),
            "world_size": get_world_size(),
            "optimizer": trainer is not None,
            "metric": metric,
        }
        strategy = ThreadStrategy()
        state = checkpoint_state.sharded_state(model, trainer, is_loading=False)
        with megatron_calls():
            request = dist_checkpointing.save(
                state,
                str(self._temporary),
                strategy,
                async_sharded_save=True,
                # Only data-parallel ranks that gather no optimizer states would differ, in that.
                preprocess_common_before_consistancy_check=lambda common: {},
            )
        del state  # the gathered optimizer states, which the writer has its own references to
        self._finalize = request.finalize_fns
        randoms: list[Any] = [None] * get_world_size()
        torch.distributed.all_gather_object(randoms, checkpoint_state.random_state())
        small = {
            "client_state": client_state,
            "trainer": None if trainer is None else checkpoint_state.training_state(trainer),
            "random": randoms,
        }
        self._failure = failure_of(partial(self._write_small_files, small, hf_source)) if get_rank() == 0 else None
        self._write = RankWrite(strategy.writer, asynchronous=asynchronous)

    def done(self) -> bool:
        """True when this rank has nothing left to write."""
        return self._write.done()

    def finish(self, then: Callable[[Path], None] = lambda path: None) -> None:
        """Wait for every rank, give the checkpoint its name, and call ``then`` with it on the first rank.

        Raises:
            CheckpointWriteError: some rank could not write its part.
        """
        failure = self._write.join() or self._failure
        raise_together(None if failure is None else self._sentence(failure), CheckpointWriteError)
        with megatron_calls():
            for finalize in self._finalize:
                finalize()

        def publish() -> None:
            checkpoint_files.write_manifest(self._temporary, self._contents)
            checkpoint_folder.publish(self._temporary, self._path)
            then(self._path)

        failure = failure_of(publish) if get_rank() == 0 else None
        raise_together(None if failure is None else self._sentence(failure), CheckpointWriteError)

    def _sentence(self, failure: str) -> str:
        return f"The checkpoint {self._path} could not be written: {failure}; earlier ones are as they were."

    def _write_small_files(self, state: dict[str, Any], hf_source: str | Path | None) -> None:
        torch.save(state, self._temporary / checkpoint_files.TRAINING_STATE)
        if hf_source is not None:
            side_files = self._temporary / checkpoint_files.SIDE_FILES
            side_files.mkdir()
            copy_side_files(hf_source, side_files)


def _model_and_trainer(target: Trainer | LoadedModel) -> tuple[LoadedModel, Trainer | None]:
    return (target.model, target) if isinstance(target, Trainer) else (target, None)


def _dtype(model: LoadedModel) -> str:
    return str(model.options.dtype).removeprefix("torch.")
