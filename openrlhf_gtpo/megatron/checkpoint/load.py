"""One checkpoint from a folder to the ranks of a model, at whatever layout they have."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from torch.distributed import get_rank, get_world_size

from openrlhf_gtpo.megatron.checkpoint import files as checkpoint_files
from openrlhf_gtpo.megatron.checkpoint import state as checkpoint_state
from openrlhf_gtpo.megatron.checkpoint.files import CheckpointError
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.agreement import failure_of, from_first_rank, raise_together
from openrlhf_gtpo.megatron.parallel.host import megatron_calls
from openrlhf_gtpo.megatron.train.trainer import Trainer


def load_checkpoint(path: Path, target: Trainer | LoadedModel) -> dict[str, Any]:
    """Load one checkpoint into a trainer, or its weights into a model (collective); the saved client state.

    At the layout and number of processes it was written at, training goes on bit for bit; at others the random states
    stay as they are.

    Raises:
        CheckpointError: it is not there, not whole or of another model; nothing has changed.
    """
    model, trainer = checkpoint_state.model_and_trainer(target)
    check = partial(
        checkpoint_files.check_checkpoint,
        path,
        model.bridge.hf_config,
        dtype=checkpoint_state.dtype_name(model),
        for_training=trainer is not None,
    )
    manifest = from_first_rank(check, CheckpointError)
    if trainer is not None and trainer.options.distributed != manifest["distributed_optimizer"]:
        which = "distributed" if manifest["distributed_optimizer"] else "plain"
        raise CheckpointError(f"{path} holds the states of a {which} optimizer; resume with a {which} one.")
    state = checkpoint_state.sharded_state(model, trainer, is_loading=True)
    kept: dict[str, Any] = {}

    def compare_and_read() -> None:
        missing = checkpoint_state.missing_keys(state, load_sharded_metadata(str(path)))
        if missing:
            raise CheckpointError(f"{path} lacks {len(missing)} tensors that this run needs, such as {missing[0]}.")
        kept.update(torch.load(path / checkpoint_files.TRAINING_STATE, map_location="cpu", weights_only=False))
        if trainer is not None and (trainer.lr_schedule is None) != (kept["trainer"]["lr_schedule"] is None):
            raise CheckpointError(f"{path} and this run do not both have a learning-rate schedule.")

    raise_together(failure_of(compare_and_read), CheckpointError)
    with megatron_calls():
        # What may be absent (Transformer Engine's states) is left as it is; all else is known to be there.
        loaded = dist_checkpointing.load(state, str(path), strict="log_unexpected")
    checkpoint_state.apply(loaded, model, trainer)
    if trainer is not None:
        trainer.load_schedule_state(kept["trainer"])
        if manifest["layout"] == asdict(model.options.layout) and manifest["world_size"] == get_world_size():
            checkpoint_state.apply_random_state(kept["random"][get_rank()])
    return kept["client_state"]
