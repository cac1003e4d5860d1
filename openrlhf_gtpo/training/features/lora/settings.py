"""What follows from OpenRLHF's ``--ds.lora.*`` for a run. They are its flags; both backends read them."""

from typing import Any

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.training.settings.setting import Group


def describe_adapters(values: dict[str, Any], given: frozenset[str]) -> None:
    """Say what adapters the run has, and that its reference is the policy without them."""
    if not values["ds.lora.rank"]:
        return
    targets = values["ds.lora.target_modules"]
    # The word arrives as a list of one, in which PEFT would look for a module of that name.
    if targets == ["all-linear"]:
        targets = values["ds.lora.target_modules"] = "all-linear"
    names = (targets,) if isinstance(targets, str) else tuple(targets)
    values["actor.lora"] = LoraOptions(values["ds.lora.rank"], values["ds.lora.alpha"], names)
    values["ref.is_actor"] = True


LORA = Group("LoRA", "low-rank adapters instead of all weights", (), page="lora.md")
