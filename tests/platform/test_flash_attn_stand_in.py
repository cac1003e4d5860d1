"""The padding helpers move every row to where flash-attn's do."""

import pytest
import torch

from openrlhf_gtpo.platform.flash_attn_stand_in import index_first_axis, pad_input, unpad_input

MASKS = {
    "full": [[1, 1, 1], [1, 1, 1]],
    "right padded": [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]],
    "left padded": [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1], [0, 1, 0, 1]],
    "an empty row": [[0, 0, 0], [1, 1, 0]],
}


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_unpadding_agrees_with_a_loop_and_padding_undoes_it(mask: list[list[int]], shape: tuple[int, ...]) -> None:
    attention_mask = torch.tensor(mask)
    batch, width = attention_mask.shape
    values = torch.randn(batch, width, *shape, generator=torch.Generator().manual_seed(0))
    packed, indices, cumulative, longest, lengths = unpad_input(values, attention_mask)

    places = [(i, t) for i, row in enumerate(mask) for t, keep in enumerate(row) if keep]
    assert torch.equal(packed, torch.stack([values[i, t] for i, t in places]))
    assert indices.tolist() == [i * width + t for i, t in places]
    assert lengths.tolist() == [sum(row) for row in mask]
    assert longest == max(sum(row) for row in mask) and isinstance(longest, int)
    assert cumulative.tolist() == [sum(sum(row) for row in mask[:i]) for i in range(batch + 1)]
    assert cumulative.dtype == torch.int32, "what flash-attn's kernels take"

    kept = attention_mask.view(batch, width, *[1] * len(shape)).bool()
    assert torch.equal(pad_input(packed, indices, batch, width), torch.where(kept, values, 0))
    flat = values.flatten(0, 1)
    assert torch.equal(index_first_axis(flat, indices), packed)


def test_gradients_flow_through_them() -> None:
    values = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    packed, indices, *_ = unpad_input(values, mask)
    pad_input(packed * 2, indices, 2, 3).sum().backward()
    assert torch.equal(values.grad, 2.0 * mask[..., None].expand(2, 3, 4))
