"""Two scripted nodes that say of a cluster what the test says, and keep what they are given."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Self

from kvredis.backends.resp.cluster import SLOTS, slot_of
from tests.backends.fake_server import Answer, FakeServer, Said, Shelf

HOST: Final = b"127.0.0.1"
KEYS: Final = [b"{tag}%d" % number for number in range(6)]
"""Keys of one slot."""
SLOT: Final = slot_of(KEYS[0])


def moved(port: int, kind: bytes = b"MOVED", host: bytes = HOST) -> bytes:
    """A redirection of the slot of KEYS."""
    return b"-%b %d %b:%d\r\n" % (kind, SLOT, host, port)


def slots(*ports: int) -> bytes:
    """CLUSTER SLOTS of that many masters, the slots evenly among them."""
    rows = [
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n"
        % (SLOTS * number // len(ports), SLOTS * (number + 1) // len(ports) - 1, len(HOST), HOST, port)
        for number, port in enumerate(ports)
    ]
    return b"*%d\r\n%b" % (len(rows), b"".join(rows))


def member(table: Callable[[], bytes], answer: Answer) -> Answer:
    """A node that gives `table` for CLUSTER SLOTS and answers the rest by `answer`."""

    def say(args: list[bytes]) -> Said:
        if args[0] == b"CLUSTER":
            return table()
        return b"+OK\r\n" if args[0] in (b"ASKING", b"CLIENT") else answer(args)

    return say


class Pair:
    """Two fake nodes, until a with-block ends; `table` is what both say of the slots: at first the first has all."""

    def __init__(self) -> None:
        self._exit = ExitStack()
        self.nodes = [FakeServer(None), FakeServer(None)]
        self.ports = [node.port for node in self.nodes]
        self.shelves = [Shelf(), Shelf()]
        self.table = slots(self.ports[0])
        for node, shelf in zip(self.nodes, self.shelves, strict=True):
            self._exit.callback(node.close)
            self.answers(node, shelf)

    def answers(self, node: FakeServer, answer: Answer) -> None:
        """Have a node answer so from now on."""
        node.answer = member(lambda: self.table, answer)

    def open(self) -> None:
        """Let the shelves take what they are given, so that senders that wait for them end."""
        for shelf in self.shelves:
            shelf.open.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
