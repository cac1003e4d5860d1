"""The functions that ranks run in the tests of FP8: a model's values with and without it, training and checkpoints."""

from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.fp8.fp8 import EmulatedLinear
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel.host import megatron_calls
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support.checkpoint_program import train
from tests.support.logits_program import all_actions, on


def load(source: str, layout: Layout, fp8: Fp8Options | None, dtype: str = "float32", **overrides: Any) -> LoadedModel:
    return load_model(source, ModelOptions(layout, dtype=getattr(torch, dtype), fp8=fp8, overrides=overrides))


def values(model: LoadedModel, rows: list[list[int]]) -> Any:
    """(2, N) log-probs and entropies of the actions."""
    (statistics,) = schedule.forward(model, [all_actions(rows)])
    return torch.stack(statistics).numpy()


def statistics(source: str, layout: Layout, fp8: Fp8Options | None, rows: list[list[int]]) -> Any:
    """The model's values with ``fp8``."""
    with on(layout):
        return values(load(source, layout, fp8), rows)


def in_and_out(source: str, layout: Layout, fp8: Fp8Options, rows: list[list[int]]) -> list[Any]:
    """Values with ``fp8``, in high precision, and with ``fp8`` again; then those of a model that never had it."""
    with on(layout):
        model = load(source, layout, fp8)
        found = [values(model, rows)]
        assert model.fp8 is not None
        with model.fp8.high_precision():
            found.append(values(model, rows))
        found.append(values(model, rows))
        return [*found, values(load(source, layout, None), rows)]


def emulated_layers(source: str, layout: Layout, fp8: Fp8Options) -> list[str]:
    """Names of the linear layers of this stage that compute in FP8."""
    with on(layout):
        stage = load(source, layout, fp8).stage
        return [
            name.removesuffix(".fp8") for name, module in stage.named_modules() if isinstance(module, EmulatedLinear)
        ]


def _trainer(source: str, layout: Layout, fp8: Fp8Options | None, **overrides: Any) -> Trainer:
    return Trainer(load(source, layout, fp8, **overrides), OptimizerOptions(lr=5e-3))


def delayed_from_the_start(source: str, layout: Layout, rows: list[list[int]]) -> tuple[Any, list[list[float]]]:
    """True if the first values differ from those with uncalibrated scales; and per linear layer, the scale of its
    weight and the largest magnitude in this rank's shard of it."""
    with on(layout):
        model = load(source, layout, Fp8Options("emulated", "delayed"))
        assert model.fp8 is not None
        with model.fp8.high_precision():  # like an audit's first pass
            values(model, rows)
        schedule.forward(model, [])  # as on a replica without rows
        assert not model.fp8.calibrated
        model.fp8.calibrated = True
        blind = values(model, rows)
        model.fp8.calibrated = False
        first = values(model, rows)
        layers = [layer for layer in model.stage.modules() if isinstance(getattr(layer, "fp8", None), EmulatedLinear)]
        scales = [[float(layer.fp8.scale[1]), float(layer.weight.abs().max())] for layer in layers]
        return not (first == blind).all(), scales


def sharded_products(layout: Layout, cases: list[tuple[str, str]], *matrices: torch.Tensor) -> list[list[Any]]:
    """:func:`_sharded_product` of each (kind, recipe)."""
    with on(layout), megatron_calls():
        return [_sharded_product(layout, *case, *matrices) for case in cases]


def _sharded_product(
    layout: Layout, kind: str, recipe: str, input: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> list[Any]:
    """This rank's output, input gradient and weight gradient of a column- or row-parallel layer, from the whole
    ``weight`` (O, I), the whole ``input`` (T, I) and the whole ``gradient`` (T, O) of the output."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    def mine(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        return tensor.chunk(group.size(), dim)[group.rank()].contiguous()

    config = TransformerConfig(
        num_layers=1,
        hidden_size=128,
        num_attention_heads=2,
        use_cpu_initialization=True,
        sequence_parallel=layout.sequence_parallel,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
    )
    options: dict[str, Any] = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    column = kind == "column"
    if column:
        layer: Any = ColumnParallelLinear(input.shape[1], weight.shape[0], **options)
    else:
        options |= {"input_is_parallel": True, "skip_bias_add": False}
        layer = RowParallelLinear(input.shape[1], weight.shape[0], **options)
    layer.weight.data.copy_(mine(weight, 0 if column else 1))
    layer._forward_impl = EmulatedLinear(Fp8Options("emulated", recipe), layer._forward_impl).forward
    along = 0 if layout.sequence_parallel else None
    shares = (along, 1) if column else (1, along)  # the sharded dimensions of the input and the output
    x, dy = (t if dim is None else mine(t, dim) for t, dim in zip((input, gradient), shares, strict=True))
    x = x.unsqueeze(1).clone().requires_grad_()
    y, _ = layer(x)
    y.backward(dy.unsqueeze(1))
    return [tensor.detach().numpy() for tensor in (y.squeeze(1), x.grad.squeeze(1), layer.weight.grad)]


def scales_follow(source: str, layout: Layout, steps: int) -> list[list[list[float]]]:
    """All scales after each training step, by step, linear layer, and matrix (input, weight, gradient)."""
    with on(layout):
        trainer = _trainer(source, layout, Fp8Options("emulated", "delayed"))
        found = []
        for step in range(steps):
            train(trainer, range(step, step + 1))
            assert trainer.model.fp8 is not None and trainer.model.fp8.calibrated  # without a forward pass before it
            found.append([linear.scale.tolist() for linear in trainer.model.fp8._linears])
        return found


def save_and_resume(source: str, other: str, layout: Layout, folder: str) -> list[Any]:
    """The steps after a save, of a twin with other weights that loaded it, and of a twin that loaded it without FP8;
    then the first step of a twin whose checkpoint was made without FP8."""
    fp8 = Fp8Options("emulated", "delayed")
    with on(layout):
        trainer = _trainer(source, layout, fp8)
        train(trainer, range(2))
        Checkpoints(Path(folder) / "with", hf_source=source).save("step2", trainer, {})
        found: list[Any] = [train(trainer, range(2, 4))]
    for twin_fp8 in (fp8, None):
        with on(layout):
            twin = _trainer(other, layout, twin_fp8)
            Checkpoints(Path(folder) / "with").load(twin)
            found.append(train(twin, range(2, 4)))
            if twin_fp8 is None:
                Checkpoints(Path(folder) / "without", hf_source=source).save("step4", twin, {})
    with on(layout):
        twin = _trainer(other, layout, fp8)
        Checkpoints(Path(folder) / "without").load(twin)
        assert twin.model.fp8 is not None and not twin.model.fp8.calibrated
        return [*found, train(twin, range(4, 5))]


def trained(source: str, layout: Layout, fp8: Fp8Options | None, offload: bool, rows: list[list[int]]) -> Any:
    """Values after three steps; with ``offload``, everything is on the host between them."""
    with on(layout):
        trainer = _trainer(source, layout, fp8)
        mover = Offload(trainer)
        for step in range(3):
            train(trainer, range(step, step + 1))
            if offload:
                mover.optimizer()
                mover.parameters()
                mover.restore()
        return values(trainer.model, rows)
