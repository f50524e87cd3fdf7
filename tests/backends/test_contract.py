"""One contract and every backend that fulfils it: stores in this process, servers of all kinds, and both together."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvredis.backends.base import Backend
from kvredis.backends.config.url import ClusterAddress, parse_remote
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote.backend import ClusterBackend, RemoteBackend
from kvredis.backends.shm.buffers import Staging
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.backends.tiered.staging import NearStaging
from kvredis.storage.store import Store

from .conftest import ServerProcess, small_disk, small_store
from .local_disk import DRAIN_S
from .verbs import content, loaded, put, put_through

LOCAL_KINDS = ["local", "local-disk", "local-disk-only"]
REMOTE_KINDS = ["kvredis", "kvredis-tcp", "redis", "tls", "sentinels", "redis-cluster", "kvredis-cluster", "lane"]
LAYERED_KINDS = ["layered", "layered-lane", "layered-redis", "layered-redis-cluster"]
LAYERED_KINDS += ["layered-disk", "layered-disk-only"]
SIZES = [0, 1, 1000, 20_000, 1 << 20, 3_000_001]


@pytest.fixture(params=[*LOCAL_KINDS, *REMOTE_KINDS, *LAYERED_KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    """Of which kind the backend under test is. With "-disk" there is a disk below memory, with "-only" memory is but a
    place of staging for it; a layered one has kvredis behind it unless it says otherwise. With "lane" blocks go through
    memory that is shared with it."""
    found: str = request.param
    return found


@pytest.fixture
def near(kind: str, request: pytest.FixtureRequest, store: Store) -> LocalBackend | None:
    """The part in this process, which the backend closes; None when there is none."""
    keep = not kind.endswith("-only")
    if "-disk" in kind:
        store.add_disk(small_disk(request.getfixturevalue("tmp_path")), keep=keep)
    return None if kind in REMOTE_KINDS else LocalBackend(store, keep=keep)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str | None:
    """The server's URL, None when there is none."""
    if kind in LOCAL_KINDS:
        return None
    if kind in ("tls", "sentinels") or kind.endswith("-cluster"):
        found: str = request.getfixturevalue(kind.removeprefix("layered-").replace("-", "_") + "_url")
        return found
    server: ServerProcess = request.getfixturevalue("redis_server" if "redis" in kind.split("-") else "kvredis_server")
    if kind.endswith("lane"):
        return server.tcp_url.replace("redis://", "kvredis://")
    return server.tcp_url if kind == "kvredis-tcp" else server.url


def open_far(url: str, staging: Staging, *, keep: bool = False) -> RemoteBackend | ClusterBackend:
    """The backend of the server or servers at `url`."""
    address = parse_remote(url)
    if isinstance(address, ClusterAddress):
        return ClusterBackend(address, staging, timeout_s=5.0, keep=keep)
    return RemoteBackend(address, staging, timeout_s=5.0, keep=keep)


@pytest.fixture
def backend(near: LocalBackend | None, url: str | None, store: Store) -> Iterator[Backend]:
    """The backend under test; closed at the end."""
    backend: Backend
    if url is None:
        assert near is not None
        backend = near
    elif near is None:
        backend = open_far(url, store)
    else:
        staging = NearStaging(near, 5.0)
        backend = LayeredBackend(near, open_far(url, staging, keep=True), staging)
    yield backend
    backend.close()


AtRest = Callable[[], None]


@pytest.fixture
def at_rest(backend: Backend, kind: str, store: Store) -> AtRest:
    """Assert that no hold is left, and that a memory which keeps nothing is empty."""

    def check() -> None:
        backend.flush()
        if store.tiering is not None:
            assert store.tiering.io.drain(DRAIN_S)
        store.check_integrity()
        assert store.leases == store.reserved_bytes == store.retired_bytes == 0
        if kind in REMOTE_KINDS:
            assert store.count() == 0
        if kind in REMOTE_KINDS or kind.endswith("-only"):
            assert store.used_bytes == 0

    return check


_counter = itertools.count()


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no other test uses."""
    prefix = next(_counter)
    return [b"test:%d:%d" % (prefix, number) for number in range(count)]


@pytest.mark.parametrize("length", SIZES)
def test_what_was_committed_is_loaded(backend: Backend, at_rest: AtRest, length: int) -> None:
    (key,) = fresh_keys(1)
    assert put_through(backend, key, content(key, length))
    assert backend.match([key]) == 1
    assert loaded(backend, [key]) == [content(key, length)]
    assert backend.flush() == 0
    at_rest()


def test_many_blocks_are_loaded_in_the_order_asked_for(backend: Backend, at_rest: AtRest) -> None:
    keys = fresh_keys(150)
    lengths = {key: 1 + random.Random(key).randrange(60_000) for key in keys}
    for key in keys:
        assert put_through(backend, key, content(key, lengths[key]))
    asked = random.Random(5).sample(keys, len(keys)) + keys[:3]
    assert loaded(backend, asked) == [content(key, lengths[key]) for key in asked]
    at_rest()


def test_a_missing_block_is_none_in_its_place(backend: Backend) -> None:
    keys = fresh_keys(5)
    for key in keys[::2]:
        assert put_through(backend, key, content(key, 5000))
    assert loaded(backend, keys) == [content(key, 5000) if key in keys[::2] else None for key in keys]
    assert loaded(backend, []) == []


def test_room_is_there_for_a_value_of_any_length_that_fits(backend: Backend, store: Store) -> None:
    for length in (1, 1 << 20, store.arena.nbytes // 4):
        assert backend.room(length) >= 1
        (key,) = fresh_keys(1)
        assert put_through(backend, key, bytes(length))


def test_match_counts_the_leading_run_only(backend: Backend) -> None:
    keys = fresh_keys(600)
    for key in [*keys[:300], *keys[301:]]:
        assert put_through(backend, key, b"x")
    assert backend.match(keys) == 300
    assert backend.match(keys[:300]) == 300
    assert backend.match(keys[300:]) == 0
    assert backend.match(keys[301:]) == 299
    assert backend.match([]) == 0


def test_presence_is_said_for_each_key_whatever_is_missing_before_it(backend: Backend, at_rest: AtRest) -> None:
    for name in (b"b", b"d"):
        put(backend, name, content(name, 20_000))
    at_rest()
    assert backend.present([b"a", b"b", b"c", b"d", b"b"]) == [False, True, False, True, True]
    assert backend.present([]) == []


def test_what_is_missing_is_the_caller_s_to_compute_and_no_wait_ends_late_that_no_other_has_announced(
    backend: Backend, at_rest: AtRest, kind: str
) -> None:
    keys, knows = fresh_keys(6), kind not in ("redis", "sentinels", "redis-cluster")
    for key in (keys[0], keys[1], keys[4]):
        assert put_through(backend, key, b"x")
    began_s = time.monotonic()
    assert backend.wait_for(keys, 60) in range(3)
    assert backend.expect(keys, 60) == (3 if knows else 6)
    assert backend.expect(keys[:2], 60) == (0 if knows else 2)
    assert backend.expect(keys[2:4], 60) == 2, "announced anew"
    assert backend.wait_for(keys[:2], 60) in range(3)
    for key in (keys[2], keys[3], keys[5]):
        assert put_through(backend, key, b"x")
    assert backend.wait_for(keys, 60) in range(7)
    assert backend.wait_for([], 60) == backend.expect([], 60) == 0
    assert time.monotonic() - began_s < 30
    at_rest()


def test_touch_and_delete_count_what_exists(backend: Backend) -> None:
    keys = fresh_keys(4)
    for key in keys[:3]:
        assert put_through(backend, key, b"x" * 30_000)
    assert backend.touch(keys) == 3
    assert backend.delete(keys[1:]) == 2
    assert backend.delete(keys[1:]) == 0
    assert backend.match(keys) == 1
    assert backend.touch([]) == backend.delete([]) == 0


def test_prefetch_has_nothing_to_do_for_blocks_in_memory(backend: Backend, kind: str) -> None:
    keys = fresh_keys(2)
    assert put_through(backend, keys[0], b"x")
    prefetch = backend.prefetch(keys)
    assert prefetch.wait(DRAIN_S)
    assert (prefetch.queued, prefetch.no_room) == (0, 0)
    if kind.endswith("-only"):
        assert "local_cpu is false" in prefetch.refused, "there is no memory that could keep them"
    else:
        assert prefetch.refused == ""
    assert prefetch.is_finished
    assert prefetch.wait(0)
    prefetch.cancel()
    assert backend.match(keys) == 1


def test_room_for_several_values_is_given_up_to_the_first_for_which_there_is_none(backend: Backend) -> None:
    keys = fresh_keys(3)
    rooms = backend.reserve_all(keys, 1000)
    assert len(rooms) == 3
    for number, room in enumerate(rooms):
        room.view[:] = bytes([number]) * 1000
        room.commit()
    assert [bytes(value or b"") for value in loaded(backend, keys)] == [bytes([number]) * 1000 for number in range(3)]
    assert backend.reserve_all(keys, 1 << 40) == []


def test_an_aborted_reservation_stores_nothing(backend: Backend, at_rest: AtRest) -> None:
    (key,) = fresh_keys(1)
    reservation = backend.reserve(key, 50_000)
    assert reservation is not None
    with reservation:
        reservation.view[:] = b"x" * 50_000
    reservation.abort()
    reservation.commit()
    assert backend.match([key]) == 0
    at_rest()


def test_a_later_commit_replaces_the_value(backend: Backend) -> None:
    (key,) = fresh_keys(1)
    for number in range(20):
        assert put_through(backend, key, b"%d" % number * 20_000)
    assert loaded(backend, [key]) == [b"19" * 20_000]


def test_a_lease_keeps_its_bytes_while_others_come_and_the_key_goes(backend: Backend, at_rest: AtRest) -> None:
    keys = fresh_keys(4)
    for key in keys:
        assert put_through(backend, key, content(key, 1 << 20))
    leases = list(backend.load(keys))
    backend.delete(keys)
    assert put_through(backend, keys[0], b"y" * (1 << 20))
    for key, lease in zip(keys, leases, strict=True):
        assert lease is not None
        assert lease.view == content(key, 1 << 20)
        lease.release()
        lease.release()
    at_rest()


def test_what_is_deleted_while_it_is_loaded_stays_deleted(backend: Backend, at_rest: AtRest) -> None:
    keys = fresh_keys(6)
    for key in keys:
        assert put_through(backend, key, content(key, 30_000))
    for lease in backend.load(keys):
        backend.delete(keys)
        if lease is not None:
            lease.release()
    assert backend.match(keys) == 0
    assert loaded(backend, keys) == [None] * 6
    at_rest()


def test_a_value_that_is_replaced_while_the_old_one_is_read_is_the_new_one(backend: Backend, at_rest: AtRest) -> None:
    keys = fresh_keys(3)
    for key in keys:
        assert put_through(backend, key, content(key, 100_000))
    leases = list(backend.load(keys))
    for key in keys:
        assert put_through(backend, key, b"new" * 10_000)
    for key, lease in zip(keys, leases, strict=True):
        assert lease is not None
        with lease:
            assert lease.view == content(key, 100_000)
    assert loaded(backend, keys) == [b"new" * 10_000] * 3
    at_rest()


def test_where_a_block_would_come_from_is_said_for_each_key(backend: Backend, at_rest: AtRest, kind: str) -> None:
    keys = fresh_keys(3)
    assert put_through(backend, keys[1], b"x" * 20_000)
    at_rest()
    tiers = backend.tiers_of(keys)
    assert len(tiers) == 3
    near = "disk" if kind.endswith("-only") else "memory"
    assert tiers[1] == ("remote" if kind in REMOTE_KINDS else near)
    assert backend.tiers_of([]) == []


def test_a_load_with_time_enough_is_complete(backend: Backend) -> None:
    keys = fresh_keys(20)
    for key in keys:
        assert put_through(backend, key, content(key, 100_000))
    leases = backend.load(keys, within_s=60.0)
    for key, lease in zip(keys, leases, strict=True):
        assert lease is not None
        with lease:
            assert lease.view == content(key, 100_000)


def test_threads_that_store_load_and_look_up_at_once_see_whole_values_only(backend: Backend, at_rest: AtRest) -> None:
    keys = fresh_keys(24)
    wrong: list[bytes] = []

    def work(order: list[bytes]) -> None:
        for _ in range(3):
            for key in order[::2]:
                put(backend, key, content(key, 60_000))
            backend.match(order)
            values = loaded(backend, order)
            wrong.extend(
                key for key, value in zip(order, values, strict=True) if value not in (None, content(key, 60_000))
            )
            backend.touch(order)

    threads = [threading.Thread(target=work, args=(random.Random(seed).sample(keys, 24),)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    at_rest()


@pytest.mark.parametrize("length", [100, 100_000, 2 << 20])
def test_a_load_that_is_given_up_leaves_the_backend_usable(backend: Backend, at_rest: AtRest, length: int) -> None:
    keys = fresh_keys(8)
    for key in keys:
        assert put_through(backend, key, content(key, length))
    for stop_after in range(4):
        with closing(backend.load(keys)) as leases:
            for _ in range(stop_after):
                lease = next(leases)
                assert lease is not None
                lease.release()
    assert loaded(backend, keys) == [content(key, length) for key in keys]
    backend.load(keys)  # never begun
    iter_dropped = backend.load(keys)
    first = next(iter_dropped)
    assert first is not None
    del iter_dropped
    first.release()
    assert loaded(backend, keys[:2]) == [content(key, length) for key in keys[:2]]
    at_rest()


def test_two_loads_and_other_calls_may_be_under_way_at_once(backend: Backend) -> None:
    keys = fresh_keys(6)
    for key in keys:
        assert put_through(backend, key, content(key, 200_000))
    for one, two in zip(backend.load(keys), backend.load(keys[::-1]), strict=True):
        assert one is not None
        assert two is not None
        assert backend.match(keys) == 6
        assert put_through(backend, b"other:" + keys[0], b"x")
        with one, two:
            assert len(one.view) == len(two.view) == 200_000
    assert loaded(backend, keys[:1]) == [content(keys[0], 200_000)]


def test_a_value_larger_than_the_memory_is_no_room(backend: Backend, store: Store) -> None:
    assert backend.reserve(b"huge", store.arena.nbytes + 1) is None
    (key,) = fresh_keys(1)
    assert put_through(backend, key, b"x")
    assert backend.match([key]) == 1


def test_stats_are_plain_figures(backend: Backend) -> None:
    (key,) = fresh_keys(1)
    assert put_through(backend, key, b"x" * 20_000)
    loaded(backend, [key, b"absent:" + key])
    stats = backend.stats()
    assert stats["hits"] == 1
    assert stats["misses"] == 1
    assert all(isinstance(value, int | float | str) for value in stats.values())


def test_closing_ends_it_and_twice_is_fine(backend: Backend) -> None:
    backend.close()
    backend.close()


def test_blocks_survive_the_backend_that_stored_them(kvredis_server: ServerProcess) -> None:
    keys = fresh_keys(3)
    with closing(open_far(kvredis_server.url, small_store())) as first:
        for key in keys:
            assert put_through(first, key, content(key, 500_000))
    with closing(open_far(kvredis_server.url, small_store())) as second:
        assert second.match(keys) == 3
        assert loaded(second, keys) == [content(key, 500_000) for key in keys]
