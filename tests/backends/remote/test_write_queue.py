"""What a remote backend has not sent yet: bounded, readable, in order, and never a reason to wait."""

import itertools
import threading
from contextlib import closing

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote import backend as remote_backend
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.health import RETRY_S_MAX, Link
from kvredis.storage.errors import BackendError
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, Connect, small_store
from tests.backends.fake_server import FakeServer, Leave, Shelf, polite
from tests.backends.verbs import BLOCK, content, keys_of, loaded, put, put_through

FIT = 8
"""Blocks in half of the staging memory."""


def names(shelf: Shelf, *of: bytes) -> list[tuple[bytes, ...]]:
    return [entry for entry in shelf.log if entry[0] in of]


# ---- no engine waits, and the queue is bounded --------------------------------------------------------------------


def test_stores_return_while_the_server_takes_none_and_the_newest_are_dropped(
    fake: FakeServer, shelf: Shelf, connect: Connect, store: Store
) -> None:
    backend = connect(fake.url, timeout_s=60)
    keys = keys_of(20)
    assert backend.room(BLOCK) == FIT
    assert [put(backend, key, content(key)) for key in keys] == [True] * FIT + [False] * 12
    assert backend.room(BLOCK) == 0
    stats = backend.stats()
    assert (stats["dropped"], stats["queued"], stats["queued_bytes"], stats["stored"]) == (12, FIT, FIT * BLOCK, 0)
    assert store.used_bytes <= store.arena.nbytes // 2 + FIT * 4096
    shelf.open.set()
    assert backend.flush() == 0
    assert dict(shelf.values) == {key: content(key) for key in keys[:FIT]}
    assert (backend.stats()["stored"], backend.stats()["queued"], store.used_bytes) == (FIT, 0, 0)
    assert put(backend, keys[-1], content(keys[-1]))


def test_a_store_does_not_wait_for_a_question_that_is_not_answered(
    fake: FakeServer, connect: Connect, store: Store
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"EXISTS":
            asked.set()
            answer.wait()
        return polite(args)

    fake.answer = slow
    backend = connect(fake.url, timeout_s=60)
    asking = threading.Thread(target=backend.match, args=([b"other"],))
    asking.start()
    try:
        asked.wait()
        assert put_through(backend, b"k", b"x" * 20_000)
        assert asking.is_alive()
    finally:
        answer.set()
        asking.join()


def test_a_full_queue_leaves_loads_their_room(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    keys = [b"there:%d" % number for number in range(6)]
    shelf.values.update((key, content(key)) for key in keys)
    while put(backend, b"new:%d" % backend.room(BLOCK), content(b"new")):
        pass
    leases = list(backend.load(keys))
    assert [lease is not None and lease.view == content(key) for key, lease in zip(keys, leases, strict=True)] == [
        True
    ] * 6
    for lease in leases:
        assert lease is not None
        lease.release()


def test_a_value_of_more_than_half_of_memory_goes_alone(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    assert backend.room(20 << 20) == 1
    assert put(backend, b"big", bytes(20 << 20))
    assert backend.room(1) == 0
    assert not put(backend, b"small", b"x")
    shelf.open.set()
    assert backend.flush() == 0
    assert put_through(backend, b"small", b"x")


def test_small_values_have_a_bound_too(
    fake: FakeServer, shelf: Shelf, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "VALUES_MAX", 5)
    backend = connect(fake.url)
    assert sum(put(backend, key, b"x") for key in keys_of(9)) == 5
    assert backend.stats()["dropped"] == 4


def test_room_that_was_not_used_is_given_back(fake: FakeServer, connect: Connect, store: Store) -> None:
    backend = connect(fake.url)
    for _ in range(3 * FIT):
        reservation = backend.reserve(b"k", BLOCK)
        assert reservation is not None
        with reservation:
            pass
        reservation.abort()
    assert (backend.room(BLOCK), store.used_bytes) == (FIT, 0)
    assert fake.named(b"SET") == []


# ---- reading what was committed ----------------------------------------------------------------------------------


def test_what_is_on_its_way_is_found_and_loaded_from_here(
    fake: FakeServer, shelf: Shelf, connect: Connect, store: Store
) -> None:
    backend = connect(fake.url)
    keys = keys_of(7)
    shelf.values.update((key, content(key, 30_000)) for key in (keys[0], keys[3], keys[6]))
    for key in (keys[1], keys[2], keys[4]):
        assert put(backend, key, content(key, 20_000))
    assert backend.match(keys) == 5
    assert backend.match(keys[:5]) == 5
    assert backend.match(keys[1:3]) == 2
    assert backend.match(keys[5:]) == 0
    assert backend.prefetch(keys[1:3]).resident == 2
    lengths = (30_000, 20_000, 20_000, 30_000, 20_000, 0, 30_000)
    expected = [content(key, length) if length else None for key, length in zip(keys, lengths, strict=True)]
    assert loaded(backend, keys) == expected
    assert names(shelf, b"SET") == []
    shelf.open.set()
    assert backend.flush() == 0
    assert loaded(backend, keys) == expected
    assert store.used_bytes == 0


def test_a_lease_keeps_its_bytes_when_the_value_has_left(
    fake: FakeServer, shelf: Shelf, connect: Connect, store: Store
) -> None:
    backend = connect(fake.url)
    assert put(backend, b"k", content(b"k"))
    leases = backend.load([b"k", b"k"])
    first = next(leases)
    shelf.open.set()
    assert backend.flush() == 0
    while put_through(backend, b"other", bytes(BLOCK)) and backend.stats()["stored"] != 20:
        pass
    assert first is not None
    assert first.view == content(b"k")
    first.release()
    assert store.used_bytes > 0, "the second is held for the load"
    leases.close()
    assert store.used_bytes == 0


def test_a_newer_value_takes_the_place_of_one_that_waits(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    for number in range(6):
        assert put(backend, b"k", b"%d" % number * 20_000)
    assert loaded(backend, [b"k"]) == [b"5" * 20_000]
    shelf.open.set()
    assert backend.flush() == 0
    assert shelf.values[b"k"] == b"5" * 20_000
    assert len(names(shelf, b"SET")) <= 2, "the first may have been on the wire"


def test_deleting_waits_until_the_value_is_there(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    shelf.lag_s = 0.1
    assert put(backend, b"k", b"x" * 20_000)
    deleting = threading.Thread(target=backend.delete, args=([b"k"],))
    deleting.start()
    shelf.open.set()
    deleting.join()
    assert names(shelf, b"SET", b"UNLINK") == [(b"SET", b"k"), (b"UNLINK", b"k")]
    assert backend.match([b"k"]) == 0


# ---- order -------------------------------------------------------------------------------------------------------


def test_touches_keep_their_place_between_the_values(fake: FakeServer, shelf: Shelf) -> None:
    with closing(RemoteBackend(parse_url(fake.url), small_store(), connections=1)) as backend:
        for key in (b"c", b"b", b"a"):
            assert put(backend, key, b"x")
            assert backend.touch([b"head", key]) == 1
        shelf.open.set()
        assert backend.flush() == 0
        order = [(b"SET", b"c"), (b"TOUCH", b"head"), (b"SET", b"b"), (b"TOUCH", b"head"), (b"SET", b"a")]
        assert names(shelf, b"SET", b"TOUCH") == [*order, (b"TOUCH", b"head")]


def test_a_touch_waits_for_the_values_it_touches_on_whatever_connection(
    fake: FakeServer, shelf: Shelf, connect: Connect
) -> None:
    backend = connect(fake.url)
    shelf.lag_s = 0.1
    keys = keys_of(4)  # so that on one connection the touch comes before the last of them on the other
    for key in reversed(keys):
        assert put(backend, key, b"x" * 20_000)
    assert backend.touch(keys) == 4
    shelf.open.set()
    assert backend.flush() == 0
    assert [name for name, _ in names(shelf, b"SET", b"TOUCH")] == [b"SET"] * 4 + [b"TOUCH"]
    assert backend.touch(keys) == 4


def test_a_long_touch_is_cut_and_its_tail_goes_first(
    fake: FakeServer, shelf: Shelf, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_backend, "QUESTION_KEYS", 2)
    backend = connect(fake.url)
    keys = keys_of(5)
    assert put(backend, b"k", b"x")
    assert backend.touch(keys) == 0
    shelf.open.set()
    assert backend.flush() == 0
    assert names(shelf, b"TOUCH") == [(b"TOUCH", keys[4]), (b"TOUCH", keys[2]), (b"TOUCH", keys[0])]
    assert put_through(backend, b"k", b"x"), "as many answers were read as there were"


def test_touches_that_wait_are_bounded(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    assert put(backend, b"k", b"x")
    for _ in range(3 * write_queue.TOUCHES_MAX):
        backend.touch([b"head"])
    shelf.open.set()
    assert backend.flush() == 0
    assert len(names(shelf, b"TOUCH")) == write_queue.TOUCHES_MAX
    assert backend.touch([b"head"]) == 0


# What becomes of values on their way when the server is lost or the backend closed, and of the thread that sends.

"""Blocks in half of the staging memory."""


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvredis stores")]


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "is lost" in message]


# ---- losing the server -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lie", [Leave(), Leave(b"+O"), b"\x00" * 20_000, b"$2\r\nhello\r\n", b"what\r\n"])
def test_when_the_server_is_lost_all_that_waits_is_dropped_and_later_stores_arrive(
    fake: FakeServer, connect: Connect, clock: Clock, store: Store, caplog: pytest.LogCaptureFixture, lie: bytes | Leave
) -> None:
    spoken = threading.Event()

    def lying(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"SET":
            spoken.wait()
            return lie
        return polite(args)

    fake.answer = lying
    backend = connect(fake.url)
    taken = sum(put(backend, key, content(key)) for key in keys_of(FIT))
    spoken.set()
    assert taken == FIT
    assert backend.flush() == FIT
    stats = backend.stats()
    assert int(stats["dropped"]) + int(stats["refused"]) == FIT
    assert (stats["queued"], store.used_bytes) == (0, 0)
    assert backend.match(keys_of(FIT)) == 0
    assert backend.room(BLOCK) == 0
    assert not put(backend, b"k", b"x"), "no server takes it meanwhile"
    assert len(lost_lines(caplog)) == 1
    fake.answer = shelf = Shelf()
    clock.now_s += RETRY_S_MAX
    assert put_through(backend, b"k", content(b"k"))
    assert shelf.values[b"k"] == content(b"k")


def test_a_question_that_finds_the_server_lost_ends_what_is_under_way(
    fake: FakeServer, shelf: Shelf, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def leaving(args: list[bytes]) -> bytes | Leave:
        return Leave() if args[0] in (b"KV.MATCH", b"EXISTS") else shelf(args)

    backend = connect(fake.url, timeout_s=60)
    for key in keys_of(3):
        assert put(backend, key, content(key))
    fake.answer = leaving
    assert backend.match([b"other"]) == 0
    assert backend.flush() == 3
    assert len(lost_lines(caplog)) == 1


def test_an_attempt_that_began_before_the_loss_does_not_say_that_the_server_is_back(
    fake: FakeServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link(parse_url(fake.url), 5.0, clock)

    def lost_meanwhile(args: list[bytes]) -> bytes | Leave:
        link.lost(BackendError("gone"), link.losses)
        return polite(args)

    fake.answer = lost_meanwhile
    assert link.open() is None
    assert link.waiting
    assert len(caplog.messages) == 1


def test_closing_ends_in_time_though_the_server_hangs_and_leaves_no_thread(
    fake: FakeServer, shelf: Shelf, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(fake.url, timeout_s=2.0)
    for key in keys_of(FIT):
        assert put(backend, key, content(key))
    assert len(senders()) == 1
    backend.close()
    assert senders() == []
    stats = backend.stats()
    assert int(stats["dropped"]) + int(stats["refused"]) == FIT
    assert len(caplog.messages) == 1
    assert not put(backend, b"k", b"x")
    assert backend.room(1) == 0


def test_a_reservation_that_is_committed_after_the_end_is_dropped(fake: FakeServer, connect: Connect) -> None:
    backend = connect(fake.url)
    reservation = backend.reserve(b"k", 100)
    assert reservation is not None
    backend.close()
    reservation.commit()
    assert backend.stats()["dropped"] == 1
    assert fake.named(b"SET") == []


def test_closing_sends_what_is_on_its_way(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    for key in keys_of(FIT):
        assert put(backend, key, content(key))
    shelf.open.set()
    backend.close()
    assert dict(shelf.values) == {key: content(key) for key in keys_of(FIT)}
    assert backend.stats()["stored"] == FIT


# ---- the thread --------------------------------------------------------------------------------------------------
def test_there_is_no_thread_before_the_first_commit_and_none_for_a_local_backend(
    fake: FakeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 3600.0)  # it is still there when this test looks, however slow
    backend = connect(fake.url)
    backend.match([b"k"])
    assert loaded(backend, [b"k"]) == [None]
    with closing(LocalBackend(small_store())) as local:
        assert put(local, b"k", b"x" * 20_000)
        assert senders() == []
    assert put_through(backend, b"k", b"x")
    assert [thread.daemon for thread in senders()] == [True]
    backend.close()
    assert senders() == []


def test_a_thread_that_had_nothing_to_do_has_a_successor(
    fake: FakeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 0.0)
    backend = connect(fake.url)
    for number in itertools.count():
        assert put_through(backend, b"%d" % number, b"x" * 20_000)
        for thread in senders():
            thread.join()
        if number == 5:
            break
    assert len(fake.named(b"PING")) == 1, "the connection outlives the threads"


def test_when_no_thread_can_be_had_the_value_is_dropped_and_no_caller_hangs(
    fake: FakeServer, connect: Connect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect(fake.url)

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        assert put(backend, b"k", b"x" * 20_000)
        assert backend.flush() == 1
    assert store.used_bytes == 0
    assert put_through(backend, b"k", b"x")


@pytest.mark.parametrize("where", ["_work", "_lose", "_has_work"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_when_the_thread_that_sends_fails_in_our_own_code_its_values_are_given_up_and_the_next_are_sent(
    fake: FakeServer,
    connect: Connect,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[Exception],
) -> None:
    backend = connect(fake.url)

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(write_queue.Sender, "_work", fails)
        patched.setattr(write_queue.Sender, where, fails)
        assert put(backend, b"k", b"x" * 20_000)
        assert backend.flush() == 1
        for thread in senders():
            thread.join()
    assert store.used_bytes == 0
    assert not senders()
