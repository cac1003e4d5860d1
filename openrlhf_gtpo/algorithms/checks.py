"""Checks of tensors: shapes that would broadcast silently, and values that are not finite. Errors name the row."""

import torch
from torch import Tensor


def check_tokens(mask: Tensor, **tensors: Tensor) -> None:
    """Reject a mask that is not (B, T) bool, and named tensors of another shape."""
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, but it must be (B, T) bool.")
    for name, values in tensors.items():
        if values.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, but mask has shape {tuple(mask.shape)}; they must match."
            )


def check_rows(name: str, values: Tensor, num_rows: int) -> None:
    """Reject a per-row vector of the wrong length, or with a NaN or infinity in it."""
    if values.shape != (num_rows,):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but the batch has {num_rows} rows; "
            f"give one value per row, shape ({num_rows},)."
        )
    bad = ~torch.isfinite(values)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ValueError(f"{name} of row {row} is {values[row].item()}, but it must be finite; fix or drop that row.")


def check_finite(name: str, values: Tensor, mask: Tensor) -> None:
    """Reject a NaN or infinity at an action token of (B, T) ``values``. Values outside the mask are ignored."""
    bad = ~torch.isfinite(values) & mask
    if bad.any():
        row, column = (int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"{name} of row {row} is {values[row, column].item()} at column {column}, but it must be "
            "finite at every action token; fix what computed it or mask the token out."
        )
