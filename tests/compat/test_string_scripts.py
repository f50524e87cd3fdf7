"""Strings and keys next to Debian's redis-server: scripts, seeded numbers and texts, and values carried to and fro."""

import random
from collections.abc import Iterator

import pytest

from kvredis.server.commands.compat.dump import FOOTER_BYTES, crc64
from tests.compat.conftest import RunningServer
from tests.compat.string_scripts import STRING_SCRIPTS
from tests.compat.test_scripts import comparable, converse
from tests.compat.wire import CommandLine, Wire, encode

SUMS = 2000
TEXTS = 150
VALUES = [
    b"", b"7", b"-128", b"40000", b"-2147483648", b"99999999999", b"hello", b"x" * 21, b"ab" * 40,
    bytes(range(256)) * 3,
    b"z" * 16_383, b"kv" * 8192, random.Random(3).randbytes(50_000), bytes(300_000), b"a long sentence, and " * 9000,
]  # fmt: skip


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", STRING_SCRIPTS)
def test_both_servers_answer_a_script_about_strings_with_the_same_bytes(
    name: str, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    script = STRING_SCRIPTS[name]
    theirs, ours = converse(redis_server, resp, script), converse(kvredis, resp, script)
    for line, their, our in zip(script, theirs, ours, strict=True):
        assert comparable(line, our) == comparable(line, their), line


def number(rng: random.Random) -> str:
    """A decimal or hexadecimal text of a number, sometimes a little wrong."""
    digits = [str(rng.randrange(10 ** rng.randint(1, size))) for size in (6, 20, 25, 60)]
    sign = rng.choice(["", "", "-", "+"])
    return sign + rng.choice(
        [
            digits[0], digits[1], f"{digits[0]}.{digits[1]}", f".{digits[2]}", f"{digits[3]}.{digits[3]}",
            f"{digits[0]}e{rng.choice(['', '-', '+'])}{rng.randint(0, 30)}", f"{digits[0]}e{rng.randint(4900, 4960)}",
            f"{digits[0]}e-{rng.randint(4920, 4960)}", f"0.{'0' * rng.randint(10, 25)}{digits[1]}",
            f"0x{rng.randrange(2 ** rng.randint(1, 80)):x}", f"0x{rng.randrange(2**40):x}.8p{rng.randint(-90, 90)}",
            repr(rng.uniform(-1, 1)).lstrip("-"), repr(rng.uniform(0, 1e12)),
            f"{2 ** rng.randint(50, 70) + rng.randint(-3, 3)}.{rng.choice(['5', '25', '49999', '50001'])}",
            rng.choice(["inf", "nan", "Infinity", "1e", "0x", "", ".", " 1", "1 "]),
        ]
    )  # fmt: skip


def test_decimal_sums_have_the_digits_of_a_long_double(redis_server: RunningServer, kvredis: RunningServer) -> None:
    rng = random.Random(11)
    script: list[CommandLine] = []
    for _ in range(SUMS):
        script += [["SET", "f", number(rng)], ["INCRBYFLOAT", "f", number(rng)]]
    request = b"".join(map(encode, script))
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        replies = theirs.exchange(request, len(script)), ours.exchange(request, len(script))
    for at, (their, our) in enumerate(zip(*replies, strict=True)):
        assert our == their, script[at - 1 : at + 1]


def test_of_several_common_subsequences_it_is_redis_own(redis_server: RunningServer, kvredis: RunningServer) -> None:
    rng = random.Random(12)
    script: list[CommandLine] = []
    for _ in range(TEXTS):
        letters = "abcdefgh"[: rng.randint(2, 8)]
        texts = ["".join(rng.choices(letters, k=rng.randint(0, 90))) for _ in range(2)]
        script.append(["MSET", "a", texts[0], "b", texts[1]])
        script += ["LCS a b", "LCS a b LEN", "LCS a b IDX WITHMATCHLEN", "LCS a b IDX MINMATCHLEN 2"]
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        for line in script:
            assert ours.ask(line) == theirs.ask(line), line


def dumped(wire: Wire, key: str = "k") -> bytes:
    """DUMP's bytes."""
    head, _, body = wire.ask(["DUMP", key]).partition(b"\r\n")
    assert head == b"$%d" % (len(body) - 2)
    return body[:-2]


@pytest.mark.parametrize("value", VALUES, ids=len)
def test_what_either_server_dumps_the_other_restores(
    value: bytes, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    for source, target in ((redis_server, kvredis), (kvredis, redis_server)):
        with source.connect() as giver, target.connect() as taker:
            giver.ask(["SET", "k", value])
            assert taker.ask(["RESTORE", "k", "0", dumped(giver), "REPLACE"]) == b"+OK\r\n"
            assert taker.ask("GET k") == b"$%d\r\n%b\r\n" % (len(value), value)


def test_a_damaged_dump_is_refused_alike(redis_server: RunningServer, kvredis: RunningServer) -> None:
    rng = random.Random(13)
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        theirs.ask(["SET", "k", b"compressible " * 50])
        ours.ask("DEL k")
        whole = dumped(theirs)
        theirs.ask("DEL k")
        for _ in range(300):
            dump = bytearray(whole)
            dump[rng.randrange(len(dump))] ^= 1 << rng.randrange(8)
            line: CommandLine = ["RESTORE", "k", "0", bytes(dump)]
            assert ours.ask(line) == theirs.ask(line) == b"-ERR DUMP payload version or checksum are wrong\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"\0\x03abc", b"\0\x00", b"\0\x40\x03abc", b"\0\x80\0\0\0\x03abc", b"\0\x81\0\0\0\0\0\0\0\x03abc",
        b"\0\xc0\x81",
        b"\0\xc1\x00\x80", b"\0\xc2\xff\xff\xff\xff", b"\0\xc3\x04\x03\x02abc", b"\0\xc3\x05\x0a\x00a\xe0\x00\x00",
        b"\0\xc3\x05\x0b\x00a\xe0\x00\x00", b"\0\xc3\x02\x03\x20\x00", b"\0\xc3\x03\x63\x00a\x20",
        b"\0\x80\xff\0\0\0abc",
        b"\0\xc3\x01\x05\x05", b"\xc8abc",
    ],
)  # fmt: skip
def test_each_encoding_of_a_string_is_read_alike(
    body: bytes, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    dump = body + b"\x0a\0"
    dump += crc64(dump).to_bytes(FOOTER_BYTES - 2, "little")
    replies = [converse(server, 2, [["RESTORE", "k", "0", dump], "GET k"]) for server in (redis_server, kvredis)]
    assert replies[1] == replies[0]


# Keyspace events of the commands on strings and keys: the same ones in the same order as redis-server's.

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
