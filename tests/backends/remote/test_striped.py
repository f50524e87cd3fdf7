"""Bodies of one load come over all connections at once, each by itself in the kernel, and in the order of the keys."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from kvredis.backends.config.url import Address
from kvredis.backends.local import LocalBackend
from kvredis.backends.remote import load as remote_load
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.pipeline import GetPipeline
from kvredis.backends.remote.receive import Body, Receiver
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.backends.tiered.staging import NearStaging
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.backends.fake_server import FakeServer, Shelf, _read_command, polite
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded

MIB = 1024 * 1024
WAIT_S = 20.0
KEYS = [b"%d" % number for number in range(9)]


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies may take their time, as the machine does that runs the tests."""
    monkeypatch.setattr(remote_load, "TOGETHER_S", 60.0)


class Relay:
    """Sends the body of an odd key, or of an even one, only when one behind it, on the other connection, has been
    taken. Its bodies are longer than a unix socket holds, so what is sent to the end has been received by a thread."""

    def __init__(self, path: Path) -> None:
        self.waits = 1
        """The remainder by two of the keys that wait."""
        self.behind = 1
        """How far behind the key is that they wait for."""
        self.taken = [threading.Event() for _ in range(100)]
        self.halfway = threading.Event()
        self.lengths: dict[int, int] = {}
        """Of bodies that do not have a MiB; of 0 half is sent, `halfway` set, and no more."""
        self._end = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def send_at_once(self) -> None:
        """From now on send each body at once."""
        for event in self.taken:
            event.set()

    def close(self) -> None:
        """Hang up and wait for all threads."""
        self._end.set()
        for sock in (self._listener, *self._clients):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self.send_at_once()
        for thread in self._threads:
            thread.join(WAIT_S)

    def body(self, number: int) -> bytes:
        """What is stored under a number."""
        return bytes([number + 1]) * self.lengths.get(number, MIB)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client.makefile("rb") as requests:
            while args := _read_command(requests):
                if args[0] == b"GET":
                    self._send(client, int(args[1]))
                else:
                    said = polite(args)
                    assert isinstance(said, bytes)
                    client.sendall(said)

    def _send(self, client: socket.socket, number: int) -> None:
        if number % 2 == self.waits and number + self.behind < len(KEYS):
            self.taken[number + self.behind].wait(WAIT_S)
        if self.lengths.get(number) == 0:
            client.sendall(b"$%d\r\n%b" % (MIB, bytes(MIB // 2)))
            self.halfway.set()
            self._end.wait()
        client.sendall(b"$%d\r\n%b\r\n" % (len(self.body(number)), self.body(number)))
        self.taken[number].set()


@contextmanager
def connected(path: Path, arena_bytes: int) -> Iterator[tuple[Relay, RemoteBackend, Store]]:
    """A backend with two connections to a Relay; at the end nothing is held, and no thread is left."""
    relay = Relay(path / "relay.sock")
    store = Store(Arena.create(arena_bytes, HugepageMode.OFF))
    backend = RemoteBackend(Address(path=str(path / "relay.sock")), store, connections=2, timeout_s=2 * WAIT_S)
    try:
        yield relay, backend, store
        assert store.reserved_bytes == store.used_bytes == 0
    finally:
        relay.close()
        backend.close()
    wait_until(lambda: receivers() == 0, "the threads have ended")


def receivers() -> int:
    """How many threads there are that receive beside others."""
    return sum(thread.name == "kvredis receives" for thread in threading.enumerate())


def read_all(relay: Relay, backend: RemoteBackend) -> None:
    """Load all keys, one after the other, and compare."""
    for number, lease in enumerate(backend.load(KEYS)):
        assert lease is not None, number
        with lease:
            assert lease.view == relay.body(number)


@pytest.mark.parametrize("ahead_bytes", [MIB, 8 * MIB], ids=["two for each thread", "several for each thread"])
def test_bodies_of_a_load_are_received_at_the_same_time(
    tmp_path: Path, ahead_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_load, "AHEAD_OF_READER_BYTES", ahead_bytes)
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        read_all(relay, backend)
        assert receivers() == 2, "which stay for the next load"
        for event in relay.taken:
            event.clear()
        relay.waits = 0  # the next load knows from the beginning how long bodies are, and its first is not alone
        read_all(relay, backend)
        assert receivers() == 2


def test_a_connection_that_is_slower_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_load, "AHEAD_OF_READER_BYTES", MIB)
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        relay.behind = 3  # two bodies of the other connection come before one of this
        began_s = time.monotonic()
        read_all(relay, backend)
        assert time.monotonic() - began_s < WAIT_S


def test_a_reader_that_leaves_gives_back_what_was_received_ahead_of_it(tmp_path: Path) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        load = backend.load(KEYS)
        for number in (0, 1):
            lease = next(load)
            assert lease is not None
            with lease:
                assert lease.view == relay.body(number)
        assert store.used_bytes > 0, "the third has come beside the second"
        load.close()
        assert store.used_bytes == 0


@pytest.mark.parametrize("held", [1, 2])
def test_where_there_is_little_room_one_comes_at_a_time(tmp_path: Path, held: int) -> None:
    with connected(tmp_path, 4 * MIB) as (relay, backend, _):
        relay.send_at_once()
        leases = []
        for number, lease in enumerate(backend.load(KEYS)):
            assert lease is not None, number
            assert lease.view == relay.body(number)
            leases.append(lease)
            if len(leases) == held:
                leases.pop(0).release()
        for lease in leases:
            lease.release()


def test_what_others_hold_is_no_reason_to_miss_what_has_room_one_at_a_time(tmp_path: Path) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        relay.send_at_once()
        others = []
        while (room := store.reserve(b"other", MIB)) is not None:
            others.append(room)
        others.pop().abort()  # one fits now, and no two
        read_all(relay, backend)
        assert backend.stats()["no_room"] == 0
        for room in others:
            room.abort()


@pytest.mark.parametrize("length", [MIB - 5, MIB + 5, 100_000, 9])
def test_a_body_of_another_length_than_the_last_comes_beside_others_too(tmp_path: Path, length: int) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        relay.send_at_once()
        relay.lengths = dict.fromkeys((2, 5, 8), length)
        read_all(relay, backend)


@pytest.mark.parametrize("why", ["short bodies", "a slow network"])
def test_one_comes_at_a_time_where_others_beside_it_gain_nothing(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        relay.send_at_once()
        if why == "short bodies":
            relay.lengths = dict.fromkeys(range(9), remote_load.TOGETHER_BYTES_MIN - 1)
        else:
            monkeypatch.setattr(remote_load, "TOGETHER_S", 0.0)
        for lease in backend.load(KEYS):
            assert lease is not None
            lease.release()
            assert store.used_bytes == 0, "nothing else has come with it"
        assert receivers() == 0


def test_without_another_thread_one_comes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Receiver) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Receiver, "__init__", refuse)
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        relay.send_at_once()
        read_all(relay, backend)


def test_when_one_connection_breaks_what_had_come_before_it_is_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_load, "AHEAD_OF_READER_BYTES", MIB)
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        got = []
        for number, lease in enumerate(backend.load(KEYS)):
            if lease is not None:
                with lease:
                    assert lease.view == relay.body(number)
            got.append(lease is not None)
            if number == 2:
                relay.close()
        assert got[:3] == [True] * 3
        assert not got[-1]
        assert len(got) == len(KEYS)


def test_a_body_that_stops_halfway_beside_others_is_a_miss_within_the_time_given(tmp_path: Path) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, _):
        relay.send_at_once()
        relay.lengths = {4: 0}
        came = []
        for lease in backend.load(KEYS, within_s=2.0):
            came.append(lease is not None)
            if lease is not None:
                lease.release()
        assert came == [True] * 4 + [False] * 5
        assert backend.stats()["given_up"] == 1
        assert backend.stats()["losses"] == 0, "it had less time than usual"


def test_a_body_that_is_given_up_before_its_thread_begins_with_it_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up while the first comes, which it does all the same; those behind it are not begun any more."""
    wait_for, forgot = Receiver.wait_for, list[Receiver]()

    def late(receiver: Receiver, body: Body, timeout_s: float) -> bool:
        if forgot:
            return body.has_come
        assert relay.halfway.wait(WAIT_S)
        forgot.append(receiver)
        receiver.forget()
        relay.send_at_once()
        assert wait_for(receiver, body, WAIT_S)
        return False

    monkeypatch.setattr(Receiver, "wait_for", late)
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        relay.lengths, relay.behind = {4: 0}, 7
        came = []
        for lease in backend.load(KEYS):
            came.append(lease is not None)
            if lease is not None:
                lease.release()
        assert came == [True] * 3 + [False] * 6
        assert store.reserved_bytes == 0


def test_an_interrupt_while_bodies_come_stops_all_of_them_before_their_memory_is_given_back(tmp_path: Path) -> None:
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        relay.send_at_once()
        relay.lengths = {1: 0, 2: 0}  # on both connections

        def interrupt() -> None:
            assert relay.halfway.wait(WAIT_S)
            signal.pthread_kill(main, signal.SIGINT)

        main = threading.get_ident()
        with closing(backend.load(KEYS)) as load:
            first = next(load)
            assert first is not None
            first.release()
            breaker = threading.Thread(target=interrupt)
            breaker.start()
            with pytest.raises(KeyboardInterrupt):
                next(load)
            breaker.join(WAIT_S)
        assert store.used_bytes == 0
        relay.lengths = {}
        relay.close()


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_load_interrupted_again_while_it_waits_for_its_receivers_still_waits_before_memory_is_given_back(
    tmp_path: Path, interrupts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, receiving, dropped = [interrupts], set[Body](), list[bool]()
    wait, wait_for, receive, drop = Receiver.wait, Receiver.wait_for, Body.receive, Body.drop

    def interrupt() -> None:
        if left[0]:
            left[0] -= 1
            assert relay.halfway.wait(WAIT_S)
            raise KeyboardInterrupt

    def interrupted_for_one(receiver: Receiver, body: Body, timeout_s: float) -> bool:
        interrupt()
        return wait_for(receiver, body, timeout_s)

    def interrupted(receiver: Receiver) -> None:
        interrupt()
        wait(receiver)

    def watched(body: Body, lane: GetPipeline, ahead: int = 0, within_s: float | None = None) -> None:
        receiving.add(body)
        receive(body, lane, ahead, within_s)
        receiving.remove(body)

    def noted(body: Body) -> None:
        dropped.append(body in receiving)
        drop(body)

    monkeypatch.setattr(Receiver, "wait_for", interrupted_for_one)
    monkeypatch.setattr(Receiver, "wait", interrupted)
    monkeypatch.setattr(Body, "receive", watched)
    monkeypatch.setattr(Body, "drop", noted)
    with connected(tmp_path, 64 * MIB) as (relay, backend, store):
        relay.send_at_once()
        relay.lengths = {2: 0}
        load = backend.load(KEYS)
        first = next(load)
        assert first is not None
        first.release()
        with pytest.raises(KeyboardInterrupt):
            next(load)
        assert left == [0]
        assert dropped
        assert not any(dropped)
        assert store.used_bytes == 0


# ---- into near memory ------------------------------------------------------------------------------------------------


@contextmanager
def layered(url: str, blocks: int) -> Iterator[LayeredBackend]:
    """Near memory of so many MiB before a server to which there are four connections."""
    near = LocalBackend(Store(Arena.create(blocks * 2 * MIB, HugepageMode.OFF)), keep=True, load_wait_s=5.0)
    staging = NearStaging(near, 5.0)
    far = RemoteBackend(Address(path=url.removeprefix("unix://")), staging, connections=4, keep=True)
    with closing(LayeredBackend(near, far, staging)) as backend:
        yield backend
        near.store.check_integrity()
        assert near.store.leases == near.store.reserved_bytes == 0


def test_what_is_deleted_while_it_comes_beside_others_does_not_stay_near(fake: FakeServer) -> None:
    fake.answer = shelf = Shelf()
    keys = keys_of(9)
    shelf.values.update({key: content(key, MIB) for key in keys})
    with layered(fake.url, 40) as backend:
        leases = backend.load(keys)
        for key in keys[:2]:
            lease = next(leases)
            assert lease is not None
            with lease:
                assert lease.view == content(key, MIB)
        assert backend.near.store.reserved_bytes > 2 * MIB, "others have come with the second"
        assert backend.delete(keys) == len(keys)
        for lease in leases:
            if lease is not None:
                lease.release()
        assert [key for key in keys if backend.near.store.find(key) is not None] == []


def test_several_that_are_fetched_ahead_take_no_more_than_near_has_room_for(fake: FakeServer) -> None:
    fake.answer = shelf = Shelf()
    keys = keys_of(30)
    shelf.values.update({key: content(key, MIB) for key in keys})
    with layered(fake.url, 10) as backend:
        job = backend.prefetch(keys)
        assert job.wait(WAIT_S)
        came = [key for key in keys if backend.near.store.find(key) is not None]
        assert came == keys[: len(came)], "the head stays"
        assert 10 <= len(came) < 20
        assert job.no_room == len(keys) - len(came)
        assert loaded(backend, came) == [content(key, MIB) for key in came]
