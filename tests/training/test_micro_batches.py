"""Every row is in one micro-batch that fits, micro-batches are few, and every value comes back to its token."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.token_values import MicroBatch, TokenValues
from openrlhf_gtpo.training.actors.micro_batches import PaddedBatch, fill_micro_batches, forward_padded

LENGTHS = st.lists(st.integers(1, 120), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 150))
def test_every_row_is_in_one_micro_batch_that_fits(lengths: list[int], max_tokens: int) -> None:
    batches = fill_micro_batches(lengths, max_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch == sorted(batch) and batch
        assert sum(lengths[row] for row in batch) <= max_tokens or len(batch) == 1
    assert fill_micro_batches(lengths, max_tokens) == batches, "every process of a replica must find the same ones"


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 150))
def test_there_are_few_of_them(lengths: list[int], max_tokens: int) -> None:
    """No filling needs fewer than the token count alone implies; first-fit is known to stay below twice that."""
    too_long = [length for length in lengths if length > max_tokens]
    fitting = [length for length in lengths if length <= max_tokens]
    assert len(fill_micro_batches(lengths, max_tokens)) <= len(too_long) + 2 * (-(-sum(fitting) // max_tokens))


def test_they_are_of_similar_size() -> None:
    generator = random.Random(0)
    lengths = [min(900, 1 + int(generator.expovariate(1 / 100))) for _ in range(400)]
    sizes = [sum(lengths[row] for row in batch) for batch in fill_micro_batches(lengths, 1000)]
    assert max(sizes) <= 1000
    assert max(sizes) - min(sizes) <= 10
    assert len(sizes) <= sum(lengths) / 1000 * 1.03 + 1


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "wanted"),
    [
        ([], 8, []),
        ([5, 3, 7, 2, 6], 100, [[0, 1, 2, 3, 4]]),
        ([5, 5, 5], 5, [[0], [1], [2]]),
        ([50, 2, 3], 8, [[0], [1, 2]]),  # a row that does not fit stands alone
        ([4, 4, 4, 3, 3, 3], 9, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_known_cases(lengths: list[int], max_tokens: int, wanted: list[list[int]]) -> None:
    assert sorted(fill_micro_batches(lengths, max_tokens)) == wanted


GROUPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=40)  # each row's prompt and own tokens


@settings(deadline=None)
@given(GROUPS, st.integers(1, 150))
def test_rows_that_share_a_prompt_stay_together(rows: list[tuple[int, int]], max_tokens: int) -> None:
    """A micro-batch fits with each of its prompts counted once, and a group that fits is in one."""
    prompts = [Prompt(bytes([kind]), 7 * kind) for kind, _ in rows]
    lengths = [prompt.length + own for prompt, (_, own) in zip(prompts, rows, strict=True)]
    filled = fill_micro_batches(lengths, max_tokens, prompts)
    assert sorted(row for batch in filled for row in batch) == list(range(len(rows)))
    for batch in filled:
        tokens = computed_tokens([lengths[row] for row in batch], [prompts[row] for row in batch])
        assert tokens <= max_tokens or len(batch) == 1
    for prompt in set(prompts):
        group = [row for row in range(len(rows)) if prompts[row] == prompt]
        if computed_tokens([lengths[row] for row in group], [prompt] * len(group)) <= max_tokens:
            assert any(set(group) <= set(batch) for batch in filled)


@st.composite
def batches(draw: st.DrawFn) -> list[PaddedBatch]:
    """Ragged batches padded on either side, with holes between actions; no two of their tokens are the same."""
    made, token = [], 1
    for _ in range(draw(st.integers(1, 4))):
        rows, width = draw(st.integers(1, 4)), draw(st.integers(2, 12))
        columns = draw(st.integers(1, width - 1))
        sequences = torch.arange(token, token + rows * width).view(rows, width)
        token += rows * width
        attention = torch.zeros(rows, width, dtype=torch.long)
        actions = torch.zeros(rows, columns, dtype=torch.long)
        for row in range(rows):
            start = draw(st.integers(0, width - 1))
            stop = draw(st.integers(start + 1, width))
            attention[row, start:stop] = 1
            for column in range(max(start + 1, width - columns), stop):
                actions[row, column - (width - columns)] = draw(st.integers(0, 1))
        made.append((sequences, attention, actions))
    return made


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 30))
def test_every_value_comes_back_to_its_token(given_batches: list[PaddedBatch], max_tokens: int) -> None:
    """The model answers every action with its own token id, negated for the entropy."""
    seen: list[int] = []

    def forward(micro_batches: list[MicroBatch]) -> list[TokenValues]:
        answers = []
        for rows in micro_batches:
            sizes = [len(tokens) for tokens, _ in rows]
            assert sum(sizes) <= max_tokens or len(rows) == 1
            assert not any(bool(actions[0]) for _, actions in rows)
            seen.extend(int(token) for tokens, _ in rows for token in tokens)
            values = torch.cat([tokens[actions] for tokens, actions in rows]).float()
            answers.append(TokenValues(values, -values))
        return answers

    results = forward_padded(given_batches, max_tokens, forward)
    real = [int(token) for sequences, valid, _ in given_batches for token in sequences[valid.bool()]]
    assert sorted(seen) == real, "every real token once, and no padding"
    for (sequences, _, actions), (log_probs, entropy) in zip(given_batches, results, strict=True):
        expected = (sequences[:, -actions.shape[1] :] * actions).float()
        assert torch.equal(log_probs, expected) and torch.equal(entropy, -expected)
