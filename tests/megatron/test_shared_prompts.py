"""With prompts computed once, values and gradients are those of Transformers' rows one by one, at every layout."""

import numpy as np
import pytest
import torch

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.megatron.model.packing import pack, pack_shared
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.token_values import MicroBatch
from tests.megatron.test_megatron_logits import MODELS
from tests.megatron.test_megatron_training import Reference, assert_close
from tests.support import megatron_lora_program, moe_program, routing_program
from tests.support.families import make_checkpoint, ragged_rows
from tests.support.logits_program import several
from tests.support.rank_pool import RankPool
from tests.support.training_program import gradients

VOCABULARY = 151
FULL = Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)


def groups(seed: int, *shapes: tuple[int, list[int]]) -> tuple[list[list[int]], list[int]]:
    """Rows of groups, each (prompt length, response lengths), and their prompts' lengths. Lengths that nothing
    divides; all prompts begin with the same three tokens."""
    rows, prompts = [], []
    system, *drawn = ragged_rows(VOCABULARY, [3, *(n for p, rs in shapes for n in (p, *rs))], seed=seed)
    parts = iter(drawn)
    for _, responses in shapes:
        prompt = [*system, *next(parts)]
        rows += [prompt + next(parts) for _ in responses]
        prompts += [len(prompt)] * len(responses)
    return rows, prompts


STEP = [
    groups(1, (5, [3, 9, 1, 4]), (2, [6, 2])),
    groups(2, (70, [80, 5, 7])),
    groups(3, (4, [8])),
    groups(4, (1, [2, 2, 5])),
]


@pytest.mark.parametrize(
    ("layout", "recompute", "model"),
    [
        (Layout(), "none", "llama"),
        (Layout(tensor_model_parallel_size=4, sequence_parallel=True), "selective", "llama"),
        (FULL, "full", "llama"),
        (FULL, "none", "qwen2-tied"),
        (FULL, "none", "phi3"),
        (FULL, "full", "smollm3"),
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers(
    layout: Layout, recompute: str, model: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family, _, fields = MODELS[model]
    source = make_checkpoint(tmp_path_factory.mktemp("model"), family, VOCABULARY, **fields)
    reference = Reference(source)
    reference.backward(STEP, True)
    options = {"recompute": recompute, "shares_prompts": True}
    found = ranks.run(gradients, str(source), layout, options, [STEP], True)[0]
    assert_close(found, reference.named("grad"), 1e-5)


def test_adapters_have_the_same_gradients(ranks: RankPool, narrow: str) -> None:
    lora = LoraOptions(rank=4, alpha=8.0)
    program = megatron_lora_program.adapter_gradients
    calls = [(program, (narrow, FULL, lora, STEP, "none", shares)) for shares in (False, True)]
    apart, together = ranks.run(several, FULL, calls)[0]
    assert set(apart) == set(together)
    for name, pair in apart.items():
        for expected, found in zip(pair, together[name], strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), name


@pytest.mark.parametrize("name", ["TP1", "PP2xEP2", "TP2-SPxEP2"])
def test_a_mixtures_tokens_go_where_they_are_sent(
    name: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows of a group with the same routes, with other routes from a token of the prompt on, and without any."""
    source = str(moe_program.make_mixture(tmp_path_factory.mktemp("mixture"), "as-they-are-tied"))
    layout, experts = moe_program.LAYOUTS[name], (4, moe_program.EXPERTS, moe_program.CHOSEN)
    batches = []
    for seed, shapes in enumerate([((9, [4, 2, 6]),), ((3, [5]), (12, [1, 7]))]):
        rows, prompts = groups(10 + seed, *shapes)
        rows = [[token % moe_program.MODELS["as-they-are-tied"][0] for token in row] for row in rows]
        drawn = [routing_program.draw_routes(len(row), *experts, seed=len(row)) for row in rows]
        for routes, prompt in zip(drawn, prompts, strict=True):
            routes[:prompt] = drawn[0][0]
        batches.append(list(zip(rows, drawn, strict=True)))
    batches[0][1][1][5:] = routing_program.draw_routes(len(batches[0][1][0]), *experts, seed=99)[5:]
    batches[1][0] = (batches[1][0][0], None)
    values, exact = routing_program.of_transformers(source, batches, backward=True)
    calls = [
        (routing_program.log_probs, (source, layout, "float32", batches, True, True)),
        (routing_program.gradients, (source, layout, "full", batches, True)),
    ]
    answers = ranks.run(several, layout, calls)
    for of_rank in answers:
        for found, expected in zip(of_rank[0][0], values, strict=True):
            np.testing.assert_allclose(found, expected, atol=2e-5)
    assert_close(answers[0][1], moe_program.by_expert(exact), 1e-4)


def test_what_is_packed() -> None:
    """The prompt once; no last action, nothing behind it; padding up to the multiple."""
    rows, prompts = groups(5, (4, [3, 5]))
    batch: MicroBatch = [(torch.tensor(r), torch.arange(len(r)) >= p) for r, p in zip(rows, prompts, strict=True)]
    environment = torch.cat([batch[1][0], torch.tensor([1, 2])])
    batch[1] = environment, torch.nn.functional.pad(batch[1][1], (0, 2))
    packed = pack_shared(batch, torch.device("cpu"), multiple=8)
    assert packed.tokens.shape == (1, 16) and packed.params.tree is not None
    assert packed.tokens[0, :13].tolist().count(rows[0][0]) >= 1
    assert len(packed.params.tree.origin) == 7 + 2 + 4
    apart = pack(batch, torch.device("cpu"))
    assert torch.equal(packed.labels, apart.labels)
    assert torch.equal(packed.position_ids[0][packed.predicts], apart.position_ids[0][apart.predicts])
    assert torch.equal(packed.tokens[0][packed.predicts], apart.tokens[0][apart.predicts])
