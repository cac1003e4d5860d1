"""The page of a set of runs: what it says, what it is made of, and what is refused."""

import json
import math
import re
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from openrlhf_gtpo.cli.report import main
from openrlhf_gtpo.report.metrics import MetricsWriter, read_runs, series
from openrlhf_gtpo.tools.experiment.comparison import paired_difference
from tests.support.studies import write_study


def page(*arguments: object) -> int:
    return main(["page", *map(str, arguments)])


def test_an_experiments_page_has_figures_comparisons_and_what_differs(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", {"dapo": 0.0, "gtpo": 0.3, "grpo<b>": 0.001})
    (tmp_path / "study" / "gtpo" / "seed-4").mkdir()
    (tmp_path / "study" / "gtpo" / "seed-4" / "flags.json").write_text("{}")
    assert page(study, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Runs: 3 dapo, 3 grpo&lt;b&gt;, 3 gtpo." in text and "<b>" not in text
    assert "Left out: " + str(study / "gtpo" / "seed-4") in text
    assert "math500, mean@32: gtpo is better than dapo (+0." in text
    assert "grpo&lt;b&gt; against dapo: no difference seen" in text and "3 seeds can see 0." in text
    assert text.count("<svg") == 4 and "#010203" not in text and "http-equiv" in text and "<script" not in text
    for title in ("Policy entropy", "Response length", "Best of 32 held-out responses"):
        assert f'aria-label="{title}"' in text
    assert "<td>dapo</td><td>grpo&lt;b&gt;</td><td>gtpo</td>" in text  # algo.advantage.estimator
    assert "MODEL" not in text  # all runs have it
    assert len(list((tmp_path / "out").glob("*.png"))) == len(list((tmp_path / "out").glob("*.svg"))) == 4


def test_the_effect_is_that_of_pairs(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", {"dapo/low": 0.0, "dapo/high": 0.1, "gtpo/low": 0.2, "gtpo/high": 0.2})
    assert page(study, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()

    def scores(label: str) -> np.ndarray:
        files = [study / label / f"seed-{seed}" / "evaluation" / "scores.json" for seed in (1, 2, 3)]
        return np.array([json.loads(file.read_text())["scores"]["math500"]["mean@32"] for file in files])

    for setting in ("low", "high"):  # each is beside the baseline with the same setting
        expected = paired_difference(scores(f"gtpo/{setting}") - scores(f"dapo/{setting}"))
        assert expected.sentence(f"gtpo/{setting}", f"dapo/{setting}") in text
    assert "is not compared" not in text
    expected = paired_difference((scores("gtpo/high") - scores("dapo/high"))[:2])
    shutil.copytree(study, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "dapo" / "high" / "seed-3" / "evaluation")
    runs = [f"{name}={tmp_path}/copy/{name}/high/seed-{seed}" for name in ("gtpo", "dapo") for seed in (1, 2, 3)]
    assert page(*runs, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    assert expected.sentence("gtpo", "dapo") in (tmp_path / "out" / "index.html").read_text()
    shutil.rmtree(study / "dapo" / "low")
    assert page(study, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "gtpo/low is not compared: it shares no seed and measure with the baseline." in text
    assert text.count("is not compared") == 1


def test_all_methods_are_compared_with_the_baseline_at_once(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", {"dapo": 0.0, "gtpo": 0.3, "grpo": 0.001, "rloo": 0.0})
    shutil.rmtree(study / "rloo" / "seed-2")
    shutil.rmtree(study / "rloo" / "seed-3")
    assert page(study, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "math500, mean@32: among all 2 methods together, these differ from dapo: gtpo (p &lt; 0.001)." in text
    assert "<td>&lt; 0.001</td>" in text and "<td>0.000</td>" not in text
    assert (
        page(f"gtpo={study}/gtpo/seed-1", f"dapo={study}/dapo/seed-1", "--baseline", "dapo", "--output", tmp_path) == 0
    )
    assert "among all" not in (tmp_path / "index.html").read_text().split("Differences")[0]


def write_evaluations(path: Path, rewards: dict[int, float]) -> None:
    with closing(MetricsWriter(path)) as writer:
        writer.begin(0, {"seed": 1})
        for step, reward in rewards.items():
            writer.write("eval", step, {"eval_math_pass1": reward})
        writer.end()


def test_held_out_rewards_are_compared_at_one_step(tmp_path: Path) -> None:
    """A method that went on longer is compared where the other ended; the means have both of its steps."""
    rewards = {"gtpo": {0: 0.2, 9: 0.3, 10: 0.31, 20: 0.52}, "grpo": {7: 0.4}, "dapo": {0: 0.2, 9: 0.3, 10: 0.31}}
    for label, found in rewards.items():
        write_evaluations(tmp_path / label, found)
    runs = [f"{label}={tmp_path / label}" for label in rewards]
    assert page(*runs, "--baseline", "dapo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "math, held-out reward at step 10: gtpo is +0.000 relative to dapo" in text and "better" not in text
    why = "their runs with the same seeds were never all evaluated at the same step."
    assert f"math, held-out reward: grpo is not compared with dapo, as {why}" in text
    assert text.count("is not compared") == 1
    means = re.findall(r"<tr><th scope=.row.>math, (.*)</th><td>(.*)</td><td>(.*)</td><td>(.*)</td></tr>", text)
    assert means == [
        ("held-out reward at step 7", "", "", "0.400"),
        ("held-out reward at step 10", "0.310", "0.310", ""),
        ("held-out reward at step 20", "", "0.520", ""),
    ]


def test_openrlhfs_own_folders_are_read(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    tmp_path /= "seed2_of_the_data"  # names a folder of several runs
    for name, reward in (("a_seed1", 0.25), ("a_seed2", 0.25), ("b_seed1", 0.5)):
        with writer(log_dir=str(tmp_path / name)) as events:
            for step in (1, 2):
                events.add_scalar("train/reward", reward, step)
                events.add_scalar("train/reward/best_at_g", 1.0, step)
                events.add_scalar("eval/eval_math_pass1", reward + 0.25 * step, step)
            events.add_scalar("eval/eval_math_pass1", math.nan, 3)  # not a number here either
    for start, (first, last, reward) in enumerate(((1, 4, 0.75), (3, 3, 0.5))):  # killed, and resumed after step 2
        with writer(log_dir=str(tmp_path / "resumed"), filename_suffix=f".{start}") as events:
            for step in range(first, last + 1):
                events.add_scalar("train/reward", reward, step)
                events.add_scalar("eval/eval_math_pass1", reward, step)
    rows = read_runs(tmp_path / "resumed")[-1]
    for kind, name in (("train", "reward/mean"), ("eval", "eval_math_pass1")):
        assert series(rows, kind, name) == ([1, 2, 3], [0.75, 0.75, 0.5])
    rows = read_runs(tmp_path / "a_seed1")[-1]
    assert [row["reward/mean"] for row in rows if row["kind"] == "train"] == [0.25, 0.25]
    runs = [f"grpo={tmp_path / 'a_seed1'}", f"grpo={tmp_path / 'a_seed2'}", f"dapo={tmp_path / 'b_seed1'}"]
    assert page(*runs, "--baseline", "grpo", "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert (
        "math, held-out reward at step 2: dapo is +0.250 relative to grpo; 1 seed cannot show whether that is chance."
        in text
    )
    assert "Best of a prompt&#39;s responses, in training" in text or "Best of a prompt's responses" in text
