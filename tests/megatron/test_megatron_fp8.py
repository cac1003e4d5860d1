"""Emulated FP8 in a whole model: only in the layers it covers, on shards as on the whole, switched off and on, with
scales from the first pass on, and across a resume and a move to the host.
"""

import sys
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import fp8_utils

from openrlhf_gtpo.megatron.fp8.fp8 import Fp8
from openrlhf_gtpo.megatron.fp8.options import RECIPES, Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from tests.megatron.test_fp8_linear import make, run
from tests.support import fp8_program as program
from tests.support.families import make_checkpoint, ragged_rows
from tests.support.rank_pool import RankPool
from tests.support.training_program import gradients

ROWS = ragged_rows(151, [40, 150, 7], seed=4)
BLOCKWISE = Fp8Options("emulated", "blockwise")
LAYOUTS = {
    "TP2": Layout(tensor_model_parallel_size=2),
    "TP2xPP2-SP": Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
}


def distance(found: Any, expected: Any) -> float:
    """The relative L2 distance, over the whole arrays."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_close_to_high_precision_and_can_be_switched_off(wide: str, recipe: str, one_rank: RankPool) -> None:
    (answer,) = one_rank.run(program.in_and_out, wide, Layout(), Fp8Options("emulated", recipe), ROWS)
    on, off, on_again, never = answer
    assert np.array_equal(off, never) and np.array_equal(on, on_again)
    assert 1e-3 < distance(on, never) < 0.05


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_quantize_their_shards(sequence_parallel: bool, ranks: RankPool) -> None:
    """Each rank's part equals that of a layer with only this shard; with blocks, it also equals the whole layer's."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 10 ** (2 * torch.rand(shape, generator=generator))

    x, w, dy = draw(256, 256), draw(512, 256), draw(256, 512)
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    cases = [(kind, recipe) for kind in ("column", "row") for recipe in RECIPES]
    answers = ranks.run(program.sharded_products, layout, cases, x, w, dy)[:2]
    for case, *found in zip(cases, *answers, strict=True):
        _compare_with_one_rank(*case, sequence_parallel, found, x, w, dy)


def _compare_with_one_rank(kind: str, recipe: str, sequence_parallel: bool, answers: list, *matrices: Any) -> None:
    x, w, dy = matrices
    column = kind == "column"
    halves = [list(t.chunk(2, dim)) for t, dim in ((x, 1), (w, 0 if column else 1), (dy, 1))]
    shards = [(x, halves[1][i], halves[2][i]) if column else (halves[0][i], halves[1][i], dy) for i in range(2)]
    alone = [run(make(recipe), *shard) for shard in shards]
    whole = run(make(recipe), x, w, dy)
    y, dx, dw = ([part[i] for part in alone] for i in range(3))
    wholes = [np.hstack(y), sum(dx), np.vstack(dw)] if column else [sum(y), np.hstack(dx), np.hstack(dw)]
    sharded = [1, 0 if sequence_parallel else None, 0] if column else [0 if sequence_parallel else None, 1, 1]
    for i, expected in enumerate(wholes):
        dim = sharded[i]
        found = answers[0][i] if dim is None else np.concatenate([answer[i] for answer in answers], dim)
        assert distance(found, expected) < 1e-5
        if recipe == "blockwise":
            assert distance(found, whole[i]) < 1e-5


def test_a_sharded_model_gives_what_the_whole_gives(wide: str, one_rank: RankPool, ranks: RankPool) -> None:
    (whole,) = one_rank.run(program.statistics, wide, Layout(), BLOCKWISE, ROWS)
    (exact,) = one_rank.run(program.statistics, wide, Layout(), None, ROWS)
    there = whole != 0
    for name, layout in LAYOUTS.items():
        for found in ranks.run(program.statistics, wide, layout, BLOCKWISE, ROWS):
            # A sum in another order moves some values to the next FP8 number, and from there on tokens differ.
            assert np.median(np.abs(found - whole)[there]) < 0.25 * np.median(np.abs(exact - whole)[there]), name


def test_gradients_of_pipeline_stages_are_those_of_the_whole(wide: str, one_rank: RankPool, ranks: RankPool) -> None:
    steps = [[(ROWS, [20, 90, 3]), (ragged_rows(151, [33, 21], seed=9), [10, 11])]]
    (whole,) = one_rank.run(gradients, wide, Layout(), {"fp8": BLOCKWISE}, steps, True)
    (exact,) = one_rank.run(gradients, wide, Layout(), {}, steps, True)
    sharded = ranks.run(gradients, wide, Layout(pipeline_model_parallel_size=2), {"fp8": BLOCKWISE}, steps, True)[0]
    assert sharded.keys() == whole.keys()
    for key, expected in whole.items():
        assert distance(sharded[key], expected) < 1e-5, key
        if "layers" in key and "norm" not in key:
            assert 1e-2 < distance(expected, exact[key]) < 0.5, key


def test_full_recompute_changes_nothing(wide: str, one_rank: RankPool, ranks: RankPool) -> None:
    """The first stage recomputes a micro-batch when a later one has moved ``delayed`` scales on."""
    steps = [[(ROWS, [20, 90, 3]), (ragged_rows(151, [33, 21], seed=9), [10, 11])] * 2]
    pipeline = Layout(pipeline_model_parallel_size=2)
    for pool, layout, fp8 in (
        (one_rank, Layout(), BLOCKWISE),
        (ranks, pipeline, Fp8Options("emulated", "delayed")),
    ):
        found = [
            pool.run(gradients, wide, layout, {"fp8": fp8, "recompute": recompute}, steps, False)[0]
            for recompute in ("none", "full")
        ]
        assert all(np.array_equal(found[1][key], expected) for key, expected in found[0].items())


def test_which_layers_compute_in_fp8(tmp_path: Path, ranks: RankPool) -> None:
    source = make_checkpoint(tmp_path, "qwen2", num_hidden_layers=4)  # two per stage
    layout = Layout(pipeline_model_parallel_size=2)
    fp8 = Fp8Options("emulated", "tensorwise", layers_at_start_in_bf16=1, layers_at_end_in_bf16=1)
    first, *_, last = ranks.run(program.emulated_layers, str(source), layout, fp8)
    linears = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    assert sorted(first) == sorted(f"decoder.layers.1.{name}" for name in linears)
    assert sorted(last) == sorted(f"decoder.layers.0.{name}" for name in linears)


def test_delayed_scales_are_there_before_the_first_result(wide: str, ranks: RankPool) -> None:
    layout = Layout(tensor_model_parallel_size=2, sequence_parallel=True)
    answers = ranks.run(program.delayed_from_the_start, wide, layout, ROWS)
    assert all(differs for differs, _ in answers)
    for (scale, largest), (twin_scale, twin_largest) in zip(answers[0][1], answers[1][1], strict=True):
        assert scale == twin_scale == pytest.approx(448 / max(largest, twin_largest))


def test_a_pass_alone_leaves_transformer_engine_nothing_to_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps scales, and which layer is the first, until a recomputation takes them, oldest first."""
    firsts, scales = [True], [deque([448.0]), deque([448.0])]
    names = "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    forward = SimpleNamespace(_is_first_fp8_module=firsts)
    monkeypatch.setattr(sys.modules[names[-1]], "activation_recompute_forward", forward, raising=False)
    state = SimpleNamespace(fp8_tensors_recompute_buffer=scales)
    monkeypatch.setattr(fp8_utils, "FP8GlobalStateManager", state, raising=False)
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: lambda **arguments: [])
    stage: Any = SimpleNamespace(config=SimpleNamespace(expert_model_parallel_size=1))
    model: Any = SimpleNamespace(fp8=Fp8(Fp8Options("hybrid", "delayed"), stage), config=stage.config, after_pass=[])

    def kept(forward_only: bool) -> list[int]:
        schedule._run(model, stage, [[]], print, with_entropy=False, forward_only=forward_only)
        return [len(firsts), *map(len, scales)]

    assert kept(forward_only=False) == [1, 1, 1] and kept(forward_only=True) == [0, 0, 0]


def test_all_ranks_have_the_same_delayed_scales_after_a_step(narrow: str, ranks: RankPool) -> None:
    layout = Layout(tensor_model_parallel_size=2)
    answers = ranks.run(program.scales_follow, narrow, layout, 3)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert answers[0][0] != answers[0][1] != answers[0][2]


def test_training_goes_on_bit_for_bit(narrow: str, other: str, tmp_path: Path, ranks: RankPool) -> None:
    """With scales from earlier steps; ``blockwise`` ones leave no state behind (``test_megatron_fp8_weights.py``)."""
    layout = Layout(tensor_model_parallel_size=2)
    for answer in ranks.run(program.save_and_resume, narrow, other, layout, str(tmp_path)):
        went_on, resumed, without, after_without = answer
        assert resumed == went_on
        assert without != went_on
        for (loss, norm, _), (exact, exact_norm, _) in zip(went_on, without, strict=True):
            assert loss == pytest.approx(exact, rel=0.05) and norm == pytest.approx(exact_norm, rel=0.3)
        assert np.isfinite(after_without).all()


def test_offloading_changes_nothing(narrow: str, one_rank: RankPool) -> None:
    fp8 = Fp8Options("emulated", "delayed")
    (stayed,) = one_rank.run(program.trained, narrow, Layout(), fp8, False, ROWS)
    (moved,) = one_rank.run(program.trained, narrow, Layout(), fp8, True, ROWS)
    assert np.array_equal(moved, stayed)


def test_training_sees_new_weights_at_every_step(narrow: str, one_rank: RankPool) -> None:
    """No quantized weight outlives a step; otherwise the loss would stay where it is."""
    (before,) = one_rank.run(program.statistics, narrow, Layout(), BLOCKWISE, ROWS)
    (after,) = one_rank.run(program.trained, narrow, Layout(), BLOCKWISE, False, ROWS)
    (exact,) = one_rank.run(program.trained, narrow, Layout(), None, False, ROWS)
    assert distance(after, exact) < 0.5 * distance(before, exact)
