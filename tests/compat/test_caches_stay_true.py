"""The promise of client-side caching, under a random walk: no copy that a client keeps is ever out of date.

Clients in every mode of tracking read, keep what they have read, and write, while keys expire, are evicted, flushed,
and fall out of a tracking table that is too small. After each step a client without copies looks at every key, and each
client with a copy, having read all that it was told by then, must have the same.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.wire import CommandLine, Wire, Word, encode

STEPS = 400
KEYS = [b"%b%d" % (letter, number) for letter in (b"a", b"b") for number in range(4)]
BIG = 1024 * 1024
"""Two of these fill the server: the next one evicts."""

GLIMPSE_BYTES = 32


class Keeper:
    """A client that keeps copies, and drops those that it is told to."""

    def __init__(self, server: RunningServer, *options: str) -> None:
        self.copies: dict[bytes, bytes | None] = {}
        self.invalidations = 0
        self.options = options
        self._wire = server.connect()
        self._wire.ask("HELLO 3")
        assert self.say("CLIENT", "TRACKING", "ON", *options) == b"+OK\r\n"

    def say(self, *words: Word) -> bytes:
        """One command and its reply; what is pushed before it is heeded."""
        frame = self._wire.ask(words)
        while frame[:1] == b">":
            self._heed(frame)
            frame = self._wire.read()
        return frame

    def catch_up(self) -> None:
        """Read all that was sent up to now."""
        assert self.say("PING", "now") == b"$3\r\nnow\r\n"

    def look(self, key: bytes) -> None:
        """Read a key, and keep it if the server will tell of its changes."""
        if "OPTIN" in self.options:
            self.say("CLIENT", "CACHING", "YES")
        value = value_of(self.say("GET", key))
        if "PREFIX" not in self.options or key.startswith(b"a"):
            self.copies[key] = value

    def write(self, words: list[Word], keys: list[bytes]) -> None:
        """A command that may change `keys`. With NOLOOP the server will not say so."""
        self.say(*words)
        if "NOLOOP" in self.options:
            for key in keys:
                self.copies.pop(key, None)

    def close(self) -> None:
        """Hang up."""
        self._wire.close()

    def _heed(self, push: bytes) -> None:
        self.invalidations += 1
        lines = push.split(b"\r\n")
        assert lines[2] == b"invalidate"
        if lines[3] == b"_":
            self.copies.clear()
        for key in lines[5::2]:
            self.copies.pop(key, None)


def value_of(bulk: bytes) -> bytes | None:
    """What a bulk holds, None for nil."""
    head, _, body = bulk.partition(b"\r\n")
    return None if head == b"_" else body[:-2]


def glimpses(plain: Wire) -> dict[bytes, tuple[int, bytes]]:
    """The length of each value and how it begins, which tells those of this walk apart; nil is as good as empty."""
    begin_of = ("0", str(GLIMPSE_BYTES - 1))
    lines: list[CommandLine] = []
    for key in KEYS:
        lines += ["STRLEN", key], ["GETRANGE", key, *begin_of]
    replies = plain.exchange(b"".join(map(encode, lines)), len(lines))
    seen = zip(KEYS, replies[::2], replies[1::2], strict=True)
    return {key: (int(length[1:]), value_of(begin) or b"") for key, length, begin in seen}


def some_write(chance: random.Random) -> tuple[list[Word], list[bytes]]:
    """A random command and the keys that it may change."""
    key, other = chance.sample(KEYS, 2)
    value = b"%d" % chance.randrange(1_000_000)
    one: list[Callable[[], list[Word]]] = [
        lambda: ["SET", key, value],
        lambda: ["SET", key, value, "PX", str(chance.randrange(1, 40))],
        lambda: ["DEL", key],
        lambda: ["APPEND", key, "x"],
        lambda: ["SETRANGE", key, "1", "yy"],
        lambda: ["PEXPIRE", key, str(chance.randrange(40))],
        lambda: ["GETEX", key, "PX", "20"],
        lambda: ["GETSET", key, value],
        lambda: ["GETDEL", key],
        lambda: ["INCRBY", key, "7"],
    ]
    two: list[Callable[[], list[Word]]] = [
        lambda: ["MSET", key, value, other, "x"],
        lambda: ["RENAME", key, other],
        lambda: ["COPY", key, other, "REPLACE"],
    ]
    if chance.random() < 0.02:
        return ["FLUSHDB"], KEYS
    if chance.random() < 0.2:
        return ["SET", key, chance.randbytes(16) * (BIG // 16)], [key]
    if chance.random() < 0.3:
        return chance.choice(two)(), [key, other]
    return chance.choice(one)(), [key]


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that two big values fill."""
    process, server = start_kvredis(tmp_path_factory.mktemp("small"), "--max-local-cpu-size", "3MB")
    yield server
    stop(process)


@pytest.mark.parametrize("table", [1_000_000, 3])
@pytest.mark.parametrize("seed", range(2))
def test_no_copy_is_ever_out_of_date(seed: int, table: int, small_server: RunningServer) -> None:
    chance = random.Random(seed)
    modes = ((), ("NOLOOP",), ("OPTIN",), ("BCAST",), ("BCAST", "PREFIX", "a", "NOLOOP"))
    keepers = [Keeper(small_server, *mode) for mode in modes]
    hits = 0
    with small_server.connect() as plain:
        plain.ask("HELLO 3")
        plain.ask(f"CONFIG SET tracking-table-max-keys {table}")
        for _ in range(STEPS):
            keeper = chance.choice(keepers)
            if chance.random() < 0.7:
                keeper.look(chance.choice(KEYS))
            else:
                keeper.write(*some_write(chance))
            seen = glimpses(plain)
            for each in keepers:
                each.catch_up()
                for key, copy in each.copies.items():
                    assert (len(copy or b""), (copy or b"")[:GLIMPSE_BYTES]) == seen[key], (each.options, key)
                    hits += 1
        plain.ask("CONFIG SET tracking-table-max-keys 1000000")
    assert hits > 500, "copies were kept, or the walk has shown nothing"
    assert all(each.invalidations for each in keepers)
    for each in keepers:
        each.close()
