"""One client's commands over blocks that are in memory, on disk or nowhere: replies in their order, whatever they wait
for, and no client is told of anything twice."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.feed import request
from tests.server.live import until
from tests.server.pushes import invalidation, read_message, speak_resp3, subscribe
from tests.server.tiered_server import TieredServer, block, bulk, info

NIL = b"$-1\r\n"


async def test_replies_keep_their_order_whatever_each_waits_for(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b", "c")
    live.put("here")
    client = await live.connect()
    live.hold()
    lines = [("GET", "here"), ("GET", "a"), ("GET", "nothing"), ("SET", "b", "new"), ("GET", "b"), ("PING",)]
    lines += [("DEL", "c"), ("GET", "c"), ("APPEND", "a", "tail"), ("GET", "a"), ("STRLEN", "here")]
    await client.send_raw(b"".join(request(*line) for line in lines))
    assert await client.read_bulk() == block("here")
    await until(lambda: live.jobs())
    live.let_go()
    wanted = bulk(block("a")) + NIL + b"+OK\r\n" + bulk(b"new") + b"+PONG\r\n:1\r\n" + NIL
    wanted += b":%d\r\n" % (len(block("a")) + 4) + bulk(block("a") + b"tail")
    wanted += b":%d\r\n" % len(block("here"))
    assert await client.read(len(wanted)) == wanted


class Model:
    """What a server answers that keeps everything, for the lines of the random pipelines."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def answer(self, name: str, *words: str) -> bytes:
        """The reply to a line."""
        values, key = self.values, words[0]
        old = values.get(key)
        if name == "GET":
            return NIL if old is None else bulk(old)
        if name == "MGET":
            return b"*%d\r\n" % len(words) + b"".join(self.answer("GET", word) for word in words)
        if name == "SET":
            values[key] = words[1].encode()
            return b"+OK\r\n"
        if name == "APPEND":
            values[key] = (old or b"") + words[1].encode()
            return b":%d\r\n" % len(values[key])
        if name == "GETRANGE":
            return bulk((old or b"")[5:50])
        if name == "STRLEN":
            return b":%d\r\n" % len(old or b"")
        if name == "DEL":
            return b":%d\r\n" % (values.pop(key, None) is not None)
        if name == "COPY":
            if old is None:
                return b":0\r\n"
            values[words[1]] = old
            return b":1\r\n"
        assert name == "RENAME"
        if old is None:
            return b"-ERR no such key\r\n"
        del values[key]
        values[words[1]] = old
        return b"+OK\r\n"


def draw(rng: random.Random, keys: list[str]) -> tuple[str, ...]:
    """A line about some of the keys."""
    key, other = rng.choice(keys), rng.choice(keys)
    value = chr(rng.randrange(97, 123)) * rng.choice([3, 15_000, 60_000, 60_000])
    makers: list[Callable[[], tuple[str, ...]]] = [
        lambda: ("GET", key),
        lambda: ("GET", key),
        lambda: ("MGET", *rng.choices(keys, k=rng.randrange(1, 12))),
        lambda: ("SET", key, value),
        lambda: ("APPEND", key, value[:20]),
        lambda: ("GETRANGE", key, "5", "49"),
        lambda: ("STRLEN", key),
        lambda: ("DEL", key),
        lambda: ("COPY", key, other, "REPLACE"),
        lambda: ("RENAME", key, other),
    ]
    line = rng.choice(makers)()
    return ("GET", key) if line[0] in ("COPY", "RENAME") and key == other else line


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_pipeline_is_answered_as_if_memory_held_everything(loop: str, seed: int, tmp_path: Path) -> None:
    """40 keys over a memory for 8, so that blocks come and go all the time."""
    async with TieredServer(tmp_path, arena_bytes=512 * 1024) as live:
        rng, model = random.Random(seed), Model()
        keys = [f"key{number}" for number in range(40)]
        for key in keys[:30]:
            value = key * rng.choice([1, 3_000, 12_000, 12_000, 12_000])
            model.answer("SET", key, value)
            assert live.store.put(key.encode(), value.encode())
            live.saved()
        client = await live.connect()
        for _ in range(60):
            lines = [draw(rng, keys) for _ in range(rng.randrange(1, 6))]
            await client.send_raw(b"".join(request(*line) for line in lines))
            for line in lines:
                wanted = model.answer(*line)
                assert await client.read(len(wanted)) == wanted, line
            live.saved()  # what COPY and APPEND make does not wait for the disk
            live.store.check_integrity()
        assert live.tiering.stats.promoted > 20
        assert live.store.stats.evicted == 0


async def test_mget_sends_the_first_value_before_the_last_is_found(loop: str, live: TieredServer) -> None:
    """Twice as much as memory holds, which never has more of it than a quarter on its way."""
    keys = [f"key{number}" for number in range(32)]
    for key in keys:
        live.put_away(key)
    client = await live.connect()
    live.hold()
    await client.send("MGET", *keys, "nothing", keys[0])
    await until(lambda: live.jobs())
    live.manual.run(2)
    assert await client.read_line() == b"*34\r\n"
    assert await client.read_bulk() == block(keys[0])
    assert await client.read_bulk() == block(keys[1])
    assert live.steps("pread") == 2
    live.let_go()
    assert [await client.read_bulk() for _ in keys[2:]] == [block(key) for key in keys[2:]]
    assert await client.read_bulk() is None
    assert await client.read_bulk() == block(keys[0])


async def test_mget_finds_blocks_that_left_for_the_disk_while_its_client_read_slowly(loop: str, tmp_path: Path) -> None:
    """All of them were in memory when it was asked."""
    async with TieredServer(tmp_path, arena_bytes=8 * 1024 * 1024) as live:
        keys = [f"key{number}" for number in range(100)]
        live.put(*keys)
        live.saved()
        client = await live.connect("tcp", receive_bytes=4096)
        await client.send("MGET", *keys)
        assert await client.read_line() == b"*100\r\n"
        assert [await client.read_bulk() for _ in keys[:20]] == [block(key) for key in keys[:20]]
        await until(lambda: live.sessions()[0].slow_since_s < float("inf"))
        with live.store.lock:
            for entry in list(live.store.index):
                if not entry.leases:
                    live.store._unload(entry)
        assert live.store.away > 10
        assert [await client.read_bulk() for _ in keys[20:]] == [block(key) for key in keys[20:]]


async def test_a_command_that_has_waited_counts_once(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b", "c")
    client = await live.connect()
    await client.get("a")
    await client.send("GETRANGE", "b", "0", "1")
    await client.read_bulk()
    await client.send("MGET", "c", "a")
    assert await client.read_line() == b"*2\r\n"
    assert await client.read_bulk() == block("c")
    assert await client.read_bulk() == block("a")
    told = await info(client, "commandstats", "stats")
    assert [told[f"cmdstat_{name}"].split(",")[0] for name in ("get", "getrange", "mget")] == ["calls=1"] * 3
    assert told["total_commands_processed"] == "3"
    assert (told["keyspace_hits"], told["keyspace_misses"]) == ("4", "0")


async def test_monitor_shows_a_command_that_has_waited_once(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    monitor, client = await live.connect(), await live.connect()
    assert await monitor.ask("MONITOR") == b"+OK\r\n"
    assert await client.get("a") == block("a")
    await client.send("GETRANGE", "b", "0", "1")
    await client.read_bulk()
    assert await client.ask("PING") == b"+PONG\r\n"
    shown = [(await monitor.read_line()).split(b"] ", 1)[1] for _ in range(3)]
    assert shown == [b'"GET" "a"\r\n', b'"GETRANGE" "b" "0" "1"\r\n', b'"PING"\r\n']


async def test_no_touch_reads_a_block_on_disk_and_leaves_its_place_in_the_order(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    assert await client.ask("CLIENT", "NO-TOUCH", "ON") == b"+OK\r\n"
    assert await client.get("a") == block("a")
    entry = live.store.find(b"a")
    assert entry is not None
    assert entry.hits == 0


@pytest.mark.parametrize("line", [("GET", "a"), ("GETRANGE", "a", "0", "5"), ("MGET", "a", "b")])
async def test_silence_covers_commands_that_wait(loop: str, line: tuple[str, ...], live: TieredServer) -> None:
    live.put_away("a", "b")
    client = await live.connect()
    off = (("CLIENT", "REPLY", "OFF"), line, ("PING",), ("CLIENT", "REPLY", "ON"))
    await client.send_raw(b"".join(request(*words) for words in off))
    assert await client.read_line() == b"+OK\r\n"
    live.send_away("a", "b")
    skip = (("CLIENT", "REPLY", "SKIP"), line, ("ECHO", "heard"))
    await client.send_raw(b"".join(request(*words) for words in skip))
    assert await client.read_bulk() == b"heard"
    assert live.store.leases == 0


async def test_resp3_says_nil_and_value_as_ever(loop: str, live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    await speak_resp3(client)
    await client.send("MGET", "nothing", "a")
    wanted = b"*2\r\n_\r\n" + bulk(block("a"))
    assert await client.read(len(wanted)) == wanted


async def test_a_client_side_cache_is_told_when_a_block_is_gone_and_not_when_it_moves(
    loop: str, tmp_path: Path
) -> None:
    async with TieredServer(tmp_path, disk_bytes=2 * 1024 * 1024) as live:
        live.put("a")
        client = await live.connect()
        await speak_resp3(client)
        assert await client.ask("CLIENT", "TRACKING", "ON") == b"+OK\r\n"
        assert await client.get("a") == block("a")
        live.send_away("a")
        assert await client.get("a") == block("a")
        live.send_away("a")
        live.server.drain_journal(None)
        assert await client.ask("PING") == b"+PONG\r\n"  # nothing was pushed before it
        for number in range(60):  # the disk lets go of its coldest
            live.put_away(f"flood{number}")
        assert live.tier("a") is None
        live.server.drain_journal(None)
        assert await client.read(len(invalidation(b"a"))) == invalidation(b"a")
        assert await client.get("a") is None


async def test_an_invalidation_that_falls_into_a_command_that_waits_is_not_lost(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    await speak_resp3(client)
    assert await client.ask("CLIENT", "TRACKING", "ON") == b"+OK\r\n"
    assert await client.ask("SET", "mine", "1") == b"+OK\r\n"
    assert await client.get("a") is None
    live.put("a")  # by another thread, so that no client is told before the next command runs
    await client.send("WAITAOF", "1", "0", "0")
    wanted = invalidation(b"a") + b"*2\r\n:1\r\n:0\r\n"
    assert await client.read(len(wanted)) == wanted


async def test_evicted_is_said_when_a_block_has_left_the_last_tier(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, disk_bytes=2 * 1024 * 1024) as live:
        listener, client = await live.connect(), await live.connect()
        assert await client.ask("CONFIG", "SET", "notify-keyspace-events", "Ee") == b"+OK\r\n"
        await subscribe(listener, "SUBSCRIBE", "__keyevent@0__:evicted")
        live.put_away("a")
        assert await client.get("a") == block("a")
        live.send_away("a")
        for number in range(60):
            live.put_away(f"flood{number}")
        assert live.tier("a") is None
        live.server.drain_journal(None)
        assert await read_message(listener) == [b"message", b"__keyevent@0__:evicted", b"a"]
        told = await info(client, "stats")
        assert int(told["evicted_keys"]) == live.store.stats.evicted == 61 - len(live.disk)
