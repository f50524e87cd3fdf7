"""pyzmq beside us: a block store behind zmq sockets, written as the field's benchmarks write it, and its client.

Loaded only where pyzmq is installed; `missing()` says when it is not. Frames go out and come in with copy=False: zmq
lends memory to its I/O thread. The client copies what it has received into place.

Run as `python -m kvredis.bench.transport.pyzmq BLOCKS BLOCK_BYTES FOLDER` this is the store: it binds a ROUTER socket
on TCP and one on a unix socket (zmq's ipc), prints one JSON line with their addresses, and serves until its standard
input ends. The pool is one `numpy.empty`, untouched at the start, as theirs is. A request is [op, ids as little-endian
32-bit words, payload frame per id where it has any]:

    STREAM  a first message with the block size, then a message per id
    SET     copied into the pool, then acknowledged
    DEFER   acknowledged, then copied by one of four threads
    DRAIN   answered when every deferred copy has been made
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, Self

from kvredis import install_line
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.servers import READY_WAIT_S, child_environment, process_cpu_s

ZmqTransport = Literal["tcp", "ipc"]
SILENCE_MS = 60_000
_ERROR_BYTES_SHOWN = 120


def missing() -> str | None:
    """Say why pyzmq cannot take part, None when it can."""
    return None if importlib.util.find_spec("zmq") else f"pyzmq is not installed: {install_line('bench')}"


class ZmqProcess(LineProcess):
    """The peer as a process of its own. Use it in a with-block: at its end the process and its folder are gone."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._socket_folder = tempfile.TemporaryDirectory(prefix="kvbench-")
        command = [sys.executable, "-m", __spec__.name, str(count), str(nbytes), self._socket_folder.name]
        super().__init__("the pyzmq peer", command, child_environment(os.environ))
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._addresses = self.answer(READY_WAIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._socket_folder.cleanup()

    def cpu_s(self) -> float:
        """Give the CPU seconds of all its threads, zmq's too."""
        return process_cpu_s(self.pid)

    def connect(self, transport: ZmqTransport) -> ZmqClient:
        return ZmqClient(self._addresses[transport])


class ZmqClient:
    """A DEALER socket. Every method raises BenchError when the peer says nothing or something wrong."""

    def __init__(self, address: str) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set_hwm(0)
        self._dealer.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
        self._dealer.setsockopt(zmq.SNDTIMEO, SILENCE_MS)
        self._dealer.connect(address)

    def __enter__(self) -> ZmqClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self._dealer.close(linger=0)
        self._context.term()

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

    def set(self, ids: Sequence[int], values: Sequence[memoryview], *, deferred: bool) -> None:
        """One message with all blocks, answered when they have been copied; `deferred`: when all of it has arrived."""
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

    def _sized(self, nbytes: int, place: memoryview) -> None:
        if nbytes != len(place):
            raise BenchError(f"pyzmq: a block of {nbytes} bytes instead of {len(place)}")

    def _expect(self, said: bytes, wanted: bytes) -> None:
        if said != wanted:
            raise BenchError(f"pyzmq: expected {wanted!r}, the peer answered {said[:_ERROR_BYTES_SHOWN]!r}")


COPY_THREADS = 4
POLL_MS = 100  # how soon an end is noticed; requests wake the poll themselves
STREAM, SET, DEFER, DRAIN = b"STREAM", b"SET", b"DEFER", b"DRAIN"
DONE = b"OK"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Write block numbers as a frame."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(frame: Any) -> tuple[int, ...]:
    """Read block numbers from a frame."""
    return struct.unpack(f"<{len(frame) // 4}I", frame)


class Pool:
    """The blocks. A deferred copy holds its message's frames until it is made."""

    def __init__(self, count: int, nbytes: int) -> None:
        import numpy

        self.rows = numpy.empty((count, nbytes), numpy.uint8)
        self._threads = ThreadPoolExecutor(COPY_THREADS)
        self._pending: list[Future[None]] = []

    def view(self, block: int) -> Any:
        return self.rows[block]

    def put(self, ids: Sequence[int], frames: Sequence[Any]) -> None:
        """Copy each frame to its block; numpy lets other threads run meanwhile."""
        import numpy

        for block, frame in zip(ids, frames, strict=True):
            self.rows[block] = numpy.frombuffer(frame.buffer, numpy.uint8)

    def defer(self, ids: Sequence[int], frames: Sequence[Any]) -> None:
        self._pending.append(self._threads.submit(self.put, ids, frames))

    def drain(self) -> None:
        """Wait for every deferred copy; raises what one of them raised."""
        pending, self._pending = self._pending, []
        wait(pending)
        for each in pending:
            each.result()

    def close(self) -> None:
        self._threads.shutdown()


def answer(socket: Any, pool: Pool) -> None:
    """Receive one request of a ROUTER socket and answer it; the first frame says who asks."""
    who, *frames = socket.recv_multipart(copy=False)
    op, ids = frames[0].bytes, unpack_ids(frames[1].buffer)
    if op == STREAM:
        socket.send_multipart([who, b"%d" % pool.rows.shape[1]])
        for block in ids:
            socket.send_multipart([who, pool.view(block)], copy=False)
        return
    if op == SET:
        pool.put(ids, frames[2:])
    elif op == DRAIN:
        pool.drain()
    socket.send_multipart([who, DONE if op in (SET, DEFER, DRAIN) else b"ERR unknown operation"])
    if op == DEFER:
        pool.defer(ids, frames[2:])


def serve(sockets: Sequence[Any], pool: Pool, stop: threading.Event) -> None:
    """Answer ROUTER sockets until `stop` is set, and close them."""
    import zmq

    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    try:
        while not stop.is_set():
            for socket, _ in poller.poll(POLL_MS):
                answer(socket, pool)
    finally:
        for socket in sockets:
            socket.close(linger=0)
        pool.close()


def main(count: int, nbytes: int, folder: Path) -> None:
    """See the module's docstring."""
    import zmq

    context, stop, said, sockets = zmq.Context(), threading.Event(), {}, []
    for transport, address in (("tcp", "tcp://127.0.0.1:*"), ("ipc", f"ipc://{folder}/router.sock")):
        socket = context.socket(zmq.ROUTER)
        socket.set_hwm(0)  # the default holds back what is more than a thousand messages
        socket.bind(address)
        said[transport] = socket.get_string(zmq.LAST_ENDPOINT)
        sockets.append(socket)

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps(said), flush=True)
    serve(sockets, Pool(count, nbytes), stop)
    context.term()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
