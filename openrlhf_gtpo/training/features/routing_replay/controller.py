"""Routing replay in the controller: metrics of experts and routes from the ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.features.routing_replay.rank import Distance, Seen, take_seen


class RoutingReplayInController(ControllerFeature):
    """Logs ``routing/*``; by layer in a rollout dump."""

    def begin(self, run: Any) -> None:
        self._run = run
        run.sampler.with_log_probs = True  # with which the old policy's are compared

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Add all ranks' numbers to the metrics."""
        seen = ray.get([rank.__ray_call__.remote(take_seen) for rank in self._run.models.actor._actor_handlers])
        by_layer = layers_of(seen, self.args.megatron.expert_model_parallel_size)
        metrics |= summary(seen, by_layer)
        self._run.rollout.notes["routing"] = by_layer


def layers_of(seen: Sequence[Seen], ranks: int) -> dict[str, list[float]]:
    """Compute by layer: the largest number of tokens of an expert ÷ the mean; the same for each of the ``ranks`` that
    share the experts; and the fraction of replayed tokens that the trainer's router would have sent elsewhere.

    Ranks with the same tokens count them alike, so their sum has the same ratios.
    """
    layers = sorted({layer for rank in seen for layer in rank.load})
    found: dict[str, list[float]] = {name: [] for name in ("expert_load", "rank_load", "flips")}
    for layer in layers:
        load = np.sum([rank.load[layer] for rank in seen if layer in rank.load], axis=0)
        replayed, flips, _ = np.sum([rank.counts[layer] for rank in seen if layer in rank.counts], axis=0)
        by_rank = load.reshape(ranks, -1).sum(axis=1)
        found["expert_load"].append(float(load.max() / load.mean()))
        found["rank_load"].append(float(by_rank.max() / by_rank.mean()))
        found["flips"].append(float(flips / max(replayed, 1)))
    return found


def summary(seen: Sequence[Seen], by_layer: dict[str, list[float]]) -> dict[str, float]:
    """Summarize a step: means over layers, the worst load, and distances to the sampler."""
    if not by_layer["flips"]:
        return {}
    counts = np.sum([sum(rank.counts.values()) for rank in seen if rank.counts], axis=0)
    metrics = {
        names.ROUTING_EXPERT_LOAD: float(np.mean(by_layer["expert_load"])),
        names.ROUTING_EXPERT_LOAD_WORST: max(by_layer["expert_load"]),
        names.ROUTING_RANK_LOAD: float(np.mean(by_layer["rank_load"])),
        names.ROUTING_RANK_LOAD_WORST: max(by_layer["rank_load"]),
        names.ROUTING_FLIPS: float(np.mean(by_layer["flips"])),
        names.ROUTING_LIVE: float(counts[2] / (counts[0] + counts[2])),
    }
    totals = Distance(*np.sum([rank.distance for rank in seen], axis=0))
    if totals.tokens:
        metrics |= {
            names.ROUTING_LOG_PROB_DIFF: totals.difference / totals.tokens,
            names.ROUTING_LOG_PROB_DIFF_MAX: max(rank.distance.most for rank in seen),
            names.ROUTING_K3: totals.k3 / totals.tokens,
            names.ROUTING_FAR: totals.far / totals.tokens,
        }
    return {name: float(value) for name, value in metrics.items()}
