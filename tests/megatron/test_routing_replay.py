"""Megatron sends tokens where it is told to at every layout, with the router's own weights and gradients, recomputed
or not."""

import numpy as np
import pytest

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_training import assert_close
from tests.support.families import ragged_rows
from tests.support.logits_program import several
from tests.support.moe_program import CHOSEN, EXPERTS, LAYOUTS, MODELS, by_expert, make_mixture
from tests.support.rank_pool import RankPool
from tests.support.routing_program import LIVE, Routed, draw_routes, gradients, log_probs, of_transformers

MIXTURE = "as-they-are-tied"  # four layers, two on a stage
LAYERS = 4
AT = {name: LAYOUTS[name] for name in ("TP1", "PP2xEP2", "TP2-SPxEP2")}
AT["CP2xEP2"] = Layout(context_parallel_size=2, expert_model_parallel_size=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_mixture(tmp_path_factory.mktemp("mixture"), MIXTURE))


@pytest.fixture(scope="module")
def batches() -> list[Routed]:
    """Micro-batches of sizes that no layout divides; one row has no routes, and one micro-batch has none at all."""
    rows = [ragged_rows(MODELS[MIXTURE][0], lengths, seed=i) for i, lengths in enumerate([[5, 3, 17], [13], [7, 9]])]
    routed = [
        [(row, draw_routes(len(row), LAYERS, EXPERTS, CHOSEN, seed=len(row))) for row in of_batch] for of_batch in rows
    ]
    routed[0][1] = (routed[0][1][0], None)
    routed[2] = [(row, None) for row, _ in routed[2]]
    return routed


@pytest.fixture(scope="module")
def exact(source: str, batches: list[Routed]) -> tuple:
    values, found = of_transformers(source, batches, backward=True)
    return values, by_expert(found)


@pytest.mark.parametrize("name", AT)
def test_tokens_go_where_they_are_sent(
    name: str, source: str, batches: list[Routed], exact: tuple, ranks: RankPool
) -> None:
    layout = AT[name]
    calls = [(log_probs, (source, layout, "float32", batches))]
    calls += [
        (gradients, (source, layout, recompute, batches))
        for recompute in ("none", "selective", "full")
        if recompute == "full" or name in ("PP2xEP2", "TP2-SPxEP2")
    ]
    live, _ = of_transformers(source, [[(row, None) for row, _ in batch] for batch in batches])
    answers = ranks.run(several, layout, calls)
    for of_rank in answers:
        for values, expected in zip(of_rank[0][0], exact[0], strict=True):
            np.testing.assert_allclose(values, expected, atol=2e-5)
    assert np.abs(exact[0][0] - live[0]).max() > 0.1 > np.abs(exact[0][2] - live[2]).max()
    for found in answers[0][1:]:
        assert_close(found, exact[1], 1e-4)
    # What the routers have seen: every token in each layer, those that were sent among them.
    sent = sum(int((r[:, 0, 0] != LIVE).sum()) for batch in batches for _, r in batch if r is not None)
    for layer in range(LAYERS):
        counts = np.sum([rank[0][1][layer][1] for rank in answers if layer in rank[0][1]], axis=0)
        load = np.sum([rank[0][1][layer][0] for rank in answers if layer in rank[0][1]], axis=0)
        alike = (
            4 // (layout.pipeline_model_parallel_size * layout.context_parallel_size) if name != "TP2-SPxEP2" else 2
        )
        assert counts[0] == alike * sent and 0 < counts[1] <= counts[0]
        assert load.sum() == CHOSEN * (counts[0] + counts[2])


def test_own_routes_change_nothing_and_anothers_do(source: str, ranks: RankPool) -> None:
    """In float32, Transformers' own choice, replayed; shifted by a token it is another's."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    [row] = ragged_rows(MODELS[MIXTURE][0], [40], seed=5)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for router in (module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)):
        router.register_forward_hook(lambda router, given, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([row]))
    own = torch.stack(chosen, dim=1).to(torch.uint8).numpy()
    layout = AT["PP2xEP2"]
    calls = [
        (log_probs, (source, layout, "float32", [[(row, routes)]])) for routes in (None, own, np.roll(own, 1, axis=0))
    ]
    (live, _), (replayed, seen), (shifted, _) = ranks.run(several, layout, calls)[0]
    np.testing.assert_allclose(replayed[0], live[0], atol=1e-6)
    assert all(counts[1] == 0 for _, counts in seen.values())  # no flips
    assert np.abs(shifted[0] - live[0]).mean() > 0.05
