"""What a configuration opens, and what holds then: memory is a hot cache or staging, is full, and never in the way."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.storage.store import Store

from .conftest import ServerProcess, StartServer
from .local_disk import DRAIN_S
from .tiered.layered_pair import LENGTH
from .verbs import content, keys_of, loaded, put

FIT = 32
"""Blocks in the 2 MiB of memory that each backend here has."""

Open = Callable[..., Backend]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens backends over 2 MiB of memory, with `disk` 16 MiB of it in the test's folder, and closes them."""
    made: list[Backend] = []

    def make(*, local_cpu: bool = True, disk: bool = False, url: str | None = None, size: str = "2MB") -> Backend:
        settings: dict[str, object] = {"local_cpu": local_cpu, "remote_url": url, "max_local_cpu_size": size}
        settings |= {"hugepages": "off", "spill_wait": 20, "disk_direct": False, "blocking_timeout_secs": 10}
        if disk:
            settings |= {"local_disk": f"file://{tmp_path}/disk", "max_local_disk_size": "16MB"}
        made.append(open_backend(Config.load(env={}, overrides=settings)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(params=["kvredis", "redis"])
def server(request: pytest.FixtureRequest, server_of: StartServer) -> ServerProcess:
    """A server of the test's own."""
    return server_of(request.param)


def memory_of(backend: Backend) -> Store:
    """The store of a backend that has blocks in this process, when its disk has nothing to do any more."""
    if isinstance(backend, LayeredBackend):
        backend.flush()
        backend = backend.near
    assert isinstance(backend, LocalBackend)
    tiering = backend.store.tiering
    assert tiering is None or tiering.io.drain(DRAIN_S)
    return backend.store


def put_all(backend: Backend, keys: list[bytes]) -> None:
    """Store blocks one at a time, waiting each time until all tiers have them."""
    for key in keys:
        assert put(backend, key, content(key, LENGTH))
        assert backend.flush() == 0


def values_of(keys: list[bytes]) -> list[bytes]:
    return [content(key, LENGTH) for key in keys]


def counts(backend: Backend, *names: str) -> list[int]:
    stats = backend.stats()
    return [int(stats[name]) for name in names]


# ---- which backend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local_cpu", "disk", "remote", "kind"),
    [
        (True, False, False, "local"),
        (True, True, False, "local"),
        (False, True, False, "local"),
        (True, False, True, "layered"),
        (True, True, True, "layered"),
        (False, True, True, "layered"),
        (False, False, True, "remote"),
    ],
)
def test_the_tiers_that_are_configured_are_the_tiers_there_are(
    opened: Open,
    kvredis_server: ServerProcess,
    caplog: pytest.LogCaptureFixture,
    local_cpu: bool,
    disk: bool,
    remote: bool,
    kind: str,
) -> None:
    backend = opened(local_cpu=local_cpu, disk=disk, url=kvredis_server.url if remote else None)
    assert backend.stats()["kind"] == kind
    if not isinstance(backend, RemoteBackend):
        store = memory_of(backend)
        assert store.keep == local_cpu or not disk
        assert (store.tiering is not None) == disk
    key = b"%b:%d%d%d" % (kind.encode(), local_cpu, disk, remote)
    put_all(backend, [key])
    assert loaded(backend, [key]) == values_of([key])
    assert not caplog.records


def test_memory_that_keeps_nothing_with_nothing_behind_it_is_said_and_stores_nothing(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(local_cpu=False)
    assert "nothing will be stored" in caplog.text
    assert backend.reserve(b"k", LENGTH) is None
    assert backend.room(LENGTH) == 0


def test_a_server_that_is_not_there_yet_is_no_reason_not_to_open(opened: Open, server: ServerProcess) -> None:
    server.kill()
    for local_cpu in (True, False):
        backend = opened(local_cpu=local_cpu, url=server.url)
        assert backend.match([b"k"]) == 0
        assert loaded(backend, [b"k"]) == [None]


# ---- local_cpu true: memory is a hot cache of what is below -----------------------------------------------------


def test_what_was_loaded_from_the_server_once_is_in_memory_the_second_time(opened: Open, server: ServerProcess) -> None:
    keys = keys_of(12)
    put_all(opened(url=server.url), keys)
    backend = opened(url=server.url)
    assert isinstance(backend, LayeredBackend)
    for _ in range(2):
        assert loaded(backend, keys) == values_of(keys)
    assert counts(backend, "remote_hits", "memory_hits", "lookups") == [12, 12, 24]
    assert backend.far.match(keys) == 12, "and the server has it still"


def test_what_was_loaded_from_disk_once_is_in_memory_the_second_time(opened: Open) -> None:
    keys = keys_of(12)
    first = opened(disk=True)
    put_all(first, keys)
    first.close()
    backend = opened(disk=True)
    for _ in range(2):
        assert loaded(backend, keys) == values_of(keys)
    assert counts(backend, "disk_hits", "memory_hits", "lookups") == [12, 12, 24]
    assert counts(backend, "disk_entries") == [12], "and the disk has it still"


def test_memory_disk_and_server_are_asked_in_this_order_and_sum_up(opened: Open, server: ServerProcess) -> None:
    keys = keys_of(80)
    first = opened(disk=True, url=server.url)
    put_all(first, keys[:60])
    memory_of(first)
    first.close()
    put_all(opened(url=server.url), keys[60:70])
    backend = opened(disk=True, url=server.url)
    assert loaded(backend, keys[:8]) == values_of(keys[:8])
    before = counts(backend, "lookups", "memory_hits", "disk_hits", "remote_hits", "misses")
    assert before == [8, 0, 8, 0, 0]
    assert backend.tiers_of([keys[0], keys[30], keys[65]]) == ["memory", "disk", "remote"]
    assert loaded(backend, keys) == [*values_of(keys[:70]), *[None] * 10]
    lookups, memory, disk, remote, misses = counts(
        backend, "lookups", "memory_hits", "disk_hits", "remote_hits", "misses"
    )
    assert lookups == 88 == memory + disk + remote + misses
    assert (memory, disk - 8, remote, misses) == (8, 52, 10, 10)


# ---- local_cpu false: memory is staging ----------------------------------------------------------------------------


@pytest.mark.parametrize(("disk", "remote"), [(False, True), (True, False), (True, True)])
def test_with_local_cpu_false_nothing_stays_in_memory_and_transfers_succeed(
    opened: Open, server: ServerProcess, disk: bool, remote: bool
) -> None:
    keys = keys_of(2 * FIT)
    backend = opened(local_cpu=False, disk=disk, url=server.url if remote else None)
    put_all(backend, keys)
    if disk:
        memory_of(backend)  # what is on its way to the disk is read in memory
    for _ in range(2):
        assert loaded(backend, keys) == values_of(keys)
        if disk:
            assert memory_of(backend).used_bytes == 0
        else:
            assert counts(backend, "queued_bytes") == [0]
            assert set(backend.tiers_of(keys)) == {"remote"}
    if disk:
        assert counts(backend, "memory_hits", "disk_hits") == [0, 4 * FIT]
        assert "local_cpu is false" in backend.prefetch(keys).refused


def test_with_local_cpu_false_what_comes_from_the_server_goes_to_the_disk(opened: Open, server: ServerProcess) -> None:
    keys = keys_of(12)
    put_all(opened(url=server.url), keys)
    backend = opened(local_cpu=False, disk=True, url=server.url)
    assert loaded(backend, keys) == values_of(keys)
    store = memory_of(backend)
    assert backend.tiers_of(keys) == ["disk"] * 12
    assert store.used_bytes == 0
    assert loaded(backend, keys) == values_of(keys)
    assert counts(backend, "remote_hits", "disk_hits") == [12, 12]


# ---- ahead of need -----------------------------------------------------------------------------------------------


def test_what_was_prefetched_from_disk_and_from_the_server_is_loaded_from_memory(
    opened: Open, server: ServerProcess
) -> None:
    keys = keys_of(20)
    first = opened(disk=True, url=server.url)
    put_all(first, keys[:10])
    first.close()
    put_all(opened(url=server.url), keys[10:18])
    backend = opened(disk=True, url=server.url)
    job = backend.prefetch(keys)
    assert job.wait(DRAIN_S)
    assert (job.queued, job.resident, job.missing, job.no_room, job.refused) == (18, 0, 2, 0, "")
    assert loaded(backend, keys[:18]) == values_of(keys[:18])
    assert counts(backend, "lookups", "memory_hits") == [18, 18]
    assert backend.prefetch(keys[:18]).resident == 18


# ---- memory that is full -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
def test_a_load_makes_the_least_recently_used_leave_full_memory(
    opened: Open, server: ServerProcess, disk: bool
) -> None:
    far, near = [b"far:%b" % key for key in keys_of(4)], keys_of(FIT)
    put_all(opened(url=server.url), far)
    backend = opened(disk=disk, url=server.url)
    put_all(backend, near)
    memory_of(backend)
    assert loaded(backend, far) == values_of(far)
    memory_of(backend)
    assert set(backend.tiers_of(far)) == {"memory"}
    assert set(backend.tiers_of(near[-8:])) == {"memory"}
    assert set(backend.tiers_of(near[:4])) == {"disk" if disk else "remote"}
    assert loaded(backend, near) == values_of(near)


def test_when_readers_hold_all_of_memory_a_store_is_skipped_and_a_load_waits_and_is_a_miss(
    opened: Open, server: ServerProcess
) -> None:
    keys = keys_of(FIT)
    put_all(opened(url=server.url), [b"far"])
    backend = opened(url=server.url)
    put_all(backend, keys)
    held = [lease for lease in backend.load(keys) if lease is not None]
    assert len(held) == FIT
    assert not put(backend, b"more", content(b"more", LENGTH))
    assert counts(backend, "near_refused") == [1]
    began_s = memory_of(backend).now_s()
    assert loaded(backend, [b"far"]) == [None]
    assert 0.4 < memory_of(backend).now_s() - began_s < 10
    for lease in held:
        lease.release()
    assert loaded(backend, [b"far"]) == values_of([b"far"])
    put_all(backend, [b"more"])


def test_twice_what_memory_holds_is_all_readable_with_a_tier_below_and_half_without(
    opened: Open, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    keys = keys_of(2 * FIT)
    alone = opened()
    put_all(alone, keys)
    assert loaded(alone, keys) == [*[None] * FIT, *values_of(keys[FIT:])]
    for disk, url in ((True, None), (False, server.url), (True, server.url)):
        backend = opened(disk=disk, url=url)
        put_all(backend, keys)
        assert backend.match(keys) == 2 * FIT
        assert loaded(backend, keys) == values_of(keys)
        assert memory_of(backend).used_bytes <= 2 << 20
        backend.close()
    assert not caplog.records
