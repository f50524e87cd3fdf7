"""Where a view's memory begins, also when it is read-only: what system calls and drivers want to know.

ctypes tells the address of writable memory alone, so CPython is asked for the buffer itself. The prototypes are our own
function objects: those of ctypes.pythonapi are shared by the whole process, and whoever sets their types last wins.
"""

import ctypes
from typing import Final


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


def address_of(view: bytes | bytearray | memoryview) -> int:
    """Give where contiguous memory begins; whoever asks keeps the view while he uses it. Raises BufferError for what is
    not contiguous."""
    found = _PyBuffer()
    _get_buffer(view, found, _PYBUF_SIMPLE)
    address = int(found.address or 0)
    _release_buffer(found)
    return address
