import errno
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.axes import Axes

from openrlhf_gtpo.cli.report import main
from openrlhf_gtpo.report import curves, names
from openrlhf_gtpo.report.curves import plot_comparison, plot_run
from openrlhf_gtpo.report.metrics import MetricsWriter, read_runs, series
from openrlhf_gtpo.report.summary import comparison_markdown, print_run_summary


def _run(path, steps=4, evaluations=((0, 0.2), (4, 0.5)), seed=1, entropies=True, more=lambda kind, step: {}):
    with closing(MetricsWriter(path)) as writer:
        writer.write("run", 0, {"seed": seed})
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


def test_each_of_thirty_methods_has_a_line_of_its_own(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot

    def noting(axes, *points, **look):
        if "label" in look:
            drawn.append((look["color"], look["linestyle"]))
        return plot(axes, *points, **look)

    monkeypatch.setattr(Axes, "plot", noting)
    rows = read_runs(_run(tmp_path / "m.jsonl"))
    curves.plot_figures({f"method {i}": rows for i in range(30)}, tmp_path / "figures")
    assert len(drawn) == 3 * 30 and len(set(drawn)) == 30, "three of the four figures have values"
    drawn.clear()
    plot_comparison({f"method {i}": rows for i in range(30)}, tmp_path / "curves.png")
    assert len(drawn) == 3 * 30 and len(set(drawn)) == 30


def test_a_figures_legend_counts_the_runs_that_it_shows(tmp_path):
    whole, without = (read_runs(_run(tmp_path / str(e), entropies=e))[-1] for e in (True, False))
    paths = curves.plot_figures({"a": [whole, without, whole]}, tmp_path / "figures")
    for title, shown in (("Policy entropy", 2), ("Response length", 3)):
        assert f">a (n={shown})<" in paths[title].read_text()


def test_every_label_is_in_the_legend(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(curves, "save", lambda figure, *rest: saved.append(figure))
    trained = read_runs(_run(tmp_path / "a.jsonl", evaluations=()))
    with closing(MetricsWriter(tmp_path / "b.jsonl")) as writer:
        for step, value in ((0, 0.25), (4, 0.5)):
            writer.write("eval", step, {"eval_x_pass1": value})
    plot_comparison({"a": trained, "b": read_runs(tmp_path / "b.jsonl")}, tmp_path / "curves.png")
    assert {text.get_text() for text in saved[0].legends[0].get_texts()} == {"a (n=1)", "b (n=1)"}


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


def test_without_evaluations_a_table_has_the_training_reward(tmp_path):
    runs = [read_runs(_run(tmp_path / str(seed), seed=seed, evaluations=()))[-1] for seed in (1, 2)]
    late = [series(rows, "train", names.REWARD_MEAN)[1][-1] for rows in runs]
    first, *_, last = comparison_markdown({"a": runs}).splitlines()[2:]
    assert first.startswith(f"| a, run 1 (seed 1) | {late[0]:.3f} | ")
    assert last.startswith(f"| **a, mean of 2** | {sum(late) / 2:.3f} ± ")


def test_a_plot_of_zeros_begins_at_zero(tmp_path, monkeypatch):
    with closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        for step in (1, 2):
            zeros = (names.REWARD_MEAN, names.ENTROPY_ALL, names.RESPONSE_LENGTH_MEAN)
            writer.write("train", step, dict.fromkeys(zeros, 0.0))
    limits = []
    monkeypatch.setattr(curves, "save", lambda figure, *rest: limits.extend(axes.get_ylim() for axes in figure.axes))
    plot_run(read_runs(tmp_path / "m.jsonl")[-1], tmp_path / "m.png")
    assert [low for low, _ in limits] == [0.0] * 3 and all(high > 0 for _, high in limits)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_every_kind_of_run_is_summed_up(tmp_path, settings, capsys):
    print_run_summary(read_runs(_run(tmp_path / "m.jsonl", **settings))[-1])
    assert "Held-out reward" in capsys.readouterr().out


def test_the_summary_has_the_change_and_the_median_time(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text('{"kind": "run", "step": 0, "run": "x"}\n')
    assert main(["run", str(tmp_path / "none.jsonl")]) != 0 and "has no step yet" in capsys.readouterr().err
    assert main(["run", str(_run(tmp_path / "m.jsonl"))]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no terminal, no colors
    for cells in (("products", "0.200", "0.500", "+0.300"), ("generation", "2.00", "25%", "1,234"), ("8.00", "100%")):
        assert any(all(cell in line for cell in cells) for line in out.splitlines()), cells


def test_a_metric_that_an_end_of_the_run_lacks_has_its_step_beside_it(tmp_path, capsys):
    """As an audit's, which only some steps have."""

    def audits(kind, step):
        return {names.FP8_SIGN_FLIPS: 0.01 * step} if step in (2, 3) else {}

    assert main(["run", str(_run(tmp_path / "m.jsonl", more=audits))]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert [names.FP8_SIGN_FLIPS, *"0.020 (step 2) 0.030 (step 3)".split()] in rows
    assert [names.ENTROPY_ALL, "1.000", "0.250"] in rows


def test_little_is_not_shown_as_nothing(tmp_path, capsys):
    def little(kind, step):
        if kind == "eval":
            return {"eval_products_pass1_stderr": 0.0002}
        slow = {names.timing(names.BROADCAST): 0.004, names.tokens_per_second(names.BROADCAST): 0.4}
        return slow | {names.FP8_SIGN_FLIPS: 0.0004, names.SAMPLER_AUDIT["share_rank_correlation"]: 0.99996}

    assert main(["run", str(_run(tmp_path / "m.jsonl", more=little, evaluations=((0, 0.99975), (4, 1.0))))]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert [names.FP8_SIGN_FLIPS, "0.00040", "0.00040"] in rows and ["broadcast", "0.004", "0%", "0.4"] in rows
    assert [names.SAMPLER_AUDIT["share_rank_correlation"], "0.999960", "0.999960"] in rows
    assert "products 0.99975 ± 0.00020 1.000 ± 0.00020 +0.00025 2".split() in rows


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


def test_the_summary_repeats_warnings_in_a_line_each_and_has_standard_errors(tmp_path, capsys):
    def more(kind, step):
        if kind == "eval":
            return {"eval_products_pass1_stderr": 0.041 if step == 0 else 0.052}
        text = f"in each of the {step} groups [8 of them] " + 20 * "and so on, "
        return {names.WARNING_PREFIX + "groups": text} if step in (2, 3) else {}

    assert main(["run", str(_run(tmp_path / "m.jsonl", more=more))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("0.200 ± 0.041" in line and "0.500 ± 0.052" in line and "+0.300" in line for line in lines)
    [warning] = [line for line in lines if "Warning" in line]
    assert warning.startswith("Warning in 2 of 4 steps, last in step 3: in each of the 3 groups [8 of them] and so on")
    assert warning.endswith("and so on, ")


@pytest.mark.parametrize("source", ["math[hard]|$x_$", "math[/hard]"])
def test_a_data_source_and_a_title_may_have_any_name(tmp_path, capsys, source):
    evaluations = {f"eval_{source}_pass1": 0.25}
    path = _run(tmp_path / "m.jsonl", more=lambda kind, step: evaluations if kind == "eval" else {})
    png = tmp_path / "run.png"
    assert main(["run", str(path), "--png", str(png), "--title", source]) == 0
    assert any(source in line and "0.250" in line for line in capsys.readouterr().out.splitlines())
    assert main(["compare", f"{source}={path}", "--png", str(png)]) == 0
    lines = [line.replace(r"\|", "") for line in capsys.readouterr().out.splitlines()]
    assert {line.count("|") for line in lines if line.startswith("|")} == {7}


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


def test_a_full_disk_leaves_no_empty_files(tmp_path, capsys, monkeypatch):
    run, out = f"gtpo={_run(tmp_path / 'a.jsonl')}", tmp_path / "out"

    def full(path, content, *rest, **options):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    page = ["page", run, "--output", str(out)]
    for method, arguments in (
        ("write_text", ["compare", run, "--markdown", str(out / "table.md")]),
        ("write_bytes", ["compare", run, "--png", str(out / "curves.png")]),
        ("write_bytes", page),
        ("write_text", page),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Path, method, full)
            assert main(arguments) == 2
        assert capsys.readouterr().err.endswith("No space left on device\n")
        assert all(path.stat().st_size for path in out.iterdir())


def test_a_folder_gets_its_curves(tmp_path, capsys):
    _run(tmp_path / "metrics.jsonl")
    assert main(["run", str(tmp_path)]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'curves.png'}\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "{tmp}/none.jsonl"], "cannot read metrics from"),
        (["run", "{tmp}"], "metrics.jsonl"),
        (["compare", "{tmp}/a.jsonl"], "is not LABEL=FILE: write it as gtpo="),
        (["compare", "gtpo="], "is not LABEL=FILE"),
        (
            ["compare", "_a={tmp}/a.jsonl"],
            "Legends leave out a label that begins with _, such as '_a'; name it otherwise.",
        ),
        (["compare", "gtpo={tmp}/a.jsonl", "gtpo={tmp}/./a.jsonl"], "gtpo has {tmp}/./a.jsonl twice; name it once."),
        (
            ["compare", "gtpo={tmp}/a.jsonl", "--png", "{tmp}/x.png", "--markdown", "{tmp}/x.png"],
            "--markdown are both {tmp}/x.png",
        ),
        (["run", "{tmp}/a.jsonl", "--png", "{tmp}/a.jsonl"], "--png {tmp}/a.jsonl is the input, which would be lost"),
        (["run", "{tmp}/a.jsonl", "--png", "{tmp}"], "--png {tmp} cannot be written"),
        (["compare", "gtpo={tmp}/a.jsonl", "--markdown", "{tmp}/a.jsonl"], "--markdown {tmp}/a.jsonl is the input"),
        (["watch", "{tmp}/a.jsonl", "--pid", "0", "--steps", "0"], "Expected --steps >= 1 and below 2^31, got 0."),
        (["watch", "{tmp}/a.jsonl", "--pid", "0", "--steps", "9" * 400], "Expected --steps >= 1 and below 2^31"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(tmp_path, capsys, arguments, message):
    _run(tmp_path / "a.jsonl")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in error and error.count("\n") == 1


def test_the_room_imports_no_torch():
    modules = "openrlhf_gtpo.report.metrics, openrlhf_gtpo.report.curves, openrlhf_gtpo.report.summary"
    code = f"import sys, {modules}, openrlhf_gtpo.cli.report; print('torch' in sys.modules, 'openrlhf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
