"""The functions that ranks run in the tests of conversion: to a Megatron checkpoint and back to Hugging Face."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.megatron.checkpoint import export
from openrlhf_gtpo.megatron.checkpoint.checkpoints import PendingSave, load_checkpoint
from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support.logits_program import on

SHARD_BYTES = 64 * 2**10


def round_trips(layout: Layout, models: list[tuple[str, str, str]]) -> None:
    """Convert each (source, dtype, folder) to ``folder/megatron``, then to ``folder/hf``; groups are made once."""
    with on(layout):
        for source, dtype, folder in models:
            options = ModelOptions(layout=layout, dtype=getattr(torch, dtype))
            PendingSave(Path(folder) / "megatron", load_model(source, options), {}, source, {}).finish()
            model = load_model(source, options, with_weights=False)
            load_checkpoint(Path(folder) / "megatron", model)
            export.save_hf(model, Path(folder) / "megatron" / "hf", Path(folder) / "hf", shard_bytes=SHARD_BYTES)


def alone(function: Callable, *args: Any) -> None:
    """Run a command's function, which expects its process to end afterwards, and destroy the groups that it leaves."""
    try:
        function(*args)
    finally:
        groups.destroy()


def failing_export(source: str, layout: Layout, folder: str) -> tuple[str, list[str]]:
    """Export to a full disk; return the error message, and what is in ``folder`` afterwards."""

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with on(layout):
        model = load_model(source, ModelOptions(layout=layout, dtype=torch.float32))
        whole, export.save_file = export.save_file, fail
        try:
            export.save_hf(model, source, Path(folder) / "hf")
        except OSError as error:
            return str(error), os.listdir(folder)
        finally:
            export.save_file = whole
    return "written", os.listdir(folder)


def export_into(source: str, folder: str, shard_bytes: int) -> None:
    """Export into a folder, which may exist already."""
    with on(Layout()):
        model = load_model(source, ModelOptions(dtype=torch.float32))
        export.save_hf(model, source, folder, shard_bytes=shard_bytes)
