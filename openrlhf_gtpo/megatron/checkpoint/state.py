"""The contents of a checkpoint: weights and optimizer as Megatron shards them, and the small state around them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from openrlhf_gtpo.megatron.fp8.fp8 import STATE
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision, is_fp8
from openrlhf_gtpo.megatron.model.adapters import is_adapter
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import megatron_calls, on_cuda
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.platform.random_state import apply_random_state, random_state

# The distributed optimizer's states as parts of their whole parameters' states, see ``_own_boxes``.
METADATA = {"distrib_optim_sharding_type": "fully_sharded_model_space", "chained_optim_avoid_prefix": True}
# Absent from checkpoints of hosts without Transformer Engine (its own state), and of runs without FP8 (scales).
_OPTIONAL = ("_extra_state", STATE)


def model_and_trainer(target: Trainer | LoadedModel) -> tuple[LoadedModel, Trainer | None]:
    """A trainer with its model, or a model without one."""
    return (target.model, target) if isinstance(target, Trainer) else (target, None)


def dtype_name(model: LoadedModel) -> str:
    """The dtype of the model's parameters, such as "bfloat16"."""
    return str(model.options.dtype).removeprefix("torch.")


def sharded_state(model: LoadedModel, trainer: Trainer | None, *, is_loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of the model, or its adapters if it has any, and, if there is a trainer, its
    optimizer (collective)."""
    with megatron_calls():
        if trainer is not None:
            trainer.gather_parameters()
        state = {"model": model.stage.sharded_state_dict(metadata=dict(METADATA))}
        if model.lora is not None:
            state["model"] = {key: part for key, part in state["model"].items() if is_adapter(key)}
        if trainer is not None:
            _allocate(trainer.optimizer)
            state["optimizer"] = trainer.optimizer.sharded_state_dict(
                state["model"], is_loading=is_loading, metadata=dict(METADATA)
            )
            _own_steps(trainer.optimizer)
        # Only now that the optimizer has found its parameters among them.
        read = in_high_precision if trainer is None or is_loading else trainer.exact_weight
        for part in _sharded_parts(state["model"]):
            if is_fp8(part.data):
                part.data = read(part.data)
        return state


def missing_keys(state: dict[str, Any], stored: Any) -> list[str]:
    """Keys of ``state`` that a checkpoint with the keys ``stored`` lacks, except those that may be absent."""
    needed = {part.unique_key if isinstance(part, ShardedObject) else part.key for part in _sharded_parts(state)}
    return sorted(key for key in needed - set(stored) if not _may_be_absent(key))


def apply(loaded: dict[str, Any], model: LoadedModel, trainer: Trainer | None) -> None:
    """Put what Megatron has read for :func:`sharded_state` into place."""
    with megatron_calls(), torch.no_grad():
        unfit = model.stage.load_state_dict(loaded["model"], strict=False)
        missing = [key for key in unfit.missing_keys if model.lora is None or is_adapter(key)]
        wrong = [key for key in (*missing, *unfit.unexpected_keys) if not _may_be_absent(key)]
        assert not wrong, f"keys were compared before anything was read: {wrong}"
        if trainer is not None:
            parts = trainer.optimizer.chained_optimizers
            states = [loaded["optimizer"][i] for i in range(len(parts))] if len(parts) > 1 else [loaded["optimizer"]]
            for part, state in zip(parts, states, strict=True):
                _load_optimizer(part, state)
            _own_steps(trainer.optimizer)
            if model.options.fp8_primary_weights:
                # From the float32 weights, not from the FP8 ones made of them before.
                for part in parts:
                    part._copy_main_params_to_model_params()
                trainer.ddp.start_param_sync()
                trainer.gather_parameters()


def rank_random_state() -> dict[str, Any]:
    """The state of every generator that training may draw from on this rank, Megatron's own among them."""
    tracker = {"megatron": tensor_parallel.get_cuda_rng_tracker().get_states()} if on_cuda() else {}
    return random_state() | tracker


def apply_rank_random_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`rank_random_state`."""
    apply_random_state(state)
    if on_cuda() and "megatron" in state:
        tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _may_be_absent(key: str) -> bool:
    return any(part in key for part in _OPTIONAL)


def _sharded_parts(state: dict[str, Any]) -> Iterator[Any]:
    return (part for part in nested_values(state) if isinstance(part, ShardedBase))


def _allocate(optimizer: Any) -> None:
    """Create the states of an optimizer that has not stepped; without them Megatron can neither save nor load it."""
    for part in optimizer.chained_optimizers:
        if part.optimizer is not None:  # a rank may have no parameters to train
            part.init_state_fn(part.optimizer, part.config)
    for state in _states(optimizer):
        state.setdefault("step", torch.tensor(0.0))


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a plain optimizer, or what Megatron keeps beside the distributed optimizer's states, which were read in
    place. Torch's Adam counts a plain optimizer's steps in its states, Transformer Engine's in its groups; each
    resumes from the other's checkpoint."""
    plain, saved, inner = state.pop("param_state", None) is None, state.get("optimizer", state), optimizer.optimizer
    # Megatron 0.19.2 finds a saved group by its peak rate too, which is this run's own.
    own = {"max_lr": optimizer.config.lr, "min_lr": optimizer.config.min_lr}
    saved["param_groups"] = [group | own for group in saved["param_groups"]]
    counted = [group["step"] for group in saved["param_groups"] if "step" in group]
    # Megatron does not write a count of 0, and torch's Adam needs one to start. Can go once Megatron does
    # (megatron-core 0.16.1, 0.19.2: optimizer/optimizer.py, sharded_state_dict, ``if step``).
    steps = saved.get("state", {}).get("common_step", counted[0] if counted else 0)
    if plain and isinstance(inner, torch.optim.Adam):
        saved["state"]["common_step"] = torch.tensor(float(steps))
    elif inner is not None:
        saved.get("state", {}).pop("common_step", None)
        saved["param_groups"] = [{**inner.defaults, **group, "step": int(steps)} for group in saved["param_groups"]]
    optimizer.load_state_dict(state)


def _own_boxes(
    optimizer: DistributedOptimizer, model_state: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[int, ShardedTensor]:
    """This rank's share of the states of a distributed optimizer, in place: it writes and reads nothing else.

    A rank owns a flat range of each parameter, even if that cuts rows. The range is a few boxes. Because they are
    boxes of the whole parameter's state, any TP × PP × DP finds its own part. Megatron's "fully_reshardable" allows
    that too, but gathers the states on one rank. Its formats that gather nothing are "dp_reshardable", tied to the
    layout of its buffers, and "fully_sharded_model_space", replaced by this one: it writes flat ranges, which
    ``ShardedTensor`` of megatron-core 0.16.1 and 0.19.2 refuses.
    """
    places = {part.data: part for part in _sharded_parts(model_state) if not isinstance(part, ShardedObject)}
    boxes = []
    for parameter in optimizer.model_param_gbuf_map:
        owned = optimizer._get_model_param_range_map(parameter)["param"]
        states = optimizer._get_main_param_and_optimizer_states(parameter)
        states.pop("step", None)  # one for all parameters, beside their states
        place = replace(places[parameter], data=torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
        # A factory's parts, gate and up projection, lie in different places of the whole.
        for part in nested_values(place.build()) if isinstance(place, ShardedTensorFactory) else [place]:
            assert part.data.is_contiguous(), f"{part.key} is not a flat range of its parameter"
            first = part.data.storage_offset()
            shape = (1,) * part.prepend_axis_num + part.local_shape
            start, stop = max(owned.start - first, 0), min(owned.end - first, part.data.numel())
            for begin, offset, size in split_into_boxes(shape, start, stop):
                begin += first - owned.start
                for name, state in states.items():
                    boxes.append(
                        ShardedTensor(
                            f"optimizer.state.{name}.{part.key}",
                            state.detach()[begin : begin + math.prod(size)].view(size),
                            state.dtype,
                            local_shape=size,
                            global_shape=part.global_shape,
                            global_offset=tuple(map(sum, zip(part.global_offset, offset, strict=True))),
                            axis_fragmentations=None,
                            replica_id=(*part.replica_id[:2], 0),  # of all replicas, only this one has it
                            allow_shape_mismatch=part.allow_shape_mismatch,
                        )
                    )
    return dict(enumerate(boxes))


DistributedOptimizer.sharded_param_state_fs_model_space = _own_boxes


def split_into_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Split the flat range [start, stop) of a tensor into at most 2 · dimensions - 1 boxes; yield each one's first
    element in the flat tensor, its offset and its size, in order."""
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]  # elements of one step along each axis
    while start < stop:
        axis = next(i for i, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        offset = tuple(start // row % extent for row, extent in zip(rows, shape, strict=True))
        count = min(shape[axis] - offset[axis], (stop - start) // rows[axis])
        yield start, offset, (1,) * axis + (count, *shape[axis + 1 :])
        start += count * rows[axis]


def _own_steps(optimizer: Any) -> None:
    """Give each parameter a step counter of its own: Megatron gives them one in common, which each would then advance
    (megatron-core 0.16.1, 0.19.2: optimizer/distrib_optimizer.py, load_state_dict)."""
    for state in _states(optimizer):
        state["step"] = state["step"].clone()


def _states(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """The parameters' states in torch's AdamW, which counts steps in each of them; none for fused optimizers."""
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [state for adam in inner if isinstance(adam, torch.optim.Adam) for state in adam.state.values()]
