"""Low-rank adapters in the place of all weights (OpenRLHF's ``--ds.lora.*``, for both backends).

The parts: what adapters are, room ``lora``; how DeepSpeed's policy has them, ``actors/adapters.py``; how Megatron's
has them, ``megatron/model/adapters.py``; the reference that is the actor without them, ``actors/dispatch.py``.
"""

from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features.lora.settings import LORA, describe_adapters


def size_reference(args: Arguments) -> Mapping[str, Any]:
    """The reference is the policy: OpenRLHF compares the sizes of groups that share GPUs, and there is no other."""
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
