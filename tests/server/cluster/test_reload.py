"""The topology is read again: slots come and go while clients are served, and nothing stale comes back with them."""

import asyncio
import logging
from pathlib import Path

import pytest

from kvredis.server.cluster.topology import SLOTS, slot_of
from tests.server.cluster.test_live import lines
from tests.server.cluster_node import EDGE, HALF, MOVED, OURS, OURS_TOO, THEIRS, key_of, node, topology_file
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, until
from tests.storage.small_store import keys_in

ALL_OURS = "{name: us, host: h1, port: 7001, slots: 0-16383}, {name: them, host: h2, port: 7002}"
NONE_OURS = "{name: us, host: h1, port: 7001, slots: []}, {name: them, host: h2, port: 7002, slots: 0-16383}"


async def reread(live: LiveServer, folder: Path, nodes: str) -> None:
    """Write the file and have it read, as SIGHUP does; it is in force then, and keys may be leaving."""
    assert live.server.cluster is not None
    assert live.server.reload is not None
    topology_file(folder, nodes)
    epoch = live.server.cluster.epoch
    live.server.reload.ask()
    await until(lambda: live.server.cluster.epoch > epoch)  # type: ignore[union-attr]


async def test_slots_that_come_are_served_at_once(loop: str, tmp_path: Path, live: LiveServer) -> None:
    client = await live.connect()
    assert await client.ask("SET", THEIRS, "v") == MOVED
    await reread(live, tmp_path, ALL_OURS)
    assert await client.ask("SET", THEIRS, "v") == b"+OK\r\n"
    assert live.server.cluster is not None
    assert live.server.cluster.epoch == 2


async def test_keys_of_slots_that_left_are_gone_before_the_slots_come_back(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, arena_bytes=64 * MIB) as live:
        client = await live.connect()
        for n in range(5000):
            live.store.put(b"{%b}%d" % (OURS, n), b"old")
        await client.ask("SET", OURS, pattern(MIB))
        await reread(live, tmp_path, NONE_OURS)
        topology_file(tmp_path, ALL_OURS)
        live.server.reload.ask()  # type: ignore[union-attr]  # while they leave: in force when they have
        assert await client.ask("GET", OURS) == b"-MOVED %d h2:7002\r\n" % slot_of(OURS)
        assert live.server.reload is not None
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
        assert live.store.count(0) == 0
        assert await client.get(OURS) is None
        assert await client.ask("SET", THEIRS, "v") == b"+OK\r\n"


async def test_clients_are_served_while_a_hundred_thousand_keys_leave(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, ALL_OURS, arena_bytes=512 * MIB) as live:  # a sixteenth of it for small values
        client = await live.connect()
        for n in range(100_000):
            live.store.put(b"%d" % n, b"v")
        stay = sum(slot_of(b"%d" % n) < EDGE for n in range(100_000))
        await reread(live, tmp_path, HALF)
        pings = 0
        while live.server.reload.is_sweeping:  # type: ignore[union-attr]
            assert await client.ask("PING") == b"+PONG\r\n"
            pings += 1
        assert pings > 10
        assert live.store.count(0) == stay
        assert live.store.stats.deleted == 100_000 - stay


@pytest.mark.parametrize(
    "broken", ["nodes: [", "nodes: [{host: x, port: 1}]", "nodes: [{host: x, port: 1, slots: 99999}]"]
)
async def test_a_bad_file_is_told_of_and_changes_nothing(
    loop: str, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture, live: LiveServer
) -> None:
    client = await live.connect()
    await client.ask("SET", OURS, "v")
    (tmp_path / "topology.yaml").write_text(broken)
    with caplog.at_level(logging.ERROR):
        live.server.reload.ask()  # type: ignore[union-attr]
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert record.getMessage().startswith("the cluster's topology stays as it was: ")
    live.complaints.clear()
    assert live.server.cluster is not None
    assert live.server.cluster.epoch == 1
    assert await client.get(OURS) == b"v"
    assert await client.ask("GET", THEIRS) == MOVED


async def test_a_value_that_is_coming_in_when_its_slot_leaves_is_sent_elsewhere(
    loop: str, tmp_path: Path, live: LiveServer
) -> None:
    client = await live.connect()
    whole = request("SET", OURS, pattern(MIB))
    await client.send_raw(whole[: MIB // 2])
    await until(lambda: live.store.reserved_bytes)
    await reread(live, tmp_path, NONE_OURS)
    await client.send_raw(whole[MIB // 2 :])
    assert await client.read_line() == b"-MOVED %d h2:7002\r\n" % slot_of(OURS)
    assert live.store.reserved_bytes == live.store.count(0) == 0


async def test_a_value_whose_slot_comes_while_it_is_being_refused_is_to_be_sent_again(
    loop: str, tmp_path: Path, live: LiveServer
) -> None:
    client = await live.connect()
    whole = request("SET", THEIRS, pattern(MIB))
    await client.send_raw(whole[: MIB // 2])
    await until(lambda: live.sessions() and live.sessions()[0].refused)
    await reread(live, tmp_path, ALL_OURS)
    await client.send_raw(whole[MIB // 2 :])
    assert (await client.read_line()).startswith(b"-TRYAGAIN ")
    assert await client.ask("SET", THEIRS, pattern(MIB)) == b"+OK\r\n"  # no client was hung up on


async def test_a_queued_transaction_whose_slot_leaves_is_moved_at_exec(
    loop: str, tmp_path: Path, live: LiveServer
) -> None:
    client = await live.connect()
    await client.ask("MULTI")
    await client.ask("SET", OURS, pattern(MIB))
    await reread(live, tmp_path, NONE_OURS)
    assert await client.ask("EXEC") == b"-MOVED %d h2:7002\r\n" % slot_of(OURS)
    assert live.store.reserved_bytes == 0
    assert await client.ask("EXEC") == b"-ERR EXEC without MULTI\r\n"


async def test_a_reader_keeps_the_bytes_of_a_slot_that_leaves(loop: str, tmp_path: Path, live: LiveServer) -> None:
    client = await live.connect("unix", receive_bytes=4096)
    value = pattern(6 * MIB)
    await client.ask("SET", OURS, value)
    await client.send("GET", OURS)
    await until(lambda: live.store.leases)
    await reread(live, tmp_path, NONE_OURS)
    await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
    assert live.store.count(0) == 0
    assert await client.read_bulk() == value


async def test_a_client_that_listens_watches_or_caches_is_told(loop: str, tmp_path: Path) -> None:
    async with node(tmp_path, notify_keyspace_events="Eg") as live:
        listener, watcher, cacher = [await live.connect() for _ in range(3)]
        await listener.send("SSUBSCRIBE", OURS)
        await listener.send("SUBSCRIBE", "__keyevent@0__:del")
        assert len(await listener.read(len(b"*3\r\n$10\r\nssubscribe\r\n$2\r\nk0\r\n:1\r\n"))) > 0
        await watcher.ask("SET", OURS, "v")
        await watcher.ask("WATCH", OURS)
        await cacher.send("HELLO", "3")
        await cacher.send("CLIENT", "TRACKING", "ON")
        await cacher.send("GET", OURS)
        while await cacher.read_line() != b"$1\r\n":
            pass
        assert await cacher.read_line() == b"v\r\n"
        await reread(live, tmp_path, NONE_OURS)
        seen = b""
        while b"__keyevent@0__:del\r\n$%d\r\n%b\r\n" % (len(OURS), OURS) not in seen:
            seen += await listener.read_line()
        assert b"sunsubscribe\r\n$%d\r\n%b\r\n:0\r\n" % (len(OURS), OURS) in seen
        assert await cacher.read_line() == b">2\r\n"
        assert await cacher.read(len(b"$10\r\ninvalidate\r\n*1\r\n")) == b"$10\r\ninvalidate\r\n*1\r\n"
        await watcher.ask("MULTI")
        assert await watcher.ask("EXEC") == b"*-1\r\n"


async def test_keys_that_a_start_finds_and_that_are_not_ours_leave(loop: str, tmp_path: Path) -> None:
    starting = node(tmp_path)
    for key in (OURS, OURS_TOO, THEIRS):
        starting.store.put(key, b"v")  # what a disk tier would have brought
    async with starting as live:
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
        assert keys_in(live.store, 0) == [OURS, OURS_TOO]


async def test_writers_of_many_slots_find_their_keys_whatever_moves(loop: str, tmp_path: Path) -> None:
    keys = [key_of(range(at * SLOTS // 16, (at + 1) * SLOTS // 16), "w") for at in range(16)]
    async with node(tmp_path, ALL_OURS) as live:
        writers = [await live.connect() for _ in range(4)]

        async def write(number: int) -> None:
            for turn in range(60):
                await writers[number].send_raw(b"".join(request("SET", key, b"%d" % turn) for key in keys))
                for key, reply in zip(keys, await lines(writers[number], len(keys)), strict=True):
                    assert reply == b"+OK\r\n" or reply == b"-MOVED %d h2:7002\r\n" % slot_of(key)

        async def move() -> None:
            for turn in range(60):
                await reread(live, tmp_path, (HALF, NONE_OURS, ALL_OURS)[turn % 3])
                await asyncio.sleep(0)

        await asyncio.gather(move(), *map(write, range(4)))
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
        await reread(live, tmp_path, NONE_OURS)
        await until(lambda: not live.server.reload.is_busy)  # type: ignore[union-attr]
        assert live.store.count(0) == 0


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
async def test_a_read_that_fails_in_our_own_code_is_told_of_and_the_next_one_is_done(
    loop: str,
    error: type[BaseException],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    live: LiveServer,
) -> None:
    def fails() -> None:
        raise error

    reread, cluster = live.server.reload, live.server.cluster
    assert reread is not None
    assert cluster is not None
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(cluster, "read", fails)
        reread.ask()
        reread.ask()  # once more, when that is over
        patched.undo()
        await until(lambda: not reread.is_busy)
    assert "the cluster's topology could not be brought into force" in caplog.messages
    live.complaints.clear()
    assert reread._server.cluster is cluster
