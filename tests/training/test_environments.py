"""Agent files for environments that people have: reasoning-gym's by name, and those written for verifiers."""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.training.checks.reward import import_file
from tests.support import ROOT

AGENTS = ROOT / "examples" / "agents"


def played(name: str, label: str, *said: str) -> tuple[list[str | None], tuple[float, dict[str, Any]]]:
    """An agent file's replies to ``said``, its reward and its logs."""
    agent: Any = import_file(str(AGENTS / name), "--train.agent_func_path", "AgentExecutor")
    environment = agent.environment("A prompt with the number 7.\n", label)

    async def play() -> tuple[list[str | None], tuple[float, dict[str, Any]]]:
        return [await environment.reply(text) for text in said], await environment.score()

    return asyncio.run(play())


def test_a_task_of_reasoning_gym_is_scored_by_its_name() -> None:
    label = json.dumps({"task": "gcd", "entry": {"answer": "4", "metadata": {}}})
    wrong = "That is not right. Try again."
    assert played("reasoning_gym_tries.py", label, "7", "It is 4.") == (
        [wrong, None],
        (1.0, {"tries": 2.0, "parsed": "4"}),
    )
    replies, (reward, logs) = played("reasoning_gym_tries.py", label, "no idea")
    assert replies == [wrong] and reward == 0.0 and logs["parsed"] == ""


class Guess:
    """What verifiers 0.1.9's ``MultiTurnEnv`` and ``Rubric`` are to an adapter; written by their protocol."""

    def __init__(self, tries: int) -> None:
        self.tries, self.rubric = tries, self

    async def init_state(self, row: dict[str, Any], client: Any, model: str, sampling: Any) -> dict[str, Any]:
        return row | {"trajectory": [], "trajectory_id": "0", "final_env_response": None}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"seen": []}

    async def add_trajectory_step(self, state: dict[str, Any], step: dict[str, Any]) -> None:
        state["trajectory"].append(step)

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return len(state["trajectory"]) >= self.tries

    async def env_response(self, messages: list[dict[str, str]], state: dict[str, Any]) -> list[dict[str, str]]:
        state["seen"] = [message["content"] for message in messages]
        said = [{"role": "user", "content": "Wrong."}]
        if messages[-1]["content"] == state["answer"]:
            state["final_env_response"] = said
        return said

    async def render_completion(self, state: dict[str, Any]) -> None:
        last = state["trajectory"][-1]
        state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]) :]

    async def score_rollout(self, state: dict[str, Any], score_sem: Any) -> None:
        async with score_sem:
            state["reward"] = float(state["completion"][-1]["content"] == state["answer"])
        state["metrics"] = {"messages": float(len(state["completion"])), "seen": float(len(state["seen"]))}


def test_an_environment_of_verifiers_keeps_its_state_and_scores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load_environment(name: str, **options: Any) -> Guess:
        loaded.append(name)
        return Guess(**options)

    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(load_environment=load_environment))  # type: ignore
    monkeypatch.setenv("VERIFIERS_ENV", "guess")
    monkeypatch.setenv("VERIFIERS_ENV_ARGS", '{"tries": 3}')
    row = json.dumps({"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"})
    logs = {"env/messages": 3.0, "env/seen": 4.0}
    assert played("verifiers_env.py", row, "41", "42") == (["Wrong.", None], (1.0, logs))
    replies, (reward, _) = played("verifiers_env.py", row, "1", "2", "3")
    assert replies == ["Wrong.", "Wrong.", None] and reward == 0.0 and loaded == ["guess"] * 2
