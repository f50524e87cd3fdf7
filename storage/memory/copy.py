"""One way to copy a payload between two pieces of memory, natively where the extension was built, else in Python.

Most payloads are received where they stay. Where one must be copied all the same (lent memory into the arena, an
extent into a caller's buffer), it goes through here: past the caches, and without the interpreter lock when it is long.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from .native import NATIVE_WANTED

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_WAYS: dict[str, int] = {}
_copy_natively: "Callable[[WriteableBuffer, ReadableBuffer, int], None] | None" = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from . import _native

        _WAYS, _copy_natively = _native.ways(), _native.copy

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
