"""Seeded random sessions against both servers: what no script thought of. A difference prints what led to it."""

import random

import pytest

from tests.compat.conftest import RunningServer
from tests.compat.test_scripts import comparable
from tests.compat.wire import CommandLine, encode

LINES = 1500
KEYS = ["a", "b", "key:1", "key:2", "", "vllm@Llama@1@0@ff"]
NUMBERS = [
    "0",
    "1",
    "-1",
    "2",
    "-2",
    "5",
    "-7",
    "100",
    "-100",
    "9223372036854775807",
    "-9223372036854775808",
    "x",
    "01",
]
LIVES = ["100", "1000", "99999", "-1", "0", "9223372036854775807", "x"]
VALUES: list[bytes | str] = ["", "1", "abc", "0123456789", b"\r\n\0", b"y" * 16_383, b"z" * 16_384, b"w" * 70_000]
OPTIONS = ["NX", "XX", "GET", "KEEPTTL", "nx", "EX", "PX", "FOO"]
FLOATS = ["0.1", "-2.5", "3.0e3", "1e-20", "0x1p4", "inf", "nan", "1e4931", "1.", "-0"]
TIMES = ["99999999999", "99999999999500", "1", "0", "-1", "9223372036854775", "9223372036854775807", "x"]
SHORT_KEYS = ["short:1", "short:2"]
LCS_OPTIONS = ["LEN", "IDX", "WITHMATCHLEN", "MINMATCHLEN", "2"]
DUMPS = [b"\0\x01v\n\0\x91\x08\xce\xb2\x198\x8a\xce", b"\0\x01v\n\0\x91\x08\xce\xb2\x198\x8a\xcf", b"x"]
PATTERNS = ["*", "key:*", "k[a-e]y*", "*[12]", "?", "[^a]", "*a*", "nope", "\\a", "**"]
COMMANDS = ["get", "SET", "foo", "config", "MGET", "client", "object", "memory", "ping", "flushall", "scan", "ttl"]


def random_line(rng: random.Random) -> CommandLine:
    """One command line, right or a little wrong."""
    key, other, value = rng.choice(KEYS), rng.choice(KEYS), rng.choice(VALUES)
    words: list[bytes | str] = list(
        rng.choice(
            [
                ["SET", key, value, *rng.choices(OPTIONS, k=rng.choice([0, 0, 1, 2]))],
                ["SET", key, value, rng.choice(["EX", "PX", "px"]), rng.choice(LIVES)],
                ["SETNX", key, value],
                ["MSET", key, value, other, rng.choice(VALUES)],
                ["GET", key],
                ["MGET", key, other],
                ["GETRANGE", key, rng.choice(NUMBERS), rng.choice(NUMBERS)],
                ["STRLEN", key],
                ["EXISTS", key, other],
                ["DEL", key, other],
                ["UNLINK", key],
                ["TOUCH", key, other],
                ["TYPE", key],
                ["TTL", key],
                ["PERSIST", key],
                ["EXPIRE", key, rng.choice(LIVES), *rng.choices(["NX", "XX", "gt", "LT"], k=rng.choice([0, 0, 1, 2]))],
                ["SETEX", key, rng.choice(LIVES), value],
                ["PSETEX", key, rng.choice(LIVES), value],
                ["GETSET", key, value],
                ["GETDEL", key],
                ["GETEX", key, *rng.choices(["PERSIST", "persist", "NX"], k=rng.choice([0, 0, 1]))],
                ["GETEX", key, rng.choice(["EX", "PX", "EXAT"]), rng.choice(LIVES)],
                ["MSETNX", key, value, other, rng.choice(VALUES)],
                ["APPEND", key, value],
                ["SETRANGE", key, rng.choice(NUMBERS), value],
                ["SUBSTR", key, rng.choice(NUMBERS), rng.choice(NUMBERS)],
                [rng.choice(["INCR", "DECR"]), key],
                [rng.choice(["INCRBY", "DECRBY", "INCRBYFLOAT"]), key, rng.choice(NUMBERS)],
                ["INCRBYFLOAT", key, rng.choice(FLOATS)],
                ["LCS", rng.choice(SHORT_KEYS), rng.choice(SHORT_KEYS), *rng.choices(LCS_OPTIONS, k=rng.randint(0, 2))],
                ["SET", rng.choice(SHORT_KEYS), "".join(rng.choices("abcd", k=20))],
                [rng.choice(["RENAME", "RENAMENX", "COPY"]), key, other],
                ["COPY", key, other, *rng.choices(["REPLACE", "DB", "1", "x"], k=rng.choice([1, 2, 3]))],
                ["MOVE", key, rng.choice(["0", "1", "15", "16", "x"])],
                ["SWAPDB", rng.choice(["0", "1", "15"]), rng.choice(["0", "1", "16", "x"])],
                [
                    "EXPIREAT",
                    key,
                    rng.choice(TIMES),
                    *rng.choices(["NX", "XX", "gt", "LT"], k=rng.choice([0, 0, 1, 2])),
                ],
                [rng.choice(["EXPIRETIME", "PEXPIRETIME"]), rng.choice(SHORT_KEYS)],
                ["PEXPIREAT", rng.choice(SHORT_KEYS), rng.choice(TIMES)],
                [
                    "RESTORE",
                    key,
                    "0",
                    rng.choice(DUMPS),
                    *rng.choices(["REPLACE", "ABSTTL", "FOO"], k=rng.randint(0, 2)),
                ],
                ["KEYS", rng.choice(PATTERNS)],
                ["DBSIZE"],
                ["SCAN", rng.choice(["0", "x", "00"]), "COUNT", rng.choice(["1000", "0", "x"]), "MATCH", "nope"],
                ["SELECT", rng.choice(["0", "1", "15", "16", "-1", "x"])],
                ["OBJECT", "ENCODING", key],
                ["OBJECT", "REFCOUNT", key],
                ["FLUSHDB"],
                [rng.choice(COMMANDS), *rng.choices(["a", "GET", "HELP2", "\0", "b\r\nc"], k=rng.choice([5, 6]))],
                ["PING", value],
            ]
        )
    )
    return words


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_session_is_answered_alike(
    seed: int, resp: int, redis_server: RunningServer, kvredis: RunningServer
) -> None:
    rng = random.Random(seed)
    script = [random_line(rng) for _ in range(LINES)]
    with redis_server.connect() as theirs, kvredis.connect() as ours:
        if resp == 3:
            theirs.ask("HELLO 3")
            ours.ask("HELLO 3")
        for at in range(0, LINES, 50):  # pipelined, in one write that the servers see in pieces
            lines = script[at : at + 50]
            request = b"".join(map(encode, lines))
            pairs = zip(lines, theirs.exchange(request, len(lines)), ours.exchange(request, len(lines)), strict=True)
            for line, their, our in pairs:
                assert comparable(line, our) == comparable(line, their), (line, script[max(0, at - 50) : at + 50])
