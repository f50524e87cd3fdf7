"""DUMP and RESTORE without another server: where payloads lie and go, what is refused, and the checksum."""

import random

import pytest

from kvredis.server.commands.compat.dump import MULTIPLE, PACKED_BYTES_MAX, crc64, crc64_by_table, decompress, dump
from kvredis.storage.entry import INLINE_BYTES_MAX
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, OOM, bulk, received, run

POLYNOMIAL = 1 << 64 | 0xAD93D23594C935A9
BAD_DATA = b"-ERR Bad data format\r\n"
WRONG = b"-ERR DUMP payload version or checksum are wrong\r\n"


def dumped(session: FakeSession, key: bytes = b"k") -> bytes:
    """DUMP's bytes."""
    return session.ask([b"DUMP", key]).partition(b"\r\n")[2][:-2]


def signed(body: bytes, version: int = 11) -> bytes:
    """A dump with that body and a footer that fits."""
    body += version.to_bytes(2, "little")
    return body + crc64_by_table(body).to_bytes(8, "little")


def packed(text: bytes) -> bytes:
    """LZF that stores everything literally, up to 32 bytes a run."""
    return b"".join(bytes((len(text[at : at + 32]) - 1,)) + text[at : at + 32] for at in range(0, len(text), 32))


def lzf_dump(data: bytes, length: int) -> bytes:
    """A dump of a string that is compressed to `data`."""
    return signed(b"\0\xc3\x80" + len(data).to_bytes(4, "big") + b"\x80" + length.to_bytes(4, "big") + data)


@pytest.mark.parametrize("length", [0, 63, 64, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, LARGE])
def test_a_value_comes_back_as_it_was(session: FakeSession, length: int) -> None:
    value = random.Random(length).randbytes(length)
    session.ask([b"SET", b"k", value])
    whole = dumped(session)
    assert session.ask([b"RESTORE", b"l", b"0", whole]) == b"+OK\r\n"
    assert session.ask("GET l") == bulk(value)
    if len(whole) >= INLINE_BYTES_MAX:
        assert run(session, b"RESTORE", b"m", b"0", received(session, b"m", whole)) == b"+OK\r\n"
        assert session.ask("GET m") == bulk(value)


def test_a_large_value_is_lent_to_its_dump(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    (reply,) = dump(session, [b"DUMP", b"k"])  # type: ignore[arg-type, misc]
    assert isinstance(reply, list)
    assert isinstance(reply[1], memoryview)
    assert len(reply[1]) == LARGE


def test_a_received_dump_becomes_the_value_where_it_lies(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"v" * (ARENA_BYTES // 3)])
    whole = dumped(session)
    session.ask("DEL k")
    payload = received(session, b"k", whole)
    extent = payload.extent
    assert run(session, b"RESTORE", b"k", b"0", payload) == b"+OK\r\n"
    entry = session.store.find(b"k")
    assert entry is not None
    assert (entry.extent, entry.length) == (extent, ARENA_BYTES // 3)


@pytest.mark.parametrize(
    "words", [(b"x",), (b"-1",), (b"0", b"FOO"), (b"0", b"IDLETIME"), (b"0", b"FREQ", b"300"), (b"0",)]
)
def test_a_refused_restore_gives_its_payload_back(session: FakeSession, words: tuple[bytes, ...]) -> None:
    session.ask("SET there 1")
    key = b"there" if words == (b"0",) else b"k"
    payload = received(session, key, signed(b"\0\x80" + (20_000).to_bytes(4, "big") + b"x" * 20_000))
    assert run(session, b"RESTORE", key, words[0], payload, *words[1:])[:1] == b"-"
    assert session.ask("DBSIZE") == b":1\r\n"
    assert session.store.reserved_bytes == 0


@pytest.mark.parametrize(
    "body",
    [b"\x01\x01a", b"\0", b"", b"\0\x05abc", b"\0\xc0", b"\0\xc2\0\0", b"\0\xc4\0", b"\0\x82\0", b"\0\x80\0\0",
     b"\0\xc3\x02\x05\x01a", b"\0\xc3\x7f\xff\x05a", b"\0\xc3\x03\x02\x20\x00\x00",
     b"\0\xc3\x02\x80\xff\xff\xff\xff\x00a"],
)  # fmt: skip
def test_a_body_that_is_no_string_is_refused(session: FakeSession, body: bytes) -> None:
    assert session.ask([b"RESTORE", b"k", b"0", signed(body)]) == BAD_DATA
    assert session.ask("EXISTS k") == b":0\r\n"


def test_a_newer_version_or_a_wrong_checksum_is_refused(session: FakeSession) -> None:
    good = signed(b"\0\x03abc")
    for wrong in (signed(b"\0\x03abc", 12), good[:-1], good[2:], b"", bytes(9), good[:2] + b"X" + good[3:]):
        assert session.ask([b"RESTORE", b"k", b"0", wrong]) == WRONG
    assert session.ask([b"RESTORE", b"k", b"0", good]) == b"+OK\r\n"


@pytest.mark.parametrize("length", [30, 20_000])
def test_compressed_strings_are_unpacked_and_broken_ones_leave_nothing(session: FakeSession, length: int) -> None:
    text = random.Random(length).randbytes(length)
    assert session.ask([b"RESTORE", b"k", b"0", lzf_dump(packed(text), length)]) == b"+OK\r\n"
    assert session.ask("GET k") == bulk(text)
    assert session.ask([b"RESTORE", b"l", b"0", lzf_dump(packed(text), length + 1)]) == BAD_DATA
    assert session.ask([b"RESTORE", b"l", b"0", lzf_dump(packed(text)[:-1], length)]) == BAD_DATA
    assert session.store.reserved_bytes == 0


def test_a_claimed_length_makes_no_room_that_it_could_not_fill(session: FakeSession) -> None:
    assert session.ask([b"RESTORE", b"k", b"0", lzf_dump(b"\x00a\xe0\xff\x00", 1 << 31)]) == BAD_DATA
    filler = packed(b"a") + b"\xe0\xff\x00" * (ARENA_BYTES // 264 + 1)
    assert session.ask([b"RESTORE", b"k", b"0", lzf_dump(filler, ARENA_BYTES + 1)]) == OOM


def test_repetitions_that_overlap_what_they_write_are_unpacked() -> None:
    room = bytearray(13)
    assert decompress(memoryview(b"\x01ab\xe0\x02\x01"), memoryview(room))
    assert room == b"ab" + b"ababababab" + b"a"


def test_an_end_is_relative_or_absolute_and_one_in_the_past_leaves_no_key(session: FakeSession) -> None:
    session.ask("SET k v")
    whole = dumped(session)
    assert session.ask([b"RESTORE", b"a", b"100000", whole]) == b"+OK\r\n"
    assert session.ask("TTL a") == b":100\r\n"
    assert session.ask([b"RESTORE", b"b", b"9999999999999", whole, b"ABSTTL"]) == b"+OK\r\n"
    assert session.ask("PEXPIRETIME b") == b":9999999999999\r\n"
    assert session.ask([b"RESTORE", b"k", b"1", whole, b"absttl", b"replace"]) == b"+OK\r\n"
    assert session.ask([b"RESTORE", b"c", b"1", whole, b"ABSTTL"]) == b"+OK\r\n"
    assert session.ask("EXISTS k c") == b":0\r\n"
    assert session.ask([b"RESTORE", b"d", b"0", whole, b"IDLETIME", b"500"]) == b"+OK\r\n"
    assert session.ask("OBJECT IDLETIME d") == b":500\r\n"


def test_the_checksum_is_crc_64_jones() -> None:
    assert crc64_by_table(b"123456789") == 0xE9C6D914C4B8D9CA


def test_the_sparse_polynomial_is_a_multiple_of_the_checksums() -> None:
    rest = sum(1 << exponent for exponent in MULTIPLE)
    while rest.bit_length() > 64:
        rest ^= POLYNOMIAL << rest.bit_length() - 65
    assert rest == 0


def test_a_compressed_string_that_would_take_long_is_not_unpacked(session: FakeSession) -> None:
    reply = session.ask([b"RESTORE", b"k", b"0", lzf_dump(bytes(PACKED_BYTES_MAX + 1), 4 * 1024 * 1024)])
    assert reply.startswith(b"-ERR Bad data format: ")
    assert session.ask("EXISTS k") == b":0\r\n"


@pytest.mark.parametrize("length", [0, 1, 9, 25_513, 25_514, 25_515, 35_514, 123_457])
def test_folding_changes_no_checksum(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc64(data) == crc64_by_table(data)
    assert crc64(memoryview(data)[length // 3 :], crc64(data[: length // 3])) == crc64(data)
