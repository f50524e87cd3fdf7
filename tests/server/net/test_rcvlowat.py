"""The kernel wakes the server when a good part of a payload is there, and never so late that a client waits for it."""

import asyncio
import socket

import pytest

from kvredis.server.net.rcvlowat import LONG_BYTES, LOW_WATER_BYTES, LowWater
from tests.server.live import LiveServer, until

MIB = 1024 * 1024


def mark_of(live: LiveServer) -> int:
    """The low water mark of the only TCP client's socket."""
    (session,) = (each for each in live.sessions() if each.addr.startswith("127."))
    assert session._transport is not None
    mark = session._transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    assert isinstance(mark, int)
    return mark


class Transport:
    """One that is closing."""

    def is_closing(self) -> bool:
        return True


def test_a_connection_that_closes_is_left_alone() -> None:
    LowWater(Transport()).expect(MIB)  # type: ignore[arg-type]


class Open:
    """One that is open."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, _name: str) -> socket.socket:
        return self._sock


def test_only_a_long_value_has_a_mark_and_its_end_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        low_water, marks = LowWater(Open(sock)), []  # type: ignore[arg-type]
        for missing in (LONG_BYTES - 1, LONG_BYTES, 2 * LOW_WATER_BYTES, 2 * LOW_WATER_BYTES - 1, LONG_BYTES - 1, 0):
            low_water.expect(missing)
            marks.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT))
    assert marks == [1, LOW_WATER_BYTES, LOW_WATER_BYTES, 1, 1, 1]


async def test_the_mark_is_high_within_a_payload_and_low_behind_it(loop: str, live: LiveServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.server.tcp_port)
    value = bytes(3 * MIB)
    writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % len(value) + value[:MIB])
    await until(lambda: mark_of(live) == LOW_WATER_BYTES)
    writer.write(value[MIB:] + b"\r\n*1\r\n$4\r\nPING\r\n")
    assert await reader.readexactly(12) == b"+OK\r\n+PONG\r\n"
    assert mark_of(live) == 1
    writer.close()


@pytest.mark.parametrize("left", [1, 2, 3, 1000, LOW_WATER_BYTES - 1, LOW_WATER_BYTES + 1, 2 * LOW_WATER_BYTES + 7])
async def test_the_last_bytes_are_taken_however_few_they_are(loop: str, left: int, live: LiveServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.server.tcp_port)
    request = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (2 * MIB) + bytes(2 * MIB) + b"\r\n"
    writer.write(request[:-left])
    await until(lambda: live.store.reserved_bytes > 0)
    writer.write(request[-left:])
    assert await reader.readexactly(5) == b"+OK\r\n"
    writer.close()


async def test_a_client_that_sends_slowly_is_heard_every_second(loop: str, live: LiveServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", live.server.tcp_port)
    sent = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (3 * MIB) + bytes(MIB)
    writer.write(sent)
    await until(lambda: live.store.reserved_bytes > 0 and mark_of(live) > 1)
    writer.write(bytes(1000))
    (session,) = live.server.sessions.values()
    await until(lambda: session.input_bytes == len(sent) + 1000)
    writer.close()
