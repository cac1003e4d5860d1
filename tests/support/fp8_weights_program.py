"""The functions that ranks run in the tests of FP8 primary weights: training, checkpoints, offloading and exports."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.checkpoint.export import save_hf
from openrlhf_gtpo.megatron.fp8 import weights as fp8_weights
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support.checkpoint_program import train
from tests.support.fp8_program import load, values
from tests.support.logits_program import on

# Clipping scales by the norm of all gradients, whose last bit depends on the buffers that hold them.
OPTIONS = OptimizerOptions(lr=5e-3, max_norm=0.0)


def make(source: str, layout: Layout, fp8: Fp8Options | None) -> Trainer:
    return Trainer(load(source, layout, fp8, "bfloat16"), OPTIONS)


def trained(
    source: str, layout: Layout, options: list[Fp8Options], rows: list[list[int]], steps: int
) -> list[dict[str, Any]]:
    """Values before and after training with each of the options, and what each step reports."""
    found = []
    with on(layout):
        for fp8 in options:
            model = load(source, layout, fp8, "bfloat16")
            before = values(model, rows)
            reports = train(Trainer(model, OPTIONS), range(steps))
            found.append({"before": before, "reports": reports, "after": values(model, rows)})
    return found


def weight_bytes(source: str, layout: Layout, options: list[Fp8Options]) -> list[int]:
    """The bytes in which this rank keeps its parameters, for a trainer with each of the options."""
    with on(layout):
        return [bytes_of_weights(make(source, layout, fp8)) for fp8 in options]


def exact_values_left(source: str, layout: Layout, fp8: Fp8Options) -> int:
    """How many of a trainer's parameters still have the exact values from which its optimizer was made."""
    with on(layout):
        parameters = make(source, layout, fp8).model.stage.parameters()
        return sum(hasattr(parameter, "get_high_precision_init_val") for parameter in parameters)


def bytes_of_weights(trainer: Trainer) -> int:
    """The bytes in which this rank keeps its parameters; a shared storage counts once."""
    tensors = [part for parameter in trainer.model.stage.parameters() for part in fp8_weights.memory_of(parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def leaving(source: str, layout: Layout, fp8: Fp8Options) -> dict[str, torch.Tensor]:
    """Full tensors as engines get them, before any training."""
    with on(layout):
        weights = FullWeights(load(source, layout, fp8, "bfloat16"), 2**20)
        return {name: tensor.clone() for name, tensor in weights.tensors()}


def save_and_resume(source: str, other: str, layout: Layout, folder: str, recipe: str, primary: bool) -> list[Any]:
    """The steps after a save, with FP8 primary weights or BF16 ones, and those of two twins with other weights that
    loaded it: one with FP8 primary weights, one with BF16 weights."""
    with on(layout):
        trainer = make(source, layout, Fp8Options("emulated", recipe, primary_weights=primary))
        train(trainer, range(2))
        Checkpoints(Path(folder), hf_source=source).save("step2", trainer, {})
        found: list[Any] = [train(trainer, range(2, 4))]
    for primary_weights in (True, False):
        with on(layout):
            twin = make(other, layout, Fp8Options("emulated", recipe, primary_weights=primary_weights))
            Checkpoints(Path(folder)).load(twin)
            found.append(train(twin, range(2, 4)))
    return found


def moved(source: str, layout: Layout, fp8: Fp8Options, rows: list[list[int]]) -> Any:
    """Values after three steps with everything on the host between them, and the bytes of weights left meanwhile."""
    with on(layout):
        trainer = make(source, layout, fp8)
        mover = Offload(trainer)
        left = []
        for step in range(3):
            train(trainer, range(step, step + 1))
            mover.optimizer()
            mover.parameters()
            left.append(bytes_of_weights(trainer))
            mover.restore()
        return values(trainer.model, rows), left


def exported(source: str, layout: Layout, fp8: Fp8Options, folder: str, rows: list[list[int]]) -> list[Any]:
    """Values of a trained model, and of its Hugging Face exports with and without its trainer, loaded again in FP8;
    then the largest error of the second export (the engines' weights), over each tensor's largest value in the first.
    """
    with on(layout):
        trainer = make(source, layout, fp8)
        train(trainer, range(2))
        found: list[Any] = [values(trainer.model, rows)]
        save_hf(trainer, source, Path(folder) / "exact")
        save_hf(trainer.model, source, Path(folder) / "rounded")
    for name in ("exact", "rounded"):
        with on(layout):
            found.append(values(load(str(Path(folder) / name), layout, fp8, "bfloat16"), rows))
    exact, rounded = (load_file(Path(folder) / name / "model.safetensors") for name in ("exact", "rounded"))
    return [*found, max(float((exact[k] - rounded[k]).abs().max() / exact[k].abs().max()) for k in exact)]


def switched_off(source: str, layout: Layout, fp8: Fp8Options, folder: str, rows: list[list[int]]) -> list[Any]:
    """Values with FP8, in high precision, and with FP8 again; then without FP8, from its rounded weights."""
    with on(layout):
        model = load(source, layout, fp8, "bfloat16")
        found = [values(model, rows)]
        assert model.fp8 is not None
        with model.fp8.high_precision():
            found.append(values(model, rows))
        found.append(values(model, rows))
        save_hf(model, source, folder)
    with on(layout):
        return [*found, values(load(folder, layout, None, "bfloat16"), rows)]
