"""What ranks run in the tests of routing replay, and Transformers' model with the same routes."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.token_values import MicroBatch
from openrlhf_gtpo.training.features.routing_replay.router import install
from tests.support.logits_program import on
from tests.support.training_program import _named, _share

LIVE = 255
Routed = list[tuple[list[int], np.ndarray | None]]  # rows of tokens, and the experts of each token in each layer


def draw_routes(tokens: int, layers: int, experts: int, k: int, seed: int, live: float = 0.25) -> np.ndarray:
    """(tokens, layers, k) random experts, uint8; a share of the tokens, and the last one, has none."""
    draw = np.random.default_rng(seed)
    routes = draw.random((tokens, layers, experts)).argsort(axis=2)[..., :k].astype(np.uint8)
    routes[draw.random(tokens) < live] = LIVE
    routes[-1] = LIVE
    return routes


def micro_batch(rows: Routed) -> MicroBatch:
    """All tokens but each row's first are actions."""
    return [
        (torch.tensor(tokens), torch.arange(len(tokens)) > 0, *([] if r is None else [torch.from_numpy(r)]))
        for tokens, r in rows
    ]


def log_probs(
    source: str, layout: Layout, dtype: str, batches: list[Routed], replays: bool = True, shares: bool = False
) -> tuple[list[Any], dict[int, Any]]:
    """(N,) log-probs of each micro-batch on every rank, and what this rank's routers have seen, by layer."""
    with on(layout):
        options = ModelOptions(layout=layout, dtype=getattr(torch, dtype), shares_prompts=shares)
        model = load_model(source, options)
        layers = install(model)
        rows = [micro_batch([(tokens, r if replays else None) for tokens, r in batch]) for batch in batches]
        found = [values.log_probs.numpy() for values in schedule.forward(model, rows)]
        seen = {n: (layer.seen.load.numpy(), layer.seen.counts.numpy()) for n, layer in layers.items() if layer.seen}
        return found, seen


def gradients(
    source: str, layout: Layout, recompute: str, batches: list[Routed], shares: bool = False
) -> dict[str, Any]:
    """Name -> gradient (numpy) of minus the sum of all log-probs, on rank 0; empty elsewhere."""
    with on(layout):
        options = ModelOptions(layout=layout, dtype=torch.float32, recompute=recompute, shares_prompts=shares)
        trainer = Trainer(load_model(source, options), OptimizerOptions(max_norm=0, distributed=False))
        layers = install(trainer.model)
        mine, _ = _share([micro_batch(batch) for batch in batches], layout)
        found: dict[str, Any] = {}

        def keep_gradients() -> tuple[bool, float, None]:
            found.update(_named(trainer.model, lambda parameter: parameter.main_grad))
            return True, 0.0, None

        trainer.optimizer.step = keep_gradients
        trainer.step(mine, lambda index, values, entropy: (-values.sum(), None))
        assert not any(layer._waiting for layer in layers.values())
        return found if torch.distributed.get_rank() == 0 else {}


def of_transformers(source: str, batches: list[Routed], backward: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """The same log-probs, and gradients, of Transformers' model, a row at a time, with routes from the same tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    given: Sequence[Any] = []

    def forward(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(router.top_k, dim=-1)[1]
        routes = given[routers.index(router)]
        if routes is not None:
            chosen = torch.stack([own if r[0] == LIVE else r for own, r in zip(chosen, routes.long())])
        weights = probabilities.gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, chosen

    values: list[Any] = []
    with mock.patch.object(Qwen3MoeTopKRouter, "forward", forward):
        for batch in batches:
            of_rows = []
            for tokens, routes in batch:
                given = [None if routes is None else torch.from_numpy(routes[:, i]) for i in range(len(routers))]
                log_p = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
                of_rows.append(log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
            values.append(torch.cat(of_rows))
        if backward:
            (-torch.cat(values).sum()).backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return [each.detach().numpy() for each in values], found


def differences(rows: Sequence[Any], values: Sequence[Any]) -> np.ndarray:
    """(sampled tokens,) log-probs in ``values``, (N,) of all tokens but each row's first, minus the sampler's; rows
    as ``routes_program`` has them."""
    of_rows = np.split(np.concatenate(values), np.cumsum([len(row[0]) - 1 for row in rows])[:-1])
    parts = [
        of_row[start - 1 : start - 1 + len(sampled)] - sampled
        for of_row, (_, start, sampled, _) in zip(of_rows, rows, strict=True)
    ]
    return np.concatenate(parts)
