"""Would catch an expert's weight on the wrong rank or under another's name, a token that reaches the wrong expert or with
the wrong weight, a gradient of experts that is summed over ranks that hold different ones, a gradient norm that counts
experts twice or not at all, and replicas that wait for each other forever.
"""

from pathlib import Path

import checkpoint_program
import export_program
import numpy as np
import pytest
import torch
from families import ragged_rows
from logits_program import full_weights, log_probs_and_entropies, logits
from moe_program import LAYOUTS, MODELS, by_expert, make_mixture, uneven_log_probs
from rank_pool import RankPool
from safetensors.torch import load_file
from test_megatron_training import ADAM, Reference, assert_close, steps_for
from training_program import gradients, train

from openrlhf_gtpo.megatron.parallel.layout import Layout

MICRO_BATCHES = [[5, 1, 17, 9], [30], [3, 11], [8]]
WITH_CONTEXT = {
    "CP2": Layout(context_parallel_size=2),
    "CP2xEP2": Layout(context_parallel_size=2, expert_model_parallel_size=2),
    "CP2xPP2": Layout(context_parallel_size=2, pipeline_model_parallel_size=2),
}


# Every layout with one mixture, the other where most is cut at once.
CASES = [("normalised", name) for name in LAYOUTS]
CASES += [("as-they-are-tied", name) for name in ("PP2xEP2", "TP2-SPxEP2")]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return make_mixture(tmp_path_factory.mktemp(request.param), request.param), MODELS[request.param][0]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, int]) -> tuple[list, list[np.ndarray]]:
    """Micro-batches, and Transformers' logits for them, one sequence at a time."""
    source, vocab_size = checkpoint
    micro_batches = [ragged_rows(vocab_size, lengths, seed=i) for i, lengths in enumerate(MICRO_BATCHES)]
    model = Reference(source).model.eval()
    with torch.no_grad():
        exact = [torch.cat([model(torch.tensor([row])).logits[0] for row in rows]) for rows in micro_batches]
    return micro_batches, [tensor.numpy() for tensor in exact]


@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_logits_are_those_of_transformers(checkpoint: tuple, expected: tuple, name: str, ranks: RankPool) -> None:
    micro_batches, exact = expected
    answers = [answer for answer in ranks.run(logits, str(checkpoint[0]), LAYOUTS[name], micro_batches) if answer]
    assert len(answers) == 4 // LAYOUTS[name].model_parallel_size  # each replica has its own
    for answer in answers:
        for one, other in zip(answer, exact, strict=True):
            assert np.abs(one - other).max() <= 1e-4


@pytest.mark.parametrize("name", WITH_CONTEXT)
def test_context_parallel_ranks_share_experts(checkpoint: tuple, name: str, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    rows = [ragged_rows(vocab_size, [9, 14, 3])]
    answers = [
        ranks.run(log_probs_and_entropies, str(source), layout, "float32", 1.0, rows)[0][0]
        for layout in (Layout(), WITH_CONTEXT[name])
    ]
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [*CASES, *(("normalised", name) for name in WITH_CONTEXT), ("as-they-are-tied", "CP2xPP2")],
    indirect=["checkpoint"],
)
def test_gradients_are_those_of_transformers(checkpoint: tuple, name: str, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    recompute = "none" if vocab_size == 151 else "full"
    # Five micro-batches: replicas that share experts have different numbers of them.
    steps = [[*step, (ragged_rows(vocab_size, [6], seed=77), [2])] for step in steps_for(vocab_size)]
    entropy = recompute == "none"  # the entropy bonus in one of the two
    reference = Reference(source)
    reference.backward(steps[0], entropy)
    layout = (LAYOUTS | WITH_CONTEXT)[name]
    found = ranks.run(gradients, str(source), layout, {"recompute": recompute}, steps, entropy)[0]
    assert_close(found, by_expert(reference.named("grad")), 1e-4)


@pytest.mark.parametrize(
    ("checkpoint", "name", "distributed"),
    [
        ("normalised", "TP2-SP", True),
        ("normalised", "EP2", False),
        ("normalised", "PP2xEP2", True),
        ("normalised", "TP2-SPxEP2", False),
        ("as-they-are-tied", "PP2xEP2", False),
        ("as-they-are-tied", "TP2-SPxEP2", True),
    ],
    indirect=["checkpoint"],
)
def test_three_steps_are_those_of_adamw(checkpoint: tuple, name: str, distributed: bool, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    steps = steps_for(vocab_size)
    reference = Reference(source)
    exact_losses, exact_norms = reference.train(steps)
    found, norms, losses = ranks.run(train, str(source), LAYOUTS[name], distributed, steps, ADAM)[0]
    np.testing.assert_allclose(losses, exact_losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norms, exact_norms, rtol=1e-4)
    assert_close(found, by_expert(reference.named("data")), 1e-4)


@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_every_rank_gets_the_checkpoint(checkpoint: tuple, name: str, ranks: RankPool) -> None:
    exact = load_file(checkpoint[0] / "model.safetensors")
    for found in ranks.run(full_weights, str(checkpoint[0]), LAYOUTS[name], "bfloat16", [1, 30_000, 2**30]):
        assert set(found) == set(exact)
        for key, value in exact.items():
            assert np.array_equal(found[key], value.to(torch.bfloat16).float().numpy()), key


@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_there_and_back_is_bitwise(checkpoint: tuple, name: str, tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(export_program.round_trips, LAYOUTS[name], [(str(checkpoint[0]), "float32", str(tmp_path))])
    exact = load_file(checkpoint[0] / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(shard)
    assert set(found) == set(exact)
    assert all(torch.equal(found[key], value) for key, value in exact.items())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> tuple[str, Path, list]:
    """Another model to resume from, the checkpoints' folder, and what training went on with."""
    folder = tmp_path_factory.mktemp("written")
    source, other = (make_mixture(folder / str(seed), "normalised", seed=seed) for seed in (0, 1))
    layout = LAYOUTS["EP2"]
    answers = ranks.run(checkpoint_program.save_and_go_on, str(source), layout, str(folder), "float32", True)
    return str(other), folder / "now", answers


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_goes_on_at_another_layout(written: tuple, name: str, ranks: RankPool) -> None:
    other, folder, before = written
    after = ranks.run(checkpoint_program.resume, other, LAYOUTS[name], str(folder), "float32", True)
    for old, new in zip(before[0]["reports"], after[0]["reports"], strict=True):
        assert new == (old if name == "EP2" else pytest.approx(old, rel=1e-4))


@pytest.mark.parametrize("name", ["EP2", "PP2xEP2"])
def test_replicas_with_fewer_micro_batches_or_none_keep_up(
    checkpoint: tuple, expected: tuple, name: str, ranks: RankPool
) -> None:
    micro_batches, exact = expected
    answers = ranks.run(uneven_log_probs, str(checkpoint[0]), LAYOUTS[name], micro_batches)
    replica = LAYOUTS[name].model_parallel_size
    assert [len(answer) for answer in answers] == [rank // replica for rank in range(4)]
    for answer in answers:
        for log_probs, rows, exact_logits in zip(answer, micro_batches, exact, strict=False):
            of_tokens = torch.from_numpy(exact_logits).log_softmax(-1)
            start = 0
            for row, found in zip(rows, log_probs, strict=True):
                actions = of_tokens[start : start + len(row) - 1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
                np.testing.assert_allclose(found[: len(row) - 1], actions.numpy(), atol=1e-4)
                start += len(row)
