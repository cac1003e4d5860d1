"""A checksum of a tensor's bits: the same integer wherever and in whatever order it is computed."""

import torch

_CHUNK = 2**20  # elements that are widened to 64 bits at a time
# Odd multipliers with well-mixed bits, as signed 64-bit integers: the golden ratio's and one of splitmix64's.
_SPREAD, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Σ bits_i · key_i mod 2^64 of a contiguous tensor of 16-bit elements, as a scalar (int64) on its device.

    Elements that are changed, swapped, shifted or lost change it: every position has a key of its own. Integers make it
    exact, so that two devices agree.
    """
    bits = tensor.detach().view(-1).view(torch.int16)
    keys = _keys(min(_CHUNK, bits.numel()), bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total += (chunk * keys[: len(chunk)]).sum() * (2 * number + 1)
    return total


def _keys(count: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(1, count + 1, device=device) * _SPREAD
    keys ^= keys >> 31
    return keys.mul_(_MIX)
