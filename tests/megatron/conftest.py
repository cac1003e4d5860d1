"""Rank processes that the Megatron tests share, since starting them and importing Megatron costs more than most tests,
and checkpoints of two shapes."""

from collections.abc import Iterator

import pytest

from tests.support.families import SHALLOW, make_checkpoint
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes joined over gloo; every layout of at most four ranks runs on them."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One process with a gloo group of its own, for tests that need no sharding."""
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in which every side of every matrix is a multiple of 128, even at TP2."""
    directory = tmp_path_factory.mktemp("wide")
    return str(make_checkpoint(directory, "llama", hidden_size=256, intermediate_size=512, head_dim=32, **SHALLOW))


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with sizes that FP8 blocks do not divide."""
    return str(make_checkpoint(tmp_path_factory.mktemp("narrow"), "qwen2", **SHALLOW))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same shape as ``narrow``, with other weights."""
    return str(make_checkpoint(tmp_path_factory.mktemp("other"), "qwen2", seed=1, **SHALLOW))
