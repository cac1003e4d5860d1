"""A response whose reward failed stops the run instead of being trained on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.integration.rollout.rollout_actor import StrictRewardExecutor


class Tokenizer:
    def __call__(self, text: str, **options: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(c) for c in text]])}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


class Engine:
    async def generate(self, tokens: list[int], params: Any, multi_modal_data: Any = None) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[ord("4")], finish_reason="stop", logprobs=None)])


def answer(executor: StrictRewardExecutor) -> dict[str, Any]:
    params = SimpleNamespace(max_tokens=4, logprobs=None)
    return asyncio.run(executor.execute("2 + 2 = ", "4", params, 32, Tokenizer(), Engine()))


def executor(tmp_path: Path, body: str) -> StrictRewardExecutor:
    path = tmp_path / "reward.py"
    path.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    return StrictRewardExecutor([str(path)])


def test_a_reward_arrives_as_upstream_hands_it_on(tmp_path: Path) -> None:
    output = answer(
        executor(tmp_path, "return {'rewards': float(queries[0].endswith(labels[0])), 'extra_logs': {'x': 1}}")
    )
    assert output["reward"] == 1.0 and output["scores"] == 1.0 and output["extra_logs"] == {"x": 1}


def test_a_reward_of_zero_is_a_reward(tmp_path: Path) -> None:
    assert answer(executor(tmp_path, "return {'rewards': 0.0}"))["reward"] == 0.0


@pytest.mark.parametrize(
    "value", ["[0.5]", "torch.tensor([0.5])", "torch.tensor(0.5)", "numpy.float32(0.5)", "[[0.5]]"]
)
def test_one_number_may_come_as_a_list_or_a_tensor(tmp_path: Path, value: str) -> None:
    """OpenRLHF's own reward server answers with a list."""
    output = answer(executor(tmp_path, f"import numpy, torch; return {{'rewards': {value}}}"))
    assert (output["reward"], output["scores"]) == (0.5, 0.5)


RETURNED_NONE = "it returned no 'rewards'"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('no key')", "KeyError: 'no key' ({file}, line 2)"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines ({file}, line 2)"),
        # Raised in the standard library; what a user can mend is the line that called it.
        ("import json; json.loads('')", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}, line 2)"),
        ("return {}", RETURNED_NONE),
        ("return None", RETURNED_NONE),
        ("return {'scores': 1.0}", RETURNED_NONE),
        ("return {'rewards': None}", RETURNED_NONE),
        ("return {'rewards': [1.0, 0.0]}", "expected one number for the one response, got 'rewards' '[1.0, 0.0]'"),
        ("return {'rewards': 'good'}", "expected one number for the one response, got 'rewards' 'good'"),
        ("return {'rewards': []}", "expected one number for the one response, got 'rewards' '[]'"),
        ("return {'rewards': 1, 'scores': {}}", "expected one number for the one response, got 'scores' '{{}}'"),
    ],
)
def test_a_reward_that_fails_stops_the_run_with_the_reason_and_the_prompt(
    tmp_path: Path, body: str, reason: str
) -> None:
    file = tmp_path / "reward.py"
    with pytest.raises(TrainingStopped) as stopped:
        answer(executor(tmp_path, body))
    sentence = f"Could not get the reward of a response from {file}: {reason.format(file=file)}. Prompt: '2 + 2 = '"
    assert str(stopped.value) == sentence


@pytest.mark.parametrize("logs", ["['x']", "{'x': 'good'}", "{'x': []}", "{'x': object}", "'x'"])
def test_extra_logs_that_are_no_numbers_stop_the_run(tmp_path: Path, logs: str) -> None:
    with pytest.raises(
        TrainingStopped, match="Expected 'extra_logs' of names with a number each from .*reward.py, got"
    ):
        answer(executor(tmp_path, f"return {{'rewards': 1.0, 'extra_logs': {logs}}}"))


def test_a_number_beyond_all_floats_is_no_reward(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="expected one number for the one response"):
        answer(executor(tmp_path, "return {'rewards': 10**400, 'extra_logs': 'x'}"))


def test_a_reward_server_that_does_not_answer_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_pause(seconds: float) -> None:
        pass

    monkeypatch.setattr(asyncio, "sleep", no_pause)  # between upstream's attempts
    with pytest.raises(TrainingStopped, match="from http://127.0.0.1:9/: RuntimeError: Request error for 5 times"):
        answer(StrictRewardExecutor(["http://127.0.0.1:9/"]))


def test_without_a_reward_function_there_is_no_reward_to_wait_for() -> None:
    assert answer(StrictRewardExecutor(None))["reward"] is None
