"""One way to copy a payload between two pieces of memory, natively where the extension was built, else in Python.

Most payloads are received where they stay. Where one must be copied all the same (lent memory into the arena, an
extent into a caller's buffer), it goes through here: past the caches, and without the interpreter lock when it is long.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from .native import NATIVE_WANTED

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_WAYS: dict[str, int] = {}
_copy_natively: "Callable[[WriteableBuffer, ReadableBuffer, int], None] | None" = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from . import _native

        _WAYS, _copy_natively = _native.ways(), _native.copy

COPIES_STRIDED: Final = _copy_natively is not None
"""Whether `copy_strided` may be called: the extension was built."""

KINDS: Final = (*_WAYS, "python")
"""The ways of copying that there are here, the best first: avx512, avx2 or sse2 (streaming stores), memcpy, python."""

KIND: Final = KINDS[0]
"""The one in use."""


def copy(destination: "WriteableBuffer", source: "ReadableBuffer", kind: str = KIND) -> None:
    """Copy all bytes of `source` over those of `destination`; the two may overlap.

    Raises ValueError when their lengths in bytes differ, and TypeError or BufferError when one lends no C-contiguous
    memory or `destination` may not be written; nothing is copied then. Natively, other threads run on during a long
    copy, so whoever calls sees to it that nobody else writes to either. `kind` is one of KINDS, for measuring.
    """
    if kind != "python" and _copy_natively is not None:
        _copy_natively(destination, source, _WAYS[kind])
        return
    with memoryview(destination) as into, memoryview(source) as out_of:
        if into.nbytes != out_of.nbytes:
            raise ValueError(f"cannot copy {out_of.nbytes} bytes over {into.nbytes}")
        with into.cast("B") as writable, out_of.cast("B") as readable:
            writable[:] = readable


class Strided(NamedTuple):
    """One side of `copy_strided`: where it begins, and the strides of all but the last dimension, in bytes."""

    address: int
    strides: tuple[int, ...]


def copy_strided(destination: Strided, source: Strided, counts: tuple[int, ...], run: int) -> None:
    """Copy an array into another one of the same shape, without the interpreter lock: `counts` of all dimensions but
    the last, of which `run` bytes lie together in both. The first dimensions change slowest, so the destination's
    largest strides come first. The caller holds both, and they do not overlap. Six dimensions at most; TypeError
    for more. To be called where COPIES_STRIDED says so.

    One thread does it: torch shares such a copy among OpenMP's threads and waits for all of them, 24 times a block for
    a model of 12 layers, which takes as long as the busiest processor lets it.
    """
    _native.copy_strided(
        destination.address, source.address, run, counts, destination.strides, source.strides, _WAYS[KIND]
    )
