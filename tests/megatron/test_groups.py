"""These tests catch groups that outlive their layout, whose polling threads slow down all the process does later, and
groups that take a GPU's memory before they are used."""

from pathlib import Path

import pytest

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support.families import SHALLOW, make_checkpoint, ragged_rows
from tests.support.logits_program import devices_of_groups, sft_losses, threads
from tests.support.moe_program import make_mixture
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_training_at_one_layout_after_another_leaves_no_thread_behind(
    experts: bool, tmp_path: Path, ranks: RankPool
) -> None:
    source = make_mixture(tmp_path, "normalised") if experts else make_checkpoint(tmp_path, "llama", **SHALLOW)
    rows = ragged_rows(151, [5, 9])
    pipeline = Layout(pipeline_model_parallel_size=2, expert_model_parallel_size=2 if experts else 1)
    counts = []
    for _ in range(2):
        ranks.run(sft_losses, str(source), pipeline, rows, 1)
        ranks.run(sft_losses, str(source), Layout(), rows, 1)  # begins by collecting what the first left behind
        counts.append(ranks.run(threads))
    assert counts[0] == counts[1]


def test_groups_connect_when_they_are_used_even_if_the_default_group_has_a_device(ranks: RankPool) -> None:
    """As DeepSpeed's has on CUDA, where each connection takes GPU memory."""
    [(made, default), *_] = ranks.run(devices_of_groups)
    assert set(made) == {"None"} and len(made) >= 20 and default == "cpu:0"
