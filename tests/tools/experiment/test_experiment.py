"""Experiments: what a file asks for, what is refused, and what an interruption leaves."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from openrlhf_gtpo.cli import experiment
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.tools.experiment import runner
from openrlhf_gtpo.tools.experiment.grid import read_grid
from openrlhf_gtpo.training.checks.results import check_metrics_file, check_results
from tests.support.studies import write_study


def entries(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output": str(tmp_path / "runs"),
        "flags": {"actor.model_name_or_path": "MODEL"},
        "methods": {"gtpo": {"algo.advantage.estimator": "gtpo"}, "grpo": {"algo.preset": "grpo"}},
        "settings": {"lr": {"low": {"actor.adam.lr": 1e-6}, "high": {"actor.adam.lr": 1e-5}}},
        "seeds": [1, 2],
        "baseline": "grpo",
    } | changed


def write(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(entries(tmp_path, **changed), sort_keys=False))
    return path


def test_a_grid_is_methods_by_settings_by_seeds(tmp_path: Path) -> None:
    grid = read_grid(write(tmp_path))
    assert [f"{run.label} {run.seed}" for run in grid.runs] == [
        f"{method}/{lr} {seed}" for method in ("gtpo", "grpo") for lr in ("low", "high") for seed in (1, 2)
    ]
    run = grid.runs[3]
    assert run.folder == tmp_path / "runs" / "gtpo" / "high" / "seed-2"
    assert run.flags == {
        "actor.model_name_or_path": "MODEL",
        "algo.advantage.estimator": "gtpo",
        "actor.adam.lr": 1e-5,
        "train.seed": 2,
        "logger.metrics_path": str(run.folder / "metrics.jsonl"),
        "ckpt.output_dir": str(run.folder / "model"),
        "ckpt.path": str(run.folder / "checkpoints"),
    }


@pytest.mark.parametrize(
    ("text", "key"),
    [("methods: {gtpo: {a: 1}, gtpo: {a: 2}}\nflags: {b: 1}\n", "gtpo"), ("flags:\n  b: 1\n  b: 2\n", "b")],
)
def test_what_comes_twice_is_not_lost(tmp_path: Path, text: str, key: str, capsys: Any) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(text + "output: runs\nseeds: [1]\n")
    assert experiment.main([str(path)]) == 2
    assert f"{key} is given twice; leave one out." in capsys.readouterr().err
    path.write_text(
        f"flags: &it {{}}\nmethods: {{a: *it, b: *it}}\noutput: {tmp_path}\nseeds: [1]\n"
    )  # an alias is not a repetition
    with pytest.raises(UsageError, match="flags: Dictionary should have at least 1 item"):
        read_grid(path)


# Stands in for training: it notes that it was started, writes metrics, and ends as the file of --way says.
TRAINER = """
import json, os, signal, sys
from pathlib import Path

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
metrics = Path(words["--logger.metrics_path"])
with (metrics.parent.parent / "starts").open("a") as starts:
    starts.write(metrics.parent.name + " " + ("resumed" if "--ckpt.load_enable" in sys.argv else "new") + chr(10))
rows = [
    {"kind": "run", "step": 0, "run": "x", "seed": int(words["--train.seed"])},
    {"kind": "eval", "step": 0, "eval_task_pass1": 0.25},
    {"kind": "train", "step": 1, "reward/mean": 0.5},
]
with metrics.open("a") as file:
    file.writelines(json.dumps(row | {"time": 1.0}) + chr(10) for row in rows)
way = Path(words["--way"])
if way.exists():
    how = way.read_text()
    way.unlink()
    if how == "checkpoint":
        (Path(words["--ckpt.path"]) / "_actor" / "global_step1").mkdir(parents=True)
    if how == "fail":
        print("train_ppo_ray stopped: no good reason", file=sys.stderr)
        sys.exit("the engine shuts down, which is a long story" * 30)
    os.kill(os.getpid(), signal.SIGTERM if how == "interrupt" else signal.SIGKILL)
with metrics.open("a") as file:
    file.write(json.dumps({"kind": "eval", "step": 1, "eval_task_pass1": 0.75, "time": 2.0}) + chr(10))
    file.write(json.dumps({"kind": "run", "step": 1, "run": "x", "ended": True, "time": 2.0}) + chr(10))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of one method and three seeds whose training is ``TRAINER``."""
    (tmp_path / "stand_in.py").write_text(TRAINER)

    def run(command: list[str], *args: Any, **kwargs: Any) -> int:
        """Return the status as ``run_and_clear`` does, which would also end what pytest has started."""
        place = command.index(sys.executable)
        status = subprocess.call([*command[: place + 1], str(tmp_path / "stand_in.py"), *command[place + 3 :]])
        return 128 + signal.SIGTERM if status == -signal.SIGTERM else status

    monkeypatch.setattr(runner, "run_and_clear", run)
    actor, data = SimpleNamespace(model_name_or_path="model"), SimpleNamespace(label_key=None)
    monkeypatch.setattr("openrlhf_gtpo.training.run.parse", lambda words: SimpleNamespace(actor=actor, data=data))
    monkeypatch.setattr("openrlhf_gtpo.training.run.check", lambda args: None)
    flags = {"flags": {"way": str(tmp_path / "way")}, "methods": {"gtpo": None}, "settings": {}, "seeds": [1, 2, 3]}
    changed = entries(tmp_path) | flags
    del changed["baseline"]
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(changed))
    return tmp_path / "experiment.yaml"


def test_no_two_runs_have_one_wandb_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that finds WANDB_RUN_ID goes on in that W&B run."""
    given, train = [], runner.run_and_clear
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-caller")
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setattr(
        runner, "run_and_clear", lambda command, env, **options: given.append(env) or train(command, env, **options)
    )
    assert experiment.main([str(file)]) == 0
    assert len(given) == 3 and not any("WANDB_RUN_ID" in env or env["WANDB_PROJECT"] != "p" for env in given)


def starts(file: Path) -> list[str]:
    return (file.parent / "runs" / "gtpo" / "starts").read_text().split("\n")[:-1]


def test_finished_runs_are_not_made_again(file: Path, capsys: Any) -> None:
    assert experiment.main([str(file)]) == 0
    table = (file.parent / "runs" / "table.md").read_text()
    assert "**gtpo, mean of 3** | task | 0.250 ± 0.000 | 0.750 ± 0.000" in table
    assert starts(file) == ["seed-1 new", "seed-2 new", "seed-3 new"]
    assert "gtpo/seed-3 (2 of 3 runs are finished)\n" in capsys.readouterr().err
    runs = file.parent / "runs" / "gtpo"
    shutil.copytree(runs / "seed-1", runs / "seed-1-old")  # somebody's copy is no second run
    assert experiment.main([str(file)]) == 0
    assert len(starts(file)) == 3


@pytest.mark.parametrize(("how", "resumed"), [("interrupt", "new"), ("kill", "new"), ("checkpoint", "resumed")])
def test_a_half_run_counts_nowhere_and_is_made_again(file: Path, how: str, resumed: str, capsys: Any) -> None:
    (file.parent / "way").write_text(how)
    assert experiment.main([str(file)]) == (130 if how == "interrupt" else 1)
    again = experiment.main([str(file)])
    assert again == 0
    counts = {f"seed-{n}": [line for line in starts(file) if line.startswith(f"seed-{n}")] for n in (1, 2, 3)}
    assert counts["seed-1"] == ["seed-1 new", f"seed-1 {resumed}"]
    assert len(counts["seed-2"]) == len(counts["seed-3"]) == 1
    rows = [json.loads(line) for line in (file.parent / "runs/gtpo/seed-1/metrics.jsonl").read_text().splitlines()]
    assert sum("ended" in row for row in rows) == 1
    assert len(rows) == (5 if resumed == "new" else 8)


def test_a_run_that_fails_is_named_and_the_others_are_made(file: Path, capsys: Any) -> None:
    (file.parent / "way").write_text("fail")
    assert experiment.main([str(file)]) == 1
    said = capsys.readouterr().err
    failure = "/gtpo/seed-1/log): train_ppo_ray stopped: no good reason\n"
    assert failure in said and "gtpo, seed 1 ended with status 1 (" in said
    assert said.index(failure) < said.rindex(" runs are finished)"), "it is not held back until the last run"
    assert len(starts(file)) == 3
    assert "mean of 2" in (file.parent / "runs" / "table.md").read_text()
    (file.parent / "way").write_text("kill")  # which says nothing itself
    assert experiment.main([str(file)]) == 1
    assert "/gtpo/seed-1/log): no output\n" in capsys.readouterr().err


def test_an_error_of_the_folder_does_not_make_a_finished_run_an_unfinished_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert experiment.main([str(file)]) == 0
    (file.parent / "runs" / "gtpo" / "seed-1" / "model").mkdir()
    opened = Path.open

    def stale(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "metrics.jsonl":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", stale)
    assert experiment.main([str(file)]) == 2
    assert "Stale file handle" in capsys.readouterr().err
    grid = read_grid(file)
    with pytest.raises(OSError, match="Stale file handle"):
        runner._make(grid.runs[0], grid, lambda: False)
    assert len(starts(file)) == 3 and (grid.runs[0].folder / "model").exists()


def test_a_run_that_another_process_makes_is_left_to_it(file: Path) -> None:
    folder = file.parent / "runs" / "gtpo" / "seed-2"
    with runner._locked(folder) as mine:
        assert mine
        assert experiment.main([str(file)]) == 0
    assert starts(file) == ["seed-1 new", "seed-3 new"]


def test_other_flags_are_refused_and_so_is_a_foreign_folder(file: Path) -> None:
    assert experiment.main([str(file)]) == 0
    changed = yaml.safe_load(file.read_text())
    changed["flags"]["actor.adam.lr"] = 1.0
    file.write_text(yaml.safe_dump(changed))
    with pytest.raises(UsageError, match="was run with --actor.adam.lr None, and the experiment now has 1.0"):
        runner.check_folders(read_grid(file))
    folder = file.parent / "runs" / "gtpo" / "seed-1"
    (folder / "flags.json").rename(folder / ".flags.json.1")  # as left by a process that was killed while writing it
    with pytest.raises(UsageError, match="has files that are not runs of this experiment"):
        runner.check_folders(read_grid(file))
    for name in ("metrics.jsonl", "log", "seconds"):
        (folder / name).unlink()
    del changed["flags"]["actor.adam.lr"]
    file.write_text(yaml.safe_dump(changed))
    runner.check_folders(read_grid(file))


def test_models_that_were_evaluated_with_other_flags_are_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They would stand beside models that are evaluated with the new flags."""
    asked, train = [], runner.run_and_clear

    def run(command: list[str], *args: Any, **kwargs: Any) -> int:
        if "openrlhf_gtpo.cli.evaluate" not in command:
            return train(command, *args, **kwargs)
        asked.append(command)
        folder = Path(command[command.index("--output") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "summary.json").write_text("{}")
        return 0

    monkeypatch.setattr(runner, "run_and_clear", run)
    checked: list[dict[str, Any]] = []
    monkeypatch.setattr(experiment.evaluate, "checked_flags", vars)
    monkeypatch.setattr(experiment.evaluate, "checked_inputs", lambda flags, model: checked.append(flags))
    clock = itertools.count(0, 10)  # seconds, at each look
    monkeypatch.setattr(runner, "time", SimpleNamespace(time=lambda: float(next(clock))))
    evaluate = {"eval.dataset": "a", "eval.temperature": 1.0, "reward.remote_url": "reward.py"}
    evaluate |= {"data.max_len": 64, "rollout.max_new_tokens": 8}
    changed = yaml.safe_load(file.read_text()) | {"evaluate": evaluate}
    changed["flags"]["data.input_template"] = "{} ="  # which a trained model is asked with
    file.write_text(yaml.safe_dump(changed))
    for _ in range(2):
        assert experiment.main([str(file)]) == 0
        assert len(asked) == 3
    assert [flags["data.input_template"] for flags in checked] == ["{} ="]
    assert runner._seconds(read_grid(file).runs[0]) == 20  # training and evaluation, with their starts
    assert runner._left([20.0, 40.0], 3, 12.0) == "about 0:01:18 left"
    (file.parent / "runs" / "gtpo" / "seed-1" / "evaluation" / "flags.json").unlink()  # killed before it was written
    assert experiment.main([str(file)]) == 0
    assert len(asked) == 4
    changed["evaluate"]["eval.temperature"] = 0.5
    file.write_text(yaml.safe_dump(changed))
    assert experiment.main([str(file)]) == 2
    assert "was evaluated with --eval.temperature 1.0, and the experiment now has 0.5" in capsys.readouterr().err


def test_the_verdict_is_printed_with_its_interval_and_ends_the_table(tmp_path: Path, capsys: Any) -> None:
    write_study(tmp_path / "runs", {"grpo": 0.0, "gtpo": 0.3})
    experiment._write_results(read_grid(write(tmp_path, settings={}, seeds=[1, 2, 3])))
    printed, table = capsys.readouterr().out, (tmp_path / "runs" / "table.md").read_text()
    assert re.search(
        r"math500, mean@32: gtpo is better than grpo \(\+0\.\d+, 95 % interval \+\S+ to \+\S+\)\.\n", table
    )
    assert printed.startswith(table) and printed.endswith(f"{tmp_path}/runs/report/index.html\n")


def test_a_run_that_died_without_a_checkpoint_may_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even as it wrote its model, of which config.json comes first. Its folder of checkpoints is missing too if a stop
    file elsewhere is named."""
    monkeypatch.setattr(
        "openrlhf_gtpo.training.run.check", lambda args: (check_metrics_file(args), check_results(args))
    )
    flags = {"actor.model_name_or_path": "MODEL", "reward.remote_url": "reward.py", "vllm.num_engines": 1}
    flags |= {"rollout.n_samples_per_prompt": 4, "ckpt.stop_file": str(tmp_path / "stop")}
    file = write(tmp_path, flags=flags, methods={"gtpo": {"algo.advantage.estimator": "gtpo"}}, baseline="gtpo")
    run = read_grid(file).runs[0]
    run.folder.mkdir(parents=True)
    (run.folder / "flags.json").write_text(json.dumps(run.flags))
    (run.folder / "metrics.jsonl").write_text('{"kind": "run", "step": 0, "run": "x"}\n{"kind": "train", "step": 4}\n')
    (run.folder / "model").mkdir()
    (run.folder / "model" / "config.json").touch()
    assert experiment.main([str(file), "--dry-run"]) == 0
