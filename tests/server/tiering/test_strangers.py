"""Mutated sessions at a server whose blocks are mostly on disk: no command fails in an unforeseen way, whatever it says
and whenever its client goes, and nothing stays held or on its way."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.fuzz.corpus import KEYS, session
from tests.fuzz.mutator import mutate
from tests.server.live import MIB, until
from tests.server.tiered_server import TieredServer

CASES = 250
AT_ONCE = 5


async def visit(live: TieredServer, rng: random.Random) -> None:
    """One stranger: it sends what it has, and goes at once or when it has heard the answers."""
    stream = mutate(rng, session(rng), session(rng))
    client = await live.connect()
    try:
        sending = asyncio.ensure_future(client.send_raw(stream))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            sending.cancel()
            client.reset()
            return
        reading = asyncio.ensure_future(client.read_all())
        await asyncio.wait([sending, reading], return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            client.half_close()
        await asyncio.wait([reading])
        if reading.exception() is None:
            assert b"internal error" not in reading.result(), stream
        sending.cancel()
    except OSError:
        return  # the server has hung up


@pytest.mark.parametrize("seed", range(3))
async def test_strangers_leave_two_tiers_as_they_should_be(loop: str, seed: int, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, arena_bytes=2 * MIB) as live:
        rng = random.Random(seed)
        for _ in range(CASES // AT_ONCE):
            keys = [f"f{number}" for number in range(KEYS)]
            live.put(*keys)
            live.send_away(*rng.sample(keys, 9))
            live.disk_runs = rng.random() < 0.7
            visits = [asyncio.ensure_future(visit(live, rng)) for _ in range(AT_ONCE)]
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            live.let_go()
            live.clock.now_s += rng.choice([0, 0, 0.3, 6])
            live.tick()
            await asyncio.gather(*visits)
        await until(lambda: not live.sessions())
        assert live.server.stats.handler_exceptions == 0
        assert not [told for told in live.complaints if "closed" not in told], live.complaints
        live.complaints.clear()
        assert live.steps("pread") > 50
