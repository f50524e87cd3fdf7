"""The quick reader: what it takes, what it leaves and what it says of that, natively and in Python alike."""

import gc
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvredis.server.protocol.fast_parser import TEXT_BYTES_MAX, plain_commands_in_python
from tests.fuzz.corpus import session
from tests.fuzz.mutator import mutate
from tests.server.feed import request

Found = tuple[list[list[bytes]], int, bool]
Reader = Callable[[bytes], Found]

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
GUARDED = """
import ctypes, mmap, random, sys
from kvredis.server.protocol._plain import plain_commands
from tests.server.protocol.test_fast_parser import streams

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 64 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 63 * page), ctypes.c_size_t(page), 0) == 0
view = memoryview(memory)[: 63 * page]
for stream in streams(3, 1000):
    piece = stream[: random.Random(len(stream)).randrange(min(len(stream), 63 * page) + 1)]
    if piece:
        view[-len(piece):] = piece
        assert plain_commands(view[-len(piece):]) == plain_commands(piece)
print("unharmed")
"""


def readers() -> list[Reader]:
    """Both, or the one that is here."""
    try:
        from kvredis.server.protocol._plain import plain_commands
    except ImportError:
        return [plain_commands_in_python]
    return [plain_commands_in_python, plain_commands]


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


READERS = pytest.mark.parametrize("read", readers(), ids=lambda read: read.__name__)


@READERS
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
        (b"*2\r\n$3\r\nGETS\r\n", ([], 14, True)),  # the careful reader says so when the rest is there
        (b"*16385\r\n", ([], 8, False)),
        (b"*16384\r\n", ([], 8, True)),
        (b"*99999999999999999999999\r\n", ([], 26, False)),
        (request("ECHO", b"y" * TEXT_BYTES_MAX), ([[b"ECHO", b"y" * TEXT_BYTES_MAX]], 0, True)),
        (GET + TOO_LONG, ([], len(GET + TOO_LONG), False)),
    ],
)
def test_a_buffer_is_split_into_the_commands_that_clients_write(read: Reader, data: bytes, expected: Found) -> None:
    assert read(data) == expected


@READERS
def test_each_command_is_a_list_of_its_own(read: Reader) -> None:
    commands, _, _ = read(GET * 2)
    commands[0].append(b"more")
    assert commands[1] == [b"GET", b"key"]


@pytest.mark.parametrize("seed", range(2))
def test_both_readers_find_the_same_in_every_stream(seed: int) -> None:
    first, *others = readers()
    for stream in streams(seed, STREAMS):
        expected = first(stream)
        for read in others:
            assert read(stream) == expected, stream


def test_the_native_reader_looks_at_nothing_behind_the_buffer() -> None:
    if len(readers()) < 2:
        pytest.skip("the extension is not built here")
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "unharmed\n"), done.stderr


@READERS
def test_nothing_is_kept_of_what_was_read(read: Reader) -> None:
    found = streams(5, 200)
    counts = []
    for _ in range(4):
        for stream in found:
            read(stream)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[3] - counts[1] < len(found) // 2, "blocks that no round gives back"


def test_the_native_reader_takes_only_bytes() -> None:
    for read in readers()[1:]:
        for wrong in ("*1\r\n", None, 5, memoryview(b"*1\r\n$1\r\na\r\n")[::2]):
            with pytest.raises((TypeError, BufferError)):
                read(wrong)  # type: ignore[arg-type]
