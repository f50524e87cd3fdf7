"""A server that answers what the test says: whole replies, halves, lies, or a closed door."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class Leave:
    """Send this and hang up."""

    last_words: bytes = b""


Answer = Callable[[list[bytes]], bytes | Leave]


def polite(args: list[bytes]) -> bytes | Leave:
    """Answer as an empty Redis would."""
    match args[0]:
        case b"PING":
            return b"+PONG\r\n"
        case b"SET":
            return b"+OK\r\n"
        case b"GET":
            return b"$-1\r\n"
        case b"EXISTS" | b"TOUCH" | b"UNLINK":
            return b":0\r\n"
    return b"-ERR unknown command '%b', with args beginning with: \r\n" % args[0]


class FakeServer:
    """Listens on a unix socket; each connection has a thread that answers by `answer`, which a test may change."""

    def __init__(self, folder: Path, answer: Answer = polite) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.url = f"unix://{folder}/fake"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{folder}/fake")
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def named(self, name: bytes) -> list[list[bytes]]:
        """The arguments of each command of that name so far."""
        return [args[1:] for args in self.commands if args[0] == name]

    def close(self) -> None:
        """Hang up on everybody and end."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for client in self._clients:
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:  # gone already
                continue
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._clients.append(client)
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as requests:
            try:
                while args := _read_command(requests):
                    self.commands.append(args)
                    said = self.answer(args)
                    client.sendall(said.last_words if isinstance(said, Leave) else said)
                    if isinstance(said, Leave):
                        return
            except OSError:  # the client has hung up first
                return


def _read_command(requests: BinaryIO) -> list[bytes]:
    header = requests.readline()
    args = []
    for _ in range(int(header[1:] or b"0")):
        length = int(requests.readline()[1:])
        args.append(requests.read(length + 2)[:length])
    return args
