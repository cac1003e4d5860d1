"""These tests catch a failing test of ranks that makes later tests fail or receive another call's results."""

import os

import pytest
import torch

from tests.support import rank_pool
from tests.support.rank_pool import RankPool


def _fail_on_second() -> int:
    if torch.distributed.get_rank() == 1:
        raise ValueError("the second rank's own words")
    torch.distributed.barrier()  # the second rank never comes
    return 0


def _end_on_second() -> int:
    if torch.distributed.get_rank() == 1:
        os._exit(3)
    return 0


def _sum_of_ranks() -> float:
    total = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(total)
    return total.item()


@pytest.mark.slow
def test_a_failure_is_told_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(rank_pool, "GRACE", 1)  # the first rank will never answer
            with pytest.raises(AssertionError, match="rank 0:\nno answer\nrank 1:\n(?s:.*)second rank's own words"):
                pool.run(_fail_on_second)
        assert pool.run(_sum_of_ranks) == [1.0, 1.0]
        with pytest.raises(AssertionError, match="^rank 1:\nno answer"):
            pool.run(_end_on_second)
        assert pool.run(_sum_of_ranks) == [1.0, 1.0]
