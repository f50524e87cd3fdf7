"""A part of a stored value is lent out of the arena, as the whole is: a chunk can be read layer by layer."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvredis.server.commands.registry import SPELLINGS
from kvredis.server.commands.strings import getrange
from kvredis.server.context import Caller as Peer
from kvredis.server.protocol.replies import Reply
from tests.server.live import MIB, Client, LiveServer, pattern
from tests.server.tiered_server import TieredServer, block


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[Reply]:
    """What GETRANGE's handler gives from now on."""
    seen: list[Reply] = []

    def watched(session: Peer, args: list[bytes]) -> Reply:
        seen.append(getrange(session, args))
        return seen[-1]

    monkeypatch.setitem(SPELLINGS, b"GETRANGE", replace(SPELLINGS[b"GETRANGE"], handler=watched))
    return seen


async def read_range(client: Client, key: str, start: int, end: int) -> bytes:
    """GETRANGE of start..end, the end left out as in Python."""
    await client.send("GETRANGE", key, str(start), str(end - 1))
    found = await client.read_bulk()
    assert found is not None
    return found


def lent_of(live: LiveServer, reply: Reply) -> int:
    """How many bytes of the arena itself are in a reply."""
    arena = live.store.arena.view.obj
    return sum(part.nbytes for part in reply if isinstance(part, memoryview) and part.obj is arena)


async def test_a_range_of_a_value_in_memory_is_lent(loop: str, replies: list[Reply], live: LiveServer) -> None:
    client, value = await live.connect(), pattern(2 * MIB)
    assert await client.ask("SET", "k", value) == b"+OK\r\n"
    for start, end in ((0, 2 * MIB), (1, 100_001), (MIB, 2 * MIB - 1), (2 * MIB - 1, 2 * MIB)):
        assert await read_range(client, "k", start, end) == value[start:end]
        assert lent_of(live, replies[-1]) == end - start
    assert live.store.leases == 0


async def test_a_range_of_a_value_on_disk_is_brought_and_lent(loop: str, tmp_path: Path, replies: list[Reply]) -> None:
    async with TieredServer(tmp_path) as live:
        live.put_away("a")
        client = await live.connect()
        layers = [await read_range(client, "a", at, at + 8192) for at in range(0, len(block("a")), 8192)]
        assert b"".join(layers) == block("a")
        assert [lent_of(live, reply) for reply in replies] == [*map(len, layers)]
        assert live.steps("pread") == 1, "the first layer brings the others"


async def test_a_reader_of_ranges_keeps_what_it_has_begun_while_the_value_is_replaced(tmp_path: Path) -> None:
    """One reply is of one value; the next one is of the next."""
    async with LiveServer(tmp_path, 64 * MIB) as live:
        writer, reader = await live.connect(), await live.connect("tcp", receive_bytes=16 * 1024)
        old, new = pattern(16 * MIB, 1), pattern(16 * MIB, 2)
        assert await writer.ask("SET", "k", old) == b"+OK\r\n"
        await reader.send("GETRANGE", "k", "1000", str(12 * MIB - 1))
        assert await reader.read_line() == b"$%d\r\n" % (12 * MIB - 1000)
        assert live.store.leases == 1
        number = (await writer.ask("KV.RESERVE", "k", str(16 * MIB)))[1:-2]
        assert await writer.ask("KV.WRITE", number, "0", new) == b"+OK\r\n"
        assert await writer.ask("KV.COMMIT", number) == b"+OK\r\n"
        assert await reader.read(12 * MIB - 1000) == old[1000 : 12 * MIB]
        assert await reader.read(2) == b"\r\n"
        assert await read_range(reader, "k", 5, 105) == new[5:105]
