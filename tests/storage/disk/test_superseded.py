"""What a crash brings back of keys whose newer values memory alone has: never less than what was confirmed."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvredis.storage.store import Store
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import BLOCKS, content
from tests.storage.tiered_store import MIB, TieredStore

K, J, X = b"k", b"j", b"x"
OLD, OTHER, NEW = content(1), content(2), content(3)
Found = dict[tuple[bytes, int], bytes | None]


class Case:
    """A store whose `k` and `j` of database 0 are confirmed, and what comes back when it is killed."""

    def __init__(self, folder: Path, **options: int) -> None:
        self._folder = folder
        self._numbers = count()
        self.tiers = TieredStore(folder / "here", **options)  # type: ignore[arg-type]
        self.store = self.tiers.store
        assert self.store.put(K, OLD)
        assert self.store.put(J, OTHER)
        assert self.tiers.save()

    def tick(self) -> None:
        """What the server does some ten times a second, a second later."""
        self.tiers.clock.now_s += 2
        self.tiers.tiering.tick()
        self.tiers.io.run()

    def after_a_kill(self, *keys: bytes, spaces: int = 1) -> Found:
        """What another server would find under these keys of each of the first databases."""
        there = self._folder / f"there-{next(self._numbers)}"
        self.tiers.files.leave_behind(there)
        with TieredStore(there, clock=self.tiers.clock) as again:
            return {(key, space): again.get(key, space) for space in range(spaces) for key in keys}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def end(case: Case) -> None:
    with case.tiers:
        case.tiers.check()


OVERWRITES: dict[str, Callable[[Store], object]] = {
    "SET": lambda store: store.put(K, NEW),
    "SET of a small value": lambda store: store.put(K, b"small"),
    "DEL, SET": lambda store: (store.delete([K]), store.put(K, NEW)),
    "SET twice": lambda store: (store.put(K, OTHER), store.put(K, NEW)),
    "SET with an end": lambda store: store.put(K, NEW, 0, 1 << 50),
    "SET, EXPIRE": lambda store: (store.put(K, NEW), store.expire(K, 1 << 50)),
    "SET x, RENAME x k": lambda store: (store.put(X, NEW), store.move((X, 0), (K, 0))),
}


@pytest.mark.parametrize("words", [words for words in OVERWRITES if words != "DEL, SET"])
def test_a_confirmed_value_that_is_written_over_is_there_until_the_new_one_is(case: Case, words: str) -> None:
    OVERWRITES[words](case.store)
    case.tick()
    assert case.after_a_kill(K)[K, 0] == OLD
    assert case.tiers.save()
    assert case.after_a_kill(K)[K, 0] == (b"small" if "small" in words else NEW)
    assert case.tiers.disk.superseded_bytes == 0
    end(case)


def test_a_value_that_was_deleted_and_set_again_may_be_absent_but_not_come_back_once_that_is_settled(
    case: Case,
) -> None:
    OVERWRITES["DEL, SET"](case.store)
    assert case.after_a_kill(K)[K, 0] == OLD
    case.tick()
    assert case.after_a_kill(K)[K, 0] is None
    end(case)


@pytest.mark.parametrize("words", OVERWRITES)
@pytest.mark.parametrize("gone", ["deleted", "expired", "flushed", "evicted"])
def test_what_has_gone_takes_the_value_before_it_along(case: Case, words: str, gone: str) -> None:
    store = case.store
    OVERWRITES[words](store)
    if gone == "deleted":
        store.delete([K])
    elif gone == "expired":
        store.expire(K, store.now_ms() + 1)
        case.tiers.clock.now_s += 1
        store.collect_expired()
    elif gone == "flushed":
        store.flush(0)
    else:
        with store.lock:
            store._evict(store.index.spaces[0][K])
    case.tick()
    assert case.after_a_kill(K)[K, 0] is None
    assert case.tiers.disk.superseded_bytes == 0
    end(case)


def test_a_new_value_that_is_renamed_leaves_both_names_what_they_held_until_it_is_on_disk(case: Case) -> None:
    case.store.put(K, NEW)
    case.store.move((K, 0), (J, 0))
    case.tick()
    assert case.after_a_kill(K, J) == {(K, 0): OLD, (J, 0): OTHER}
    assert case.tiers.save()
    assert case.after_a_kill(K, J) == {(K, 0): None, (J, 0): NEW}
    end(case)


def test_a_value_that_is_on_disk_is_renamed_at_once_over_what_is_there(case: Case) -> None:
    case.store.put(J, NEW)
    case.store.move((K, 0), (J, 0))
    case.tick()
    assert case.after_a_kill(K, J) == {(K, 0): None, (J, 0): OLD}
    end(case)


@pytest.mark.parametrize("what", ["written", "deleted", "renamed over", "flushed"])
def test_what_becomes_of_the_old_name_waits_for_the_value_that_was_renamed(case: Case, what: str) -> None:
    """Or neither the confirmed value nor what it has become would be anywhere."""
    store = case.store
    store.put(K, NEW)
    if what == "flushed":
        store.move((K, 0), (X, 1))
        store.flush(0)
    else:
        store.move((K, 0), (X, 0))
        store.put(K, content(4))
        if what == "deleted":
            store.delete([K])
        elif what == "renamed over":
            store.move((J, 0), (K, 0))
        else:
            case.tiers.tiering.spill([store.index.spaces[0][K]])
            case.tiers.io.run()
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, X) == {(K, 0): OLD, (X, 0): None}
    case.tick()
    case.tick()
    found = case.after_a_kill(K, X, spaces=2)
    assert found == dict.fromkeys(found) | {
        "written": {(K, 0): content(4), (X, 0): NEW},
        "deleted": {(X, 0): NEW},
        "renamed over": {(K, 0): OTHER, (X, 0): NEW},
        "flushed": {(X, 1): NEW},
    }.get(what, {})
    end(case)


def test_an_exchange_of_databases_waits_for_the_values_that_make_it_true(case: Case) -> None:
    before = {(K, 0): OLD, (J, 0): OTHER, (K, 1): None, (J, 1): None}
    case.store.put(K, NEW)
    case.store.swap(0, 1)
    assert case.tiers.disk.waits
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, J, spaces=2) == before, "not the old value where only the new one has been"
    case.tick()
    assert not case.tiers.disk.waits, "it is written without being asked for"
    case.tick()
    assert case.after_a_kill(K, J, spaces=2) == {(K, 0): None, (J, 0): None, (K, 1): NEW, (J, 1): OTHER}
    end(case)


def test_a_new_value_in_the_place_of_one_that_went_to_the_other_database_is_waited_for(case: Case) -> None:
    case.store.put(K, NEW, 1)
    case.store.swap(0, 1)
    case.tiers.disk.settle()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): OLD, (K, 1): None}
    assert case.tiers.save(case.store.writes), "a client that asks for a sync has it written"
    assert case.after_a_kill(K, spaces=2) == {(K, 0): NEW, (K, 1): OLD}
    end(case)


@pytest.mark.parametrize("what", ["deleted", "flushed", "renamed", "swapped back", "written over"])
def test_an_exchange_of_databases_is_waited_for_no_longer_than_there_is_something_to_wait_for(
    case: Case, what: str
) -> None:
    store = case.store
    store.put(K, NEW)
    store.swap(0, 1)
    if what == "deleted":
        store.delete([K], 1)
    elif what == "flushed":
        store.flush(1)
    elif what == "renamed":
        store.move((K, 1), (X, 1))
    elif what == "swapped back":
        store.swap(0, 1)
    else:
        store.put(K, content(4), 1)
    case.tick()
    case.tick()
    assert not case.tiers.disk.waits
    found = case.after_a_kill(K, X, spaces=2)
    assert found == dict.fromkeys(found) | {
        "deleted": {},
        "flushed": {},
        "renamed": {(X, 1): NEW},
        "swapped back": {(K, 0): NEW},
        "written over": {(K, 1): content(4)},
    }.get(what, {})
    end(case)


def test_two_exchanges_that_the_index_hears_of_together_wait_for_what_the_second_brings(case: Case) -> None:
    """What has come by the first may have been written, and gone on, before the second one."""
    store = case.store
    store.put(K, OTHER, 1)
    store.put(K, NEW, 2)
    store.swap(0, 1)
    store.swap(0, 2)
    case.tiers.tiering.spill([store.index.spaces[2][K]])
    case.tiers.io.run()
    store.delete([K], 1)
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K)[K, 0] == OLD, "or it would be absent, which it never was"
    assert case.tiers.save(store.writes)
    assert case.after_a_kill(K, spaces=3) == {(K, 0): NEW, (K, 1): None, (K, 2): OTHER}
    end(case)


def test_an_exchange_waits_for_a_value_that_is_written_over_before_it_is_looked_at(case: Case) -> None:
    store = case.store
    store.put(K, NEW)
    store.swap(0, 1)
    store.put(J, NEW, 1)  # another one that supersedes, before the next
    store.put(K, OTHER, 1)
    assert not case.tiers.disk.settle()
    case.tiers.tiering.spill([store.index.spaces[1][J]])
    case.tiers.io.run()
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): OLD, (K, 1): None}, "in database 1 it was never that"
    assert case.tiers.save()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): None, (K, 1): OTHER}
    end(case)


def test_an_exchange_waits_for_a_value_though_the_record_in_its_place_has_gone_meanwhile(case: Case) -> None:
    store = case.store
    store.put(K, NEW, 1)
    store.swap(0, 1)
    store.delete([K], 1)
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): OLD, (K, 1): None}
    case.tick()
    case.tick()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): NEW, (K, 1): None}
    end(case)


def test_an_exchange_waits_for_a_value_though_the_database_that_has_its_record_was_flushed(case: Case) -> None:
    store = case.store
    store.put(K, NEW, 1)
    store.swap(0, 1)
    store.flush(1)
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): OLD, (K, 1): None}
    case.tick()
    case.tick()
    assert case.after_a_kill(K, J, spaces=2) == {(K, 0): NEW, (K, 1): None, (J, 0): None, (J, 1): None}
    case.tick()
    assert case.tiers.disk.free_bytes == case.tiers.disk.limit_bytes - case.tiers.disk.live_bytes
    end(case)


def test_exchanges_that_undo_each_other_wait_for_what_was_set_in_the_place_of_what_was_deleted_in_between(
    case: Case,
) -> None:
    store = case.store
    store.put(K, OTHER, 1)
    assert case.tiers.save()
    store.swap(0, 1)
    store.delete([K], 1)
    store.put(K, NEW, 1)
    store.swap(0, 1)
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): OLD, (K, 1): OTHER}, "in database 0 it was never absent"
    assert case.tiers.save()
    assert case.after_a_kill(K, spaces=2) == {(K, 0): NEW, (K, 1): OTHER}
    end(case)


def test_exchanges_that_undo_each_other_do_not_bring_a_value_back_where_it_never_was(case: Case) -> None:
    store = case.store
    store.swap(0, 1)
    store.put(K, OTHER, 1)
    case.tiers.tiering.spill([store.index.spaces[1][K]])
    case.tiers.io.run()
    store.put(K, NEW, 1)
    store.move((K, 1), (X, 1))
    store.swap(0, 1)
    assert not case.tiers.disk.settle()
    assert case.after_a_kill(K, X, spaces=2) == {(K, 0): OLD, (K, 1): None, (X, 0): None, (X, 1): None}
    assert case.tiers.save()
    assert case.after_a_kill(K, X, spaces=2) == {(K, 0): None, (K, 1): None, (X, 0): NEW, (X, 1): None}
    end(case)


@pytest.mark.parametrize("often", [1, 3])
def test_a_value_that_was_written_over_while_it_was_saved_is_confirmed_until_the_new_one_is(
    case: Case, often: int
) -> None:
    def overwrite() -> None:
        for number in range(often):
            case.store.put(X, content(10 + number))

    case.store.put(X, NEW)
    case.tiers.during("pwrite", overwrite)
    assert case.tiers.save()
    assert case.after_a_kill(X)[X, 0] == NEW
    assert case.tiers.save()
    assert case.after_a_kill(X)[X, 0] == content(9 + often)
    end(case)


def test_a_value_that_was_written_over_before_its_turn_in_a_save_is_confirmed_by_the_new_one(case: Case) -> None:
    case.store.put(X, NEW)
    case.store.put(b"y", NEW)
    case.tiers.during("pwrite", lambda: (case.store.put(X, OLD), case.store.put(b"y", OLD)))
    assert case.tiers.save()
    found = case.after_a_kill(X, b"y")
    assert found[X, 0] in (OLD, NEW)
    assert found[b"y", 0] in (OLD, NEW)
    end(case)


def test_a_save_during_which_databases_are_exchanged_has_what_came_in_the_place_of_what_it_confirms(case: Case) -> None:
    def exchange() -> None:
        case.store.put(X, NEW, 2)
        case.store.swap(1, 2)  # of which the disk has nothing yet

    case.store.put(X, OLD, 1)
    case.tiers.during("pwrite", exchange)
    assert case.tiers.save()
    found = case.after_a_kill(X, spaces=3)
    assert found == {(X, 0): None, (X, 1): NEW, (X, 2): OLD}, "database 1 has had one or the other since"
    end(case)


def test_a_value_that_was_renamed_and_written_over_while_it_was_saved_does_not_leave_its_old_name_anything(
    case: Case,
) -> None:
    case.store.put(K, NEW)
    case.store.move((K, 0), (X, 0))
    case.tiers.during("pwrite", lambda: case.store.put(X, OTHER))
    assert case.tiers.save()
    assert case.after_a_kill(K, X) == {(K, 0): None, (X, 0): NEW}
    end(case)


class Untouched(dict[Any, Any]):
    """A dict in which one key can be looked up, and that nothing may walk."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a walk over all")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_an_exchange_and_a_flush_walk_over_no_keys_and_no_records(case: Case) -> None:
    """With a million of them that would stop the server for seconds."""
    store, disk = case.store, case.tiers.disk
    store.put(K, NEW)
    store.put(K, OTHER, 1)
    superseded = case.tiers.tiering.superseded
    superseded._of = Untouched(superseded._of)  # type: ignore[assignment]
    superseded._by = Untouched(superseded._by)
    disk._order = Untouched(disk._order)  # type: ignore[assignment]
    disk._superseded = Untouched(disk._superseded)
    for contents in disk._contents.values():
        contents.records = Untouched(contents.records)
    store.unsaved = Untouched(store.unsaved)
    store.index.spaces[:] = map(Untouched, store.index.spaces)
    store.swap(0, 1)
    assert store.flush(0, later=True) == 1
    assert store.count(1) == 2


def test_a_value_that_the_device_refuses_is_not_waited_for_and_its_old_one_is_not_found_elsewhere(case: Case) -> None:
    case.store.put(K, NEW)
    case.store.swap(0, 1)
    case.tiers.files.plan = on("pwrite", Fault.EIO)
    case.tick()
    assert not case.tiers.disk.waits
    assert case.tiers.disk.settle()
    assert case.after_a_kill(K, J, spaces=2) == {(K, 0): None, (K, 1): None, (J, 0): None, (J, 1): OTHER}
    end(case)


def test_a_value_that_no_segment_holds_leaves_the_old_one_where_it_is(tmp_path: Path) -> None:
    case = Case(tmp_path, arena_bytes=4 * MIB)
    case.store.put(K, bytes(2 * MIB))
    assert not case.tiers.save()
    assert case.after_a_kill(K)[K, 0] == OLD
    case.store.delete([K])
    assert case.tiers.save()
    assert case.after_a_kill(K)[K, 0] is None
    end(case)


# ---- where there is no room for both -----------------------------------------------------------------------------


def full_disk(tmp_path: Path, *, evicts: bool) -> Case:
    """A disk of 16 blocks that are confirmed, and the first of them written over in a larger memory."""
    case = Case(tmp_path, disk_bytes=MIB, arena_bytes=4 * MIB)
    for number in range(BLOCKS - 2):
        assert case.store.put(b"n:%02d" % number, content(10 + number))
    assert case.tiers.save()
    assert case.tiers.disk.free_bytes == 0
    case.store.evicts = evicts
    assert case.store.put(K, NEW)
    return case


def test_on_a_full_disk_others_leave_before_the_value_that_is_written_over(tmp_path: Path) -> None:
    case = full_disk(tmp_path, evicts=True)
    assert case.tiers.save(case.store.writes)
    assert case.tiers.disk.stats.gave_way == 0
    assert case.tiers.disk.stats.evicted == 1
    assert case.after_a_kill(K, J) == {(K, 0): NEW, (J, 0): None}
    end(case)


def test_without_eviction_the_old_value_gives_way_on_a_full_disk_so_that_the_new_one_is_saved(tmp_path: Path) -> None:
    case = full_disk(tmp_path, evicts=False)
    assert case.tiers.save(case.store.writes)
    assert case.tiers.disk.stats.gave_way == 1
    assert case.tiers.disk.stats.evicted == 0
    assert case.after_a_kill(K, J) == {(K, 0): NEW, (J, 0): OTHER}
    end(case)


def test_without_eviction_the_old_value_stays_where_its_room_would_not_do_for_the_new_one(tmp_path: Path) -> None:
    case = full_disk(tmp_path, evicts=False)
    assert case.store.put(K, bytes(4 * len(NEW)))
    assert not case.tiers.save(case.store.writes)
    assert case.tiers.disk.stats.gave_way == 0
    assert case.after_a_kill(K)[K, 0] == OLD
    assert case.store.put(K, NEW)
    assert case.tiers.save(case.store.writes)
    end(case)


def test_a_disk_full_of_values_that_are_written_over_takes_all_the_new_ones(tmp_path: Path) -> None:
    case = full_disk(tmp_path, evicts=True)
    keys = [K, J, *(b"n:%02d" % number for number in range(BLOCKS - 2))]
    for number, key in enumerate(keys):
        assert case.store.put(key, content(50 + number))
    assert case.store.put(b"one more", content(99))
    case.tiers.save()
    assert case.tiers.save(case.store.writes)
    assert case.tiers.disk.superseded_bytes == 0
    assert case.after_a_kill(b"one more")[b"one more", 0] == content(99)
    end(case)


def test_when_much_of_the_disk_is_taken_by_what_was_written_over_the_new_values_are_written(tmp_path: Path) -> None:
    case = Case(tmp_path, disk_bytes=MIB, arena_bytes=4 * MIB)
    case.store.put(K, NEW)
    case.tick()
    assert case.tiers.disk.superseded_bytes, "one block of sixteen is not much"
    case.store.put(J, NEW)
    case.store.put(X, NEW)
    assert case.tiers.save(case.store.writes)
    case.store.put(X, OTHER)
    case.tick()
    assert case.tiers.disk.superseded_bytes == 0
    case.tick()
    assert case.after_a_kill(K, J, X) == {(K, 0): NEW, (J, 0): NEW, (X, 0): OTHER}
    end(case)


# ---- a loss of power ---------------------------------------------------------------------------------------------


def test_the_row_that_replaces_a_confirmed_one_is_written_behind_its_payload(case: Case) -> None:
    case.store.put(K, NEW)
    case.tiers.tiering.spill(list(case.store.unsaved))
    case.tiers.io.run()
    case.tiers.files.words.clear()
    assert case.tiers.disk.settle()
    assert [word.split()[0] for word in case.tiers.files.words] == ["sync", "index:", "index:", "index:"]
    assert case.tiers.files.words[-1] == "index: durable"
    end(case)


def test_a_row_that_replaces_what_was_never_confirmed_waits_for_no_device(case: Case) -> None:
    for value in (OLD, NEW):
        case.store.put(X, value)
        case.tiers.tiering.spill(list(case.store.unsaved))
        case.tiers.io.run()
    case.tiers.files.words.clear()
    assert case.tiers.disk.settle()
    assert case.tiers.files.words == ["index: begin", "index: commit", "index: committed"]
    end(case)


def test_the_index_waits_for_the_device_once_a_second_at_most(case: Case) -> None:
    case.tick()
    for value in (NEW, OLD, NEW):
        case.store.put(K, value)
        case.tiers.tiering.spill(list(case.store.unsaved))
        case.tiers.io.run()
        case.tiers.tiering.tick()
        case.tiers.io.run()
    assert case.tiers.disk.replaces
    case.tick()
    assert not case.tiers.disk.replaces
    end(case)
