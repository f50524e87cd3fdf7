"""Values that find memory full of blocks which the disk is still to be given: they wait in turn, for a bounded time,
and the coldest leave unwritten only when the disk is too slow, broken or full."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.feed import request
from tests.server.live import OOM, Client, until
from tests.server.tiered_server import SPILL_WAIT_S, TieredServer, block, bulk, info
from tests.storage.fake_files import Fault, on

BLOCKS = 16
OLD = [f"old{number}" for number in range(BLOCKS)]


def fill(live: TieredServer) -> None:
    """Memory is full of blocks that the disk has not, and the disk is held."""
    live.hold()
    live.put(*OLD)
    live.clock.now_s += 1


async def storing(live: TieredServer, *lines: tuple[str | bytes, ...]) -> Client:
    """A client that stores and has to wait for the disk."""
    before = len(live.server.admission.disk_room)
    client = await live.connect()
    await client.send_raw(b"".join(request(*line) for line in lines))
    await until(lambda: len(live.server.admission.disk_room) > before)
    return client


def dropped(live: TieredServer) -> int:
    """How many blocks have left unwritten that were to be kept."""
    return live.tiering.stats.spill_dropped


async def test_a_value_waits_until_the_disk_has_taken_what_must_leave_for_it(loop: str, live: TieredServer) -> None:
    fill(live)
    client, other = await storing(live, ("SET", "new", block("new"))), await live.connect()
    assert await other.ask("PING") == b"+PONG\r\n"
    assert await other.get("old3") == block("old3")
    assert await other.ask("SET", "small", "1") == b"+OK\r\n"
    told = await info(other, "kv")
    assert (told["bodies_waiting_for_disk"], told["tier_spill_waits"]) == ("1", "1")
    live.let_go()
    assert await client.read_line() == b"+OK\r\n"
    assert await client.get("new") == block("new")
    for key in OLD:
        assert await client.get(key) == block(key)
    assert dropped(live) == live.store.stats.evicted == 0
    assert (await info(other, "kv"))["bodies_waiting_for_disk"] == "0"


async def test_clients_have_room_in_the_order_in_which_they_came(loop: str, live: TieredServer) -> None:
    fill(live)
    await live.connect()
    clients = [await storing(live, ("SET", f"new{turn}", block(f"new{turn}"))) for turn in range(4)]
    live.let_go()
    assert [await client.read_line() for client in clients] == [b"+OK\r\n"] * 4
    came = [entry.key for entry in live.store.policy.victims() if entry.key.startswith(b"new")]
    assert came == [b"new0", b"new1", b"new2", b"new3"]
    assert dropped(live) == 0
    assert live.tiering.stats.spill_waits == 4


async def test_a_disk_that_takes_nothing_in_time_costs_the_coldest_blocks_and_they_are_counted(
    loop: str, live: TieredServer
) -> None:
    fill(live)
    client = await storing(live, ("SET", "new", block("new")))
    live.clock.now_s += SPILL_WAIT_S / 2
    live.tick()
    assert await (await live.connect()).ask("PING") == b"+PONG\r\n"
    assert len(live.server.admission.disk_room) == 1
    live.clock.now_s += SPILL_WAIT_S / 2
    live.tick()
    assert await client.read_line() == b"+OK\r\n"
    assert await client.get("new") == block("new")
    assert dropped(live) == live.store.stats.evicted == 1
    assert live.tier(OLD[0]) is None
    # No client waits a second time for a disk that has written nothing at all since.
    assert await client.ask("SET", "newer", block("newer")) == b"+OK\r\n"
    assert dropped(live) == 2
    told = await info(client, "kv")
    assert (told["tier_spill_waits"], told["tier_spill_dropped"]) == ("1", "2")
    live.let_go()
    await live.quiet()
    assert live.tiering.makes_room


async def test_each_client_that_waits_has_its_own_time(loop: str, live: TieredServer) -> None:
    fill(live)
    first = await storing(live, ("SET", "new1", block("new1")))
    live.clock.now_s += SPILL_WAIT_S * 0.6
    live.manual.run(1)  # one block is written, so the disk is slow and not dead
    assert await first.read_line() == b"+OK\r\n"
    second = await storing(live, ("SET", "new2", block("new2")))
    live.clock.now_s += SPILL_WAIT_S * 0.6
    live.tick()
    assert await first.ask("PING") == b"+PONG\r\n"
    assert len(live.server.admission.disk_room) == 1
    live.clock.now_s += SPILL_WAIT_S * 0.6
    live.tick()
    assert await second.read_line() == b"+OK\r\n"
    assert dropped(live) == 1


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.EIO])
@pytest.mark.parametrize("step", ["pwrite", "allocate"])
async def test_a_disk_that_fails_keeps_no_client_waiting(
    loop: str, fault: Fault, step: str, live: TieredServer
) -> None:
    live.files.plan = on(step, fault)
    live.put(*OLD)
    await live.quiet()
    client = await live.connect()
    for turn in range(20):
        assert await client.ask("SET", f"new{turn}", block(f"new{turn}")) == b"+OK\r\n"
    assert await client.get("new19") == block("new19")
    assert dropped(live) >= 4
    assert len(live.server.admission.disk_room) == 0
    live.complaints.clear()
    live.files.plan = None


@pytest.mark.parametrize("how", ["reset", "close", "kill"])
async def test_a_client_that_goes_while_its_value_waits_leaves_its_turn_to_the_next(
    loop: str, how: str, live: TieredServer
) -> None:
    fill(live)
    first = await storing(live, ("SET", "new1", block("new1")))
    number = live.sessions()[0].id
    second = await storing(live, ("SET", "new2", block("new2")))
    if how == "kill":
        other = await live.connect()
        assert await other.ask("CLIENT", "KILL", "ID", str(number)) == b":1\r\n"
    elif how == "close":
        first.close()
    else:
        first.reset()
    live.server._turns = 9
    await until(lambda: len(live.server.admission.disk_room) == 1)
    live.let_go()
    assert await second.read_line() == b"+OK\r\n"
    assert live.tier("new1") is None
    assert live.tier("new2") == "memory"


SEVERAL: dict[str, tuple[Callable[[], list[tuple[str | bytes, ...]]], bytes]] = {
    "mset": (lambda: [("MSET", "new1", block("new1"), "new2", block("new2"))], b"+OK\r\n"),
    "msetnx": (lambda: [("MSETNX", "new1", block("new1"), "new2", block("new2"))], b":1\r\n"),
    "transaction": (
        lambda: [("MULTI",), ("SET", "new1", block("new1")), ("SET", "new2", block("new2")), ("EXEC",)],
        b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n+OK\r\n",
    ),
    "pipeline": (lambda: [("SET", f"new{n}", block(f"new{n}")) for n in (1, 2)], b"+OK\r\n" * 2),
}


@pytest.mark.parametrize("how", SEVERAL)
async def test_several_values_of_one_client_wait_one_after_the_other(loop: str, how: str, tmp_path: Path) -> None:
    lines, replies = SEVERAL[how]
    async with TieredServer(tmp_path) as live:
        fill(live)
        client = await storing(live, *lines())
        live.let_go()
        assert await client.read(len(replies)) == replies
        for key in ("new1", "new2", *OLD):
            assert await client.get(key) == block(key)
        assert dropped(live) == 0


@pytest.mark.parametrize("how", SEVERAL)
async def test_a_client_that_goes_between_its_values_gives_back_the_first(loop: str, how: str, tmp_path: Path) -> None:
    lines, _ = SEVERAL[how]
    async with TieredServer(tmp_path) as live:
        fill(live)
        client = await storing(live, *lines())
        live.manual.run(1)
        await until(lambda: live.tiering.stats.spill_waits == 2)
        client.reset()
        await until(lambda: not live.sessions())
        assert live.store.reserved_bytes == 0
        assert live.tier("new2") is None


async def test_a_value_that_memory_can_never_hold_is_refused_at_once_and_the_disk_is_not_to_blame(
    loop: str, live: TieredServer
) -> None:
    fill(live)
    client = await live.connect()
    await client.say_hello()
    assert await client.ask("SET", "huge", bytes(live.store.arena.nbytes)) == OOM
    assert live.tiering.makes_room
    assert live.tiering.stats.spill_waits == 0


async def test_a_value_for_which_readers_leave_no_room_is_refused_in_time_and_the_disk_is_not_to_blame(
    loop: str, live: TieredServer
) -> None:
    """What fills memory is lent: no disk could help."""
    reader = await live.connect("tcp", receive_bytes=4096)
    assert live.store.put(b"lent", bytes(live.store.arena.nbytes - 16 * 1024))
    live.saved()
    live.clock.now_s += 1
    await reader.send("GET", "lent")
    await until(lambda: live.store.leases)
    client = await live.connect()
    await client.say_hello()
    await client.send("SET", "new", block("new"))
    await until(lambda: len(live.server.admission.disk_room) == 1 or live.store.stats.refused)
    live.clock.now_s += SPILL_WAIT_S
    live.tick()
    assert await client.read_line() == OOM
    assert live.tiering.makes_room
    reader.reset()


async def test_reads_from_disk_and_values_that_wait_for_it_do_not_wake_each_other(
    loop: str, live: TieredServer
) -> None:
    """What is being read takes the share of memory that values on their way may have, so a client whose turn has come
    is sent to the other queue; its later commands must not be answered by a turn that it has no more use for."""
    far = [f"far{number}" for number in range(6)]
    live.put_away(*far)
    fill(live)
    storer = await storing(live, ("SET", "new", block("new")), ("WAITAOF", "1", "0", "0"), ("ECHO", "end"))
    taken = live.store.reserved_bytes
    live.store.reserved_bytes += live.store.arena.nbytes // 4  # as if blocks were coming in
    live.manual.run(2)
    others = []
    for _ in range(3):
        live.tick()
        others.append(await live.connect())
        assert await others[-1].ask("PING") == b"+PONG\r\n"
    assert len(live.server.admission.queue) == 1
    live.store.reserved_bytes = taken
    live.tick()
    assert await storer.read_line() == b"+OK\r\n"
    for _ in range(3):
        live.tick()
        assert await others[-1].ask("PING") == b"+PONG\r\n"
    live.let_go()
    wanted = b"*2\r\n:1\r\n:0\r\n" + bulk(b"end")
    assert await storer.read(len(wanted)) == wanted


async def test_the_next_reads_while_a_value_waits_see_what_was_there_before(loop: str, live: TieredServer) -> None:
    fill(live)
    client = await storing(live, ("SET", "old0", block("new")), ("GET", "old0"))
    other = await live.connect()
    assert await other.get("old0") == block("old0")
    live.let_go()
    wanted = b"+OK\r\n" + bulk(block("new"))
    assert await client.read(len(wanted)) == wanted


async def test_memory_that_keeps_nothing_passes_every_block_on(loop: str, tmp_path: Path) -> None:
    """local_cpu false: a block stays until it is on disk and has no lease."""
    async with TieredServer(tmp_path, keep=False) as live:
        client = await live.connect()
        for key in OLD:
            assert await client.ask("SET", key, block(key)) == b"+OK\r\n"
        assert await client.ask("SET", "small", "1") == b"+OK\r\n"
        await live.quiet()
        assert [live.tier(key) for key in (*OLD, "small")] == ["disk"] * 17
        await client.send("MGET", *OLD)
        assert await client.read_line() == b"*16\r\n"
        assert [await client.read_bulk() for _ in OLD] == [block(key) for key in OLD]
        assert await client.ask("INCR", "small") == b":2\r\n"
        await live.quiet()
        assert live.store.live_bytes == live.store.inline_bytes == 0
        assert await client.get("small") == b"2"
