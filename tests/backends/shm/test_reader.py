"""A share of a load by leases, when the server answers late or refuses: what is asked next, and how long for."""

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from kvredis.backends.shm import connection as attached
from kvredis.backends.shm import reader
from kvredis.backends.shm.arena import SharedArena
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.backends.shm.gpu_memory import GpuMemory
from kvredis.backends.shm.leases import GpuLease, SharedLease
from kvredis.backends.shm.reader import LeasePipeline, leases_for
from kvredis.storage.errors import BackendError
from kvredis.storage.memory import cuda
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.device_arena import DeviceArena
from tests.stand_in_cuda import stand_in_cuda
from tests.storage.memory.test_page_lock import FakeDriver

from .lane_server import pass_time

LEASED = b"*1\r\n*2\r\n:0\r\n:4096\r\n"
SHARE_USED = b"*1\r\n-OOM this connection has leased its share of the arena\r\n"
VALUE = bytes(range(256)) * 16


@contextmanager
def told(said: bytes, timeout_s: float = 2.0) -> Iterator[AttachedConnection]:
    """An attached connection whose server has said so already, and closes it when this ends."""
    with told_by(timeout_s) as (connection, theirs):
        theirs.sendall(said)
        yield connection


@contextmanager
def told_by(timeout_s: float = 2.0) -> Iterator[tuple[AttachedConnection, socket.socket]]:
    """An attached connection, and the server's end of it."""
    ours, theirs = socket.socketpair()
    with theirs, closing(AttachedConnection(ours, timeout_s)) as connection:
        with Arena.create(1 << 16, HugepageMode.OFF) as arena:
            descriptor = arena.share()
            connection._arena = SharedArena(descriptor, arena.nbytes)
            os.close(descriptor)
        connection._limit_ms = 30_000
        yield connection, theirs


def test_a_block_that_may_not_be_leased_a_second_time_comes_over_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with told(LEASED + SHARE_USED + b"$4096\r\n" + VALUE + b"\r\n") as connection:
        lane = LeasePipeline(connection, [b"k"], keep=False)
        lane.ask(1)
        pass_time(monkeypatch, 40.0)
        room = bytearray(4096)
        assert lane.take(lambda length: memoryview(room)) == 4096
        assert room == VALUE


def test_leases_whose_answers_have_come_are_taken_without_a_word_as_long_as_nothing_is_to_be_asked() -> None:
    said = b"*4\r\n" + b"".join(b"*2\r\n:%d\r\n:4096\r\n" % (4096 * at) for at in range(3)) + b"$5\r\nshort\r\n"
    with told_by() as (connection, theirs):
        lane = LeasePipeline(connection, [b"a", b"b", b"c", b"d"], keep=False, next_bytes=4096)
        assert lane.at_hand(b"a") is None, "nothing has been asked"
        lane.ask(4)
        theirs.sendall(said)
        assert lane.at_hand(b"a") is None, "nothing has been read"
        first = lane.take(lambda length: None)
        theirs.close()
        second = lane.at_hand(b"b")
        assert isinstance(first, SharedLease)
        assert isinstance(second, SharedLease)
        assert lane.asked == 2
        assert lane.at_hand(b"x") is None, "it is c that comes next"
        third = lane.at_hand(b"c")
        assert isinstance(third, SharedLease)
        assert lane.at_hand(b"d") is None, "a value itself takes the long way"
        for lease in (first, second, third):
            lease.release()


def test_a_lease_that_is_over_or_longer_than_all_before_is_not_taken_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"*2\r\n*2\r\n:0\r\n:4096\r\n*2\r\n:4096\r\n:8192\r\n*1\r\n*2\r\n:0\r\n:4096\r\n"
    with told(said) as connection:
        lane = LeasePipeline(connection, [b"a", b"b"], keep=False, next_bytes=4096)
        lane.ask(4)
        first = lane.take(lambda length: None)
        assert isinstance(first, SharedLease)
        assert lane.at_hand(b"b") is None, "its length is to be learnt"
        lane._longest = 8192
        pass_time(monkeypatch, 40.0)
        assert lane.at_hand(b"b") is None
        again = lane.take(lambda length: None)
        assert isinstance(again, SharedLease)
        assert again.length == 4096
        first.release()
        again.release()


def test_no_lease_is_at_hand_behind_a_connection_that_was_closed() -> None:
    with told(b"*2\r\n*2\r\n:0\r\n:4096\r\n*2\r\n:4096\r\n:4096\r\n") as connection:
        lane = LeasePipeline(connection, [b"a", b"b"], keep=False, next_bytes=4096)
        lane.ask(4)
        first = lane.take(lambda length: None)
        assert isinstance(first, SharedLease)
        connection.close()
        assert lane.at_hand(b"b") is None
        lane.settle(1.0)
        first.release()


def test_all_that_is_asked_for_one_block_takes_no_longer_than_one_answer_may(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    now_s = [100.0]

    def later() -> float:
        now_s[0] += 0.5
        return now_s[0]  # as if each answer took half a second

    class Watched(AttachedConnection):
        """Tells how long each answer was waited for at most."""

        __slots__ = ()

        def begin(self) -> None:
            waits_s.append(self._timeout_s)
            super().begin()

    ours, theirs = socket.socketpair()
    with theirs, closing(Watched(ours, 5.0)) as connection:
        lane = LeasePipeline(connection, [b"a", b"b"], keep=False)
        for _ in range(2):
            lane.ask(1)
            lane.asked = 0  # two batches are under way
        theirs.sendall(SHARE_USED * 3 + b"$4096\r\n" + VALUE + b"\r\n")
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=later))
        waits_s.clear()
        assert lane.take(lambda length: memoryview(bytearray(4096))) == 4096
    assert waits_s == [5.0, 4.5, 4.0, 3.5]


def test_long_keys_are_asked_for_in_as_many_turns_as_a_socket_takes_without_being_read() -> None:
    with told_by() as (connection, _):
        lane = LeasePipeline(connection, [b"%4000d" % number for number in range(1000)], keep=False, next_bytes=1)
        lane.ask(1)  # raises if that waits for the server, which may be waiting for us to read
        assert 1 < lane.asked < 1000


GIB = 1 << 30


@pytest.mark.parametrize(
    ("length_mib", "arena_gib", "waits_for_disk", "wanted"),
    [(32, 5, True, (8, 8)), (32, 5, False, (8, 40)), (32, 128, True, (8, 64)), (32, 128, False, (8, 64))],
)
def test_all_leases_of_a_load_are_asked_for_ahead_where_none_waits_for_a_disk(
    length_mib: int, arena_gib: int, waits_for_disk: bool, wanted: tuple[int, int]
) -> None:
    assert leases_for(length_mib << 20, arena_gib * GIB, waits_for_disk) == wanted


def test_one_load_of_short_values_does_not_make_the_next_ask_for_many_long_ones() -> None:
    with told(b"*1\r\n*2\r\n:0\r\n:4096\r\n" + b"*1\r\n*2\r\n:0\r\n:16\r\n") as connection:
        next_bytes = -1
        for _ in range(2):
            lane = LeasePipeline(connection, [b"k"], keep=False, next_bytes=next_bytes)
            lane.ask(1)
            lease = lane.take(lambda length: None)
            assert isinstance(lease, SharedLease)
            lease.release()
            lane.settle(1.0)
            next_bytes = lane.next_bytes
        assert next_bytes == 2048


def places(answers: list[object]) -> list[tuple[int, int]]:
    """Where leases are."""
    return [(each._address, each.length) for each in answers if isinstance(each, SharedLease)]


def test_an_answer_that_comes_in_pieces_is_read_as_one_that_comes_whole() -> None:
    wanted = [(number * 512, number) for number in range(100)]
    said = b"*100\r\n" + b"".join(b"*2\r\n:%d\r\n:%d\r\n" % place for place in wanted)

    def speak(theirs: socket.socket) -> None:
        for at in range(0, len(said), 7):
            theirs.sendall(said[at : at + 7])
        theirs.sendall(b"+PONG\r\n")

    with told_by() as (connection, theirs):
        speaker = threading.Thread(target=speak, args=(theirs,))
        speaker.start()
        answers = connection.read_leases(1e9, 100)
        assert places([*answers]) == wanted
        assert connection.has_leases
        assert connection.read() == "PONG", "and nothing is read of what stands behind it"
        speaker.join()
        for lease in answers:
            assert isinstance(lease, SharedLease)
            lease.release()
        assert not connection.has_leases


@contextmanager
def gpu_told_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AttachedConnection, socket.socket]]:
    """The same with 8 MiB of the server's GPU memory, which the arena's 64 KiB come before."""
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    with told_by() as (connection, theirs):
        connection._gpu, connection.gpu_base = GpuMemory(DeviceArena.create(8 << 20)), 1 << 16
        yield connection, theirs


def test_an_answer_of_places_on_a_gpu_that_comes_in_pieces_is_read_as_one_that_comes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [((1 << 16) + number * 4096, number) for number in range(100)]
    said = b"*100\r\n" + b"".join(b"*3\r\n:%d\r\n:%d\r\n$3\r\ngpu\r\n" % place for place in wanted)

    def speak(theirs: socket.socket) -> None:
        for at in range(0, len(said), 7):
            theirs.sendall(said[at : at + 7])
        theirs.sendall(b"+PONG\r\n")

    with gpu_told_by(monkeypatch) as (connection, theirs):
        speaker = threading.Thread(target=speak, args=(theirs,))
        speaker.start()
        answers = connection.read_leases(1e9, 100)
        assert places([*answers]) == wanted
        assert {type(each) for each in answers} == {GpuLease}
        assert connection.read() == "PONG"
        speaker.join()
        for lease in answers:
            assert isinstance(lease, GpuLease)
            lease.release()
        assert not connection.has_leases


@pytest.mark.parametrize("count", [1, 64, 700])
@pytest.mark.parametrize("other", [b"$-1\r\n", b"*2\r\n:512\r\n:512\r\n", b"$3\r\ngpu\r\n", b"-OOM no\r\n"])
def test_what_else_is_among_places_on_a_gpu_comes_in_its_turn(
    other: bytes, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, count // 2, count - 1):
        items = [b"*3\r\n:%d\r\n:512\r\n$3\r\ngpu\r\n" % (65536 + number * 8) for number in range(count)]
        items[first] = other
        with gpu_told_by(monkeypatch) as (connection, theirs):
            theirs.sendall(b"*%d\r\n" % count + b"".join(items) + b"+PONG\r\n")
            answers = connection.read_leases(1e9, count)
            on_gpu = [each for each in answers if isinstance(each, GpuLease)]
            assert places([*on_gpu]) == [(65536 + number * 8, 512) for number in range(count) if number != first]
            assert str(answers[first]) in ("None", "b'gpu'", "OOM no") or places([answers[first]]) == [(512, 512)]
            assert connection.read() == "PONG"


@pytest.mark.parametrize("wrong", [b"$3\r\ngpt", b"$4\r\ngpu", b":3\r\ngpu", b"$3\r\ngp\n"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_place_that_is_not_on_our_gpu_breaks_the_connection(
    wrong: bytes, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpu_told_by(monkeypatch) as (connection, theirs):
        connection.set_timeout(0.2)
        if not has_gpu:
            connection._gpu, wrong = None, b"$3\r\ngpu"
        theirs.sendall(b"*2\r\n*3\r\n:65536\r\n:5\r\n" + wrong + b"\r\n*3\r\n:65536\r\n:5\r\n$3\r\ngpu\r\n")
        with pytest.raises(BackendError):
            connection.read_leases(1e9, 2)
        assert not connection.usable


@pytest.mark.parametrize("count", [1, 64, 1000])
@pytest.mark.parametrize("other", [b"$-1\r\n", b"$5\r\n*2\r\n:\r\n", b"-OOM no\r\n"])
def test_what_else_is_among_the_places_comes_in_its_turn(other: bytes, count: int) -> None:
    for first in (0, count // 2, count - 1):
        items = [b"*2\r\n:%d\r\n:512\r\n" % (number * 8) for number in range(count)]
        items[first] = other
        with told(b"*%d\r\n" % count + b"".join(items) + b"+PONG\r\n") as connection:
            answers = connection.read_leases(1e9, count)
            assert places([*answers]) == [(number * 8, 512) for number in range(count) if number != first]
            assert str(answers[first]) in ("None", "b'*2\\r\\n:'", "OOM no")
            assert connection.read() == "PONG"


@pytest.mark.parametrize(
    "wrong", [b"+5", b":", b":x", b":5:6", b"5", b"::5", b"$1\r\n5", b":5\r\n:6", b":-1", b":-5", b": 5 5"]
)
@pytest.mark.parametrize("behind", [b"", b"*2\r\n:0\r\n:5\r\n" * 9])
def test_an_answer_of_anything_but_integers_breaks_the_connection(wrong: bytes, behind: bytes) -> None:
    with told(b"*3\r\n*2\r\n:0\r\n:5\r\n*2\r\n" + wrong + b"\r\n:5\r\n*2\r\n:0\r\n:5\r\n" + behind, 0.2) as connection:
        with pytest.raises(BackendError):
            connection.read_leases(1e9, 3)
        assert not connection.usable


def test_the_server_hears_of_ended_leases_when_they_are_many_or_large_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "RELEASES_TOGETHER", 5)
    monkeypatch.setattr(attached, "RELEASED_BYTES", 4096)
    skip = b"*3\r\n$6\r\nCLIENT\r\n$5\r\nREPLY\r\n$4\r\nSKIP\r\n"
    with told_by() as (connection, theirs):
        theirs.setblocking(False)

        def leases(count: int, length: int) -> list[SharedLease]:
            theirs.sendall(b"*%d\r\n" % count + b"*2\r\n:512\r\n:%d\r\n" % length * count)
            return [each for each in connection.read_leases(1e9, count) if isinstance(each, SharedLease)]

        def heard() -> int:
            try:
                said = theirs.recv(1 << 16)
            except BlockingIOError:
                return 0
            assert said.startswith(skip + b"*")
            return said.count(b"$3\r\n512\r\n")

        kept = leases(1, 1)
        ended = []
        for lease in leases(6, 1):
            lease.release()
            lease.release()
            ended.append(heard())
        assert ended == [0, 0, 0, 0, 5, 0]
        ended = []
        for lease in leases(3, 2048):
            lease.release()
            ended.append(heard())
        assert ended == [0, 3, 0], "two of them and the one of before"
        kept[0].release()
        assert heard() == 2
        for lease in leases(2, 5000):
            lease.release()
            assert heard() == 1


def test_memory_that_is_read_by_a_gpu_stays_registered_when_the_connection_breaks() -> None:
    driver = FakeDriver()
    with told(LEASED) as connection:
        connection.arena.lock(driver)
        (lease,) = connection.read_leases(1e9, 1)
        assert isinstance(lease, SharedLease)
        connection.close()
        gc.collect()
        assert driver.registered, "a thread may be copying"
        lease.release()
        del lease
        gc.collect()
        assert driver.registered == {}


def test_what_its_reader_is_given_may_still_be_held_and_is_asked_about_without_a_system_call() -> None:
    with told(b"*2\r\n" + b"*2\r\n:0\r\n:4096\r\n" * 2) as connection:
        one, two = connection.read_leases(1e9, 2)
        assert isinstance(one, SharedLease)
        assert isinstance(two, SharedLease)
        assert one.lasts
        connection.interrupt()
        assert one.lasts
        assert not one.held, "which looks at the socket"
        one.release()
        assert not one.lasts
        two._until_s = 0.0
        assert not two.lasts
