"""Mixtures of experts at every layout: weights, routes, gradients, norms and optimizer steps match Transformers and
torch's AdamW, and replicas that share experts wait for each other when their work is unequal.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_training import ADAM, Reference, assert_close, assert_same_training, steps_for
from tests.support import checkpoint_program, export_program
from tests.support.families import ragged_rows
from tests.support.logits_program import full_weights, log_probs_and_entropies, logits, several
from tests.support.moe_program import LAYOUTS, MODELS, by_expert, make_mixture, uneven_log_probs
from tests.support.rank_pool import RankPool
from tests.support.training_program import gradients, train

MICRO_BATCHES = [[5, 1, 17, 9], [30], [3, 11], [8]]
WITH_CONTEXT = {
    "CP2": Layout(context_parallel_size=2),
    "CP2xEP2": Layout(context_parallel_size=2, expert_model_parallel_size=2),
    "CP2xPP2": Layout(context_parallel_size=2, pipeline_model_parallel_size=2),
}


BUCKETS = [1, 30_000, 2**30]
# Every layout with one mixture, and the other only where most is sharded at once.
CASES = {name: ["normalised"] for name in LAYOUTS}
for _name in ("PP2xEP2", "TP2-SPxEP2"):
    CASES[_name].append("as-they-are-tied")
GRADIENTS = CASES | {name: ["normalised"] for name in WITH_CONTEXT}
GRADIENTS["CP2xPP2"] = ["normalised", "as-they-are-tied"]
TRAINED = {  # by layout: the mixture, and whether its optimizer is distributed
    "TP2-SP": [("normalised", True)],
    "EP2": [("normalised", False)],
    "PP2xEP2": [("normalised", True), ("as-they-are-tied", False)],
    "TP2-SPxEP2": [("normalised", False), ("as-they-are-tied", True)],
}


class Mixture(NamedTuple):
    """A checkpoint, micro-batches, Transformers' logits for them one sequence at a time, and optimizer steps.

    Each of ``uneven_steps`` has five micro-batches, so replicas that share experts have different numbers of them.
    """

    source: Path
    micro_batches: list
    logits: list[np.ndarray]
    steps: list
    uneven_steps: list


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mixture]:
    made = {}
    for name, (vocab_size, _) in MODELS.items():
        source = make_mixture(tmp_path_factory.mktemp(name), name)
        micro_batches = [ragged_rows(vocab_size, lengths, seed=i) for i, lengths in enumerate(MICRO_BATCHES)]
        model = Reference(source).model.eval()
        with torch.no_grad():
            exact = [torch.cat([model(torch.tensor([row])).logits[0] for row in rows]) for rows in micro_batches]
        steps = steps_for(vocab_size)
        uneven = [[*step, (ragged_rows(vocab_size, [6], seed=77), [2])] for step in steps]
        made[name] = Mixture(source, micro_batches, [tensor.numpy() for tensor in exact], steps, uneven)
    return made


@pytest.fixture(scope="module", params=LAYOUTS)
def found(
    request: pytest.FixtureRequest, mixtures: dict[str, Mixture], ranks: RankPool
) -> tuple[str, dict[str, list[tuple]]]:
    """A layout's name, and every rank's (logits, full weights) of each mixture there."""
    layout = LAYOUTS[request.param]
    calls: list[tuple] = []
    for name in CASES[request.param]:
        source = str(mixtures[name].source)
        calls.append((logits, (source, layout, mixtures[name].micro_batches)))
        calls.append((full_weights, (source, layout, "bfloat16", BUCKETS)))
    answers = ranks.run(several, layout, calls)
    of_mixtures = {name: [rank[2 * i : 2 * i + 2] for rank in answers] for i, name in enumerate(CASES[request.param])}
    return request.param, of_mixtures


def test_logits_are_those_of_transformers(found: tuple, mixtures: dict[str, Mixture]) -> None:
    for name, of_ranks in found[1].items():
        answers = [of_logits for of_logits, _ in of_ranks if of_logits]
        assert len(answers) == 4 // LAYOUTS[found[0]].model_parallel_size  # each replica has its own
        for answer in answers:
            for one, other in zip(answer, mixtures[name].logits, strict=True):
                assert np.abs(one - other).max() <= 1e-4, name


def test_every_rank_gets_the_checkpoint(found: tuple, mixtures: dict[str, Mixture]) -> None:
    for name, of_ranks in found[1].items():
        exact = load_file(mixtures[name].source / "model.safetensors")
        for _, weights in of_ranks:
            assert set(weights) == set(exact), name
            for key, value in exact.items():
                assert np.array_equal(weights[key], value.to(torch.bfloat16).float().numpy()), (name, key)


@pytest.fixture(scope="module")
def exact_gradients(mixtures: dict[str, Mixture]) -> dict[str, dict[str, np.ndarray]]:
    found = {}
    for name, mixture in mixtures.items():
        reference = Reference(mixture.source)
        reference.backward(mixture.uneven_steps[0], name == "normalised")
        found[name] = by_expert(reference.named("grad"))
    return found


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_transformers(
    name: str, mixtures: dict[str, Mixture], exact_gradients: dict, ranks: RankPool
) -> None:
    layout = (LAYOUTS | WITH_CONTEXT)[name]
    calls = []
    for mixture in GRADIENTS[name]:
        entropy = mixture == "normalised"  # the entropy bonus in one of the two, recomputation in the other
        options = {"recompute": "none" if entropy else "selective" if name == "TP2-SPxEP2" else "full"}
        source, steps = str(mixtures[mixture].source), mixtures[mixture].uneven_steps
        calls.append((gradients, (source, layout, options, steps, entropy)))
    for mixture, answer in zip(GRADIENTS[name], ranks.run(several, layout, calls)[0], strict=True):
        assert_close(answer, exact_gradients[mixture], 1e-4)


@pytest.fixture(scope="module")
def exact_training(mixtures: dict[str, Mixture]) -> dict[str, tuple]:
    """Each mixture's (losses, norms, parameters) from two steps of AdamW."""
    found = {}
    for name, mixture in mixtures.items():
        reference = Reference(mixture.source)
        found[name] = (*reference.train(mixture.steps), by_expert(reference.named("data")))
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_two_steps_are_those_of_adamw(
    name: str, mixtures: dict[str, Mixture], exact_training: dict, ranks: RankPool
) -> None:
    layout = LAYOUTS[name]
    calls = [
        (train, (str(mixtures[mixture].source), layout, distributed, mixtures[mixture].steps, ADAM))
        for mixture, distributed in TRAINED[name]
    ]
    for (mixture, _), answer in zip(TRAINED[name], ranks.run(several, layout, calls)[0], strict=True):
        assert_same_training(answer, exact_training[mixture])


def test_context_parallel_ranks_share_experts(mixtures: dict[str, Mixture], ranks: RankPool) -> None:
    rows = {name: [ragged_rows(MODELS[name][0], [9, 14, 3])] for name in MODELS}

    def calls(layout: Layout) -> list[tuple]:
        return [
            (log_probs_and_entropies, (str(mixtures[name].source), layout, "float32", 1.0, rows[name]))
            for name in MODELS
        ]

    exact = ranks.run(several, Layout(), calls(Layout()))[0]
    for layout in WITH_CONTEXT.values():
        for (one,), (other,) in zip(ranks.run(several, layout, calls(layout))[0], exact, strict=True):
            for values, expected in zip(one, other, strict=True):
                np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["EP4", "PP2xEP2", "TP2-SPxEP2"])
def test_there_and_back_is_bitwise(name: str, mixtures: dict[str, Mixture], tmp_path: Path, ranks: RankPool) -> None:
    folders = {mixture: tmp_path / mixture for mixture in CASES[name]}
    models = [(str(mixtures[mixture].source), "float32", str(folder)) for mixture, folder in folders.items()]
    for folder in folders.values():
        folder.mkdir()
    ranks.run(export_program.round_trips, LAYOUTS[name], models)
    for mixture, folder in folders.items():
        exact = load_file(mixtures[mixture].source / "model.safetensors")
        written: dict[str, torch.Tensor] = {}
        for shard in (folder / "hf").glob("*.safetensors"):
            written |= load_file(shard)
        assert set(written) == set(exact)
        assert all(torch.equal(written[key], value) for key, value in exact.items()), mixture


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> tuple[str, Path, list]:
    """Another model to load into, the checkpoints' folder, and every rank's answer of ``save_and_go_on``."""
    folder = tmp_path_factory.mktemp("written")
    source, other = (make_mixture(folder / str(seed), "normalised", seed=seed) for seed in (0, 1))
    layout = LAYOUTS["EP2"]
    answers = ranks.run(checkpoint_program.save_and_go_on, str(source), layout, str(folder), "float32", True)
    return str(other), folder / "now", answers


@pytest.mark.parametrize("name", ["TP1", "EP2", "EP4", "PP2xEP2", "TP2-SPxEP2"])
def test_training_goes_on_at_another_layout(written: tuple, name: str, ranks: RankPool) -> None:
    other, folder, before = written
    after = ranks.run(checkpoint_program.resume, other, LAYOUTS[name], [str(folder)], "float32", True)
    assert not after[0][0]["different"]
    for old, new in zip(before[0]["reports"], after[0][0]["reports"], strict=True):
        assert new == (old if name == "EP2" else pytest.approx(old, rel=1e-4))


@pytest.mark.parametrize("name", ["EP2", "PP2xEP2"])
def test_replicas_with_fewer_micro_batches_or_none_keep_up(
    name: str, mixtures: dict[str, Mixture], ranks: RankPool
) -> None:
    layout = LAYOUTS[name]
    calls = [(uneven_log_probs, (str(m.source), layout, m.micro_batches)) for m in mixtures.values()]
    for rank, answers in enumerate(ranks.run(several, layout, calls)):
        for mixture, answer in zip(mixtures.values(), answers, strict=True):
            assert len(answer) == rank // layout.model_parallel_size
            for log_probs, rows, exact_logits in zip(answer, mixture.micro_batches, mixture.logits, strict=False):
                of_tokens = torch.from_numpy(exact_logits).log_softmax(-1).split([len(row) for row in rows])
                expected = [
                    each[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
                    for each, row in zip(of_tokens, rows, strict=True)
                ]
                np.testing.assert_allclose(log_probs, torch.cat(expected).numpy(), atol=1e-4)
