"""Who leaves when room is needed: by last access, the tail of a prompt before its head, and never what is held."""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvredis.storage.entry import Lease
from kvredis.storage.eviction.base import POLICIES, REDIS_POLICIES, make_policy
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.storage.small_store import ARENA_BYTES, BLOCK_BYTES, BLOCKS, Clock, content, fill, keys_in, present, read
from tests.storage.test_random_walk import Walk


def leased(store: Store, key: bytes, limit_s: float = 0.0) -> Lease:
    lease = store.lease(key, limit_s=limit_s)
    assert lease is not None
    return lease


def lease_and_release(store: Store, key: bytes) -> None:
    leased(store, key).release()


# ---- by last access ----------------------------------------------------------------------------------------------

USES: list[Callable[[Store, bytes], object]] = [
    lease_and_release,
    read,
    lambda store, key: store.match([key]),
    lambda store, key: store.touch([key]),
    lambda store, key: store.put(key, bytes(len(read(store, key) or b""))),
]
LOOKS: list[Callable[[Store, bytes], object]] = [
    lambda store, key: store.find(key),
    lambda store, key: keys_in(store),
    lambda store, key: store.scan(0, 1000),
    lambda store, key: (store.peek(key) or pytest.fail("not there")).release(),
    lambda store, key: (store.fetch_untouched(key) or pytest.fail("not there")).release(),  # type: ignore[union-attr]
]


@pytest.mark.parametrize("use", USES)
def test_what_was_used_stays_and_the_next_in_age_leaves(store: Store, use: Callable[[Store, bytes], object]) -> None:
    keys = fill(store)
    use(store, keys[0])
    store.put(b"new", content(1))
    assert present(store, keys) == [keys[0], *keys[2:]]


@pytest.mark.parametrize("look", LOOKS)
def test_what_was_only_looked_at_leaves_in_its_turn(store: Store, look: Callable[[Store, bytes], object]) -> None:
    keys = fill(store)
    look(store, keys[0])
    store.put(b"new", content(1))
    assert present(store, keys) == keys[1:]


def test_what_was_refreshed_leaves_when_its_turn_comes_again(store: Store) -> None:
    keys = fill(store)
    for _ in range(3):
        store.match(keys)
        store.touch(keys)
    others = fill(store, b"other:")
    assert present(store, keys) == []
    assert present(store, others) == others
    assert store.stats.evicted == BLOCKS
    assert store.stats.evicted_bytes == BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("use", USES)
def test_small_values_leave_by_last_access_too(store: Store, use: Callable[[Store, bytes], object]) -> None:
    length = 15_000
    keys = [b"%04d" % number for number in range(store.inline_bytes_high // (length + 4 + 256))]
    for key in keys:
        store.put(key, bytes(length))
    use(store, keys[0])
    store.put(b"new!", bytes(length))
    assert present(store, keys) == [keys[0], *keys[2:]]


def test_no_entry_leaves_while_there_is_room(store: Store) -> None:
    keys = fill(store, count=BLOCKS - 1)
    assert store.put(b"small", bytes(100))
    store.put(keys[0], content(9))
    assert present(store, keys) == keys
    assert store.stats.evicted == 0


# ---- prompts -----------------------------------------------------------------------------------------------------


def prompt(name: bytes, count: int) -> list[bytes]:
    return [name + b":%d" % number for number in range(count)]


def store_prompt(store: Store, keys: list[bytes], last: int = BLOCK_BYTES) -> None:
    """As an engine stores a prompt: the missing chunks tail first, each behind a touch of the head that is there."""
    there = store.match(keys)
    for number in range(len(keys) - 1, there - 1, -1):
        store.touch(keys[:there])
        assert store.put(keys[number], content(number, last if number == len(keys) - 1 else BLOCK_BYTES))
    store.touch(keys)


def assert_prefix_survives(store: Store, keys: list[bytes]) -> int:
    left = present(store, keys)
    assert left == keys[: len(left)], "a chunk outlived one that it is worth nothing without"
    return len(left)


def test_what_is_left_of_a_prompt_is_a_prefix_however_much_has_to_leave(store: Store) -> None:
    keys = prompt(b"prompt", 10)
    store_prompt(store, keys)
    left = {assert_prefix_survives(store, keys)}
    for number in range(BLOCKS):
        store.put(b"flood:%d" % number, content(number))
        left.add(assert_prefix_survives(store, keys))
    assert left == set(range(11))


def test_a_short_last_chunk_may_stay_where_it_is_in_the_way_of_none_and_the_others_are_a_prefix(store: Store) -> None:
    keys = prompt(b"prompt", 10)
    store_prompt(store, keys, last=BLOCK_BYTES // 3)
    left = set()
    for number in range(2 * BLOCKS):
        store.put(b"flood:%d" % number, content(number))
        left.add(assert_prefix_survives(store, keys[:-1]))
    assert left == set(range(10))


def test_of_a_prompt_larger_than_the_arena_the_head_is_kept(store: Store) -> None:
    keys = prompt(b"prompt", 3 * BLOCKS)
    store_prompt(store, keys)
    assert assert_prefix_survives(store, keys) == BLOCKS
    assert store.match(keys) == BLOCKS


@pytest.mark.parametrize("use", [Store.match, Store.touch])
def test_a_prompt_that_was_read_head_first_and_then_touched_loses_its_tail_first(
    store: Store, use: Callable[[Store, list[bytes]], int]
) -> None:
    keys = prompt(b"prompt", 10)
    store_prompt(store, keys)
    for key in keys:
        lease_and_release(store, key)
    use(store, keys)
    for number in range(BLOCKS):
        store.put(b"flood:%d" % number, content(number))
        assert_prefix_survives(store, keys)


@pytest.mark.parametrize("seed", range(4))
def test_of_many_prompts_with_common_heads_each_keeps_a_prefix(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    heads = [prompt(b"head:%d" % number, rng.randint(1, 5)) for number in range(3)]
    prompts = [head + prompt(head[0] + b":%d" % number, rng.randint(1, 7)) for number in range(8) for head in heads]
    shares = set()
    for _ in range(200):
        keys = rng.choice(prompts)
        store_prompt(store, keys)
        shares |= {assert_prefix_survives(store, each) for each in prompts}
    assert {0, 1, 3, 5} <= shares


# ---- what is held ------------------------------------------------------------------------------------------------


def delete(store: Store, key: bytes) -> None:
    assert store.delete([key]) == 1


def overwrite(store: Store, key: bytes) -> None:
    assert store.put(key, content(99))


def make_small(store: Store, key: bytes) -> None:
    assert store.put(key, b"small")


def expire(store: Store, key: bytes) -> None:
    assert store.expire(key, 1)


def keep(store: Store, key: bytes) -> None:
    pass


@pytest.mark.parametrize("fate", [keep, delete, overwrite, make_small, expire, lambda store, key: store.flush()])
def test_a_reader_keeps_the_bytes_whatever_happens_to_the_key(
    store: Store, fate: Callable[[Store, bytes], object]
) -> None:
    keys = fill(store)
    first, second = leased(store, keys[4]), leased(store, keys[4])
    fate(store, keys[4])
    for number in range(3 * BLOCKS):
        assert store.put(b"flood:%d" % number, content(number + 50))
        store.check_integrity()
    assert first.view == content(4)
    first.release()
    fill(store, b"more:")
    assert second.view == content(4)
    second.release()
    store.check_integrity()
    assert store.retired_bytes == store.leases == 0
    others = fill(store, b"others:")
    assert present(store, others) == others, "room that readers held is of use again"


def test_what_was_deleted_under_a_reader_does_not_come_back_when_the_lease_ends(store: Store) -> None:
    fill(store, count=2)
    lease = leased(store, b"fill:0")
    delete(store, b"fill:0")
    assert store.put(b"fill:0", content(7))
    lease.release()
    assert read(store, b"fill:0") == content(7)
    assert store.live_bytes == 2 * 64 * 1024


def test_what_is_being_written_is_never_given_to_another(store: Store) -> None:
    reservations = []
    for number in range(4):
        reservation = store.reserve(b"slow:%d" % number, BLOCK_BYTES)
        assert reservation is not None
        reservation.view[:] = content(number)
        reservations.append(reservation)
    for number in range(3 * BLOCKS):
        assert store.put(b"flood:%d" % number, content(number + 50))
    for reservation in reservations:
        reservation.commit()
    assert [read(store, b"slow:%d" % number) for number in range(4)] == [content(number) for number in range(4)]


def test_when_all_is_leased_a_value_is_refused_and_counted_and_nothing_is_lost(store: Store) -> None:
    keys = fill(store)
    leases = [leased(store, key) for key in keys]
    for count in range(1, 4):
        assert store.reserve(b"new", BLOCK_BYTES) is None
        assert not store.put(b"new", content(1))
        assert store.stats.refused == 2 * count
    assert store.put(b"small", b"needs no arena")
    assert present(store, keys) == keys
    assert [bytes(lease.view) for lease in leases] == [content(number) for number in range(BLOCKS)]
    assert store.stats.evicted == 0
    leases[5].release()
    assert store.put(b"new", content(1))
    assert present(store, keys) == [*keys[:5], *keys[6:]]
    for lease in leases:
        lease.release()


def test_when_all_is_being_written_a_value_is_refused_until_one_is_given_up(store: Store) -> None:
    reservations = [store.reserve(b"slow:%d" % number, BLOCK_BYTES) for number in range(BLOCKS)]
    assert store.reserve(b"new", BLOCK_BYTES) is None
    for reservation in reservations:
        assert reservation is not None
        reservation.abort()
    assert store.allocator.free_bytes == ARENA_BYTES
    assert store.put(b"new", content(1))


# ---- leases with a time limit ------------------------------------------------------------------------------------


def test_a_lease_is_revoked_for_room_after_its_time_and_not_before(store: Store, clock: Clock) -> None:
    keys = fill(store)
    leases = [leased(store, key, limit_s=10) for key in keys]
    clock.now_s += 9.99
    assert store.reserve(b"new", BLOCK_BYTES) is None
    assert leases[0].view == content(0)
    assert store.stats.leases_revoked == 0
    clock.now_s += 0.02
    assert store.put(b"new", content(99))
    assert store.stats.leases_revoked == BLOCKS
    assert store.leases == 0
    assert present(store, keys) == keys[1:]
    for lease in leases:
        assert not lease.held
        with pytest.raises(ValueError, match="released"):
            lease.view[0]
        lease.release()
    store.check_integrity()


def test_a_lease_outlives_its_time_while_no_writer_needs_the_room(store: Store, clock: Clock) -> None:
    fill(store, count=BLOCKS - 1)
    lease = leased(store, b"fill:0", limit_s=1)
    clock.now_s += 100
    store.put(b"new", content(1))
    assert lease.view == content(0)
    assert store.revoke_overdue() == 1
    assert not lease.held


def test_a_lease_outlives_its_time_while_another_entry_can_leave(store: Store, clock: Clock) -> None:
    fill(store)
    lease = leased(store, b"fill:0", limit_s=1)
    clock.now_s += 100
    for number in range(BLOCKS - 1):
        store.put(b"new:%d" % number, content(number))
    assert lease.view == content(0)
    lease.release()


def test_only_what_is_overdue_is_revoked(store: Store, clock: Clock) -> None:
    fill(store)
    ended = leased(store, b"fill:0", limit_s=1)
    short, long, endless = leased(store, b"fill:1", 1), leased(store, b"fill:1", 5), leased(store, b"fill:2")
    ended.release()
    clock.now_s += 2
    assert store.revoke_overdue() == 1
    assert (short.held, long.held, endless.held) == (False, True, True)
    fill(store, b"flood:", BLOCKS - 2)
    assert long.view == content(1)
    assert endless.view == content(2)
    long.release()
    clock.now_s += 100
    assert store.revoke_overdue() == 0
    assert endless.view == content(2)
    endless.release()


@pytest.mark.parametrize("fate", [delete, overwrite])
def test_a_revoked_lease_on_what_was_deleted_gives_its_room_back(
    store: Store, clock: Clock, fate: Callable[[Store, bytes], None]
) -> None:
    """No entry is left that could leave: what the lease held is free as soon as the lease has ended."""
    length = ARENA_BYTES - 2 * 64 * 1024
    store.put(b"k", content(1, length))
    lease = leased(store, b"k", limit_s=5)
    fate(store, b"k")
    assert store.reserve(b"new", length) is None
    clock.now_s += 6
    assert store.put(b"new", content(2, length))
    assert not lease.held
    assert store.retired_bytes == 0


def test_small_values_that_are_leased_may_go_and_their_readers_notice_nothing(store: Store) -> None:
    store.put(b"small:0", content(0, 15_000))
    lease = leased(store, b"small:0")
    for number in range(1, 3 * store.inline_bytes_high // 15_000):
        store.put(b"small:%d" % number, bytes(15_000))
    store.delete([b"small:0"])
    assert lease.view == content(0, 15_000)
    lease.release()


# Every policy under a real store: what must agree does, what is asked for comes, and a flush keeps the kind.

every_policy = pytest.mark.parametrize("name", POLICIES)


STEPS = 700


INLINE_VALUE = bytes(12_000)


"""Some three hundred of these are more than a small store keeps beside its arena."""


def store_with(name: str) -> Store:
    """An empty store of ARENA_BYTES under that policy."""
    return Store(Arena.create(ARENA_BYTES, HugepageMode.OFF), policy=make_policy(name))


@pytest.fixture
def _restless_interpreter() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@every_policy
def test_a_store_opened_with_a_policy_has_it_for_values_of_both_kinds_and_after_a_flush(name: str) -> None:
    options = StoreOptions(ARENA_BYTES, hugepages=HugepageMode.OFF, cache_policy=name.lower())
    with closing(Store.open(options)) as store:
        for _ in range(2):
            assert store.policy.name == store.inline_policy.name == store.tiers()["memory"]["policy"] == name
            fill(store)
            store.put(b"small", b"x")
            store.flush()


@pytest.mark.parametrize("name", REDIS_POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_store_agrees_with_a_dict_whatever_the_policy(name: str, seed: int) -> None:
    walk = Walk(seed, 4 * 1024 * 1024)
    with closing(walk.store):
        walk.store.set_eviction(make_policy(name))
        if walk.store.policy.selective:
            walk.lasting = 0.1
        for _ in range(STEPS):
            walk.step()
        assert walk.store.stats.evicted > (2 if walk.store.policy.selective else 10)
        walk.end()


@pytest.mark.parametrize(
    ("name", "first"), [("LRU", b"fill:1"), ("LFU", b"fill:1"), ("FIFO", b"fill:0"), ("S3FIFO", b"fill:1")]
)
def test_of_equal_blocks_exactly_the_coldest_leaves(name: str, first: bytes) -> None:
    with closing(store_with(name)) as store:
        keys = fill(store)
        assert read(store, keys[0]) == content(0)
        assert store.put(b"new", content(99))
        assert [key for key in keys if key not in present(store, keys)] == [first]


@pytest.mark.parametrize("length", [10, BLOCK_BYTES])
def test_what_is_stored_anew_is_the_last_that_came_to_fifo(length: int) -> None:
    with closing(store_with("FIFO")) as store:
        for key in (b"a", b"b", b"c", b"a"):
            assert store.put(key, bytes(length))
        policy = store.inline_policy if length < BLOCK_BYTES else store.policy
        assert [entry.key for entry in policy.victims()] == [b"b", b"c", b"a"]


def test_mru_keeps_what_is_old() -> None:
    with closing(store_with("MRU")) as store:
        keys = fill(store)
        assert read(store, keys[3]) == content(3)
        assert store.put(b"new", content(99))
        assert present(store, keys) == keys[:3] + keys[4:]


def test_a_prompt_that_was_stored_and_looked_up_is_worth_no_write_and_one_that_was_read_is() -> None:
    with closing(store_with("S3FIFO")) as store:
        keys = fill(store)
        assert store.touch(keys) == store.match(keys) == BLOCKS
        assert read(store, keys[3]) == content(3)
        for number in range(BLOCKS - 1):
            assert store.put(b"new:%d" % number, content(number))
        assert present(store, keys) == [keys[3]]
        read_once, fresh = store.find(keys[3]), store.find(b"new:0")
        assert read_once is not None
        assert fresh is not None
        assert store.policy.spills(read_once)
        assert not store.policy.spills(fresh)


@every_policy
def test_what_was_affirmed_is_spared_whatever_the_policy(name: str) -> None:
    with closing(store_with(name)) as store:
        keys = fill(store)
        affirmed = [keys[0], keys[-1]]
        assert store.affirm(affirmed) == 2
        for number in range(BLOCKS - 2):
            assert store.put(b"new:%d" % number, content(number))
        assert present(store, affirmed) == affirmed


@every_policy
def test_inline_values_stay_within_their_bound(name: str) -> None:
    with closing(store_with(name)) as store:
        for number in range(1000):
            assert store.put(b"%d" % number, INLINE_VALUE)
            assert store.find(b"%d" % number) is not None, "who has just come must not leave for itself"
            assert store.inline_bytes <= store.inline_bytes_high
        assert store.stats.evicted > 500
        store.check_integrity()


@every_policy
@pytest.mark.usefixtures("_restless_interpreter")
def test_small_values_are_read_without_the_lock_while_others_leave(name: str) -> None:
    with closing(store_with(name)) as store:
        stop = threading.Event()
        wrong: list[BaseException] = []

        def use() -> None:
            try:
                while not stop.is_set():
                    for number in range(400):
                        assert store.fetch(b"%d" % number) in (None, INLINE_VALUE)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1500):
                assert store.put(b"%d" % (number % 800), INLINE_VALUE)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        store.check_integrity()
