"""Pools of ranks for these tests alone: those of the Megatron tests hold what earlier layouts have left."""

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


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
