"""WAITAOF: what has to be on disk before a client is told that it is."""

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kvredis.storage.background import Priority
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import content, keys_in
from tests.storage.tiered_store import MIB, TieredStore


def test_what_was_saved_is_there_after_a_loss_of_power(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "disk") as tiers:
        tiers.put(b"a", b"b")
        assert tiers.store.put(b"small", b"value", expire_at_ms=tiers.clock.ms() + 10_000)
        assert tiers.save()
        tiers.put(b"late")
        tiers.files.leave_behind(tmp_path / "after", random.Random(1))
        ends = tiers.clock.ms() + 10_000
    with TieredStore(tmp_path / "after") as tiers:
        assert keys_in(tiers.store) == [b"a", b"b", b"small"]
        assert (tiers.get(b"a"), tiers.get(b"b")) == (tiers.content(b"a"), tiers.content(b"b"))
        assert tiers.get(b"small") == b"value"
        entry = tiers.store.find(b"small")
        assert entry is not None
        assert entry.expire_at_ms == ends


def test_a_delete_that_was_waited_for_is_not_undone_by_a_loss_of_power(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "disk") as tiers:
        tiers.put_away(b"a", b"b", b"c")
        assert tiers.store.delete([b"a"]) == 1
        assert tiers.store.move((b"b", 0), (b"d", 1))
        assert tiers.store.expire(b"c", tiers.clock.ms() + 5000)
        assert tiers.save(tiers.store.writes + 1), "nothing is left to write, but to sync there is"
        tiers.files.leave_behind(tmp_path / "after", random.Random(2))
    with TieredStore(tmp_path / "after") as tiers:
        assert (keys_in(tiers.store, 0), keys_in(tiers.store, 1)) == ([b"c"], [b"d"])
        entry = tiers.store.find(b"c")
        assert entry is not None
        assert entry.expire_at_ms > 0


def test_only_what_was_written_since_is_written(tiers: TieredStore) -> None:
    tiers.put(b"old")
    since = tiers.store.writes + 1
    tiers.put(b"a", b"b")
    assert tiers.save(since)
    assert sorted(tiers.on_disk()) == [b"a", b"b"]
    assert [entry.key for entry in tiers.store.unsaved] == [b"old"]


def test_a_small_value_that_is_written_over_in_place_counts_as_written_last(tiers: TieredStore) -> None:
    assert tiers.store.put(b"small", b"one")
    tiers.put(b"a")
    since = tiers.store.writes + 1
    assert tiers.store.put(b"small", b"two")
    assert tiers.save(since)
    assert tiers.on_disk() == [b"small"]


def test_what_is_saved_stays_in_memory_and_is_not_written_again(tiers: TieredStore) -> None:
    tiers.put(b"a")
    assert tiers.save()
    assert tiers.save()
    assert tiers.steps("pwrite") == 1
    assert tiers.tier(b"a") == "memory"


def test_all_is_written_in_the_order_in_which_it_would_leave(tiers: TieredStore) -> None:
    tiers.put(b"a", b"b", b"c")
    lease = tiers.store.peek(b"c")
    tiers.clock.now_s += 1
    tiers.store.touch([b"a"])
    assert tiers.save()
    assert tiers.on_disk() == [b"b", b"a", b"c"], "what is read comes last, but it comes"
    assert lease is not None
    lease.release()


def test_a_crowd_that_asks_while_a_round_is_under_way_shares_the_next_one_and_its_sync(tiers: TieredStore) -> None:
    answers: list[tuple[str, bool]] = []
    at_start = tiers.steps("index: durable")

    def ask(name: str) -> None:
        tiers.tiering.saving.save(tiers.store.writes, lambda saved: answers.append((name, saved)))

    def others() -> None:
        for number in range(10):
            tiers.put(b"b:%d" % number)
            ask("second")

    tiers.put(b"a")
    ask("first")
    tiers.during("pwrite", others)
    assert not answers
    tiers.io.run()
    assert answers == [("first", True), *[("second", True)] * 10]
    assert tiers.steps("sync segment") == tiers.steps("index: durable") - at_start == 2
    assert tiers.steps("pwrite") == 11


def test_a_caller_that_asks_before_a_round_has_begun_shares_it(tiers: TieredStore) -> None:
    answers: list[bool] = []
    for key in (b"a", b"b"):
        tiers.put(key)
        tiers.tiering.saving.save(tiers.store.writes, answers.append)
    tiers.io.run()
    assert answers == [True, True]
    assert tiers.steps("sync segment") == 1


def test_more_than_are_looked_at_at_a_time_are_all_written_and_no_more(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=64 * MIB) as tiers:
        for number in range(1_200):
            assert tiers.store.put(b"old:%04d" % number, b"small")
        since = tiers.store.writes + 1
        for number in range(1_200):
            assert tiers.store.put(b"new:%04d" % number, b"small")
        assert tiers.save(since)
        assert sorted(tiers.on_disk()) == [b"new:%04d" % number for number in range(1_200)]
        assert tiers.save()
        assert tiers.on_disk()[1_200:] == [b"old:%04d" % number for number in range(1_200)]


def test_a_caller_that_asks_from_within_an_answer_gets_one(tiers: TieredStore) -> None:
    answers: list[bool] = []
    tiers.put(b"a")
    tiers.tiering.saving.save(0, lambda _: tiers.tiering.saving.save(0, answers.append))
    tiers.io.run()
    assert answers == [True]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("where", ["write", "callback"])
def test_what_a_save_raises_keeps_neither_the_others_nor_the_next_round_waiting(
    tmp_path: Path, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> Any:
        raise error

    def asks_and_fails(_: object) -> Any:
        saving.save(0, answers.append)
        raise error

    with TieredStore(tmp_path) as tiers:
        answers: list[bool] = []
        saving = tiers.tiering.saving
        tiers.put(b"a")
        with monkeypatch.context() as patched:
            if where == "write":
                patched.setattr(tiers.tiering.disk_io, "write_out", asks_and_fails)
            else:
                saving.save(0, fails)
            saving.save(0, answers.append)
            tiers.io.run(1)
        tiers.io.run()
        assert answers == ([False, True] if where == "write" else [True])


def test_a_save_that_fails_when_it_looks_for_exchanges_confirms_nothing(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> bool:
        raise MemoryError

    tiers.put(b"a")
    answers: list[bool] = []
    with monkeypatch.context() as patched:
        patched.setattr(tiers.tiering, "exchanged_since", fails)
        tiers.tiering.saving.save(tiers.store.writes, answers.append)
        tiers.io.run()
    assert answers == [False]
    assert tiers.save(tiers.store.writes)


def test_a_failed_write_is_told_to_the_clients_that_it_concerns(tiers: TieredStore) -> None:
    answers: dict[str, bool] = {}

    def others() -> None:
        tiers.put(b"b")
        tiers.tiering.saving.save(2, lambda saved: answers.update(early=saved))
        tiers.tiering.saving.save(3, lambda saved: answers.update(late=saved))
        tiers.files.plan = on("pwrite", Fault.EIO)

    tiers.put(b"a")
    tiers.tiering.saving.save(0, lambda _: None)  # under way, so that the others share a round
    tiers.during("pwrite", others)
    tiers.io.run()
    assert answers == {"early": False, "late": True}
    tiers.files.plan = None
    assert tiers.save(2)


def test_a_failed_sync_is_told_to_all(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.files.plan = on("sync segment", Fault.EIO)
    assert not tiers.save()
    tiers.files.plan = None
    assert not tiers.save(), "what the kernel did with the pages is not known"


def test_an_index_that_cannot_be_written_is_told_and_mended(tiers: TieredStore) -> None:
    tiers.put(b"a")

    def fail() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    tiers.during("index: commit", fail)
    assert not tiers.save()
    assert tiers.save()


@pytest.mark.parametrize("how", ["delete", "overwrite", "flush"])
def test_a_block_that_is_gone_meanwhile_is_no_failure(how: str, tiers: TieredStore) -> None:
    tiers.put(b"a", b"b")
    acts = {
        "delete": lambda: tiers.store.delete([b"a", b"b"]),
        "overwrite": lambda: tiers.store.put(b"a", content(8)),
        "flush": tiers.store.flush,
    }
    tiers.during("pwrite", acts[how])
    assert tiers.save()


def test_a_block_that_cannot_be_stored_is_not_said_to_be_safe(tiers: TieredStore) -> None:
    assert tiers.store.put(b"k" * 1000, content(1))
    since = tiers.store.writes + 1
    tiers.put(b"a")
    assert not tiers.save()
    assert tiers.save(since)


def test_a_job_that_dies_ends_its_round_all_the_same(tiers: TieredStore) -> None:
    tiers.put(b"a", b"b")
    tiers.during("pwrite", lambda: 1 / 0)
    assert not tiers.save()
    assert tiers.save()


def test_a_queue_without_room_is_an_answer(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.io.queue_jobs_max = 0
    assert not tiers.save()
    tiers.io.queue_jobs_max = 10
    assert tiers.save()


def test_those_that_wait_for_a_write_go_before_all_spills(tiers: TieredStore) -> None:
    tiers.put(b"a", b"b")
    tiers.tiering.spill(list(tiers.store.unsaved))
    answers: list[bool] = []
    tiers.tiering.saving.save(2, answers.append)
    assert tiers.io.figures()[Priority.DEMAND].queued > 0
    while not answers:
        assert tiers.io.run(1)
    assert sorted(tiers.on_disk())[-1:] == [b"b"]


def test_nothing_to_save_is_saved(tiers: TieredStore) -> None:
    assert tiers.save()
    assert tiers.steps("pwrite") == tiers.steps("sync segment") == 0


def test_what_the_disk_let_go_of_is_written_for_the_next_that_asks(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB, arena_bytes=2 * MIB) as tiers:
        keys = [b"n:%02d" % number for number in range(16)]
        tiers.put(*keys)
        assert tiers.save()
        tiers.put(b"new")
        assert tiers.save(tiers.store.writes)
        assert keys[0] not in tiers.on_disk()
        assert tiers.save(tiers.store.writes)
        assert keys[0] in tiers.on_disk()


def test_what_had_to_make_room_on_disk_for_the_rest_is_not_said_to_be_safe(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB, arena_bytes=2 * MIB) as tiers:
        keys = [b"n:%02d" % number for number in range(20)]
        tiers.put(*keys)
        assert not tiers.save(), "the disk holds 16"
        assert len(tiers.store.unsaved) == 4
        assert not tiers.save(1), "who asks again is not told that it is safe either: now others have made room"
        assert len(tiers.store.unsaved) == 4
        tiers.put(b"new")
        assert tiers.save(tiers.store.writes), "what is older is nothing to who wrote this"
        assert b"new" in tiers.on_disk()


def test_the_tick_brings_the_index_up_to_date(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "disk") as tiers:
        tiers.put(b"a")
        tiers.tiering.spill(list(tiers.store.unsaved))
        tiers.io.run()
        assert tiers.disk.unsettled
        tiers.tiering.tick()
        tiers.tiering.tick()
        assert tiers.io.run() == 1
        assert not tiers.disk.unsettled
        tiers.tiering.tick()
        assert tiers.io.run() == 0
        tiers.files.leave_behind(tmp_path / "after")
    with TieredStore(tmp_path / "after") as tiers:
        assert tiers.get(b"a") == tiers.content(b"a")


def test_the_index_learns_of_what_was_deleted_though_there_is_always_a_demand_before_it(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "disk") as tiers:
        tiers.put_away(b"a", b"b", b"c")
        assert tiers.store.delete([b"a"]) == 1
        for key in (b"b", b"c"):
            tiers.tiering.tick()
            tiers.bring((key, 0))
            assert tiers.io.run(1) == 1, "and another demand comes before this one is over"
        assert not tiers.disk.unsettled
        tiers.files.leave_behind(tmp_path / "after")
    with TieredStore(tmp_path / "after") as tiers:
        assert tiers.tier(b"a") is None
