"""Many clients at once over real disk threads: each has keys of its own and holds the server to what it knows of them.

Memory is a fraction of what they keep, so blocks come and go all the time; nothing may be lost, stale or another's.
"""

import asyncio
import random
from pathlib import Path

import pytest

from tests.server.live import Client
from tests.server.tiered_server import DISK_BYTES, TieredServer

CLIENTS = 6
KEYS = 14
STEPS = 150
LENGTHS = (5, 3_000, 40_000, 60_000, 60_000, 60_000)


class Owner:
    """One client and what its keys hold."""

    def __init__(self, client: Client, number: int, seed: int) -> None:
        self.client = client
        self.rng = random.Random(f"{seed}:{number}")
        self.keys = [f"{number}:{at}" for at in range(KEYS)]
        self.values: dict[str, bytes] = {}
        self.counter = f"{number}:counter"
        self.count = 0

    async def work(self) -> None:
        """Some steps, each compared with what is known."""
        often = [self.store, self.get, self.get_many, self.cut, self.transact] * 2
        verbs = [*often, self.store, self.store, self.count_up, self.rename, self.delete, self.save, self.prefetch]
        for _ in range(STEPS):
            await self.rng.choice(verbs)()

    async def store(self) -> None:
        key, length = self.rng.choice(self.keys), self.rng.choice(LENGTHS)
        value = f"{key}={self.rng.random()} ".encode() * (length // 20 + 1)
        assert await self.client.ask("SET", key, value) == b"+OK\r\n"
        self.values[key] = value

    async def get(self) -> None:
        key = self.rng.choice(self.keys)
        assert await self.client.get(key) == self.values.get(key), key

    async def get_many(self) -> None:
        keys = self.rng.choices(self.keys, k=5)
        await self.client.send("MGET", *keys)
        assert await self.client.read_line() == b"*5\r\n"
        for key in keys:
            assert await self.client.read_bulk() == self.values.get(key), key

    async def count_up(self) -> None:
        self.count += 1
        assert await self.client.ask("INCR", self.counter) == b":%d\r\n" % self.count

    async def rename(self) -> None:
        old, new = self.rng.sample(self.keys, 2)
        if old in self.values:
            assert await self.client.ask("RENAME", old, new) == b"+OK\r\n"
            self.values[new] = self.values.pop(old)

    async def delete(self) -> None:
        key = self.rng.choice(self.keys)
        was = self.values.pop(key, None)
        assert await self.client.ask("DEL", key) == b":%d\r\n" % (was is not None)

    async def transact(self) -> None:
        one, other = self.rng.sample(self.keys, 2)
        for line in (("MULTI",), ("GET", one), ("STRLEN", other), ("INCR", self.counter)):
            await self.client.ask(*line)
        self.count += 1
        await self.client.send("EXEC")
        assert await self.client.read_line() == b"*3\r\n"
        assert await self.client.read_bulk() == self.values.get(one), one
        assert await self.client.read_line() == b":%d\r\n" % len(self.values.get(other, b""))
        assert await self.client.read_line() == b":%d\r\n" % self.count

    async def cut(self) -> None:
        key = self.rng.choice(self.keys)
        await self.client.send("GETRANGE", key, "10", "60")
        assert await self.client.read_bulk() == self.values.get(key, b"")[10:61], key

    async def save(self) -> None:
        await self.client.send("WAITAOF", "1", "0", "0")
        assert await self.client.read(12) == b"*2\r\n:1\r\n:0\r\n"

    async def prefetch(self) -> None:
        assert (await self.client.ask("PREFETCH", *self.keys))[:1] == b":"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "passed on"])
async def test_a_crowd_over_two_tiers_loses_nothing(loop: str, keep: bool, seed: int, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, threads=3, keep=keep, disk_bytes=2 * DISK_BYTES) as live:
        live.tiering.spill_wait_s = 1e9  # no writer gives up: the clocks stand still
        owners = [Owner(await live.connect(), number, seed) for number in range(CLIENTS)]
        if not keep:
            for owner in owners:  # PREFETCH is refused
                owner.prefetch = owner.get  # type: ignore[method-assign]
        await asyncio.gather(*(owner.work() for owner in owners))
        for owner in owners:
            for key in owner.keys:
                assert await owner.client.get(key) == owner.values.get(key)
        assert live.store.stats.evicted == live.tiering.stats.spill_dropped == live.tiering.stats.lost == 0
        assert live.tiering.stats.promoted > 50
