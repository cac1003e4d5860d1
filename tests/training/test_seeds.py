"""What ``--train.seed`` decides: the order of prompts, the order of a batch's rows, and each request's seed."""

import asyncio
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from fake_engines import PROMPTS, Engine, Executor, rows, sampling
from openrlhf.trainer.ppo_utils import samples_generator as upstream
from rollouts import arguments
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.actors.strategy import Strategy
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.rollout import rollout_actor, samples_generator
from openrlhf_gtpo.training.rollout.rewards import Patience, RewardFailed, StrictRewardExecutor
from openrlhf_gtpo.training.rollout.rollout_actor import EngineRestarted, StrictRolloutActor
from openrlhf_gtpo.training.rollout.samples_generator import NumberedLabel, SharedTokenizer


def loader(seed: int, workers: int = 0, shuffle: bool = True) -> Any:
    """A data loader as ``prepare_datasets`` asks for it, in a process whose own generator nobody seeds."""
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


def test_an_agent_that_asks_once_more_gets_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask with the same tokens, to take the best of several; the same sample gets the same answers again."""

    async def twice(engine: Any, index: int) -> list[int]:
        rollout_actor._sample_seed.set((1, index))
        rollout_actor._asked.set(Counter())
        params = SimpleNamespace(seed=None)
        return [await engine.generate([5, 6], params) for _ in range(2)]

    engine: Any = sampling(monkeypatch).vllm_engines[0].engine
    first, other, same = (asyncio.run(twice(engine, index)) for index in (0, 1, 0))
    assert len({*first, *other}) == 4 and first == same


@pytest.mark.parametrize("engines", [1, 2])
def test_rows_come_in_the_order_of_dispatch(monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    generator = sampling(monkeypatch, engines, deterministic=False)
    for first in (0, 4):
        samples, _, consumed, _ = generator.generate_samples()
        assert [s.prompts[0] for s in samples] == [str(first + i) for i in range(4) for _ in range(3)]
        assert [s.labels for s in samples] == [[s.prompts[0]] for s in samples] and consumed == 4


def test_filtered_prompts_leave_the_same_rows_whatever_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sampling(monkeypatch)
    generator.args.algo.dynamic_filtering_enable = True  # drops even labels
    samples, passed, consumed, _ = generator.generate_samples()
    assert [s.prompts[0] for s in samples] == [p for p in "1357" for _ in range(3)] and consumed == 8
    assert generator.dispatched == 8 and passed == 50, "percent of the prompts"
    monkeypatch.setattr(upstream.ray, "wait", lambda refs, **options: (refs[:1], refs[1:]))
    again = sampling(monkeypatch, engines=2)
    again.args.algo.dynamic_filtering_enable = True
    assert rows(again.generate_samples()[0]) == rows(samples)


@pytest.mark.parametrize(
    ("estimator", "rewards", "scores", "passes"),
    [
        ("group_norm", [0.3, 0.3, 0.3], [0.3, 0.3, 0.3], False),  # their mean is in the filter's range
        ("group_norm", [0.7 + 0.2 + 0.1, 1.0, 1.0], None, False),  # equal as float32
        ("group_norm", [0.3, 0.3, 0.3], [0.0, 1.0, 1.0], False),
        ("group_norm", [0.1, 0.3, 0.3], [0.5, 0.5, 0.5], False),
        ("group_norm", [0.1, 0.3, 0.3], None, True),
        ("gtpo", [0.1, 0.3, 0.3], None, False),  # none succeeds
        ("gtpo", [0.1, 1.0, 0.3], None, True),
        ("forking_tokens", [0.1, 0.3, 0.3], None, True),
    ],
)
def test_a_group_that_does_not_differ_is_replaced(
    estimator: str, rewards: list[float], scores: list[float] | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scores, as of an agent that leaves them out, rewards stand in for them."""
    at: Counter[str] = Counter()

    def changed(prompt: str) -> dict[str, Any]:
        if prompt != "1":
            return {} if scores else {"scores": None}
        at[prompt] += 1
        index = at[prompt] - 1
        return {"reward": rewards[index], "scores": scores and scores[index]}

    generator = respond_with(monkeypatch, changed)
    generator.args.algo.dynamic_filtering_enable, generator.args.algo.dynamic_filtering_range = True, (0.0, 1.01)
    generator._credit = entropy_credit(arguments("--algo.advantage.estimator", estimator))
    prompts = [sample.prompts[0] for sample in generator.generate_samples()[0]]
    assert [prompt for prompt in prompts if prompt != "1"] == [p for p in "357" + "9" * (not passes) for _ in range(3)]
    assert prompts.count("1") == 3 * passes
    at.clear()
    generator.generate_eval_samples()
    assert [s.prompts[0] for s in generator.held_out] == [
        p for p in "012345" for _ in range(3)
    ], "an evaluation has all"


def test_under_full_determinism_every_turn_of_every_sample_has_a_seed_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, same, other = sampling(monkeypatch), sampling(monkeypatch, engines=2), sampling(monkeypatch, seed=2)
    steps = [rows(one.generate_samples()[0]) for _ in range(2)]
    seeds = [seed for step in steps for _, *turns in step for seed in turns]
    assert len(set(seeds)) == len(seeds) == 2 * 4 * 3 * 2
    # An evaluation in between changes nothing, and the next one is the same except for the weights.
    first = rows(same.generate_samples()[0])
    evaluations = [rows(same.generate_eval_samples(n_samples_per_prompt=2)) for _ in range(2)]
    assert [first, rows(same.generate_samples()[0])] == steps
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 12
    assert not set(seeds) & {seed for _, *turns in evaluations[0] for seed in turns}
    assert not set(seeds) & {seed for _, *turns in rows(other.generate_samples()[0]) for seed in turns}


@pytest.mark.parametrize("filtered", [False, True])
def test_an_engine_that_dies_in_a_rollout_moves_nothing(monkeypatch: pytest.MonkeyPatch, filtered: bool) -> None:
    """Its responses that nobody has taken are lost; their prompts are asked again, under the same numbers, and those
    of the other engine are not."""
    undisturbed = sampling(monkeypatch, engines=2)
    undisturbed.args.algo.dynamic_filtering_enable = filtered
    expected = undisturbed.generate_samples()
    lost: list[Any] = []

    def recover(error: Exception) -> None:
        assert isinstance(error, ray.exceptions.ActorUnavailableError)
        if not lost:
            lost.append(generator.vllm_engines.pop(0))

    generator = sampling(monkeypatch, engines=2, recover=recover)
    generator.args.algo.dynamic_filtering_enable = filtered
    monkeypatch.setattr(samples_generator, "ray", SimpleNamespace(**vars(upstream.ray), exceptions=ray.exceptions))
    dying, other = generator.vllm_engines
    asked: list[int] = []  # of the other engine
    answer = other.generate_responses.remote

    def dead() -> Any:
        raise ray.exceptions.ActorUnavailableError("it is being started", None)

    def ask(**request: Any) -> Any:
        asked.append(request["label"].number)
        return answer(**request)

    dying.generate_responses.remote, other.generate_responses.remote = lambda **request: dead, ask
    assert rows(generator.generate_samples()[0]) == rows(expected[0])
    assert lost == [dying] and sorted(asked) == list(range(undisturbed.dispatched))
    assert rows(generator.generate_samples()[0]) == rows(undisturbed.generate_samples()[0]), "nothing is drawn twice"


@pytest.mark.parametrize("failure", [RewardFailed, ConnectionError], ids=["reward", "agent"])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_prompt_whose_reward_or_agent_fails_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, filtered: bool, failure: type[Exception]
) -> None:
    generator = sampling(monkeypatch)
    generator.vllm_engines[0].engine.executor.failure = failure
    generator.args.algo.dynamic_filtering_enable = filtered
    generator.vllm_engines[0].engine.patience = Patience(tries=2)
    generator.vllm_engines[0].engine.executor.fails = {"1"}
    samples, passed, consumed, _ = generator.generate_samples()
    assert [s.prompts[0] for s in samples[::3]] == (list("3579") if filtered else list("023")) and len(
        samples
    ) % 3 == 0
    assert generator.dropped == 1 and consumed == (10 if filtered else 4) and passed in (None, 40)
    assert len(generator.generate_samples()[0]) == 12 and generator.dropped == 0


def test_a_dropped_prompt_has_nothing_left_at_the_engine() -> None:
    """vLLM would go on sampling for nobody, into the transfer of weights, after which it could not empty its cache."""
    from vllm import SamplingParams

    engine, calls = Engine(), Counter()
    engine.patience = Patience(tries=2, seconds=60)

    async def generate(tokens: Any, params: Any, *_: Any) -> Any:
        first = rollout_actor._sample_seed.get()[-1] == 0
        calls["running"] += 1
        try:
            await asyncio.sleep(0 if first else 600)
            raise ConnectionError("no reward")
        finally:
            calls["running"] -= 1

    async def story() -> list[Any]:
        params = SamplingParams()
        asked = {"sampling_params": params, "max_length": 8, "hf_tokenizer": None, "num_samples": 4}
        found = await asyncio.wait_for(engine.generate_responses("p", NumberedLabel("1", 0, (1,)), **asked), 30)
        await asyncio.sleep(0.1)
        return [*map(list, found), calls["running"]]

    engine.generate = generate
    assert asyncio.run(story()) == [[samples_generator.DROPPED], 0]


def test_a_mistake_drops_nothing_and_an_engine_that_died_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    for failure, raised in ((TrainingStopped, TrainingStopped), (ConnectionError, EngineDeadError)):
        generator = sampling(monkeypatch)
        engine = generator.vllm_engines[0].engine
        engine.patience, engine.executor.fails, engine.executor.failure = Patience(tries=2), {"1"}, failure

        async def dead() -> None:
            raise EngineDeadError

        engine.llm.is_sleeping = dead
        with pytest.raises(raised):
            generator.generate_samples()
        assert generator.dropped == 0


def test_too_many_failed_rewards_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sampling(monkeypatch)
    generator.vllm_engines[0].engine.patience = Patience(tries=2)
    generator.vllm_engines[0].engine.executor.fails = {"1", "2"}
    with pytest.raises(
        TrainingStopped, match="The reward or agent failed for 2 prompts of a rollout.* The last: .*no reward for 1$"
    ):
        generator.generate_samples()


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (RewardFailed, "no reward for 1"),
        (
            ConnectionError,
            rf"Could not get a response from {__file__}: ConnectionError: no reward for 1 \(.*fake_engines.py, line "
            r"\d+\). Prompt: '1'",
        ),
    ],
    ids=["reward", "agent"],
)
def test_without_restarts_the_first_failed_reward_or_agent_stops_the_run(
    failure: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = sampling(monkeypatch)
    engine = generator.vllm_engines[0].engine
    engine.executor.fails, engine.executor.failure, engine._agent_path = {"1"}, failure, __file__
    with pytest.raises(TrainingStopped, match=f"^{sentence}$"):
        generator.generate_samples()


def respond_with(monkeypatch: pytest.MonkeyPatch, changed: Callable[[str], dict[str, Any]]) -> Any:
    """A generator over an agent that answers as ever, but for what ``changed`` says of a prompt."""
    generator, execute = sampling(monkeypatch), Executor.execute

    async def other(self: Executor, **given: Any) -> dict[str, Any]:
        return await execute(self, **given) | changed(given["prompt"])

    monkeypatch.setattr(Executor, "execute", other)
    return generator


@pytest.mark.parametrize("label", [NumberedLabel("1", 0, None), "1"], ids=["numbered", "asynchronous"])
def test_samples_of_a_prompt_do_not_share_their_sampling_parameters(label: Any) -> None:
    """Upstream's agent takes what is left for the first turn of another sample for the least of its own, and would
    cut the observation that this one begins with."""
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
    from vllm import SamplingParams

    class Growing(AgentInstanceBase):
        made = 0

        def __init__(self) -> None:
            Growing.made += 1
            self.number = Growing.made

        async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {"observation": "x" * 5 * self.number}

        async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
            states["sampling_params"].temperature = self.number / 10
            done = len(states["observation_text"]) > 5 * self.number
            return {"rewards": torch.tensor(1.0), "environment_feedback": "f", "done": done}

    engine, asked = Engine(), []
    engine.executor = MultiTurnAgentExecutor(Growing)

    async def answer(prompt: Any, params: Any, request_id: str) -> Any:
        asked.append((len(prompt["prompt_token_ids"]), params.max_tokens, params.temperature))
        await asyncio.sleep(0)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="stop", text="a")])

    engine.llm.generate = answer
    tokenizer = lambda text, **_: {"input_ids": torch.ones(1, len(text), dtype=torch.long)}  # noqa: E731
    call = engine.generate_responses(
        "p",
        label,
        sampling_params=SamplingParams(max_tokens=None),
        max_length=30,
        hf_tokenizer=tokenizer,
        num_samples=3,
    )
    assert [len(response["observation_tokens"]) for response in asyncio.run(call)] == [9, 14, 19]
    assert sorted(asked) == [(5, 25, 1), (7, 23, 0.1), (10, 20, 1), (12, 18, 0.2), (15, 15, 1), (17, 13, 0.3)]


@pytest.mark.parametrize(
    ("tokens", "actions", "cut"),
    [(8, [(2, 4), (6, 8)], False), (9, [(2, 4)], True), (8, [(2, 7)], True), (7, [(2, 4)], False), (8, [], True)],
)
def test_an_agent_whose_context_is_full_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, tokens: int, actions: list[tuple[int, int]], cut: bool
) -> None:
    """A row ends with an action that vLLM did not cut off, or with an observation that leaves no room for the next."""
    answer = {"observation_tokens": [1] * tokens, "action_ranges": actions, "rollout_log_probs": None}
    generator = respond_with(monkeypatch, lambda prompt: answer)
    found, *_ = generator.generate_samples(max_len=8)
    assert {bool(row.truncated) for row in found} == {cut}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"reward": float("nan")}, "its rewards are not finite"),
        ({"scores": float("-inf")}, "its scores are not finite"),
        ({"rollout_log_probs": [-0.5]}, "it has 1 rollout_log_probs for 2 observation_tokens"),
        ({"reward": "good"}, "too many dimensions 'str'"),
        ({"observation_tokens": [1, 1000]}, "token 1000 is not in the model's vocabulary of 1000"),
        ({"observation_tokens": [-1, 1]}, "token -1 is not in the model's vocabulary of 1000"),
    ],
)
def test_an_agents_response_that_cannot_be_learned_from(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], what: str
) -> None:
    """A filter would take NaN for a group that teaches nothing; log-probs that lack a turn's would be padded."""
    generator = respond_with(monkeypatch, lambda prompt: changed)
    generator.args.algo.dynamic_filtering_enable = True
    with pytest.raises(
        TrainingStopped, match=f"Expected --train.agent_func_path to return .* cannot be read .*Error: {what}"
    ):
        generator.generate_samples()


def test_an_agents_extra_logs_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = respond_with(monkeypatch, lambda prompt: {"extra_logs": {"step": 2.0}})
    with pytest.raises(TrainingStopped, match="in the 'extra_logs' from --train.agent_func_path, got step, which"):
        generator.generate_samples()


def test_responses_that_log_different_things(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = respond_with(monkeypatch, lambda prompt: {"extra_logs": {"parsed": 1} if prompt == "2" else {}})
    assert len(generator.generate_eval_samples(n_samples_per_prompt=2)) == 12
    with pytest.raises(TrainingStopped, match="the same names in every response's extra_logs.* only some have parsed"):
        generator.generate_samples()


def test_vllm_makes_no_text_and_no_answers_that_nobody_reads() -> None:
    """An agent reads the text of whole answers; a single turn's reward gets prompt and response decoded together. vLLM
    finds stop strings in the text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, asked = Engine(), []

    async def answer(prompt: Any, params: Any, request_id: str) -> Any:
        asked.append((params.output_kind, params.detokenize))
        yield None

    engine.llm.generate, params = answer, SamplingParams()
    single_turn = StrictRewardExecutor(None, Patience())
    for engine.executor, given in (
        (Executor(), params),
        (single_turn, params),
        (single_turn, SamplingParams(stop="e")),
    ):
        asyncio.run(engine.generate([1], given))
    assert asked == [(RequestOutputKind.FINAL_ONLY, with_text) for with_text in (True, False, True)]
    assert params == SamplingParams(), "upstream's own object"


def test_an_engine_that_was_started_again_does_not_sample_before_it_has_the_weights() -> None:
    from vllm import SamplingParams

    engine, asked = Engine(), {"sampling_params": SamplingParams(), "max_length": 8, "hf_tokenizer": None}
    engine.kwargs = {"enable_prefix_caching": False}
    engine._has_old_weights = True

    async def story() -> None:
        for call in (engine.serves(), engine.generate_responses("p", NumberedLabel("1", 0, None), **asked)):
            with pytest.raises(EngineRestarted):
                await call
        await engine.receive_weights([], True)
        await engine.serves()
        assert len(await engine.generate_responses("p", NumberedLabel("1", 0, None), **asked)) == 1
        engine._has_old_weights = True
        await engine.receive_bucket([], {}, 0, 2, True)
        with pytest.raises(EngineRestarted):
            await engine.serves()
        await engine.receive_bucket([], {}, 1, 2, True)
        await engine.serves()

    asyncio.run(story())


def test_otherwise_requests_are_left_to_the_engines_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = sampling(monkeypatch, deterministic=False)
    generator.generate_samples()
    assert generator.vllm_engines[0].engine.seeds == [None] * 24


def test_the_asynchronous_trainers_calls_pass_through() -> None:
    """The asynchronous trainer's generator does not number its prompts."""
    from vllm import SamplingParams

    engine, params = Engine(), SamplingParams()
    responses = asyncio.run(
        engine.generate_responses("p", "1", sampling_params=params, max_length=8, hf_tokenizer=None, num_samples=2)
    )
    assert [response["label"] for response in responses] == ["1", "1"] and "prompt_number" not in responses[0]
    assert engine.seeds == [None] * 4


def test_a_call_that_is_cancelled_leaves_the_tokenizer_to_the_others() -> None:
    from vllm import SamplingParams

    engine, asked = Engine(), {"sampling_params": SamplingParams(), "max_length": 8}

    async def story() -> list[dict[str, Any]]:
        coming: Any = asyncio.get_running_loop().create_future()
        tokenizer = SharedTokenizer(coming)
        calls = [engine.generate_responses("p", "1", hf_tokenizer=tokenizer, **asked) for _ in range(2)]
        cancelled, other = map(asyncio.ensure_future, calls)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        coming.set_result(None)
        return await other

    assert len(asyncio.run(story())) == 1


def engine_start(monkeypatch: pytest.MonkeyPatch, platform: str) -> dict[str, Any]:
    """A dict that gets the arguments with which upstream's actor is started from now on."""
    started: dict[str, Any] = {}

    async def start(self: Any, *args: Any, **kwargs: Any) -> None:
        started.update(kwargs)
        self.executor, self.llm = None, SimpleNamespace(engine_core=None)

    monkeypatch.setattr(rollout_actor._UpstreamRolloutActor, "__init__", start)
    monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", platform)
    return started


@pytest.mark.parametrize(("platform", "alone"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_has_the_engine_to_itself_on_a_cpu_under_full_determinism(
    monkeypatch: pytest.MonkeyPatch, platform: str, alone: bool, deterministic: bool
) -> None:
    started = engine_start(monkeypatch, platform)
    actor = object.__new__(StrictRolloutActor)
    actor.engine_args = {"max_num_seqs": 512, "max_num_batched_tokens": 4096}
    asyncio.run(actor.__init__(full_determinism=deterministic, enable_prefix_caching=True))  # type: ignore[misc]
    is_alone = alone and deterministic
    given = {"max_num_seqs": 1, "max_num_batched_tokens": None} if is_alone else actor.engine_args
    assert {name: started[name] for name in given} == given
    assert started["enable_prefix_caching"] is not is_alone


@pytest.mark.parametrize(
    ("platform", "binding", "asked", "given"),
    [
        ("cpu", "nobind", "uni", rollout_actor.IN_ENGINE),
        ("cpu", "auto", "uni", "uni"),
        ("cpu", "nobind", "ray", "ray"),
        ("cuda", "nobind", "uni", "uni"),
    ],
)
def test_one_worker_is_in_the_engines_process_where_no_threads_are_bound(
    monkeypatch: pytest.MonkeyPatch, platform: str, binding: str, asked: str, given: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    started = engine_start(monkeypatch, platform)
    actor = object.__new__(StrictRolloutActor)
    asyncio.run(actor.__init__(distributed_executor_backend=asked))  # type: ignore[misc]
    assert started["distributed_executor_backend"] == given


def test_an_engine_that_dies_as_it_wakes_or_goes_to_sleep_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only engines on GPUs do, so this is shown with calls that note what they were asked."""
    asked: list[tuple[str, int]] = []

    def call(engines: list[Any], method: str) -> None:
        asked.append((method, len(engines)))
        if len(asked) in (1, 4):
            raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(samples_generator, "batch_vllm_engine_call", call)
    monkeypatch.setattr(samples_generator, "_AGAIN", 0)
    expected = rows(sampling(monkeypatch).generate_samples()[0])
    generator = sampling(monkeypatch, engines=3, recover=lambda error: generator.vllm_engines.pop())
    generator.args.vllm.enable_sleep = True
    assert rows(generator.generate_samples()[0]) == expected
    assert generator.generate_eval_samples()
    assert asked == [("wake_up", 3), ("wake_up", 2), ("sleep", 2), ("wake_up", 2), ("wake_up", 1), ("sleep", 1)]
