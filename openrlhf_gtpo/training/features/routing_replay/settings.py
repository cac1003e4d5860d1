"""The setting of routing replay."""

from openrlhf_gtpo.training.settings.setting import Group, Setting

ROUTING = Group(
    "routing replay",
    "tokens of a mixture of experts go to the experts that vLLM chose",
    (
        Setting(
            "rollout.routing_replay",
            "auto",
            "on Megatron, send each token to the experts that vLLM chose, in the old-policy forward and in training; "
            "auto: do so for mixture-of-experts models where possible",
            choices=("auto", "on", "off"),
        ),
    ),
    page="moe.md",
)
