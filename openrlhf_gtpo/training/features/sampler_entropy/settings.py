"""The settings of entropies from vLLM's sampler."""

from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.training.settings.setting import SAMPLES, Bounds, Group, Need, Setting, needs_flag

_AUDITED = (
    SAMPLES,
    Need(lambda values: values["rollout.entropy"] != "actor", "entropies are the actor's"),
    Need(lambda values: values["algo.advantage.estimator"] in ESTIMATORS, "the credit does not depend on entropies"),
)


def leave_out_audits(values: dict[str, Any], given: frozenset[str]) -> None:
    """Rows that this run has not sampled are not audited: its policy may be another than theirs."""
    if not values["rollout.is_sampled"]:
        values["rollout.entropy_audit_steps"] = 0


SAMPLER = Group(
    "sampler entropies",
    "entropies from vLLM's sampler, without the old-policy forward",
    (
        Setting(
            "rollout.entropy",
            "actor",
            "take entropies from the actor's old-policy forward, or from vLLM's sampler, which saves that forward if "
            "nothing else needs it; auto: the sampler's if that saves the forward",
            choices=("actor", "sampler", "auto"),
        ),
        Setting(
            "rollout.log_probs",
            "actor",
            "what bounds several optimizer steps of a rollout with --rollout.entropy sampler: the old log-probs of "
            "the actor's forward, or the sampler's, through --algo.advantage.is_correction_level, without that "
            "forward",
            choices=("actor", "sampler"),
        ),
        Setting(
            "rollout.entropy_audit_steps",
            20,
            "compare the sampler's entropies with the actor's in the first batch and then every N-th; 0 never",
            bounds=Bounds(at_least=0),
            needs=_AUDITED,
        ),
        Setting(
            "rollout.entropy_audit_gate",
            0.1,
            "take the actor's entropies while the sampler's are off by more nats than this on average; inf never",
            bounds=Bounds(at_least=0, or_infinite=True),
            needs=(*_AUDITED, needs_flag("rollout.entropy_audit_steps")),
        ),
    ),
    page="sampler.md",
)
