"""Clients that vanish, in every state and in every way: nothing stays held, nothing half done, others go on."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.states import ARENA_BYTES, KEY, NEW, OLD, STATES, ClientProcess, plant, reach
from tests.server.live import LOOPS, LiveServer, run_on, until

WAYS = ("killed", "closed", "reset")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_vanishes_leaves_nothing_behind(loop: str, state: str, way: str, tmp_path: Path) -> None:
    at = STATES[state]

    async def story() -> None:
        async with LiveServer(tmp_path, ARENA_BYTES) as live:
            keeper = await plant(live, b"big" in at.sent)
            if at.pause:
                assert await keeper.ask("CLIENT", "PAUSE", "100000", "WRITE") == b"+OK\r\n"
            used = live.store.used_bytes
            if way == "killed":
                process = await ClientProcess.start(live, at.sent)
                await until(lambda: len(live.sessions()) == 2)
                await reach(live, live.sessions()[1], at)
                await process.kill()
            else:
                client = await live.connect("unix" if way == "closed" else "tcp")
                sending = asyncio.ensure_future(client.send_raw(at.sent))
                await until(lambda: len(live.sessions()) == 2)
                await reach(live, live.sessions()[1], at)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                client.reset() if way == "reset" else client.close()
            await until(lambda: len(live.sessions()) == 1)
            store, server = live.store, live.server
            assert (store.leases, store.reserved_bytes, store.retired_bytes) == (0, 0, 0)
            assert store.used_bytes == used
            assert not server.admission.queue
            assert not server.monitors
            assert not server.blocked.timeouts
            assert await keeper.ask("PUBLISH", "a", "nobody hears") == b":0\r\n"
            if at.pause:
                assert await keeper.ask("CLIENT", "UNPAUSE") == b"+OK\r\n"
            assert await keeper.get(KEY) == OLD
            assert await keeper.get("other") is None
            assert await keeper.ask("SET", KEY, NEW) == b"+OK\r\n"
            assert await keeper.get(KEY) == NEW
            live.store.check_integrity()

    run_on(loop, story())
