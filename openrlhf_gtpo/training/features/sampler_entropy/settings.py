"""The settings of entropies from vLLM's sampler."""

from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.training.settings.setting import SAMPLES, Bounds, Group, Need, Setting, needs_flag

_AUDITED = (
    SAMPLES,
    Need(lambda values: values["rollout.entropy"] != "actor", "entropies are the actor's"),
    Need(lambda values: values["algo.advantage.estimator"] in ESTIMATORS, "the estimator reads no entropies"),
)


def leave_out_audits(values: dict[str, Any], given: frozenset[str]) -> None:
    """Turn off audits in a replay, whose rows may come from another policy."""
    if not values["rollout.is_sampled"]:
        values["rollout.entropy_audit_steps"] = 0


SAMPLER = Group(
    "sampler entropies",
    "entropies from vLLM's sampler, without the old-policy forward",
    (
        Setting(
            "rollout.entropy",
            "actor",
            "source of entropies: the actor's old-policy forward, or vLLM's sampler, which saves that forward unless "
            "something else needs it; auto: the sampler, if that saves the forward",
            choices=("actor", "sampler", "auto"),
        ),
        Setting(
            "rollout.log_probs",
            "actor",
            "old log-probs for several optimizer steps per rollout with --rollout.entropy sampler: from the actor's "
            "forward, or from the sampler through --algo.advantage.is_correction_level, without that forward",
            choices=("actor", "sampler"),
        ),
        Setting(
            "rollout.entropy_audit_steps",
            20,
            "compare the sampler's entropies with the actor's in the first and every N-th batch; 0 turns this off",
            bounds=Bounds(at_least=0),
            needs=_AUDITED,
        ),
        Setting(
            "rollout.entropy_audit_gate",
            0.1,
            "use the actor's entropies while the sampler's mean error exceeds this many nats; inf never does",
            bounds=Bounds(at_least=0, or_infinite=True),
            needs=(*_AUDITED, needs_flag("rollout.entropy_audit_steps")),
        ),
    ),
    page="sampler.md",
)
