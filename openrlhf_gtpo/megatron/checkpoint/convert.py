"""What each process does when a model is converted between Hugging Face's and Megatron's format."""

from pathlib import Path

import torch

from openrlhf_gtpo.megatron.checkpoint.export import save_hf
from openrlhf_gtpo.megatron.checkpoint.files import SIDE_FILES, CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint.load import load_checkpoint
from openrlhf_gtpo.megatron.checkpoint.save import save_checkpoint
from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout


def hf_to_megatron(source: str, destination: str, layout: Layout, dtype: str) -> None:
    """Load ``source`` at ``layout`` and write it as a checkpoint of weights (collective).

    Raises:
        ValueError: it could not be written, as the processes of a command report what a user can mend.
    """
    groups.initialize(layout, seed=0)
    model = load_model(source, ModelOptions(layout=layout, dtype=getattr(torch, dtype)), for_training=False)
    try:
        save_checkpoint(Path(destination), model, hf_source=source)
    except CheckpointWriteError as error:
        raise ValueError(str(error)) from error


def megatron_to_hf(source: str, destination: str, dtype: str) -> None:
    """Load the weights of the checkpoint ``source`` in one process and write them as a Hugging Face folder.

    Raises:
        ValueError: as in :func:`hf_to_megatron`.
    """
    groups.initialize(Layout(), seed=0)
    side_files = Path(source) / SIDE_FILES
    model = load_model(side_files, ModelOptions(dtype=getattr(torch, dtype)), with_weights=False)
    load_checkpoint(Path(source), model)
    try:
        save_hf(model, side_files, destination)
    except CheckpointWriteError as error:
        raise ValueError(str(error)) from error
