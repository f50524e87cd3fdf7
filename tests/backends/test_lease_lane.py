"""A share of a load by leases, when the server answers late or refuses: what is asked next, and how long for."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from kvredis.backends import lease_lane
from kvredis.backends.attached import AttachedConnection
from kvredis.backends.lease_lane import LeaseLane
from kvredis.backends.shared_arena import SharedArena
from kvredis.storage.arena import Arena, HugepageMode

from .lane_server import pass_time

LEASED = b"*1\r\n*2\r\n:0\r\n:4096\r\n"
SHARE_USED = b"*1\r\n-OOM this connection has leased its share of the arena\r\n"
VALUE = bytes(range(256)) * 16


@contextmanager
def told(said: bytes) -> Iterator[AttachedConnection]:
    """An attached connection whose server has said so already."""
    ours, theirs = socket.socketpair()
    with theirs, closing(AttachedConnection(ours, 2.0)) as connection:
        with Arena.create(1 << 16, HugepageMode.OFF) as arena:
            descriptor = arena.share()
            connection._arena = SharedArena(descriptor, arena.nbytes)
            os.close(descriptor)
        connection._limit_ms = 30_000
        theirs.sendall(said)
        yield connection


def test_a_block_that_may_not_be_leased_a_second_time_comes_over_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with told(LEASED + SHARE_USED + b"$4096\r\n" + VALUE + b"\r\n") as connection:
        lane = LeaseLane(connection, [b"k"], keep=False)
        lane.ask(1)
        pass_time(monkeypatch, 40.0)
        room = bytearray(4096)
        assert lane.take(lambda length: memoryview(room)) == 4096
        assert room == VALUE


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
        lane = LeaseLane(connection, [b"a", b"b"], keep=False)
        for _ in range(2):
            lane.ask(1)
            lane.asked = 0  # two batches are under way
        theirs.sendall(SHARE_USED * 3 + b"$4096\r\n" + VALUE + b"\r\n")
        monkeypatch.setattr(lease_lane, "time", SimpleNamespace(monotonic=later))
        waits_s.clear()
        assert lane.take(lambda length: memoryview(bytearray(4096))) == 4096
    assert waits_s == [5.0, 4.5, 4.0, 3.5]
