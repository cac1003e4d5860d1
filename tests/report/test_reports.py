from contextlib import closing

import matplotlib.image
import pytest

from openrlhf_gtpo.cli.report import main
from openrlhf_gtpo.report import curves, names
from openrlhf_gtpo.report.curves import plot_comparison, plot_run
from openrlhf_gtpo.report.metrics import MetricsWriter, read_runs, series
from openrlhf_gtpo.report.summary import comparison_markdown


def _run(path, steps=4, evaluations=((0, 0.2), (4, 0.5)), seed=1, entropies=True, more=lambda kind, step: {}):
    with closing(MetricsWriter(path)) as writer:
        writer.write("run", 0, {"seed": seed, names.TIMING_START: 30.0})
        for step in range(1, steps + 1):
            metrics = {
                names.REWARD_MEAN: 0.1 * step,
                names.RESPONSE_LENGTH_MEAN: 10 - step,
                names.timing(names.GENERATION): 100.0 if step == 1 else 2.0,
                names.TIMING_STEP_TOTAL: 110.0 if step == 1 else 8.0,
                names.tokens_per_second("generation"): 1234.0,
            }
            if entropies:
                metrics |= {names.ENTROPY_ALL: 1.0 / step, names.ENTROPY_POSITIVE: 0.5, names.ENTROPY_NEGATIVE: None}
            writer.write("train", step, metrics | more("train", step))
        for step, value in evaluations:
            metrics = {"eval_products_pass1": value, names.EVAL_RESPONSE_LENGTH_MEAN: 9.0}
            writer.write("eval", step, metrics | more("eval", step))
        if steps > 2:  # resumed
            writer.write("run", 2, {"seed": seed, names.TIMING_START: 12.0})
        writer.write("run", steps, {"seed": seed, "ended": True})
    return path


RUNS = {
    "whole": {},
    "one step": {"steps": 1, "evaluations": ((0, 0.2), (1, 0.3))},
    "no evaluation": {"evaluations": ()},
    "no training step": {"steps": 0, "evaluations": ((0, 0.2),)},
    "no entropies": {"entropies": False},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
@pytest.mark.filterwarnings("error")
def test_every_kind_of_run_is_drawn(tmp_path, settings):
    rows = read_runs(_run(tmp_path / "m.jsonl", **settings))[-1]
    for png in (
        plot_run(rows, tmp_path / "new" / "run.png", "title"),
        plot_comparison({"a": [rows, rows], "b": [rows], "c": []}, tmp_path / "new" / "compare.png"),
    ):
        height, width = matplotlib.image.imread(png).shape[:2]
        assert width > 1200 and height > 400


def test_without_evaluations_a_table_has_the_training_reward(tmp_path):
    runs = [read_runs(_run(tmp_path / str(seed), seed=seed, evaluations=()))[-1] for seed in (1, 2)]
    late = [series(rows, "train", names.REWARD_MEAN)[1][-1] for rows in runs]
    first, *_, last = comparison_markdown({"a": runs}).splitlines()[2:]
    assert first.startswith(f"| a, run 1 (seed 1) | {late[0]:.3f} | ")
    assert last.startswith(f"| **a, mean of 2** | {sum(late) / 2:.3f} ± ")


def test_a_plot_has_intervals_at_held_out_points_and_shades_steps_without_learning(tmp_path, monkeypatch):
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        writer.write("eval", 0, {"eval_x_pass1": 0.5, "eval_x_pass1_stderr": 0.1})
        for step in (1, 2, 3):
            idle = {names.NOTHING_LEARNED: "all fail"} if step > 1 else {}
            writer.write("train", step, {names.REWARD_MEAN: 0.0, **idle})
        writer.write("eval", 3, {"eval_x_pass1": 0.6})
    saved = []
    monkeypatch.setattr(curves, "save", lambda figure, *rest: saved.append(figure))
    rows = read_runs(tmp_path / "m.jsonl")[-1]
    plot_run(rows, tmp_path / "m.png")
    reward = saved[0].axes[0]
    [bars] = [drawn for drawn in reward.collections if hasattr(drawn, "get_segments")]
    [segment] = bars.get_segments()
    assert segment[:, 0].tolist() == [0, 0] and segment[:, 1].tolist() == pytest.approx([0.304, 0.696])
    assert [patch.get_extents().width > 0 for patch in reward.patches] == [True, True]
    assert "nothing learned" in {text.get_text() for text in reward.get_legend().get_texts()}
    assert comparison_markdown({"a": [rows]}).endswith("\na, run 1: nothing was learned in 2 of 3 steps.\n")


def test_the_summary_has_the_change_and_the_median_time(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text('{"kind": "run", "step": 0, "run": "x"}\n')
    assert main(["run", str(tmp_path / "none.jsonl")]) != 0 and "has no step yet" in capsys.readouterr().err
    assert main(["run", str(_run(tmp_path / "m.jsonl"))]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no terminal, no colors
    for cells in (("products", "0.200", "0.500", "+0.300"), ("generation", "2.00", "25%", "1,234"), ("8.00", "100%")):
        assert any(all(cell in line for cell in cells) for line in out.splitlines()), cells
    assert "until the first rollout: 42 s" in out  # both starts


def test_two_runs_in_one_file_are_two_runs_in_every_report(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    _run(path, steps=5, evaluations=((0, 0.2), (5, 0.9)))
    _run(path, steps=2, evaluations=((0, 0.2), (2, 0.1)))
    assert main(["run", str(path), "--png", str(tmp_path / "run.png")]) == 0
    out = capsys.readouterr().out
    for words in ("run 1 of 2", "run 2 of 2", "Training: 5 steps", "Training: 2 steps", "0.900", "0.100"):
        assert words in out
    assert main(["compare", f"gtpo={path}"]) == 0
    assert "**gtpo, mean of 2** | products | 0.200 ± 0.000 | 0.500 ± 0.566" in capsys.readouterr().out


def test_a_run_that_died_and_was_started_anew_is_not_one_more_seed(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    for ends in (False, True, False):  # the last may still be running
        with closing(MetricsWriter(path)) as metrics:
            metrics.begin(0, {"seed": 1})
            metrics.write("train", 1, {"reward": 0.5})
            if ends:
                metrics.end()
    assert main(["compare", f"gtpo={path}"]) == 0
    said = capsys.readouterr()
    assert said.err == f"{path}: left out 1 of 3 runs, which did not finish.\n"
    assert said.out.count("gtpo, run") == 2


def test_comparison_has_a_row_a_run_and_means_of_the_complete_ones(tmp_path):
    runs = {
        "gtpo": [
            read_runs(_run(tmp_path / "a", seed=1, evaluations=((0, 0.2), (4, 0.6))))[-1],
            read_runs(_run(tmp_path / "b", seed=2, evaluations=((0, 0.4), (4, 0.6))))[-1],
            read_runs(_run(tmp_path / "c", seed=3, evaluations=((0, 0.9),)))[-1],
        ],
        "none": [read_runs(_run(tmp_path / "d", evaluations=()))[-1]],
    }
    lines = comparison_markdown(runs).splitlines()
    assert lines[2] == "| gtpo, run 1 (seed 1) | products | 0.200 | 0.600 | +0.400 | 4 |"
    assert lines[4] == "| gtpo, run 3 (seed 3) | products | 0.900 | - | - | 4 |"
    assert lines[5] == "| **gtpo, mean of 2** | products | 0.300 ± 0.141 | 0.600 ± 0.000 | +0.300 ± 0.141 | |"
    assert lines[6] == "| none, run 1 (seed 1) | none | - | - | - | 4 |"
    assert {line.count("|") for line in lines} == {7}


def test_command_line_writes_its_files(tmp_path, capsys):
    a, b = _run(tmp_path / "a.jsonl"), _run(tmp_path / "b.jsonl", seed=2)
    assert main(["run", str(a), "--png", str(tmp_path / "run.png")]) == 0
    png, markdown = tmp_path / "compare.png", tmp_path / "new" / "table.md"
    arguments = [f"gtpo={a}", f"gtpo={b}", f"grpo={a}", "--png", str(png), "--markdown", str(markdown)]
    assert main(["compare", *arguments]) == 0
    assert (tmp_path / "run.png").stat().st_size > 10_000 and png.stat().st_size > 10_000
    assert markdown.read_text() in capsys.readouterr().out
