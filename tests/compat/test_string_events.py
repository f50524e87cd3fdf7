"""Keyspace events of the commands on strings and keys: the same ones in the same order as redis-server's."""

from collections.abc import Iterator

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.wire import CommandLine, Wire

BIG = b"x" * 100_000
LETTERS = "KEg$nm"
FAR = "99999999999"
DUMP = b"\0\x01v\n\0\x91\x08\xce\xb2\x198\x8a\xce"

SCRIPTS: dict[str, list[CommandLine]] = {
    "set": [
        "SET k v", "SET k w", "SET k v EX 100", f"SET k v PXAT {FAR}000", "SET k v KEEPTTL", "SET k v NX", "SET k v XX",
        "SET n v XX", "SET n v XX GET", "SET n v GET", "SETNX k v", "SETNX new v", "SETEX k 100 v", "PSETEX m 100000 v",
        "GETSET k w", "GETSET fresh w", "MSET k 1 two 2 k 3", "MSETNX k 1 x 2", "MSETNX x 1 y 2", ["SET", "big", BIG],
        ["SET", "big", BIG, "EX", "100"], ["MSET", "big", BIG, "big2", BIG], ["SETNX", "big3", BIG], "SET k v EX 0",
    ],
    "read": [
        "GET k", "MGET k l", "STRLEN k", "GETRANGE k 0 -1", "SUBSTR k 0 -1", "TTL k", "PTTL k", "EXPIRETIME k",
        "TYPE k",
        "TOUCH k l", "DUMP k", "LCS k l", "OBJECT ENCODING k", "GETEX k", "GETDEL k", "COPY k l", "SET k v", "GET k",
        "LCS k l", "GETEX k",
    ],
    "change": [
        "APPEND k a", "APPEND k b", "SETRANGE k 1 x", "SETRANGE new 3 x", ["SETRANGE", "k", "0", b""], "INCR n",
        "DECR n",
        "INCRBY n 5", "DECRBY n 5", "INCRBYFLOAT n 0.5", "INCRBYFLOAT f 1", "INCR k", "INCRBYFLOAT k 1", "APPEND e 1",
        ["APPEND", "k", b""], ["APPEND", "big", BIG], "SETRANGE big 5 x",
    ],
    "leave": [
        "DEL k", "MSET a 1 b 2 c 3 d 4", "DEL a nope b a", "UNLINK c", "GETDEL d", "SET k v", f"GETEX k EXAT {FAR}",
        "GETEX k PERSIST", "GETEX k PERSIST", "GETEX k PXAT 1", "SET k v", "EXPIRE k 100", f"EXPIREAT k {FAR}",
        "EXPIRE k 100 NX", "PERSIST k", "PERSIST k", "EXPIRE k -1", "EXPIRE k 100", "SET k v", "PEXPIREAT k 1",
    ],
    "move": [
        "RENAME a b", "SET a 1", "RENAME a b", "RENAME b b", "SET c 1", "RENAME c b", "RENAMENX b d", "SET e 1",
        "RENAMENX d e", "COPY e f", "COPY e f", "COPY e f REPLACE", "COPY e e DB 1", "MOVE e 1", "MOVE f 1", "MOVE f 1",
        "SWAPDB 0 1", ["SET", "big", BIG], "RENAME big a", "COPY a b REPLACE", "MOVE a 2", "FLUSHDB", "FLUSHALL",
    ],
    "restore": [
        ["RESTORE", "k", "0", DUMP], ["RESTORE", "k", "0", DUMP], ["RESTORE", "k", "0", DUMP, "REPLACE"],
        ["RESTORE", "l", "100000", DUMP], ["RESTORE", "k", "1", DUMP, "REPLACE", "ABSTTL"],
        ["RESTORE", "n", "1", DUMP, "ABSTTL"], ["RESTORE", "k", "0", DUMP[:-1]],
    ],
}  # fmt: skip


@pytest.fixture
def both(redis_server: RunningServer, kvredis: RunningServer) -> Iterator[tuple[RunningServer, RunningServer]]:
    """The two servers, telling of everything; silent again afterwards."""
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            assert wire.ask(["CONFIG", "SET", "notify-keyspace-events", LETTERS]) == b"+OK\r\n"
    yield redis_server, kvredis
    for server in (redis_server, kvredis):
        with server.connect() as wire:
            wire.ask(["CONFIG", "SET", "notify-keyspace-events", b""])


def events(server: RunningServer, script: list[CommandLine]) -> list[list[bytes]]:
    """What is told after each line."""
    told: list[list[bytes]] = []
    with server.connect() as listener, server.connect() as wire:
        listener.ask("PSUBSCRIBE *")
        for line in script:
            wire.ask(line)
            wire.ask("PUBLISH end .")
            told.append(list(until_end(listener)))
    return told


def until_end(listener: Wire) -> Iterator[bytes]:
    """Messages up to the one that says that a command is through."""
    while not (message := listener.read()).endswith(b"$3\r\nend\r\n$1\r\n.\r\n"):
        yield message


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_told_of_alike(name: str, both: tuple[RunningServer, RunningServer]) -> None:
    theirs, ours = (events(server, SCRIPTS[name]) for server in both)
    assert any(theirs)
    for line, their, our in zip(SCRIPTS[name], theirs, ours, strict=True):
        assert our == their, line
