"""One recvmsg(2) into a caller's memory is the same natively and in Python, and tells of what Python's own keeps."""

import errno
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvredis.backends.resp import wire

Receive = Callable[[int, Sequence[memoryview], int], int]
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["natively", "in Python"])
def receive(request: pytest.FixtureRequest) -> Receive:
    if request.param == "in Python":
        return wire.receive_in_python
    if wire._receive_natively is None:
        pytest.skip("the extension is not built here")
    return wire._receive_natively


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def a_signal_soon(told: list[int]) -> Iterator[None]:
    """Let SIGALRM come a hundred times a second, so that one comes within a wait whenever that begins."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: told.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_comes_fills_one_view_and_then_the_next(receive: Receive, ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(b"0123456789\r\nmore")
    memory, ending = bytearray(b"." * 12), bytearray(2)
    assert receive(ours.fileno(), [memoryview(memory)[1:11], memoryview(ending)], socket.MSG_WAITALL) == 12
    assert memory == b".0123456789."
    assert ending == b"\r\n"
    assert receive(ours.fileno(), [memoryview(memory)], 0) == 4
    assert memory == b"more3456789."


def test_the_end_of_the_stream_is_zero_and_nothing_yet_an_error_below_zero(receive: Receive, ends: Ends) -> None:
    ours, theirs = ends
    view = memoryview(bytearray(8))
    assert receive(ours.fileno(), [view], socket.MSG_DONTWAIT) == -errno.EAGAIN
    theirs.close()
    assert receive(ours.fileno(), [view], 0) == 0
    number = ours.detach()
    socket.socket(fileno=number).close()
    assert receive(number, [view], 0) == -errno.EBADF


def test_a_signal_ends_the_wait_and_its_handler_has_run(receive: Receive, ends: Ends) -> None:
    ours, _ = ends
    told: list[int] = []
    with a_signal_soon(told):
        came = receive(ours.fileno(), [memoryview(bytearray(8))], socket.MSG_WAITALL)
        assert told
    assert came == -errno.EINTR


def test_memory_that_is_not_to_be_written_is_refused_and_stays_what_it_is(receive: Receive, ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(b"another")
    memory = b"letters"
    for views in ([memoryview(memory)], [memoryview(bytearray(1)), memoryview(memory)]):
        with pytest.raises((BufferError, TypeError)):
            receive(ours.fileno(), views, socket.MSG_DONTWAIT)
    assert memory == b"letters"
    assert ours.recv(100) == b"another"


def test_more_views_than_a_body_and_its_end_are_refused(receive: Receive, ends: Ends) -> None:
    views = [memoryview(bytearray(1)) for _ in range(wire.VIEWS_MAX + 1)]
    with pytest.raises(ValueError, match="at most 16 views"):
        receive(ends[0].fileno(), views, socket.MSG_DONTWAIT)


def test_the_memory_is_free_again_afterwards(receive: Receive, ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(b"bytes")
    memory = bytearray(5)
    views = [memoryview(memory)[:2], memoryview(memory)[2:]]
    assert receive(ours.fileno(), views, 0) == 5
    for view in views:
        view.release()
    memory.extend(b" and more")  # or it would raise BufferError: a view holds it
    assert memory == b"bytes and more"
