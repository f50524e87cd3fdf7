"""Bringing blocks near ahead of need: from the server and from disk, in the background, within bounds of memory."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends.base import Prefetch
from kvredis.backends.tiered import prefetch as layered_prefetch
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.backends.tiered.prefetch import FarPrefetch, Prefetcher
from tests.backends.fake_server import FakeServer, Leave, Shelf
from tests.backends.local_disk import DRAIN_S
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put_through

from .layered_pair import LENGTH, figures, near_keys, open_layered, store_through


class Gate:
    """A shelf whose GETs wait while it is closed, and are hung up on while it is `rude`."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.rude = False
        self.open = threading.Event()
        self.open.set()

    def fill(self, keys: list[bytes]) -> None:
        """Put blocks there."""
        self.shelf.values.update((key, content(key, LENGTH)) for key in keys)

    def __call__(self, args: list[bytes]) -> bytes | Leave:
        """Answer a command."""
        if args[0] == b"GET":
            self.open.wait()
            if self.rude:
                return Leave()
        return self.shelf(args)


@pytest.fixture
def far(fake: FakeServer) -> Iterator[Gate]:
    """What the server behind holds."""
    fake.answer = gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def backend(fake: FakeServer, far: Gate) -> Iterator[LayeredBackend]:
    """32 blocks of near memory before the fake server."""
    with closing(open_layered(fake.url, blocks=32)) as backend:
        yield backend
        far.open.set()
        assert backend.near.store.leases == backend.near.store.reserved_bytes == 0


def counts(prefetch: Prefetch) -> tuple[int, int, int, int]:
    return prefetch.queued, prefetch.resident, prefetch.missing, prefetch.no_room


def test_far_blocks_are_near_when_a_prefetch_is_over_and_each_is_counted(
    backend: LayeredBackend, fake: FakeServer, far: Gate
) -> None:
    keys = keys_of(12)
    far.fill(keys[:6])
    for key in keys[6:9]:
        assert put_through(backend, key, content(key, LENGTH))
    prefetch = backend.prefetch(keys)
    assert prefetch.wait(DRAIN_S)
    assert prefetch.is_finished
    assert counts(prefetch) == (6, 3, 3, 0)
    assert prefetch.refused == ""
    asked = len(fake.named(b"GET"))
    assert loaded(backend, keys[:9]) == [content(key, LENGTH) for key in keys[:9]]
    assert len(fake.named(b"GET")) == asked
    assert figures(backend, "prefetched", "lookups", "memory_hits") == (6, 9, 9)


def test_a_prefetch_answers_at_once_and_is_waited_for_in_vain_while_the_server_is_slow(
    backend: LayeredBackend, far: Gate
) -> None:
    keys = keys_of(6)
    far.fill(keys)
    far.open.clear()
    prefetch = backend.prefetch(keys)
    assert counts(prefetch) == (6, 0, 0, 0)
    assert not prefetch.is_finished
    assert not prefetch.wait(0.01)
    far.open.set()
    assert prefetch.wait(DRAIN_S)
    assert near_keys(backend, keys) == keys


def test_a_block_that_is_loaded_before_its_prefetch_has_come_to_it_is_not_fetched_twice(
    backend: LayeredBackend, fake: FakeServer, far: Gate
) -> None:
    keys = keys_of(4)
    far.fill([*keys, b"first"])
    far.open.clear()
    first, second = backend.prefetch([b"first"]), backend.prefetch(keys)
    wait_until(lambda: len(fake.named(b"GET")) == 1, "the first is under way")
    for key in keys:
        assert put_through(backend, key, content(key, LENGTH))
    far.open.set()
    assert first.wait(DRAIN_S)
    assert second.wait(DRAIN_S)
    assert counts(second) == (0, 4, 0, 0)
    assert fake.named(b"GET") == [[b"first"]]


def test_what_has_not_begun_when_a_prefetch_is_cancelled_is_not_fetched(
    backend: LayeredBackend, fake: FakeServer, far: Gate
) -> None:
    keys = keys_of(4)
    far.fill([*keys, b"first"])
    far.open.clear()
    first, second = backend.prefetch([b"first"]), backend.prefetch(keys)
    wait_until(lambda: len(fake.named(b"GET")) == 1, "the first is under way")
    second.cancel()
    far.open.set()
    assert second.wait(DRAIN_S)
    assert first.is_finished
    assert fake.named(b"GET") == [[b"first"]]
    assert near_keys(backend, keys) == []


def test_a_prefetch_of_more_than_memory_holds_stops_there_and_keeps_its_head(
    backend: LayeredBackend, far: Gate
) -> None:
    keys = keys_of(50)
    far.fill(keys)
    prefetch = backend.prefetch(keys)
    assert prefetch.wait(DRAIN_S)
    assert counts(prefetch) == (32, 0, 0, 18)
    assert near_keys(backend, keys) == keys[:32]


def test_blocks_that_readers_hold_make_no_room_for_a_prefetch(backend: LayeredBackend, far: Gate) -> None:
    keys = keys_of(32)
    far.fill([b"more", *keys])
    held = [lease for lease in backend.load(keys) if lease is not None]
    assert len(held) == 32
    prefetch = backend.prefetch([b"more", b"nowhere"])
    assert prefetch.wait(DRAIN_S)
    assert counts(prefetch) == (0, 0, 0, 2)
    for lease in held:
        lease.release()


def test_the_tail_of_what_was_prefetched_leaves_first(backend: LayeredBackend, far: Gate) -> None:
    keys = keys_of(20)
    far.fill(keys)
    assert backend.prefetch(keys).wait(DRAIN_S)
    for number in range(20):
        assert put_through(backend, b"other:%d" % number, content(b"other", LENGTH))
    left = near_keys(backend, keys)
    assert left == keys[: len(left)]
    assert 0 < len(left) < 20


def test_prefetches_that_are_not_over_are_bounded(
    backend: LayeredBackend, far: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layered_prefetch, "JOBS_MAX", 3)
    far.open.clear()
    jobs = [backend.prefetch([b"%d" % number]) for number in range(5)]
    assert [job.refused for job in jobs] == [""] * 3 + ["too many prefetches are under way"] * 2
    assert all(job.is_finished for job in jobs[3:])
    far.open.set()
    assert all(job.wait(DRAIN_S) for job in jobs)
    assert backend.prefetch([b"k"]).refused == ""


def test_blocks_on_disk_and_far_come_in_one_prefetch(fake: FakeServer, far: Gate, tmp_path: Path) -> None:
    keys = keys_of(28)
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk", timeout_s=20.0)) as first:
        store_through(first, keys[:20])
    far.shelf.values.clear()
    far.fill(keys[8:12])
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk", timeout_s=20.0)) as backend:
        wanted = [*keys[:4], *keys[20:22], *keys[24:26]]
        far.fill(keys[20:22])
        assert backend.tiers_of(wanted) == ["disk"] * 4 + ["remote"] * 4
        prefetch = backend.prefetch(wanted)
        assert prefetch.wait(DRAIN_S)
        assert counts(prefetch) == (6, 0, 2, 0)
        assert backend.tiers_of(wanted) == ["memory"] * 6 + ["remote"] * 2


def test_a_prefetch_that_near_refuses_fetches_nothing_from_far_either(
    fake: FakeServer, far: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(4)
    far.fill(keys)
    with closing(open_layered(fake.url, blocks=16, disk=tmp_path / "disk")) as backend:
        monkeypatch.setattr(backend.near.store.tiering, "prefetch", lambda keys: None)
        prefetch = backend.prefetch(keys)
        assert "too many" in prefetch.refused
        assert (prefetch.is_finished, counts(prefetch)) == (True, (0, 0, 0, 0))
        assert backend.prefetch([]).refused
    assert fake.named(b"GET") == []


def test_a_memory_that_keeps_nothing_refuses_with_the_reason(fake: FakeServer, far: Gate, tmp_path: Path) -> None:
    keys = keys_of(3)
    far.fill(keys)
    with closing(open_layered(fake.url, disk=tmp_path / "disk", keep=False)) as backend:
        prefetch = backend.prefetch(keys)
        assert "local_cpu is false" in prefetch.refused
        assert (prefetch.is_finished, *counts(prefetch)) == (True, 0, 0, 0, 0)
        assert fake.named(b"GET") == []


def test_closing_ends_what_is_under_way_and_what_waits(fake: FakeServer, far: Gate) -> None:
    keys = keys_of(6)
    far.fill(keys)
    backend = open_layered(fake.url, timeout_s=0.5)
    far.open.clear()
    jobs = [backend.prefetch(keys[:3]), backend.prefetch(keys[3:])]
    wait_until(lambda: bool(fake.named(b"GET")), "the first is under way")
    backend.close()
    assert all(job.is_finished for job in jobs)
    assert backend.prefetch([b"k"]).refused


def test_a_prefetch_from_a_server_that_is_lost_ends_and_the_next_one_works(backend: LayeredBackend, far: Gate) -> None:
    keys = keys_of(3)
    far.fill(keys)
    far.rude = True
    prefetch = backend.prefetch(keys)
    assert prefetch.wait(DRAIN_S)
    assert prefetch.missing == 3
    far.rude = False

    def comes() -> bool:
        job = backend.prefetch(keys)
        return job.wait(DRAIN_S) and job.queued + job.resident == 3

    wait_until(comes, "the server is asked again")
    assert near_keys(backend, keys) == keys


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_prefetch_that_fails_in_our_own_code_is_over_and_the_next_one_comes(error: type[BaseException]) -> None:
    fetched: list[FarPrefetch] = []

    def fetch(job: FarPrefetch) -> None:
        if job is bad:
            raise error
        fetched.append(job)

    bad, good = FarPrefetch([b"bad"]), FarPrefetch([b"good"])
    prefetcher = Prefetcher(fetch)
    for job in (bad, good):
        assert prefetcher.add(job)
        assert job.over.wait(DRAIN_S)
    assert fetched == [good]
    prefetcher.close()
