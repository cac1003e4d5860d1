"""What the sampler says about tokens, and where it ends up: vLLM's own samplers on one step's logits, and the rollout
actor over an engine that answers from a table. For a real engine, see ``tests/weight_sync/test_vllm_sync.py``."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams
from vllm.logprobs import Logprob, create_sample_logprobs
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.features.sampler_entropy.answers import ENTROPY_TAG, entropies, versions
from openrlhf_gtpo.training.features.sampler_entropy.engine import SamplerEntropyInEngine
from openrlhf_gtpo.training.features.sampler_entropy.vllm_sampler import SamplerV2, capture, sampled_logprobs
from openrlhf_gtpo.training.rows import Row
from tests.support.fake_engines import Engine
from tests.support.fake_engines import respond as ask

ROWS, VOCABULARY, TEMPERATURE, VERSION = 5, 300, 0.7, 7


def metadata() -> SamplingMetadata:
    """Sampling metadata of a batch of random requests that are all the same, each with its own generator."""
    zeros = torch.zeros(ROWS)
    return SamplingMetadata(
        temperature=torch.full((ROWS,), TEMPERATURE),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator().manual_seed(row) for row in range(ROWS)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[]] * ROWS,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def captured(sampler: Any) -> Any:
    """The sampler in a worker that was asked for entropies."""
    runner = SimpleNamespace(sampler=sampler, vllm_config=SimpleNamespace(speculative_config=None))
    assert capture(runner, TEMPERATURE, lambda: VERSION) is None
    return sampler


def exact(logits: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits.double() / TEMPERATURE, dim=1)
    return log_p.gather(1, sampled.long()).squeeze(1), torch.special.entr(log_p.exp()).sum(1)


def assert_said_of(tensors: Any, logits: torch.Tensor, sampled: torch.Tensor) -> None:
    said = tensors.tolists()
    log_probs, entropy = exact(logits, sampled)
    assert said.logprob_token_ids.tolist() == sampled.tolist()
    torch.testing.assert_close(torch.tensor(said.logprobs[:, 0]).double(), log_probs, rtol=0, atol=2e-5)
    found = torch.tensor(entropies(said.sampled_token_ranks.tolist()))
    torch.testing.assert_close(found.double(), entropy, rtol=0, atol=2e-5)
    assert versions(said.sampled_token_ranks).tolist() == [VERSION] * ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_v1_sampler_draws_the_same_tokens_and_says_more_of_them(dtype: torch.dtype) -> None:
    """It uses the raw logits even if the most likely token is banned, as ``min_tokens`` bans an end of sequence."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    banned = metadata()
    banned.allowed_token_ids_mask = torch.zeros(ROWS, VOCABULARY, dtype=torch.bool).scatter_(
        1, logits.argmax(1, keepdim=True), True
    )
    for given in (metadata(), banned):
        theirs = Sampler()(logits.clone(), given)
        given.generators = metadata().generators
        ours = captured(Sampler())(logits.clone(), given)
        assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
        assert_said_of(ours.logprobs_tensors, logits, ours.sampled_token_ids)
        assert all(math.isnan(h) for h in entropies(theirs.logprobs_tensors.selected_token_ranks.tolist()))
    given.max_num_logprobs = None
    assert captured(Sampler())(logits.clone(), given).logprobs_tensors is None


@pytest.mark.parametrize("wanted", [(0, 0), None])
def test_the_v2_sampler_keeps_vllms_own_passes_off(monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    """Its own work, in Triton kernels, is replaced by what it does with the dimensions of its log-probs."""
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampled = torch.arange(ROWS).view(-1, 1)

    def sample(self: Any, logits: torch.Tensor, batch: Any) -> Any:
        assert self.get_logprobs_dims(batch.idx_mapping_np) is None
        return SimpleNamespace(sampled_token_ids=sampled, logprobs_tensors=None)

    monkeypatch.setattr(SamplerV2, "__call__", sample)
    monkeypatch.setattr(SamplerV2, "get_logprobs_dims", lambda self, rows: wanted)
    said = captured(SamplerV2.__new__(SamplerV2))(logits, SimpleNamespace(idx_mapping_np=None)).logprobs_tensors
    if wanted is None:
        assert said is None
    else:
        assert_said_of(said, logits, sampled)


def test_every_entropy_survives_as_a_rank() -> None:
    values = torch.tensor([0.0, 1e-30, 0.1, math.log(151936), math.nan, -math.nan])
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    ranks = [*((1 + torch.arange(6) * 400_000_000) * ENTROPY_TAG + bits).tolist(), 1, 151936]
    assert versions(np.array(ranks)).tolist() == [*range(0, 2_400_000_000, 400_000_000), -1, -1]
    found = torch.tensor(entropies(ranks))
    torch.testing.assert_close(
        found, torch.cat([values, torch.tensor([math.nan] * 2)]), rtol=0, atol=0, equal_nan=True
    )


class Turns(AgentExecutorBase):
    """An agent that asks ``turns``, (prompt, parameters) each, and answers with ``tokens`` and ``actions``."""

    log_probs: Any = None

    def __init__(self, turns: list[tuple[list[int], dict[str, Any]]], tokens: list[int], actions: Any) -> None:
        self.turns, self.tokens, self.actions = turns, tokens, actions

    async def execute(self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        engine = kwargs["llm_engine"]
        for asked, changed in self.turns:
            turn = list(asked)
            params = SamplingParams(temperature=TEMPERATURE, **changed) if changed else sampling_params
            answer = await engine.generate(turn, params)
            turn += answer.outputs[0].token_ids  # the actor must have kept a copy
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": self.tokens,
            "action_ranges": self.actions,
            "rollout_log_probs": self.log_probs,
            "reward": 1.0,
            "scores": 1.0,
        }


class TableEngine(Engine):
    """Answers a prompt with what ``table`` has for its tokens: token ids, log-probs and entropies (an int: a rank)."""

    def __init__(
        self,
        table: dict[tuple[int, ...], list[tuple[int, float, float]]],
        executor: Any,
        temperature: float = TEMPERATURE,
        uses: str | None = None,
    ) -> None:
        super().__init__()
        self.executor, self.table, self.asked = executor, table, []
        self.llm.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.uses, self.captured = uses, []
        self.llm.collective_rpc = self.capture
        self.features = (SamplerEntropyInEngine(temperature),)
        asyncio.run(self.features[0].start(self.llm))

    async def capture(self, method: str, args: Any) -> list[str | None]:
        """Two workers, both of which may have a sampler that is not known."""
        self.captured.append((method, *args))
        return [self.uses] * 2

    async def answer(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.asked.append(params)
        token_ids, said = [], create_sample_logprobs(params.flat_logprobs)
        for token, log_prob, entropy in self.table[tuple(prompt["prompt_token_ids"])]:
            bits = int(torch.tensor(float(entropy)).view(torch.int32)) & 0xFFFFFFFF
            rank = entropy if isinstance(entropy, int) else ENTROPY_TAG + bits
            token_ids.append(token)
            said.append({token: Logprob(log_prob, rank)})
        logprobs = None if params.logprobs is None else said
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids, logprobs=logprobs, routed_experts=None)])


FIRST = {(1, 2): [(5, -0.5, 0.25), (6, -0.125, 0.5), (7, -1.0, 0.75)]}
SECOND = {(1, 2, 5, 6, 7, 9): [(8, -2.0, 1.0), (3, -4.0, 2.0)]}
NAN = math.nan


def respond(engine: Any, is_trained: bool = True, max_len: int = 64) -> Row:
    params = SamplingParams(temperature=TEMPERATURE, min_tokens=1)
    [row] = asyncio.run(ask(engine, params, max_len=max_len, is_trained=is_trained))
    return row


@pytest.mark.parametrize(
    ("turns", "tokens", "actions", "entropy"),
    [
        ([[1, 2]], [1, 2, 5, 6, 7], [(2, 5)], [0, 0, 0.25, 0.5, 0.75]),
        # Two turns with an observation, 9, between them.
        ([[1, 2], [1, 2, 5, 6, 7, 9]], [1, 2, 5, 6, 7, 9, 8, 3], [(2, 5), (6, 8)], [0, 0, 0.25, 0.5, 0.75, 0, 1, 2]),
        # The agent changed a token: what follows was drawn after a different one.
        ([[1, 2]], [1, 2, 5, 4, 7], [(2, 5)], [0, 0, 0.25, NAN, NAN]),
        # It cut the answer, asked with only a part of the observation that the response has, or lengthened the answer.
        ([[1, 2]], [1, 2, 5], [(2, 3)], [0, 0, 0.25]),
        ([[1, 2], [1, 2, 5, 6, 7, 9]], [1, 2, 5, 6, 7, 4, 9, 8], [(2, 5), (7, 8)], [0, 0, 0.25, 0.5, 0.75, 0, 0, NAN]),
        ([[1, 2]], [1, 2, 5, 6, 7, 7], [(2, 6)], [0, 0, 0.25, 0.5, 0.75, NAN]),
        # It used only one of its answers, here the first; then the same with two answers to one prompt.
        ([[1, 2], [2]], [1, 2, 5, 6, 7], [(2, 5)], [0, 0, 0.25, 0.5, 0.75]),
        ([[1, 2], [1, 2]], [1, 2, 5, 6, 7], [(2, 5)], [0, 0, 0.25, 0.5, 0.75]),
        # It never asked the engine.
        ([], [1, 2, 5], [(2, 3)], [0, 0, NAN]),
    ],
)
def test_a_token_has_the_values_of_the_answer_that_it_stands_in(
    turns: Any, tokens: list[int], actions: Any, entropy: list[float]
) -> None:
    table = FIRST | SECOND | {(2,): [(5, -9.0, 3.0)]}
    row = respond(TableEngine(table, Turns([(turn, {}) for turn in turns], tokens, actions)))
    assert row.values is not None
    found = torch.stack([torch.as_tensor(row.values.log_probs), torch.as_tensor(row.values.entropy)])
    torch.testing.assert_close(found[1], torch.tensor(entropy, dtype=torch.float32), rtol=0, atol=0, equal_nan=True)
    log_prob = {0.25: -0.5, 0.5: -0.125, 0.75: -1.0, 1.0: -2.0, 2.0: -4.0}
    said = [log_prob.get(h, h) for h in entropy]
    torch.testing.assert_close(found[0], torch.tensor(said, dtype=torch.float32), rtol=0, atol=0, equal_nan=True)


def test_each_of_a_prompts_responses_has_its_own_answers() -> None:
    engine = TableEngine(FIRST, Turns([([1, 2], {})], [1, 2, 5], [(2, 3)]))
    rows = asyncio.run(ask(engine, SamplingParams(temperature=TEMPERATURE), samples=3))
    assert [row.values.entropy.tolist() for row in rows] == [[0, 0, 0.25]] * 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"top_p": 0.9}, "top_p 1.0 .* got 0.9"),
        ({"top_k": 20}, "top_k 0 .* got 20"),
        ({"min_p": 0.1}, "min_p 0.0 .* got 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.0 .* got 1.1"),
        ({"presence_penalty": 0.5}, "presence_penalty 0.0 .* got 0.5"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.0 .* got 0.5"),
        ({"logit_bias": {3: 1.0}}, "logit_bias None .* got {3: 1.0}"),
        ({"bad_words": ["a"]}, r"bad_words \[\] .* got \['a'\]"),
        ({"allowed_token_ids": [3]}, r"allowed_token_ids None .* got \[3\]"),
        ({"logprobs": 5}, "logprobs None .* got 5"),
    ],
)
def test_an_agents_parameters_that_change_the_distribution_are_refused(changed: dict[str, Any], named: str) -> None:
    engine = TableEngine(FIRST, Turns([([1, 2], changed)], [1, 2, 5], [(2, 3)]))
    with pytest.raises(TrainingStopped, match=f"Expected {named}.*--rollout.entropy actor"):
        respond(engine)
    assert not engine.asked


def test_another_temperature_is_refused_and_what_changes_no_distribution_is_not() -> None:
    agent = Turns([([1, 2], {"stop": ["."], "top_k": -1, "logprobs": 1})], [1, 2, 5], [(2, 3)])
    with pytest.raises(TrainingStopped, match="Expected temperature 1.0 .* got 0.7"):
        respond(TableEngine(FIRST, agent, temperature=1.0))
    engine = TableEngine(FIRST, agent)
    values = respond(engine).values
    assert values is not None and values.entropy.tolist() == [0, 0, 0.25] and engine.asked[0].logprobs == 0


@pytest.mark.parametrize(
    ("said", "got"),
    [
        ((-0.1, 17), "log-prob -0.1, entropy nan"),  # a rank, from a sampler that was not asked for entropies
        ((-0.1, math.nan), "log-prob -0.1, entropy nan"),
        ((math.nan, 0.1), "log-prob nan, entropy 0.1"),
        ((-0.1, math.log(VOCABULARY) + 0.01), "log-prob -0.1, entropy 5.71378"),
        ((-0.1, -0.01), "log-prob -0.1, entropy -0.01"),
    ],
)
def test_what_no_distribution_has_stops_the_run(said: tuple[float, float], got: str) -> None:
    table = {(1, 2): [(5, -0.5, 0.25), (6, *said), (7, -1.0, 0.75)]}
    engine = TableEngine(table, Turns([([1, 2], {})], [1, 2, 5, 6], [(2, 4)]))
    with pytest.raises(
        TrainingStopped,
        match=rf"entropy in \[0, 5.704\] .* got {got} for token 1 of 3 \(id 6\) in .* a response to prompt 0",
    ):
        respond(engine)


@pytest.mark.parametrize("max_len", [64, 4])
def test_rows_carry_them_cut_as_tokens_and_log_probs_are(max_len: int) -> None:
    agent = Turns([([1, 2], {})], [1, 2, 5, 6, 7], [(2, 5)])
    agent.log_probs = [0.0, 0.0, -0.5, -0.125, -1.0]
    row = respond(TableEngine(FIRST, agent), max_len=max_len)
    assert row.values is not None and row.values.log_probs.dtype == row.values.entropy.dtype == np.float32
    assert row.values.log_probs.tolist() == row.log_probs.tolist() == agent.log_probs[:max_len]
    assert row.values.entropy.tolist() == [0.0, 0.0, 0.25, 0.5, 0.75][:max_len] and len(row.tokens) == min(max_len, 5)


def test_what_token_values_says_is_one_column() -> None:
    tensors = sampled_logprobs(torch.zeros(2, 4), torch.tensor([3, 0], dtype=torch.int32), 1.0, VERSION)
    assert tensors.logprobs.shape == tensors.logprob_token_ids.shape == (2, 1)
    assert tensors.logprob_token_ids.dtype == torch.int32 and tensors.selected_token_ranks.dtype == torch.int64
