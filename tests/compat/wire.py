"""A client that knows the framing of RESP and nothing else: it sends what it is told and returns raw replies."""

import socket
from collections.abc import Sequence

Word = bytes | str
CommandLine = str | Sequence[Word]


def encode(line: CommandLine) -> bytes:
    """A request as an array of bulks; a string is split at spaces."""
    words = line.split(" ") if isinstance(line, str) else line
    raw = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


class Wire:
    """One connection to a unix socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10)
        self._socket.connect(path)
        self._buffer = bytearray()

    def ask(self, line: CommandLine) -> bytes:
        """Send one command; its reply, byte for byte."""
        return self.exchange(encode(line))[0]

    def exchange(self, request: bytes, replies: int = 1) -> list[bytes]:
        """Send bytes as they are and read that many replies."""
        self._socket.sendall(request)
        return [self.read() for _ in range(replies)]

    def read(self) -> bytes:
        """The next reply, however deeply it nests."""
        end = self._reply_end(0)
        reply = bytes(self._buffer[:end])
        del self._buffer[:end]
        return reply

    def at_end(self) -> bool:
        """Whether the server has hung up with nothing unread."""
        return not self._buffer and self._socket.recv(1) == b""

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reply_end(self, at: int) -> int:
        """Where the reply that begins at `at` ends."""
        end = self._line_end(at)
        kind, head = self._buffer[at : at + 1], bytes(self._buffer[at + 1 : end - 2])
        if kind in b"+-:_#,(":
            return end
        count = int(head)
        if kind in b"$=":
            if count < 0:
                return end
            self._need(end + count + 2)
            return end + count + 2
        assert kind in b"*~>%", f"no reply begins with {kind!r}"
        for _ in range(max(count, 0) * (2 if kind == b"%" else 1)):
            end = self._reply_end(end)
        return end

    def _line_end(self, at: int) -> int:
        while (found := self._buffer.find(b"\r\n", at)) < 0:
            self._need(len(self._buffer) + 1)
        return found + 2

    def _need(self, length: int) -> None:
        while len(self._buffer) < length:
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError(f"the server hung up after {bytes(self._buffer)!r}")
            self._buffer += data
