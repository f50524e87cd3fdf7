"""Clients that vanish, in every state and in every way: nothing stays held, nothing half done, others go on."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.states import ARENA_BYTES, BIG, KEY, NEW, OLD, SET_NEW, STATES, ClientProcess, plant, reach
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, until

pytestmark = pytest.mark.usefixtures("threads")

WAYS = ("killed", "closed", "reset")


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    return LiveServer(tmp_path, ARENA_BYTES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", STATES)
async def test_a_client_that_vanishes_leaves_nothing_behind(loop: str, state: str, way: str, live: LiveServer) -> None:
    at = STATES[state]

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
    await until(lambda: len(live.sessions()) == 1 and not live.server.io_pool.under_way)
    store, server = live.store, live.server
    assert (store.leases, store.reserved_bytes, store.retired_bytes) == (0, 0, 0)
    assert store.used_bytes == used
    assert not server.admission.queue
    assert not server.monitors
    assert not server.blocked.timeouts
    assert await keeper.ask("PUBLISH", "a", "unheard") == b":0\r\n"
    if at.pause:
        assert await keeper.ask("CLIENT", "UNPAUSE") == b"+OK\r\n"
    assert await keeper.get(KEY) == OLD
    assert await keeper.get("other") is None
    assert await keeper.ask("SET", KEY, NEW) == b"+OK\r\n"
    assert await keeper.get(KEY) == NEW
    live.store.check_integrity()


# A client that sends its last byte and stays to read: what it sent whole is answered, then it is hung up on.

CUT = {
    "nothing more": b"",
    "half a header": SET_NEW[:20],
    "a header": b"*3\r\n$3\r\nSET\r\n$4\r\nkept\r\n$2097152\r\n",
    "half a body": SET_NEW[:MIB],
    "all but the last LF": SET_NEW[:-1],
    "half an inline command": b"GET ke",
}


@pytest.mark.parametrize("cut", CUT)
async def test_what_was_sent_whole_is_answered_and_the_rest_undone(loop: str, cut: str, live: LiveServer) -> None:
    keeper = await plant(live, with_big=False)
    client = await live.connect()
    await client.send_raw(request("PING") * 3 + request("SET", "n", "1") + request("GET", KEY) + CUT[cut])
    client.half_close()
    answer = await client.read_all()
    assert answer == b"+PONG\r\n" * 3 + b"+OK\r\n$300000\r\n" + OLD + b"\r\n"
    await until(lambda: len(live.sessions()) == 1 and not live.server.io_pool.under_way)
    assert live.store.reserved_bytes == 0
    assert await keeper.get("n") == b"1"
    assert await keeper.get(KEY) == OLD


async def test_long_replies_still_go_out_whole_after_a_half_close(loop: str, live: LiveServer) -> None:
    keeper = await plant(live, with_big=True)
    client = await live.connect(receive_bytes=4096)
    await client.send_raw(request("GET", "big") + request("MGET", "big", KEY) + request("PING"))
    client.half_close()
    await until(lambda: live.store.leases)
    assert await keeper.ask("SET", "big", "small now") == b"+OK\r\n"
    assert await client.read_bulk() == BIG
    assert await client.read_line() == b"*2\r\n"
    assert await client.read_bulk() == b"small now"
    assert await client.read_bulk() == OLD
    assert await client.read_all() == b"+PONG\r\n"


async def test_a_transaction_that_was_begun_and_not_executed_is_undone(loop: str, live: LiveServer) -> None:
    keeper = await plant(live, with_big=False)
    client = await live.connect()
    await client.send_raw(request("MULTI") + SET_NEW)
    client.half_close()
    assert await client.read_all() == b"+OK\r\n+QUEUED\r\n"
    await until(lambda: len(live.sessions()) == 1 and not live.server.io_pool.under_way)
    assert live.store.reserved_bytes == 0
    assert await keeper.get(KEY) == OLD


@pytest.mark.parametrize("words", [("SUBSCRIBE", "a"), ("MONITOR",)])
async def test_a_listener_that_closes_its_half_is_let_go(loop: str, words: tuple[str, ...], tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live:
        keeper = await live.connect()
        client = await live.connect()
        await client.send(*words)
        client.half_close()
        assert (await client.read_all()).startswith((b"+OK\r\n", b"*3\r\n$9\r\nsubscribe\r\n"))
        await until(lambda: len(live.sessions()) == 1)
        assert await keeper.ask("PUBLISH", "a", "hello") == b":0\r\n"


async def test_a_client_in_wait_that_closes_its_half_is_let_go(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live:
        client = await live.connect()
        await client.send_raw(request("PING") + request("WAIT", "1", "0"))
        client.half_close()
        assert await client.read_all() == b"+PONG\r\n"
