"""The string commands against a real store: options, their errors in Redis' words, and payloads that end well.

tests/compat holds the same commands next to a real redis-server; here is what has to do with where values lie.
"""

from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from kvredis.server.client.session import Session
from kvredis.server.commands.strings import expiry_ms, get
from kvredis.storage.disk.tier import DiskOptions
from kvredis.storage.entry import INLINE_BYTES_MAX, Lease
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, OOM, bulk, received, run

SYNTAX = b"-ERR syntax error\r\n"
VALUE = b"v" * LARGE


@pytest.mark.parametrize("length", [0, 1, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX, LARGE])
def test_a_value_is_read_as_it_was_written(session: FakeSession, length: int) -> None:
    value = b"x" * length
    assert session.ask([b"SET", b"k", value]) == b"+OK\r\n"
    assert session.ask("GET k") == b"$%d\r\n%b\r\n" % (length, value)
    assert session.ask("STRLEN k") == b":%d\r\n" % length
    assert session.ask("MGET k none k") == b"*3\r\n%b$-1\r\n%b" % ((b"$%d\r\n%b\r\n" % (length, value),) * 2)


def test_large_values_are_lent_not_copied(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"x" * LARGE])
    reply = get(cast(Session, session), [b"GET", b"k"])
    assert isinstance(reply, list)
    view = reply[1]
    assert isinstance(view, memoryview)
    assert view.readonly
    assert len(view) == LARGE
    session.store.arena.view[:] = bytes(session.store.arena.nbytes)
    assert bytes(view) == bytes(LARGE), "it shows the arena itself"


def test_a_received_payload_is_published(session: FakeSession) -> None:
    assert run(session, b"SET", b"k", received(session, b"k", VALUE)) == b"+OK\r\n"
    assert session.ask("STRLEN k") == b":100000\r\n"
    assert run(session, b"SETNX", b"n", received(session, b"n", VALUE)) == b":1\r\n"
    pair = received(session, b"a", VALUE), b"small"
    assert run(session, b"MSET", b"a", pair[0], b"b", pair[1]) == b"+OK\r\n"
    assert session.ask("EXISTS k n a b") == b":4\r\n"


@pytest.mark.parametrize(
    ("options", "reply"),
    [
        ([b"NX"], b"$-1\r\n"),
        ([b"NX", b"GET"], b"$3\r\nold\r\n"),
        ([b"FOO"], SYNTAX),
        ([b"NX", b"XX"], SYNTAX),
        ([b"EX"], SYNTAX),
        ([b"EX", b"10", b"PX", b"10"], SYNTAX),
        ([b"EX", b"10", b"KEEPTTL"], SYNTAX),
        ([b"EX", b"x"], b"-ERR value is not an integer or out of range\r\n"),
        ([b"EX", b"0"], b"-ERR invalid expire time in 'set' command\r\n"),
        ([b"PX", b"-5"], b"-ERR invalid expire time in 'set' command\r\n"),
        ([b"EXAT", b"9223372036854775807"], b"-ERR invalid expire time in 'set' command\r\n"),
    ],
)
def test_a_payload_that_is_not_wanted_is_given_back(session: FakeSession, options: list[bytes], reply: bytes) -> None:
    session.ask("SET k old")
    assert run(session, b"SET", b"k", received(session, b"k", VALUE), *options) == reply
    assert session.ask("GET k") == b"$3\r\nold\r\n"
    assert session.store.reserved_bytes == 0


def test_an_option_that_is_a_payload_is_a_syntax_error(session: FakeSession) -> None:
    odd = received(session, b"k", VALUE)
    assert run(session, b"SET", b"k", b"v", odd) == SYNTAX
    odd.abort()


def test_setnx_gives_the_payload_back_when_the_key_exists(session: FakeSession) -> None:
    session.ask("SET k old")
    assert run(session, b"SETNX", b"k", received(session, b"k", VALUE)) == b":0\r\n"
    assert session.ask("GET k") == b"$3\r\nold\r\n"


def test_set_get_answers_the_old_value_and_holds_it_until_sent(session: FakeSession) -> None:
    session.ask([b"SET", b"k", b"o" * LARGE])
    assert session.ask("SET k new GET") == b"$%d\r\n%b\r\n" % (LARGE, b"o" * LARGE)
    assert session.ask("SET k newer XX GET") == b"$3\r\nnew\r\n"
    assert session.ask("SET other v XX GET") == b"$-1\r\n"
    assert session.ask("SET other v NX GET") == b"$-1\r\n"
    assert session.ask("MGET k other") == b"*2\r\n$5\r\nnewer\r\n$1\r\nv\r\n"


def test_mset_sets_all_or_nothing(session: FakeSession) -> None:
    held = []
    for n in range(8):
        session.ask([b"SET", b"k%d" % n, b"x" * (ARENA_BYTES // 8 - 8192)])
        held.append(session.store.lease(b"k%d" % n))
    assert session.ask([b"MSET", b"a", b"1", b"b", b"y" * LARGE * 3, b"c", b"y" * LARGE * 3]) == OOM
    assert session.ask("EXISTS a b c") == b":0\r\n"
    assert session.ask([b"SET", b"b", b"y" * LARGE * 3]) == OOM
    assert session.ask([b"SETNX", b"b", b"y" * LARGE * 3]) == OOM
    for lease in held:
        assert lease is not None
        lease.release()
    assert session.ask([b"MSET", b"a", b"1", b"b", b"y" * LARGE * 3, b"c", b"y" * LARGE * 3]) == b"+OK\r\n"
    assert session.ask("EXISTS a b c") == b":3\r\n"


@pytest.mark.parametrize(("command", "done"), [(b"MSET", b"+OK\r\n"), (b"MSETNX", b":1\r\n")])
def test_small_values_that_find_no_room_beside_one_another_are_refused_together(
    command: bytes, done: bytes, session: FakeSession
) -> None:
    store = session.server.store
    store.evicts = False
    fills = 0
    while store.put(b"fill%d" % fills, bytes(10_000)):
        fills += 1
    store.delete([b"fill0"])
    payload = received(session, b"large", VALUE)
    told = run(session, command, b"a", bytes(9_000), b"large", payload, b"b", bytes(9_000))
    assert told == OOM
    assert not any(store.find(key) for key in (b"a", b"large", b"b"))
    assert store.reserved_bytes == 0
    assert run(session, command, b"a", bytes(9_990)) == done
    same = [b"MSET", b"fill1", bytes(10_000), b"a", bytes(9_990)]
    assert run(session, *same) == b"+OK\r\n", "who needs no more than is there needs no room"
    store.check_integrity()


def test_mset_with_a_value_missing_gives_its_payloads_back(session: FakeSession) -> None:
    odd = b"-ERR wrong number of arguments for 'mset' command\r\n"
    assert run(session, b"MSET", b"a", received(session, b"a", VALUE), b"b") == odd
    assert session.ask("DBSIZE") == b":0\r\n"


def test_the_last_value_of_a_repeated_key_wins(session: FakeSession) -> None:
    first, second = received(session, b"k", b"1" * LARGE), received(session, b"k", b"2" * LARGE)
    assert run(session, b"MSET", b"k", first, b"k", second) == b"+OK\r\n"
    assert session.ask("GETRANGE k 0 0") == b"$1\r\n2\r\n"


@pytest.mark.parametrize("length", [10, LARGE])
@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [
        (0, 3, slice(0, 4)),
        (0, -1, slice(0, None)),
        (-3, -1, slice(-3, None)),
        (5, 2, slice(0, 0)),
        (-1, -3, slice(0, 0)),
        (8, 10**9, slice(8, None)),
        (10**9, 10**9 + 1, slice(0, 0)),
        (-(10**9), 2, slice(0, 3)),
        (0, -(10**9), slice(0, 1)),
        (-(2**63), 2**63 - 1, slice(0, None)),
    ],
)
def test_a_range_is_cut_as_redis_cuts_it(
    session: FakeSession, length: int, start: int, end: int, wanted: slice
) -> None:
    value = bytes(range(250)) * (length // 250) if length > 250 else b"0123456789"
    session.ask([b"SET", b"k", value])
    cut = value[wanted]
    assert session.ask(f"GETRANGE k {start} {end}") == b"$%d\r\n%b\r\n" % (len(cut), cut)


def test_mget_keeps_the_head_of_a_prefix_longest(session: FakeSession) -> None:
    """Its keys count as used at one instant: when room is needed the tail goes first."""
    size = ARENA_BYTES // 4 - 8192
    for key in (b"tail", b"middle", b"head"):
        session.ask([b"SET", key, b"x" * size])
    session.ask("MGET head middle tail")
    session.ask([b"SET", b"new1", b"x" * size])
    session.ask([b"SET", b"new2", b"x" * size])
    assert session.ask("EXISTS head") == session.ask("EXISTS middle") == b":1\r\n"
    assert session.ask("EXISTS tail") == b":0\r\n"


@pytest.mark.parametrize(
    ("text", "unit_ms", "now_ms", "wanted"),
    [
        (b"10", 1000, 5, 10_005),
        (b"1", 1, 0, 1),
        (b"9223372036854775807", 1, 0, 2**63 - 1),
        (b"9223372036854775807", 1, 1, b"-ERR invalid expire time in 'x' command\r\n"),
        (b"9223372036854775", 1000, 0, 9_223_372_036_854_775_000),
        (b"9223372036854776", 1000, 0, b"-ERR invalid expire time in 'x' command\r\n"),
        (b"0", 1, 0, b"-ERR invalid expire time in 'x' command\r\n"),
        (b"-1", 1, 0, b"-ERR invalid expire time in 'x' command\r\n"),
        (b"+1", 1, 0, b"-ERR value is not an integer or out of range\r\n"),
        (b"9223372036854775808", 1, 0, b"-ERR value is not an integer or out of range\r\n"),
    ],
)
def test_expiry_is_unix_ms_or_redis_error(text: bytes, unit_ms: int, now_ms: int, wanted: int | bytes) -> None:
    assert expiry_ms(text, unit_ms, now_ms, "x") == wanted


# APPEND and SETRANGE where values are large: who reads keeps the old bytes, and what finds no room changes nothing.

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
def test_a_reader_keeps_the_bytes_that_it_was_given(session: FakeSession, edit: list[bytes]) -> None:
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


@pytest.mark.parametrize("anew", ["SET k 1", "MSET k 1", "GETSET k 1"])
def test_the_same_digit_set_anew_is_an_integer_again(session: FakeSession, anew: str) -> None:
    session.ask("INCRBYFLOAT k 1")
    assert session.ask("OBJECT ENCODING k") == b"$6\r\nembstr\r\n"
    session.ask(anew)
    assert session.ask("OBJECT ENCODING k") == b"$3\r\nint\r\n"


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
