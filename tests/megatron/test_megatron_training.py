"""Gradients and optimizer steps at every layout match the same loss through Transformers and torch's AdamW."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_logits import LAYOUTS
from tests.support.families import SHALLOW, make_checkpoint, ragged_rows
from tests.support.logits_program import several
from tests.support.rank_pool import RankPool
from tests.support.training_program import (
    TEMPERATURE,
    actions,
    batch_of,
    deterministic_gradients,
    fused_gradients,
    gradients,
    gtpo_loss,
    train,
)

LAYOUTS = LAYOUTS | {
    "CP2": Layout(context_parallel_size=2),
    "CP2xTP2-SP": Layout(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    "CP2xPP2": Layout(context_parallel_size=2, pipeline_model_parallel_size=2),
}
MODELS = {
    "llama": ("llama", 151, SHALLOW),
    "qwen2-tied": ("qwen2", 896, SHALLOW | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", 151, {}),  # two layers per stage at PP2
}
# eps exceeds the rounding of the smallest gradients, whose sign would otherwise decide a whole step.
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_norm": 0.3}


def steps_for(vocab_size: int) -> list[list[tuple[list, list]]]:
    """Two optimizer steps of four micro-batches, each (rows, prompt lengths)."""
    shapes = [([9, 4, 7], [3, 2, 1]), ([12], [5]), ([6, 6], [2, 4]), ([3, 10], [1, 6])]
    return [
        [
            (ragged_rows(vocab_size, lengths, seed=10 * step + i), prompts)
            for i, (lengths, prompts) in enumerate(shapes)
        ]
        for step in range(2)
    ]


# (model, recompute) at each layout: one model at every layout, the others only where most is sharded at once.
CASES = {name: [("llama", ("none", "full")[place % 2])] for place, name in enumerate(LAYOUTS)}
CASES["TP2xPP2-SP"] += [
    ("llama", kind) for kind in ("none", "selective") if ("llama", kind) not in CASES["TP2xPP2-SP"]
]
for _model in ("qwen2-tied", "qwen3"):
    CASES["TP4-SP"].append((_model, "none"))
    CASES["TP2xPP2-SP"].append((_model, "full"))
    CASES["CP2xTP2-SP"].append((_model, "full"))
    CASES["CP2xPP2"].append((_model, "none"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    return {
        name: (make_checkpoint(tmp_path_factory.mktemp(name), family, vocab_size, **fields), vocab_size)
        for name, (family, vocab_size, fields) in MODELS.items()
    }


class Reference:
    """The same loss through Transformers, one sequence at a time, in one process."""

    def __init__(self, source: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")

    def backward(self, step: list[tuple[list, list]], entropy: bool) -> float:
        """Accumulate the gradient of one step's loss, and return the loss."""
        batches = [batch_of(*item) for item in step]
        loss = gtpo_loss(batches, list(range(len(batches))), float(sum(map(actions, batches))), entropy)
        total = torch.zeros(())
        for index, (rows, prompts) in enumerate(step):
            log_probs, entropies = [], []
            for row, prompt in zip(rows, prompts, strict=True):
                each = (self.model(torch.tensor([row])).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
                log_probs.append(each.gather(-1, torch.tensor(row[prompt:])[:, None])[:, 0])
                entropies.append(-(each.exp() * each).sum(-1))
            total = total + loss(index, torch.cat(log_probs), torch.cat(entropies))[0]
        total.backward()
        return float(total)

    def train(self, steps: list[list[tuple[list, list]]]) -> tuple[list[float], list[float]]:
        """Each step's loss and gradient norm before AdamW's step."""
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": ADAM["weight_decay"]},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=ADAM["lr"], betas=ADAM["betas"], eps=ADAM["eps"])
        losses, norms = [], []
        for step in steps:
            optimizer.zero_grad()
            losses.append(self.backward(step, False))
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAM["max_norm"])))
            optimizer.step()
        return losses, norms

    def named(self, of: str) -> dict[str, np.ndarray]:
        values = {n: p.grad if of == "grad" else p.detach() for n, p in self.model.named_parameters()}
        return {name: value.numpy() for name, value in values.items()}


def assert_close(found: dict[str, np.ndarray], exact: dict[str, np.ndarray], bound: float) -> None:
    """Bounds the largest difference in each tensor, relative to the tensor's largest value."""
    assert set(found) == set(exact)
    for name, value in exact.items():
        assert np.abs(found[name] - value).max() <= bound * np.abs(value).max(), name


@pytest.fixture(scope="module")
def exact_gradients(checkpoints: dict) -> Callable[[str, bool], dict[str, np.ndarray]]:
    """The gradients of the first step's loss, by model and whether the loss has an entropy bonus."""

    @functools.cache
    def of(model: str, entropy: bool) -> dict[str, np.ndarray]:
        source, vocab_size = checkpoints[model]
        reference = Reference(source)
        reference.backward(steps_for(vocab_size)[0], entropy)
        return reference.named("grad")

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_transformers(
    name: str, checkpoints: dict, exact_gradients: Callable, ranks: RankPool
) -> None:
    calls = []
    for model, recompute in CASES[name]:
        source, vocab_size = checkpoints[model]
        entropy = recompute == "none"  # the entropy bonus in one of the two
        options = {"recompute": recompute}
        calls.append((gradients, (str(source), LAYOUTS[name], options, steps_for(vocab_size), entropy)))
    found = ranks.run(several, LAYOUTS[name], calls)[0]
    for (model, recompute), answer in zip(CASES[name], found, strict=True):
        assert_close(answer, exact_gradients(model, recompute == "none"), 1e-4)


def test_layers_that_add_to_main_grad_do(checkpoints: dict, exact_gradients: Callable, ranks: RankPool) -> None:
    source, vocab_size = checkpoints["llama"]
    layout = Layout(tensor_model_parallel_size=2)
    found, fused = ranks.run(fused_gradients, str(source), layout, {}, steps_for(vocab_size), False)[0]
    assert fused > 0
    assert_close(found, exact_gradients("llama", False), 2e-5)


def test_full_determinism_is_megatrons_too(checkpoints: dict, exact_gradients: Callable, ranks: RankPool) -> None:
    source, vocab_size = checkpoints["llama"]
    layout = Layout(tensor_model_parallel_size=2)
    found = ranks.run(deterministic_gradients, str(source), layout, {}, steps_for(vocab_size), False)[0]
    assert_close(found, exact_gradients("llama", False), 2e-5)


@pytest.fixture(scope="module")
def exact_training(checkpoints: dict) -> dict[str, tuple]:
    """Each model's (losses, norms, parameters) from two steps of AdamW."""
    found = {}
    for model, (source, vocab_size) in checkpoints.items():
        reference = Reference(source)
        found[model] = (*reference.train(steps_for(vocab_size)), reference.named("data"))
    return found


@pytest.mark.parametrize(
    "layout, distributed",
    [
        (Layout(tensor_model_parallel_size=2), True),
        (Layout(pipeline_model_parallel_size=2), True),
        (Layout(tensor_model_parallel_size=2, sequence_parallel=True), False),
    ],
    ids=["TP2-DP2-distributed", "PP2-DP2-distributed", "TP2-SP-DP2-replicated"],
)
def test_two_steps_are_those_of_adamw(
    layout: Layout, distributed: bool, checkpoints: dict, exact_training: dict, ranks: RankPool
) -> None:
    calls = [(train, (str(s), layout, distributed, steps_for(size), ADAM)) for s, size in checkpoints.values()]
    for model, answer in zip(checkpoints, ranks.run(several, layout, calls)[0], strict=True):
        assert_same_training(answer, exact_training[model])


def assert_same_training(found: tuple, exact: tuple) -> None:
    """Compares the ranks' (parameters, norms, losses) with the reference's (losses, norms, parameters)."""
    parameters, norms, losses = found
    exact_losses, exact_norms, exact_parameters = exact
    np.testing.assert_allclose(losses, exact_losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norms, exact_norms, rtol=1e-4)
    assert_close(parameters, exact_parameters, 1e-4)
