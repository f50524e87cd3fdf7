"""Where a view's memory begins, also when it is read-only: what system calls and drivers want to know.

ctypes tells the address of writable memory alone, so CPython is asked for the buffer itself: natively where the
extension was built, which takes 25 ns a view, else through ctypes in 1 us. The prototypes are our own function
objects: those of ctypes.pythonapi are shared by the whole process, and whoever sets their types last wins.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from .native import NATIVE_WANTED

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
    """Give where contiguous memory begins; whoever asks keeps the view while he uses it. Raises BufferError for what is
    not contiguous."""
    found = _PyBuffer()
    _get_buffer(view, found, _PYBUF_SIMPLE)
    address = int(found.address or 0)
    _release_buffer(found)
    return address
