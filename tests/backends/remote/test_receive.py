"""Threads that receive beside a load, and how a load ends: one that is interrupted leaves nothing under way behind."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvredis.backends.config.url import Address
from kvredis.backends.remote import load as remote_load
from kvredis.backends.remote.health import Link
from kvredis.backends.remote.load import Load, Patience, Stream
from kvredis.backends.remote.pipeline import DRAIN_S
from kvredis.backends.remote.pool import Node
from kvredis.backends.remote.receive import Body, Receiver
from kvredis.backends.shm.buffers import AnyRooms
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.backends.nodes import wait_until

MIB = 1024 * 1024
WAIT_S = 20.0


def receivers() -> int:
    """How many threads there are that receive beside others."""
    return sum(thread.name == "kvredis receives" for thread in threading.enumerate())


def connection() -> Any:
    """Nothing, as far as a Body looks at it."""
    return SimpleNamespace(timeout_s=1.0, bytes_in=0, set_timeout=lambda _: None)


def test_a_receiver_that_has_not_been_told_of_its_work_is_not_waited_for_in_vain() -> None:
    receiver = Receiver()
    lane: Any = SimpleNamespace(ask=lambda _: None, take=lambda _: None, connection=connection())
    body = Body(b"key", AnyRooms(Store(Arena.create(MIB, HugepageMode.OFF))))
    receiver._given.append((body, lane, 2, 1.0))  # as by a `begin` that was interrupted before it said so
    assert receiver.is_busy
    waiting = threading.Thread(target=receiver.wait)
    waiting.start()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    receiver.end()
    wait_until(lambda: receivers() == 0, "the thread has ended")


def test_a_receiver_that_is_given_back_at_work_serves_no_other_load_and_ends_with_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def take(_allocate: object) -> None:
        begun.set()
        may_end.wait(WAIT_S)

    lane: Any = SimpleNamespace(ask=lambda _: None, take=take, connection=connection())
    node = Node(Link(Address(), 1.0), 4)
    (receiver,) = node.borrow_receivers(1)
    receiver.begin([Body(b"key", AnyRooms(Store(Arena.create(MIB, HugepageMode.OFF))))], lane, 2, 1.0)
    assert begun.wait(WAIT_S)
    node.bring_back_receivers([receiver])
    (other,) = node.borrow_receivers(1)
    assert other is not receiver
    may_end.set()
    wait_until(lambda: receivers() == 1, "it has ended")
    node.bring_back_receivers([other])
    node.close()
    wait_until(lambda: receivers() == 0, "so has the other")


def test_a_load_that_is_interrupted_while_it_ends_gives_back_what_it_has_of_other_servers() -> None:
    staging = Store(Arena.create(MIB, HugepageMode.OFF))
    routes: Any = None
    load = Load(routes, staging, Patience(1.0, None))
    closed: list[str] = []

    def interrupted(_left_s: float) -> None:
        closed.append("interrupted")
        raise KeyboardInterrupt

    streams: Any = {
        "one": SimpleNamespace(close=lambda left_s: closed.append("one")),
        "two": SimpleNamespace(close=interrupted),
        "three": SimpleNamespace(close=lambda left_s: closed.append("three")),
    }
    load._streams = streams
    with pytest.raises(KeyboardInterrupt):
        load.close()
    assert sorted(closed) == ["interrupted", "one", "three"]
    staging.close()


def test_all_connections_together_keep_a_load_that_ends_no_longer_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    given: list[float] = []
    monkeypatch.setattr(remote_load, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def settle(left_s: float) -> None:
        given.append(left_s)
        now_s[0] += left_s / 2

    node: Any = SimpleNamespace(
        link=SimpleNamespace(timeout_s=1.0), bring_back=lambda _: None, bring_back_receivers=lambda _: None
    )
    lane: Any = SimpleNamespace(settle=settle, connection=SimpleNamespace(set_timeout=lambda _: None))
    staging = Store(Arena.create(MIB, HugepageMode.OFF))
    routes: Any = None
    load = Load(routes, staging, Patience(DRAIN_S * 1.5, None))
    servers: Any = range(3)
    for server in servers:
        load._streams[server] = Stream(node, keep=False)
        load._streams[server].pipelines = [lane] * 4
    load.close()
    assert given[0] == pytest.approx(DRAIN_S)
    assert given[4] < DRAIN_S * 0.6, "the next server has what is left of the load's time"
    assert now_s[0] - 100.0 <= DRAIN_S * 1.5
    staging.close()


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_receiver_that_fails_in_our_own_code_takes_the_next_bodies(error: type[BaseException]) -> None:
    def broken(_s: float) -> None:
        raise error

    def take(_allocate: object) -> None:
        taken.set()

    receiver, taken = Receiver(), threading.Event()
    rooms = AnyRooms(Store(Arena.create(MIB, HugepageMode.OFF)))
    lane: Any = SimpleNamespace(ask=lambda _: None, take=lambda _: None, connection=connection())
    lane.connection.set_timeout = broken
    bodies = [Body(b"one", rooms), Body(b"two", rooms)]
    receiver.begin(bodies, lane, 2, 1.0)
    receiver.wait()
    assert isinstance(bodies[1].error, BackendError if error is SystemExit else error)
    lane.take, lane.connection.set_timeout = take, lambda _: None
    receiver.begin([Body(b"three", rooms)], lane, 2, 1.0)
    assert taken.wait(WAIT_S)
    receiver.wait()
    receiver.end()
    wait_until(lambda: receivers() == 0, "the thread has ended")


def test_what_ends_a_thread_that_receives_does_not_end_the_one_that_loads() -> None:
    def take(_allocate: object) -> None:
        raise SystemExit

    receiver = Receiver()
    body = Body(b"key", AnyRooms(Store(Arena.create(MIB, HugepageMode.OFF))))
    lane: Any = SimpleNamespace(ask=lambda _: None, take=take, connection=connection())
    receiver.begin([body], lane, 2, 1.0)
    receiver.wait()
    assert isinstance(body.error, BackendError)
    receiver.end()
    wait_until(lambda: receivers() == 0, "the thread has ended")
