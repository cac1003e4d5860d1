"""A run's reward works, or is refused in one sentence before any engine starts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.training.rollout import rewards
from openrlhf_gtpo.training.run import check, parse
from tests.support.command_lines import argv_of

pytestmark = pytest.mark.usefixtures("no_engine")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward_func(queries, prompts, labels:\n", "cannot be used: SyntaxError"),
        ("import a_module_that_is_not_there\n", "cannot be used: ModuleNotFoundError"),
        ("raise RuntimeError('no key')\n", "cannot be used: RuntimeError: no key"),
        ("import sys\nsys.exit(3)\n", "cannot be used: SystemExit: 3"),
        ("raise ValueError('two\\nlines')\n", "cannot be used: ValueError: two lines"),
        ("def reward(queries, prompts, labels): ...\n", "has no attribute 'reward_func'"),
        (
            "def reward_func(q, p, labels): return no_such_name\n",
            "cannot be used: NameError: name 'no_such_name' is not",
        ),
    ],
)
def test_a_reward_function_that_cannot_be_used(
    refused: Callable[..., str], tmp_path: Path, source: str, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    found = refused({"--reward.remote_url": path})
    assert found.startswith(f"--reward.remote_url {path}") and message in found


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ("return {'rewards': float(responses[0].split()[-1])}", "IndexError: list index out of range ("),
        ("return float(bool(responses[0]))", "it returned 0.0, not a dict with 'rewards'. A"),
        ("return {'rewards': float(prompts + labels == ['What is 0 + 0?', '0'])}", None),
        ("import threading; threading.Event().wait()", None),  # longer than anybody waits here
    ],
)
def test_a_reward_is_tried_with_the_first_prompt_and_an_empty_response(
    command: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    body: str,
    warning: str | None,
) -> None:
    if "wait" in body:
        monkeypatch.setattr(rewards, "TRIAL_SECONDS", 0.0)
    (tmp_path / "reward.py").write_text(f"def reward_func(queries, prompts, labels, responses):\n    {body}\n")
    check(parse(argv_of(command)))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Warning")]
    assert len(lines) == bool(warning) and (warning or "") in "".join(lines)


def test_a_reward_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused({"--reward.remote_url": tmp_path / "no.py"}).endswith(
        f"No such file or directory: '{tmp_path}/no.py'"
    )
    assert refused({"--reward.remote_url": None}).startswith("The run has no reward: give --reward.remote_url")
    assert "--reward.model_name_or_path" in refused(
        {"--reward.remote_url": None, "--reward.model_name_or_path": tmp_path / "no"}
    )


def test_several_reward_models_are_refused_as_openrlhf_loads_only_one(
    command: dict[str, Any], refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    """It takes the whole text as one name, so that a folder may have a comma in its name."""
    two = {"--reward.remote_url": None, "--reward.model_name_or_path": f"{model},{model}"}
    assert refused(two).startswith(f"--reward.model_name_or_path {model},{model} is not a folder")
    one = two | {"--reward.model_name_or_path": shutil.copytree(model, tmp_path / "a,b")}
    check(parse(argv_of(command | one)))


def test_a_reward_that_is_no_python_file(refused: Callable[..., str], tmp_path: Path) -> None:
    for other in (tmp_path / "train.jsonl", tmp_path, "localhost:5000/get_reward"):
        assert refused({"--reward.remote_url": other}) == (
            f"Expected --reward.remote_url to be a .py file or to begin with http://, got {other}."
        )


def test_several_rewards_are_servers(refused: Callable[..., str], tmp_path: Path) -> None:
    files = f"{tmp_path / 'reward.py'},{tmp_path / 'reward.py'}"
    assert refused({"--reward.remote_url": files}) == (
        f"--reward.remote_url {files}: servers take turns, but OpenRLHF calls only one Python file; give one."
    )


def test_an_agent_that_cannot_be_used(refused: Callable[..., str], tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    assert "No such file" in refused({"--train.agent_func_path": agent})
    agent.write_text("class Agent: ...\n")
    assert "has no attribute 'AgentExecutor'" in refused({"--train.agent_func_path": agent})
