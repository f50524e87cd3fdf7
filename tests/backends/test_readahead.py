"""How a local backend waits for its disk: blocks come ahead of the reader, a store waits its time, and no caller for
ever."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends.local import LocalBackend
from kvredis.backends.readahead import Waits
from kvredis.storage.background import Priority

from .conftest import Clock
from .local_disk import (
    FIT,
    LENGTH,
    backend,
    drain,
    open_local,
    promoted,
    put_all,
    put_away,
    resident,
    stuck_disk,
    tiering_of,
)
from .verbs import content, keys_of, loaded, put

__all__ = ["backend"]

# ---- loading: ahead of the reader, within bounds -----------------------------------------------------------------


def test_while_a_block_is_used_the_next_ones_are_brought_within_a_quarter_of_memory(backend: LocalBackend) -> None:
    keys = keys_of(12)
    put_away(backend, keys)
    with closing(backend.load(keys)) as leases:
        first = next(leases)
        assert first is not None
        with first:
            assert promoted(backend) == 4
        second = next(leases)
        assert second is not None
        with second:
            assert promoted(backend) == 5
    assert promoted(backend) == 5


def test_a_block_of_more_than_a_quarter_of_memory_is_loaded_too(backend: LocalBackend) -> None:
    keys = keys_of(3)
    for key in keys:
        assert put(backend, key, content(key, 600_000))
    assert loaded(backend, keys) == [content(key, 600_000) for key in keys]


def test_what_has_not_begun_when_a_load_is_given_up_is_not_read(backend: LocalBackend) -> None:
    keys = keys_of(12)
    put_away(backend, keys)
    io = tiering_of(backend).io
    leases = backend.load(keys)
    first = next(leases)
    assert first is not None
    first.release()
    drain(backend)
    with stuck_disk(backend):
        second = next(leases)
        assert second is not None
        second.release()
        assert io.figures()[Priority.DEMAND].queued == 1
        leases.close()
        assert io.figures()[Priority.DEMAND].queued == 0
    assert promoted(backend) == 4


def test_a_reader_that_holds_all_of_memory_gets_misses_and_no_deadlock(tmp_path: Path) -> None:
    keys = keys_of(2 * FIT)
    with closing(open_local(tmp_path, spill_wait_s=0.1)) as backend:
        put_away(backend, keys[:FIT])
        put_away(backend, keys[FIT:])
        held = list(backend.load(keys))
        assert 0 < sum(lease is not None for lease in held) <= FIT
        first = held[0]
        assert first is not None
        assert first.view == content(keys[0], LENGTH)
        for lease in held:
            if lease is not None:
                lease.release()
        assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
        backend.store.check_integrity()


def test_what_is_read_ahead_never_keeps_the_next_block_from_its_room(backend: LocalBackend) -> None:
    keys, late = keys_of(4), b"other:15"
    put_away(backend, keys)
    with closing(backend.load([keys[0], late, *keys[1:]])) as leases:
        held = [next(leases)]
        drain(backend)
        held += backend.load([b"other:%d" % number for number in range(4, 15)])
        assert None not in held
        taken = backend.reserve(b"new", LENGTH)  # of the one block without a lease: the one that is next
        assert taken is not None
        assert not resident(backend, late)
        tiering_of(backend).spill_wait_s = 0.0
        lease = next(leases)
        assert lease is not None
        assert lease.view == content(late, LENGTH)
        taken.abort()
        for each in [*held, lease]:
            if each is not None:
                each.release()
        for key, each in zip(keys[1:], leases, strict=True):
            assert each is not None
            with each:
                assert each.view == content(key, LENGTH)


def test_a_reader_that_lets_go_late_still_gets_every_block(backend: LocalBackend) -> None:
    keys = keys_of(3 * FIT)
    put_all(backend, keys)
    held = []
    for key, lease in zip(keys, backend.load(keys), strict=True):
        assert lease is not None
        held.append((key, lease))
        if len(held) == FIT - 5:  # with what is read ahead that is all but one
            for each, leased in held:
                assert leased.view == content(each, LENGTH)
                leased.release()
            held.clear()
    for _, leased in held:
        leased.release()


def test_several_loads_at_once_in_a_memory_that_holds_none_of_them_all_get_all(backend: LocalBackend) -> None:
    keys = keys_of(3 * FIT)
    put_all(backend, keys)
    wrong: list[bytes] = []

    def run(order: list[bytes]) -> None:
        values = loaded(backend, order)
        wrong.extend(key for key, value in zip(order, values, strict=True) if value != content(key, LENGTH))

    orders = [keys, keys[::-1], keys[FIT:] + keys[:FIT]]
    threads = [threading.Thread(target=run, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_disk_that_does_not_answer_makes_misses_after_one_wait(tmp_path: Path) -> None:
    keys = keys_of(6)
    with closing(open_local(tmp_path, load_wait_s=0.05)) as backend:
        put_away(backend, keys)
        io = tiering_of(backend).io
        with stuck_disk(backend):
            began_s = backend.store.now_s()
            assert loaded(backend, [*keys, b"other:15"]) == [None] * 6 + [content(b"other:15", LENGTH)]
            assert backend.store.now_s() - began_s < 10
            assert io.figures()[Priority.DEMAND].queued == 0, "no reader waits for them any more"
        backend.load_wait_s = 20
        assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]


def test_a_load_with_little_time_gives_what_is_in_memory_and_waits_no_longer_for_the_rest(
    backend: LocalBackend,
) -> None:
    keys = keys_of(6)
    put_away(backend, keys)
    with stuck_disk(backend):
        began_s = backend.store.now_s()
        found = loaded(backend, [*keys[:3], b"other:15", *keys[3:]], within_s=0.05)
        assert found == [None] * 3 + [content(b"other:15", LENGTH)] + [None] * 3
        assert backend.store.now_s() - began_s < 10, "and not for as long as it usually would"
        assert loaded(backend, keys, within_s=0.0) == [None] * 6
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]


def test_time_enough_is_not_used_up_by_a_slow_reader(backend: LocalBackend) -> None:
    keys = keys_of(6)
    put_away(backend, keys)
    leases = backend.load(keys, within_s=20.0)
    held = next(leases)
    assert held is not None
    with held:
        drain(backend)
    with stuck_disk(backend):
        second = next(leases)
        assert second is not None, "it had come while the first was used"
        second.release()
    for key, lease in zip(keys[2:], leases, strict=True):
        assert lease is not None
        with lease:
            assert lease.view == content(key, LENGTH)


def test_turns_that_are_left_out_hold_nothing(backend: LocalBackend) -> None:
    keys = keys_of(6)
    put_away(backend, keys)
    reading = backend.read_ahead(keys, Waits(None))
    for turn in (0, 3, 5):
        lease = reading.take(turn)
        assert lease is not None
        with lease:
            assert lease.view == content(keys[turn], LENGTH)
            drain(backend)
    assert backend.store.leases == 0
    assert not reading.drop()


def test_what_is_asked_for_is_counted_by_the_tier_it_came_from(backend: LocalBackend) -> None:
    keys = keys_of(4)
    put_away(backend, keys)
    assert loaded(backend, [*keys, b"other:15", b"nowhere"])[5] is None
    assert loaded(backend, keys[:1]) == [content(keys[0], LENGTH)]
    stats = backend.stats()
    assert [stats[name] for name in ("lookups", "disk_hits", "memory_hits", "misses")] == [7, 4, 2, 1]


# ---- storing: waiting for the disk, within bounds ----------------------------------------------------------------


def test_a_store_waits_its_time_for_a_stuck_disk_and_then_the_coldest_leaves(tmp_path: Path) -> None:
    keys = keys_of(FIT + 2)
    with closing(open_local(tmp_path, spill_wait_s=0.1)) as backend:
        tiering = tiering_of(backend)
        with stuck_disk(backend):
            put_all(backend, keys[:FIT])
            assert tiering.stats.spill_waits == 0
            put_all(backend, keys[FIT : FIT + 1])
            assert (tiering.stats.spill_waits, tiering.stats.spill_dropped) == (1, 1)
            put_all(backend, keys[FIT + 1 :])
            assert tiering.stats.spill_waits == 1, "no caller waits again until a block has reached the disk"
            assert tiering.stats.spill_dropped == 2
            assert [backend.match([key]) for key in keys] == [0, 0, *[1] * FIT]
        drain(backend)
        assert tiering.makes_room


def test_a_store_goes_on_as_soon_as_the_disk_has_made_room(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiering = tiering_of(backend)
    wait_for_room = tiering.wait_for_room

    def free_and_wait(timeout_s: float) -> bool:
        tiering.io.resume()
        return wait_for_room(timeout_s)

    monkeypatch.setattr(tiering, "wait_for_room", free_and_wait)
    with stuck_disk(backend):
        put_all(backend, [*keys_of(FIT), b"more"])
    assert tiering.stats.spill_dropped == 0
    assert tiering.stats.spill_waits == 1
    assert loaded(backend, [*keys_of(FIT), b"more"]) == [content(key, LENGTH) for key in [*keys_of(FIT), b"more"]]


def test_in_the_long_run_an_engine_that_stores_waits_a_fiftieth_of_the_time(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_in_vain(timeout_s: float) -> bool:
        clock.now_s += timeout_s
        return False

    with closing(open_local(tmp_path, spill_wait_s=0.5)) as backend:
        tiering = tiering_of(backend)
        monkeypatch.setattr(backend.store, "now_s", clock)
        monkeypatch.setattr(tiering, "wait_for_room", wait_in_vain)
        monkeypatch.setattr(tiering, "waited_in_vain", lambda since_s: None)  # as if it wrote a block now and then
        with stuck_disk(backend):
            put_all(backend, keys_of(FIT))
            waits_s = []
            for number in range(300):
                clock.now_s += 0.1  # what the engine computes for
                began_s = clock.now_s
                put_all(backend, [b"more:%d" % number])
                waits_s.append(clock.now_s - began_s)
        assert waits_s[0] == pytest.approx(0.5)
        assert sum(waits_s[1:]) == pytest.approx(300 * 0.1 / 50, rel=0.1)
        assert max(waits_s[1:]) < 0.02


def test_a_value_that_memory_can_never_hold_is_refused_without_a_wait(tmp_path: Path) -> None:
    with closing(open_local(tmp_path, spill_wait_s=0.1)) as backend:
        with stuck_disk(backend):
            assert backend.reserve(b"huge", (1 << 20) + 1) is None
        assert tiering_of(backend).stats.spill_waits == 0
        assert tiering_of(backend).makes_room


def test_when_readers_hold_all_of_memory_a_store_is_refused_and_counted(tmp_path: Path) -> None:
    keys = keys_of(FIT)
    with closing(open_local(tmp_path, spill_wait_s=0.05)) as backend:
        put_all(backend, keys)
        held = [lease for lease in backend.load(keys) if lease is not None]
        assert len(held) == FIT
        assert not put(backend, b"more", content(b"more", LENGTH))
        waits = tiering_of(backend).stats.spill_waits
        assert not put(backend, b"more", content(b"more", LENGTH))
        assert backend.stats()["refused"] == 2
        assert tiering_of(backend).stats.spill_waits == waits, "no disk makes room there"
        assert tiering_of(backend).makes_room, "it is not the disk's fault"
        for lease in held:
            lease.release()
        assert put(backend, b"more", content(b"more", LENGTH))
