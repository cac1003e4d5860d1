"""Rollout actors over a vLLM that answers with its request's seed, and a samples generator over them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from openrlhf.trainer.ppo_utils import samples_generator as upstream
from openrlhf.utils.agent import AgentExecutorBase
from rollouts import arguments

from openrlhf_gtpo.training.rollout import samples_generator
from openrlhf_gtpo.training.rollout.guide import Guide
from openrlhf_gtpo.training.rollout.rescue import RescueQueue
from openrlhf_gtpo.training.rollout.rewards import RewardFailed
from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor
from openrlhf_gtpo.training.rollout.samples_generator import OrderedSamplesGenerator

VOCABULARY = 1000
PROMPTS = 40


class Remote:
    """A ``method.remote(...)`` that runs only when its result is asked for, as late as the test likes."""

    def __init__(self, function: Any) -> None:
        self.remote = lambda *args, **kwargs: lambda: function(*args, **kwargs)


class Engine(StrictRolloutActor):
    """The rollout actor over a vLLM that answers with its request's seed."""

    def __init__(self) -> None:  # a coroutine in the real actor
        self.executor = Executor()
        self.seeds: list[int | None] = []
        self._mm_pad_token_ids = None
        self.llm = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
            generate=self.answer,
            is_sleeping=self.nothing,
            collective_rpc=self.nothing,
            output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 0),
        )

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def answer(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.seeds.append(params.seed)
        yield params.seed


class Executor(AgentExecutorBase):
    """An agent with two turns, which makes new sampling parameters for the second. Its scores are 0 at even labels,
    and at odd ones 0.75, 1 and 1.25, so that a filter has something to let through."""

    fails: set[str] = set()
    failure: type[Exception] = RewardFailed

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images,
    ) -> dict[str, Any]:
        params = type(sampling_params)(max_tokens=4)
        if prompt in self.fails:
            raise self.failure(f"no reward for {prompt}")
        turns = [await llm_engine.generate([1] * 5, sampling_params), await llm_engine.generate([1] * 9, params)]
        score = int(label) % 2 * (0.75 + 0.25 * (self.asked[prompt] % 3))
        self.asked[prompt] += 1
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": [1, 2],
            "action_ranges": [(1, 2)],
            "rollout_log_probs": None,
            "reward": score,
            "scores": score,
            "extra_logs": {"first": turns[0] or 0, "second": turns[1] or 0},
        }


class GuideExecutor(Executor):
    """Also returns log-probs, as its engine does, and "guide" in its logs."""

    log_probs: Any = [0.0, -0.5]
    is_guide = 1
    is_right: Callable[[str], bool] = staticmethod(lambda label: False)

    async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
        response = await super().execute(**given)
        assert given["sampling_params"].logprobs == 1
        response["extra_logs"]["guide"] = self.is_guide
        if self.is_right(given["label"]):
            response |= {"reward": 1.0, "scores": 1.0}
        return response | {"rollout_log_probs": self.log_probs, "truncated": False}


class PolicyExecutor(GuideExecutor):
    is_guide = 0


def guide_arguments(fraction: float, *argv: str, samples: int = 3) -> SimpleNamespace:
    guide = ("--algo.guide.model_name_or_path", "guide", "--algo.guide.fraction", f"{fraction}")
    return arguments("--algo.advantage.estimator", "gtpo", *guide, *argv, samples=samples)


def guided(monkeypatch: pytest.MonkeyPatch, fraction: float = 1 / 3, *argv: str) -> tuple[Any, list[Engine]]:
    """A generator like that of :func:`sampling` with a guide of two engines, and those engines."""
    engines, handles = [Engine(), Engine()], []
    for engine in engines:
        engine.executor, engine.with_log_probs = GuideExecutor(), True
        handles.append(
            SimpleNamespace(
                generate_responses=SimpleNamespace(remote=engine.generate_responses),
                get_num_unfinished_requests=Remote(engine.get_num_unfinished_requests),
            )
        )
    generator = sampling(monkeypatch)
    answered = SimpleNamespace(get=lambda calls: [asyncio.run(call) for call in calls], exceptions=ray.exceptions)
    monkeypatch.setattr(samples_generator, "ray", answered)
    generator._guide = guide = Guide(handles, guide_arguments(fraction, *argv))
    generator.rescue = RescueQueue(guide.rescue_batch)
    generator.args.rollout.entropy = "actor"
    generator.args.algo.guide = guide._args.algo.guide
    generator.args.algo.dynamic_filtering_enable = guide._args.algo.dynamic_filtering_enable
    for handle in generator.vllm_engines:
        handle.engine.with_log_probs, handle.engine.executor = True, PolicyExecutor()
    return generator, engines


class Call:
    """An engine's ``method.remote()``, which records the call, or raises if the engine is dead."""

    def __init__(self, called: list[str], what: str) -> None:
        self.called, self.what, self.dies = called, what, False

    def remote(self) -> Any:
        return self

    def __call__(self) -> None:
        if self.dies:
            raise ray.exceptions.ActorDiedError
        self.called.append(self.what)


def sleeping(guide: Guide, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the guide's two engines, "a" and "b", sleep between rollouts; returns the record of their calls."""
    called: list[str] = []
    guide._args.vllm.enable_sleep = True
    for name, handle in zip("ab", guide.engines, strict=True):
        for call in ("wake_up", "sleep"):
            setattr(handle, call, Call(called, f"{name} {call}"))
    monkeypatch.setattr("openrlhf_gtpo.training.rollout.guide.ray", SimpleNamespace(get=lambda ref: ref()))
    return called


RESCUE = ("--algo.guide.rescue_batch", "2", "--algo.dynamic_filtering_enable")


def fours(label: str) -> bool:
    return int(label) % 4 == 0


def answers(engines: list[Engine], is_right: Callable[[str], bool]) -> None:
    """Make the guide right at odd labels, as the policy is, and at those even ones where ``is_right`` says so."""
    for engine in engines:
        engine.executor.is_right = is_right


def never(error: Exception) -> None:
    raise error


def sampling(
    monkeypatch: pytest.MonkeyPatch, engines: int = 1, deterministic: bool = True, seed: int = 1, recover: Any = None
) -> Any:
    """A generator over prompts "0", "1", ... in order; what was asked for last comes back first."""
    handles = []
    for _ in range(engines):
        engine = Engine()
        respond = lambda engine=engine, **kwargs: asyncio.run(engine.generate_responses(**kwargs))  # noqa: E731
        handles.append(
            SimpleNamespace(
                engine=engine,
                generate_responses=Remote(respond),
                get_num_unfinished_requests=Remote(engine.get_num_unfinished_requests),
            )
        )
    remote = SimpleNamespace(
        get=lambda refs: [ref() for ref in refs] if isinstance(refs, list) else refs(),
        wait=lambda refs, **options: (refs[-1:], refs[:-1]),
    )
    monkeypatch.setattr(upstream, "ray", remote)
    args = SimpleNamespace(
        train=SimpleNamespace(seed=seed, full_determinism_enable=deterministic),
        vllm=SimpleNamespace(enable_sleep=False),
        rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=3),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False,
            dynamic_filtering_range=(0.5, 1.5),
            advantage=SimpleNamespace(estimator="reinforce", is_correction_level="off"),
        ),
    )
    data = [([""], [str(i)], [str(i)], [None]) for i in range(PROMPTS)]
    strategy = SimpleNamespace(args=args)
    return OrderedSamplesGenerator(strategy, data, data[:6], None, handles, recover=recover or never)


def rows(samples: list[Any]) -> list[tuple[str, int, int]]:
    """(prompt, first turn's seed, second turn's seed) of each sample."""
    return [(s.prompts[0], int(s.info["first"]), int(s.info["second"])) for s in samples]
