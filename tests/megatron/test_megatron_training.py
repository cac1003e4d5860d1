"""Would catch a gradient that is summed, averaged or dropped in the wrong place, a loss that counts padding or a
neighbour's tokens, and an optimizer step that differs from AdamW's.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_checkpoint, ragged_rows
from rank_pool import RankPool
from test_megatron_logits import LAYOUTS
from training_program import TEMPERATURE, batch_of, gradients, gtpo_loss, train

from openrlhf_gtpo.megatron.parallel.layout import Layout

LAYOUTS = LAYOUTS | {
    "CP2": Layout(context_parallel_size=2),
    "CP2xTP2-SP": Layout(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    "CP2xPP2": Layout(context_parallel_size=2, pipeline_model_parallel_size=2),
}
MODELS = {
    "llama": ("llama", 151, {}),
    "qwen2-tied": ("qwen2", 896, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", 151, {}),
}
# eps above the rounding of the smallest gradients, whose sign would otherwise decide a whole step.
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_norm": 0.3}


def steps_for(vocab_size: int) -> list[list[tuple[list, list]]]:
    """Three optimizer steps of four micro-batches: (rows, prompt lengths)."""
    shapes = [([9, 4, 7], [3, 2, 1]), ([12], [5]), ([6, 6], [2, 4]), ([3, 10], [1, 6])]
    return [
        [
            (ragged_rows(vocab_size, lengths, seed=10 * step + i), prompts)
            for i, (lengths, prompts) in enumerate(shapes)
        ]
        for step in range(3)
    ]


# Every layout with one model, the others where most is cut at once.
CASES = [("llama", name, ("none", "full")[place % 2]) for place, name in enumerate(LAYOUTS)]
CASES += [("llama", "TP2xPP2-SP", kind) for kind in ("none", "selective")]
for _model in ("qwen2-tied", "qwen3"):
    CASES += [(_model, "TP4-SP", "none"), (_model, "TP2xPP2-SP", "full")]
    CASES += [(_model, "CP2xTP2-SP", "full"), (_model, "CP2xPP2", "none")]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    family, vocab_size, fields = MODELS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(request.param), family, vocab_size, **fields), vocab_size


class Reference:
    """The same loss through Transformers, one sequence at a time, in one process."""

    def __init__(self, source: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")

    def backward(self, step: list[tuple[list, list]], entropy: bool) -> float:
        """Accumulate the gradient of one step's loss, and return the loss."""
        batches = [batch_of(*item) for item in step]
        tokens = float(sum(batch.action_mask.sum() for batch in batches))
        loss = gtpo_loss(batches, list(range(len(batches))), tokens, entropy)
        total = torch.zeros(())
        for index, (batch, (rows, prompts)) in enumerate(zip(batches, step, strict=True)):
            log_probs = torch.zeros(batch.action_mask.shape)
            entropies = torch.zeros(batch.action_mask.shape)
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                logits = self.model(torch.tensor([row])).logits[0, prompt - 1 : -1] / TEMPERATURE
                each = logits.log_softmax(-1)
                log_probs[i, : len(row) - prompt] = each.gather(-1, torch.tensor(row[prompt:])[:, None])[:, 0]
                entropies[i, : len(row) - prompt] = -(each.exp() * each).sum(-1)
            total = total + loss(index, log_probs, entropies)[0]
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
    """The largest difference, relative to the largest value of each tensor."""
    assert set(found) == set(exact)
    for name, value in exact.items():
        assert np.abs(found[name] - value).max() <= bound * np.abs(value).max(), name


@pytest.mark.parametrize(("checkpoint", "name", "recompute"), CASES, indirect=["checkpoint"])
def test_gradients_are_those_of_transformers(checkpoint: tuple, name: str, recompute: str, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    steps = steps_for(vocab_size)
    entropy = recompute == "none"  # the entropy bonus in one of the two
    reference = Reference(source)
    reference.backward(steps[0], entropy)
    found = ranks.run(gradients, str(source), LAYOUTS[name], {"recompute": recompute}, steps, entropy)[0]
    assert_close(found, reference.named("grad"), 1e-4)


@pytest.mark.parametrize(
    "layout, distributed",
    [
        (Layout(tensor_model_parallel_size=2), True),
        (Layout(pipeline_model_parallel_size=2), True),
        (Layout(tensor_model_parallel_size=2, sequence_parallel=True), False),
    ],
    ids=["TP2-DP2-distributed", "PP2-DP2-distributed", "TP2-SP-DP2-replicated"],
)
def test_three_steps_are_those_of_adamw(checkpoint: tuple, layout: Layout, distributed: bool, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    steps = steps_for(vocab_size)
    reference = Reference(source)
    exact_losses, exact_norms = reference.train(steps)
    found, norms, losses = ranks.run(train, str(source), layout, distributed, steps, ADAM)[0]
    np.testing.assert_allclose(losses, exact_losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norms, exact_norms, rtol=1e-4)
    assert_close(found, reference.named("data"), 1e-4)
