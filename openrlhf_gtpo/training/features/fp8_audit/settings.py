"""The settings of audits of FP8."""

from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Need, Setting, needs_flag

_CREDIT = Need(
    lambda values: values["algo.advantage.estimator"] in ESTIMATORS,
    "--algo.advantage.estimator {0[algo.advantage.estimator]} gives no entropy credit to compare",
)


def ask_for_forward(values: dict[str, Any], given: frozenset[str]) -> None:
    """Ask for the actor's forward, which an audit compares."""
    if steps := values["megatron.fp8_audit_steps"]:
        forward = (
            f"--megatron.fp8_audit_steps {steps} needs the actor's forward, which the sampler's entropies would save"
        )
        values["rollout.forward_for"] = forward


FP8_AUDIT = Group(
    "FP8 audits",
    "what --megatron.fp8 does to entropies and advantages",
    (
        Setting(
            "megatron.fp8_audit_steps",
            0,
            "in every N-th batch, also compute the old-policy forward in BF16, and log FP8's effect on entropies, "
            "shares and advantages as fp8/*; 0 turns this off",
            metavar="N",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "megatron.fp8_audit_gate",
            None,
            "while audits find that more than this fraction of advantages (such as 0.02) changes sign, take entropies "
            "from a BF16 forward pass; log-probs still come from FP8's (default: never)",
            float,
            metavar="X",
            bounds=Bounds(at_least=0, at_most=1),
            needs=(needs_flag("megatron.fp8_audit_steps"),),
        ),
    ),
    needs=(_CREDIT,),
    page="fp8.md",
)
