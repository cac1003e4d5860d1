"""Catches a tensor that arrives under another name, cut off, out of order, or in a bucket over its budget."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, TensorBuckets, numel, plan_buckets, unpack

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), max_size=12)
budgets = st.integers(1, 200)


def metas(of: list[tuple[int, ...]]) -> list[ParameterMeta]:
    return [ParameterMeta(f"layer.{i}", shape) for i, shape in enumerate(of)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(shapes, budgets)
def test_a_plan_keeps_every_parameter_in_order_and_within_the_budget(of: list[tuple[int, ...]], budget: int) -> None:
    parameters = metas(of)
    plan = plan_buckets(parameters, budget)
    assert [p for bucket in plan for p in bucket] == parameters
    assert all(plan), "an empty bucket"
    for bucket in plan:
        size = numel(bucket) * WIRE_DTYPE.itemsize
        assert size <= budget or len(bucket) == 1
    for bucket, following in zip(plan, plan[1:]):
        size = numel([*bucket, following[0]]) * WIRE_DTYPE.itemsize
        assert size > budget, "the next parameter would have fitted"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(shapes, budgets, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_what_is_packed_is_what_is_unpacked(of: list[tuple[int, ...]], budget: int, dtype: torch.dtype) -> None:
    parameters = metas(of)
    generator = torch.Generator().manual_seed(budget)
    tensors = [torch.randn(p.shape, generator=generator).to(dtype) for p in parameters]
    source = iter(tensors)
    weights = TensorBuckets(parameters, source, budget)
    assert weights.buckets == plan_buckets(parameters, budget)
    arrived = []
    for index, bucket in enumerate(weights.buckets):
        buffer = torch.empty(numel(bucket) + 3, dtype=WIRE_DTYPE)  # a buffer serves smaller buckets too
        weights.fill(index, buffer)
        arrived += list(unpack(bucket, buffer))
    assert next(source, None) is None
    assert [name for name, _ in arrived] == [p.name for p in parameters]
    for (_, found), sent in zip(arrived, tensors, strict=True):
        assert found.shape == sent.shape and torch.equal(found, sent.to(WIRE_DTYPE))


def test_tensors_that_are_not_contiguous_keep_their_values() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    weights = TensorBuckets([ParameterMeta("weight", (4, 3))], iter([tensor]), 1000)
    buffer = torch.empty(12, dtype=WIRE_DTYPE)
    weights.fill(0, buffer)
    ((_, found),) = unpack(weights.buckets[0], buffer)
    assert torch.equal(found.float(), tensor)


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    weights = TensorBuckets([ParameterMeta("weight", (4, 3))], iter([torch.zeros(3, 4)]), 1000)
    with pytest.raises(AssertionError, match="weight"):
        weights.fill(0, torch.empty(12, dtype=WIRE_DTYPE))


def test_a_bucket_survives_a_transport_that_knows_no_tuples() -> None:
    bucket = metas([(), (3,), (2, 4)])
    arrived = json.loads(json.dumps(bucket))
    buffer = torch.arange(12.0).to(WIRE_DTYPE)
    assert numel(arrived) == numel(bucket) == 12
    for (name, found), (expected_name, expected) in zip(unpack(arrived, buffer), unpack(bucket, buffer), strict=True):
        assert name == expected_name and torch.equal(found, expected)
