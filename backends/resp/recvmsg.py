"""recvmsg(2) by itself, into one view or two: natively where the extension was built, else through ctypes.

Python's own begins anew behind each signal, and the kernel then with the whole of SO_RCVTIMEO: with a timer that
strikes more often, as those of sampling profilers do, it never ends. Who has a deadline must hear of the signal. Each
reply of a block takes two such calls, and one costs the kernel's part and 0.1 us natively, 2 us through ctypes.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvredis.storage.memory.copy import NATIVE_WANTED

_receive_natively: Callable[[int, Sequence[memoryview], int], int] | None = None
if NATIVE_WANTED:
    with suppress(ImportError):  # not built here
        from ._recvmsg import receive as _receive_natively

VIEWS_MAX: Final = 2
"""A body, and what ends it."""


_CALL: Final = struct.Struct("PIPNPNiPNPN")
"""struct msghdr of recvmsg(2), and behind it the two struct iovec that it points to: where each begins, its length."""
_BUFFERS_AT: Final = _CALL.size - struct.calcsize("PNPN")
_recvmsg = ctypes.CDLL(None, use_errno=True).recvmsg
_recvmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_recvmsg.restype = ctypes.c_ssize_t


def receive_in_python(descriptor: int, views: Sequence[memoryview], flags: int) -> int:
    """What `receive` does, without the extension."""
    if len(views) > VIEWS_MAX:
        raise ValueError(f"receive() fills at most {VIEWS_MAX} views")
    call = bytearray(_CALL.size)  # of this call alone: a signal's handler or a finalizer may receive in its midst
    at = ctypes.addressof(ctypes.c_char.from_buffer(call))
    places = [fact for view in views for fact in (ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))]
    places += [0] * (2 * VIEWS_MAX - len(places))
    _CALL.pack_into(call, 0, 0, 0, at + _BUFFERS_AT, len(views), 0, 0, 0, *places)
    count: int = _recvmsg(descriptor, at, flags)
    return count if count >= 0 else -ctypes.get_errno()


receive: Final = _receive_natively or receive_in_python
"""receive(descriptor, views, flags): fill at most two flat views of bytes, in order, by one system call. Gives how many
bytes came, 0 at the end of the stream, or an error's number (errno) below zero: -EINTR behind a signal, whose handler
runs before the caller's next line. Raises BufferError for memory that is not to be written."""
