"""One end of a link between two processes: what it sends, what it has received, and the proof that they are the same.

Both ends have the same code and the same bytes. `perf_counter` counts from the same moment in all processes of a
machine, so a transfer is timed from the earlier beginning to the later end.

What goes between two processes of this machine: sockets, shared memory, and a token's way from core to core.

The other process is peer.py. One way is measured in both directions, since who sends and who receives need not be
alike; both ways at once are two sockets, and two threads in each process.

The other process of a link: does what it is told over a socket, one line of JSON at a time, until that closes.

Started by process.py with the descriptors that it shall use. Each order is answered with `ready` before it is
carried out, and with what came of it afterwards.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from typing import Any, Final, NamedTuple, TextIO

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import Progress, Row
from kvredis.bench.core.servers import child_environment
from kvredis.bench.core.statistics import GB, percentile
from kvredis.bench.core.workload import same_bytes
from kvredis.storage.errors import KVRedisError
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena

from .memory import (
    BLOCK_BYTES,
    CopySample,
    Direction,
    LatencySample,
    Link,
    copy_blocks,
    copy_row,
    latency_row,
    pattern,
    timed_together,
)

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


HERE, THERE = "process 0", "process 1"
COPY_WAYS: Final = ("tcp", "unix", SHARED)
TOKEN_WAYS: Final = ("eventfd", "pipe", "unix", "tcp")
CORES_MAX: Final = 8
"""So many cores, evenly chosen, are paired; more would take minutes and make a matrix too large to read."""
_GONE: Final = 1 << 32
_DIRECTIONS: Final[tuple[tuple[str, str, Direction, tuple[str, ...], tuple[str, ...]], ...]] = (
    (HERE, THERE, "uni", ("send",), ("receive",)),
    (THERE, HERE, "uni", ("receive",), ("send",)),
    (HERE, THERE, "bi", ("send", "receive"), ("send", "receive")),
)


class Peer:
    """The other process, and our end of what leads there. One order at a time; `close` ends the process."""

    def __init__(self, nbytes: int) -> None:
        self._stack = ExitStack()
        try:
            self._start(nbytes)
        except BaseException:
            self.close()
            raise

    def _start(self, nbytes: int) -> None:
        stack = self._stack
        ours, theirs = socket.socketpair()
        unix = [socket.socketpair() for _ in range(2)]
        there, back = os.pipe(), os.pipe()
        events = [os.eventfd(0) for _ in range(2)]
        shared = os.memfd_create("kvbench-links")
        os.ftruncate(shared, 2 * nbytes)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(WAIT_S)
        given = {
            "control": theirs.fileno(),
            "unix": [pair[1].fileno() for pair in unix],
            "pipe": [there[0], back[1]],
            "events": [events[0], events[1]],
            "shared": shared,
            "port": listener.getsockname()[1],
            "nbytes": nbytes,
        }
        passed = (theirs.fileno(), *given["unix"], there[0], back[1], *events, shared)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, json.dumps(given)],
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            env=child_environment(os.environ),
        )
        stack.callback(self._end)
        for each in (theirs, unix[0][1], unix[1][1]):
            each.close()
        for fd in (there[0], back[1]):
            os.close(fd)
        try:
            tcp = [listener.accept()[0] for _ in range(2)]
        except TimeoutError as error:
            raise BenchError("the other process did not start") from error
        for each in tcp:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets = {"unix": (unix[0][0], unix[1][0]), "tcp": (tcp[0], tcp[1])}
        for each in (ours, *(each for pair in sockets.values() for each in pair)):
            each.settimeout(WAIT_S)
        ways = Ways(sockets, (back[0], there[1]), (events[1], events[0]))
        stack.callback(ways.close)
        self.end = End(nbytes, 0, shared, ways)
        os.close(shared)
        stack.callback(self.end.close)
        self._control = stack.enter_context(ours)
        self._said = stack.enter_context(ours.makefile("r", encoding="utf-8", newline="\n"))
        # A thread that waits for a token over an eventfd would not hear that the other process has died.
        watcher = threading.Thread(target=self._watch, args=(events[1],), daemon=True)
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(self._end)  # before the descriptors are closed, or the watcher might write to another file

    def _watch(self, event: int) -> None:
        self._process.wait()
        with suppress(OSError):
            os.eventfd_write(event, _GONE)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the other process and give everything back."""
        self._stack.close()

    def order(
        self, way: str, jobs: Sequence[str], *, value: int = 0, rounds: int = 0, cores: Sequence[int] = ()
    ) -> None:
        """Tell the other process what to do, and wait until it is about to."""
        order = {"way": way, "jobs": jobs, "value": value, "rounds": rounds, "cores": cores}
        with _gone_as_error():
            self._control.sendall(json.dumps(order).encode() + b"\n")
        self.answer()

    def answer(self) -> dict[str, Any]:
        """Give what the other process says next; BenchError when it failed or is gone."""
        with _gone_as_error():
            line = self._said.readline()
        if not line:
            raise BenchError("the other process has ended")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise BenchError(f"the other process failed: {found['error']}")
        return found


@contextmanager
def _gone_as_error() -> Iterator[None]:
    """Turn what a socket says of an end that is gone, or hangs, into BenchError."""
    try:
        yield
    except OSError as error:
        raise BenchError(f"the other process has gone or hangs: {error}") from error


@contextmanager
def peer_of(nbytes: int) -> Iterator[Peer]:
    """Lend a second process, ended however it comes."""
    peer = Peer(nbytes)
    try:
        yield peer
    finally:
        peer.close()


def run_copies(peer: Peer, repeats: int, progress: Progress) -> list[Row]:
    """Measure every way in every direction; every byte is compared by who received it."""
    samples: dict[tuple[str, int], list[CopySample]] = {}
    for repeat in range(repeats):
        for way in COPY_WAYS:
            progress(f"processes: {way}")
            for at in range(len(_DIRECTIONS)):
                samples.setdefault((way, at), []).append(_copy(peer, way, at, repeat))
    rows = []
    for (way, at), own in samples.items():
        source, target, direction, _, _ = _DIRECTIONS[at]
        link = Link(part="process", way=way, source=source, target=target, direction=direction)
        rows.append(copy_row(link, peer.end.nbytes, own))
    return rows


def _copy(peer: Peer, way: str, at: int, repeat: int) -> CopySample:
    _, _, _, ours, theirs = _DIRECTIONS[at]
    peer.end.prepare(way, ours, repeat)
    peer.order(way, theirs, value=repeat)
    with _gone_as_error():
        spans, verified = [peer.end.work(way, ours)], 0
    if "receive" in ours:
        verified += peer.end.verify(way)
    answer = peer.answer()
    spans.append(Span(*answer["span"]))
    if way == SHARED:  # a process that only wrote did so before the clock started
        spans = [span for span, jobs in zip(spans, (ours, theirs), strict=True) if "receive" in jobs]
    seconds = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    nbytes = peer.end.nbytes * len(ours)
    return CopySample(
        repeat=repeat,
        seconds=seconds,
        gb_per_s=nbytes / seconds / GB,
        verified_bytes=verified + answer["verified"],
    )


def run_tokens(peer: Peer, repeats: int, rounds: int, progress: Progress) -> list[Row]:
    """Measure how long a token takes there and back: by each way, and by eventfd between each pair of cores."""
    mine = os.sched_getaffinity(0)
    pairs = list(combinations_with_replacement(chosen_cores(sorted(mine)), 2))
    ways: dict[str, list[LatencySample]] = {way: [] for way in TOKEN_WAYS}
    cores: dict[tuple[int, int], list[LatencySample]] = {pair: [] for pair in pairs}
    try:
        for repeat in range(repeats):
            progress("processes: tokens")
            for way in TOKEN_WAYS:
                ways[way].append(_token(peer, way, repeat, rounds, sorted(mine)))
            for pair in pairs:
                os.sched_setaffinity(0, {pair[0]})
                cores[pair].append(_token(peer, "eventfd", repeat, rounds, [pair[1]]))
                os.sched_setaffinity(0, mine)
    finally:
        os.sched_setaffinity(0, mine)
    return [
        *(latency_row("process", way, (HERE, THERE), own) for way, own in ways.items()),
        *(latency_row("cores", "eventfd", (f"core {a}", f"core {b}"), own) for (a, b), own in cores.items()),
    ]


def chosen_cores(cores: Sequence[int]) -> list[int]:
    """Give at most CORES_MAX of `cores`, evenly spread, the first and the last among them."""
    if len(cores) <= CORES_MAX:
        return list(cores)
    return [cores[at * (len(cores) - 1) // (CORES_MAX - 1)] for at in range(CORES_MAX)]


def _token(peer: Peer, way: str, repeat: int, rounds: int, cores: Sequence[int]) -> LatencySample:
    peer.order(way, (), rounds=rounds, cores=cores)
    with _gone_as_error():
        times_us = peer.end.ask(way, rounds)
    peer.answer()
    return LatencySample(repeat=repeat, rounds=rounds, p50_us=percentile(times_us, 50), p99_us=percentile(times_us, 99))


def main(given: dict[str, Any]) -> None:
    """Serve one session; `given` has the numbers of descriptors, the TCP port and nbytes."""
    control = socket.socket(fileno=given["control"])
    unix = [socket.socket(fileno=fd) for fd in given["unix"]]
    tcp = [socket.create_connection(("127.0.0.1", given["port"]), WAIT_S) for _ in range(2)]
    for each in (*unix, *tcp):
        each.settimeout(WAIT_S)
    for each in tcp:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # What the other end sends on comes first, and we receive on it.
    sockets = {"unix": (unix[1], unix[0]), "tcp": (tcp[1], tcp[0])}
    ways = Ways(sockets, (given["pipe"][0], given["pipe"][1]), (given["events"][0], given["events"][1]))
    end = End(given["nbytes"], 1, given["shared"], ways)
    with control, control.makefile("rw", encoding="utf-8", newline="\n") as talk:
        for line in talk:
            _obey(end, json.loads(line), talk)


def _obey(end: End, order: dict[str, Any], talk: TextIO) -> None:
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    jobs = order["jobs"]
    end.prepare(order["way"], jobs, order["value"])
    _say(talk, ready=True)
    try:
        if order["rounds"]:
            end.echo(order["way"], order["rounds"])
            _say(talk)
            return
        span = end.work(order["way"], jobs)
        _say(talk, span=span, verified=end.verify(order["way"]) if "receive" in jobs else 0)
    except (KVRedisError, OSError) as error:
        _say(talk, error=f"{type(error).__name__}: {error}")


def _say(talk: TextIO, **answer: Any) -> None:
    talk.write(json.dumps(answer) + "\n")
    talk.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
