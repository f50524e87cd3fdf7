"""Copying a payload between two pieces of memory, and the addresses of views, which system calls and drivers want.

Each is done natively where the extension (_native.c) was built, else in Python behind the same function.

Most payloads are received where they stay. Where one must be copied all the same (lent memory into the arena, an
extent into a caller's buffer), it goes through here: past the caches, and without the interpreter lock when it is long.

ctypes tells the address of writable memory alone, so CPython is asked for the buffer itself: natively in 25 ns a view,
else through ctypes in 1 us. The prototypes are our own function objects: those of ctypes.pythonapi are shared by the
whole process, and the last one to set their types wins.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

NATIVE_WANTED: Final = os.environ.get("KVREDIS_NATIVE") != "0"
"""Whether the extensions in C may be used, those of other folders too: KVREDIS_NATIVE=0 in the environment turns them
off, for a comparison or should one be suspected of a fault."""


View = bytes | bytearray | memoryview

_addresses_natively: Callable[[Sequence[View]], list[int]] | None = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from ._native import addresses as _addresses_natively


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython's <pybuffer.h>."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("owner", ctypes.py_object), ("length", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_PYBUF_SIMPLE: Final = 0
_POINTER = ctypes.POINTER(_PyBuffer)
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _POINTER, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, _POINTER)(("PyBuffer_Release", ctypes.pythonapi))


def addresses_of(views: Sequence[View]) -> list[int]:
    """The address of each, as `address_of` gives it."""
    return list(map(address_of, views)) if _addresses_natively is None else _addresses_natively(views)


def address_of(view: View) -> int:
    """Give where contiguous memory begins; the caller keeps the view while the address is used. Raises BufferError for
    what is not contiguous."""
    found = _PyBuffer()
    _get_buffer(view, found, _PYBUF_SIMPLE)
    address = int(found.address or 0)
    _release_buffer(found)
    return address


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
    copy, so the caller sees to it that no other writes to either. `kind` is one of KINDS, for measuring.
    """
    if kind != "python" and _copy_natively is not None:
        _copy_natively(destination, source, _WAYS[kind])
        return
    with memoryview(destination) as into, memoryview(source) as out_of:
        if into.nbytes != out_of.nbytes:
            raise ValueError(f"cannot copy {out_of.nbytes} bytes over {into.nbytes}")
        with into.cast("B") as writable, out_of.cast("B") as readable:
            writable[:] = readable


class Strides(NamedTuple):
    """How arrays are copied into others of the same shape: `counts` of all dimensions but the last, of which `run`
    bytes lie together in both, and both arrays' strides in bytes."""

    counts: tuple[int, ...]
    run: int
    to: tuple[int, ...]
    source: tuple[int, ...]


def copy_strided(to: list[int], source: list[int], strides: Strides) -> None:
    """Copy arrays into as many others, each told by where it begins, without the interpreter lock. The first
    dimensions change slowest, so the largest strides come first. The caller holds all arrays, of which no two overlap.
    Six dimensions at most; TypeError for more, and for lists of two lengths. To be called where COPIES_STRIDED says so.

    One thread does it: torch shares each such copy among OpenMP's threads and waits for all of them, once or twice a
    layer, which takes as long as the busiest processor lets it.
    """
    counts, run, to_strides, source_strides = strides
    _native.copy_strided(to, source, run, counts, to_strides, source_strides, _WAYS[KIND])
