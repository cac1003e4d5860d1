"""Makes the programs beside the tests importable, and also those of the Megatron tests with their pool of ranks.

The tests here start their own pools: in those of the Megatron tests, what earlier layouts left would be measured too.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "megatron")]

from rank_pool import RankPool  # noqa: E402


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Four processes joined over gloo."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    """One process with a gloo group of its own."""
    with RankPool(1) as pool:
        yield pool
