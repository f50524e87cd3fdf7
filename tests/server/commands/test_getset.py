"""Commands that read and change at once, and those that set several keys or none: every payload ends well."""

import pytest

from tests.server.fake_session import ARENA_BYTES, FakeSession
from tests.server.handlers import LARGE, OOM, received, run
from tests.server.live import LiveServer, pattern

VALUE = b"v" * LARGE


def test_a_received_payload_is_published_by_each_command_that_takes_one(session: FakeSession) -> None:
    assert run(session, b"GETSET", b"a", received(session, b"a", VALUE)) == b"$-1\r\n"
    assert run(session, b"SETEX", b"b", b"100", received(session, b"b", VALUE)) == b"+OK\r\n"
    assert run(session, b"PSETEX", b"c", b"100000", received(session, b"c", VALUE)) == b"+OK\r\n"
    pairs = (b"d", received(session, b"d", VALUE), b"e", b"small", b"f", received(session, b"f", VALUE))
    assert run(session, b"MSETNX", *pairs) == b":1\r\n"
    assert [session.ask(f"STRLEN {key}") for key in "abcdf"] == [b":%d\r\n" % LARGE] * 5


def test_msetnx_gives_every_payload_back_when_one_key_is_there(session: FakeSession) -> None:
    session.ask("SET b old")
    pairs = (b"a", received(session, b"a", VALUE), b"b", received(session, b"b", VALUE))
    assert run(session, b"MSETNX", *pairs) == b":0\r\n"
    odd = (b"a", received(session, b"a", VALUE), b"b")
    assert run(session, b"MSETNX", *odd) == b"-ERR wrong number of arguments for 'msetnx' command\r\n"
    assert session.store.reserved_bytes == 0
    assert session.ask("DBSIZE") == b":1\r\n"


def test_several_values_find_room_or_none_of_them_is_set(session: FakeSession) -> None:
    half = b"x" * (ARENA_BYTES // 2)
    assert session.ask([b"MSETNX", b"a", half, b"b", half]) == OOM
    assert session.ask("DBSIZE") == b":0\r\n"


@pytest.mark.parametrize("line", [("GETDEL", "k"), ("GETSET", "k", "new"), ("GETEX", "k", "PXAT", "1")])
async def test_a_slow_reader_gets_all_of_what_its_command_has_taken_away(
    loop: str, line: tuple[str, ...], live: LiveServer
) -> None:
    value = pattern(6_000_000)

    reader, writer = await live.connect(receive_bytes=4096), await live.connect()
    await writer.send("SET", "k", value)
    assert await writer.read_line() == b"+OK\r\n"
    await reader.send(*line)
    assert await writer.ask("PING") == b"+PONG\r\n"
    for number in range(3):
        await writer.send("SET", f"other:{number}", pattern(4_000_000, number + 1))
        assert await writer.read_line() == b"+OK\r\n"
    assert await reader.read_bulk() == value
