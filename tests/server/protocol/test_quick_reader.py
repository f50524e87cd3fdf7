"""The quick reader: what it takes, what it leaves and what it says of that."""

import gc
import random
import sys

import pytest

from kvredis.server.protocol.parser import Parser
from kvredis.server.protocol.request import Argument
from tests.fuzz.corpus import session
from tests.fuzz.mutator import mutate
from tests.server.feed import CarefulParser, feed, no_payload, request

Found = tuple[list[list[Argument]], int, bool]
TEXT_BYTES_MAX = 16 * 1024

GET, SET = request("GET", "key"), request("SET", "key", b"x" * 100)
ZERO_BEFORE = b"*2\r\n$3\r\nGET\r\n$04\r\nkeys\r\n"
TOO_SHORT = b"*2\r\n$3\r\nGETS\r\n$3\r\nkey\r\n"
TOO_LONG = request("ECHO", b"y" * (TEXT_BYTES_MAX + 1))
ALPHABET = (
    *(b"*", b"$", b"0", b"1", b"2", b"3", b"04", b"16384", b"16385", b"99999999999999999999", b"\r\n", b"\r", b"\n"),
    *(
        b"*1\r\n",
        b"*2\r\n",
        b"*16384\r\n",
        b"$0\r\n\r\n",
        b"$1\r\na\r\n",
        b"$2\r\n\r\n\r\n",
        b"$3\r\nab",
        b"a",
        b"PING",
    ),
    *(GET, SET, GET * 20, request("SET", "k", b"\r\n+\r\n"), b"x" * 20_000, b"\0", b"$-1\r\n", b"*-1\r\n", b"*0\r\n"),
    *(request("EXISTS", *(b"%060d" % n for n in range(100))), b"$20000\r\n" + b"y" * 20_000 + b"\r\n"),
)
STREAMS = 4000


def read(data: bytes) -> Found:
    """Give the commands that `data` begins with, how many bytes are left, and whether those may be plain too."""
    parser = Parser(no_payload)
    parser._scratch = bytearray(data)
    parser._end = len(data)
    commands = parser._take_plain()
    return commands, parser._end - parser._start, parser._plain


def streams(seed: int, count: int) -> list[bytes]:
    """Sessions with some damage, and fragments put together by chance."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        if number % 2:
            stream = mutate(rng, session(rng), session(rng))
        else:
            stream = b"".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 12)))
        found.append(stream[: rng.randrange(len(stream) + 1)] if rng.random() < 0.3 else stream)
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ([], 0, True)),
        (GET, ([[b"GET", b"key"]], 0, True)),
        (GET + SET, ([[b"GET", b"key"], [b"SET", b"key", b"x" * 100]], 0, True)),
        (GET * 3 + GET[:-1], ([[b"GET", b"key"]] * 3, len(GET) - 1, True)),
        (GET * 3 + b"*2", ([[b"GET", b"key"]] * 3, 2, True)),
        (GET * 3 + request("PING"), ([[b"GET", b"key"]] * 3 + [[b"PING"]], 0, True)),
        (GET * 3 + b"PING\r\n", ([[b"GET", b"key"]] * 3, 6, False)),
        (GET * 3 + b"*0\r\n", ([[b"GET", b"key"]] * 3, 4, False)),
        (request("SET", "k", b"\r\n$1\r\n"), ([[b"SET", b"k", b"\r\n$1\r\n"]], 0, True)),
        (request("SET", "", b""), ([[b"SET", b"", b""]], 0, True)),
        (ZERO_BEFORE, ([], len(ZERO_BEFORE), False)),
        (TOO_SHORT, ([], len(TOO_SHORT), False)),
        (b"*2\r\n$3\r\nGETS\r\n", ([], 14, False)),
        (b"*16385\r\n", ([], 8, False)),
        (b"*16384\r\n", ([], 8, True)),
        (b"*99999999999999999999999\r\n", ([], 26, False)),
        (request("ECHO", b"y" * TEXT_BYTES_MAX), ([[b"ECHO", b"y" * TEXT_BYTES_MAX]], 0, True)),
        (GET + TOO_LONG, ([[b"GET", b"key"]], len(TOO_LONG), False)),
    ],
)
def test_a_buffer_is_split_into_the_commands_that_clients_write(data: bytes, expected: Found) -> None:
    assert read(data) == expected


def test_each_command_is_a_list_of_its_own() -> None:
    commands, _, _ = read(GET * 2)
    commands[0].append(b"more")
    assert commands[1] == [b"GET", b"key"]


@pytest.mark.parametrize("seed", range(2))
def test_what_it_takes_is_what_the_careful_reader_takes(seed: int) -> None:
    taken = 0
    for stream in streams(seed, STREAMS):
        commands, left_bytes, _ = read(stream)
        past = len(stream) - left_bytes
        assert feed(CarefulParser(no_payload), stream[:past]) == commands, stream
        assert feed(CarefulParser(no_payload), stream) == commands + feed(CarefulParser(no_payload), stream[past:])
        taken += len(commands)
    assert taken > STREAMS


def test_nothing_is_kept_of_what_was_read() -> None:
    found = streams(5, 200)
    counts = []
    for _ in range(4):
        for stream in found:
            read(stream)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[3] - counts[1] < len(found) // 2, "blocks that no round gives back"
