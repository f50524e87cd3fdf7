"""The client on a socketpair: whatever the peer sends, in whatever pieces, is read right or ends the connection."""

import itertools
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import ARRAY_ITEMS_MAX, BULK_BYTES_MAX, Connection, Reply, ServerFull, encode
from kvredis.backends.resp.wire import DISCARD_BYTES, SCRATCH_BYTES, VIEWS_MAX, Scattered
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import BackendError
from tests.server.certificates import Papers

from .pairs import KINDS, PEER_TIMEOUT_S, MakePair, Pair, in_background, pairs, pattern


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """What the bytes go over."""
    return str(request.param)


@pytest.fixture
def make_pair(kind: str, papers: Papers) -> Iterator[MakePair]:
    """Makes connections with so long a timeout, each with the peer's end of its socket."""
    with pairs(kind, papers) as make:
        yield make


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    """A connection, and the peer's end of its socket."""
    return make_pair(5.0)


def read_all(peer: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        received += peer.recv(1 << 20)
    return bytes(received)


def read_for_ever(connection: Connection) -> None:
    while True:
        connection.read()


def plain(reply: Reply) -> object:
    """An error as a value that compares."""
    if isinstance(reply, list):
        return [plain(item) for item in reply]
    return ("error", str(reply)) if isinstance(reply, BackendError) else reply


REPLIES: list[tuple[bytes, object]] = [
    (b"+OK\r\n", "OK"),
    (b"+\r\n", ""),
    (b":0\r\n", 0),
    (b":-9223372036854775808\r\n", -(2**63)),
    (b"-OOM command not allowed\r\n", ("error", "OOM command not allowed")),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n-ERR no\r\n", [1, [b"x", None], ("error", "ERR no")]),
]


@pytest.mark.parametrize(("sent", "meant"), REPLIES)
def test_a_reply_may_be_cut_anywhere(pair: Pair, sent: bytes, meant: object) -> None:
    connection, peer = pair
    for cut in range(len(sent)):
        peer.sendall(sent[:cut])
        later = in_background(lambda rest=sent[cut:]: peer.sendall(rest))  # type: ignore[misc]
        assert plain(connection.read()) == meant
        later.join()
    assert not connection.stale()


def test_replies_in_one_piece_come_in_order(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"".join(sent for sent, _ in REPLIES))
    assert [plain(connection.read()) for _ in REPLIES] == [meant for _, meant in REPLIES]


LENGTHS = [
    0,
    1,
    100,
    SCRATCH_BYTES - 10,
    SCRATCH_BYTES - 8,
    SCRATCH_BYTES - 7,
    SCRATCH_BYTES - 6,
    SCRATCH_BYTES,
    300_000,
]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_body_lands_in_the_lent_memory_and_nowhere_else(pair: Pair, length: int) -> None:
    connection, peer = pair
    body = pattern(length)
    sender = in_background(lambda: peer.sendall(b"$%d\r\n%b\r\n:7\r\n" % (length, body)))
    memory = bytearray(b"\xaa" * (length + 16))
    assert connection.read_bulk_into(lambda n: memoryview(memory)[8 : 8 + n]) == length
    assert connection.read() == 7
    sender.join()
    assert memory == b"\xaa" * 8 + body + b"\xaa" * 8


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("views", [1, 2, VIEWS_MAX, 2 * VIEWS_MAX + 1])
def test_a_body_is_scattered_over_the_memory_that_is_lent(pair: Pair, length: int, views: int) -> None:
    connection, peer = pair
    body = pattern(length)
    sender = in_background(lambda: peer.sendall(b"$%d\r\n%b\r\n:7\r\n" % (length, body)))
    cuts = [length * place // views for place in range(views + 1)]  # of a short body some are empty
    memory = [bytearray(stop - start) for start, stop in itertools.pairwise(cuts)]
    assert connection.read_bulk_into(lambda n: Scattered([memoryview(each) for each in memory])) == length
    assert connection.read() == 7
    sender.join()
    assert b"".join(memory) == body


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_bodies_arrive_right_in_pieces_of_any_size(pair: Pair, piece: int) -> None:
    connection, peer = pair
    body = pattern(20_001)
    stream = (b"$%d\r\n%b\r\n" % (len(body), body)) * 2 + b"$-1\r\n"

    def dribble() -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for start in range(0, len(stream), piece):
            peer.sendall(stream[start : start + piece])

    sender = in_background(dribble)
    for _ in range(2):
        memory = bytearray(len(body))
        assert connection.read_bulk_into(lambda n, memory=memory: memoryview(memory)) == len(body)  # type: ignore[misc]
        assert memory == body
    assert connection.read_bulk_into(lambda n: None) is None
    sender.join()


@pytest.mark.parametrize("length", [0, 5, SCRATCH_BYTES, DISCARD_BYTES, DISCARD_BYTES + 1, 3 * DISCARD_BYTES + 11])
def test_a_body_without_room_is_dropped_and_the_stream_stays_in_step(pair: Pair, length: int) -> None:
    connection, peer = pair
    sender = in_background(lambda: peer.sendall(b"$%d\r\n%b\r\n+next\r\n" % (length, pattern(length))))
    assert connection.read_bulk_into(lambda n: None) == length
    assert connection.read() == "next"
    sender.join()


def test_an_error_in_place_of_a_body_is_a_value(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"-WRONGTYPE no\r\n+OK\r\n")
    assert plain(connection.read_bulk_into(lambda n: None)) == ("error", "WRONGTYPE no")
    assert connection.read() == "OK"


GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n",
    b"\r\n",
    b"$\r\n",
    b"$abc\r\n",
    b"$-2\r\n",
    b"$+4\r\nabcd\r\n",
    b"$ 4\r\nabcd\r\n",
    b"$1_0\r\n",
    b"$%d\r\n" % (BULK_BYTES_MAX + 1),
    b"$99999999999999999999\r\n",
    b"*%d\r\n" % (ARRAY_ITEMS_MAX + 1),
    b"*-2\r\n",
    b":\r\n",
    b":1.5\r\n",
    b":--1\r\n",
    b":" + b"9" * 30 + b"\r\n",
    b"$3\r\nabcd\r\n",
    b"$3\r\nabc\n\r",
    b"*1\r\n" * 40 + b":1\r\n",
    b"+" + b"x" * 2 * SCRATCH_BYTES,
    b"_\r\n",
    b"%1\r\n",
    b"",
    b"$10\r\nabc",
    b"+OK",
    b"*2\r\n:1\r\n",
]


@pytest.mark.parametrize("sent", GARBAGE)
@pytest.mark.parametrize("streamed", [False, True])
def test_garbage_and_a_peer_that_leaves_end_the_connection(pair: Pair, sent: bytes, streamed: bool) -> None:
    connection, peer = pair
    peer.sendall(sent)
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(BackendError):
        connection.read_bulk_into(lambda n: memoryview(bytearray(n))) if streamed else connection.read()
    assert not connection.usable
    with pytest.raises(BackendError, match="closed"):
        connection.call(b"PING")


def test_random_bytes_never_do_more_than_end_the_connection(make_pair: MakePair, kind: str) -> None:
    rng = random.Random(7)
    alphabet = b"$*:+-0123456789\r\n\r\nabc"
    for _ in range(300 if kind == "plain" else 30):
        connection, peer = make_pair(5.0)
        with peer, connection:
            peer.sendall(bytes(rng.choices(alphabet, k=rng.randrange(1, 60))))
            peer.shutdown(socket.SHUT_WR)
            with pytest.raises(BackendError):
                read_for_ever(connection)
            assert not connection.usable


def test_room_is_asked_for_a_body_that_is_longer_than_redis_takes_unless_it_is_told_to(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"$%d\r\n" % (BULK_BYTES_MAX + 1))
    peer.shutdown(socket.SHUT_WR)
    asked: list[int] = []
    with pytest.raises(BackendError, match="closed by the server"):
        connection.read_bulk_into(asked.append)
    assert asked == [BULK_BYTES_MAX + 1]


def test_lent_memory_of_the_wrong_size_is_the_callers_mistake_and_ends_the_connection(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"$3\r\nabc\r\n")
    with pytest.raises(ValueError, match="lent 2 bytes for a body of 3"):
        connection.read_bulk_into(lambda n: memoryview(bytearray(2)))
    assert not connection.usable


def test_a_refusal_that_was_sent_before_we_spoke_is_told(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"-ERR max number of clients reached\r\n")
    peer.close()
    with pytest.raises(ServerFull, match="HELLO refused: ERR max number of clients reached"):
        connection._greet(Address(), time.monotonic() + 5.0)


def test_lent_memory_that_is_not_to_be_written_is_not_and_the_connection_ends(pair: Pair) -> None:
    connection, peer = pair
    peer.sendall(b"$20000\r\n")  # and no body yet, of which the first bytes would be copied
    memory = bytes(20_000)
    with pytest.raises(TypeError, match="not to be written"):
        connection.read_bulk_into(lambda n: memoryview(memory))
    assert not connection.usable


def test_stale_sees_a_close_and_bytes_that_were_not_asked_for(pair: Pair) -> None:
    connection, peer = pair
    assert not connection.stale()
    peer.sendall(b"+hello\r\n")
    assert connection.stale()
    assert connection.read() == "hello"
    assert not connection.stale()
    peer.close()
    assert connection.stale()


def test_a_value_in_several_buffers_is_sent_as_one(pair: Pair) -> None:
    connection, peer = pair
    words = memoryview(bytearray(pattern(64))).cast("Q")
    connection.send_set(b"key", b"head", words, memoryview(b"tail"))
    wanted = b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$72\r\nhead" + words.tobytes() + b"tail\r\n"
    assert read_all(peer, len(wanted)) == wanted
    assert connection.bytes_out == len(wanted)


def test_a_value_larger_than_any_socket_buffer_is_sent_whole(pair: Pair) -> None:
    connection, peer = pair
    body = pattern(5_000_000)
    sender = in_background(lambda: connection.send_set(b"k", body))
    wanted = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5000000\r\n" + body + b"\r\n"
    assert read_all(peer, len(wanted)) == wanted
    sender.join()


def test_more_buffers_than_the_kernel_takes_at_once_are_sent_whole(pair: Pair) -> None:
    connection, peer = pair
    pieces = [pattern(n % 5, n) for n in range(5000)]
    body = b"".join(pieces)
    sender = in_background(lambda: connection.send_set(b"k", *pieces))
    wanted = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (len(body), body)
    assert read_all(peer, len(wanted)) == wanted
    sender.join()


def test_many_commands_are_sent_in_order_long_arguments_lent() -> None:
    long = pattern(100_000)
    assert b"".join(encode([b"SET", b"k", long])) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100000\r\n" + long + b"\r\n"
    assert any(buffer is long for buffer in encode([b"SET", b"k", long]))
    assert encode([b"PING", bytearray(b"x")]) == [b"*2\r\n$4\r\nPING\r\n$1\r\nx\r\n"]


def test_a_pipeline_of_short_and_long_commands_keeps_its_order(pair: Pair) -> None:
    connection, peer = pair
    long = pattern(10_000)
    commands: list[list[bytes]] = [
        [b"PING"],
        [b"SET", b"a", long],
        [b"GET", b"a"],
        [b"GET", b"b"],
        [b"SET", b"b", long],
    ]
    connection.send_many(commands)
    wanted = b"".join(b"".join(encode(command)) for command in commands)
    assert read_all(peer, len(wanted)) == wanted
    connection.send_many([])
    assert connection.bytes_out == len(wanted)


def test_closing_twice_is_fine(pair: Pair) -> None:
    connection, _ = pair
    connection.close()
    connection.close()
    assert not connection.usable


# How long a connection waits: for a whole reply, or to send, as long as it was told, however the bytes come.


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

    def send(data: bytes) -> None:
        with suppress(OSError):  # we have hung up
            peer.sendall(data)

    began_s = time.monotonic()
    header = threading.Timer(1.8, send, (b"$100000\r\n",))
    body = threading.Timer(2.8, send, (bytes(100_000) + b"\r\n",))  # within 2 s of the header
    for timer in (header, body):
        timer.start()
    with pytest.raises(BackendError, match="timed out"):
        connection.read()
    assert time.monotonic() - began_s > 1.99
    for timer in (header, body):
        timer.join()


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


def test_another_thread_may_interrupt_the_one_that_waits(make_pair: MakePair) -> None:
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
def interrupted(connection: Connection) -> Iterator[SimpleQueue[int]]:
    """Let a timer strike a hundred times a second, as those of sampling profilers do; each stroke can be waited for.
    A caller that would then wait for ever is let go, with another error than that of a timeout."""
    strokes: SimpleQueue[int] = SimpleQueue()  # whose `put` may be interrupted by another stroke
    patience = threading.Timer(60.0, connection.interrupt)
    before = signal.signal(signal.SIGALRM, lambda number, frame: strokes.put(number))
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
            strokes.get(timeout=PEER_TIMEOUT_S)
            came.extend(peer.recv(200_000))
        peer.sendall(b"$%d\r\n" % len(value))
        for first in range(0, len(value), 200_000):
            strokes.get(timeout=PEER_TIMEOUT_S)
            peer.sendall(value[first : first + 200_000])
        strokes.get(timeout=PEER_TIMEOUT_S)
        peer.sendall(b"\r\n")

    with interrupted(connection) as strokes:
        peer_thread = in_background(mirror)
        connection.send_buffers([value[:300_000], value[300_000:]])
        assert connection.read() == value
        peer_thread.join()
    assert came == value
