"""Routing replay in an engine's actor: gives each row the experts that vLLM chose for its tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.feature import EngineFeature
from openrlhf_gtpo.training.rollout.answers import Answer, routes_of
from openrlhf_gtpo.training.rows import Row

_MOST_IN_A_BYTE = 255  # experts; vLLM's ids fit a byte up to 256, but one number must mean none


class Experts(NamedTuple):
    """The numbers of a model's layers, of a layer's experts, and of a token's experts."""

    layers: int
    experts: int
    k: int


class RoutingReplayInEngine(EngineFeature):
    """An engine's part, which gives ``routes`` to rows for training."""

    _model: Experts

    async def start(self, llm: Any) -> None:
        config = llm.model_config
        layers, experts = config.get_total_num_hidden_layers(), config.get_num_experts()
        self._model = Experts(layers, experts, config.get_num_experts_per_tok())

    def on_row(self, row: Row, response: dict[str, Any], answers: Sequence[Answer] | None) -> None:
        if answers is not None:
            routes = routes_of_row(
                response["observation_tokens"], answers, self._model, f"a response to prompt {row.number}"
            )
            row.routes = routes[: len(row.tokens)]


def routes_of_row(tokens: list[int], answers: Sequence[Answer], model: Experts, row: str) -> np.ndarray:
    """Return (n, layers, k) experts, uint8 or int16, of a response's ``tokens`` (n,), prompt included.

    The engine's first choice counts: later answers have the same tokens in their prompt, and may have computed them
    again. The dtype's largest number means no expert, at tokens that the engine has not computed at that place: the
    last one, an environment's last words, and an agent's edits. ``row`` names the response in messages.

    Raises:
        TrainingStopped: an answer has routes for another number of tokens, or impossible ones. Megatron would silently
            lose an expert that is named twice.
    """
    of_vllm: type = np.uint8 if model.experts <= 256 else np.uint16
    dtype: type = np.uint8 if model.experts <= _MOST_IN_A_BYTE else np.int16  # torch can do little with uint16
    routes: np.ndarray = np.full((len(tokens), model.layers, model.k), np.iinfo(dtype).max, dtype=dtype)
    known = 0  # the first tokens of the row have their routes
    for prompt, output in answers:
        for answer in output.outputs:
            said = routes_of(answer, model.layers, model.k, of_vllm)
            own = [*prompt, *answer.token_ids]
            _check(said, len(own) - 1, model.experts, row)
            count = min(len(own), len(tokens))
            common = int(np.argmin(np.append(np.array(own[:count]) == np.array(tokens[:count]), False)))
            common = min(common, len(said))
            routes[known:common] = said[known:common]
            known = max(known, common)
    return routes


def _check(routes: np.ndarray, count: int, experts: int, row: str) -> None:
    ordered = np.sort(routes, axis=2)
    bad = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2)) | (ordered[..., -1] >= experts).any(1)
    if len(routes) != count or bad.any():
        got = f"routes of {len(routes)} tokens"
        if bad.any():
            at = int(bad.argmax())
            got = f"{routes[at].tolist()} for token {at}"
        raise TrainingStopped(
            f"Expected vLLM to return the experts of {count} tokens in {row}, different ones below {experts} in each "
            f"layer, got {got}. To train without them, give --rollout.routing_replay off."
        )
