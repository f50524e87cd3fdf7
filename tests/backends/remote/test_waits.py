"""How long a load may keep an engine waiting: all its waits together are bounded, whatever the server does."""

import threading
import time
from contextlib import closing

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, Connect, small_store
from tests.backends.fake_server import Drip, FakeServer, Leave, Said, Shelf, polite
from tests.backends.verbs import content, keys_of, loaded, put

PATIENT_S = 20.0
"""More than any of this takes on a machine with other things to do."""
LENGTH = 20_000


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Shop:
    """Has every block; a GET waits until its turn has come, by the number of those before it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.served_at_once = 0
        self.pause_s = PATIENT_S
        self._lock = threading.Lock()
        self._gets = 0

    def __call__(self, args: list[bytes]) -> Said:
        """Answer a command."""
        if args[0] != b"GET":
            return polite(args)
        with self._lock:
            self._gets += 1
            waits = self._gets > self.served_at_once
        if waits:
            self.open.wait(self.pause_s)
        return bulk(content(args[1], LENGTH))


@pytest.fixture
def shop(fake: FakeServer) -> Shop:
    """What the fake server answers with."""
    fake.answer = shop = Shop()
    return shop


def test_a_server_that_hangs_costs_a_load_one_timeout_and_not_one_for_each_block(
    fake: FakeServer, shop: Shop, connect: Connect, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(fake.url, timeout_s=0.3)
    began_s = time.monotonic()
    assert loaded(backend, keys_of(40)) == [None] * 40
    assert time.monotonic() - began_s < 40 * 0.3 / 2
    shop.open.set()
    stats = backend.stats()
    assert (stats["losses"], stats["given_up"], stats["misses"]) == (1, 1, 40)
    assert len(caplog.messages) == 1
    assert store.used_bytes == 0


@pytest.mark.parametrize("served_at_once", [0, 3])
def test_a_load_in_a_hurry_gives_up_and_the_server_is_not_lost(
    fake: FakeServer, shop: Shop, connect: Connect, caplog: pytest.LogCaptureFixture, served_at_once: int
) -> None:
    backend = connect(fake.url, timeout_s=PATIENT_S)
    keys = keys_of(10)
    shop.served_at_once = served_at_once
    values = []
    began_s = time.monotonic()
    for lease in backend.load(keys, within_s=0.2):
        values.append(None if lease is None else bytes(lease.view))
        if lease is not None:
            lease.release()
    assert time.monotonic() - began_s < PATIENT_S / 2
    assert all(value in (None, content(key, LENGTH)) for key, value in zip(keys, values, strict=True))
    assert values[3:] == [None] * 7
    shop.open.set()
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    stats = backend.stats()
    assert (stats["losses"], stats["errors"], stats["given_up"]) == (0, 0, 1)
    assert caplog.messages == []


def test_no_time_at_all_is_a_miss_without_a_question(fake: FakeServer, shop: Shop, connect: Connect) -> None:
    backend = connect(fake.url)
    assert [*backend.load(keys_of(3), within_s=0.0)] == [None] * 3
    assert fake.named(b"GET") == []


def test_what_is_on_its_way_out_needs_no_time(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    assert put(backend, b"k", content(b"k"))
    (lease,) = backend.load([b"k"], within_s=0.0)
    assert lease is not None
    with lease:
        assert lease.view == content(b"k")


def test_a_hurry_is_over_with_its_load(fake: FakeServer, shop: Shop, connect: Connect) -> None:
    backend = connect(fake.url, timeout_s=PATIENT_S)
    shop.served_at_once = 2
    for lease in backend.load(keys_of(2), within_s=2.0):
        assert lease is not None
        lease.release()
    shop.pause_s = 2.5
    assert loaded(backend, keys_of(1)) == [content(b"block:0", LENGTH)]
    assert backend.stats()["losses"] == 0


def test_the_time_between_blocks_is_the_readers_own(fake: FakeServer, shop: Shop, connect: Connect) -> None:
    backend = connect(fake.url, timeout_s=PATIENT_S)
    shop.open.set()
    for lease in backend.load(keys_of(4), within_s=2.0):
        threading.Event().wait(1.0)
        assert lease is not None
        lease.release()


@pytest.mark.parametrize("piece", ["header", "body"])
def test_bodies_that_trickle_are_bounded_and_such_a_server_is_lost(
    fake: FakeServer, connect: Connect, store: Store, piece: str
) -> None:
    words = bulk(content(b"k", LENGTH))
    drip = Drip(words) if piece == "header" else Drip(words, piece_bytes=100, pause_s=0.1)
    fake.answer = lambda args: drip if args[0] == b"GET" else polite(args)
    backend = connect(fake.url, timeout_s=0.4)
    began_s = time.monotonic()
    assert loaded(backend, keys_of(10)) == [None] * 10
    assert time.monotonic() - began_s < PATIENT_S / 2
    assert backend.stats()["losses"] == 1
    assert store.used_bytes == 0


def test_a_server_that_is_slow_but_steady_is_not_lost_when_the_time_is_up(
    fake: FakeServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    steady = Drip(bulk(content(b"k", LENGTH)), piece_bytes=4000, pause_s=0.05)
    fake.answer = lambda args: steady if args[0] == b"GET" else polite(args)
    with closing(RemoteBackend(parse_url(fake.url), small_store(), connections=1, timeout_s=2.0)) as backend:
        values = loaded(backend, keys_of(60))
        assert values[0] == content(b"k", LENGTH)
        assert values[-1] is None
        assert set(values) == {content(b"k", LENGTH), None}
        assert (backend.stats()["losses"], backend.stats()["given_up"]) == (0, 1)
        assert caplog.messages == []


def test_a_reader_that_stops_early_does_not_wait_for_what_it_does_not_want(fake: FakeServer, shop: Shop) -> None:
    shop.served_at_once = 1
    with closing(RemoteBackend(parse_url(fake.url), small_store(), connections=1, timeout_s=PATIENT_S)) as backend:
        leases = backend.load(keys_of(10))
        first = next(leases)
        assert first is not None
        first.release()
        began_s = time.monotonic()
        leases.close()
        assert time.monotonic() - began_s < PATIENT_S / 2
        shop.open.set()
        assert loaded(backend, keys_of(2)) == [content(key, LENGTH) for key in keys_of(2)]
        assert backend.stats()["losses"] == 0


def test_a_load_is_striped_over_as_many_connections_as_it_may_have(fake: FakeServer, shop: Shop) -> None:
    shop.open.set()
    for connections in (1, 3):
        fake.commands.clear()
        backend = RemoteBackend(parse_url(fake.url), small_store(), connections=connections)
        with closing(backend):
            assert loaded(backend, keys_of(12)) == [content(key, LENGTH) for key in keys_of(12)]
            assert backend.stats()["connections"] == len(fake.named(b"PING")) == connections


def test_over_loopback_one_connection_carries_a_load() -> None:
    fake = FakeServer(None)
    try:
        with closing(RemoteBackend(parse_url(fake.url), small_store(), connections=3)) as backend:
            assert [lease is None for lease in backend.load(keys_of(12))] == [True] * 12  # it has none, and says so
            assert len(fake.named(b"GET")) == 12
            assert backend.stats()["connections"] == len(fake.named(b"PING")) == 1
    finally:
        fake.close()


@pytest.mark.parametrize("count", [100, 1000])
def test_a_lookup_ends_within_the_timeout_though_each_answer_comes_just_in_time(
    fake: FakeServer, connect: Connect, count: int
) -> None:
    pause = threading.Event()

    def slow(args: list[bytes]) -> Said:
        if args[0] == b"EXISTS":
            pause.wait(0.3 if count == 100 else 0.04)
            return b":1\r\n"
        return polite(args)

    fake.answer = slow
    backend = connect(fake.url, timeout_s=0.5)
    began_s = time.monotonic()
    assert backend.match(keys_of(count)) < count
    assert time.monotonic() - began_s < 10
    pause.set()
    assert backend.stats()["losses"] == 1


# ---- where blocks are, and advice that no caller waits for --------------------------------------------------------


def test_what_is_on_its_way_is_in_memory_and_the_rest_is_remote(
    fake: FakeServer, shelf: Shelf, connect: Connect
) -> None:
    backend = connect(fake.url)
    keys = keys_of(4)
    for key in keys[1:3]:
        assert put(backend, key, b"x" * 20_000)
    assert backend.tiers_of(keys) == ["remote", "memory", "memory", "remote"]
    shelf.open.set()
    assert backend.flush() == 0
    assert backend.tiers_of(keys) == ["remote"] * 4
    assert backend.tiers_of([]) == []


def test_a_touch_for_later_waits_neither_for_the_server_nor_for_something_to_follow(
    fake: FakeServer, connect: Connect
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"TOUCH":
            asked.set()
            assert answer.wait(PATIENT_S)
            return b":2\r\n"
        return polite(args)

    fake.answer = slow
    backend = connect(fake.url, timeout_s=PATIENT_S)
    backend.touch_later(keys_of(2))
    assert asked.wait(PATIENT_S)
    assert backend.match(keys_of(1)) == 0, "questions have a connection of their own"
    answer.set()
    assert backend.flush() == 0
    assert fake.named(b"TOUCH") == [keys_of(2)]


def test_touches_for_later_are_bounded_and_dropped_while_the_server_is_lost(
    fake: FakeServer, shelf: Shelf, connect: Connect, clock: Clock
) -> None:
    backend = connect(fake.url)
    assert put(backend, b"k", b"x")
    for _ in range(3 * write_queue.TOUCHES_MAX):
        backend.touch_later([b"k"])
    shelf.open.set()
    assert backend.flush() == 0
    assert [name for name, _ in shelf.log].count(b"TOUCH") == write_queue.TOUCHES_MAX
    fake.answer = lambda args: Leave()
    assert backend.match([b"k"]) == 0
    backend.touch_later([b"k"])
    assert backend.flush() == 0
    backend.close()
    backend.touch_later([b"k"])
