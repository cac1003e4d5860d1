"""A step's costs: each phase has its own memory, the head is counted for responses alone."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from benchmarks.suite.synthetic import read_shape
from openrlhf_gtpo.model_shape import ModelShape, decoder_flops, forward_flops
from openrlhf_gtpo.platform.memory import ReportsPeakMemory
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.controller import step_costs
from openrlhf_gtpo.training.controller.step_costs import StepCosts, dense_shape
from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor
from openrlhf_gtpo.training.rows import Row

GIB = 2**30


class Remote:
    """A rollout actor's method, whose reference is its answer."""

    def __init__(self, answers: dict[str, list[dict[str, int]]]) -> None:
        self.remote = answers.__getitem__


def costs(monkeypatch: pytest.MonkeyPatch, shape: ModelShape | None) -> StepCosts:
    monkeypatch.setattr(step_costs, "ray", SimpleNamespace(get=lambda value: value))
    monkeypatch.setattr(step_costs, "dense_shape", lambda name: shape)
    engine = SimpleNamespace(
        take_peak_memory=Remote(
            {
                names.GENERATION: [{names.GENERATION: 3 * GIB}, {names.GENERATION: 4 * GIB}],
                names.BROADCAST: [{names.BROADCAST: 2 * GIB}, {}],
            }
        )
    )
    ranks = [{names.PPO_TRAIN: GIB, names.BROADCAST: GIB // 2}, {names.PPO_TRAIN: 2 * GIB}]
    actors = SimpleNamespace(async_run_method=lambda method_name: ranks)
    args = SimpleNamespace(actor=SimpleNamespace(model_name_or_path="model"))
    return StepCosts(args, actors, [engine])


def row(prompt: int, response: int) -> Row:
    """A row; the second token of its response is an environment's."""
    mask = np.arange(prompt + response) >= prompt
    mask[prompt + 1] = False
    return Row("prompt", None, 0, np.ones(prompt + response, dtype=np.int64), mask, None, 0.0, None)


def test_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape.of(read_shape("tiny"))
    step = costs(monkeypatch, shape)
    step.after_rollout([row(3, 5), row(2, 4)])
    step.after_training()
    found = step.end()
    assert found[names.TOKENS_RESPONSE] == step.response_tokens == 4 + 3
    assert found[names.TOKENS_PROMPT] == 8 + 6 - 7
    assert found[names.FLOPS_FORWARD] == decoder_flops(shape, [8, 6]) + 2 * 256 * 512 * 7
    assert {name: size for name, size in found.items() if name.startswith(names.PEAK_MEMORY_PREFIX)} == {
        "peak_memory_gib/engine/generation": 4,
        "peak_memory_gib/engine/broadcast": 2,
        "peak_memory_gib/actor/ppo_train": 2,
        "peak_memory_gib/actor/broadcast": 0.5,
    }
    assert 0 < found[names.TIMING_STEP_WALL] < 60


def test_a_model_whose_products_are_not_known_has_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = costs(monkeypatch, None)
    step.after_rollout([row(3, 5)])
    assert names.FLOPS_FORWARD not in step.end() and step.end()[names.TOKENS_RESPONSE] == 4


def test_only_dense_models_are_counted(tmp_path: Any) -> None:
    from transformers import AutoConfig, GPT2Config, Qwen3MoeConfig

    read_shape("tiny").save_pretrained(tmp_path)
    shape = dense_shape(str(tmp_path))
    assert shape == ModelShape.of(read_shape("tiny"))
    assert forward_flops(shape, [4], 2) == decoder_flops(shape, [4]) + 2 * 256 * 512 * 2
    for other in (Qwen3MoeConfig(), GPT2Config()):
        other.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).model_type == other.model_type
        assert dense_shape(str(tmp_path)) is None


def test_an_engine_asks_its_workers() -> None:
    asked = []

    async def collective_rpc(name: str, args: tuple[Any, ...]) -> list[dict[str, int]]:
        asked.append((name, args))
        return [getattr(ReportsPeakMemory(), name)(*args)]

    engine = object.__new__(StrictRolloutActor)
    engine.llm = SimpleNamespace(collective_rpc=collective_rpc)
    (worker,) = asyncio.run(engine.take_peak_memory(names.GENERATION))
    assert asked == [("take_peak_memory", (names.GENERATION,))] and worker[names.GENERATION] > 2**20


def test_an_engine_that_died_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    step = costs(monkeypatch, None)
    dead = SimpleNamespace(remote=lambda phase: ActorUnavailableError("it is being started", None))
    step._engines = [SimpleNamespace(take_peak_memory=dead), *step._engines]

    def get(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(step_costs, "ray", SimpleNamespace(get=get))
    step.after_rollout([row(3, 5)])
    assert step.end()[names.peak_memory("engine", names.GENERATION)] == 4
