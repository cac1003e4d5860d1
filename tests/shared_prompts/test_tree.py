"""Each token is packed once, and sees what it sees in its own row, whatever rows have in common."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.shared_prompts.attention import attend
from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens, cut_evenly
from openrlhf_gtpo.shared_prompts.tree import Tree, pack_tree

# Two letters, so that rows begin alike for a while, are equal, or are the beginning of others.
ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def tensors(rows: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in rows]


def beginnings(rows: list[list[int]], needed: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[: end + 1]) for row, count in zip(rows, needed) for end in range(count)}


@settings(deadline=None)
@given(ROWS, st.integers(1, 8), st.data())
def test_every_beginning_is_packed_once(rows: list[list[int]], multiple: int, data: st.DataObject) -> None:
    needed = [data.draw(st.integers(0, len(row))) for row in rows]
    tree = pack_tree(tensors(rows), needed, multiple=multiple)
    known = beginnings(rows, needed)
    assert len(tree.origin) == len(known)
    assert len(tree.tokens) % multiple == 0 and sum(tree.lengths) == len(tree.tokens)
    # Each segment's path spells the beginning of a row, at its positions.
    found = set()
    for path in tree.paths[: len(tree.paths) - (len(tree.tokens) > len(known))]:
        spelled = tuple(tree.tokens[path].tolist())
        assert tree.position_ids[path].tolist() == list(range(len(path)))
        found |= {spelled[: end + 1] for end in range(len(spelled))}
    assert found == known
    # And the rows' tokens are where they are said to be.
    begin = 0
    for row, count in zip(rows, needed):
        places = tree.places[begin : begin + count]
        assert tree.tokens[places].tolist() == row[:count] and tree.position_ids[places].tolist() == list(range(count))
        begin += len(row)


@settings(deadline=None, max_examples=30)
@given(ROWS)
def test_tokens_with_other_routes_are_others(rows: list[list[int]]) -> None:
    """What was sent to other experts is not shared, nor what comes after it."""
    routes = [torch.tensor(row, dtype=torch.uint8)[:, None, None].expand(-1, 2, 1) for row in rows]
    alike = [torch.ones(len(row), dtype=torch.long) for row in rows]
    needed = [len(row) for row in rows]
    apart = pack_tree(alike, needed, routes)
    assert len(apart.origin) == len(beginnings(rows, needed))


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree) -> torch.Tensor:
    """Attention in float64, a token at a time."""
    out = torch.empty_like(query)
    starts = [0, *tree.lengths.cumsum()]
    for start, length, path in zip(starts, tree.lengths, tree.paths):
        for place in range(length):
            seen = torch.from_numpy(path[: len(path) - length + place + 1])
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                scores = key[seen, group] @ query[start + place, head] * 0.3
                out[start + place, head] = scores.softmax(0) @ value[seen, group]
    return out


def test_attention_and_its_gradients_are_those_of_a_loop() -> None:
    """Segments on both sides of the length from which each has a call to itself."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 50, (70,), generator=generator)
    rows = [torch.cat([prompt, torch.randint(1, 50, (n,), generator=generator)]) for n in (1, 5, 66, 80, 3)]
    rows += [torch.randint(1, 50, (n,), generator=generator) for n in (2, 9)]
    tree = pack_tree(rows, [len(row) for row in rows], multiple=16)
    shapes = [(len(tree.tokens), heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    values, gradients = [], []
    for compute in (naive, lambda *given: attend(*given, 0.3)):
        output = compute(*inputs, tree)
        values.append(output)
        gradients.append(torch.autograd.grad((output * weights).sum(), inputs))
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=1e-12)
    for ours, exact in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 80),
    st.integers(1, 4),
)
def test_runs_of_rows_fit(shapes: list[tuple[int, int]], most: int, multiple: int) -> None:
    prompts = [Prompt(bytes([kind]), 5 * kind) for kind, _ in sorted(shapes)]
    lengths = [prompt.length + own for prompt, (_, own) in zip(prompts, sorted(shapes))]
    runs = cut_evenly(lengths, prompts, most, multiple)
    assert [row for run in runs for row in run] == list(range(len(lengths)))
    for run in runs:
        tokens = computed_tokens([lengths[row] for row in run], [prompts[row] for row in run])
        assert tokens <= most or len(run) == 1
    assert len(runs) % multiple == 0 or len(runs) == len(lengths)
