"""The settings that follow from OpenRLHF's flags ``--ds.lora.*``, which both backends read."""

from typing import Any

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.training.settings.setting import Group


def describe_adapters(values: dict[str, Any], given: frozenset[str]) -> None:
    """Set ``actor.lora``, and make the policy without adapters the reference."""
    if not values["ds.lora.rank"]:
        return
    targets = values["ds.lora.target_modules"]
    # The word arrives in a list, where PEFT would take it for a module's name.
    if targets == ["all-linear"]:
        targets = values["ds.lora.target_modules"] = "all-linear"
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    values["actor.lora"] = LoraOptions(values["ds.lora.rank"], values["ds.lora.alpha"], names)
    values["ref.is_actor"] = True


LORA = Group("LoRA", "low-rank adapters instead of all weights", (), page="lora.md")
