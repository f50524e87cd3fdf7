"""One end of a link between two processes: what it sends, what it has received, and the proof that they are the same.

Both ends have the same code and the same bytes. `perf_counter` counts from the same moment in all processes of a
machine, so a transfer is timed from the earlier beginning to the later end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.disk.blocks import same_bytes
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena

from .memory import BLOCK_BYTES, copy_blocks, pattern, timed_together

SHARED: Final = "shared memory"
WAIT_S: Final = 60.0
"""How long an end waits for the other before it gives up."""
_TOKEN: Final = b"."


class Span(NamedTuple):
    """When something began and ended, by perf_counter."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Ways:
    """What leads to the other end: for each way what to read from and what to write to; `shared` is mapped by both."""

    sockets: dict[str, tuple[socket.socket, socket.socket]]  # one of ours to send on, one to receive on
    pipe: tuple[int, int]  # read, write
    events: tuple[int, int]  # read, write

    def close(self) -> None:
        """Close everything."""
        for pair in self.sockets.values():
            for each in pair:
                each.close()
        for fd in (*self.pipe, *self.events):
            with suppress(OSError):
                os.close(fd)


class End:
    """`nbytes` to send, room for as many, and `shared`, a memfd of twice as many: a half that each end writes.

    `mine` is 0 or 1: which half. Owns its memory until `close`; `shared` is mapped and stays the caller's.
    """

    def __init__(self, nbytes: int, mine: int, shared: int, ways: Ways) -> None:
        self._mapping = mmap.mmap(shared, 2 * nbytes)
        self._held: ctypes.c_char | None = ctypes.c_char.from_buffer(self._mapping)
        start = ctypes.addressof(self._held)
        self.nbytes, self.ways = nbytes, ways
        self._arena = Arena.create(2 * nbytes)
        self._arena.prefault(PREFAULT_THREADS_MAX)
        pattern(self._arena.address, nbytes)
        self._out = self._arena.view[:nbytes]
        self._in = self._arena.view[nbytes : 2 * nbytes]
        self._shared_out = start + mine * nbytes
        self._shared_in = start + (1 - mine) * nbytes

    def close(self) -> None:
        """Give the memory back."""
        self._out.release()
        self._in.release()
        self._arena.close()
        self._held = None
        self._mapping.close()

    def prepare(self, way: str, jobs: Sequence[str], value: int) -> None:
        """Make ready what `jobs` (any of send, receive) over `way` need; untimed. `value` overwrites what is old."""
        if "receive" in jobs:
            ctypes.memset(self._arena.address + self.nbytes, value & 0xFF, self.nbytes)
        if way == SHARED and "send" in jobs:
            copy_blocks(self._shared_out, self._arena.address, self.nbytes)

    def work(self, way: str, jobs: Sequence[str]) -> Span:
        """Do the jobs, each in a thread of its own. Through shared memory sending is done before, by `prepare`."""
        work: dict[str, Callable[[], None]] = {"send": partial(self._send, way), "receive": partial(self._receive, way)}
        if way == SHARED:
            work = {"send": lambda: None, "receive": self._copy_shared}
        start_s = time.perf_counter()
        if len(jobs) == 1:
            work[jobs[0]]()
        else:
            timed_together([work[job] for job in jobs])
        return Span(start_s, time.perf_counter())

    def verify(self, who: str) -> int:
        """Compare all that was received; gives the bytes compared. VerificationError when one is wrong."""
        if not same_bytes(self._arena.address, self._arena.address + self.nbytes, self.nbytes):
            raise VerificationError(f"{who} brought a wrong byte")
        return self.nbytes

    def _send(self, way: str) -> None:
        sender = self.ways.sockets[way][0]
        for at in range(0, self.nbytes, BLOCK_BYTES):
            sender.sendall(self._out[at : at + BLOCK_BYTES])

    def _receive(self, way: str) -> None:
        source, at = self.ways.sockets[way][1], 0
        while at < self.nbytes:
            count = source.recv_into(self._in[at : at + BLOCK_BYTES])
            if not count:
                raise BenchError(f"{way}: the other end has closed")
            at += count

    def _copy_shared(self) -> None:
        copy_blocks(self._arena.address + self.nbytes, self._shared_in, self.nbytes)

    def ask(self, way: str, rounds: int) -> list[float]:
        """Send a token and wait for it to come back, `rounds` times; gives the us of each."""
        put, get = self._hands(way)
        times = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            put()
            get()
            times.append((time.perf_counter() - start_s) * 1e6)
        return times

    def echo(self, way: str, rounds: int) -> None:
        """Wait for a token and send it back, `rounds` times."""
        put, get = self._hands(way)
        for _ in range(rounds):
            get()
            put()

    def _hands(self, way: str) -> tuple[Callable[[], object], Callable[[], object]]:
        """Give what passes a token on and what waits for one."""
        if way == "eventfd":
            read, write = self.ways.events
            return lambda: os.eventfd_write(write, 1), lambda: _taken(way, os.eventfd_read(read) == 1)
        if way == "pipe":
            into, out_of = self.ways.pipe[1], self.ways.pipe[0]
            return lambda: os.write(into, _TOKEN), lambda: _taken(way, os.read(out_of, 1) == _TOKEN)
        sender, source = self.ways.sockets[way]
        return lambda: sender.send(_TOKEN), lambda: _taken(way, source.recv(1) == _TOKEN)


def _taken(way: str, right: bool) -> None:
    if not right:
        raise BenchError(f"{way}: the other end has gone, or sent something else")
