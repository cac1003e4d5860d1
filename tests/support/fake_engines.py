"""Rollout actors over a vLLM that answers with its request's seed, and a sampler over them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams

from openrlhf_gtpo.training.features.guide import sampler as guide_sampler
from openrlhf_gtpo.training.features.guide.controller import OffPolicy
from openrlhf_gtpo.training.features.guide.guide import Guide
from openrlhf_gtpo.training.features.guide.sampler import GuidedSampler
from openrlhf_gtpo.training.rollout import groups
from openrlhf_gtpo.training.rollout import sampler as sampler_module
from openrlhf_gtpo.training.rollout.rewards import RewardFailed
from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor
from openrlhf_gtpo.training.rollout.sampler import Sampler
from openrlhf_gtpo.training.rows import Request, Row
from tests.support.rollouts import arguments

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


def respond(
    engine: Engine, params: Any = None, samples: int = 1, max_len: int = 64, tokenizer: Any = None, **given: Any
) -> Any:
    """The coroutine with which ``engine`` answers a request, for the prompt "1" unless ``given`` says otherwise."""
    request = Request(**{"prompt": "1", "label": "1", "images": None, "number": 0, "samples": samples} | given)
    return engine.sample(request, params or SamplingParams(), max_len, [tokenizer or Ready()])


def handle(engine: Engine) -> Any:
    """What a sampler has of a rollout actor: calls run when their results are asked for."""
    return SimpleNamespace(engine=engine, sample=Remote(lambda *given: asyncio.run(engine.sample(*given))))


def guided(
    monkeypatch: pytest.MonkeyPatch, fraction: float = 1 / 3, *argv: str, tokenizer: Any = None
) -> tuple[Any, list[Engine]]:
    """A sampler like that of :func:`sampling` with a guide of two engines, and those engines."""
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.executor, engine.features = GuideExecutor(), (OffPolicy(),)
    guide_args = guide_arguments(fraction, *argv)
    guide = Guide([handle(engine) for engine in engines], guide_args)
    sampler = sampling(monkeypatch, guide=guide, tokenizer=tokenizer)
    monkeypatch.setattr(guide_sampler, "ray", sampler_module.ray)
    sampler.args.algo.guide = guide_args.algo.guide
    sampler.args.algo.dynamic_filtering_enable = guide_args.algo.dynamic_filtering_enable
    for own in sampler.engines:
        own.engine.executor = PolicyExecutor()
    return sampler, engines


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
    monkeypatch.setattr("openrlhf_gtpo.training.features.guide.guide.ray", SimpleNamespace(get=lambda ref: ref()))
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
    monkeypatch: pytest.MonkeyPatch,
    engines: int = 1,
    deterministic: bool = True,
    seed: int = 1,
    recover: Any = None,
    guide: Guide | None = None,
    filtered: bool = False,
    estimator: str = "reinforce",
    oldest_first: bool = False,
    tokenizer: Any = None,
) -> Any:
    """A sampler over prompts "0", "1", ... in order; what was asked for last comes back first, or last."""

    def get(refs: Any) -> Any:
        return [ref() for ref in refs] if isinstance(refs, list) else refs()

    def wait(refs: list[Any], **options: Any) -> Any:
        return refs[:1] if oldest_first else refs[-1:], None

    values = SimpleNamespace(get=get, wait=wait, exceptions=ray.exceptions, ObjectRef=ray.ObjectRef)
    for module in (sampler_module, groups):
        monkeypatch.setattr(module, "ray", values)
    args = arguments("--algo.advantage.estimator", estimator, "--rollout.max_new_tokens", "8", samples=3)
    args.train.seed, args.train.full_determinism_enable = seed, deterministic
    args.vllm.enable_sleep, args.data.max_len = False, 64
    args.rollout.batch_size = args.rollout.vllm_generate_batch_size = 4
    args.algo.dynamic_filtering_enable, args.algo.dynamic_filtering_range = filtered, (0.5, 1.5)
    data = [([""], [str(i)], [str(i)], [None]) for i in range(PROMPTS)]
    handles = [handle(Engine()) for _ in range(engines)]
    given = (args, data, data[:6], tokenizer or Ready(), handles, recover or never)
    return Sampler(*given) if guide is None else GuidedSampler(*given, guide=guide)


class Ready:
    """Ray's reference to a tokenizer, which nobody reads here."""

    def __await__(self) -> Any:
        return None
        yield


def seeds(rows: list[Row]) -> list[tuple[str, int, int]]:
    """(prompt, first turn's seed, second turn's seed) of each row."""
    return [(row.prompt, int(row.logs["first"]), int(row.logs["second"])) for row in rows]
