"""A RESP server in a few lines that can be told to be wrong: what the bench must notice, it is shown with this one.

Run as a program (`fake_server.py PORT FAULT`) it listens on 127.0.0.1; in a test each connection is a socket pair.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, cast

from kvredis.bench.core.result import load as load_result
from kvredis.bench.core.wire import Resp, Wire
from kvredis.bench.server.run import SCHEMA, BenchResult

FAULTS = (
    "none",
    "flips a byte",
    "forgets a SET",
    "swaps two keys",
    "cuts a value",
    "refuses",
    "hangs up",
    "claims all keys",
    "misses a key",
)


class FakeStore:
    """A dict of values; `fault` names what goes wrong, always on the second key of the bench's working set."""

    def __init__(self, fault: str = "none") -> None:
        self.values: dict[bytes, bytes] = {}
        self.fault = fault

    def answer(self, words: list[bytes]) -> bytes | None:
        """Give the reply to one command, None to hang up."""
        verb, second = words[0].upper(), len(words) > 1 and words[1].endswith(b":00001")
        if verb == b"PING":
            return b"+PONG\r\n"
        if verb == b"FLUSHALL":
            self.values.clear()
            return b"+OK\r\n"
        if verb == b"INFO":
            return bulk(b"redis_version:0\r\n")
        if verb == b"CLIENT":
            return b"-ERR unknown command 'CLIENT'\r\n"
        if verb == b"SET":
            if not (second and self.fault == "forgets a SET" and words[1] in self.values):
                self.values[words[1]] = words[2]
            return b"+OK\r\n"
        if verb in (b"EXISTS", b"KV.MATCH"):
            found = sum(key in self.values for key in words[1:])
            if self.fault == "claims all keys":
                found = len(words) - 1
            return b":%d\r\n" % (found - (found > 0 and self.fault == "misses a key"))
        if verb == b"MGET":
            replies = [self.answer([b"GET", key]) for key in words[1:]]
            return None if None in replies else b"*%d\r\n" % len(replies) + b"".join(filter(None, replies))
        value = self.values.get(words[1])
        if value is None:
            return b"$-1\r\n"
        return self._wrong(words[1], value) if second else bulk(value)

    def _wrong(self, key: bytes, value: bytes) -> bytes | None:
        if self.fault == "flips a byte":
            return bulk(value[:1000] + bytes([value[1000] ^ 1]) + value[1001:])
        if self.fault == "swaps two keys":
            return bulk(self.values[key.replace(b":00001", b":00000")])
        if self.fault == "cuts a value":
            return bulk(value[:-1])
        if self.fault == "refuses":
            return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        return None if self.fault == "hangs up" else bulk(value)


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def serve(sock: socket.socket, store: FakeStore) -> None:
    """Answer one connection until it ends."""
    with sock, sock.makefile("rb") as reader:
        try:
            while words := read_command(reader):
                reply = store.answer(words)
                if reply is None:
                    return
                sock.sendall(reply)
        except OSError:
            return  # the bench has given up on us, as it should on a wrong server


def read_command(reader: BinaryIO) -> list[bytes]:
    """Read one array of bulk strings; empty at the end of the connection."""
    header = reader.readline()
    words = []
    for _ in range(int(header[1:] or b"0")):
        length = int(reader.readline()[1:])
        words.append(reader.read(length + 2)[:-2])
    return words


def load(path: Path) -> BenchResult:
    """Read a result of `bench server`, with the parts that are younger than it."""
    return cast(BenchResult, {"lookup": [], "held": [], "deferred": [], "t0": []} | load_result(path, SCHEMA))


class FakePeer:
    """The store as the bench's arms see a server."""

    def __init__(self, name: str = "redis", fault: str = "none") -> None:
        self.name = name
        self.store = FakeStore(fault)
        self.pinned_to: list[set[int]] = []
        self._threads: list[threading.Thread] = []

    def connect(self) -> Wire:
        ours, theirs = socket.socketpair()
        self._threads.append(threading.Thread(target=serve, args=(theirs, self.store)))
        self._threads[-1].start()
        return Wire(ours, Resp(), silence_s=10)

    def cpu_s(self) -> float:
        return 0.0

    def pin(self, cpus: Collection[int]) -> None:
        self.pinned_to.append(set(cpus))

    def join(self) -> None:
        """Wait for every connection's end: the bench has closed its own."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), "the bench left a connection open"


if __name__ == "__main__":
    shared = FakeStore(sys.argv[2])
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection, shared), daemon=True).start()
