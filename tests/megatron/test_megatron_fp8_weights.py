"""FP8 primary weights train bit for bit as BF16 ones do, even after a resume and a move to the host; engines get the
numbers used in training, and exports the exact ones.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support import fp8_weights_program as program
from tests.support.families import ragged_rows
from tests.support.rank_pool import RankPool

ROWS = ragged_rows(151, [40, 150, 7], seed=4)
# These two recipes take scales from the weights. The shards of DP4, and of the others' two replicas, cut blocks.
TRAINED_AT = {
    "tensorwise-DP4": ("tensorwise", Layout()),
    "blockwise-TP2-SP": ("blockwise", Layout(tensor_model_parallel_size=2, sequence_parallel=True)),
    "blockwise-PP2": ("blockwise", Layout(pipeline_model_parallel_size=2)),
}


def both(recipe: str, **options: int) -> list[Fp8Options]:
    """Options with BF16 weights, and with FP8 ones."""
    return [Fp8Options("emulated", recipe, **options, primary_weights=primary) for primary in (False, True)]


def assert_same(found: list[tuple[float, float, float]], expected: list[tuple[float, float, float]]) -> None:
    """Losses agree bit for bit, norms within rounding: the sum over all gradients is in the order of their buffers."""
    assert [loss for loss, _, _ in found] == [loss for loss, _, _ in expected]
    assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm, _ in expected], rel=1e-5)


@pytest.mark.parametrize(("recipe", "layout"), TRAINED_AT.values(), ids=TRAINED_AT)
def test_training_is_bit_for_bit_that_of_bf16_weights(
    narrow: str, recipe: str, layout: Layout, ranks: RankPool
) -> None:
    """Float32 weights are rounded to BF16 before they are rounded to FP8, as they are with BF16 weights in between."""
    for expected, found in ranks.run(program.trained, narrow, layout, both(recipe), ROWS, 3):
        assert_same(found["reports"], expected["reports"])
        assert np.array_equal(found["before"], expected["before"]) and np.array_equal(
            found["after"], expected["after"]
        )
        assert not np.array_equal(found["before"], found["after"])


def test_weights_take_half_the_memory(wide: str, one_rank: RankPool) -> None:
    """One byte instead of two for every number in the decoder's matrices, and a scale for every 16384 of them."""
    ((plain, primary),) = one_rank.run(program.weight_bytes, wide, Layout(), both("blockwise"))
    matrices = 2 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512)
    assert abs(plain - primary - matrices * (1 - 4 / 128**2)) < 0.01 * matrices


def test_no_replica_keeps_exact_values_of_what_another_optimizes(narrow: str, ranks: RankPool) -> None:
    assert ranks.run(program.exact_values_left, narrow, Layout(), both("blockwise")[1]) == [0] * 4


def test_layers_in_bf16_keep_their_weights(narrow: str, ranks: RankPool) -> None:
    layout = Layout(pipeline_model_parallel_size=2)
    plain, primary = both("blockwise", layers_at_start_in_bf16=1)
    exact, *_ = ranks.run(program.leaving, narrow, layout, plain)
    found, *_ = ranks.run(program.leaving, narrow, layout, primary)
    changed = {name for name in exact if not torch.equal(exact[name], found[name])}
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed == {
        name for name in exact if ".0." not in name and name.split(".")[-2] in matrices and "bias" not in name
    }
    for name in changed:  # half a step of E4M3, which has three bits after the first
        assert 0 < (found[name] - exact[name]).abs().max() <= exact[name].abs().max() * 2**-4


@pytest.mark.parametrize(
    ("tensor", "recipe", "primary"), [(2, "tensorwise", True), (2, "blockwise", True), (1, "blockwise", False)]
)
def test_a_resume_goes_on_bit_for_bit(
    narrow: str, other: str, tensor: int, recipe: str, primary: bool, tmp_path: Path, ranks: RankPool
) -> None:
    """With FP8 primary weights and with BF16 ones, whichever the checkpoint was written with."""
    layout = Layout(tensor_model_parallel_size=tensor)
    answers = ranks.run(program.save_and_resume, narrow, other, layout, str(tmp_path), recipe, primary)
    for went_on, with_primary, with_bf16 in answers:
        alike, different = (with_primary, with_bf16) if primary else (with_bf16, with_primary)
        assert alike == went_on
        assert_same(different, went_on)


def test_offloading_frees_them_and_changes_nothing(narrow: str, one_rank: RankPool) -> None:
    fp8 = both("blockwise")[1]
    ((found, left),) = one_rank.run(program.moved, narrow, Layout(), fp8, ROWS)
    ((stayed,),) = one_rank.run(program.trained, narrow, Layout(), [fp8], ROWS, 3)
    assert np.array_equal(found, stayed["after"]) and left == [0, 0, 0]


def test_a_model_that_is_saved_has_the_exact_weights(wide: str, tmp_path: Path, ranks: RankPool) -> None:
    """Half a step of E4M3 is 2^-4 of a number; the engines get the rounded weights, which training uses too."""
    layout = Layout(tensor_model_parallel_size=2)
    fp8 = both("blockwise")[1]
    for trained, exact, rounded, error in ranks.run(program.exported, wide, layout, fp8, str(tmp_path), ROWS):
        assert np.array_equal(exact, trained)
        assert np.linalg.norm(trained - rounded) < 0.02 * np.linalg.norm(trained)
        assert 2**-7 < error <= 2**-4


def test_switched_off_it_computes_in_bf16_with_what_fp8_has_left(wide: str, tmp_path: Path, ranks: RankPool) -> None:
    layout = Layout(tensor_model_parallel_size=2)
    for answer in ranks.run(program.switched_off, wide, layout, both("blockwise")[1], str(tmp_path / "hf"), ROWS):
        found, off, again, rounded = answer
        assert np.array_equal(found, again) and not np.array_equal(found, off)
        # Where the CPU has no bfloat16 products, oneDNN's sums depend on where a tensor lies.
        exact = torch.cpu._is_avx512_bf16_supported()
        assert np.abs(off - rounded).max() <= (0 if exact else 0.1 * np.abs(found - off).max())
