"""Checkpoints of the Megatron actor in Megatron's torch_dist format, readable at another TP × PP × DP.

A checkpoint is written beside its place and renamed into it once every rank has finished, so what a crash leaves behind
is never taken for one. See ``checkpoint_files`` for what is in it and ``checkpoint_folder`` for how many are kept.
"""

import math
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.megatron.checkpoint import folder as checkpoint_folder
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointError, CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint.load import load_checkpoint
from openrlhf_gtpo.megatron.checkpoint.save import PendingSave
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.megatron.parallel.host import device
from openrlhf_gtpo.megatron.train.trainer import Trainer


class Checkpoints:
    """The checkpoints of one folder. Every method but ``latest`` is called by all ranks, ``finish`` at the end of a run.

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
        self._pending: PendingSave | None = None

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
        self._pending = PendingSave(
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

        path = pending.finish()

        def put_in_order() -> None:
            checkpoint_folder.set_latest(self.folder, path.name)
            checkpoint_folder.rotate(self.folder, path.name, max_num=self.max_num, max_mem_gb=self.max_mem_gb)

        failure = failure_of(put_in_order) if torch.distributed.get_rank() == 0 else None
        sentence = f"The checkpoint {path} is written, but its folder could not be put in order: {failure}."
        raise_together(None if failure is None else sentence, CheckpointWriteError)

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
