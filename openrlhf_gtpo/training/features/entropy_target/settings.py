"""The settings of the entropy's target and floor."""

from typing import Any

from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting, needs_flag


def measure_entropy(values: dict[str, Any], given: frozenset[str]) -> None:
    """Have the old policy's entropies computed, and the training forward's for the bonus."""
    if values["algo.entropy_target"] or values["algo.entropy_floor"]:
        values["logger.entropy_enable"] = True
    if values["algo.entropy_target"] and values["actor.entropy_coef"] is None:
        values["actor.entropy_coef"] = 0.0


ENTROPY_TARGET = Group(
    "entropy target",
    "an entropy bonus that adapts, and a run that ends if the policy's entropy collapses",
    (
        Setting(
            "algo.entropy_target",
            0.0,
            "raise the entropy bonus after a rollout of at most this mean entropy, in nats per token; above it, lower "
            "the bonus and apply none; 0: off",
            metavar="NATS",
            bounds=Bounds(at_least=0),
        ),
        Setting(
            "algo.entropy_coef_delta",
            0.005,
            "change of the entropy bonus's coefficient per step; --actor.entropy_coef is its first value",
            bounds=Bounds(above=0),
            needs=(needs_flag("algo.entropy_target"),),
        ),
        Setting(
            "algo.entropy_floor",
            0.0,
            "end the run, after a checkpoint, if a rollout has less mean entropy than this, in nats a token; 0: never",
            metavar="NATS",
            bounds=Bounds(at_least=0),
        ),
    ),
    page="algorithms.md#entropy-target",
)
