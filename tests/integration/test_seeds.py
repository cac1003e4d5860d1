"""What ``--train.seed`` decides: the order of prompts, the order of a batch's rows, and each request's seed."""

import asyncio
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engines import PROMPTS, Engine, rows, sampling
from openrlhf.trainer.ppo_utils import samples_generator as upstream

from openrlhf_gtpo.integration.actors.strategy import Strategy
from openrlhf_gtpo.integration.rollout import rollout_actor
from openrlhf_gtpo.integration.rollout.rollout_actor import StrictRolloutActor


def loader(seed: int, workers: int = 0, shuffle: bool = True) -> Any:
    """As ``prepare_datasets`` asks for it, in a process whose own generator nobody seeds."""
    torch.seed()
    args = SimpleNamespace(ds=SimpleNamespace(param_dtype="bf16"), train=SimpleNamespace())
    strategy = Strategy(seed=seed, args=args)
    return strategy.setup_dataloader(list(range(PROMPTS)), 1, False, shuffle, None, num_workers=workers)


def epoch(loader: Any) -> list[int]:
    return [int(batch) for batch in loader]


def test_the_seed_decides_the_order_of_prompts() -> None:
    one, same, other = loader(1), loader(1), loader(2)
    first, second = epoch(one), epoch(one)
    assert sorted(first) == sorted(second) == list(range(PROMPTS))
    assert [epoch(same), epoch(same)] == [first, second] and first != second
    assert epoch(other) != first


@pytest.mark.parametrize(("seen", "workers"), [(0, 0), (7, 0), (PROMPTS, 0), (7, 1)])
def test_a_resumed_loader_goes_on_in_the_second_epoch(seen: int, workers: int) -> None:
    undisturbed, stopped = loader(1, workers), loader(1, workers)
    expected = epoch(undisturbed) + epoch(undisturbed) + epoch(undisturbed)
    epoch(stopped)
    rest = iter(stopped)
    for _ in range(seen):
        next(rest)
    resumed = loader(1, workers)
    resumed.load_state_dict(deepcopy(stopped.state_dict()))
    assert epoch(resumed) + epoch(resumed) == expected[PROMPTS + seen :]


def test_evaluation_is_not_shuffled() -> None:
    assert epoch(loader(1, shuffle=False)) == list(range(PROMPTS))


@pytest.mark.parametrize("engines", [1, 2])
def test_rows_come_in_the_order_of_dispatch(monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    generator = sampling(monkeypatch, engines, deterministic=False)
    for first in (0, 4):
        samples, _, consumed, _ = generator.generate_samples()
        assert [s.prompts[0] for s in samples] == [str(first + i) for i in range(4) for _ in range(3)]
        assert [s.labels for s in samples] == [[s.prompts[0]] for s in samples] and consumed == 4


def test_filtered_prompts_leave_the_same_rows_whatever_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sampling(monkeypatch)
    generator.args.algo.dynamic_filtering_enable = True  # of even labels
    samples, passed, consumed, _ = generator.generate_samples()
    assert [s.prompts[0] for s in samples] == [p for p in "1357" for _ in range(3)] and consumed == 8
    assert generator.dispatched == 8 and passed == 50, "percent of the prompts"
    monkeypatch.setattr(upstream.ray, "wait", lambda refs, **options: (refs[:1], refs[1:]))
    again = sampling(monkeypatch, engines=2)
    again.args.algo.dynamic_filtering_enable = True
    assert rows(again.generate_samples()[0]) == rows(samples)


def test_under_full_determinism_every_turn_of_every_sample_has_a_seed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, same, other = sampling(monkeypatch), sampling(monkeypatch, engines=2), sampling(monkeypatch, seed=2)
    steps = [rows(one.generate_samples()[0]) for _ in range(2)]
    seeds = [seed for step in steps for _, *turns in step for seed in turns]
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 3 * 2
    # An evaluation in between moves nothing, and the next one is the same but for the weights.
    first = rows(same.generate_samples()[0])
    evaluations = [rows(same.generate_eval_samples(n_samples_per_prompt=2)) for _ in range(2)]
    assert [first, rows(same.generate_samples()[0])] == steps
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 12
    assert not set(seeds) & {seed for _, *turns in evaluations[0] for seed in turns}
    assert not set(seeds) & {seed for _, *turns in rows(other.generate_samples()[0]) for seed in turns}


def test_otherwise_requests_are_left_to_the_engines_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sampling(monkeypatch, deterministic=False)
    generator.generate_samples()
    assert generator.vllm_engines[0].engine.seeds == [None] * 24


def test_the_asynchronous_trainers_calls_pass_through() -> None:
    """Upstream's generator there does not number its prompts."""
    from vllm import SamplingParams

    engine, params = Engine(), SamplingParams()
    responses = asyncio.run(
        engine.generate_responses("p", "1", sampling_params=params, max_length=8, hf_tokenizer=None, num_samples=2)
    )
    assert [response["label"] for response in responses] == ["1", "1"] and "prompt_number" not in responses[0]
    assert engine.seeds == [None] * 4


@pytest.mark.parametrize(("platform", "alone"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_has_the_engine_to_itself_on_a_cpu_under_full_determinism(
    monkeypatch: pytest.MonkeyPatch, platform: str, alone: bool, deterministic: bool
) -> None:
    started: dict[str, Any] = {}

    async def start(self: Any, *args: Any, **kwargs: Any) -> None:
        started.update(kwargs)
        self.executor = None

    monkeypatch.setattr(rollout_actor._UpstreamRolloutActor, "__init__", start)
    monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", platform)
    actor = object.__new__(StrictRolloutActor)
    actor.engine_args = {"max_num_seqs": 512, "max_num_batched_tokens": 4096}
    asyncio.run(actor.__init__(full_determinism=deterministic, enable_prefix_caching=True))  # type: ignore[misc]
    is_alone = alone and deterministic
    given = {"max_num_seqs": 1, "max_num_batched_tokens": None} if is_alone else actor.engine_args
    assert {name: started[name] for name in given} == given
    assert started["enable_prefix_caching"] is not is_alone
