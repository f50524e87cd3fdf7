"""APPEND and SETRANGE where values are large: who reads keeps the old bytes, and what finds no room changes nothing."""

from collections.abc import Iterator

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX, Lease
from tests.server.fake_session import ARENA_BYTES, FakeSession, make_server
from tests.server.handlers import LARGE, OOM, bulk

TOO_LONG = b"-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n"


@pytest.fixture
def session() -> Iterator[FakeSession]:
    server = make_server()
    yield FakeSession(server)
    assert server.store.reserved_bytes == server.store.retired_bytes == server.store.leases == 0
    server.store.check_integrity()
    server.store.close()


@pytest.mark.parametrize("length", [0, 1, INLINE_BYTES_MAX - 4, INLINE_BYTES_MAX - 3, INLINE_BYTES_MAX, LARGE])
def test_appended_bytes_stand_behind_the_old_ones(session: FakeSession, length: int) -> None:
    old = bytes(n % 251 for n in range(length))
    session.ask([b"SET", b"k", old])
    assert session.ask("APPEND k end") == b":%d\r\n" % (length + 3)
    assert session.ask("GET k") == bulk(old + b"end")


@pytest.mark.parametrize("offset", [0, 5, 99_999, LARGE, LARGE + 1, 3_000_000])
def test_a_range_is_laid_over_the_old_value_and_a_gap_is_zero(session: FakeSession, offset: int) -> None:
    session.store.arena.view[:] = b"\xff" * session.store.arena.nbytes
    session.ask([b"SET", b"k", b"x" * LARGE])
    wanted = bytearray(b"x" * LARGE).ljust(offset, b"\0")
    wanted[offset : offset + 5] = b"patch"
    assert session.ask([b"SETRANGE", b"k", b"%d" % offset, b"patch"]) == b":%d\r\n" % len(wanted)
    assert session.ask("GET k") == bulk(bytes(wanted))


@pytest.mark.parametrize("edit", [[b"APPEND", b"k", b"more"], [b"SETRANGE", b"k", b"0", b"other"]])
def test_a_reader_keeps_the_bytes_that_he_was_given(session: FakeSession, edit: list[bytes]) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    lease = session.store.fetch(b"k")
    assert isinstance(lease, Lease)
    with lease:
        session.ask(edit)
        assert bytes(lease.view) == b"x" * LARGE


def test_an_end_stays_what_it_was(session: FakeSession) -> None:
    for length in (1, LARGE):
        session.ask([b"SET", b"k", b"x" * length, b"EX", b"1000"])
        session.ask("APPEND k more")
        session.ask("SETRANGE k 0 y")
        assert session.ask("TTL k") == b":1000\r\n"


def test_what_finds_no_room_changes_nothing(session: FakeSession) -> None:
    value = b"x" * (ARENA_BYTES // 2)
    session.ask([b"SET", b"k", value])
    assert session.ask([b"APPEND", b"k", b"more"]) == OOM
    assert session.ask([b"SETRANGE", b"k", b"%d" % ARENA_BYTES, b"more"]) == OOM
    assert session.ask([b"APPEND", b"new", b"x" * ARENA_BYTES]) == OOM
    assert session.ask("GET k") == bulk(value)
    assert session.ask("EXISTS new") == b":0\r\n"


def test_no_value_grows_beyond_what_a_request_may_hold(session: FakeSession) -> None:
    session.server.bulk_bytes_max = 1000
    session.ask([b"SET", b"k", b"x" * 990])
    assert session.ask([b"APPEND", b"k", b"x" * 11]) == TOO_LONG
    assert session.ask([b"APPEND", b"k", b"x" * 10]) == b":1000\r\n"
    assert session.ask("SETRANGE k 1000 x") == TOO_LONG
    assert session.ask("SETRANGE k 999 y") == b":1000\r\n"


def test_an_edited_value_is_raw_until_it_is_set_anew(session: FakeSession) -> None:
    session.ask("SET k 12")
    session.ask("APPEND k 3")
    assert session.ask("OBJECT ENCODING k") == b"$3\r\nraw\r\n"
    session.ask("RENAME k l")
    assert session.ask("OBJECT ENCODING l") == b"$3\r\nraw\r\n"
    session.ask("SET l 456")
    assert session.ask("OBJECT ENCODING l") == b"$3\r\nint\r\n"


@pytest.mark.parametrize("left_ms", range(1, 8))
def test_what_ends_while_it_is_appended_to_leaves_nothing_behind(session: FakeSession, left_ms: int) -> None:
    now_ms = session.store.now_ms()

    def hurrying() -> int:
        nonlocal now_ms
        now_ms += 1
        return now_ms

    session.ask("SET k old-value!")
    session.store.now_ms._clock_ms = hurrying
    session.store.expire(b"k", now_ms + left_ms)
    length = session.ask("APPEND k new")
    assert length in (b":3\r\n", b":13\r\n")
    session.store.now_ms._clock_ms = lambda: now_ms
    assert (
        session.ask("GET k") in ({b":3\r\n": [bulk(b"new")], b":13\r\n": [bulk(b"old-value!new"), b"$-1\r\n"]}[length])
    )
