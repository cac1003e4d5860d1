"""Routing replay in Megatron's routers, which send tokens to given experts. Imports Megatron.

The weights of the experts still come from the router's logits, with their gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from openrlhf_gtpo.megatron.model.packing import Packed
from openrlhf_gtpo.megatron.model.policy import LoadedModel


class Seen(NamedTuple):
    """One router's counts, without recomputation.

    Fields:
        load: (experts,) tokens of each expert, padding included.
        counts: (3,) replayed tokens; replayed tokens that the router would have sent to other experts; tokens that it
            routed itself.
    """

    load: Tensor
    counts: Tensor


class RoutesOfLayer:
    """The routes of one router. Replaces Megatron's ``RouterReplay`` without its list of all routers in the process.

    A layer that is recomputed in the backward pass needs its tokens' routes again, after other micro-batches have
    passed. They wait in the order of the micro-batches.
    """

    def __init__(self, router: TopKRouter) -> None:
        self._router = router
        self._given: Tensor | None = None  # of the micro-batch in its forward pass: (P, k)
        self._in_forward = False
        self._waiting: deque[Tensor | None] = deque()  # for recomputation
        self.seen: Seen | None = None

    def begin(self, routes: Tensor | None) -> None:
        """Begin a micro-batch's forward pass with ``routes`` (P, k) of this rank's tokens."""
        self._given, self._in_forward = routes, True

    def end(self) -> None:
        """End the forward pass; its backward pass may begin."""
        self._given, self._in_forward = None, False

    def clear(self) -> None:
        """Drop waiting routes: no recomputation follows."""
        self._waiting.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts: return their scores (P, k) and ids (P, k) from ``scores`` (P, experts). Megatron calls it
        instead of making its own choice (megatron-core 0.16.1, 0.19.2: transformer/moe/moe_utils.py,
        topk_routing_with_score_function)."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._given
        if not self._in_forward:
            routes = self._waiting.popleft()
        elif self._router.training and not torch.is_grad_enabled():  # inside a checkpoint of activations
            self._waiting.append(routes)
        chosen, live = own, None
        if routes is not None:
            assert routes.shape == own.shape, (routes.shape, own.shape)
            live = routes[:, :1] == torch.iinfo(routes.dtype).max
            chosen = torch.where(live, own, routes.long())
            values = scores.gather(1, chosen)
        if self._in_forward:
            self._count(scores.shape[1], own, chosen, live)
        return values, chosen

    @torch.no_grad()
    def _count(self, experts: int, own: Tensor, chosen: Tensor, live: Tensor | None) -> None:
        if self.seen is None:
            self.seen = Seen(own.new_zeros(experts), own.new_zeros(3))
        flat = chosen.flatten()
        self.seen.load.scatter_add_(0, flat, torch.ones_like(flat))
        number = flat.new_full((), len(own))
        replayed = number * 0 if live is None else (~live).sum()
        flips = (own.sort(1)[0] != chosen.sort(1)[0]).any(1).sum()  # 0 for tokens that it routes itself
        self.seen.counts.add_(torch.stack([replayed, flips, number - replayed]))


def install(model: LoadedModel) -> dict[int, RoutesOfLayer]:
    """Let the routers of ``model`` follow the routes of its micro-batches; returns them by layer, from 0 in the whole
    model."""
    # Each router gets its routes from the micro-batch in its forward pass, cut for sequence parallelism.
    layers = {}
    for router in model.stage.modules():
        if isinstance(router, TopKRouter):
            router.router_replay = layers[router.layer_number - 1] = RoutesOfLayer(router)
    assert layers or not model.config.num_moe_experts, "a stage of a mixture without routers"

    @contextmanager
    def replaying(packed: Packed) -> Iterator[None]:
        routes = packed.routes
        if routes is not None and model.config.sequence_parallel:
            size, rank = (
                parallel_state.get_tensor_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_rank(),
            )
            routes = routes.chunk(size)[rank]
        for layer, replay in layers.items():
            replay.begin(None if routes is None else routes[:, layer])
        yield
        for replay in layers.values():
            replay.end()

    def clear() -> None:
        for replay in layers.values():
            replay.clear()

    model.stage.around_layers = replaying
    model.after_pass.append(clear)
    return layers
