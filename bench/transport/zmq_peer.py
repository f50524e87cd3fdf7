"""The other end of the pyzmq arms: a block store behind zmq sockets, written as the field's benchmarks write it.

Run as `python -m kvredis.bench.transport.zmq_peer BLOCKS BLOCK_BYTES FOLDER`: it binds a REP and a ROUTER socket on TCP
and on a unix socket (zmq's ipc) each, prints one JSON line with their addresses, and serves until its standard input
ends. The pool is one `numpy.empty`, untouched at the start, as theirs is.

A request is [op, ids as little-endian 32-bit words, payload frame per id where it has any]. Frames go out and come in
with copy=False: zmq lends the pool's memory to its I/O thread. Operations:

    GET     one reply with a frame per id                                  (REP)
    PUT     copied into the pool, then acknowledged                        (REP)
    STREAM  a first message with the block size, then a message per id     (ROUTER)
    SET     as PUT                                                         (ROUTER)
    DEFER   acknowledged, then copied by one of four threads               (ROUTER)
    DRAIN   answered when every deferred copy has been made                (ROUTER)
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

COPY_THREADS = 4
POLL_MS = 100  # how soon an end is noticed; requests wake the poll themselves
GET, PUT, STREAM, SET, DEFER, DRAIN = b"GET", b"PUT", b"STREAM", b"SET", b"DEFER", b"DRAIN"
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


def answer_rep(socket: Any, pool: Pool) -> None:
    """Receive one request of a REP socket and answer it."""
    frames = socket.recv_multipart(copy=False)
    op, ids = frames[0].bytes, unpack_ids(frames[1].buffer)
    if op == GET:
        socket.send_multipart([pool.view(block) for block in ids], copy=False)
        return
    if op == PUT:
        pool.put(ids, frames[2:])
    socket.send(DONE if op == PUT else b"ERR unknown operation")


def answer_router(socket: Any, pool: Pool) -> None:
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


def serve(sockets: Sequence[tuple[Any, bool]], pool: Pool, stop: threading.Event) -> None:
    """Answer (socket, whether it is a ROUTER) until `stop` is set; closes the sockets."""
    import zmq

    poller = zmq.Poller()
    routers = dict(sockets)
    for socket in routers:
        poller.register(socket, zmq.POLLIN)
    try:
        while not stop.is_set():
            for socket, _ in poller.poll(POLL_MS):
                (answer_router if routers[socket] else answer_rep)(socket, pool)
    finally:
        for socket in routers:
            socket.close(linger=0)
        pool.close()


def main(count: int, nbytes: int, folder: Path) -> None:
    """See the module's docstring."""
    import zmq

    context, stop, said, sockets = zmq.Context(), threading.Event(), {}, []
    for name, kind in (("rep", zmq.REP), ("router", zmq.ROUTER)):
        for transport, address in (("tcp", "tcp://127.0.0.1:*"), ("ipc", f"ipc://{folder}/{name}.sock")):
            socket = context.socket(kind)
            socket.set_hwm(0)  # the default holds back what is more than a thousand messages
            socket.bind(address)
            said[f"{transport} {name}"] = socket.get_string(zmq.LAST_ENDPOINT)
            sockets.append((socket, kind == zmq.ROUTER))

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    print(json.dumps(said), flush=True)
    serve(sockets, Pool(count, nbytes), stop)
    context.term()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
