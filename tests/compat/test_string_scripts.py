"""Strings and keys next to Debian's redis-server: scripts, seeded numbers and texts, and values carried to and fro."""

import random

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
