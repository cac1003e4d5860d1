"""FP8 by the book, in float64: list every number of a format and search for the nearest; ties go to the even one."""

import numpy as np

# name: exponent bits, mantissa bits, bias, largest number
FORMATS = {"e4m3": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0)}


def numbers(name: str) -> np.ndarray:
    """All numbers from 0 up to the largest, ascending; those at even indices have an even mantissa."""
    exponents, bits, bias, largest = FORMATS[name]
    found = []
    for exponent in range(2**exponents):
        for mantissa in range(2**bits):
            fraction = mantissa / 2**bits
            if exponent == 0:
                found.append(fraction * 2.0 ** (1 - bias))
            else:
                found.append((1 + fraction) * 2.0 ** (exponent - bias))
    return np.array([number for number in found if number <= largest])


def rounded(values: np.ndarray, name: str) -> np.ndarray:
    """The format's numbers nearest to (N,) float64 values, saturated."""
    table = numbers(name)
    magnitudes = np.minimum(np.abs(values), table[-1])
    distances = np.abs(table - magnitudes[:, None])
    lower = distances.argmin(-1)  # the first of two that are equally near
    upper = np.minimum(lower + 1, len(table) - 1)
    tie = np.take_along_axis(distances, upper[:, None], -1)[:, 0] == distances.min(-1)
    return np.copysign(table[np.where(tie & (lower % 2 == 1), upper, lower)], values)


def scale(amax: float, name: str) -> np.float32:
    """The scale in float32, as Transformer Engine keeps it."""
    return np.float32(1.0) if amax == 0 else np.float32(FORMATS[name][3]) / np.float32(amax)


def there_and_back(
    matrix: np.ndarray, name: str, block: tuple[int, int] | None, factor: float | None = None
) -> np.ndarray:
    """Round to FP8 and back, in blocks (the whole if None) and with the scale ``factor`` if it is given."""
    matrix = np.asarray(matrix, dtype=np.float64)
    out = np.empty_like(matrix)
    height, width = block or matrix.shape
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            part = matrix[top : top + height, left : left + width]
            used = scale(np.abs(part).max(), name) if factor is None else np.float32(factor)
            inverse = np.float64(np.float32(1.0) / used)
            scaled = (part.astype(np.float32) * used).astype(np.float64)
            back = rounded(scaled.ravel(), name) * inverse
            out[top : top + height, left : left + width] = back.reshape(part.shape)
    return out
