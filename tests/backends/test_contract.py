"""One contract, five backends: a store in this process, one above a disk, kvredis by both sockets, and Redis."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvredis.backends.address import parse_url
from kvredis.backends.base import Backend
from kvredis.backends.config import Config
from kvredis.backends.local import LocalBackend
from kvredis.backends.opening import open_backend
from kvredis.backends.remote import RemoteBackend
from kvredis.storage.store import Store

from .conftest import ServerProcess, small_disk, small_store
from .verbs import content, loaded, put_through

KINDS = ["local", "local-disk", "kvredis", "kvredis-tcp", "redis"]
SIZES = [0, 1, 1000, 20_000, 1 << 20, 3_000_001]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str | None:
    """The server's URL, None for the store in this process."""
    if request.param.startswith("local"):
        if request.param == "local-disk":
            request.getfixturevalue("store").add_disk(small_disk(request.getfixturevalue("tmp_path")))
        return None
    name = request.param.partition("-")[0]
    server: ServerProcess = request.getfixturevalue(f"{name}_server")
    return server.url if request.param == name else server.tcp_url


@pytest.fixture
def backend(url: str | None, store: Store) -> Iterator[Backend]:
    """The backend under test; closed at the end."""
    backend: Backend = LocalBackend(store) if url is None else RemoteBackend(parse_url(url), store, timeout_s=5.0)
    yield backend
    backend.close()


_counter = itertools.count()


def fresh_keys(count: int) -> list[bytes]:
    """Keys that no other test uses."""
    prefix = next(_counter)
    return [b"test:%d:%d" % (prefix, number) for number in range(count)]


def assert_staging_is_empty(backend: Backend, url: str | None, store: Store) -> None:
    backend.flush()
    if url is not None:
        store.check_integrity()
        assert store.used_bytes == 0
        assert store.count() == 0


@pytest.mark.parametrize("length", SIZES)
def test_what_was_committed_is_loaded(backend: Backend, url: str | None, store: Store, length: int) -> None:
    (key,) = fresh_keys(1)
    assert put_through(backend, key, content(key, length))
    assert backend.match([key]) == 1
    assert loaded(backend, [key]) == [content(key, length)]
    assert backend.flush() == 0
    assert_staging_is_empty(backend, url, store)


def test_many_blocks_are_loaded_in_the_order_asked_for(backend: Backend, url: str | None, store: Store) -> None:
    keys = fresh_keys(150)
    lengths = {key: 1 + random.Random(key).randrange(60_000) for key in keys}
    for key in keys:
        assert put_through(backend, key, content(key, lengths[key]))
    asked = random.Random(5).sample(keys, len(keys)) + keys[:3]
    assert loaded(backend, asked) == [content(key, lengths[key]) for key in asked]
    assert_staging_is_empty(backend, url, store)


def test_a_missing_block_is_none_in_its_place(backend: Backend) -> None:
    keys = fresh_keys(5)
    for key in keys[::2]:
        assert put_through(backend, key, content(key, 5000))
    assert loaded(backend, keys) == [content(key, 5000) if key in keys[::2] else None for key in keys]
    assert loaded(backend, []) == []


def test_match_counts_the_leading_run_only(backend: Backend) -> None:
    keys = fresh_keys(600)
    for key in [*keys[:300], *keys[301:]]:
        assert put_through(backend, key, b"x")
    assert backend.match(keys) == 300
    assert backend.match(keys[:300]) == 300
    assert backend.match(keys[300:]) == 0
    assert backend.match(keys[301:]) == 299
    assert backend.match([]) == 0


def test_touch_and_delete_count_what_exists(backend: Backend) -> None:
    keys = fresh_keys(4)
    for key in keys[:3]:
        assert put_through(backend, key, b"x" * 30_000)
    assert backend.touch(keys) == 3
    assert backend.delete(keys[1:]) == 2
    assert backend.delete(keys[1:]) == 0
    assert backend.match(keys) == 1
    assert backend.touch([]) == backend.delete([]) == 0


def test_prefetch_has_nothing_to_do_for_blocks_in_memory(backend: Backend) -> None:
    keys = fresh_keys(2)
    assert put_through(backend, keys[0], b"x")
    prefetch = backend.prefetch(keys)
    assert (prefetch.queued, prefetch.no_room, prefetch.refused) == (0, 0, "")
    assert prefetch.is_finished
    assert prefetch.wait(0)
    prefetch.cancel()
    assert backend.match(keys) == 1


def test_an_aborted_reservation_stores_nothing(backend: Backend, url: str | None, store: Store) -> None:
    (key,) = fresh_keys(1)
    reservation = backend.reserve(key, 50_000)
    assert reservation is not None
    with reservation:
        reservation.view[:] = b"x" * 50_000
    reservation.abort()
    reservation.commit()
    assert backend.match([key]) == 0
    assert_staging_is_empty(backend, url, store)


def test_a_later_commit_replaces_the_value(backend: Backend) -> None:
    (key,) = fresh_keys(1)
    for number in range(20):
        assert put_through(backend, key, b"%d" % number * 20_000)
    assert loaded(backend, [key]) == [b"19" * 20_000]


def test_a_lease_keeps_its_bytes_while_others_come_and_the_key_goes(
    backend: Backend, url: str | None, store: Store
) -> None:
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
    assert_staging_is_empty(backend, url, store)


@pytest.mark.parametrize("length", [100, 100_000, 2 << 20])
def test_a_load_that_is_given_up_leaves_the_backend_usable(
    backend: Backend, url: str | None, store: Store, length: int
) -> None:
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
    assert_staging_is_empty(backend, url, store)


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
    with closing(RemoteBackend(parse_url(kvredis_server.url), small_store())) as first:
        for key in keys:
            assert put_through(first, key, content(key, 500_000))
    with closing(RemoteBackend(parse_url(kvredis_server.url), small_store())) as second:
        assert second.match(keys) == 3
        assert loaded(second, keys) == [content(key, 500_000) for key in keys]


@pytest.mark.parametrize("local_cpu", ["true", "false"])
def test_the_configuration_decides_which_backend_is_opened(
    kvredis_server: ServerProcess, local_cpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "16MB", "LMCACHE_LOCAL_CPU": local_cpu, "KVREDIS_HUGEPAGES": "off"}
    make: Callable[[dict[str, str]], Backend] = lambda more: open_backend(Config.load(env={**env, **more}))  # noqa: E731
    with closing(make({"LMCACHE_REMOTE_URL": kvredis_server.url})) as remote:
        (key,) = fresh_keys(1)
        assert put_through(remote, key, b"x" * 20_000)
        assert remote.stats()["kind"] == "remote"
        assert loaded(remote, [key]) == [b"x" * 20_000]
    assert not caplog.records
    with closing(make({})) as local:
        assert local.stats()["kind"] == "local"
        assert (local.reserve(b"k", 20_000) is None) == (local_cpu == "false")
    assert ("nothing will be stored" in caplog.text) == (local_cpu == "false")
