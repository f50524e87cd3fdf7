"""A TCP proxy that passes on so many bytes a second and no more: it stands for a slow link.

A process of its own, since a thread would take turns with the client that is measured:
`python -m kvredis.bench.slow_remote.throttle HOST PORT` prints the port of 127.0.0.1 where it listens, and then reads
lines of JSON from its standard input: `bytes_per_s` for each direction, all connections together, 0 for as many as
there are. It answers each with the same line, and ends with the input.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Final, Self

from kvredis.backends.config.url import Address
from kvredis.bench.core.line_process import LineProcess
from kvredis.bench.core.servers import READY_WAIT_S, child_environment

_SLICE_BYTES: Final = 64 * 1024
"""What is passed on at a time on a slow link: about a millisecond of 50 MB/s."""
_LATE_S: Final = 0.005
"""A link goes on while we are not run; so much of what it could have passed on meanwhile is made up for."""
_PART_BYTES: Final = 1024 * 1024


class Link:
    """One direction. A thread that wants to pass bytes on waits until all threads' bytes before them have gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_s = 0.0
        self._free_at_s = 0.0

    @property
    def slice_bytes(self) -> int:
        """How much to pass on at a time."""
        return _SLICE_BYTES if self._bytes_per_s else _PART_BYTES

    def limit(self, bytes_per_s: float) -> None:
        """Set the speed, 0 for none."""
        with self._lock:
            self._bytes_per_s = bytes_per_s
            self._free_at_s = 0.0

    def take(self, count: int) -> None:
        """Wait until `count` bytes have gone."""
        with self._lock:
            if not self._bytes_per_s:
                return
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s - _LATE_S) + count / self._bytes_per_s
            wait_s = self._free_at_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)


class Throttle(LineProcess):
    """The proxy before the TCP server at `address`, without a limit at first. Use it in a with-block."""

    def __init__(self, address: Address) -> None:
        command = [sys.executable, "-m", __spec__.name, address.host, str(address.port)]
        super().__init__("the throttling proxy", command, child_environment(os.environ))
        self.address = Address(port=0)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.address = Address(host="127.0.0.1", port=self.answer(READY_WAIT_S)["port"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def limit(self, bytes_per_s: float) -> None:
        """Pass on so many bytes a second from now on, each way; 0: as many as there are."""
        self.tell({"bytes_per_s": bytes_per_s})
        self.answer(READY_WAIT_S)


def _pass_on(source: socket.socket, target: socket.socket, link: Link) -> None:
    """Until one of the two ends; then the other is told."""
    memory = memoryview(bytearray(_PART_BYTES))
    try:
        while count := source.recv_into(memory[: link.slice_bytes]):
            link.take(count)
            target.sendall(memory[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one has hung up in the middle: so does the other
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _serve(client: socket.socket, server: tuple[str, int], links: tuple[Link, Link]) -> None:
    with client:
        try:
            remote = socket.create_connection(server)
        except OSError:
            return
        with remote:
            for each in (client, remote):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            there = threading.Thread(target=_pass_on, args=(client, remote, links[0]), daemon=True)
            there.start()
            _pass_on(remote, client, links[1])
            there.join()


def _accept(listener: socket.socket, server: tuple[str, int], links: tuple[Link, Link]) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_serve, args=(client, server, links), daemon=True).start()


def main(host: str, port: str) -> None:
    """Be the proxy before HOST PORT, until standard input ends."""
    links = (Link(), Link())
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, (host, int(port)), links), daemon=True).start()
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    for line in sys.stdin:
        for link in links:
            link.limit(json.loads(line)["bytes_per_s"])
        print(line, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
