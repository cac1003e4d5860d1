"""What a checkpoint holds: weights and optimizer as Megatron shards them, and the small state around them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject

from openrlhf_gtpo.megatron.fp8.fp8 import STATE
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision, is_fp8
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import megatron_calls, on_cuda
from openrlhf_gtpo.megatron.train.trainer import Trainer

# Optimizer states in the shape of their parameters, which any TP × PP × DP can read; Megatron's other format can be
# read at another DP alone. They are gathered over the data-parallel ranks on the first of them (in its host memory, 12
# bytes a parameter of its TP × PP share), and on loading each rank reads that much.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
# Absent from checkpoints of hosts without Transformer Engine (its own state), and of runs without FP8 (scales).
_OPTIONAL = ("_extra_state", STATE)


def model_and_trainer(target: Trainer | LoadedModel) -> tuple[LoadedModel, Trainer | None]:
    """A trainer with its model, or a model without one."""
    return (target.model, target) if isinstance(target, Trainer) else (target, None)


def dtype_name(model: LoadedModel) -> str:
    """The dtype of its parameters, such as "bfloat16"."""
    return str(model.options.dtype).removeprefix("torch.")


def sharded_state(model: LoadedModel, trainer: Trainer | None, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of the model and, if there is a trainer, its optimizer (collective)."""
    with megatron_calls():
        state = {"model": model.stage.sharded_state_dict(metadata=dict(METADATA))}
        if trainer is not None:
            _allocate(trainer.optimizer)
            state["optimizer"] = trainer.optimizer.sharded_state_dict(
                state["model"], is_loading=is_loading, metadata=dict(METADATA)
            )
            _own_steps(trainer.optimizer)
        # Now that the optimizer has found its parameters among them.
        read = in_high_precision if trainer is None or is_loading else trainer.exact_weight
        for part in _sharded_parts(state["model"]):
            if is_fp8(part.data):
                part.data = read(part.data)
        return state


def missing_keys(state: dict[str, Any], stored: Any) -> list[str]:
    """Keys of ``state`` that a checkpoint with the keys ``stored`` lacks, those that may be absent left out."""
    wanted = {part.unique_key if isinstance(part, ShardedObject) else part.key for part in _sharded_parts(state)}
    return sorted(key for key in wanted - set(stored) if not _may_be_absent(key))


def apply(loaded: dict[str, Any], model: LoadedModel, trainer: Trainer | None) -> None:
    """Put what Megatron has read for :func:`sharded_state` into place."""
    with megatron_calls(), torch.no_grad():
        unfit = model.stage.load_state_dict(loaded["model"], strict=False)
        wrong = [key for key in (*unfit.missing_keys, *unfit.unexpected_keys) if not _may_be_absent(key)]
        assert not wrong, f"keys were compared before anything was read: {wrong}"
        if trainer is not None:
            parts = trainer.optimizer.chained_optimizers
            states = [loaded["optimizer"][i] for i in range(len(parts))] if len(parts) > 1 else [loaded["optimizer"]]
            for part, state in zip(parts, states, strict=True):
                _load_optimizer(part, state)
            _own_steps(trainer.optimizer)
            if model.options.fp8_primary_weights:
                # What FP8 makes of the float32 weights, rather than of what it made of them before.
                for part in parts:
                    part._copy_main_params_to_model_params()
                trainer.ddp.start_param_sync(force_sync=True)


def random_state() -> dict[str, Any]:
    """The state of every generator that training may draw from on this rank."""
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
        state["megatron"] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state


def apply_random_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`random_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if on_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _may_be_absent(key: str) -> bool:
    return any(part in key for part in _OPTIONAL)


def _sharded_parts(state: dict[str, Any]) -> Iterator[Any]:
    return (part for part in nested_values(state) if isinstance(part, ShardedBase))


def _allocate(optimizer: Any) -> None:
    """Make the states of an optimizer that has not stepped, without which Megatron can neither save nor load it."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # a rank may have no parameters to train
            part.init_state_fn(part.optimizer, part.config)
    for state in _states(optimizer):
        state.setdefault("step", torch.tensor(0.0))


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load one of Megatron's optimizers; its moments last, as the distributed one looks for torch's step counters
    among them, where it has not put them."""
    moments = state.pop("param_state", None)
    if moments is None and _states(optimizer):
        # Megatron does not write a step count of 0, and torch's Adam does not start without one. Can go once it does
        # (megatron-core 0.16.1, optimizer/optimizer.py, sharded_state_dict: ``if step``).
        state.get("optimizer", state)["state"].setdefault("common_step", torch.tensor(0.0))
    optimizer.load_state_dict(state)
    if moments is None:
        return
    steps = [(state, state.pop("step")) for state in _states(optimizer)]
    optimizer.load_parameter_state_from_fully_reshardable(moments)
    for state, step in steps:
        state["step"] = step


def _own_steps(optimizer: Any) -> None:
    """Give each parameter a step counter of its own: Megatron hands all of them one, which each would then advance
    (megatron-core 0.16.1, optimizer/distrib_optimizer.py, DistributedOptimizer.load_state_dict)."""
    for state in _states(optimizer):
        state["step"] = state["step"].clone()


def _states(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """The parameters' states in torch's AdamW, which counts steps in each of them; none of fused optimizers."""
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [state for adam in inner if isinstance(adam, torch.optim.Adam) for state in adam.state.values()]
