"""A server that answers what the test says: whole replies, halves, lies, or a closed door."""

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class Leave:
    """Send this and hang up."""

    last_words: bytes = b""


@dataclass(frozen=True)
class Drip:
    """Send this in pieces, with a pause before each."""

    words: bytes
    piece_bytes: int = 1
    pause_s: float = 0.02


Said = bytes | Leave | Drip
Answer = Callable[[list[bytes]], Said]


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


class Shelf:
    """Keeps what it was given, of `blocks_max` values those that were used last; of what is touched the first stays
    longest, as with kvredis.

    While `open` is not set it takes no SET, and then each one `lag_s` late, or when something else comes meanwhile:
    what must not overtake a SET is caught in the act. `log` has the commands in the order of their answers.
    """

    def __init__(self, blocks_max: int = 1000) -> None:
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.blocks_max = blocks_max
        self.open = threading.Event()
        self.open.set()
        self.lag_s = 0.0
        self._overtaken = threading.Event()
        self.log: list[tuple[bytes, ...]] = []
        self._lock = threading.Lock()

    def __call__(self, args: list[bytes]) -> bytes | Leave:
        """Answer a command."""
        if args[0] == b"SET":
            self.open.wait()
            self._overtaken.wait(self.lag_s)
        elif args[0] != b"PING":
            self._overtaken.set()
        with self._lock:
            self.log.append((args[0], args[1] if len(args) > 1 else b""))
            present = [key for key in args[1:] if key in self.values]
            match args[0]:
                case b"SET":
                    self.values.pop(args[1], None)
                    while len(self.values) >= self.blocks_max:
                        self.values.popitem(last=False)
                    self.values[args[1]] = args[2]
                case b"GET" if present:
                    return b"$%d\r\n%b\r\n" % (len(self.values[args[1]]), self.values[args[1]])
                case b"EXISTS":
                    return b":%d\r\n" % len(present)
                case b"TOUCH":
                    for key in reversed(present):
                        self.values.move_to_end(key)
                    return b":%d\r\n" % len(present)
                case b"UNLINK":
                    return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in present)
        return polite(args)


class FakeServer:
    """Listens on a unix socket in `folder`, or on loopback where there is none; each connection has a thread that
    answers by `answer`, which a test may change."""

    def __init__(self, folder: Path | None, answer: Answer = polite) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.port = 0
        if folder is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.port = self._listener.getsockname()[1]
            self.url = f"redis://127.0.0.1:{self.port}"
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"{folder}/fake")
            self.url = f"unix://{folder}/fake"
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def named(self, name: bytes) -> list[list[bytes]]:
        """The arguments of each command of that name so far."""
        return [args[1:] for args in self.commands if args[0] == name]

    def hang_up(self) -> None:
        """Hang up on all clients that are connected now."""
        for client in self._clients:
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:  # gone already
                continue

    def close(self) -> None:
        """Hang up on all clients and end."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.hang_up()
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
                    _say(client, said)
                    if isinstance(said, Leave):
                        return
            except OSError:  # the client has hung up first
                return


def _say(client: socket.socket, said: Said) -> None:
    if isinstance(said, Drip):
        for start in range(0, len(said.words), said.piece_bytes):
            threading.Event().wait(said.pause_s)
            client.sendall(said.words[start : start + said.piece_bytes])
    else:
        client.sendall(said.last_words if isinstance(said, Leave) else said)


def _read_command(requests: BinaryIO) -> list[bytes]:
    header = requests.readline()
    args = []
    for _ in range(int(header[1:] or b"0")):
        length = int(requests.readline()[1:])
        args.append(requests.read(length + 2)[:length])
    return args
