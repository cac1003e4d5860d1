"""Would catch a row that is lost or doubled, a micro-batch that does not fit, or many where few would do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.integration.actors.micro_batches import fill

LENGTHS = st.lists(st.integers(1, 120), max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 150))
def test_every_row_is_in_one_micro_batch_that_fits(lengths: list[int], max_tokens: int) -> None:
    batches = fill(lengths, max_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch == sorted(batch) and batch
        assert sum(lengths[row] for row in batch) <= max_tokens or len(batch) == 1
    assert fill(lengths, max_tokens) == batches, "every process of a replica must find the same ones"


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 150))
def test_there_are_few_of_them(lengths: list[int], max_tokens: int) -> None:
    """The fewest that any filling needs are those of the tokens alone; first-fit is known to stay below twice that."""
    too_long = [length for length in lengths if length > max_tokens]
    fitting = [length for length in lengths if length <= max_tokens]
    assert len(fill(lengths, max_tokens)) <= len(too_long) + 2 * (-(-sum(fitting) // max_tokens))


def test_they_are_of_similar_size() -> None:
    generator = random.Random(0)
    lengths = [min(900, 1 + int(generator.expovariate(1 / 100))) for _ in range(400)]
    sizes = [sum(lengths[row] for row in batch) for batch in fill(lengths, 1000)]
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
    assert sorted(fill(lengths, max_tokens)) == wanted


def test_room_for_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens holds no row; give at least 1"):
        fill([1], 0)
