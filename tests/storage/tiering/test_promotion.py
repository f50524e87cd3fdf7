"""Blocks on their way back into memory, and those who wait for them."""

from pathlib import Path

import pytest

from kvredis.storage.background import Priority
from kvredis.storage.tiering.manager import Bringing
from kvredis.storage.tiering.transfers import Kind, State, Transfer
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, content, fill, read
from tests.storage.tiered_store import TieredStore

NAME = (b"a", 0)


def test_a_block_that_is_away_is_neither_read_nor_missed(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    store = tiers.store
    assert store.fetch(b"a") is store.lease(b"a") is store.peek(b"a") is store.fetch_untouched(b"a") is None
    assert (store.stats.hits, store.stats.misses) == (0, 0)
    assert store.match([b"a"]) == store.affirm([b"a"]) == store.touch([b"a"]) == store.count() == 1


def test_there_is_nothing_to_bring_that_is_here_or_nowhere(tiers: TieredStore) -> None:
    tiers.put(b"a")
    assert tiers.bring(NAME, (b"nowhere", 0)) is None
    assert tiers.io.run() == 0


def test_a_wait_is_told_once_when_all_of_it_is_here_and_holds_it(tiers: TieredStore) -> None:
    tiers.put_away(b"a", b"b")
    tiers.put(b"here")
    told: list[Bringing] = []
    names = [(b"a", 0), (b"b", 0), (b"here", 0), (b"nowhere", 0), (b"a", 0)]
    bringing = tiers.tiering.bring(names, told.append)
    assert bringing is not None
    tiers.io.run(1)
    assert not told
    tiers.io.run()
    assert told == [bringing]
    assert not bringing.refused
    tiers.put(*(b"fill:%d" % number for number in range(BLOCKS)))
    assert [tiers.tier(key) for key, _ in names] == ["memory", "memory", "memory", None, "memory"]
    bringing.release()
    bringing.release()
    assert tiers.store.leases == 0


def test_a_later_reader_joins_and_there_is_one_read(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    told: list[Bringing] = []
    first = tiers.tiering.bring([NAME], told.append)
    second = tiers.tiering.bring([NAME], told.append)
    third: list[Bringing | None] = []
    tiers.during("pread", lambda: third.append(tiers.tiering.bring([NAME], told.append)))
    assert tiers.io.run() == tiers.steps("pread") == 1
    assert told == [first, second, *third]
    assert read(tiers.store, b"a") == tiers.content(b"a")
    for bringing in told:
        bringing.release()


def test_a_demand_makes_a_prefetch_urgent(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    assert tiers.tiering.prefetch([b"a"]) is not None
    bringing = tiers.bring(NAME)
    assert tiers.io.figures()[Priority.PREFETCH].hastened == 1
    assert tiers.io.run() == 1
    assert bringing is not None
    bringing.release()


def test_a_caller_that_no_longer_waits_has_nothing_read_for_it(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    bringing = tiers.bring(NAME)
    assert bringing is not None
    bringing.release()
    assert tiers.io.run() == tiers.steps("pread") == 0
    assert not len(tiers.tiering.transfers)


def test_a_caller_that_leaves_while_its_block_is_read_holds_nothing(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    told: list[Bringing] = []
    bringing = tiers.tiering.bring([NAME], told.append)
    assert bringing is not None
    tiers.during("pread", bringing.release)
    tiers.io.run()
    assert not told
    assert tiers.tier(b"a") == "memory"
    assert tiers.store.leases == 0


def test_a_block_comes_back_into_a_memory_that_is_full_of_unwritten_ones_and_none_is_lost(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    keys = fill(tiers.store)
    assert tiers.get(b"a") == tiers.content(b"a")
    assert tiers.store.stats.evicted == tiers.tiering.stats.spill_dropped == 0
    assert [tiers.get(key) for key in keys] == [content(number) for number in range(BLOCKS)]


def test_a_demand_drops_the_coldest_when_the_disk_takes_nothing(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    fill(tiers.store)
    tiers.files.plan = on("pwrite", Fault.EIO)
    assert tiers.get(b"a") == tiers.content(b"a")
    assert tiers.tiering.stats.spill_dropped == 1


def test_a_prefetch_drops_no_block_when_the_disk_takes_nothing(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    keys = fill(tiers.store)
    tiers.files.plan = on("pwrite", Fault.EIO)
    seen: list[State] = []
    tiers.tiering._begin(Kind.PREFETCH, b"a", 0, lambda transfer: seen.append(transfer.state))
    tiers.io.run()
    assert seen == [State.REFUSED]
    assert tiers.tier(b"a") == "disk"
    assert [tiers.tier(key) for key in keys] == ["memory"] * BLOCKS


def test_there_is_no_room_where_everything_is_held(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    keys = fill(tiers.store)
    leases = [tiers.store.lease(key) for key in keys]
    bringing = tiers.bring(NAME)
    assert bringing is not None
    tiers.io.run()
    assert bringing.refused
    bringing.release()
    for lease in leases:
        assert lease is not None
        lease.release()
    assert tiers.get(b"a") == tiers.content(b"a")


def test_a_caller_that_wants_more_than_memory_holds_is_told_so_and_has_what_fits(tiers: TieredStore) -> None:
    keys = [b"n:%02d" % number for number in range(BLOCKS + 4)]
    for key in keys:
        tiers.put(key)
        assert tiers.save()
    tiers.push_out()
    told: list[Bringing] = []
    bringing = tiers.tiering.bring([(key, 0) for key in keys], told.append)
    assert bringing is not None
    tiers.io.run()
    assert told == [bringing]
    assert bringing.refused
    assert [tiers.tier(key) for key in keys] == ["memory"] * BLOCKS + ["disk"] * 4
    bringing.release()


def test_two_callers_that_want_more_than_fits_are_both_told_and_the_next_gets_its_block(tiers: TieredStore) -> None:
    ours = [b"x:%02d" % number for number in range(BLOCKS * 3 // 4)]
    theirs = [b"y:%02d" % number for number in range(BLOCKS * 3 // 4)]
    for key in [*ours, *theirs]:
        tiers.put(key)
        assert tiers.save()
    tiers.push_out()
    told: list[Bringing] = []
    waits = [tiers.tiering.bring([(key, 0) for key in keys], told.append) for keys in (ours, theirs)]
    tiers.io.run()
    assert sorted(map(id, told)) == sorted(map(id, waits))
    assert any(bringing.refused for bringing in told)
    for bringing in told:
        bringing.release()
    again = tiers.tiering.bring([(key, 0) for key in theirs], told.append)
    tiers.io.run()
    assert again is None or not again.refused
    if again is not None:
        again.release()


def test_a_queue_without_room_refuses_and_memory_stays_as_it_is(tiers: TieredStore) -> None:
    tiers.put_away(b"a", b"b")
    tiers.io.queue_jobs_max = 1
    told: list[Bringing] = []
    bringing = tiers.tiering.bring([(b"a", 0), (b"b", 0)], told.append)
    assert bringing is not None
    tiers.io.run()
    assert told == [bringing]
    assert bringing.refused
    bringing.release()
    assert (tiers.tier(b"a"), tiers.tier(b"b")) == ("memory", "disk")


def test_a_spill_that_was_overtaken_is_not_taken_for_the_way_back(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.io.pause()
    tiers.tiering.spill(list(tiers.store.unsaved))
    (entry,) = tiers.store.unsaved
    assert tiers.tiering.disk_io.write_out([entry]) == [True], "a client has asked for it to be saved meanwhile"
    tiers.push_out()
    tiers.io.resume()
    assert tiers.get(b"a") == tiers.content(b"a")


def test_a_block_that_leaves_before_its_transfer_has_ended_is_read_anew(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    told: list[Bringing] = []

    def leave_and_ask_again(transfer: Transfer[None]) -> None:
        tiers.push_out()
        assert tiers.tiering.bring([NAME], told.append) is not None

    assert tiers.tiering.promote(b"a", 0, leave_and_ask_again) is not None
    tiers.io.run()
    assert tiers.tier(b"a") == "memory"
    (bringing,) = told
    bringing.release()


def test_a_damaged_block_is_a_miss_and_counted_and_others_are_well(tiers: TieredStore) -> None:
    tiers.store.journal = []
    tiers.files.plan = on("pwrite", Fault.FLIP)
    tiers.put(b"a")
    assert tiers.save()
    tiers.files.plan = None
    tiers.put_away(b"b")
    tiers.store.journal.clear()
    assert tiers.get(b"a") is None
    assert tiers.tier(b"a") is None
    assert tiers.store.journal == [("evicted", b"a", 0)]
    assert (tiers.tiering.stats.lost, tiers.disk.stats.quarantined) == (1, 1)
    assert tiers.get(b"b") == tiers.content(b"b")
    tiers.put_away(b"a")
    assert tiers.get(b"a") == tiers.content(b"a")


def test_a_device_that_cannot_read_costs_the_block_and_no_more(tiers: TieredStore) -> None:
    tiers.put_away(b"a", b"b")
    tiers.files.plan = on("pread", Fault.EIO)
    assert tiers.get(b"a") is None
    tiers.files.plan = None
    assert tiers.get(b"b") == tiers.content(b"b")
    assert tiers.store.reserved_bytes == tiers.store.leases == 0
    assert tiers.tiering.stats.lost == 1


def test_a_promoted_block_is_counted_and_its_uses_go_on(tiers: TieredStore) -> None:
    tiers.put(b"a")
    assert read(tiers.store, b"a") is not None
    tiers.put_away(b"b")
    assert tiers.get(b"a") == tiers.content(b"a")
    entry = tiers.store.find(b"a")
    assert entry is not None
    assert entry.hits == 2
    assert (tiers.tiering.stats.promoted, tiers.tiering.stats.promoted_bytes) == (1, BLOCK_BYTES)


def test_what_waits_when_the_store_closes_is_told(tmp_path: Path) -> None:
    tiers = TieredStore(tmp_path)
    tiers.put_away(b"a")
    told: list[Bringing] = []
    answers: list[bool] = []
    assert tiers.tiering.bring([NAME], told.append) is not None
    tiers.put(b"b")
    tiers.tiering.saving.save(0, answers.append)
    tiers.tiering.saving.save(0, answers.append)
    tiers.store.close(save=False)
    assert len(told) == 1
    assert answers == [False, False]


def test_a_block_that_is_deleted_while_room_is_made_for_it_is_not_lost(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    fill(tiers.store)
    seen: list[State] = []
    assert tiers.tiering.promote(b"a", 0, lambda transfer: seen.append(transfer.state)) is not None
    tiers.during("pwrite", lambda: tiers.store.delete([b"a"]))
    tiers.io.run(1)
    assert seen == [State.DONE]
    assert tiers.tiering.stats.lost == tiers.store.reserved_bytes == 0


def test_what_cannot_be_sent_for_leaves_no_hold_on_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    with TieredStore(tmp_path) as tiers:
        tiers.put_away(b"a")
        tiers.put(b"here")
        monkeypatch.setattr(tiers.tiering, "promote", fails)
        with pytest.raises(MemoryError):
            tiers.tiering.bring([(b"here", 0), NAME], lambda _: None)
        assert tiers.store.leases == 0
