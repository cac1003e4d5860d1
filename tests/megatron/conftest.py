"""Rank processes that the Megatron tests share: starting them and importing Megatron costs more than most tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes joined over gloo; every layout of at most four ranks runs on them."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One process with a gloo group of its own, for what needs no sharding."""
    with RankPool(1) as pool:
        yield pool
