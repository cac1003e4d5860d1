"""Checks that refuse tensors of a wrong shape or dtype, and non-finite values with a message that names the row."""

import torch
from torch import Tensor


def check_batch(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> None:
    """Refuse a batch whose shapes or dtypes do not fit, or whose outcomes are not finite."""
    check_tokens(mask, entropy=entropy)
    check_rows("outcome", outcome, len(entropy))
    if group_ids.shape != (len(entropy),):
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)}, but entropy has {len(entropy)} rows; "
            f"give one group id per row, shape ({len(entropy)},)."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids has dtype {group_ids.dtype}, but a group id is an integer; use torch.int64.")


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """Refuse named tensors that are not (B, T) and floating-point, or a mask that is not bool of the same shape."""
    for name, values in tensors.items():
        if values.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, but it must be (B, T): rows by columns.")
        if not values.is_floating_point():
            raise ValueError(
                f"{name} has dtype {values.dtype}, but it must be a floating dtype such as torch.float32."
            )
        if mask.shape != values.shape:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}, but {name} has shape {tuple(values.shape)}; they must match."
            )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, but it must be torch.bool; pass mask.bool().")


def check_rows(name: str, values: Tensor, num_rows: int) -> None:
    """Refuse a per-row vector of the wrong length or with a NaN or infinity in it."""
    if values.shape != (num_rows,):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but the batch has {num_rows} rows; "
            f"give one value per row, shape ({num_rows},)."
        )
    bad = ~torch.isfinite(values)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"{name} of row {row} is {values[row].item()}, but it must be finite; fix or drop that row.")


def check_finite(name: str, values: Tensor, mask: Tensor, first_row: int = 0) -> None:
    """Refuse a NaN or infinity at an action token of (B, T) ``values``; values outside the mask are ignored.

    ``first_row`` is the batch row of ``values[0]`` when ``values`` is a slice of the batch.
    """
    bad = ~torch.isfinite(values) & mask
    if bad.any():
        row, column = (int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"{name} of row {first_row + row} is {values[row, column].item()} at column {column}, but it must be "
            "finite at every action token; fix what computed it or mask the token out."
        )
