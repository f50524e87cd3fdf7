"""When the kernel wakes us for a payload: when a good part of it is there, and not for each segment that comes.

A value of megabytes comes in dozens of segments, each of which costs a turn of the loop and two calls of the
interpreter when it is taken by itself. With SO_RCVLOWAT the socket becomes readable when LOW_WATER_BYTES are there.
The end of a value, and a short one, is taken as it comes, so that the client's sending and our receiving go on side by
side.

What it gives: SETs over TCP one by one, in turns with a server that sets no mark, on 2 busy cores, medians of three
rounds. 8 MiB take 0.71 to 0.93 of the time and 0.76 to 0.80 of the server's CPU; at 2 MiB the time is within the noise
(0.78 to 1.02). With a mark from 512 KiB on, 896 KiB took 0.95 to 1.21 of the time and 1.07 to 1.11 of the CPU.

A client that sends slowly must not look like one that has stopped, so what lies there is taken every second or so all
the same (Session.rest). Only TCP knows a low water mark: unix sockets do not heed it, TLS has a buffer of its own.
"""

import asyncio
import socket
from typing import Final

LOW_WATER_BYTES: Final = 256 * 1024
"""Less than half of what a receive buffer grows to, so that the sender is not held up."""
LONG_BYTES: Final = 4 * LOW_WATER_BYTES
"""A value of which less is missing when it begins has no mark."""


class LowWater:
    """The mark of one connection."""

    __slots__ = ("_level", "_transport")

    def __init__(self, transport: asyncio.Transport | None = None) -> None:
        """Of a TCP connection; None stands for one that does not heed a mark."""
        self._transport = transport
        self._level = 1

    def expect(self, missing: int) -> None:
        """So many bytes are missing: let the socket be readable when a good part of them, or when any, have come."""
        least = LONG_BYTES if self._level == 1 else 2 * LOW_WATER_BYTES
        level = LOW_WATER_BYTES if missing >= least else 1
        if level != self._level and self._transport is not None and not self._transport.is_closing():
            self._level = level
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, level)
