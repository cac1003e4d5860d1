"""Routing replay in a training rank: replays routes, and measures the distance between trainer and sampler."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf_gtpo.training.credit.loss import LossFeature, LossInputs, LossOutputs


class Distance(NamedTuple):
    """The distance of the sampler's log-probs from the old policy's, Δ = log π_old − log π_sampler, at action tokens.

    Fields:
        tokens: number of tokens.
        difference: sum of |Δ|.
        k3: sum of exp(Δ) − 1 − Δ, whose mean estimates KL(sampler ‖ old policy).
        far: number of tokens with |Δ| > ln 2.
        most: maximum of |Δ|.
    """

    tokens: float = 0.0
    difference: float = 0.0
    k3: float = 0.0
    far: float = 0.0
    most: float = 0.0


class Seen(NamedTuple):
    """A rank's numbers since the last call: by layer, ``load`` and ``counts`` of ``router.Seen``; and the distance to
    the sampler, which only ranks of the last stage know."""

    load: dict[int, np.ndarray]
    counts: dict[int, np.ndarray]
    distance: Distance


class RoutingReplayInRank(LossFeature):
    """The rank's part, which replays routes and counts until :meth:`take` is called."""

    def __init__(self) -> None:
        self._layers: dict[int, Any] = {}
        self._distance: Tensor | None = None  # the fields of ``Distance``, on the device

    def begin(self, model: Any) -> None:
        from openrlhf_gtpo.training.features.routing_replay.router import install

        self._layers = install(model)

    @torch.no_grad()
    def loss_outputs(self, inputs: LossInputs, outputs: LossOutputs) -> None:
        """Compare the old policy with the sampler. Without an old-policy forward, take the policy in training, which
        the rollout's single optimizer step has not changed yet."""
        if inputs.rollout_log_probs is None or inputs.old_log_probs is None:
            return
        own = inputs.mask if inputs.off_policy is None else inputs.mask & ~inputs.off_policy.unsqueeze(-1)
        difference = (inputs.old_log_probs.double() - inputs.rollout_log_probs).where(own, 0)
        size = difference.abs()
        k3 = difference.exp() - 1 - difference
        new = torch.stack([own.sum(), size.sum(), k3.sum(), (size > math.log(2)).sum(), size.max()])
        if self._distance is not None:
            new = torch.cat([self._distance[:-1] + new[:-1], torch.maximum(self._distance, new)[-1:]])
        self._distance = new

    def take(self) -> Seen:
        """Return the numbers since the last call."""
        distance, self._distance = self._distance, None
        load, counts = {}, {}
        for number, layer in self._layers.items():
            if layer.seen is not None:
                load[number], counts[number] = layer.seen.load.cpu().numpy(), layer.seen.counts.cpu().numpy()
                layer.seen = None
        return Seen(load, counts, Distance() if distance is None else Distance(*distance.tolist()))


def take_seen(actor: Any) -> Seen:
    """Return a training rank's numbers since the last call; runs in the rank."""
    [feature] = [feature for feature in actor.trainer.loss_features if isinstance(feature, RoutingReplayInRank)]
    return feature.take()
