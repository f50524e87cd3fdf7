"""Long values that leave by several threads at once, and what holds all the same: their order, and who is told."""

import contextlib
import io
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.health import RETRY_S_MAX
from kvredis.backends.remote.pipeline import SetPipeline, Touch
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import RemoteReservation
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, ServerProcess, StartServer, small_store
from tests.backends.fake_server import FakeServer, Leave, Shelf, _read_command, polite
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put, put_through

LONG = 2 << 20
"""More than the sockets of both ends hold."""
THREADS = 4
OVERTAKES_S = 0.2
"""How long what must not come gets to come."""
AGAIN_S = 2.0


class Sluice(FakeServer):
    """A server that stops in the midst of a value where a test wants it, on each connection by itself. `shelf` keeps
    what was taken, and its log the order."""

    def __init__(self, folder: Path) -> None:
        self.shelf = Shelf()
        self.begun: list[bytes] = []
        """The keys of all long SETs of which half has been read."""
        self.comes_again = threading.Event()
        """Set when a SET has come of a key in whose last one it has stopped."""
        self.is_touched = threading.Event()
        """Set when a TOUCH has come."""
        self._stops: dict[bytes, threading.Event] = {}
        super().__init__(folder, self.shelf)

    def stop_in(self, *keys: bytes) -> None:
        """Stop in the next SET of each key."""
        self._stops.update((key, threading.Event()) for key in keys)

    def go_on(self) -> None:
        """Go on with all values."""
        for stop in self._stops.values():
            stop.set()

    def close(self) -> None:
        self.go_on()
        super().close()

    def taken(self) -> list[bytes]:
        """The keys of all SETs that were taken, in order."""
        return [key for name, key in self.shelf.log if name == b"SET"]

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, client.makefile("rb") as requests:
            while args := _read_command(Halves(requests, self._stop)):  # type: ignore[arg-type]
                said = self.answer(args)
                assert isinstance(said, bytes)
                client.sendall(said)
                if args[0] == b"TOUCH":
                    self.is_touched.set()

    def _stop(self, key: bytes) -> None:
        self.begun.append(key)
        if key in self._stops and self.begun.count(key) == 1:
            self._stops[key].wait()
        elif key in self._stops:
            self.comes_again.set()


class Halves:
    """A stream of commands, whose long values are read by halves; `stop` is told the key in between."""

    def __init__(self, requests: io.BufferedReader, stop: Callable[[bytes], None]) -> None:
        self.readline = requests.readline
        self._requests = requests
        self._stop = stop
        self._word = b""

    def read(self, length: int) -> bytes:
        """Read a word and its CRLF."""
        if length < LONG:
            self._word = self._requests.read(length)
            return self._word
        half = self._requests.read(length // 2)
        self._stop(self._word[:-2])
        return half + self._requests.read(length - length // 2)


Threaded = Callable[..., RemoteBackend]


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values may take their time, as the machine does that runs the tests."""
    monkeypatch.setattr(write_queue, "TOGETHER_S", 600.0)


@pytest.fixture
def sluice(tmp_path: Path) -> Iterator[Sluice]:
    with contextlib.closing(Sluice(tmp_path)) as server:
        yield server


@pytest.fixture
def store() -> Store:
    """What values wait in: half of it takes sixteen."""
    return small_store(64 << 20)


@pytest.fixture
def threaded(store: Store, clock: Clock) -> Iterator[Threaded]:
    """Makes a backend that may send by four threads, and has sent one long value: how quick it is is known."""
    with contextlib.ExitStack() as closing:

        def make(url: str, timeout_s: float = 30.0) -> RemoteBackend:
            backend = RemoteBackend(parse_url(url), store, connections=THREADS, timeout_s=timeout_s, clock=clock)
            closing.callback(backend.close)
            assert put_through(backend, b"first", content(b"first", LONG))
            return backend

        yield make


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvredis stores")]


def put_all(backend: RemoteBackend, keys: list[bytes]) -> None:
    for key in keys:
        assert put(backend, key, content(key, LONG))


# ---- at the same time ------------------------------------------------------------------------------------------------


def test_long_values_leave_at_the_same_time_and_the_threads_end_with_the_last(
    sluice: Sluice, threaded: Threaded, store: Store
) -> None:
    backend, keys = threaded(sluice.url), keys_of(10)
    sluice.stop_in(*keys[:THREADS])
    put_all(backend, keys)
    wait_until(lambda: len(sluice.begun) == 1 + THREADS, "as many values have begun as there are threads")
    assert len(senders()) == THREADS
    assert loaded(backend, keys[:1]) == [content(keys[0], LONG)], "which is read from here meanwhile"
    sluice.go_on()
    assert backend.flush() == 0
    assert {key: sluice.shelf.values[key] for key in keys} == {key: content(key, LONG) for key in keys}
    wait_until(lambda: len(senders()) <= 1, "the others have ended")
    assert (backend.stats()["stored"], store.used_bytes) == (11, 0)
    assert backend.stats()["connections"] == THREADS


def test_a_value_that_is_stuck_keeps_none_behind_it_waiting_and_flush_waits_for_it(
    sluice: Sluice, threaded: Threaded
) -> None:
    backend, keys = threaded(sluice.url), keys_of(12)
    sluice.stop_in(keys[0])
    put_all(backend, keys)
    flushed: list[int] = []
    flushing = threading.Thread(target=lambda: flushed.append(backend.flush()))
    flushing.start()
    wait_until(lambda: sorted(sluice.taken()) == sorted([b"first", *keys[1:]]), "all others have been taken")
    assert flushed == []
    sluice.go_on()
    flushing.join()
    assert flushed == [0]
    assert sluice.taken()[-1] == keys[0]


def test_short_values_go_over_one_connection(sluice: Sluice, threaded: Threaded) -> None:
    backend = threaded(sluice.url)
    for number in range(200):
        assert put(backend, b"short:%d" % number, b"x" * 20_000)
    assert backend.flush() == 0
    assert backend.stats()["connections"] == 1


def test_a_network_that_is_slow_is_sent_to_by_one_thread(
    sluice: Sluice, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "TOGETHER_S", 0.0)
    backend = threaded(sluice.url)
    put_all(backend, keys_of(12))
    assert backend.flush() == 0
    assert backend.stats()["connections"] == 1


def test_a_server_that_receives_by_one_thread_is_sent_to_by_one(fake: FakeServer, store: Store, clock: Clock) -> None:
    fake.answer = Shelf()
    with contextlib.closing(RemoteBackend(parse_url(fake.url), store, clock=clock)) as backend:
        put_all(backend, keys_of(12))
        assert len(senders()) == 1
        assert backend.flush() == 0
        assert len(senders()) <= 1


def test_without_another_thread_the_first_sends_all(
    sluice: Sluice, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(write_queue, "start_thread", none_left)
    backend = threaded(sluice.url)
    put_all(backend, keys_of(12))
    assert backend.flush() == 0
    assert sluice.taken() == [b"first", *keys_of(12)]


@pytest.mark.parametrize("way", ["tcp", "tls", "lent"])
def test_what_leaves_by_several_threads_is_what_was_stored(
    kvredis_server: ServerProcess, tls_url: str, threaded: Threaded, store: Store, way: str
) -> None:
    backend, keys = threaded(tls_url if way == "tls" else kvredis_server.tcp_url), keys_of(14)
    if way == "lent":
        for key in keys:
            memory = memoryview(bytearray(content(key, LONG)))
            reservation = backend.lend(key, Scattered([memory[:300_000], memory[300_000:]]))
            assert reservation is not None
            reservation.commit()
    else:
        put_all(backend, keys)
    assert backend.flush() == 0
    assert int(backend.stats()["connections"]) > 1
    assert loaded(backend, keys) == [content(key, LONG) for key in keys]
    assert store.used_bytes == 0


# ---- order -----------------------------------------------------------------------------------------------------------


def test_a_newer_value_does_not_overtake_an_older_one_that_is_stuck(sluice: Sluice, threaded: Threaded) -> None:
    backend, others = threaded(sluice.url), keys_of(3)
    sluice.stop_in(b"k")
    assert put(backend, b"k", content(b"1", LONG))
    put_all(backend, others)
    wait_until(lambda: sorted(sluice.taken()) == sorted([b"first", *others]), "the others have passed it")
    for version in (b"2", b"3"):
        assert put(backend, b"k", content(version, LONG))
    assert put(backend, b"behind", content(b"behind", LONG))
    assert not sluice.comes_again.wait(OVERTAKES_S)
    sluice.go_on()
    assert backend.flush() == 0
    assert sluice.taken()[4:] in ([b"k", b"k", b"behind"], [b"k", b"behind", b"k"])
    assert sluice.shelf.values[b"k"] == content(b"3", LONG)


def test_of_many_values_of_few_keys_the_last_of_each_stays(server_of: StartServer, store: Store, clock: Clock) -> None:
    url = server_of("kvredis", "--io-threads", "4").tcp_url
    chance, last = random.Random(3), dict[bytes, bytes]()
    with contextlib.closing(RemoteBackend(parse_url(url), store, connections=THREADS, clock=clock)) as backend:
        for number in range(300):
            key = chance.choice(keys_of(5))
            value = b"%9d" % number * (LONG // 18)
            if put(backend, key, value):
                last[key] = value
            if chance.random() < 0.05:
                assert backend.flush() == 0
            if chance.random() < 0.1:
                backend.delete([key])
                last.pop(key, None)
        assert backend.flush() == 0
        assert loaded(backend, keys_of(5)) == [last.get(key) for key in keys_of(5)]


def test_a_touch_waits_for_the_values_it_touches_on_whatever_thread(sluice: Sluice, threaded: Threaded) -> None:
    backend, keys = threaded(sluice.url), keys_of(6)
    sluice.stop_in(keys[0])
    put_all(backend, keys)
    backend.touch_later(keys)
    assert put(backend, b"behind", content(b"behind", LONG))
    wait_until(lambda: len(sluice.taken()) == 6, "the others have been taken")
    assert not sluice.is_touched.wait(OVERTAKES_S)
    sluice.go_on()
    assert backend.flush() == 0
    touched = sluice.shelf.log.index((b"TOUCH", keys[0]))
    assert {key for name, key in sluice.shelf.log[:touched] if name == b"SET"} >= set(keys)


def test_touches_between_the_values_do_not_make_them_wait_for_each_other(sluice: Sluice, threaded: Threaded) -> None:
    backend, keys = threaded(sluice.url), keys_of(THREADS)
    sluice.stop_in(*keys)
    for key in keys:
        backend.touch_later([b"head"])
        assert put(backend, key, content(key, LONG))
    wait_until(lambda: len(sluice.begun) == 1 + THREADS, "all have begun")
    sluice.go_on()
    assert backend.flush() == 0


def test_deleting_waits_for_a_value_on_whatever_thread(sluice: Sluice, threaded: Threaded) -> None:
    backend, keys = threaded(sluice.url), keys_of(6)
    sluice.stop_in(*keys[:2])
    put_all(backend, keys)
    deleting = threading.Thread(target=backend.delete, args=(keys[:2],))
    deleting.start()
    wait_until(lambda: len(sluice.taken()) == 5, "the others have been taken")
    assert deleting.is_alive()
    sluice.go_on()
    deleting.join()
    log = [entry for entry in sluice.shelf.log if entry[0] in (b"SET", b"UNLINK")]
    assert log[-1] == (b"UNLINK", keys[0])
    assert backend.match(keys[:1]) == 0


def store_beside(backend: RemoteBackend, keys: list[bytes]) -> None:
    """Store by several threads, which wait for more then."""
    put_all(backend, keys)
    assert backend.flush() == 0
    wait_until(lambda: int(backend.stats()["connections"]) == len(senders()), "none is being opened")
    assert len(senders()) > 1


def test_a_server_that_was_restarted_while_the_threads_waited_for_more_is_no_loss(
    server_of: StartServer, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 600.0)
    server = server_of("kvredis")
    backend, keys = threaded(server.url), keys_of(12)
    for _ in range(2):
        store_beside(backend, keys)
        server.kill()
        server.start()
    put_all(backend, keys)
    assert backend.flush() == 0
    assert (backend.stats()["losses"], backend.stats()["stored"]) == (0, 37)


def test_a_helper_whose_connection_was_closed_by_a_server_that_takes_no_more_leaves_its_value_to_the_first_thread(
    server_of: StartServer, threaded: Threaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 600.0)
    server = server_of("kvredis")
    backend, keys = threaded(server.url), keys_of(12)
    store_beside(backend, keys)
    with contextlib.closing(redis.Redis(unix_socket_path=server.url.removeprefix("unix://"))) as client:
        asks = client.client_id()
        _first, *helpers = sorted(int(each["id"]) for each in client.client_list() if int(each["id"]) != asks)
        for number in helpers:
            client.client_kill_filter(_id=str(number))
        wait_until(lambda: len(client.client_list()) == 2, "they are closed")
        client.config_set("maxclients", 2)
        put_all(backend, keys)
        assert backend.flush() == 0
    assert (backend.stats()["losses"], backend.stats()["dropped"], backend.stats()["stored"]) == (0, 0, 25)


# ---- errors and ends -------------------------------------------------------------------------------------------------


def test_a_server_killed_while_several_threads_send_costs_what_was_on_its_way_and_is_used_again(
    server_of: StartServer, threaded: Threaded, store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of("kvredis")
    backend, keys = threaded(server.url), keys_of(12)
    put_all(backend, keys)
    assert backend.flush() == 0
    server.signal(signal.SIGSTOP)
    put_all(backend, keys)
    assert len(senders()) > 1
    server.kill()
    assert backend.flush() == 12
    stats = backend.stats()
    assert (int(stats["refused"]) + int(stats["dropped"]), stats["losses"], store.used_bytes) == (12, 1, 0)
    assert len([message for message in caplog.messages if "is lost" in message]) == 1
    assert not put(backend, b"k", b"x"), "no server takes it meanwhile"
    server.start()
    clock.now_s += RETRY_S_MAX
    assert backend.match(keys) == 0
    put_all(backend, keys)
    assert backend.flush() == 0
    assert loaded(backend, keys) == [content(key, LONG) for key in keys]


def test_values_that_the_server_refuses_are_counted_and_those_beside_them_are_stored(
    server_of: StartServer, threaded: Threaded, store: Store
) -> None:
    server = server_of("kvredis")
    backend = threaded(server.url)
    with contextlib.closing(redis.Redis(unix_socket_path=server.url.removeprefix("unix://"))) as client:
        client.acl_setuser("default", enabled=True, reset_keys=True, keys=["may:*"], nopass=True, commands=["+@all"])
    keys = [b"%b:%d" % (kind, number) for number in range(7) for kind in (b"may", b"not")]
    put_all(backend, keys)
    assert backend.flush() == 7
    assert (backend.stats()["stored"], backend.stats()["refused"], backend.stats()["losses"]) == (8, 7, 0)
    assert loaded(backend, keys[::2]) == [content(key, LONG) for key in keys[::2]]
    assert store.used_bytes == 0


def test_a_server_that_takes_two_connections_is_sent_to_over_these(
    fake: FakeServer, threaded: Threaded, caplog: pytest.LogCaptureFixture
) -> None:
    shelf, greeted = Shelf(), list[bytes]()

    def full(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"HELLO":
            greeted.append(args[0])
            if len(greeted) > 2:
                return Leave(b"-ERR max number of clients reached\r\n")
        said = shelf(args) if args[0] == b"SET" else polite(args)
        assert isinstance(said, bytes)
        return said

    fake.answer = full
    backend, keys = threaded(fake.url), keys_of(12)
    put_all(backend, keys)
    assert backend.flush() == 0
    assert {key: shelf.values[key] for key in keys} == {key: content(key, LONG) for key in keys}
    assert backend.stats()["losses"] == 0


def test_closing_while_several_threads_send_to_a_server_that_hangs_ends_in_time_and_leaves_none(
    sluice: Sluice, threaded: Threaded
) -> None:
    backend, keys = threaded(sluice.url, timeout_s=1.0), keys_of(12)
    sluice.stop_in(*keys[:THREADS])
    put_all(backend, keys)
    wait_until(lambda: len(sluice.begun) == 1 + THREADS, "all threads send")
    backend.close()
    assert senders() == []
    stats = backend.stats()
    assert (int(stats["refused"]) + int(stats["dropped"]), stats["queued"]) == (12, 0)


def test_closing_sends_what_several_threads_have_on_its_way(sluice: Sluice, threaded: Threaded) -> None:
    backend, keys = threaded(sluice.url), keys_of(12)
    sluice.stop_in(*keys[:THREADS])
    put_all(backend, keys)
    wait_until(lambda: len(sluice.begun) == 1 + THREADS, "all threads send")
    closing = threading.Thread(target=backend.close)
    closing.start()
    sluice.go_on()
    closing.join()
    assert senders() == []
    assert sorted(sluice.taken()) == sorted([b"first", *keys])
    assert backend.stats()["stored"] == 13


def test_an_interrupt_of_who_waits_for_several_threads_loses_nothing(sluice: Sluice, threaded: Threaded) -> None:
    backend, keys = threaded(sluice.url), keys_of(12)
    sluice.stop_in(*keys[:THREADS])
    main, waits, is_over = threading.get_ident(), threading.Event(), threading.Event()

    def interrupt() -> None:
        waits.wait()
        signal.pthread_kill(main, signal.SIGINT)
        while not is_over.wait(AGAIN_S):  # Python misses one that comes in the very moment in which it goes to wait
            signal.pthread_kill(main, signal.SIGINT)

    def flush() -> None:
        waits.set()
        try:
            backend.flush()
        finally:
            is_over.set()

    put_all(backend, keys)
    wait_until(lambda: len(sluice.begun) == 1 + THREADS, "all threads send")
    breaker = threading.Thread(target=interrupt)
    breaker.start()
    with pytest.raises(KeyboardInterrupt):
        flush()
    breaker.join()
    sluice.go_on()
    assert backend.flush() == 0
    assert sorted(sluice.taken()) == sorted([b"first", *keys])


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("where", ["send", "answers"])
def test_when_a_thread_beside_the_first_fails_in_our_own_code_nothing_waits_for_ever_and_the_next_are_sent(
    sluice: Sluice,
    threaded: Threaded,
    store: Store,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: type[BaseException],
) -> None:
    backend, keys = threaded(sluice.url), keys_of(12)
    right = getattr(SetPipeline, where)

    def fails(pipeline: SetPipeline, *args: RemoteReservation | Touch | int) -> object:
        if threading.current_thread().name.endswith("beside another"):
            raise error
        return right(pipeline, *args)

    with monkeypatch.context() as patched:
        patched.setattr(SetPipeline, where, fails)
        sluice.stop_in(keys[0])
        count = sum(put(backend, key, content(key, LONG)) for key in keys)
        wait_until(lambda: backend.stats()["losses"] == 1, "the thread has failed")
        assert 0 < backend.flush() <= count
    wait_until(lambda: store.used_bytes == 0, "all room is given back")
    clock.now_s += RETRY_S_MAX
    assert put_through(backend, b"next", content(b"next", LONG))
