"""The setting of routing replay."""

from openrlhf_gtpo.training.settings.setting import Group, Setting

ROUTING = Group(
    "routing replay",
    "tokens of a mixture of experts go where the sampler sent them",
    (
        Setting(
            "rollout.routing_replay",
            "auto",
            "have the Megatron actor send each token to the experts that vLLM sent it to, in the old-policy forward "
            "and in training; auto: for a mixture of experts, where that is possible",
            choices=("auto", "on", "off"),
        ),
    ),
    page="moe.md",
)
