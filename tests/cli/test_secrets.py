"""The W&B key is on no command line once a run has read its own, nor in anything that a run prints or passes on."""

import json
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.tools.launch.ray_node import close_own_ray
from openrlhf_gtpo.training.settings import upstream_parser

KEY = "0123456789abcdef" * 2 + "deadbeef"
RUN = ["--reward.remote_url", "reward.py", "--vllm.num_engines", "1"]


@pytest.fixture(autouse=True)
def no_key_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_API_KEY")


def read(pid: int, file: str) -> str:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/{file}").read_text()
    return ""


@pytest.mark.parametrize(
    "words",
    [
        ["train_ppo_ray", *RUN, f"--logger.wandb.key={KEY}"],
        ["benchmark", "train", "--compare", f"a=--logger.wandb.key {KEY}", "--", "--logger.wandb.k", KEY],
    ],
    ids=["run", "benchmark"],
)
def test_an_entry_point_takes_the_key_out_of_its_command_line(words: list[str], tmp_path: Path) -> None:
    """From before its slow imports to its end, in each of its processes."""
    command = [sys.executable, "-m", f"openrlhf_gtpo.cli.{words[0]}", *words[1:]]
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    hidden = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            pids = [one.pid for one in (process, *process.children(recursive=True))]
            loaded = ["libtorch" in read(pid, "maps") for pid in pids]  # read first: what it shows later counts
            shown = [read(pid, "cmdline") for pid in pids]
            if any(KEY in line for line in shown):
                assert not hidden and not any(loaded), "the key came back, or is there while Python imports"
            elif any("WANDB_API_KEY" in line for line in shown):
                hidden += 1
        time.sleep(0.02)
    said = (tmp_path / "log").read_text()
    assert hidden and process.returncode == 2, said
    assert KEY not in said and f"\n{words[0]}" in f"\n{said}"


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
