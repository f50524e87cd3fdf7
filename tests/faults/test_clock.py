"""The wall clock steps, as NTP and operators make it: TTLs follow it, and nothing else does."""

from pathlib import Path

import pytest

from kvredis.server import server as server_module
from tests.server.live import LiveServer, pattern, until

HOUR_MS = 3_600_000


@pytest.mark.parametrize("length", [10, 100_000])
async def test_a_step_back_prolongs_and_a_step_forward_expires(loop: str, length: int, live: LiveServer) -> None:
    client = await live.connect()
    for key in ("read", "collected"):
        assert await client.ask("SET", key, pattern(length), "PX", "10000") == b"+OK\r\n"
    assert await client.ask("SET", "lasting", pattern(length)) == b"+OK\r\n"
    live.clock_ms -= HOUR_MS
    assert await client.ask("PTTL", "read") == b":%d\r\n" % (HOUR_MS + 10_000)
    assert await client.get("read") == pattern(length)
    assert await client.ask("SET", "made then", "v", "EX", "5") == b"+OK\r\n"
    live.clock_ms += HOUR_MS
    assert await client.ask("EXISTS", "made then") == b":0\r\n", "its time has long passed"
    assert await client.ask("PTTL", "read") == b":10000\r\n"
    live.clock_ms += 10_000
    assert await client.get("read") is None
    assert await client.ask("TTL", "read") == b":-2\r\n"
    await until(lambda: live.store.stats.expired == 3)  # the last one by the server's own tick
    assert await client.ask("DBSIZE") == b":1\r\n"
    assert await client.get("lasting") == pattern(length)
    live.store.check_integrity()


async def test_steps_there_and_back_lose_no_key_that_is_not_looked_at(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    for n in range(300):
        assert await client.ask("SET", f"k{n}", "v", "PX", str(1000 + n)) == b"+OK\r\n"
    for step in (-HOUR_MS, 500, -10 * HOUR_MS, 10 * HOUR_MS - 500, HOUR_MS + 999):
        live.clock_ms += step
        live.store.collect_expired()
        assert live.store.stats.expired == 0
    live.clock_ms += 151
    while live.store.collect_expired():
        pass
    assert live.store.stats.expired == 151
    assert await client.ask("DBSIZE") == b":149\r\n"
    live.store.check_integrity()


async def test_keys_that_end_all_at_once_are_gone_before_the_next_tick_a_slice_at_a_time(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)

    async with LiveServer(tmp_path) as live:
        client = await live.connect()
        for n in range(1000):
            assert await client.ask("SET", f"k{n}", "v", "PX", "1000") == b"+OK\r\n"
        live.clock_ms += 1001
        live.server._on_tick()
        assert live.store.stats.expired == 200
        await until(lambda: live.store.stats.expired == 1000)
        assert await client.ask("DBSIZE") == b":0\r\n"


async def test_idle_times_and_leases_do_not_follow_the_wall_clock(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, timeout=60) as live:
        client = await live.connect()
        assert await client.ask("SET", "k", "v") == b"+OK\r\n"
        for step in (24 * HOUR_MS, -48 * HOUR_MS):
            live.clock_ms += step
            assert await client.ask("OBJECT", "IDLETIME", "k") == b":0\r\n"
            live.server._hang_up_idle()
            assert await client.ask("PING") == b"+PONG\r\n"


async def test_a_transaction_and_its_watch_survive_a_step(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", "k", "v", "PX", "1000") == b"+OK\r\n"
    assert await client.ask("WATCH", "k") == b"+OK\r\n"
    live.clock_ms -= HOUR_MS
    assert await client.ask("MULTI") == b"+OK\r\n"
    assert await client.ask("GET", "k") == b"+QUEUED\r\n"
    await client.send("EXEC")
    assert await client.read_line() == b"*1\r\n"
    assert await client.read_bulk() == b"v"
