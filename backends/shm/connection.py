"""A connection to a server on this host that lends us its arena, and to which we lend ours: offsets instead of bytes.

KV.ATTACH brings two descriptors: the server's arena, which is mapped to be read, and a channel over which ours goes to
the server (KV.LEND); KV.ATTACH GPU brings its GPU's memory as well. From then on KV.LEASE answers where a value lies,
and KV.PUT says where one is to be taken from; each side can read the other's memory and write none of it, but for the
GPU's. All else is said as on any connection.

WHY leases are given back unanswered (CLIENT REPLY SKIP): readers are done with them in any thread and at any time, and
an answer would turn up among those that the connection's user is reading. Nor would it be of use: whether bytes were
still what they should be is known here, without asking (SharedLease.held).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvredis.backends.resp.connection import DEPTH_MAX, Connection, Reply, read_map
from kvredis.backends.resp.wire import CRLF, SCRATCH_BYTES, Buffer
from kvredis.storage.errors import ArenaError, BackendError
from kvredis.storage.memory.arena import Arena

from .arena import SharedArena, shared_arena
from .gpu_memory import GpuMemory, gpu_memory
from .leases import GpuLease, SharedLease

DESCRIPTORS_MAX: Final = 8
"""What may come with one message; those that were not asked for are closed."""
RELEASES_TOGETHER: Final = 64
RELEASED_BYTES: Final = 64 * 1024 * 1024
RELEASED_PART: Final = 16
"""Leases that have ended and of which the server need not hear at once, while others are held: they can go with the
next that is asked. More bytes where its arena is large: a sixteenth of it."""
RELEASES_MAX: Final = 512
"""Leases that one command ends: it is short enough for the kernel to take it whole or not at all."""
_SKIP: Final = (b"CLIENT", b"REPLY", b"SKIP")
_SKIPPING: Final = b"*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$4\r\nSKIP\r\n"
_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class _Look(ctypes.Structure):
    """struct pollfd of poll(2)."""

    _fields_ = (("descriptor", ctypes.c_int), ("events", ctypes.c_short), ("found", ctypes.c_short))


# WHY not select.poll: that gives up the interpreter's lock, which beside an engine that computes in Python takes up to
# its switch interval, 5 ms, to get back, and this is asked once for each chunk. As it never waits, it may keep it.
_poll = ctypes.PyDLL(None, use_errno=True).poll
_poll.argtypes = (ctypes.POINTER(_Look), ctypes.c_ulong, ctypes.c_int)
_poll.restype = ctypes.c_int


class AttachedConnection(Connection):
    """For one thread at a time, but for leases that end, and `interrupt`. `attach` comes before all else.

    Leases are counted here as long as they are out, since they end with the connection.
    """

    __slots__ = (
        "_arena",
        "_counting",
        "_descriptors",
        "_ended",
        "_ended_bytes",
        "_gpu",
        "_lent",
        "_limit_ms",
        "_out",
        "_released_bytes",
        "_sending",
        "_side",
        "gpu_base",
        "waits_for_disk",
    )

    def __init__(self, sock: socket.socket, timeout_s: float = 10.0) -> None:
        super().__init__(sock, timeout_s)
        self._arena: SharedArena | None = None
        self._gpu: GpuMemory | None = None
        self.gpu_base = 0
        """What the server calls the beginning of its GPU's memory."""
        self._side: socket.socket | None = None
        self._limit_ms = 0
        self._lent: Arena | None = None
        self._descriptors: list[int] | None = None  # those that come, while a caller waits for some
        self._sending = threading.Lock()  # not reentrant: a collected lease must not write into a command under way
        self._counting = threading.RLock()  # reentrant: a collected lease may end anywhere
        self._ended: deque[int] = deque()  # addresses of leases that the server takes for held
        self._ended_bytes = self._out = 0
        self._released_bytes = RELEASED_BYTES
        self.waits_for_disk = True
        """Whether an answer to KV.LEASE may wait for the server's disk, and for room; it need not say."""

    # ---- attaching -----------------------------------------------------------------------------------------------

    def attach(self, run_id: str, *, page_lock: bool = False, gpu: int | None = None) -> str:
        """Map the arena of the server process `run_id`, and for our GPU `gpu` the memory of its own, if it has one for
        us. Gives why it has none, "" where it has. Raises BackendError when the arena is not given, or not sound, and
        DeviceError when that GPU cannot map what is given; then the connection is of no more use."""
        came = self._descriptors = []
        try:
            reply = BackendError("") if gpu is None else self.call(b"KV.ATTACH", b"GPU")
            why_no_gpu = str(reply) if isinstance(reply, BackendError) else ""
            if isinstance(reply, BackendError):
                gpu = None
                reply = self.call(b"KV.ATTACH")
            if isinstance(reply, BackendError):
                raise self.broken(f"KV.ATTACH: {reply}")
            said = read_map(reply)
            nbytes, limit_ms = said.get("arena-bytes"), said.get("lease-ms")
            wanted = 2 if gpu is None else 3
            if len(came) != wanted or not isinstance(nbytes, int) or not isinstance(limit_ms, int) or limit_ms <= 0:
                raise self.broken(f"not an answer to KV.ATTACH: {len(came)} descriptors and {str(reply)[:100]}")
            if gpu is not None:
                gpu_bytes, gpu_base = said.get("gpu-bytes"), said.get("gpu-base")
                if not isinstance(gpu_bytes, int) or not isinstance(gpu_base, int):
                    raise self.broken(f"not an answer to KV.ATTACH GPU: {str(reply)[:100]}")
                self._gpu, self.gpu_base = gpu_memory(run_id, came[2], gpu_bytes, gpu), gpu_base
                os.close(came.pop())
            self._arena = shared_arena(run_id, came[0], nbytes, page_lock=page_lock)
            self._limit_ms = limit_ms
            self.waits_for_disk = said.get("disk") != 0
            self._released_bytes = max(RELEASED_BYTES, nbytes // RELEASED_PART)
            self._side = socket.socket(fileno=came[1])
            came.pop()  # the socket has it now
            # A user who may not say this would get answers to what is given back, and take them for others.
            self.send_many([_SKIP, (b"PING",), (b"PING",)])
            if (reply := self.read()) != "PONG":
                raise self.broken(f"CLIENT REPLY SKIP: {str(reply)[:100]}")
            return why_no_gpu
        except OSError as error:
            raise self.broken(f"the shared memory: {error.strerror}") from error
        except BaseException:
            self.close()
            raise
        finally:
            self._descriptors = None
            for descriptor in came:
                os.close(descriptor)

    @property
    def arena(self) -> SharedArena:
        """The server's memory. Raises BackendError when the connection is closed: it is let go of then."""
        if self._arena is None:
            raise BackendError("the connection is closed")
        return self._arena

    @property
    def gpu(self) -> GpuMemory | None:
        """The server's GPU memory, where we have it; None when the connection is closed."""
        return self._gpu

    @property
    def is_open(self) -> bool:
        """Look, without waiting, whether neither side has hung up. Any thread may ask."""
        sock = self._sock
        if sock is None:
            return False
        look = _Look(sock.fileno(), select.POLLRDHUP, 0)  # of -1 nothing is found
        while (count := _poll(ctypes.byref(look), 1, 0)) < 0 and ctypes.get_errno() == errno.EINTR:
            pass  # a signal is pending, which poll(2) tells even though it would not have waited
        is_gone = count < 0 or look.found & _GONE
        return not is_gone and self._sock is sock  # else its number may have been another's by then

    def close(self) -> None:
        """As Wire.close. What the server then still does for us has no effect."""
        super().close()
        self._arena = self._gpu = None
        side, self._side = self._side, None
        if side is not None:
            side.close()

    # ---- leases --------------------------------------------------------------------------------------------------

    @property
    def has_leases(self) -> bool:
        """Say whether leases are out, which would end if this were closed."""
        return self._out > 0

    def ask_leases(self, *batches: Sequence[bytes]) -> float:
        """Ask for leases of several keys, a command for each batch, to be read by as many read_leases; give the time
        until which those will hold."""
        until_s = time.monotonic() + self._limit_ms / 1000
        limit = b"%d" % self._limit_ms  # said, as the server's default may change meanwhile
        self.send_buffers([_command(b"KV.LEASE", limit, *keys) for keys in batches])
        return until_s

    def read_leases(self, until_s: float, count: int) -> list[SharedLease | bytes | BackendError | None]:
        """Read the answer to one ask_leases of `count` keys: for each a lease, a short value itself, an error, or None
        for a miss."""
        self.begin()
        found = self._places(count)
        if found is not None:
            places, is_on_gpu = found
            return [*self._leases(places, until_s, is_on_gpu=is_on_gpu)]
        reply = self._item(DEPTH_MAX)
        if isinstance(reply, BackendError):
            return [reply] * count
        if not isinstance(reply, list) or len(reply) != count:
            raise self.broken(f"not an answer to KV.LEASE: {str(reply)[:100]}")
        return [self._answer(item, until_s) for item in reply]

    def _places(self, count: int) -> tuple[list[tuple[int, int]], bool] | None:
        """Read the commonest answers, `count` places all in the arena or all on the GPU, and say which, in one go;
        None, and nothing is read, if it is anything else."""
        while True:
            lines = self._view[self._start : self._end].tobytes().split(CRLF)
            is_on_gpu = len(lines) > 2 and lines[1] == b"*3"
            head, each = (b"*3", 5) if is_on_gpu else (b"*2", 3)
            wanted = 1 + each * count
            whole = min(len(lines) - 1, wanted)
            if whole and (lines[0] != b"*%d" % count or set(lines[1:whole:each]) - {head}):
                return None
            if is_on_gpu and (set(lines[4:whole:each]) - {b"$3"} or set(lines[5:whole:each]) - {b"gpu"}):
                return None
            if whole == wanted:
                break
            if self._end - self._start == SCRATCH_BYTES:
                return None
            self._fill()
        try:
            offsets, lengths = _integers(lines[2:wanted:each]), _integers(lines[3:wanted:each])
            places = list(zip(offsets, lengths, strict=True))
        except ValueError:
            return None
        self._start += sum(map(len, lines[:wanted])) + 2 * wanted
        return places, is_on_gpu

    def _leases(
        self, places: Sequence[tuple[int, int]], until_s: float, *, is_on_gpu: bool = False
    ) -> Sequence[SharedLease]:
        leases: Sequence[SharedLease]
        try:
            if not is_on_gpu:
                arena = self.arena
                leases = [SharedLease(self, arena, offset, length, until_s) for offset, length in places]
            elif (gpu := self._gpu) is None:
                raise BackendError("a lease on a GPU that is not ours")
            else:
                base = self.gpu_base
                leases = [GpuLease(self, gpu, address, length, until_s, base) for address, length in places]
        except BackendError as error:
            raise self.broken(str(error)) from error
        with self._counting:
            self._out += len(leases)
        return leases

    def _answer(self, item: Reply, until_s: float) -> SharedLease | bytes | BackendError | None:
        if item is None or isinstance(item, bytes | BackendError):
            return item
        match item:
            case [int() as offset, int() as length]:
                return self._leases([(offset, length)], until_s)[0]
            case [int() as address, int() as length, b"gpu"]:
                return self._leases([(address, length)], until_s, is_on_gpu=True)[0]
        raise self.broken(f"not a lease: {str(item)[:100]}")

    def end_lease(self, address: int, length: int) -> None:
        """For a lease, from any thread: the server may have the room again."""
        with self._counting:
            self._ended.append(address)
            self._ended_bytes += length
            self._out -= 1
            due = not self._out or len(self._ended) >= RELEASES_TOGETHER or self._ended_bytes >= self._released_bytes
        if due:
            self.tell_ended()

    def tell_ended(self) -> None:
        """Tell the server which leases have ended, if that can be done without waiting; from any thread. Else who is
        sending just now does it, or who comes next."""
        while self._ended and self._sending.acquire(blocking=False):
            try:
                if not self._send_ended():
                    return
            finally:
                self._sending.release()

    def _send_ended(self) -> bool:
        sock, offsets = self._sock, self._take_ended()
        if sock is None or not self.is_ours:  # else a fork of a reader would end what that one reads
            return False
        command = b"".join(bytes(part) for part in _releases(offsets))
        try:
            if sock.sendmsg([command], (), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) == len(command):
                return True
            self.interrupt()  # half a command is out
        except BlockingIOError:  # a server that does not read: later
            self._ended.extendleft(reversed(offsets))
        except OSError:  # lost, and with it the leases
            pass
        return False

    def _take_ended(self) -> list[int]:
        self._ended_bytes = 0
        return [self._ended.popleft() for _ in range(min(len(self._ended), RELEASES_MAX))]

    def send_buffers(self, buffers: list[Buffer]) -> None:
        """As Wire, behind the news of leases that have ended."""
        with self._sending:
            super().send_buffers([*_releases(self._take_ended()), *buffers])
        self.tell_ended()

    # ---- our memory ----------------------------------------------------------------------------------------------

    def lend(self, arena: Arena) -> Reply:
        """Let the server read `arena`, for send_put; "OK", or why it will not. Until a put is answered, or the
        connection closed, its bytes must stay what they are."""
        if self._lent is not arena:
            assert self._side is not None, "attach comes first"
            self._lent = None
            try:
                descriptor = arena.share()
                try:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
                    self._side.sendmsg([b"m"], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                finally:
                    os.close(descriptor)
            except (ArenaError, OSError) as error:
                return BackendError(f"the memory cannot be lent: {error}")
            reply = self.call(b"KV.LEND")
            if not isinstance(reply, int):
                return reply
            self._lent = arena
        return "OK"

    @property
    def borrows(self) -> bool:
        """Whether the server reads our memory, so that send_put is of use."""
        return self._lent is not None

    def send_put(self, key: bytes, offset: int, length: int) -> None:
        """KV.PUT of bytes of the memory that was lent; answered as SET."""
        self.send((b"KV.PUT", key, b"%d" % offset, b"%d" % length))

    def send_fill(self, number: int, start: int, offset: int, length: int) -> None:
        """KV.FILL of a reservation from `start` on, out of the memory that was lent."""
        self.send((b"KV.FILL", b"%d" % number, b"%d" % start, b"%d" % offset, b"%d" % length))

    # ---- descriptors ---------------------------------------------------------------------------------------------

    def _receive_some(self, sock: socket.socket, buffers: Sequence[memoryview], flags: int) -> int:
        """As Wire, and takes up the descriptors that come along, while a caller waits for some: those that were not
        asked for are dropped by the kernel."""
        if self._descriptors is None:
            return super()._receive_some(sock, buffers, flags)
        self._wait(sock, select.POLLIN, self._deadline_s)
        room = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
        count, control, _, _ = sock.recvmsg_into(buffers, room, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        return count


def _releases(offsets: Sequence[int]) -> list[Buffer]:
    """Write the commands that end leases, to which there is no answer."""
    return [_SKIPPING + _command(b"KV.RELEASE", *[b"%d" % offset for offset in offsets])] if offsets else []


def _command(*words: bytes) -> bytes:
    """As connection.encode, for many short words."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _integers(lines: Sequence[bytes]) -> list[int]:
    """Read integer replies. Raises ValueError unless they are that."""
    numbers = b"".join(lines).split(b":")  # nothing, and behind each colon one
    if len(numbers) != len(lines) + 1 or [line[:1] for line in lines].count(b":") != len(lines):
        raise ValueError("not integers")
    return list(map(int, numbers[1:]))
