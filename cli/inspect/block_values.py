"""What the numbers in a block are like: range, mean, spread, what is no number, and how they are distributed.

numpy alone, a piece at a time, so that a block of a gigabyte needs no second one. numpy has no bf16 and no fp8: bf16 is
the upper half of a float32, and the 256 values of an fp8 are worked out from their bits (OCP 8-bit Floating Point
Specification 1.0: E4M3 has no infinities, and NaN where all bits but the sign are set; E5M2 is as IEEE).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import click

from kvredis import install_line

from .block_file import Tensor

PIECE_ELEMENTS: Final = 1 << 20
BINS: Final = 40
_PLAIN: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "<u1",
}


@dataclass(frozen=True, slots=True)
class ValueStats:
    """The numbers of one tensor. `minimum` to `std` are of the finite ones, NaN where there are none; `bins` count
    them from `minimum` to `maximum`, all of one width."""

    count: int
    nan: int
    inf: int
    zeros: int
    minimum: float
    maximum: float
    mean: float
    std: float
    bins: tuple[int, ...]


def stats_of(data: memoryview, tensor: Tensor, bins: int = BINS) -> ValueStats:
    """Look at every element. Raises ClickException where numpy is not installed or does not know the dtype."""
    np = numpy()
    if tensor.dtype not in _PLAIN and tensor.dtype not in ("BF16", "F8_E4M3", "F8_E5M2"):
        raise click.ClickException(f"tensor {tensor.name!r}: no statistics of dtype {tensor.dtype!r}")
    with np.errstate(over="ignore", invalid="ignore"):  # the largest numbers' squares are beyond a float64
        return _looked_at(np, data, tensor, bins)


def numpy() -> Any:
    """The module numpy, or ClickException with the line that installs it."""
    try:
        import numpy as found
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--stats needs numpy, which is not installed: {install_line('engine')}") from error
    return found


# ---- inside ------------------------------------------------------------------------------------------------------


def _looked_at(np: Any, data: memoryview, tensor: Tensor, bins: int) -> ValueStats:
    count = nan = inf = zeros = finite = 0
    low, high, total = math.inf, -math.inf, 0.0
    for values in _pieces(np, data, tensor):
        count += values.size
        nan += int(np.isnan(values).sum())
        inf += int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
        if values.size:
            finite += values.size
            zeros += int((values == 0).sum())
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            total += float(values.sum())
    if not finite:
        return ValueStats(count, nan, inf, zeros, math.nan, math.nan, math.nan, math.nan, (0,) * bins)
    mean, squares = total / finite, 0.0
    histogram = np.zeros(bins, np.int64)
    for values in _pieces(np, data, tensor):  # again: the range must be known before it can be divided
        values = values[np.isfinite(values)]
        squares += float(((values - mean) ** 2).sum())
        places = _places(np, values, low, high, bins)
        histogram += np.bincount(places, minlength=bins)
    return ValueStats(count, nan, inf, zeros, low, high, mean, math.sqrt(squares / finite), tuple(map(int, histogram)))


def _places(np: Any, values: Any, low: float, high: float, bins: int) -> Any:
    """The bin of each value, of equal values the middle one."""
    if not high / 2 > low / 2:  # the half of the smallest number is none
        return np.full(values.shape, bins // 2, np.int64)
    # halves first: the span of the largest numbers is no number
    part = (values / 2 - low / 2) / (high / 2 - low / 2)
    return np.minimum((part * bins).astype(np.int64), bins - 1)


def _pieces(np: Any, data: memoryview, tensor: Tensor) -> Iterator[Any]:
    """The elements as float64, PIECE_ELEMENTS at a time."""
    raw = data[tensor.start : tensor.stop]
    whole = np.frombuffer(raw, "<u2" if tensor.dtype == "BF16" else _PLAIN.get(tensor.dtype, "<u1"))
    table = None if tensor.dtype in (*_PLAIN, "BF16") else np.array(fp8_values(tensor.dtype))
    for at in range(0, whole.size, PIECE_ELEMENTS):
        piece = whole[at : at + PIECE_ELEMENTS]
        if table is not None:
            yield table[piece]
        elif tensor.dtype == "BF16":
            yield (piece.astype("<u4") << 16).view("<f4").astype(np.float64)
        else:
            yield piece.astype(np.float64)


def fp8_values(dtype: str) -> list[float]:
    """The 256 numbers that the bytes 0 to 255 stand for in F8_E4M3 or F8_E5M2."""
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    exponent_max = (1 << (7 - mantissa_bits)) - 1
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if dtype == "F8_E4M3" and byte & 0x7F == 0x7F:
            values.append(math.nan)
        elif dtype == "F8_E5M2" and exponent == exponent_max:
            values.append(math.nan if mantissa else sign * math.inf)
        elif exponent:
            values.append(sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))
        else:
            values.append(sign * mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias))
    return values
