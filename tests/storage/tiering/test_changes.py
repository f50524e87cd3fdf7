"""What happens to a key while its block is away, on its way to disk, or on its way back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvredis.storage.store import Store
from tests.storage.small_store import Clock, content, read
from tests.storage.tiered_store import TieredStore

NAME = (b"a", 0)

LEAVING: dict[str, Callable[[Store], object]] = {
    "delete": lambda store: store.delete([b"a"]),
    "expire at once": lambda store: store.expire(b"a", 1),
    "flush all": lambda store: store.flush(),
    "flush its database": lambda store: store.flush(0),
}

leaving = pytest.mark.parametrize("act", LEAVING.values(), ids=LEAVING)
with_others = pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])


def is_gone(tiers: TieredStore) -> None:
    """Nothing is left of NAME, in memory or on disk."""
    tiers.io.run()
    assert tiers.store.find(*NAME) is None
    assert tiers.disk.get(*NAME) is None
    tiers.disk.settle()
    tiers.check()
    assert tiers.store.leases == tiers.store.reserved_bytes == tiers.store.retired_bytes == 0


# ---- gone --------------------------------------------------------------------------------------------------------


@leaving
@with_others
def test_a_block_that_is_gone_while_it_is_written_leaves_nothing_on_disk(
    act: Callable[[Store], object], others: bool, tiers: TieredStore
) -> None:
    assert tiers.store.put(b"other", content(1), space=1) or not others
    tiers.put(b"a")
    tiers.during("pwrite", lambda: act(tiers.store))
    tiers.save(tiers.store.writes)
    is_gone(tiers)


@leaving
@with_others
def test_a_block_that_is_gone_while_it_is_read_does_not_come_back(
    act: Callable[[Store], object], others: bool, tiers: TieredStore
) -> None:
    tiers.put_away(b"a")
    if others:
        assert tiers.store.put(b"other", content(1), space=1)
    tiers.during("pread", lambda: act(tiers.store))
    assert tiers.get(*NAME) is None
    is_gone(tiers)


@leaving
@with_others
def test_a_block_that_is_gone_before_its_job_began_is_neither_written_nor_read(
    act: Callable[[Store], object], others: bool, tiers: TieredStore
) -> None:
    if others:
        assert tiers.store.put(b"other", content(1), space=1)
    tiers.put_away(b"a")
    bringing = tiers.bring(NAME)
    act(tiers.store)
    tiers.put(b"a")
    tiers.tiering.spill(list(tiers.store.unsaved))
    act(tiers.store)
    writes = tiers.steps("pwrite")
    tiers.io.run()
    assert tiers.steps("pread") == 0
    assert tiers.steps("pwrite") == writes
    assert bringing is not None
    bringing.release()
    is_gone(tiers)


@leaving
@with_others
def test_a_block_that_is_away_can_be_taken_away(
    act: Callable[[Store], object], others: bool, tiers: TieredStore
) -> None:
    if others:
        assert tiers.store.put(b"other", content(1), space=1)
    tiers.put_away(b"a")
    act(tiers.store)
    assert tiers.store.away == len(tiers.store.index)
    is_gone(tiers)


# ---- written over ------------------------------------------------------------------------------------------------


def test_a_block_that_is_written_over_while_it_is_written_is_the_new_one(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.during("pwrite", lambda: tiers.store.put(b"a", content(77)))
    tiers.save()
    record = tiers.disk.get(*NAME)
    assert record is not None
    assert record.superseded, "a crash alone finds the old one, which the save has confirmed"
    assert tiers.save()
    tiers.push_out()
    assert tiers.get(b"a") == content(77)


def test_a_block_that_is_written_over_while_it_is_read_is_the_new_one(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    tiers.during("pread", lambda: tiers.store.put(b"a", content(77)))
    assert tiers.get(b"a") == content(77)
    old = tiers.disk.get(*NAME)
    assert old is not None, "it is kept until the new one is on disk"
    assert old.superseded
    assert tiers.save()
    tiers.push_out()
    assert tiers.get(b"a") == content(77)


def test_a_value_may_be_received_while_the_old_one_is_written(tiers: TieredStore) -> None:
    tiers.put(b"a")
    room = tiers.store.reserve(b"a", 20_000)
    assert room is not None
    assert tiers.save()
    room.view[:] = content(78, 20_000)
    room.commit()
    old = tiers.disk.get(*NAME)
    assert old is not None
    assert old.superseded
    assert tiers.get(b"a") == content(78, 20_000)


def test_a_small_value_in_place_of_a_block_that_is_away_and_the_reverse(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    assert tiers.store.put(b"a", b"small")
    assert tiers.store.away == 0
    assert tiers.save()
    tiers.store._unload(tiers.store.index.spaces[0][b"a"])
    tiers.put(b"a")
    assert tiers.store.away == 0
    assert tiers.get(b"a") == tiers.content(b"a")


# ---- another name ------------------------------------------------------------------------------------------------


RENAMING: dict[str, tuple[Callable[[Store], object], tuple[bytes, int]]] = {
    "rename": (lambda store: store.move(NAME, (b"b", 0)), (b"b", 0)),
    "move": (lambda store: store.move(NAME, (b"a", 3)), (b"a", 3)),
    "swapdb": (lambda store: store.swap(0, 3), (b"a", 3)),
    "there and back": (lambda store: store.move(NAME, (b"b", 0)) and store.move((b"b", 0), NAME), NAME),
}

renaming = pytest.mark.parametrize(("act", "new"), RENAMING.values(), ids=RENAMING)


def is_only(tiers: TieredStore, new: tuple[bytes, int]) -> None:
    """The block is under its new name alone, safe on disk, and the same."""
    assert tiers.get(*new) == tiers.content(b"a")
    assert len(tiers.store.index) == 1
    assert tiers.save()
    tiers.push_out()
    assert tiers.tier(*new) == "disk"
    assert tiers.get(*new) == tiers.content(b"a")
    assert tiers.tiering.stats.lost == 0


@renaming
def test_a_block_that_gets_another_name_while_it_is_written_is_on_disk_under_that(
    act: Callable[[Store], object], new: tuple[bytes, int], tiers: TieredStore
) -> None:
    tiers.put(b"a")
    tiers.during("pwrite", lambda: act(tiers.store))
    assert tiers.save(), "a new name is no reason to say that it is not safe"
    assert tiers.disk.get(*new) is not None
    assert tiers.steps("pwrite") == 1
    is_only(tiers, new)


@renaming
def test_a_block_that_gets_another_name_while_it_is_read_arrives_under_that(
    act: Callable[[Store], object], new: tuple[bytes, int], tiers: TieredStore
) -> None:
    tiers.put_away(b"a")
    bringing = tiers.bring(NAME)
    tiers.during("pread", lambda: act(tiers.store))
    tiers.io.run()
    assert tiers.tier(*new) == "memory"
    assert bringing is not None
    bringing.release()
    is_only(tiers, new)


@renaming
def test_a_block_that_is_away_gets_another_name(
    act: Callable[[Store], object], new: tuple[bytes, int], tiers: TieredStore
) -> None:
    tiers.put_away(b"a")
    act(tiers.store)
    assert tiers.tier(*new) == "disk"
    is_only(tiers, new)


@renaming
def test_a_block_gets_another_name_before_its_job_has_begun(
    act: Callable[[Store], object], new: tuple[bytes, int], tiers: TieredStore
) -> None:
    tiers.put(b"a")
    tiers.tiering.spill(list(tiers.store.unsaved))
    act(tiers.store)
    tiers.io.run()
    assert tiers.disk.get(*new) is not None
    is_only(tiers, new)


def test_a_caller_that_waits_for_a_name_that_is_gone_finds_nothing_and_is_told(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    told: list[object] = []
    bringing = tiers.tiering.bring([NAME], told.append)
    assert tiers.store.move(NAME, (b"b", 0))
    tiers.io.run()
    assert told == [bringing]
    assert tiers.store.leases == 0
    assert tiers.get(b"b") == tiers.content(b"a")


@pytest.mark.parametrize("away", [False, True])
def test_a_new_name_takes_the_place_of_a_block_on_disk(away: bool, tiers: TieredStore) -> None:
    tiers.put_away(b"a", b"b")
    if not away:
        assert tiers.get(b"a") == tiers.content(b"a")
    assert tiers.store.move(NAME, (b"b", 0))
    assert tiers.store.stats.overwritten == 1
    assert tiers.get(b"b") == tiers.content(b"a")
    assert len(tiers.disk) == 1


def test_databases_that_are_exchanged_keep_what_was_away_in_either(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    assert tiers.store.put(b"a", content(70), space=1)
    assert tiers.save()
    tiers.push_out()
    tiers.store.swap(0, 1)
    assert tiers.get(b"a", 1) == tiers.content(b"a")
    assert tiers.get(b"a", 0) == content(70)


# ---- its end -----------------------------------------------------------------------------------------------------


def test_an_end_that_is_set_while_a_block_is_written_or_read_or_away_is_that_of_the_record(tiers: TieredStore) -> None:
    soon = tiers.clock.ms() + 10_000

    def is_end(at_ms: int) -> None:
        record, entry = tiers.disk.get(*NAME), tiers.store.find(*NAME)
        assert record is not None
        assert entry is not None
        assert record.expire_at_ms == entry.expire_at_ms == at_ms

    tiers.put(b"a")
    tiers.during("pwrite", lambda: tiers.store.expire(b"a", soon))
    assert tiers.save()
    is_end(soon)
    tiers.push_out()
    assert tiers.store.expire(b"a", 0), "PERSIST"
    is_end(0)
    tiers.during("pread", lambda: tiers.store.expire(b"a", soon + 1))
    assert tiers.get(b"a") == tiers.content(b"a")
    is_end(soon + 1)


@pytest.mark.parametrize("how", ["find", "collect", "get", "match"])
def test_a_block_whose_time_comes_while_it_is_away_is_gone_everywhere(how: str, tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    assert tiers.store.expire(b"a", tiers.clock.ms() + 1000)
    tiers.clock.now_s += 2
    match how:
        case "find":
            assert tiers.store.find(b"a") is None
        case "collect":
            assert tiers.store.collect_expired() == 1
        case "get":
            assert tiers.get(b"a") is None
        case _:
            assert tiers.store.match([b"a"]) == 0
    is_gone(tiers)
    assert tiers.store.stats.expired == 1


def test_a_block_whose_time_comes_while_it_is_read_is_not_given(tmp_path: Path) -> None:
    with TieredStore(tmp_path, clock=(clock := Clock())) as tiers:
        tiers.put_away(b"a")
        assert tiers.store.expire(b"a", clock.ms() + 1000)
        tiers.during("pread", lambda: setattr(clock, "now_s", clock.now_s + 2))
        assert tiers.get(b"a") is None
        is_gone(tiers)


# ---- readers -----------------------------------------------------------------------------------------------------


@leaving
def test_a_reader_of_a_block_that_came_back_keeps_its_bytes(act: Callable[[Store], object], tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    bringing = tiers.bring(NAME)
    tiers.io.run()
    lease = tiers.store.lease(b"a")
    assert bringing is not None
    assert lease is not None
    bringing.release()
    act(tiers.store)
    tiers.put(*(b"fill:%d" % number for number in range(20)))
    assert lease.view == tiers.content(b"a")
    lease.release()
    is_gone(tiers)


def test_each_change_of_a_block_that_is_away_is_in_the_journal(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    tiers.store.journal = []
    tiers.push_out()
    assert read(tiers.store, b"a") is None
    assert tiers.get(b"a") is not None
    tiers.push_out()
    assert tiers.store.journal == [], "to be here or there is no change"
    assert tiers.store.move(NAME, (b"b", 0))
    assert tiers.store.delete([b"b"]) == 1
    assert tiers.store.journal == [("del", b"a", 0), ("set", b"b", 0), ("del", b"b", 0)]
