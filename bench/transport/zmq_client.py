"""pyzmq's side of the comparison: the peer as a process or a thread, and a client that moves whole batches.

Loaded only where pyzmq is installed; `missing()` says when it is not. The client does what the field's does: frames are
received with copy=False and then copied into place, or, in an arm of its own, received into place by recv_into.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Literal

from kvredis import install_line
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.servers import READY_WAIT_S, STOP_WAIT_S, child_environment, end_child, process_cpu_s

from .zmq_peer import DEFER, DONE, DRAIN, GET, PUT, SET, STREAM, Pool, pack_ids, serve

ZmqTransport = Literal["tcp", "ipc", "inproc"]
SILENCE_MS = 60_000
_ERROR_BYTES_SHOWN = 120


def missing() -> str | None:
    """Say why pyzmq cannot take part, None when it can."""
    return None if importlib.util.find_spec("zmq") else f"pyzmq is not installed: {install_line('bench')}"


class ZmqProcess:
    """The peer as a process of its own. Use it in a with-block: at its end the process and its folder are gone."""

    name = "pyzmq"

    def __init__(self, count: int, nbytes: int) -> None:
        self._shape = (count, nbytes)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> ZmqProcess:
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-")
        command = [sys.executable, "-m", "kvredis.bench.transport.zmq_peer", *map(str, self._shape), self._folder.name]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(os.environ),
                cwd=self._folder.name,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            watch = threading.Timer(READY_WAIT_S, self._process.kill)
            watch.start()
            try:
                line = self._process.stdout.readline()  # empty when it ends, and after READY_WAIT_S it has
            finally:
                watch.cancel()  # also when interrupted: the interpreter ends no sooner than the timer
                watch.join()
            if not line:
                raise BenchError(f"{' '.join(command)} did not come up")
            self._addresses = json.loads(line)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process, by closing its input, after STOP_WAIT_S by force; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdout is not None
            end_child(process, STOP_WAIT_S)
            process.stdout.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def cpu_s(self) -> float:
        """Give the CPU seconds of all its threads, zmq's too."""
        assert self._process is not None, "the peer is not running"
        return process_cpu_s(self._process.pid)

    def connect(self, transport: ZmqTransport) -> ZmqClient:
        return ZmqClient(self._addresses[f"{transport} rep"], self._addresses[f"{transport} router"])


class ZmqThread:
    """The peer as a thread of this process, over inproc: no kernel in between, one CPU account for both ends."""

    name = "pyzmq"

    def __init__(self, count: int, nbytes: int) -> None:
        import zmq

        self._context, self._stop = zmq.Context(), threading.Event()
        sockets: list[tuple[Any, bool]] = []
        for name, kind in (("rep", zmq.REP), ("router", zmq.ROUTER)):
            socket = self._context.socket(kind)
            socket.set_hwm(0)
            socket.bind(f"inproc://{name}")
            sockets.append((socket, kind == zmq.ROUTER))
        self._thread = threading.Thread(target=serve, args=(sockets, Pool(count, nbytes), self._stop))

    def __enter__(self) -> ZmqThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()

    def cpu_s(self) -> float:
        """Nothing of its own: what it uses is in the client's account."""
        return 0.0

    def connect(self) -> ZmqClient:
        return ZmqClient("inproc://rep", "inproc://router", self._context)


class ZmqClient:
    """One REQ and one DEALER socket. Every method raises BenchError when the peer says nothing or something wrong."""

    def __init__(self, rep: str, router: str, context: Any = None) -> None:
        import zmq

        self._zmq = zmq
        made = context or zmq.Context()
        self._own = None if context else made
        self._request, self._dealer = made.socket(zmq.REQ), made.socket(zmq.DEALER)
        for socket, address in ((self._request, rep), (self._dealer, router)):
            socket.set_hwm(0)
            socket.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
            socket.setsockopt(zmq.SNDTIMEO, SILENCE_MS)
            socket.connect(address)

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close both sockets; what was not sent is dropped."""
        self._request.close(linger=0)
        self._dealer.close(linger=0)
        if self._own is not None:
            self._own.term()

    def get(self, ids: Sequence[int], places: Sequence[memoryview]) -> None:
        """One request, one reply with all blocks, each then copied into its place."""
        try:
            self._request.send_multipart([GET, pack_ids(ids)])
            frames = self._request.recv_multipart(copy=False)
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error
        self._counted(frames, places)
        for frame, place in zip(frames, places, strict=True):
            place[:] = frame.buffer

    def get_into(self, ids: Sequence[int], places: Sequence[memoryview]) -> None:
        """One request, one reply; each frame is received into its place by zmq itself."""
        try:
            self._request.send_multipart([GET, pack_ids(ids)])
            for place in places:
                self._sized(self._request.recv_into(place), place)
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error
        if self._request.getsockopt(self._zmq.RCVMORE):
            raise BenchError("pyzmq: more frames than blocks were asked for")

    def stream(self, ids: Sequence[int], places: Sequence[memoryview]) -> None:
        """One message with the size, then one for each block, copied into its place while the next ones arrive."""
        try:
            self._dealer.send_multipart([STREAM, pack_ids(ids)])
            self._expect(self._dealer.recv(), b"%d" % len(places[0]))
            for place in places:
                frame = self._dealer.recv(copy=False)
                self._sized(len(frame.buffer), place)
                place[:] = frame.buffer
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error

    def put(self, ids: Sequence[int], values: Sequence[memoryview]) -> None:
        """One request with all blocks; answered when they have been copied."""
        try:
            self._request.send_multipart([PUT, pack_ids(ids), *values], copy=False)
            self._expect(self._request.recv(), DONE)
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error

    def set(self, ids: Sequence[int], values: Sequence[memoryview], *, deferred: bool) -> None:
        """The same by the ROUTER; `deferred` is answered when all of it has arrived, before the copy."""
        try:
            self._dealer.send_multipart([DEFER if deferred else SET, pack_ids(ids), *values], copy=False)
            self._expect(self._dealer.recv(), DONE)
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error

    def drain(self) -> None:
        """Wait until every deferred copy has been made."""
        try:
            self._dealer.send_multipart([DRAIN, b""])
            self._expect(self._dealer.recv(), DONE)
        except self._zmq.ZMQError as error:
            raise BenchError(f"pyzmq: {error}") from error

    def _counted(self, frames: Sequence[Any], places: Sequence[memoryview]) -> None:
        if [len(frame.buffer) for frame in frames] != [len(place) for place in places]:
            raise BenchError(f"pyzmq: asked for {len(places)} blocks, got {len(frames)} frames of another shape")

    def _sized(self, nbytes: int, place: memoryview) -> None:
        if nbytes != len(place):
            raise BenchError(f"pyzmq: a block of {nbytes} bytes instead of {len(place)}")

    def _expect(self, said: bytes, wanted: bytes) -> None:
        if said != wanted:
            raise BenchError(f"pyzmq: expected {wanted!r}, the peer answered {said[:_ERROR_BYTES_SHOWN]!r}")
