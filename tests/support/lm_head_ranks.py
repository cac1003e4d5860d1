"""The checks that each rank of the tensor-parallel tests runs, in its own process over gloo."""

import pytest
import torch
import torch.distributed as dist

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from tests.support.lm_head_reference import VOCABULARIES, Case, gradients, make_case, naive

TOKENS, WIDTH = 5, 8
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.02}


def check_everything() -> None:
    """Run all checks below in one go: they cost less than starting processes."""
    for check in CHECKS:
        check(dist.get_rank(), dist.get_world_size())


def equal_to_unsharded(rank: int, world_size: int) -> None:
    """Vocabularies padded to equal shards, as Megatron lays them out, in every dtype."""
    for vocabulary in VOCABULARIES:
        shard = (vocabulary + 128 * world_size - 1) // (128 * world_size) * 128
        dtypes = TOLERANCES if vocabulary < 1000 else [torch.float64]
        for dtype in dtypes:
            compare(rank, [shard] * world_size, vocabulary, dtype)


def unequal_shards(rank: int, world_size: int) -> None:
    """Any split in rank order works: with a shard of one column, of none, or of padding only."""
    for sizes, vocabulary in (([100, 1, 0, 50], 151), ([3, 40, 70, 50], 100), ([90, 5, 10, 20], 80)):
        compare(rank, sizes[:world_size], min(vocabulary, sum(sizes[:world_size])), torch.float64)


def compare(rank: int, sizes: list[int], vocabulary: int, dtype: torch.dtype) -> None:
    """Compare forward and backward of this rank's shard with the whole vocabulary on one rank."""
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    whole = make_case(TOKENS, WIDTH, sum(sizes), dtype=dtype, real=vocabulary, seed=vocabulary)
    mine = Case(
        hidden=whole.hidden.detach().clone().requires_grad_(),
        weight=whole.weight.detach()[start:stop].clone().requires_grad_(),
        bias=whole.bias.detach()[start:stop].clone().requires_grad_(),
        labels=whole.labels,
    )

    def results(case: Case, group: dist.ProcessGroup | None, chunk_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_log_prob_and_entropy(
            case.hidden,
            case.weight,
            case.labels,
            bias=case.bias,
            temperature=0.9,
            vocab_size=vocabulary,
            group=group,
            chunk_bytes=chunk_bytes,
        )

    sharded, unsharded = results(mine, dist.group.WORLD, 400_000), results(whole, None, 2**28)
    exact = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(sharded, unsharded, rtol=0, atol=exact)
    if dtype == torch.float64:
        reference = naive(
            whole.hidden, whole.weight, whole.labels, bias=whole.bias, temperature=0.9, vocab_size=vocabulary
        )
        torch.testing.assert_close(sharded, reference, rtol=0, atol=exact)

    ours, theirs = gradients(mine, *sharded), gradients(whole, *unsharded)
    bound = TOLERANCES[dtype] * float(theirs[0].abs().max())
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=bound)
    for shard, full in zip(ours[1:], theirs[1:]):
        bound = TOLERANCES[dtype] * float(full.abs().max())
        torch.testing.assert_close(shard, full[start:stop], rtol=0, atol=bound)
    same_on_every_rank(sharded[0], sharded[1], ours[0])


def same_on_every_rank(*tensors: torch.Tensor) -> None:
    """Compare bitwise: ranks that disagree in the last bit drift apart over a training run."""
    for tensor in tensors:
        tensor = tensor.detach().double()
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
        assert all(torch.equal(tensor, other) for other in others)


def small_budget(rank: int, world_size: int) -> None:
    """Many turns over the tokens, hence several reductions of d_hidden, still match; with and without main_grad."""
    whole = make_case(300, 16, 64 * world_size, dtype=torch.bfloat16)
    expected = gradients(whole, *naive(whole.hidden, whole.weight, whole.labels))
    mine = slice(64 * rank, 64 * rank + 64)
    for into_main_grad in (False, True):
        weight = whole.weight.detach()[mine].clone().requires_grad_()
        weight.main_grad = torch.zeros(64, 16)
        case = Case(whole.hidden.detach().clone().requires_grad_(), weight, whole.bias, whole.labels)
        outputs = linear_log_prob_and_entropy(
            case.hidden,
            case.weight,
            case.labels,
            group=dist.group.WORLD,
            chunk_bytes=16_000,
            accumulate_into_main_grad=into_main_grad,
        )
        d_hidden, d_weight, _ = gradients(case, *outputs)
        for ours, truth in (
            (d_hidden, expected[0]),
            (weight.main_grad if into_main_grad else d_weight, expected[1][mine]),
        ):
            assert (ours.double() - truth.double()).abs().max() < 0.02 * truth.abs().max()


def groups_of_one(rank: int, world_size: int) -> None:
    """A group of one rank gives the same as no group; a subgroup counts its own ranks."""
    group = [dist.new_group([index]) for index in range(world_size)][rank]
    case = make_case(TOKENS, WIDTH, 33)
    alone = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, group=group)
    torch.testing.assert_close(
        alone, linear_log_prob_and_entropy(case.hidden, case.weight, case.labels), rtol=0, atol=0
    )


def no_tokens(rank: int, world_size: int) -> None:
    case = make_case(0, WIDTH, 33)
    outputs = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, group=dist.group.WORLD)
    assert outputs[0].shape == outputs[1].shape == (0,)
    for grad, leaf in zip(gradients(case, *outputs)[:2], case.leaves()):
        assert grad.shape == leaf.shape and (grad == 0).all()


def mistakes_are_raised_on_every_rank(rank: int, world_size: int) -> None:
    """If only one rank raised, the others would wait for it in the next collective."""

    def call(tokens: int, label: int, vocab_size: int | None) -> None:
        case = make_case(tokens, WIDTH, 10)
        linear_log_prob_and_entropy(
            case.hidden, case.weight, torch.full((tokens,), label), vocab_size=vocab_size, group=dist.group.WORLD
        )

    total = 10 * world_size
    with pytest.raises(ValueError, match=f"token id {total}, outside"):
        call(3, total if rank == 0 else 1, None)
    with pytest.raises(ValueError, match=f"only {total} columns over all shards"):
        call(3, 1, total + 1)
    if world_size > 1:
        with pytest.raises(ValueError, match="must agree"):
            call(3 + rank, 1, None)
        with pytest.raises(ValueError, match="must agree"):
            call(3, 1, None if rank else total)
    call(3, total - 1, total)


CHECKS = (
    equal_to_unsharded,
    unequal_shards,
    small_budget,
    groups_of_one,
    no_tokens,
    mistakes_are_raised_on_every_rank,
)
