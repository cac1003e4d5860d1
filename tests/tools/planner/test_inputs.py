"""What the planner reads: a cluster, and the lengths of rows."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.studies.planner_rows import H200, QWEN_1_5B
from openrlhf_gtpo.cli import plan
from openrlhf_gtpo.tools.planner.cluster import parse_cluster
from openrlhf_gtpo.tools.planner.workload import Workload


def test_a_cluster_line() -> None:
    cluster = parse_cluster("H100-80G", 32, 4)
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node) == (32, 4, 8)
    assert cluster.gpu.link == 450e9 and cluster.network == 50e9
    assert parse_cluster("h100-80g", 24).nodes == 3 and parse_cluster("h100-80g", 4).nodes == 1
    assert parse_cluster("h100-80g", 8, network_gbit=200).network == 25e9


def test_a_file_that_the_planner_did_not_write_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert plan.main(["--model", "7b", "--gpus", "8", "--emit", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_a_plan_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The assumed length of responses, and what FP8 is planned to gain; a length that is given is not assumed."""
    words = ["--model", "Qwen/Qwen2.5-7B-Instruct", "--gpus", "8"]
    assert plan.main(words) == 0
    printed = capsys.readouterr().out
    found = re.search(r"responses of 978 of 4096 tokens on average, (\d+) s a step; at 4096 .* takes (\d+) s", printed)
    assert found and f"a step takes {found[1]} s" in printed and int(found[2]) > 3 * int(found[1])
    assert re.search(r"the best in BF16, TP.*, takes \d+ s: the plan assumes that FP8 gains 1\.\d\d ×", printed)
    assert plan.main([*words, "--mean-response", "4096", "--fp8", "off"]) == 0
    printed = capsys.readouterr().out
    assert "the same layout" not in printed and "FP8" not in printed


def test_a_run_stands_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one H200 brings its lengths and its seconds. Sampled ahead, its rollout takes what the engines took."""
    (config := tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    words = ["--json", "--model", str(config), "--gpus", "1", "--gpu", "h200-141g", "--response-length", "512"]
    words += ["--prompts-per-step", "32", "--run"]

    def planned(*more: str) -> dict[str, Any]:
        assert plan.main([*words, *more]) == 0
        return json.loads(capsys.readouterr().out)

    file = H200 / "train_1.5b.jsonl"
    first, *steps = map(json.loads, file.read_text().splitlines())
    beside = planned(str(file))
    mean = sum(step["tokens/response"] for step in steps) / len(steps) / 512
    assert (
        beside["candidates"] == planned(str(file), "--mean-prompt", "42", "--mean-response", str(mean))["candidates"]
    )
    longer = planned(str(file), "--mean-response", "512")["candidates"]
    assert longer[0]["seconds"]["rollout"] > beside["candidates"][0]["seconds"]["rollout"]
    assert beside["measured"] == {
        phase: median(step[name] for step in steps)
        for phase, name in {
            "rollout": "timing/generation",
            "forward": "timing/make_experience",
            "train": "timing/ppo_train",
            "sync": "timing/broadcast",
            "step": "timing/step_wall",
        }.items()
    }
    ahead = [step | {"timing/rollout": 20.0 + number} for number, step in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, *ahead)))
    assert planned(str(tmp_path))["measured"] == beside["measured"] | {"rollout": 21.0}
    assert plan.main([*words[1:], str(tmp_path)]) == 0
    assert re.search(r"^rollout +21 ", capsys.readouterr().out, re.MULTILINE)


def test_a_run_of_other_rollouts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "3b", "--gpus", "1", "--run", str(H200 / "train_1.5b.jsonl"), "--prompts-per-step", "64"]
    assert plan.main(words) == 2
    assert "512 responses a step and the plan has 1024" in capsys.readouterr().err


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    for mean in (20.0, 700.0, 3000.0, 4000.0):
        work = Workload(mean_response=mean)
        assert work.response == pytest.approx(mean, rel=1e-3)
        assert work.responses == tuple(sorted(work.responses)) and work.responses[-1] <= 4096
    assert Workload().responses[100] == pytest.approx(4096 / 6, rel=0.02)


def test_micro_batches_hold_every_row() -> None:
    """One holds eight rows of 1024 + about 978 tokens, 32 hold two whole rows each, and an overlong row is alone."""
    work = Workload(samples_per_prompt=1, prompts_per_step=8)
    count, tokens = work.micro_batches(replicas=1, context=1)
    assert count == 1 and tokens == pytest.approx(8 * work.prompt + 8 * work.response, rel=0.1)
    rows = {"prompt_length": 10, "response_length": 90, "prompts_per_step": 8}
    work = Workload(**rows, mean_prompt=10, mean_response=90, max_tokens_per_gpu=250)
    count, tokens = work.micro_batches(replicas=2, context=1)
    assert (count, tokens) == (32, 200)  # two whole rows in each
    assert work.micro_batches(replicas=2, context=2) == (13, pytest.approx(64 * 100 / 13))  # up to five
    assert Workload(**rows, max_tokens_per_gpu=30).micro_batch_tokens(context=2) == 100
