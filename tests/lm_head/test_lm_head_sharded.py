"""A vocabulary sharded over real gloo processes equals the whole one, forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.lm_head.portable import PortableTile
from openrlhf_gtpo.lm_head.projection import forward
from openrlhf_gtpo.lm_head.softmax import TokenStatistics
from openrlhf_gtpo.lm_head.tiles import Tile
from tests.support.lm_head_ranks import check_everything
from tests.support.lm_head_reference import make_case, naive
from tests.support.rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_tensor_parallel_ranks(world_size):
    """The ranks' checks are in `lm_head_ranks`; a failure there is raised here with its traceback.

    A group of one rank is among the checks, so there is no world of one.
    """
    with RankPool(world_size) as pool:
        pool.run(check_everything)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 120), max_size=7).map(sorted),
    tile=st.builds(Tile, st.integers(1, 9), st.integers(1, 150)),
    seed=st.integers(0, 50),
)
def test_statistics_of_up_to_eight_shards_merge_to_those_of_the_whole(cuts, tile, seed):
    """For any split, including shards without columns, and any tiles."""
    case = make_case(6, 4, 120, scale=5.0, seed=seed)
    total = TokenStatistics.empty(6, torch.float64, case.hidden.device, with_entropy=True)

    def merged(part, bits_per_logit):
        total.merge_(part, bits_per_logit)
        return total

    for start, stop in zip([0, *cuts], [*cuts, 120]):
        shard = SimpleNamespace(columns=stop - start, vocab_size=120, merged=merged)
        options = SimpleNamespace(
            work=PortableTile, shard=shard, temperature=1.0, with_entropy=True, forward_tile=lambda hidden: tile
        )
        weight, bias = case.weight[start:stop], case.bias[start:stop]
        with torch.no_grad():
            log_prob, entropy, _ = forward(case.hidden, weight, bias, case.labels - start, options)
    expected = naive(case.hidden, case.weight, case.labels, bias=case.bias)
    torch.testing.assert_close(log_prob, expected[0].detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, expected[1].detach(), rtol=0, atol=1e-10)
