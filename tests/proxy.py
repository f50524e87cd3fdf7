"""A TCP proxy in front of a server, which makes the network between them as bad as a test says, and good again."""

import contextlib
import math
import socket
import struct
import threading
import time
from typing import Final, Literal, Self

HOST: Final = "127.0.0.1"
PIECE_BYTES: Final = 64 << 10
"""Read at once; also what a direction holds back while it waits for its turn."""
SLICES_PER_S: Final = 50
"""A throttled direction lets through pieces of such a fraction of a second."""
JOIN_S: Final = 30

Way = Literal["up", "down"]
"""From the client to the server, and back."""
Trouble = Literal["none", "hang", "cut", "corrupt"]


class Proxy:
    """Listens on a free port of loopback and forwards each connection to `upstream` (host, port); a context manager.

    Its behaviour may be changed by any thread at any time, for the connections that there are and for those to come. A
    connection whose server is not there is closed at once.
    """

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.connections = 0
        self.passed_bytes: dict[Way, int] = {"up": 0, "down": 0}
        self._changed = threading.Condition()
        self._trouble: Trouble = "none"
        self._good_bytes = 0
        self._rates: dict[Way, float] = {"up": math.inf, "down": math.inf}
        self._turn_s: dict[Way, float] = {"up": 0.0, "down": 0.0}
        self._is_closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """host:port of the proxy."""
        return f"{HOST}:{self.port}"

    def throttle(self, *, up: float = math.inf, down: float = math.inf) -> None:
        """Let through at most so many bytes a second each way, all connections together."""
        with self._changed:
            self._rates = {"up": up, "down": down}
            self._turn_s = dict.fromkeys(self._turn_s, time.monotonic())
            self._changed.notify_all()

    def hang(self, after_bytes: int = 0) -> None:
        """Accept, and once so many more bytes of answers have passed, let through nothing either way."""
        self._begin("hang", after_bytes)

    def cut(self, after_bytes: int = 0) -> None:
        """End connections once so many more bytes of answers have passed: the one that gets the last of them at once,
        others, new ones too, with their next byte; with 0 all are reset now.
        """
        self._begin("cut", after_bytes)

    def corrupt(self, after_bytes: int = 0) -> None:
        """Invert every bit of the answers, once so many more bytes of them have passed."""
        self._begin("corrupt", after_bytes)

    def heal(self) -> None:
        """Forward as fast as it goes again; what was held back goes first."""
        with self._changed:
            self._trouble = "none"
            self._rates = dict.fromkeys(self._rates, math.inf)
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections, the listener and the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        _hang_up(self._listener)
        self._threads[0].join(JOIN_S)
        self._reset_all()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, trouble: Trouble, after_bytes: int) -> None:
        with self._changed:
            self._trouble, self._good_bytes = trouble, after_bytes
            self._changed.notify_all()
        if trouble == "cut" and not after_bytes:
            self._reset_all()

    def _reset_all(self) -> None:
        with self._changed:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            _hang_up(one)

    # -- one connection ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(client,), name="proxied")
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self.upstream, JOIN_S) as server:
            server.settimeout(None)
            with self._changed:
                if self._is_closed:
                    return
                self._sockets |= {client, server}
            answers = threading.Thread(target=self._pump, args=(server, client, "down"), name="answers")
            answers.start()
            self._pump(client, server, "up")
            answers.join(JOIN_S)
            with self._changed:
                self._sockets -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        """Forward until either end is gone, and take the other with it."""
        try:
            while data := source.recv(self._piece_bytes(way)):
                self._wait_for_turn(way, len(data))
                self._forward(memoryview(data), sink, way)
        except OSError:  # reset by an end, or by us
            pass
        finally:
            _hang_up(source)
            _hang_up(sink)

    def _forward(self, data: memoryview, sink: socket.socket, way: Way) -> None:
        while data:
            count, is_good = self._allowed(len(data), way)
            sink.sendall(data[:count] if is_good else bytes(byte ^ 0xFF for byte in data[:count]))
            data = data[count:]
            with self._changed:
                self.passed_bytes[way] += count

    def _allowed(self, nbytes: int, way: Way) -> tuple[int, bool]:
        """Say how many of so many bytes may go on now, and whether as they are; blocks while none may. Raises
        ConnectionAbortedError when the connection is to end.
        """
        with self._changed:
            while not self._is_closed:
                if self._trouble == "none" or (way == "up" and self._good_bytes):
                    return nbytes, True
                if self._good_bytes:
                    count = min(nbytes, self._good_bytes)
                    self._good_bytes -= count
                    return count, True
                if self._trouble == "corrupt":
                    return nbytes, way == "up"
                if self._trouble == "cut":
                    break
                self._changed.wait()
        raise ConnectionAbortedError

    def _piece_bytes(self, way: Way) -> int:
        return max(1, int(min(PIECE_BYTES, self._rates[way] / SLICES_PER_S)))

    def _wait_for_turn(self, way: Way, nbytes: int) -> None:
        with self._changed:
            if self._rates[way] < math.inf:
                self._turn_s[way] = max(self._turn_s[way], time.monotonic()) + nbytes / self._rates[way]
            while self._rates[way] < math.inf and not self._is_closed:
                left_s = self._turn_s[way] - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        one.shutdown(socket.SHUT_RDWR)
