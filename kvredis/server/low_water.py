"""When the kernel wakes us for a payload: when a good part of it is there, and not for each segment that comes.

A value of 2 MiB comes in dozens of segments, each of which costs a turn of the loop and two calls of the interpreter
when it is taken by itself. With SO_RCVLOWAT the socket becomes readable when LOW_WATER_BYTES are there, or all that is
missing. On 2 cores that took a quarter of the server's CPU from a SET of 576 KiB and 2 MiB over TCP.

A client that sends slowly must not look like one that has stopped, so what lies there is taken every second or so all
the same (Session.rest). Only TCP knows a low water mark: unix sockets do not heed it, TLS has a buffer of its own.
"""

import asyncio
import socket
from typing import Final

LOW_WATER_BYTES: Final = 256 * 1024
"""Less than half of what a receive buffer grows to, so that the sender is not held up."""


class LowWater:
    """The mark of one connection."""

    __slots__ = ("_level", "_transport")

    def __init__(self, transport: asyncio.Transport | None = None) -> None:
        """Of a TCP connection; None stands for one that does not heed a mark."""
        self._transport = transport
        self._level = 1

    def expect(self, missing: int) -> None:
        """Let the socket be readable when so many bytes have come, or enough of them; with 0 when any have."""
        level = LOW_WATER_BYTES if missing > LOW_WATER_BYTES else missing or 1
        if level != self._level and self._transport is not None and not self._transport.is_closing():
            self._level = level
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, level)
