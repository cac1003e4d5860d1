"""Settings that decide whether a run survives a failure or ends."""

from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting


def refuse_restarts_without_weights(values: dict[str, Any], given: frozenset[str]) -> None:
    """Refuse restarts of engines that would get no weights."""
    if values["train.max_restarts"] and values["vllm.sync_with_ray"]:
        raise UsageError(
            "--train.max_restarts cannot be combined with --vllm.sync_with_ray, because OpenRLHF's own transfer "
            "cannot reach restarted engines; leave one of them out."
        )


SUPERVISION = Group(
    "supervision",
    "what happens when engines, ranks or rewards die or hang, or an optimizer step is not finite",
    (
        Setting(
            "train.max_restarts",
            0,
            "how many engines a run may lose, and how often it may restart from its last checkpoint after other "
            "failures; above 0, a failed reward is tried three times",
            bounds=Bounds(at_least=0),
            page="reliability.md#supervised-runs",
        ),
        Setting(
            "train.stall_timeout",
            0.0,
            "seconds of silence after which a process or reward counts as hanging; 0 waits forever. Must exceed the "
            "slowest reward, checkpoint, and phase of a step except the rollout",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "train.max_bad_steps",
            3,
            "stop after this many consecutive optimizer steps with a non-finite gradient or loss; each such step is "
            "skipped",
            bounds=Bounds(at_least=1),
            page="openrlhf.md#what-is-not-finite",
        ),
    ),
    page="reliability.md#supervised-runs",
)
