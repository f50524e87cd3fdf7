"""Mutated sessions at a node of a cluster whose slots come and go meanwhile: it holds nothing of them afterwards."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.fuzz.corpus import session
from tests.fuzz.mutator import mutate
from tests.server.cluster_node import HALF, OURS, topology_file
from tests.server.live import LiveServer, until

CASES = 300
NODES = (
    HALF,
    "{name: us, host: h1, port: 7001, slots: [0-99, 8000-12000]}, {name: them, host: h2, port: 7002, slots: 100-200}",
    "{name: us, host: h1, port: 7001, slots: []}, {name: them, host: h2, port: 7002, slots: 0-16383}",
    "{name: us, host: h1, port: 7001, slots: 0-16383}",
)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.nightly), 1])
async def test_strangers_do_no_harm_to_a_node_whose_slots_move(loop: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    file = topology_file(tmp_path, HALF)

    async def visit(live: LiveServer, stream: bytes) -> None:
        guest = await live.connect(rng.choice(["unix", "tcp"]))
        reading = asyncio.ensure_future(guest.read_all())
        try:
            await guest.send_raw(stream)
            guest.half_close()
            await reading
        except OSError:  # hung up on, as it should be after a broken stream
            reading.cancel()
        guest.close()

    async with LiveServer(tmp_path, cluster_topology=file, cluster_node="us") as live:
        assert live.server.reload is not None
        for number in range(CASES // 4):
            streams = [mutate(rng, session(rng), session(rng)) for _ in range(4)]
            visits = asyncio.gather(*(visit(live, stream) for stream in streams))
            topology_file(tmp_path, NODES[number % len(NODES)])
            live.server.reload.ask()
            await visits
        topology_file(tmp_path, NODES[-1])
        live.server.reload.ask()
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
        assert live.server.stats.handler_exceptions == 0
        client = await live.connect()
        await client.ask("SET", OURS, "v")
        assert await client.get(OURS) == b"v"
        client.close()
