"""A response whose reward failed stops the run instead of being trained on."""

import asyncio
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.platform import patience as others_patience
from openrlhf_gtpo.platform.patience import others_work
from openrlhf_gtpo.training.checks.reward import import_reward
from openrlhf_gtpo.training.rollout import rewards
from openrlhf_gtpo.training.rollout.rewards import Patience, RewardFailed, StrictRewardExecutor
from openrlhf_gtpo.training.rows import Row

END = ord("~")  # a special token


class Tokenizer:
    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return "".join(chr(token) for token in tokens if not skip_special_tokens or token != END)


class Engine:
    tokens = [ord("4")]

    async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.tokens, finish_reason="stop", logprobs=None)])


def answer(executor: StrictRewardExecutor) -> dict[str, Any]:
    params = SimpleNamespace(max_tokens=4, logprobs=None)
    return asyncio.run(executor.execute("2 + 2 = ", "4", params, 32, Tokenizer(), Engine()))


def executor(tmp_path: Path, body: str) -> StrictRewardExecutor:
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    return StrictRewardExecutor([str(path)], Patience())


def test_a_reward_arrives_as_upstream_hands_it_on(tmp_path: Path) -> None:
    output = answer(
        executor(tmp_path, "return {'rewards': float(queries[0].endswith(labels[0])), 'extra_logs': {'x': 1}}")
    )
    assert output["reward"] == 1.0 and output["scores"] == 1.0 and output["extra_logs"] == {"x": 1}


@pytest.mark.parametrize(
    "value", ["[0.5]", "torch.tensor([0.5])", "torch.tensor(0.5)", "numpy.float32(0.5)", "[[0.5]]"]
)
def test_one_number_may_come_as_a_list_or_a_tensor(tmp_path: Path, value: str) -> None:
    """OpenRLHF's own reward server answers with a list."""
    output = answer(executor(tmp_path, f"import numpy, torch; return {{'rewards': {value}}}"))
    assert (output["reward"], output["scores"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    "body",
    ["raise KeyError('no key')", "import sys; sys.exit(3)"]
    + [f"return {value}" for value in ("None", "0.0", "{'scores': 1.0}", "{'rewards': [1.0, 0.0]}")]
    + [f"return {{'rewards': {value}}}" for value in ("'good'", "float('nan')", "1e39")],
)
def test_a_reward_that_fails_stops_the_run(tmp_path: Path, body: str) -> None:
    with pytest.raises(TrainingStopped, match="Could not get the reward of a response from .* Prompt: '2 . 2 = '$"):
        answer(executor(tmp_path, body))


def test_the_first_number_of_an_extra_log_is_logged(tmp_path: Path) -> None:
    """OpenRLHF's own reward server answers with lists."""
    logs = "{'x': [0.5], 'y': torch.tensor([[1, 2]]), 'z': [3, 4]}"
    output = answer(executor(tmp_path, f"import torch; return {{'rewards': 1.0, 'extra_logs': {logs}}}"))
    assert output["extra_logs"] == {"x": 0.5, "y": 1, "z": 3}


def test_texts_among_extra_logs_stay_texts(tmp_path: Path) -> None:
    """They are for the dump and the viewer; a row's metrics are numbers."""
    output = answer(executor(tmp_path, "return {'rewards': 1.0, 'extra_logs': {'parsed': '4', 'x': 2, 'kl': 'text'}}"))
    row = Row.of_response(output, 0, 64)
    assert row.logs == {"x": 2} and row.texts == {"parsed": "4", "kl": "text"}
    assert not {"parsed", "kl"} & row.experience(64).info.keys()


@pytest.mark.parametrize("responses", ["responses", "*, responses=None"])
def test_a_reward_gets_responses_without_special_tokens_if_it_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, responses: str
) -> None:
    path, same = tmp_path / "reward.py", "queries == ['2 + 2 = 4~'] and responses == ['4']"
    path.write_text(
        f"def reward_func(queries, prompts, labels, {responses}):\n    return {{'rewards': float({same})}}\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "tokens", [ord("4"), END])
        assert answer(StrictRewardExecutor([str(path)], Patience()))["reward"] == 1.0
    import_reward(str(path))


@pytest.mark.parametrize("name", ["step", "kl", "reward", "response_length", "timing/mine", "entropy/all", "ended"])
def test_extra_logs_under_the_name_of_another_metric_stop_the_run(tmp_path: Path, name: str) -> None:
    """A step's line has this field already, the KL controller would follow it, or a report would show it."""
    with pytest.raises(TrainingStopped, match=f"in the 'extra_logs' from .*reward.py, got {name}, which the run uses"):
        answer(executor(tmp_path, f"return {{'rewards': 1.0, 'extra_logs': {{'x': 1.0, '{name}': 2.0}}}}"))


OF_A_MODULE = {
    "a dataclass": """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Graded:
    reward: float = 1.0
def graded(query): return Graded().reward
""",
    "a file beside it": "from beside_a_reward import graded\n",
    "another process": """import multiprocessing
def grade(query): return 1.0
def graded(query):
    with multiprocessing.get_context("spawn").Pool(1) as pool: return pool.apply(grade, [query])
""",
}


@pytest.mark.parametrize("stem", ["graded_by", "textwrap"])
@pytest.mark.parametrize("source", OF_A_MODULE)
def test_a_file_is_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, stem: str) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("beside_a_reward", "graded_by"):  # an earlier test's
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "beside_a_reward.py").write_text("def graded(query): return 1.0\n")
    path = tmp_path / f"{stem}.py"
    path.write_text(f"{OF_A_MODULE[source]}\ndef reward_func(q, p, l): return {{'rewards': graded(q[0])}}\n")
    import_reward(str(path))  # as the driver does
    if (source, stem) != ("another process", "textwrap"):  # there, that is the library
        assert answer(StrictRewardExecutor([str(path)], Patience()))["reward"] == 1.0
    assert sys.modules["textwrap"] is textwrap


def test_a_limit_of_time_that_a_thread_cannot_have_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Else a reward that swallows what is raised would score everything alike."""
    path = tmp_path / "swallowing.py"
    path.write_text(
        "import signal\n\n\ndef reward_func(queries, prompts, labels):\n    try:\n"
        "        signal.signal(handler=signal.SIG_DFL, signalnum=signal.SIGALRM)\n        return {'rewards': 1.0}\n"
        "    except Exception:\n        return {'rewards': 0.0}\n"
    )
    reward = import_reward(str(path))
    assert reward([], [], []) == {"rewards": 1.0} and capfd.readouterr().err == ""  # in the main thread
    failing = StrictRewardExecutor([str(path)], Patience())
    assert [answer(failing)["reward"] for _ in range(2)] == [0.0, 0.0]
    said = capfd.readouterr().err
    assert said.count("signal.signal raises ValueError in a thread") == 1 and f"{path}, line 6" in said


# ── Several tries, each with a time limit ──

PATIENT = Patience(tries=3)
IN_TIME = Patience(tries=2, seconds=60)


class Clock:
    """Its seconds pass only where a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def hang(self) -> None:
        self.now += 600
        threading.Event().wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which patience is measured."""
    clock, wait = Clock(), asyncio.wait
    for module in (rewards, others_patience):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(asyncio, "wait", lambda tasks, timeout: wait(tasks, timeout=0.001))
    return clock


MOODY = """
from pathlib import Path

from openrlhf_gtpo.training.rollout import rewards

CALLS = Path(__file__).with_suffix(".calls")


def reward_func(queries, prompts, labels):
    calls = len(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text("x" * (calls + 1))
    if calls < {failures}:
        {failure}
    return {{"rewards": 1.0}}
"""


def moody(tmp_path: Path, failures: int, failure: str, patience: Patience = PATIENT) -> StrictRewardExecutor:
    path = tmp_path / "reward.py"
    path.write_text(MOODY.format(failures=failures, failure=failure))
    return StrictRewardExecutor([str(path)], patience)


@pytest.mark.parametrize(
    ("patience", "failure", "reason"),
    [
        (PATIENT, "raise OSError('no connection')", "OSError: no connection"),
        # Leaves a thread, which holds nobody up.
        (IN_TIME, "rewards.time.hang()", "TimeoutError: no answer for 60 s"),
    ],
)
def test_a_reward_that_raises_or_hangs_is_tried_again(
    tmp_path: Path, clock: Clock, patience: Patience, failure: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    again = patience.tries - 1
    assert answer(moody(tmp_path, again, failure, patience))["reward"] == 1.0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"Warning: the reward from {tmp_path / 'reward.py'} failed; trying again: {reason}"] * again


def test_what_is_no_reward_is_a_mistake_and_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="got 'rewards' 'good'") as stopped:
        answer(moody(tmp_path, 1, "return {'rewards': 'good'}"))
    assert not isinstance(stopped.value, RewardFailed)
    assert (tmp_path / "reward.calls").read_text() == "x"


class Agent:
    """An agent that asks the engine; its first ``failures`` episodes fail after that."""

    def __init__(self, failures: int, fail: Callable[[], Awaitable[None]]) -> None:
        self.episodes, self._failures, self._fail = 0, failures, fail

    async def episode(self) -> str:
        self.episodes += 1
        with others_work():
            await asyncio.sleep(0)
        if self.episodes <= self._failures:
            await self._fail()
        return "done"


async def raises() -> None:
    raise ConnectionError("refused")


async def hangs() -> None:
    rewards.time.now += 600
    await asyncio.sleep(600)


@pytest.mark.parametrize(
    ("patience", "fail", "failure"), [(PATIENT, raises, ConnectionError), (IN_TIME, hangs, TimeoutError)]
)
def test_an_agent_that_raises_or_hangs_begins_anew(
    clock: Clock, patience: Patience, fail: Any, failure: type[Exception]
) -> None:
    agents = [Agent(patience.tries - 1, fail), Agent(patience.tries, fail)]

    async def ask() -> list[Any]:
        asked = (patience.ask(agent.episode, "the agent") for agent in agents)
        return await asyncio.gather(*asked, return_exceptions=True)

    done, failed = asyncio.run(ask())
    assert done == "done" and isinstance(failed, failure)
    assert [agent.episodes for agent in agents] == [patience.tries] * 2


def test_the_engines_time_is_not_the_agents(clock: Clock) -> None:
    """Not even if an agent asks twice at once and waits for both."""

    async def call(seconds: float) -> float:
        with others_work():
            clock.now += seconds
            await asyncio.sleep(0.01)  # meanwhile it is looked at
        return seconds

    async def episode() -> list[float]:
        return await asyncio.gather(call(0.0), call(600.0))

    assert asyncio.run(IN_TIME.ask(episode, "the agent")) == [0.0, 600.0]


def test_a_reward_file_is_loaded_once_and_before_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an engine, which takes what memory is left, leaves a reward its own."""
    from openrlhf.trainer.ray import vllm_engine

    from openrlhf_gtpo.training.rollout import rollout_actor

    class Llm:
        engine_core = SimpleNamespace(resources=SimpleNamespace(engine_dead=False))

        async def is_sleeping(self) -> bool:
            return False

    happened = tmp_path / "happened"
    file = tmp_path / "reward.py"
    file.write_text(
        f"with open({str(happened)!r}, 'a') as file:\n    file.write('reward ')\n\n\ndef reward_func():\n    pass\n"
    )

    def start(args: Any) -> Llm:
        with happened.open("a") as file:
            file.write("engine ")
        return Llm()

    monkeypatch.setattr(vllm_engine, "SingleTurnAgentExecutor", None)  # restored at the end
    monkeypatch.setattr(vllm_engine.vllm, "AsyncEngineArgs", lambda *args, **kwargs: None)
    monkeypatch.setattr(vllm_engine.vllm.AsyncLLMEngine, "from_engine_args", start)
    for name in ("_configure_device_env", "_configure_vllm_env"):
        monkeypatch.setattr(rollout_actor.StrictRolloutActor, name, lambda *args, **kwargs: None)
    actor: Any = object.__new__(rollout_actor.StrictRolloutActor)
    asyncio.run(actor.__init__("model", remote_rm_url=[str(file)], num_gpus=1, enable_sleep_mode=False))
    assert happened.read_text() == "reward engine " and isinstance(actor.executor, StrictRewardExecutor)
