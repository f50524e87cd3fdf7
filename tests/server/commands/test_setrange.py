"""APPEND and SETRANGE where values are large: who reads keeps the old bytes, and what finds no room changes nothing."""

from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskOptions
from kvredis.storage.entry import INLINE_BYTES_MAX, Lease
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, OOM, bulk

TOO_LONG = b"-ERR string exceeds maximum allowed size (proto-max-bulk-len)\r\n"


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
    lease = session.store.peek(b"k")
    assert lease is not None
    with lease:
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


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_value_that_is_appended_to_is_copied_a_few_times_and_not_each_time(session: FakeSession, kept: int) -> None:
    for n in range(kept):  # with nothing, something, and a value of its own kind behind it
        session.ask([b"SET", b"kept%d" % n, b"z" * LARGE])
    piece = bytes(range(1, 251)) * 4
    places = set()
    for n in range(1000):
        assert session.ask([b"APPEND", b"k", piece]) == b":%d\r\n" % ((n + 1) * len(piece))
        entry = session.store.find(b"k")
        assert entry is not None
        places.add(entry.extent.offset)
        session.store.check_integrity()
    assert session.ask("GET k") == bulk(piece * 1000)
    assert len(places) <= 22  # from 16 KiB to 1 MB by quarters, were there never room behind it


def test_an_edit_in_place_is_a_change_that_others_are_told_of(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    session.ask("APPEND k y")
    session.store.keep_journal(True)
    for edit in ([b"APPEND", b"k", b"z"], [b"SETRANGE", b"k", b"1", b"z"]):
        session.ask(edit)
        assert session.store.take_journal() == [("set", b"k", 0)]


def test_a_value_that_grew_in_place_goes_to_disk_as_it_is_and_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    options = StoreOptions(ARENA_BYTES, HugepageMode.OFF, disk=DiskOptions(tmp_path, 4 * ARENA_BYTES, direct=False))
    store = Store.open(options)
    store.put(b"k", b"x" * LARGE)
    assert store.patch(b"k", LARGE, b"more")
    store.close()
    store = Store.open(options)
    with closing(store):
        entry = store.find(b"k")
        assert entry is not None
        assert (entry.length, entry.tier) == (LARGE + 4, "disk")
        assert not store.patch(b"k", 0, b"y")
