"""What goes between two processes of this machine: sockets, shared memory, and a token's way from core to core.

The other process is peer.py. One way is measured in both directions, since who sends and who receives need not be
alike; both ways at once are two sockets, and two threads in each process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations_with_replacement
from typing import Any, Final

from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import child_environment
from kvredis.bench.core.statistics import GB, percentile

from .ends import SHARED, WAIT_S, End, Span, Ways
from .result import CopyRow, CopySample, Direction, LatencyRow, LatencySample, Link, copy_row, latency_row

HERE, THERE = "process 0", "process 1"
COPY_WAYS: Final = ("tcp", "unix", SHARED)
TOKEN_WAYS: Final = ("eventfd", "pipe", "unix", "tcp")
CORES_MAX: Final = 8
"""So many cores, evenly chosen, are paired; more would take minutes and make a matrix that nobody reads."""
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
            [sys.executable, "-m", "kvredis.bench.links.peer", json.dumps(given)],
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
        # Whoever waits for a token over an eventfd would not hear that the other process has died.
        watcher = threading.Thread(target=self._watch, args=(events[1],), daemon=True)
        watcher.start()
        stack.callback(watcher.join)
        stack.callback(self._end)  # before the descriptors are closed, or the watcher would write to somebody else's

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


def run_copies(peer: Peer, repeats: int, progress: Progress) -> list[CopyRow]:
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
    if way == SHARED:  # whoever only wrote did so before the clock started
        spans = [span for span, jobs in zip(spans, (ours, theirs), strict=True) if "receive" in jobs]
    seconds = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    nbytes = peer.end.nbytes * len(ours)
    return CopySample(
        repeat=repeat,
        seconds=seconds,
        gb_per_s=nbytes / seconds / GB,
        verified_bytes=verified + answer["verified"],
    )


def run_tokens(peer: Peer, repeats: int, rounds: int, progress: Progress) -> list[LatencyRow]:
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
