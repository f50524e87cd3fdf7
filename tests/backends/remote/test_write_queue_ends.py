"""What becomes of values on their way when the server is lost or the backend closed, and of the thread that sends."""

import itertools
import threading
from contextlib import closing

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.health import RETRY_S_MAX, Link
from kvredis.storage.errors import BackendError
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, Connect, small_store
from tests.backends.fake_server import FakeServer, Leave, Shelf, polite
from tests.backends.verbs import BLOCK, content, keys_of, loaded, put, put_through

FIT = 8
"""Blocks in half of the staging memory."""


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvredis stores")]


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "is lost" in message]


# ---- losing the server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [Leave(), Leave(b"+O"), b"\x00" * 20_000, b"$2\r\nhello\r\n", b"what\r\n"])
def test_when_the_server_is_lost_all_that_waits_is_dropped_and_later_stores_arrive(
    fake: FakeServer,
    connect: Connect,
    clock: Clock,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    lie: bytes | Leave,
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
    assert not put(backend, b"k", b"x"), "nobody takes it while the server is lost"
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


def test_when_no_thread_can_be_had_the_value_is_dropped_and_nobody_hangs(
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
