"""The parser without a network: where bytes are received, what commands they make, and every way to be refused."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvredis.server.protocol.inline import split_words
from kvredis.server.protocol.parser import Parser, Scratches
from kvredis.server.protocol.request import (
    EVIDENCE_BYTES_MAX,
    LINE_BYTES_MAX,
    PAYLOAD_BYTES_MIN,
    REFUSED,
    SCRATCH_BYTES,
    Argument,
    ProtocolError,
    Refused,
)
from kvredis.storage.entry import SLACK_BYTES, Reservation
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.feed import CarefulParser, feed, no_payload, request

ARENA_BYTES = 1024 * 1024
PING = request("PING")


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
    yield store
    assert store.reserved_bytes == 0
    store.check_integrity()
    store.close()


class Door:
    """An `open_payload` as the session's: the value of a SET goes into the store, and it notes what it was asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked: list[tuple[list[Argument], int]] = []
        self.opened: list[Reservation] = []

    def __call__(self, args: list[Argument], length: int) -> Reservation | Refused | None:
        self.asked.append((list(args), length))
        if len(args) != 2 or args[0] != b"SET":
            return None
        assert isinstance(args[1], bytes)
        reservation = self.store.reserve(args[1], length)
        if reservation is None:
            return REFUSED
        self.opened.append(reservation)
        return reservation


def pattern(length: int) -> bytes:
    """Bytes in which a shift by any distance shows."""
    return bytes(range(251)) * (length // 251) + bytes(range(length % 251))


def receive(parser: Parser, data: bytes) -> list[list[Argument]]:
    """One piece that fits the buffer, and every command that it completes."""
    buffer = parser.buffer()
    buffer[: len(data)] = data
    found = commands = parser.take(len(data))
    while commands := parser.take():
        found = found + commands
    return found


# ---- commands ----------------------------------------------------------------------------------------------------


def test_every_split_point_of_a_mixed_pipeline_gives_the_same_commands(store: Store) -> None:
    big = pattern(PAYLOAD_BYTES_MIN + 100)
    data = b"".join(
        [
            PING,
            b"inline 'wo rd' \"\\x41\\n\"\r\n",
            request("SET", "small", b"\r\n*1\r\n$"),
            b"*0\r\n\r\n\n*-1\r\n",
            request("SET", "large", big),
            request("MGET", "", "b"),
            b"last\n",
        ]
    )
    wanted = [
        [b"PING"],
        [b"inline", b"wo rd", b"A\n"],
        [b"SET", b"small", b"\r\n*1\r\n$"],
        [b"SET", b"large", big],
        [b"MGET", b"", b"b"],
        [b"last"],
    ]
    start = data.index(big)
    body = range(start + 40, start + len(big) - 40)
    for cut in range(len(data)):
        if cut in body and cut % 997:
            continue  # all alike in there
        assert feed(Parser(Door(store)), data, [cut]) == wanted, cut
    assert feed(Parser(Door(store)), data, range(len(data))) == wanted


@pytest.mark.parametrize("parser_class", [Parser, CarefulParser])
def test_a_whole_buffer_of_commands_is_parsed(parser_class: type[Parser]) -> None:
    parser = parser_class(no_payload)
    commands = [[b"SET", b"k%d" % n, b"v" * (n % 50)] for n in range(2000)]
    assert feed(parser, b"".join(request(*command) for command in commands)) == commands
    assert parser.pending_bytes == 0


def test_a_value_that_looks_like_a_command_stays_a_value() -> None:
    words = [b"SET", PING * 3, b"*1\r\n+OK\r\n"]
    assert feed(Parser(no_payload), request(*words) * 3) == [words] * 3


def test_pending_bytes_are_those_of_the_unfinished_command() -> None:
    parser = Parser(no_payload)
    assert receive(parser, PING + b"*2\r\n$3\r\nGET\r\n$5\r\nab") == [[b"PING"]]
    assert 0 < parser.pending_bytes <= len(b"*2\r\n$3\r\nGET\r\n$5\r\nab")
    assert receive(parser, b"cde\r\n") == [[b"GET", b"abcde"]]
    assert parser.pending_bytes == 0


def test_empty_commands_are_skipped() -> None:
    assert feed(Parser(no_payload), b"*0\r\n*-1\r\n*-10\r\n\r\n\n  \r\n" + PING) == [[b"PING"]]
    assert feed(Parser(no_payload), b"\r\n" * 5000 + PING) == [[b"PING"]]


def test_the_terminator_of_a_bulk_is_not_looked_at() -> None:
    assert feed(Parser(no_payload), b"*2\r\n$3\r\nGETxx$1\r\nkyy" + PING) == [[b"GET", b"k"], [b"PING"]]


# ---- payloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [PAYLOAD_BYTES_MIN, PAYLOAD_BYTES_MIN + 1, 100_000])
def test_a_payload_is_received_into_its_reservation(store: Store, length: int) -> None:
    door = Door(store)
    value = pattern(length)
    parser = Parser(door)
    head = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % length
    assert receive(parser, head) == []
    body = parser.buffer()
    assert len(body) == length + SLACK_BYTES
    body[: length + SLACK_BYTES] = value + b"\r\n"
    (command,) = parser.take(length + SLACK_BYTES)
    assert command[:2] == [b"SET", b"k"]
    assert command[2] is door.opened[0]
    assert bytes(door.opened[0].view) == value
    assert door.asked == [([b"SET", b"k"], length)]
    door.opened[0].abort()


def test_a_value_below_the_threshold_is_bytes(store: Store) -> None:
    door = Door(store)
    for length in (PAYLOAD_BYTES_MIN - 3, PAYLOAD_BYTES_MIN - 2, PAYLOAD_BYTES_MIN - 1):
        value = pattern(length)
        assert feed(Parser(door), request("SET", "k", value) + PING) == [[b"SET", b"k", value], [b"PING"]]
    assert door.asked == []


def test_the_scratch_never_sees_more_of_a_payload_than_it_is_large(store: Store) -> None:
    """What a loop receives while a payload is open lies in the arena, whatever stood before it in the scratch."""
    length = 20 * SCRATCH_BYTES
    data = PING + request("SET", "k", pattern(length))
    parser = Parser(door := Door(store))
    at = direct_bytes = 0
    while at < len(data):
        buffer = parser.buffer()
        inside = bool(door.opened)
        received = min(len(buffer), len(data) - at)
        buffer[:received] = data[at : at + received]
        at += received
        direct_bytes += received if inside else 0
        assert inside or len(buffer) <= SCRATCH_BYTES
        parser.take(received)
        parser.take()
    assert direct_bytes >= length - SCRATCH_BYTES
    assert bytes(door.opened[0].view) == pattern(length)
    door.opened[0].abort()


def test_a_long_line_does_not_make_the_scratch_large_for_good(store: Store) -> None:
    parser = Parser(Door(store))
    line = b"PING " + b"x" * 60_000 + b"\r\n"
    value = pattern(3 * SCRATCH_BYTES)
    assert feed(parser, request("SET", "k", value) + line + request("SET", "k", value)) == [
        [b"SET", b"k", value],
        [b"PING", b"x" * 60_000],
        [b"SET", b"k", value],
    ]
    assert feed(parser, line + PING) == [[b"PING", b"x" * 60_000], [b"PING"]]
    assert len(parser.buffer()) <= SCRATCH_BYTES


def test_a_payload_that_is_none_becomes_bytes(store: Store) -> None:
    door = Door(store)
    value = pattern(40_000)
    assert feed(Parser(door), request("ECHO", value) + PING) == [[b"ECHO", value], [b"PING"]]
    assert door.asked == [([b"ECHO"], 40_000)]


def test_refused_bytes_are_dropped_and_the_next_command_is_right(store: Store) -> None:
    data = request("SET", "k", b"*" * (2 * ARENA_BYTES)) + request("GET", "k")
    for cuts in ([], [5], range(0, len(data), 4093), [len(data) - 1], [len(data) - 20]):
        assert feed(Parser(Door(store)), data, cuts) == [[b"SET", b"k", "refused"], [b"GET", b"k"]]


def test_what_follows_a_payload_is_part_of_the_command(store: Store) -> None:
    value = pattern(50_000)
    data = request("SET", "k", value, "NX", "EX", "10") + PING
    for cut in (20, 30_000, len(data) - 30, len(data) - 20):
        assert feed(Parser(Door(store)), data, [cut]) == [[b"SET", b"k", value, b"NX", b"EX", b"10"], [b"PING"]]


def test_abandon_gives_back_a_half_received_payload(store: Store) -> None:
    parser = Parser(Door(store))
    receive(parser, request("SET", "k", pattern(50_000))[:1000])
    assert store.reserved_bytes > 0
    parser.abandon()
    assert store.reserved_bytes == 0
    store.check_integrity()


def test_abandon_gives_back_a_payload_whose_command_is_unfinished(store: Store) -> None:
    parser = Parser(Door(store))
    value = pattern(PAYLOAD_BYTES_MIN)
    feed(parser, request("SET", "k", value, "NX")[:-6])
    assert store.reserved_bytes > 0
    parser.abandon()
    parser.abandon()
    assert store.reserved_bytes == 0


def test_a_broken_command_after_a_payload_gives_it_back(store: Store) -> None:
    data = request("SET", "k", pattern(50_000), "NX").replace(b"$2\r\nNX", b":2\r\nNX")
    assert feed(Parser(Door(store)), data) == [["error", "expected '$', got ':'"]]
    assert store.reserved_bytes == 0


def test_a_claim_alone_takes_no_memory() -> None:
    """100 clients may claim 512 MB each: memory is taken by what arrives."""

    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    before = resident_pages()
    parsers = [Parser(no_payload) for _ in range(20)]
    for parser in parsers:
        receive(parser, b"*2\r\n$4\r\nECHO\r\n$536870912\r\nx")
        assert len(parser.buffer()) <= SCRATCH_BYTES
        receive(parser, b"x" * (EVIDENCE_BYTES_MAX - 1))
        assert len(parser.buffer()) == 512 * 1024 * 1024 + SLACK_BYTES - EVIDENCE_BYTES_MAX
    assert resident_pages() - before < 4096
    for parser in parsers:
        parser.abandon()


# ---- refusals, as Redis 7.2 words them ---------------------------------------------------------------------------

INVALID_COUNT = "invalid multibulk length"
INVALID_LENGTH = "invalid bulk length"
COUNTS = ["abc", "+1", "01", " 1", "1 ", "-0", "2147483648", "9000000000000000000", "1.5", "", "99999999999999999999"]
LENGTHS = ["-1", "-2", "+4", "04", " 4", "4 ", "", "536870913", "x", "9223372036854775808", "1.0", "-0"]

# fmt: off
BROKEN = [
    *[(b"*%b\r\n" % count.encode(), INVALID_COUNT) for count in COUNTS],
    *[(b"*1\r\n$%b\r\nPING\r\n" % length.encode(), INVALID_LENGTH) for length in LENGTHS],
    *[(b"*2\r\n$4\r\nECHO\r\n$%b\r\nPING\r\n" % length.encode(), INVALID_LENGTH) for length in LENGTHS],
    (b"*1\r\n:4\r\nPING\r\n", "expected '$', got ':'"),
    (b"*1\r\n+PING\r\n", "expected '$', got '+'"),
    (b"*1\r\n*1\r\n$4\r\nPING\r\n", "expected '$', got '*'"),
    (b"*1\r\n\r\n", "expected '$', got ' '"),
    (b"*2\r\n$4\r\nPING\r\nPING\r\n", "expected '$', got 'P'"),
    (b'"abc\r\n', "unbalanced quotes in request"),
    (b"'abc\r\n", "unbalanced quotes in request"),
    (b'"abc"d\r\n', "unbalanced quotes in request"),
    (b"GET 'a'b\r\n", "unbalanced quotes in request"),
    (b'GET "a\\\r\n', "unbalanced quotes in request"),
]
# fmt: on


@pytest.mark.parametrize(("stream", "text"), BROKEN)
def test_a_broken_stream_is_refused_in_redis_words(stream: bytes, text: str) -> None:
    before = [[b"PING"], [b"SET", b"k", b"v"]]
    data = PING + request("SET", "k", "v") + stream
    for cuts in ([], [len(data) - len(stream)], range(len(data))):
        assert feed(Parser(no_payload), data, cuts) == [*before, ["error", text]]


@pytest.mark.parametrize(
    ("start", "text"),
    [(b"*", "too big mbulk count string"), (b"*1\r\n$", "too big bulk count string"), (b"x", "too big inline request")],
)
def test_a_line_without_an_end_is_refused_at_64_kib(start: bytes, text: str) -> None:
    line = start[start.rfind(b"\n") + 1 :]
    at_limit = start + b"1" * (LINE_BYTES_MAX - len(line))
    assert feed(Parser(no_payload), PING + at_limit) == [[b"PING"]]
    assert feed(Parser(no_payload), PING + at_limit + b"1") == [[b"PING"], ["error", text]]


def test_an_inline_request_may_be_64_kib_long() -> None:
    word = b"y" * (LINE_BYTES_MAX - 6)
    assert feed(Parser(no_payload), b"ECHO " + word + b"\n" + PING) == [[b"ECHO", word], [b"PING"]]


@pytest.mark.parametrize("parser_class", [Parser, CarefulParser])
def test_before_auth_counts_and_lengths_are_held_small(parser_class: type[Parser]) -> None:
    ten, eleven = request(*["a"] * 10), request(*["a"] * 11)
    full, over = request("AUTH", b"p" * 16384), request("AUTH", b"p" * 16385)

    def strange(data: bytes) -> list[list[bytes | str]]:
        parser = parser_class(no_payload)
        parser.authenticated = False
        return feed(parser, data)

    assert strange(ten) == [[b"a"] * 10]
    assert strange(PING + eleven) == [[b"PING"], ["error", "unauthenticated multibulk length"]]
    assert strange(full) == [[b"AUTH", b"p" * 16384]]
    assert strange(over) == [["error", "unauthenticated bulk length"]]
    known = parser_class(no_payload)
    assert feed(known, eleven + over) == [[b"a"] * 11, [b"AUTH", b"p" * 16385]]


def test_logging_in_lifts_the_limits_for_the_very_next_command() -> None:
    parser = Parser(no_payload)
    parser.authenticated = False
    data = request("AUTH", "x") + request(*["a"] * 11)
    parser.buffer()[: len(data)] = data
    assert parser.take(len(data)) == [[b"AUTH", b"x"]]
    parser.authenticated = True
    assert parser.take() == [[b"a"] * 11]


def test_the_bulk_limit_can_be_lowered() -> None:
    parser = Parser(no_payload, bulk_bytes_max=1024 * 1024)
    receive(parser, b"*2\r\n$4\r\nECHO\r\n$1048576\r\n" + b"." * 128)
    assert len(parser.buffer()) == 1024 * 1024 + SLACK_BYTES - 128
    parser = Parser(no_payload, bulk_bytes_max=1024 * 1024)
    with pytest.raises(ProtocolError, match=r"^invalid bulk length$"):
        receive(parser, b"*2\r\n$4\r\nECHO\r\n$1048577\r\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", []),
        (b" \t ", []),
        (b"set  k\tv ", [b"set", b"k", b"v"]),
        (b'"a b" "c\\"d" "\\x41\\x7a\\n\\r\\t\\b\\a\\q"', [b"a b", b'c"d', b"Az\n\r\t\b\aq"]),
        (b"'a b' 'it\\'s' 'raw\\n'", [b"a b", b"it's", b"raw\\n"]),
        (b'"\\x4" "\\xzz"', [b"x4", b"xzz"]),
        (b"\"\" ''", [b"", b""]),
        (b'a"b c"', [b"ab c"]),
        (b"\xff\x00\x01", [b"\xff", b"\x01"]),
        (b'"', None),
        (b"'a", None),
        (b'"a"b', None),
        (b'"a\\"', None),
        (b"'a\\'", None),
    ],
)
def test_inline_words_are_split_as_in_redis_cli(line: bytes, words: list[bytes] | None) -> None:
    assert split_words(line) == words


# ---- one scratch for many ----------------------------------------------------------------------------------------


def test_clients_whose_commands_come_whole_have_one_scratch_between_them() -> None:
    scratches = Scratches()
    parsers = [Parser(no_payload, scratches=scratches) for _ in range(20)]
    for parser in parsers * 2:
        assert receive(parser, PING) == [[b"PING"]]
    assert sum(parser.memory()[1] for parser in parsers) == SCRATCH_BYTES
    parsers[-1].abandon()
    assert receive(parsers[0], PING) == [[b"PING"]]
    assert sum(parser.memory()[1] for parser in parsers) == SCRATCH_BYTES


def test_what_is_left_in_a_scratch_stays_while_other_clients_receive(store: Store) -> None:
    scratches = Scratches()
    data = [
        request("SET", f"k{n}", pattern(PAYLOAD_BYTES_MIN + n)) + request("ECHO", b"%d" % n * 50) + PING
        for n in range(9)
    ]
    parsers = [Parser(Door(store), scratches=scratches) for _ in data]
    found: list[list[list[Argument]]] = [[] for _ in data]
    sent = [0] * len(data)
    rng = random.Random(7)
    while left := [n for n in range(len(data)) if sent[n] < len(data[n])]:
        n = rng.choice(left)
        buffer = parsers[n].buffer()
        piece = data[n][sent[n] : sent[n] + min(len(buffer), rng.choice([1, 20, 300, 5000]))]
        buffer[: len(piece)] = piece
        sent[n] += len(piece)
        commands = parsers[n].take(len(piece))
        while commands:
            found[n] += commands
            commands = parsers[n].take()
        if rng.random() < 0.1:
            parsers[n].rest()
    for n, commands in enumerate(found):
        _, _, reservation = commands[0]
        assert isinstance(reservation, Reservation)
        assert bytes(reservation.view_with_slack[: PAYLOAD_BYTES_MIN + n]) == pattern(PAYLOAD_BYTES_MIN + n)
        reservation.abort()
        assert commands[1:] == [[b"ECHO", b"%d" % n * 50], [b"PING"]]
