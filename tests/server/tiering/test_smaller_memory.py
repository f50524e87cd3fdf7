"""A server that was started again with less memory than it had: what is too long for that is still on disk."""

from pathlib import Path

import pytest

from tests.server.live import OOM, run_on
from tests.server.tiered_server import TieredServer, block, bulk
from tests.storage.small_store import ARENA_BYTES, content

LITTLE_BYTES = ARENA_BYTES // 4
LONG = content(1, ARENA_BYTES // 2)

ANSWERS = [
    (("GET", "long"), b"$-1\r\n"),
    (("GETRANGE", "long", "0", "1"), b"$0\r\n\r\n"),
    (("MGET", "a", "long", "b"), b"*3\r\n%b$-1\r\n%b" % (bulk(block("a")), bulk(block("b")))),
    (("LCS", "long", "a", "LEN"), b":0\r\n"),
    (("APPEND", "long", "x"), OOM),
    (("COPY", "long", "to"), OOM),
]


@pytest.mark.parametrize(("words", "answer"), ANSWERS)
def test_nobody_waits_for_a_block_that_memory_could_never_hold(
    loop: str, words: tuple[str, ...], answer: bytes, tmp_path: Path
) -> None:
    async def with_much() -> None:
        async with TieredServer(tmp_path) as live:
            live.put_away("a", "b")
            assert live.store.put(b"long", LONG)
            live.saved()

    async def with_little() -> None:
        async with TieredServer(tmp_path, arena_bytes=LITTLE_BYTES) as live:
            client = await live.connect()
            await client.say_hello()
            await client.send(*words)
            assert await client.read(len(answer)) == answer
            assert live.tier("long") == "disk"

    async def with_much_again() -> None:
        async with TieredServer(tmp_path) as live:
            client = await live.connect()
            assert await client.get("long") == LONG

    for story in (with_much, with_little, with_much_again):
        run_on(loop, story())
