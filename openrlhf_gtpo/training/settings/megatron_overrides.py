"""Values of ``--megatron.override`` and ``--megatron.ddp FIELD=VALUE`` for Megatron's ``TransformerConfig`` and
``DistributedDataParallelConfig``.

Megatron is imported only if needed, so that a command line without these flags does not wait for it.
"""

import dataclasses
import difflib
import importlib
import typing
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.megatron.parallel.layout import SIZES

# Fields that would silently change what is trained, by remedy or reason. The user may set all others.
_SILENT = {
    "it comes from the checkpoint's config.json": (
        "num_layers layernorm_epsilon rotary_interleaved softmax_scale window_size"
    ),
    "the engines route as the checkpoint's config.json says": (
        "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_expert_capacity_factor "
        "moe_input_jitter_eps"
    ),
    # Megatron multiplies the router's own losses by their tokens to make up for a division of the whole gradient that
    # the policy's loss has already done (megatron-core 0.16.1, 0.19.2: transformer/moe/router.py,
    # attach_and_log_load_balancing_loss); by sinkhorn it routes only in training.
    "the actor does not balance experts": "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff",
    "the training step relies on its value": "calculate_per_token_loss hidden_dropout attention_dropout",
} | {f"give --megatron.{name}": name for name in (*SIZES, "sequence_parallel", "fp8", "fp8_recipe", "fp8_param")}
_SILENT_OF_DDP = {
    "give --megatron.use_distributed_optimizer": "use_distributed_optimizer",
    "the training step relies on its value": "grad_reduce_in_fp32 average_in_collective delay_wgrad_compute",
}
# For each flag: the dataclass in megatron.core, and its fields that the user may not set.
FLAGS = {
    "override": ("transformer", "TransformerConfig", _SILENT),
    "ddp": ("distributed", "DistributedDataParallelConfig", _SILENT_OF_DDP),
}


def parse_overrides(words: Sequence[str], flag: str = "override") -> dict[str, Any]:
    """Parse FIELD=VALUE ``words`` into values by field, in the types of ``flag``'s dataclass.

    A value is ``true`` or ``false``, a number, one of the field's choices, an enumeration's member, a list with
    commas, or ``none`` if the field may be empty.

    Raises:
        UsageError: the first word that cannot be used, with what could.
    """
    if not words:
        return {}
    module, name_of_config, silent = FLAGS[flag]
    refused = {name: reason for reason, names in silent.items() for name in names.split()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about libraries for training, which happens in other processes
        config = getattr(importlib.import_module(f"megatron.core.{module}"), name_of_config)

    hints = typing.get_type_hints(config)
    fields = {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}
    values: dict[str, Any] = {}
    for word in words:
        shown = f"--megatron.{flag} {word}"
        name, _, text = word.partition("=")
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else "Megatron's documentation lists its fields."
            raise UsageError(f"{shown}: {name_of_config} has no field {name!r}; {hint}")
        if name in refused:
            raise UsageError(f"{shown}: {name} cannot be set here; {refused[name]}.")
        values[name] = _value(shown, text, hints[name])
    return values


def _value(shown: str, text: str, hint: Any) -> Any:
    """Read ``text`` as a value of the type ``hint``: the first reading that pydantic accepts."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    members = getattr(hint, "__members__", None)  # of an enumeration, whose values may be any
    kind: Any = Literal[tuple(members)] if members else hint
    adapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))
    items = [item.strip() for item in text.split(",") if text]
    readings = [*([None] if text.lower() == "none" else []), *([items, text] if "," in text else [text, items])]
    reasons: list[str] = []
    for reading in readings:
        try:
            value = adapter.validate_python(reading)
        except ValidationError as error:
            reasons = reasons or [one_line(detail["msg"]) for detail in error.errors()]
        else:
            return members[value] if members else value
    or_none = ", or none" if type(None) in typing.get_args(hint) else ""
    raise UsageError(f"{shown}: {'; '.join(dict.fromkeys(reasons))}{or_none}.")
