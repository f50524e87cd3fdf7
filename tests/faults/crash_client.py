"""Clients of a server that is going to die: one that loads it at random and notes what it said, one that looks."""

import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from tests.faults.crash_model import (
    NOTHING,
    VALUE_BYTES_MAX,
    VALUE_BYTES_MIN,
    Held,
    Name,
    Seen,
    Writes,
    ident_of,
    value,
)
from tests.server.feed import Word, request

LIMIT_S: Final = 20
"""Within this every reply has come: nothing that is asked for takes a second."""

KIB: Final = 1024
BIG_KEYS, SMALL_KEYS = 12, 12
PIECES_MAX: Final = 8
"""A value is appended to so many times at most."""
LENGTHS: Final = (16 * KIB, 64 * KIB, 256 * KIB, 700 * KIB, 1024 * KIB, 2048 * KIB)
READ_KEYS_MAX: Final = 4
WAIT_MS: Final = 5000

Reply = bytes | int | None | list["Reply"] | Exception


class Wire:
    """One connection that speaks RESP2 and waits no longer than LIMIT_S for anything."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self._stream = self._socket.makefile("rb", 1 << 18)

    def send(self, requests: Iterable[bytes]) -> None:
        """Commands that `request` has made."""
        for each in requests:
            self._socket.sendall(each)

    def read(self) -> Reply:
        """The next reply; ConnectionError at the end of the stream."""
        line = self._stream.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RuntimeError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.read() for _ in range(int(rest))]
        assert kind == b"$", line
        if rest == b"-1":
            return None
        body: bytes = self._stream.read(int(rest) + 2)
        if len(body) != int(rest) + 2:
            raise ConnectionError
        return body[:-2]

    def ask(self, *words: Word) -> Reply:
        """One command and its reply."""
        self.send([request(*words)])
        return self.read()

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
        self._socket.close()


class Load:
    """One client's random commands on two databases of its own, so that it is the only one who writes there."""

    def __init__(self, number: int, seed: int, *, misses: bool) -> None:
        self.writes = Writes(1 + (number << 40))
        self.acknowledged = 0
        """The writes that were answered."""
        self.saved = 0
        """How often the disk has confirmed them."""
        self.trouble: BaseException | None = None
        self._rng = random.Random(f"{seed} {number}")
        self._number = number
        self._spaces = (2 * number, 2 * number + 1)
        self._space = 0
        self._misses = misses
        self._batch: list[tuple[bytes, Callable[[Reply], None]]] = []
        self.journal: list[list[object]] = []
        """What was sent, each with its reply if there was one."""
        self._sizes: dict[int, tuple[int, int]] = {}  # of each value: its bytes, and its pieces

    def run(self, port: int) -> None:
        """Until the server is gone; what is wrong, a silent server included, is kept in `trouble`."""
        try:
            wire = Wire(port)
            try:
                while True:
                    self._compose()
                    batch, self._batch = self._batch, []
                    wire.send(words for words, _ in batch)
                    for _, told in batch:
                        told(wire.read())
            finally:
                self._batch = []
                wire.close()
        except TimeoutError:
            self.trouble = AssertionError(f"client {self._number} had no reply in {LIMIT_S} s")
        except OSError:
            pass  # it has died
        except BaseException as error:
            self.trouble = error

    # ---- what is sent ------------------------------------------------------------------------------------------------

    def _compose(self) -> None:
        """A few writes, then what tells of whole databases or looks: who does not read his replies is not served, so
        nothing long may come behind a GET."""
        rng = self._rng
        self._space = rng.choice(self._spaces)
        self._add(_is_ok, "SELECT", self._space)
        for _ in range(rng.choice((1, 1, 2, 5))):
            writes = (self._set, self._delete, self._expire, self._edit, self._copy, self._replace, self._by_rename)
            write = rng.choices(writes, (12, 3, 2, 4, 1, 1, 1))[0]
            write()
            if self._misses and write in (self._copy, self._by_rename):
                return  # the cache may have let go of the source: only the reply tells what the target holds
        last = (self._read, self._rename, self._move, self._save, self._prefetch, self._swap, self._flush)
        rng.choices(last, (36, 10, 4, 12, 5, 3, 0.5))[0]()

    def _add(self, told: Callable[[Reply], None], *words: Word | int) -> None:
        """Have a command sent with the batch, and a line about it in the journal."""
        line: list[object] = [self._space]
        line += [each for each in words if isinstance(each, int) or len(each) < VALUE_BYTES_MIN]
        if words[0] == "SET" and isinstance(words[1], bytes):
            line.append(self.writes.latest((words[1], self._space)))
        self.journal.append(line)

        def heard(reply: Reply) -> None:
            line.append(reply if not isinstance(reply, bytes) else reply[:16])
            told(reply)

        self._batch.append((request(*(str(each) if isinstance(each, int) else each for each in words)), heard))

    def _write(self, check: Callable[[Reply], None], *words: Word | int) -> None:
        """A write, which the model knows of already."""
        sent = self.writes.sent

        def told(reply: Reply) -> None:
            check(reply)
            self.acknowledged = sent

        self._add(told, *words)

    def _name(self) -> Name:
        if self._rng.random() < 0.75:
            return b"w%d:big:%d" % (self._number, self._rng.randrange(BIG_KEYS)), self._space
        return b"w%d:small:%d" % (self._number, self._rng.randrange(SMALL_KEYS)), self._space

    def _end(self) -> int:
        return _now_ms() + self._rng.choice((300, 1500, 3_600_000)) + self._rng.randrange(500)

    def _set(self, name: Name | None = None) -> None:
        name, rng = name or self._name(), self._rng
        above = rng.randrange(1, len(LENGTHS))
        length = rng.randrange(LENGTHS[above - 1], LENGTHS[above] + 1)
        if b"small" in name[0]:
            length = rng.randrange(VALUE_BYTES_MIN, 16 * KIB)
        at_ms = self._end() if rng.random() < 0.15 else 0
        ident = self.writes.set(name, at_ms)
        self._sizes[ident] = length, 1
        self._write(_is_ok, "SET", name[0], value(ident, length), *(("PXAT", at_ms) if at_ms else ()))

    def _edit(self) -> None:
        """APPEND to what is there, or SETRANGE over all of it."""
        name, rng = self._name(), self._rng
        before = self.writes.latest(name)
        if self._misses or not before.ident or before.expire_at_ms:
            return  # it might be gone, and what is made of nothing is another value
        length, pieces = self._sizes[before.ident]
        if pieces < PIECES_MAX and rng.random() < 0.6:
            more = rng.randrange(VALUE_BYTES_MIN, rng.choice((4 * KIB, 64 * KIB)))
            ident = self.writes.set(name)
            self._sizes[ident] = length + more, pieces + 1
            self._write(_is_number, "APPEND", name[0], value(ident, more, before.ident))
        else:
            length = min(length + rng.randrange(4 * KIB), VALUE_BYTES_MAX) if length <= VALUE_BYTES_MAX else 0
            if length:
                ident = self.writes.set(name)
                self._sizes[ident] = length, 1
                self._write(_is_number, "SETRANGE", name[0], 0, value(ident, length))

    def _copy(self) -> None:
        """COPY REPLACE."""
        old, new = self._name(), self._name()
        source, target = self.writes.latest(old), self.writes.latest(new)
        if old == new or not source.ident or source.expire_at_ms:
            return
        self.writes.copy(old, new)

        def told(reply: Reply) -> None:
            if reply != 1:
                assert reply == 0, reply
                self._gone(old, source)
                self.writes.unsaid(new, target)

        self._write(told, "COPY", old[0], new[0], "REPLACE")

    def _replace(self) -> None:
        """DEL, then SET."""
        name = self._name()
        self.writes.delete([name])
        self._write(_is_number, "DEL", name[0])
        self._set(name)

    def _by_rename(self) -> None:
        """SET under another name, then RENAME: how programs replace a value as a whole."""
        old, new = self._name(), self._name()
        if old != new:
            self._set(old)
            self._rename(old, new)

    def _delete(self) -> None:
        names = [self._name() for _ in range(self._rng.choice((1, 2)))]
        self.writes.delete(names)
        self._write(_is_number, "DEL", *(key for key, _ in names))

    def _expire(self) -> None:
        name = self._name()
        before = self.writes.latest(name)
        if not before.ident or before.is_over(_now_ms() + 1000 * LIMIT_S):
            return  # whether it comes in time is unknown, and what the rest of the batch would find
        at_ms = 0 if before.expire_at_ms and self._rng.random() < 0.5 else self._end()
        self.writes.expire(name, at_ms)

        def told(reply: Reply) -> None:
            if reply != 1:
                assert reply == 0, reply
                if self.writes.latest(name) == (before.ident, at_ms):  # else the batch went on to write there
                    self._gone(name, before)

        words = ("PEXPIREAT", name[0], at_ms) if at_ms else ("PERSIST", name[0])
        self._write(told, *words)

    def _rename(self, old: Name | None = None, new: Name | None = None) -> None:
        old, new = old or self._name(), new or self._name()
        source, target = self.writes.latest(old), self.writes.latest(new)
        if old == new or not source.ident:
            return
        self.writes.rename(old, new)

        def told(reply: Reply) -> None:
            if reply != b"OK":
                assert isinstance(reply, RuntimeError), reply
                assert str(reply) == "ERR no such key", reply
                self._gone(old, source)
                self.writes.unsaid(new, target)

        self._write(told, "RENAME", old[0], new[0])

    def _move(self) -> None:
        old = self._name()
        new = old[0], self._spaces[old[1] == self._spaces[0]]
        source = self.writes.latest(old)
        if not source.ident or source.expire_at_ms or self.writes.latest(new).ident:
            return
        self.writes.rename(old, new)

        def told(reply: Reply) -> None:
            if reply != 1:
                assert reply == 0, reply
                self._gone(old, source)
                self.writes.unsaid(new, NOTHING)

        self._write(told, "MOVE", old[0], new[1])

    def _swap(self) -> None:
        self.writes.swap(*self._spaces)
        self._write(_is_ok, "SWAPDB", *self._spaces)

    def _flush(self) -> None:
        self.writes.delete([name for name in self.writes.names() if name[1] == self._space])
        self._write(_is_ok, "FLUSHDB")

    def _save(self) -> None:
        sent = self.writes.sent

        def told(reply: Reply) -> None:
            assert reply in ([1, 0], [0, 0]), reply
            if reply == [1, 0]:
                self.writes.confirm(sent)
                self.saved += 1

        self._add(told, "WAITAOF", 1, 0, WAIT_MS)

    def _prefetch(self) -> None:
        def told(reply: Reply) -> None:
            assert isinstance(reply, int) or "local_cpu is false" in str(reply), reply

        self._add(told, "PREFETCH", *{self._name()[0] for _ in range(READ_KEYS_MAX)})

    def _read(self) -> None:
        names = list({self._name() for _ in range(self._rng.randrange(1, READ_KEYS_MAX + 1))})
        expected = [self.writes.latest(name) for name in names]
        sent_ms = _now_ms()

        def told(reply: Reply) -> None:
            assert isinstance(reply, list), reply
            for name, before, found in zip(names, expected, reply, strict=True):
                if found is None:
                    self._gone(name, before)
                    continue
                assert isinstance(found, bytes)
                assert ident_of(found) == before.ident, f"{name} holds {ident_of(found)}, and should {before}"
                assert not before.is_over(sent_ms), f"{name} is served after its end"

        if len(names) == 1:
            self._add(lambda reply: told([reply]), "GET", names[0][0])
        else:
            self._add(told, "MGET", *(key for key, _ in names))

    def _gone(self, name: Name, before: Held) -> None:
        """A name holds nothing, and before what was done last it should have held something."""
        if before.ident:
            assert self._misses or before.is_over(_now_ms()), f"{name} has lost {before}"
            self.writes.vanished(name)


def look(port: int, names: Sequence[Name]) -> dict[Name, Seen]:
    """What a server holds under each name; AssertionError for bytes that were never written, and for a reply that is
    late."""
    wire = Wire(port)
    seen: dict[Name, Seen] = {}
    try:
        for space in sorted({space for _, space in names}):
            keys = [key for key, where in names if where == space]
            _is_ok(wire.ask("SELECT", str(space)))
            for at in range(0, len(keys), READ_KEYS_MAX):
                some = keys[at : at + READ_KEYS_MAX]
                from_ms = _now_ms()
                wire.send([*(request("PEXPIRETIME", key) for key in some), request("MGET", *some)])
                ends = [wire.read() for _ in some]
                found = wire.read()
                assert isinstance(found, list)
                for key, end, body in zip(some, ends, found, strict=True):
                    assert isinstance(end, int)
                    held = Held(ident_of(body), max(end, 0)) if isinstance(body, bytes) else NOTHING
                    seen[key, space] = Seen(held, from_ms, _now_ms())
    finally:
        wire.close()
    return seen


def figure(wire: Wire, tier: bytes, name: bytes) -> int:
    """One figure out of KV.TIERS, whose maps are flat lists."""
    of_tiers: Reply = wire.ask("KV.TIERS")
    for wanted in (tier, name):
        assert isinstance(of_tiers, list)
        of_tiers = of_tiers[of_tiers.index(wanted) + 1]
    assert isinstance(of_tiers, int)
    return of_tiers


def _is_ok(reply: Reply) -> None:
    assert reply == b"OK", reply


def _is_number(reply: Reply) -> None:
    assert isinstance(reply, int), reply


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
