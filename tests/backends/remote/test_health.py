"""Attempts to reach a server: bounded in time, spaced out, said once, whatever stands in the way."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from kvredis.backends.config.url import Address, SentinelAddress, parse_url
from kvredis.backends.remote import health as link_module
from kvredis.backends.remote.health import RETRY_S_MAX, RETRY_S_MIN, Link
from kvredis.backends.resp.connection import Connection
from kvredis.backends.resp.sockets import CALLS_MAX, within
from kvredis.storage.errors import BackendError
from tests.backends.conftest import EXIT_S, Clock
from tests.backends.fake_server import FakeServer, Leave, polite
from tests.backends.nodes import wait_until

Resolve = Callable[[str], list[str]]


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Resolve], None]:
    """Lets a host name mean what a function gives: addresses of loopback, late or never."""

    def install(name: str, resolve: Resolve) -> None:
        real = socket.getaddrinfo

        def fake(host: str, *args: object, **options: object) -> object:
            if host != name:
                return real(host, *args, **options)  # type: ignore[arg-type]
            if options.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "not an address")
            return [info for address in resolve(host) for info in real(address, *args, **options)]  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "getaddrinfo", fake)

    return install


@pytest.fixture
def tcp_server() -> Iterator[int]:
    """The port of a server that answers PING on 127.0.0.1, for one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                while client.recv(1000):
                    client.sendall(b"+PONG\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def full_listener(host: str, port: int) -> Iterator[None]:
    """A port where connections are neither accepted nor refused: its queue is full."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, port))
        yield


def test_a_server_that_accepts_and_never_answers_costs_no_more_than_the_connect_timeout(deaf: int) -> None:
    for link in (
        Link(Address("127.0.0.1", deaf), 60.0, connect_timeout_s=0.1),
        Link(Address("127.0.0.1", deaf), 0.1),
        Link(Address("127.0.0.1", deaf, password="p", db=3), 0.1, connect_timeout_s=60.0),
    ):
        began_s = time.monotonic()
        assert link.open() is None
        assert 0.09 < time.monotonic() - began_s < 10
        assert link.waiting
        assert link.losses == 1


def test_a_connection_that_was_opened_waits_as_long_as_the_link_says(fake: FakeServer) -> None:
    link = Link(parse_url(fake.url), 60.0, connect_timeout_s=0.3)
    hold = threading.Event()

    def slow_get(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"GET":
            hold.wait(0.6)
        return polite(args)

    fake.answer = slow_get
    connection = link.open()
    assert connection is not None
    with connection:
        assert connection.call(b"GET", b"k") is None


def test_all_addresses_of_a_name_are_tried(resolves: Callable[[str, Resolve], None], tcp_server: int) -> None:
    resolves("several.test", lambda _: ["127.0.0.9", "127.0.0.8", "127.0.0.1"])
    with Connection.open(f"redis://several.test:{tcp_server}", 5.0) as connection:
        assert connection.call(b"PING") == "PONG"


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(
    resolves: Callable[[str, Resolve], None], tcp_server: int
) -> None:
    with full_listener("127.0.0.7", tcp_server):
        resolves("several.test", lambda _: ["127.0.0.7", "127.0.0.1"])
        with Connection.open(f"redis://several.test:{tcp_server}", 1.0) as connection:
            assert connection.call(b"PING") == "PONG"


def test_a_name_that_is_not_resolved_in_time_is_given_up(resolves: Callable[[str, Resolve], None]) -> None:
    hold = threading.Event()

    def resolve(_: str) -> list[str]:
        hold.wait(30)
        return ["127.0.0.1"]

    resolves("hangs.test", resolve)
    began_s = time.monotonic()
    with pytest.raises(BackendError, match=r"redis://hangs\.test:1: timed out looking up hangs\.test"):
        Connection.open("redis://hangs.test:1", 0.1)
    assert time.monotonic() - began_s < 10
    hold.set()


def test_a_name_that_is_none_is_said(resolves: Callable[[str, Resolve], None]) -> None:
    def resolve(_: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolves("nowhere.test", resolve)
    with pytest.raises(BackendError, match=r"redis://nowhere\.test:1: Name or service not known"):
        Connection.open("redis://nowhere.test:1", 5.0)
    with pytest.raises(BackendError, match="redis://"):
        Connection.open(Address("a" * 70 + ".test", 1), 5.0)  # no name has so long a part


def test_calls_that_hang_are_bounded_in_number_and_their_places_come_back() -> None:
    hold, ended = threading.Event(), threading.Semaphore(0)

    def work() -> int:
        hold.wait(30)
        ended.release()
        return 7

    for _ in range(CALLS_MAX):
        with pytest.raises(TimeoutError, match=r"timed out hanging$"):
            within(0.001, "hanging", work)
    with pytest.raises(TimeoutError, match="behind 16 other calls"):
        within(0.001, "hanging", work)
    hold.set()
    for _ in range(CALLS_MAX):
        assert ended.acquire(timeout=30)
    assert within(30, "working", work) == 7


def test_what_a_bounded_call_raises_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        within(30, "dividing", lambda: 1 // 0)


def test_without_a_thread_a_bounded_call_fails_and_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "Thread", NoThread)
    for _ in range(CALLS_MAX + 1):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            within(0.001, "working", lambda: 1)


def test_a_single_server_that_is_read_only_stays_in_use(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    link = Link(parse_url(fake.url), 5.0)
    for _ in range(2):
        assert not link.complain(BackendError("READONLY You can't write against a read only replica."))
    assert len(caplog.messages) == 1
    connection = link.open()
    assert connection is not None
    connection.close()


def test_a_master_behind_sentinels_that_refuses_writes_is_given_up() -> None:
    link = Link(SentinelAddress((("127.0.0.1", 1),)), 5.0)
    assert link.complain(BackendError("READONLY You can't write against a read only replica."))
    assert not link.complain(BackendError("OOM command not allowed"))


def test_attempts_are_spaced_out_and_the_loss_and_the_return_are_said_once(
    fake: FakeServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    link = Link(parse_url(fake.url), 5.0, clock)
    fake.answer = lambda args: b"-LOADING Redis is loading the dataset in memory\r\n"
    for _ in range(5):
        assert link.open() is None
        assert link.open() is None  # too early: no server is asked
        clock.now_s += 100
    assert len(fake.named(b"PING")) == 5
    fake.answer = polite
    connection = link.open()
    assert connection is not None
    with closing(connection):
        assert [message.split()[2] for message in caplog.messages] == ["lost", "back"]
    assert "LOADING" in caplog.messages[0]
    assert (link.losses, link.reconnects) == (1, 1)


@pytest.fixture
def lost_and_late(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> tuple[Link, threading.Event]:
    """A link to a server that was lost, is due again, and answers no PING before the event."""
    clock, answers = Clock(), threading.Event()
    monkeypatch.setattr(link_module, "RETRY_WAIT_S", 0.05)

    def late(args: list[bytes]) -> bytes | Leave:
        answers.wait(EXIT_S)
        return polite(args)

    link = Link(parse_url(fake.url), 60.0, clock, connect_timeout_s=30.0)
    link.lost(BackendError("cut"), 0)
    clock.now_s += 100
    fake.answer = late
    return link, answers


def test_no_caller_waits_for_a_lost_server_that_hangs_and_one_thread_looks_for_it(
    fake: FakeServer, lost_and_late: tuple[Link, threading.Event]
) -> None:
    link, answers = lost_and_late
    began_s = time.monotonic()
    for _ in range(20):
        assert link.open() is None
        assert link.waiting, "what is stored meanwhile would find no server to take it"
    assert time.monotonic() - began_s < 15, "one short wait, and not a connect timeout each"
    answers.set()
    found: list[Connection] = []

    def is_found() -> bool:
        connection = link.open()
        found.extend([connection] if connection is not None else [])
        return bool(found)

    wait_until(is_found, "the connection is handed out")
    with closing(found[0]):
        assert found[0].call(b"PING") == "PONG"
    assert len(fake.named(b"PING")) == 2, "one attempt, and this one"
    assert (link.losses, link.reconnects) == (1, 1)


def test_a_link_that_is_closed_meanwhile_keeps_no_connection(lost_and_late: tuple[Link, threading.Event]) -> None:
    link, answers = lost_and_late
    assert link.open() is None
    link.close()
    answers.set()
    retry = link._retrying
    if retry is not None:
        retry.join(EXIT_S)
    assert link._found is None


def test_a_connection_that_was_found_and_has_gone_again_is_not_handed_out(
    fake: FakeServer, lost_and_late: tuple[Link, threading.Event]
) -> None:
    link, answers = lost_and_late
    assert link.open() is None
    answers.set()
    wait_until(lambda: link._found is not None, "the server is found")
    fake.hang_up()
    connection = link.open()
    assert connection is not None
    with closing(connection):
        assert connection.call(b"PING") == "PONG"


class LostAtOnce(Link):
    """Its server is lost again as soon as it is back, before a caller has heard of that."""

    def _try(self, *, beside: bool = False) -> Connection | None:
        connection = super()._try()
        self.lost(BackendError("cut again"), self.losses)
        return connection


def test_a_connection_found_before_the_latest_loss_is_not_handed_out_after_it(fake: FakeServer, clock: Clock) -> None:
    link = LostAtOnce(parse_url(fake.url), 5.0, clock)
    link.lost(BackendError("cut"), 0)
    clock.now_s += 100
    assert link.open() is None
    assert link.open() is None
    assert (link.losses, link.waiting) == (2, True)


def test_an_attempt_that_fails_after_the_server_was_lost_and_came_back_is_no_loss(
    fake: FakeServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    asked, answer = threading.Event(), threading.Event()
    turns = iter(range(100))

    def late_and_wrong(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"PING" and next(turns) == 0:
            asked.set()
            answer.wait(EXIT_S)
            return b"-LOADING\r\n"
        return polite(args)

    fake.answer = late_and_wrong
    link = Link(parse_url(fake.url), 60.0, clock, connect_timeout_s=60.0)
    opened: list[Connection | None] = []
    first = threading.Thread(target=lambda: opened.append(link.open()))
    first.start()
    assert asked.wait(EXIT_S)
    link.lost(BackendError("cut"), 0)
    clock.now_s += 100
    connection = link.open()
    assert connection is not None
    answer.set()
    first.join(EXIT_S)
    with closing(connection):
        assert opened == [None]
        assert (link.losses, link.waiting) == (1, False)
        assert [message.split()[2] for message in caplog.messages] == ["lost", "back"]


def test_what_a_connection_says_that_was_opened_before_a_loss_is_no_other_loss(fake: FakeServer, clock: Clock) -> None:
    link = Link(parse_url(fake.url), 5.0, clock)
    link.lost(BackendError("cut"), 0)
    link.lost(BackendError("cut as well"), 0)
    clock.now_s += 100
    connection = link.open()
    assert connection is not None
    with closing(connection):
        link.lost(BackendError("cut, and told late"), 0)
        assert (link.losses, link.waiting) == (1, False)


@pytest.mark.parametrize("lost", [False, True])
def test_an_error_of_any_kind_is_a_failed_attempt_and_not_the_last_one(
    fake: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    link = Link(parse_url(fake.url), 5.0, clock)
    if lost:
        link.lost(BackendError("cut"), 0)
        clock.now_s += 100
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "open", lambda *args: 1 // 0)
        assert link.open() is None
    assert (link.losses, link.waiting) == (1, True)
    clock.now_s += 100
    connection = link.open()
    assert connection is not None
    connection.close()


def test_a_server_that_comes_and_goes_is_tried_less_and_less_often_until_it_stays(
    fake: FakeServer, clock: Clock
) -> None:
    link = Link(parse_url(fake.url), 5.0, clock)

    def comes_and_goes(times: int) -> None:
        for _ in range(times):
            connection = link.open()
            if connection is not None:
                connection.close()
                link.lost(BackendError("cut"), link.losses)
            clock.now_s += RETRY_S_MIN

    comes_and_goes(1000)
    assert link.losses < 1000 * RETRY_S_MIN / RETRY_S_MAX + 10
    clock.now_s += RETRY_S_MAX
    connection = link.open()
    assert connection is not None
    connection.close()
    clock.now_s += RETRY_S_MAX
    losses = link.losses
    comes_and_goes(4)
    assert link.losses == losses + 2


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_search_for_a_lost_server_that_fails_in_our_own_code_is_followed_by_another(
    fake: FakeServer, clock: Clock, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_timeout_s: float) -> Address:
        raise error

    link = Link(parse_url(fake.url), 5.0, clock)
    link.doubt()
    with monkeypatch.context() as patched:
        patched.setattr(link, "_find", fails)
        clock.now_s += RETRY_S_MAX
        assert link.open() is None
        wait_until(lambda: link._retrying is None, "the search has ended")
    assert link.waiting, "the next one is not made at once"
    clock.now_s += RETRY_S_MAX
    assert not link.waiting
    opened = link.open()
    wait_until(lambda: not link.waiting, "the server was found")
    connection = opened or link.open()
    assert connection is not None
    connection.close()


def test_what_would_end_the_thread_of_a_bounded_call_does_not_end_the_callers() -> None:
    def leave() -> None:
        raise SystemExit

    with pytest.raises(RuntimeError, match=r"leaving was ended by SystemExit\(\)"):
        within(30, "leaving", leave)
