"""Entropies and log-probs of the old policy from vLLM's sampler (``--rollout.entropy sampler``)."""

from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import ControllerFeature, EngineFeature, Feature
from openrlhf_gtpo.training.features.sampler_entropy.settings import SAMPLER, leave_out_audits


def choose_source(args: Arguments) -> Mapping[str, Any]:
    """Resolve ``--rollout.entropy`` auto to sampler or actor."""
    from openrlhf_gtpo.training.features.sampler_entropy.source import choose_entropy

    return {"rollout.entropy": choose_entropy(args)}


class SamplerEntropy(Feature):
    settings = SAMPLER
    before = (leave_out_audits,)
    after = (choose_source,)

    def is_on(self) -> bool:
        return self.args.rollout.entropy == "sampler"

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.sampler_entropy.controller import SamplerEntropyInController

        return SamplerEntropyInController(self.args)

    def engine(self) -> EngineFeature:
        from openrlhf_gtpo.training.features.sampler_entropy.engine import SamplerEntropyInEngine

        return SamplerEntropyInEngine(self.args.rollout.temperature)
