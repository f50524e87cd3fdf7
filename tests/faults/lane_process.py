"""A client of the lane in a process of its own, which gets into the state that it is told and stays there until it is
killed or hears a line on its standard input. Standard library only, so that it starts at once.

    python -m tests.faults.lane_process SOCKET STATE
"""

import array
import fcntl
import hashlib
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

MIB: Final = 1024 * 1024
LENT_BYTES: Final = 8 * MIB


def request(*words: str | int) -> bytes:
    """A command."""
    raw = [str(word).encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def memory(nbytes: int = LENT_BYTES, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """A sealed memfd that is not empty."""
    fd = os.memfd_create("lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, b"lent" * 1000, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Peer:
    """A blocking connection."""

    def __init__(self, path: str) -> None:
        self.link = socket.socket(socket.AF_UNIX)
        self.link.connect(path)
        self._unread = b""

    def ask(self, *words: str | int) -> list[int | bytes | None]:
        """A command whose reply is an array of numbers and nils, or one line: all of it as a flat list."""
        self.link.sendall(request(*words))
        return self._reply()

    def attach(self) -> None:
        """KV.ATTACH, with the arena mapped."""
        self.link.sendall(request("KV.ATTACH"))
        _, ancillary, _, _ = self.link.recvmsg(4096, socket.CMSG_SPACE(8))  # sent at once, so it comes at once
        descriptors = array.array("i", ancillary[0][2])
        self.arena = mmap.mmap(descriptors[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self.side = socket.socket(fileno=descriptors[1])

    def _reply(self) -> list[int | bytes | None]:
        line = self._line()
        if line[:1] == b"*":
            return [each for _ in range(int(line[1:])) for each in self._reply()]
        if line == b"$-1":
            return [None]
        return [int(line[1:])] if line[:1] == b":" else [line]

    def _line(self) -> bytes:
        while b"\r\n" not in self._unread:
            self._unread += self.link.recv(4096)
        line, _, self._unread = self._unread.partition(b"\r\n")
        return line


def lend(peer: Peer) -> None:
    """Attach and lend 8 MiB."""
    peer.attach()
    socket.send_fds(peer.side, [b"m"], [memory()])
    assert peer.ask("KV.LEND") == [LENT_BYTES]


def lease(peer: Peer) -> None:
    """Attach and lease twice the one block and once the other."""
    peer.attach()
    assert None not in peer.ask("KV.LEASE", 600_000, "kept", "big", "kept")


def reserve(peer: Peer) -> None:
    """Lend, and half fill a reservation."""
    lend(peer)
    number = peer.ask("KV.RESERVE", "new", 4 * MIB)[0]
    assert peer.ask("KV.FILL", str(number), 0, 0, 2 * MIB) == [b"+OK"]


def put_many(peer: Peer) -> None:
    """Lend, and ask for more copies than any client waits for."""
    lend(peer)
    peer.link.sendall(b"".join(request("KV.PUT", f"put{n}", 0, LENT_BYTES) for n in range(50)))


def send_descriptors(peer: Peer) -> None:
    """Send memory, and half of the command that takes it."""
    peer.attach()
    socket.send_fds(peer.side, [b"m"], [memory()])
    peer.link.sendall(request("KV.LEND")[:-5])


def flood(peer: Peer) -> None:
    """Send as many descriptors as the channel takes."""
    peer.attach()
    peer.side.setblocking(False)
    fd = memory()
    try:
        while True:
            socket.send_fds(peer.side, [b"m"], [fd] * 200)
    except BlockingIOError:
        pass


STATES: Final[dict[str, Callable[[Peer], object]]] = {
    "half an attach": lambda peer: peer.link.sendall(request("KV.ATTACH")[:-3]),
    "attached and not read": lambda peer: peer.link.sendall(request("KV.ATTACH")),
    "attached": Peer.attach,
    "leased": lease,
    "lent": lend,
    "in the middle of lending": send_descriptors,
    "reserved": reserve,
    "in the middle of many puts": put_many,
    "flooding": flood,
}


def read_on(peer: Peer) -> None:
    """Lease, wait to be told, then look at every byte of the arena: say what the leased ones are and whether the server
    is there."""
    peer.attach()
    offset, length = peer.ask("KV.LEASE", 600_000, "kept")
    assert isinstance(offset, int)
    assert isinstance(length, int)
    print("leased", flush=True)
    sys.stdin.readline()
    sum(len(peer.arena[at : at + MIB]) for at in range(0, len(peer.arena), MIB))
    poll = select.poll()
    poll.register(peer.link, select.POLLRDHUP)
    gone = bool(poll.poll(0))
    print(hashlib.sha256(peer.arena[offset : offset + length]).hexdigest(), "gone" if gone else "there", flush=True)


def main() -> None:
    """Get into the state, say so, and stay."""
    peer = Peer(sys.argv[1])
    if sys.argv[2] == "reading on":
        read_on(peer)
        return
    STATES[sys.argv[2]](peer)
    print("there", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
