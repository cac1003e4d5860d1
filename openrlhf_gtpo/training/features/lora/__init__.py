"""Low-rank adapters instead of all weights (OpenRLHF's ``--ds.lora.*``, for both backends).

The room ``lora`` defines adapters. ``actors/adapters.py`` adds them to a policy on DeepSpeed,
``megatron/model/adapters.py`` on Megatron. ``actors/dispatch.py`` has the reference: the actor without its adapters.
"""

from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features.lora.settings import LORA, describe_adapters


def size_reference(args: Arguments) -> Mapping[str, Any]:
    """Give the reference, which is the policy without adapters, the policy's sizes, as OpenRLHF compares them."""
    if args.actor.lora is None:
        return {}
    return {"ref.num_nodes": args.actor.num_nodes, "ref.num_gpus_per_node": args.actor.num_gpus_per_node}


class Lora(Feature):
    settings = LORA
    before = (describe_adapters,)
    after = (size_reference,)

    def is_on(self) -> bool:
        return self.args.actor.lora is not None

    def check(self, model: Model) -> None:
        from openrlhf_gtpo.training.features.lora.check import check_lora

        check_lora(self.args, model)
