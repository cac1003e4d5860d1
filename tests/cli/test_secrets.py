"""The W&B key is on no command line once a run has read its own, nor in anything that a run prints or passes on."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_gtpo.cli import hide_key
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line import upstream_parser
from openrlhf_gtpo.launch.ray_node import close_own_ray

KEY = "0123456789abcdef" * 2 + "deadbeef"
RUN = ["--reward.remote_url", "reward.py", "--vllm.num_engines", "1"]


@pytest.fixture(autouse=True)
def no_key_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_API_KEY")


@pytest.mark.parametrize(
    "form", [["--logger.wandb.key", KEY], [f"--logger.wandb.key={KEY}"], ["--logger.wandb.k", KEY]]
)
def test_a_process_takes_the_key_out_of_its_command_line(form: list[str]) -> None:
    program = (
        "import os, sys; from openrlhf_gtpo.cli import hide_key; words = hide_key(sys.argv[1:]);"
        "print(words, open('/proc/self/cmdline').read().split('\\0'), os.environ['WANDB_API_KEY'], sep='\\n')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *form, "--x", "1"], capture_output=True, text=True, check=True
    )
    words, title, key = ended.stdout.splitlines()
    assert key == KEY and KEY not in title and "--x 1" in title
    assert words == repr([word.replace(KEY, "WANDB_API_KEY") for word in [*form, "--x", "1"]])


@pytest.mark.parametrize(
    "argv",
    [*(["--logger.wandb.key", word] for word in ("WANDB_API_KEY", "--x", "")), ["--logger.wandb.key="], RUN],
    ids=str,
)
def test_a_command_line_without_a_key_stays_as_it_is(argv: list[str]) -> None:
    assert hide_key(argv) == argv and "WANDB_API_KEY" not in os.environ


def test_the_arguments_keep_the_key_for_wandb_and_show_it_to_nobody() -> None:
    from wandb.util import json_friendly_val  # W&B's configuration goes through this

    args = pickle.loads(pickle.dumps(upstream_parser.parse([*RUN, "--logger.wandb.key", KEY])))
    assert str(args.logger.wandb.key) == KEY
    for shown in (repr(args), str(args), f"{args}", json.dumps(json_friendly_val(vars(args)))):
        assert KEY not in shown and "reward.py" in shown


def test_the_environments_key_reaches_a_tracker_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert upstream_parser.parse([*RUN, "--logger.wandb.key", "WANDB_API_KEY"]).logger.wandb.key == KEY
    assert upstream_parser.parse(RUN).logger.wandb.key is None
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(UsageError, match="takes the key from that variable, which is not set here; export it where"):
        upstream_parser.parse([*RUN, "--logger.wandb.key", "WANDB_API_KEY"])


def test_a_benchmark_has_no_key_in_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf_gtpo.benchmarks.harness import write_results
    from openrlhf_gtpo.cli import benchmark

    monkeypatch.setattr(benchmark, "run", lambda args: write_results(tmp_path / "results.json", args, {}))
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    assert benchmark.main(hide_key(["train", "--", "--logger.wandb.key", KEY])) == 0
    assert KEY not in (tmp_path / "results.json").read_text() and os.environ["WANDB_API_KEY"] == KEY


def test_a_runs_own_ray_answers_to_a_token_of_its_own() -> None:
    first, second = {"HOME": "/root"}, {"RAY_ADDRESS": ""}
    close_own_ray(first)
    close_own_ray(second)
    assert first["RAY_AUTH_MODE"] == "token" and first["RAY_enable_metrics_collection"] == "0"
    assert len(first["RAY_AUTH_TOKEN"]) == 64 and first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "mine"}
    close_own_ray(own)
    assert own["RAY_AUTH_TOKEN"] == "mine" and own["RAY_enable_metrics_collection"] == "0"
    for chosen in ({"RAY_ADDRESS": "10.0.0.1:6379"}, {"RAY_AUTH_MODE": "disabled"}):
        before = dict(chosen)
        close_own_ray(chosen)
        assert chosen == before
