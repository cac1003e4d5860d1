"""One checkpoint from the ranks of a model to a folder: staged, written, then given its name."""

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed import get_rank, get_world_size

from openrlhf_gtpo.megatron.checkpoint import files as checkpoint_files
from openrlhf_gtpo.megatron.checkpoint import folder as checkpoint_folder
from openrlhf_gtpo.megatron.checkpoint import state as checkpoint_state
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint.side_files import copy_side_files
from openrlhf_gtpo.megatron.checkpoint.writer import RankWrite, ThreadStrategy
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.megatron.parallel.host import megatron_calls
from openrlhf_gtpo.megatron.train.trainer import Trainer


def save_checkpoint(path: Path, model: LoadedModel, *, hf_source: str | Path | None = None) -> None:
    """Write one checkpoint of weights alone (collective).

    Raises:
        CheckpointWriteError: it could not be written; nothing is left behind under ``path``.
    """
    save = PendingSave(path, model, {}, hf_source=hf_source, metric={}, asynchronous=False, whole_folder=False)
    save.finish()


class PendingSave:
    """One checkpoint on its way to ``path`` (collective); see ``Checkpoints`` for the arguments.

    Args:
        whole_folder: the folder of ``path`` holds checkpoints alone.

    Raises:
        CheckpointWriteError: no folder can be made there.
    """

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
        model, trainer = checkpoint_state.model_and_trainer(target)
        begin = partial(checkpoint_folder.begin, path, whole_folder=whole_folder)
        self._temporary = from_first_rank(begin, CheckpointWriteError)
        self._contents = {
            "model": checkpoint_files.describe_model(model.bridge.hf_config),
            "dtype": checkpoint_state.dtype_name(model),
            "layout": asdict(model.options.layout),
            "world_size": get_world_size(),
            "optimizer": trainer is not None,
            "distributed_optimizer": trainer is not None and trainer.options.distributed,
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
            "trainer": None if trainer is None else trainer.schedule_state(),
            "random": randoms,
        }
        self._failure = failure_of(partial(self._write_small_files, small, hf_source)) if get_rank() == 0 else None
        self._write = RankWrite(strategy.writer, asynchronous=asynchronous)

    def done(self) -> bool:
        """True when this rank has nothing left to write."""
        return self._write.done()

    def finish(self) -> Path:
        """Wait for every rank, give the checkpoint its name, and return where it is.

        Raises:
            CheckpointWriteError: some rank could not write its part; nothing is left of it.
        """
        self._agree(self._write.join() or self._failure)
        with megatron_calls():
            for finalize in self._finalize:
                finalize()
        self._agree(failure_of(self._publish) if get_rank() == 0 else None)
        return self._path

    def _publish(self) -> None:
        checkpoint_files.write_manifest(self._temporary, self._contents)
        checkpoint_folder.publish(self._temporary, self._path)

    def _agree(self, failure: str | None) -> None:
        sentence = f"The checkpoint {self._path} could not be written: {failure}; earlier ones are as they were."
        try:
            raise_together(None if failure is None else sentence, CheckpointWriteError)
        except CheckpointWriteError:
            if get_rank() == 0:  # all have ended their writing by now
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _write_small_files(self, state: dict[str, Any], hf_source: str | Path | None) -> None:
        torch.save(state, self._temporary / checkpoint_files.TRAINING_STATE)
        if hf_source is not None:
            side_files = self._temporary / checkpoint_files.SIDE_FILES
            side_files.mkdir()
            copy_side_files(hf_source, side_files)
