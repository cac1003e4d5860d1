"""The settings of what keeps a run going, or ends it."""

from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting


def refuse_restarts_without_weights(values: dict[str, Any], given: frozenset[str]) -> None:
    """Refuse restarts of engines that would get no weights."""
    if values["train.max_restarts"] and values["vllm.sync_with_ray"]:
        raise UsageError(
            "--train.max_restarts cannot be combined with --vllm.sync_with_ray, whose transfer is OpenRLHF's own; "
            "leave one of them out."
        )


SUPERVISION = Group(
    "supervision",
    "what happens if engines, ranks or rewards die or hang, or an optimizer step is not finite",
    (
        Setting(
            "train.max_restarts",
            0,
            "how often a run may replace engines that died or hang, and retry rewards that fail; and how often it is "
            "restarted from its last checkpoint if another process died or hangs; 0 stops at the first",
            bounds=Bounds(at_least=0),
            page="reliability.md#supervised-runs",
        ),
        Setting(
            "train.stall_timeout",
            0.0,
            "seconds without an answer after which a process or a reward counts as hanging; 0 waits forever. It must "
            "be longer than the slowest reward, and than each phase of a step except the rollout, including a "
            "checkpoint",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "train.max_bad_steps",
            3,
            "stop after this many optimizer steps in a row with a non-finite gradient or loss, all of them skipped",
            bounds=Bounds(at_least=1),
            page="openrlhf.md#what-is-not-finite",
        ),
    ),
    page="reliability.md#supervised-runs",
)
