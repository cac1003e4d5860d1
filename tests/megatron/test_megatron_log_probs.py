"""These tests catch a temperature that is left out, an entropy over a shard instead of the vocabulary, padding columns
that count, a result in another row's place, and a train step that suits only policy losses.
"""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_logits import LAYOUTS, MICRO_BATCHES
from tests.support.families import SHALLOW, make_checkpoint, ragged_rows
from tests.support.logits_program import (
    head_without_room,
    log_probs_and_entropies,
    offloaded_twin,
    pinned_memory,
    sft_losses,
)
from tests.support.rank_pool import RankPool

TEMPERATURE = 0.7
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}
MODELS = {"llama": (151, SHALLOW), "qwen2": (896, {})}  # the second has two layers per stage at PP2


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    family = request.param
    vocab_size, fields = MODELS[family]
    return make_checkpoint(tmp_path_factory.mktemp(family), family, vocab_size, **fields), vocab_size


def rows_of(vocab_size: int) -> list[list[list[int]]]:
    """The rows of each micro-batch."""
    return [ragged_rows(vocab_size, lengths, seed=i) for i, lengths in enumerate(MICRO_BATCHES)]


@functools.cache
def exact(source: Path, vocab_size: int, dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Float64 log-probs and entropies of tokens 2…n of each micro-batch, with weights rounded to ``dtype``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    model = model.to(getattr(torch, dtype)).double().eval()
    found = []
    for rows in rows_of(vocab_size):
        log_probs, entropies = [], []
        for row in rows:
            with torch.no_grad():
                each = (model(torch.tensor([row])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            log_probs.append(each.gather(-1, torch.tensor(row[1:])[:, None])[:, 0].numpy())
            entropies.append(-(each.exp() * each).sum(-1).numpy())
        found.append((np.concatenate(log_probs), np.concatenate(entropies)))
    return found


LAYOUTS = LAYOUTS | {
    "CP4": Layout(context_parallel_size=4),
    "CP2xTP2-SP": Layout(context_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in ("TP1", "TP4-SP", "TP2xPP2-SP", "CP4", "CP2xTP2-SP")]
    + [(name, "bfloat16") for name in ("TP2xPP2-SP", "CP4")],
)
def test_statistics_are_those_of_float64(checkpoint: tuple, name: str, dtype: str, ranks: RankPool) -> None:
    source, vocab_size = checkpoint
    layout, rows = LAYOUTS[name], rows_of(vocab_size)
    errors = []
    for answer in ranks.run(log_probs_and_entropies, str(source), layout, dtype, TEMPERATURE, rows):  # one per rank
        for result, expected in zip(answer, exact(source, vocab_size, dtype), strict=True):
            for found, values in zip(result, expected, strict=True):
                errors.append(np.abs(found - values))  # only of the actions, row after row
    error = np.concatenate(errors)
    # In bfloat16 single tokens are off by more, in Transformers too; the bound is for their mean.
    assert (error.mean() if dtype == "bfloat16" else error.max()) <= BOUNDS[dtype]


def test_supervised_fine_tuning_runs_on_it(checkpoint: tuple, ranks: RankPool) -> None:
    """The train step takes any loss of log-probs; a few steps on one batch must fit it."""
    source, vocab_size = checkpoint
    layout = Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    losses = ranks.run(sft_losses, str(source), layout, ragged_rows(vocab_size, [9, 14, 5]), 8)[-1]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("dtype", "distributed"), [("bfloat16", True), ("float32", False)])
def test_offloading_changes_nothing(checkpoint: tuple, distributed: bool, dtype: str, ranks: RankPool) -> None:
    """Training is the same with everything moved to the host and back between steps; meanwhile the memory is free."""
    source, vocab_size = checkpoint
    layout = Layout(tensor_model_parallel_size=2)
    rows = ragged_rows(vocab_size, [9, 14, 5])
    for staying, moving, freed in ranks.run(offloaded_twin, str(source), layout, dtype, distributed, rows):
        assert staying == moving
        assert freed


def test_the_lm_head_keeps_to_its_memory(narrow: str, one_rank: RankPool) -> None:
    assert "chunk_bytes" in one_rank.run(head_without_room, narrow)[0]


def test_offloading_pins_what_it_moves_and_no_more(narrow: str, one_rank: RankPool) -> None:
    """Memory is pinned once. AdamW's moments come with the first step; the memory pinned before is unpinned first."""
    (masters, weights, without, states), parameters = one_rank.run(pinned_memory, narrow)[0]
    assert without == -masters and masters < states
    # Megatron's buffers pad each parameter to a multiple of 64 elements, and the whole to a multiple of 128.
    for found, bytes_each in ((weights, 2), (masters, 4), (states, 12)):
        assert bytes_each * parameters <= found < 1.02 * bytes_each * parameters
