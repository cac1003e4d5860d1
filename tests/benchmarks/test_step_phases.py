"""Phases of a step by hand: each rate has its own tokens, ratios are within one alternation, MFU is over all GPUs."""

from dataclasses import replace

import matplotlib.image
import pytest

from benchmarks.suite.plots import plot_step_phases
from benchmarks.suite.step_phases import COUNTED, PHASES, Setup, measured_steps, of_run, ratios, summary
from benchmarks.suite.train import print_phases
from openrlhf_gtpo.report import names

SETUP = Setup(
    gpus=4,
    busy={"rollout": 1, "old_log_probs": 3, "shaping": 0, "train": 3, "weight_sync": 4},
    passes={"rollout": 1, "old_log_probs": 2, "train": 6},
    epochs=2,
    precision={"rollout": "bf16", "old_log_probs": "fp8 (e4m3, blockwise)", "train": "fp8 (e4m3, blockwise)"},
)
PEAK = names.peak_memory("actor", names.PPO_TRAIN)


def row(step, times=1.0, **more):
    """A step of 20 s, 2 s of it in no phase, over 300 prompt and 100 response tokens."""
    seconds = (4.0, 3.0, 1.0, 8.0, 2.0)
    return {
        "kind": "train",
        "step": step,
        **{timing: value * times for (timing, _), value in zip(PHASES.values(), seconds, strict=True)},
        names.TIMING_STEP_WALL: 20.0 * times,
        names.TIMING_STEP_TOTAL: 1.0,  # upstream's sum, which is not the whole step
        names.TOKENS_PROMPT: 300,
        names.TOKENS_RESPONSE: 100,
        names.FLOPS_FORWARD: 1e9,
        PEAK: 1.5,
        **more,
    }


def test_every_phase_by_hand():
    run = of_run([row(2), row(3, 3.0, **{PEAK: 2.5})], SETUP)  # means: twice the first step's seconds
    phases = run["phases"]
    assert {name: one["seconds"] for name, one in phases.items()} == {
        "rollout": 8,
        "old_log_probs": 6,
        "shaping": 2,
        "train": 16,
        "weight_sync": 4,
        "step": 40,
    }
    tokens = {"rollout": 100, "old_log_probs": 400, "shaping": 100, "train": 800, "weight_sync": 400, "step": 400}
    assert {name: one["tokens"] for name, one in phases.items()} == tokens
    for one in phases.values():
        assert one["tokens_per_second_per_gpu"] * one["seconds"] * SETUP.gpus == pytest.approx(one["tokens"])
        assert one["share"] == one["seconds"] / 40
    assert run["idle"] == {
        "seconds": 4,
        "share": 0.1,
        "gpu_share": pytest.approx(1 - (8 * 1 + 6 * 3 + 16 * 3 + 4 * 4) / (40 * 4)),
    }
    passes = {"rollout": 1, "old_log_probs": 2, "shaping": 0, "train": 6, "weight_sync": 0, "step": 9}
    assert {name: one["flops"] for name, one in phases.items()} == {name: n * 1e9 for name, n in passes.items()}
    assert run["peak_memory_gib"] == {"actor/ppo_train": 2.5}


def test_a_rollout_that_is_sampled_ahead_has_the_engines_seconds():
    """It shares them with the step before; what belongs to no phase is counted by the trainer's clock."""
    waits = {names.timing(names.GENERATION): 1.0, names.TIMING_STEP_WALL: 17.0}
    run = of_run([row(2, **waits, **{names.TIMING_ROLLOUT: 10.0})], SETUP)
    assert run["phases"]["rollout"]["seconds"] == 10 and run["phases"]["rollout"]["tokens"] == 100
    assert run["idle"]["seconds"] == 17 - (1 + 3 + 1 + 8 + 2)
    assert run["idle"]["gpu_share"] == pytest.approx(1 - (10 * 1 + 3 * 3 + 8 * 3 + 2 * 4) / (17 * 4))


def test_a_rollout_counts_all_that_was_sampled():
    """Dynamic sampling has dropped two thirds of it, and other phases never see those; a replay does not say."""
    kept, partly = (of_run([row(1), row(2, **more)], SETUP) for more in ({}, {names.TOKENS_SAMPLED: 500}))
    assert kept == partly, "one of the steps does not say it"
    found = of_run([row(1, **{names.TOKENS_SAMPLED: 100}), row(2, **{names.TOKENS_SAMPLED: 500})], SETUP)["phases"]
    assert found["rollout"]["tokens"] == 300 and found["rollout"]["flops"] == 3e9
    assert found["rollout"]["tokens_per_second_per_gpu"] == pytest.approx(300 / 4 / 4)
    assert found["step"]["flops"] == sum(found[name]["flops"] for name in PHASES) == 11e9
    same = [name for name in PHASES if name != "rollout"]
    assert [found[name] for name in same] == [kept["phases"][name] for name in same]


def test_log_probs_that_no_model_computes_have_seconds_and_no_rate():
    without = replace(SETUP, passes=SETUP.passes | {"old_log_probs": 0})
    runs = [of_run([row(1)], setup) for setup in (SETUP, without)]
    found = runs[1]["phases"]["old_log_probs"]
    assert found["seconds"] == 3 and found["tokens"] == found["flops"] == 0
    assert found["tokens_per_second_per_gpu"] is None and "old_log_probs" not in ratios(runs[:1], runs[1:])
    assert runs[1]["phases"]["shaping"] == runs[0]["phases"]["shaping"]


def test_a_summary_is_of_medians_and_mfu_is_over_all_gpus():
    runs = [of_run([row(1, times)], SETUP) for times in (1.0, 2.0, 6.0)]
    found = summary(runs, flops_per_second=1e9)
    assert found["phases"]["train"]["seconds"] == 16 and found["idle"]["seconds"] == 4
    assert found["phases"]["train"]["mfu"] == pytest.approx(6e9 / 16 / 1e9)
    assert found["phases"]["step"]["mfu"] == pytest.approx(9e9 / 40 / 1e9)
    assert found["phases"]["shaping"]["mfu"] is None, "shaping multiplies nothing"
    assert found["phases"]["rollout"]["tokens_per_second_per_gpu"] == pytest.approx(100 / 8 / 4)
    assert summary(runs, None)["phases"]["train"]["mfu"] is None
    runs[1]["peak_memory_gib"]["actor/old_log_probs"] = 3.0  # of a failed audit
    for order in (runs, runs[::-1], runs[1:]):
        assert summary(order, None)["peak_memory_gib"] == {"actor/ppo_train": 1.5, "actor/old_log_probs": 3.0}


def test_without_the_model_s_operations_there_is_no_mfu():
    rows = [{name: value for name, value in row(1).items() if name != names.FLOPS_FORWARD}]
    run = of_run(rows, SETUP)
    assert run["phases"]["train"]["flops"] is None and run["phases"]["train"]["tokens"] == 800
    assert summary([run], 1e9)["phases"]["train"]["mfu"] is None


def test_a_ratio_above_one_is_faster_than_the_first_alternation_by_alternation():
    """Two, four and three times as fast in successive alternations, while the machine slows down threefold."""
    base = [of_run([row(1, times)], SETUP) for times in (1.0, 2.0, 3.0)]
    other = [of_run([row(1, times)], SETUP) for times in (0.5, 0.5, 1.0)]
    found = ratios(base, other)
    assert set(found) == set(COUNTED)
    for spread in found.values():
        assert spread == pytest.approx((2, 3, 4))


def test_a_faster_run_of_more_tokens_is_compared_by_its_rate():
    more = row(1, 2.0) | {names.TOKENS_PROMPT: 1200, names.TOKENS_RESPONSE: 400}
    assert ratios([of_run([row(1)], SETUP)], [of_run([more], SETUP)])["train"] == pytest.approx((2, 2, 2))


def test_the_first_steps_and_evaluations_are_not_measured():
    rows = [row(1, 50.0), {"kind": "eval", "step": 1, "eval_products_pass1": 0.5}, row(2), row(3), row(4, 9.0)]
    assert [found["step"] for found in measured_steps(rows, warmup=1, steps=2)] == [2, 3]


def test_missing_steps_and_metrics_are_named():
    with pytest.raises(ValueError, match="it made 2 of 3 steps"):
        measured_steps([row(1), row(2)], warmup=1, steps=2)
    with pytest.raises(ValueError, match="step 2 has no timing/advantages"):
        measured_steps([row(1), row(2, **{names.timing(names.ADVANTAGES): None})], warmup=1, steps=1)


def results(*configurations, repeat=2):
    measured, found = {}, {"summary": {}, "ratios": {}}
    for name, times in configurations:
        setup = {name: getattr(SETUP, name) for name in SETUP.__dataclass_fields__}
        runs = [{"rows": [row(2, times)], **of_run([row(2, times)], SETUP)} for _ in range(repeat)]
        measured[name] = {"flags": [], "setup": setup, "runs": runs}
        found["summary"][name] = summary(runs, 1e9)
    for name, _ in configurations[1:]:
        found["ratios"][name] = ratios(measured[configurations[0][0]]["runs"], measured[name]["runs"])
    product = {"side": 2048, "dtype": "bf16", "flops_per_second": {4: [1e12, 2e12]}}
    return {"configurations": measured, "matrix": product, **found}


@pytest.mark.parametrize("others", [(), (("fp8", 0.5),), (("fp8", 0.5), ("tp8", 2.0))], ids=len)
@pytest.mark.filterwarnings("error")
def test_it_is_drawn_and_printed(tmp_path, capsys, others):
    found = results(("bf16", 1.0), *others)
    height, width = matplotlib.image.imread(plot_step_phases(found, tmp_path / "new" / "phases.png")).shape[:2]
    assert width > 1000 and height > 250
    print_phases(found)
    printed = capsys.readouterr().out
    for words in (
        ("train", "8.00", "40.0%", "fp8 (e4m3, blockwise)"),
        ("idle", "2.00", "10.0%"),
        ("GPU time idle", "43.8%"),
    ):
        assert any(all(word in line for word in words) for line in printed.splitlines()), words
    assert ("2.00 (2.00 to 2.00)" in printed) == bool(others)
    assert "product of 2048 x 2048 matrices" in printed and "1 to 2 TFLOP/s" in printed
