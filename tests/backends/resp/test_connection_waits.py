"""How long a connection waits: for a whole reply, or to send, as long as it was told, however the bytes come."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvredis.backends.resp.connection import Connection
from kvredis.backends.resp.wire import SCRATCH_BYTES
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import BackendError
from tests.server.certificates import Papers, make_papers

from .pairs import KINDS, PEER_TIMEOUT_S, MakePair, in_background, pairs, pattern


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Certificates."""
    return make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What the bytes go over."""
    return str(request.param)


@pytest.fixture
def make_pair(kind: str, papers: Papers) -> Iterator[MakePair]:
    """Makes connections with so long a timeout, each with the peer's end of its socket."""
    with pairs(kind, papers) as make:
        yield make


def test_a_silent_peer_is_given_up_after_the_timeout(make_pair: MakePair) -> None:
    connection, _ = make_pair(0.01)
    with pytest.raises(BackendError, match="timed out"):
        connection.read()
    assert not connection.usable


def test_a_peer_that_stops_within_a_body_is_given_up_after_the_timeout(make_pair: MakePair) -> None:
    connection, peer = make_pair(0.01)
    peer.sendall(b"$100000\r\nabc")
    with pytest.raises(BackendError, match="timed out"):
        connection.read()


TRICKLES = {
    "a body": b"$100000\r\n" + b"x" * SCRATCH_BYTES,
    "a line": b"+",
    "an array": b"*1000000\r\n",
    "a body that is dropped": b"$10000000\r\n",
}


@pytest.mark.parametrize("what", TRICKLES)
def test_what_trickles_is_given_up_after_the_timeout_although_something_comes_each_time(
    make_pair: MakePair, what: str
) -> None:
    connection, peer = make_pair(0.3)
    done = threading.Event()

    def trickle() -> None:
        with suppress(OSError):  # we have hung up
            peer.sendall(TRICKLES[what])
            while not done.wait(0.02):
                peer.sendall(b":1\r\n" if what == "an array" else b"x")

    peer_thread = in_background(trickle)
    began_s = time.monotonic()
    with pytest.raises(BackendError, match="timed out"):
        connection.read() if what != "a body that is dropped" else connection.read_bulk_into(lambda n: None)
    took_s = time.monotonic() - began_s
    done.set()
    peer_thread.join()
    assert 0.29 < took_s < 5.0


def test_header_and_body_share_one_timeout(make_pair: MakePair) -> None:
    connection, peer = make_pair(2.0)
    began_s = time.monotonic()
    header = threading.Timer(1.8, lambda: peer.sendall(b"$100000\r\nabc"))
    header.start()
    with pytest.raises(BackendError, match="timed out"):
        connection.read()
    header.join()
    assert 1.99 < time.monotonic() - began_s < 3.6  # and not the 1.8 s of the header and 2 s more


def test_a_new_timeout_holds_from_the_next_reply_on_shorter_or_longer(make_pair: MakePair) -> None:
    connection, peer = make_pair(0.02)
    connection.set_timeout(20.0)
    late = threading.Timer(0.2, lambda: peer.sendall(b"+late\r\n"))
    late.start()
    assert connection.read() == "late"
    late.join()
    connection.set_timeout(0.05)
    with pytest.raises(BackendError, match="timed out"):
        connection.read()


def test_a_peer_that_does_not_read_is_given_up_after_the_timeout(make_pair: MakePair) -> None:
    connection, _ = make_pair(0.05)
    with pytest.raises(BackendError, match="timed out"):
        connection.send_set(b"k", bytes(8 << 20))
    assert not connection.usable


def test_another_thread_may_interrupt_whoever_waits(make_pair: MakePair) -> None:
    connection, peer = make_pair(30.0)
    peer.sendall(b"$100000\r\nabc")
    interruption = threading.Timer(0.1, connection.interrupt)
    interruption.start()
    with pytest.raises(BackendError, match=r"closed|while waiting"):
        connection.read_bulk_into(lambda n: memoryview(bytearray(n)))
    interruption.join()
    assert not connection.usable


def test_after_an_interruption_nothing_is_taken_for_an_answer_that_came_before_it(make_pair: MakePair) -> None:
    connection, peer = make_pair(5.0)
    peer.sendall(b"$20000\r\n" + pattern(20_000) + b"\r\n")
    connection.interrupt()
    memory = bytearray(20_000)
    with suppress(BackendError):  # what was here already may still be read, and is right then
        connection.read_bulk_into(lambda n: memoryview(memory))
        assert memory == pattern(20_000)
        connection.read()
    assert not connection.usable


@contextmanager
def interrupted(connection: Connection) -> Iterator[threading.Semaphore]:
    """Let a timer strike a hundred times a second, as those of sampling profilers do; each stroke can be waited for.
    Whoever then waits for ever is let go, with another error than that of a timeout."""
    strokes = threading.Semaphore(0)
    patience = threading.Timer(10.0, connection.interrupt)
    before = signal.signal(signal.SIGALRM, lambda number, frame: strokes.release())
    patience.start()
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        yield strokes
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        patience.cancel()
        patience.join()


@pytest.mark.parametrize("sent", [b"", b"$100000\r\n"], ids=["nothing comes", "no body comes"])
def test_a_timer_that_strikes_more_often_makes_no_wait_for_a_reply_longer(make_pair: MakePair, sent: bytes) -> None:
    connection, peer = make_pair(0.1)
    peer.sendall(sent)
    with interrupted(connection), pytest.raises(BackendError, match="timed out"):
        connection.read()


def test_a_timer_that_strikes_more_often_makes_no_wait_to_send_longer(make_pair: MakePair) -> None:
    connection, _ = make_pair(0.1)
    with interrupted(connection), pytest.raises(BackendError, match="timed out"):
        connection.send_set(b"k", bytes(8 << 20))


def test_a_timer_that_strikes_more_often_makes_no_wait_for_shared_memory_longer() -> None:
    ours, peer = socket.socketpair()
    connection = AttachedConnection(ours, 0.1)
    with peer, connection, interrupted(connection), pytest.raises(BackendError, match="timed out"):
        connection.attach("a run")


def test_what_comes_and_goes_between_the_strokes_of_a_timer_is_whole(make_pair: MakePair) -> None:
    connection, peer = make_pair(20.0)
    value = pattern(1 << 20)
    came = bytearray()

    def mirror() -> None:
        while len(came) < len(value):
            strokes.acquire(timeout=PEER_TIMEOUT_S)
            came.extend(peer.recv(200_000))
        peer.sendall(b"$%d\r\n" % len(value))
        for first in range(0, len(value), 200_000):
            strokes.acquire(timeout=PEER_TIMEOUT_S)
            peer.sendall(value[first : first + 200_000])
        strokes.acquire(timeout=PEER_TIMEOUT_S)
        peer.sendall(b"\r\n")

    with interrupted(connection) as strokes:
        peer_thread = in_background(mirror)
        connection.send_buffers([value[:300_000], value[300_000:]])
        assert connection.read() == value
        peer_thread.join()
    assert came == value
