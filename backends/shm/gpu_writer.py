"""Room in a server's GPU memory for blocks that an engine's GPU writes there itself (gpu_memory.py)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from kvredis.backends.resp.connection import Connection, Reply
from kvredis.storage.errors import BackendError, DeviceError
from kvredis.storage.memory.copy import View

from .connection import AttachedConnection
from .gpu_memory import GpuMemory

logger = logging.getLogger(__name__)

REST_S: Final = 1.0
"""How long nothing is asked of a server that has had no room on its GPU: it waits for some before it says so."""
REFUSED_S: Final = 60.0
"""The same where it has refused for another reason, or has no GPU memory for us: asking costs a connection."""
COMMIT: Final = b"KV.COMMIT"
ABORT: Final = b"KV.ABORT"
TOGETHER_MAX: Final = 16
"""Rooms asked for at once: one round trip for all of them. Where there is none, the server lets one of them wait."""
UNREAD_MAX: Final = 64
"""Answers that are waited for only when there are so many, or something else is asked: each takes a round trip, and a
prompt of 60 blocks is stored at the end of a pass that another engine waits for."""


class GpuReservation:
    """Room for a block in the server's GPU memory: a base.Reservation whose `view` is a place for a GPU's copies. It is
    committed, or aborted, when they have ended."""

    def __init__(
        self,
        writer: GpuWriter,
        connection: AttachedConnection,
        memory: GpuMemory,
        offset: int,
        number: int,
        length: int,
    ) -> None:
        """`number` is what the server calls it, on that connection."""
        self.view = memory.part(offset, length)
        self.memory_bytes = memory.nbytes
        """Of all the GPU memory that the server has."""
        self._writer = writer
        self._connection = connection
        self._memory = memory
        self._offset = offset
        self._number: int | None = number

    def write(self, data: View) -> None:
        """Lay bytes of host memory down at the beginning: they are there when this thread has committed a block, this
        one or another. Raises DeviceError when the GPU does not take them."""
        if self._number is not None:
            self._memory.arena.begin_write(self._offset, data)

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are where they stay."""

    def commit(self) -> None:
        """Store the block: the server has been told when this returns, and its answer is read later. Raises DeviceError
        when what was written has not come, here or to another block that this thread has written to."""
        self._memory.arena.settle()
        self._end(COMMIT)

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing. This thread writes to it no more."""
        with suppress(DeviceError):  # what was written has come, or never will
            self._memory.arena.settle()
        self._end(ABORT)

    def _end(self, command: bytes) -> None:
        number, self._number = self._number, None
        if number is not None:
            self._writer.end(command, number, self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class GpuWriter:
    """Takes room in a server's GPU memory, over a connection that it keeps: with it all room that is not committed
    would go. Any thread; they take turns."""

    def __init__(
        self,
        open_connection: Callable[[], Connection | None],
        retire: Callable[[Connection], None],
        lose: Callable[[Connection, BackendError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`retire` is given each connection back, `lose` is told first of one that has failed."""
        self.stored = 0
        """Blocks."""
        self._refused = 0
        self._open, self._retire, self._lose = open_connection, retire, lose
        self._clock = clock
        self._connection: AttachedConnection | None = None
        self._unread: deque[tuple[bytes, int]] = deque()  # what was sent, and its answer not read
        self._turn = threading.Lock()
        self._rests_until_s = -float("inf")
        self._is_closed = False

    def reserve(self, keys: Sequence[bytes], length: int) -> list[GpuReservation | None]:
        """Take room for a block of `length` bytes for each key; None: there is none, or no GPU memory."""
        rooms: list[GpuReservation | None] = []
        with self._turn:
            while len(rooms) < len(keys) and self._clock() >= self._rests_until_s:
                rooms += self._reserve(keys[len(rooms) : len(rooms) + TOGETHER_MAX], length)
        return rooms + [None] * (len(keys) - len(rooms))

    def _reserve(self, keys: Sequence[bytes], length: int) -> list[GpuReservation | None]:
        connection = self._connected()
        memory = None if connection is None else connection.gpu
        if connection is None or memory is None:
            self._rest(REST_S)  # longer, where a server has answered that it has none
            return []
        try:
            connection.send_many((b"KV.RESERVE", key, b"%d" % length, b"GPU") for key in keys)
            replies = [connection.read() for _ in keys]
            return [self._reserved(reply, connection, memory, length) for reply in replies]
        except BackendError as error:  # with the connection all that it has reserved goes
            self._drop(connection, error)
            return []
        except BaseException:  # an answer may be out
            connection.close()
            raise

    def _reserved(
        self, reply: Reply, connection: AttachedConnection, memory: GpuMemory, length: int
    ) -> GpuReservation | None:
        """What the server has answered. Raises BackendError for a place that is not there."""
        match reply:
            case [int() as number, int() as address]:
                try:
                    return GpuReservation(self, connection, memory, address - connection.gpu_base, number, length)
                except BackendError as error:
                    raise connection.broken(str(error)) from error
            case BackendError() as error if str(error).startswith("OOM"):
                self._rest(REST_S)
            case _:
                logger.warning("the server's GPU memory is not written to for a while: %s", reply)
                self._rest(REFUSED_S)
        return None

    def end(self, command: bytes, number: int, connection: AttachedConnection) -> None:
        """For a reservation of that connection: commit it, or give it back. With the connection it has gone already,
        and on the next one, which may be to another server, its number is another block's."""
        with self._turn:
            if connection is not self._connection or not connection.usable:
                self._refused += command == COMMIT
                return
            if not connection.is_ours:  # a fork of the process that reserved it
                return
            self._unread.append((command, number))
            try:
                connection.send((command, b"%d" % number))
                if len(self._unread) >= UNREAD_MAX:
                    self._read_answers(connection)
            except BackendError as error:
                self._drop(connection, error)
            except BaseException:  # half a command may be out
                connection.close()
                raise

    def take_refused(self) -> int:
        """Count the blocks that the server refused since the last call; waits for its answers."""
        with self._turn:
            self._connected(opens=False)
            refused, self._refused = self._refused, 0
        return refused

    def close(self) -> None:
        """Reserve nothing more; waits until the server has answered."""
        with self._turn:
            self._is_closed = True
            connection = self._connected(opens=False)
            self._connection = None
            if connection is not None:
                self._retire(connection)

    def _connected(self, *, opens: bool = True) -> AttachedConnection | None:
        """The connection, on which nothing is unread; None where there is none."""
        connection = self._connection
        if connection is not None and self._unread:
            try:
                self._read_answers(connection)
            except BackendError as error:
                self._drop(connection, error)
            except BaseException:  # which answers are out is not known
                connection.close()
                raise
            connection = self._connection
        if connection is not None and connection.stale():
            self._retire(connection)
            connection = self._connection = None
        if connection is None and opens and not self._is_closed:
            opened = self._open()
            if isinstance(opened, AttachedConnection) and opened.gpu is not None:
                connection = self._connection = opened
            elif opened is not None:
                self._retire(opened)
                self._rest(REFUSED_S)
        return connection

    def _read_answers(self, connection: AttachedConnection) -> None:
        """Read what has not been read. A block that was refused is given back: else its room would stay taken."""
        refused = []
        while self._unread:
            command, number = self._unread[0]
            reply = connection.read()
            self._unread.popleft()
            if command == COMMIT and reply == "OK":
                self.stored += 1
            elif command == COMMIT:
                self._refused += 1
                refused.append(number)
                logger.warning("a block was not stored in the server's GPU memory: %s", reply)
        for number in refused:
            connection.call(ABORT, b"%d" % number)

    def _drop(self, connection: AttachedConnection, error: BackendError) -> None:
        self._lose(connection, error)
        self._refused += sum(command == COMMIT for command, _ in self._unread)
        self._unread.clear()
        self._connection = None
        self._retire(connection)

    def _rest(self, seconds: float) -> None:
        self._rests_until_s = max(self._rests_until_s, self._clock() + seconds)
