"""What routing replay cannot be combined with: ``on`` is refused there, ``auto`` is off."""

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.settings.guard import (
    EITHER_RUNNER_RETURNS_EXPERTS,
    other_vllm,
    why_no_scheduler,
)
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides

_FLAG = "rollout.routing_replay"


def can_replay(args: Arguments) -> bool:
    """Decide whether routes are replayed, from everything but the model.

    Raises:
        UsageError: replay is on, but cannot work.
    """
    if args.rollout.routing_replay == "off":
        return False
    if args.actor.backend != "megatron":
        why = f"--actor.backend {args.actor.backend} routes by itself; give --actor.backend megatron"
    elif not args.rollout.is_sampled:
        why = "rows that the run has not sampled itself have no routes; sample them"
    elif parse_overrides(args.megatron.override).get("moe_router_fusion"):
        why = "Transformer Engine's router takes no routes; drop --megatron.override moe_router_fusion=true"
    elif no_channel := why_no_scheduler():
        why = f"vLLM's answers have no room for routes: {no_channel}"
    elif platform.chosen_platform() == "cpu" and (other := other_vllm(EITHER_RUNNER_RETURNS_EXPERTS)):
        known = ", ".join(EITHER_RUNNER_RETURNS_EXPERTS)
        why = f"on a CPU only vLLM {known} return the experts of tokens, and {other}; install one of those"
    else:
        return True
    return _off_or_refused(args, why)


def has_routes(args: Arguments, model: Model) -> bool:
    """Decide the same from the policy's checkpoint; raises UsageError likewise."""
    return model.has_experts or _off_or_refused(args, "the model has no experts; give a mixture of experts")


def _off_or_refused(args: Arguments, why: str) -> bool:
    if args.rollout.routing_replay == "on":
        raise UsageError(f"--{_FLAG} on cannot work here: {why}, or leave --{_FLAG} out.")
    return False
