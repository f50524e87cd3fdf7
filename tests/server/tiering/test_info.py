"""What INFO and KV.TIERS say of two tiers after a known sequence: every figure, and what must add up to what."""

from pathlib import Path

from tests.server.live import Client, run_on, until
from tests.server.tiered_server import DISK_BYTES, TieredServer, block, info

EXTENT = 64 * 1024
KEYS = [f"key{number}" for number in range(24)]


async def tiers(client: Client) -> dict[str, dict[str, str]]:
    """KV.TIERS as maps."""
    await client.send("KV.TIERS")
    found: dict[str, dict[str, str]] = {}
    for _ in range(int((await client.read_line())[1:]) // 2):
        name = await client.read_bulk()
        figures: dict[str, str] = {}
        for _ in range(int((await client.read_line())[1:]) // 2):
            field = await client.read_bulk()
            line = await client.read_line()
            if line[:1] == b"$":
                line = b":" + await client.read(int(line[1:]) + 2)
            assert field is not None
            figures[field.decode()] = line[1:-2].decode()
        assert name is not None
        found[name.decode()] = figures
    return found


def numbers(told: dict[str, str], *names: str) -> list[int]:
    """Some fields as numbers."""
    return [int(told[name]) for name in names]


async def agree(live: TieredServer, client: Client) -> dict[str, str]:
    """INFO's fields, after a look at what must add up in any state in which nothing is on its way."""
    told = await info(client)
    for tier, figures in (await tiers(client)).items():
        for name, value in figures.items():
            assert told[f"{tier}_{name}"] == value, (tier, name)
    assert told["tiers"] == "memory,disk"
    keys = int(told["db0"].split(",")[0].removeprefix("keys="))
    away, unsaved = live.store.away, int(told["memory_unsaved"])
    assert keys == int(told["memory_entries"]) + away
    assert keys == int(told["disk_entries"]) + unsaved
    assert unsaved == int(told["rdb_changes_since_last_save"]) == len(live.store.unsaved)
    assert int(told["num_blocks"]) == int(told["full"]) + int(told["free"])
    assert int(told["memory_capacity"]) == int(told["num_blocks"]) * int(told["block_size"])
    assert int(told["memory_free"]) == int(told["free"]) * int(told["block_size"])
    assert int(told["memory_used"]) == live.store.used_bytes
    assert int(told["disk_used"]) <= int(told["disk_capacity"]) == DISK_BYTES
    if not live.store.stats.deleted:
        assert int(told["tier_unloaded"]) - int(told["tier_promoted"]) == away
    sets = ("set_created", "set_forced", "set_duplicate", "set_existed", "set_error")
    assert int(told["set_total"]) == sum(numbers(told, *sets))
    assert int(told["store_created"]) == keys + sum(numbers(told, "store_evicted", "store_deleted", "store_expired"))
    return told


async def test_every_figure_adds_up_after_stores_spills_reads_and_deletes(loop: str, live: TieredServer) -> None:
    client = await live.connect()
    for key in KEYS:
        assert await client.ask("SET", key, block(key)) == b"+OK\r\n"
        await live.quiet()
    told = await agree(live, client)
    assert numbers(told, "tier_spill_dropped", "evicted_keys", "tier_lost", "tier_spill_failed") == [0] * 4
    spilled, unloaded = numbers(told, "tier_spilled", "tier_unloaded")
    assert spilled == int(told["disk_entries"]) >= unloaded == live.store.away == len(KEYS) - 16
    assert int(told["tier_spilled_bytes"]) == spilled * len(block("a"))
    assert int(told["disk_used"]) == spilled * EXTENT
    assert await client.ask("SAVE") == b"+OK\r\n"
    told = await agree(live, client)
    assert numbers(told, "memory_unsaved", "tier_spilled", "disk_entries") == [0, 24, 24]
    hits = int(told["keyspace_hits"])
    for key in KEYS:  # twice as much as memory holds, in a circle: each of them is away when its turn comes
        assert await client.get(key) == block(key)
    assert await client.get("nothing") is None
    told = await agree(live, client)
    assert int(told["keyspace_hits"]) == hits + 24
    assert numbers(told, "keyspace_misses", "tier_promoted") == [1, 24]
    assert int(told["tier_promoted_bytes"]) == 24 * len(block("a"))
    assert await client.ask("DEL", KEYS[0], KEYS[-1], "nothing") == b":2\r\n"
    assert await client.ask("SET", KEYS[1], "small now") == b"+OK\r\n"
    await until(lambda: not live.tiering.disk.unsettled)  # it has more free once it knows
    told = await agree(live, client)
    assert numbers(told, "disk_entries", "memory_unsaved", "store_deleted") == [21, 1, 2]
    assert await client.ask("FLUSHALL") == b"+OK\r\n"
    told = await info(client)
    names = ("memory_entries", "disk_entries", "disk_used", "memory_unsaved", "full")
    assert numbers(told, *names) == [0] * 5
    assert "db0" not in told


async def test_what_is_on_its_way_is_told_of(loop: str, live: TieredServer) -> None:
    live.put_away("a", "b")
    live.put("c")
    client, other = await live.connect(), await live.connect()
    live.hold()
    assert await client.ask("PREFETCH", "b") == b":1\r\n"
    assert await client.ask("BGSAVE") == b"+Background saving started\r\n"
    await other.send("GET", "a")
    await until(lambda: any(session.waiting is not None for session in live.sessions()))
    told = await info(client)
    queued = ("disk_queued_promotes", "disk_queued_prefetches", "disk_queued_spills", "disk_prefetch_jobs")
    assert numbers(told, *queued) == [2, 1, 0, 1]  # the save is as urgent as a read
    live.let_go()
    assert await other.read_bulk() == block("a")
    await live.quiet()
    assert numbers(await agree(live, client), *queued) == [0, 0, 0, 1]


def test_a_start_over_a_disk_says_what_it_has_found(tmp_path: Path) -> None:
    async def first() -> None:
        async with TieredServer(tmp_path) as live:
            live.put("a", "b")
            assert await (await live.connect()).ask("SAVE") == b"+OK\r\n"

    async def second() -> None:
        async with TieredServer(tmp_path) as live:
            client = await live.connect()
            told = await info(client)
            assert told["rdb_last_load_keys_loaded"] == told["disk_entries"] == "2"
            assert told["memory_entries"] == "0"
            assert await client.get("a") == block("a")

    run_on("uvloop", first())
    run_on("uvloop", second())


async def test_config_resetstat_counts_from_nothing(live: TieredServer) -> None:
    live.put_away("a")
    client = await live.connect()
    assert await client.get("a") == block("a")
    assert await client.ask("CONFIG", "RESETSTAT") == b"+OK\r\n"
    told = await info(client)
    assert numbers(told, "tier_spilled", "tier_promoted", "tier_unloaded", "keyspace_hits") == [0] * 4
    assert told["disk_entries"] == "1"


async def test_kv_meta_tells_of_a_block_on_disk_without_moving_it(loop: str, live: TieredServer) -> None:
    assert live.store.put(b"big", block("big"))
    live.saved()
    live.send_away("big")
    client = await live.connect()
    await client.send("KV.META", "big")
    await client.send("QUIT")
    reply = await client.read_all()
    assert b"$4\r\ntier\r\n$4\r\ndisk\r\n" in reply
    assert b"$6\r\nleases\r\n:0\r\n" in reply
    assert b"$8\r\nchecksum\r\n$32\r\n" in reply
    assert live.steps("pread") == 0
    assert live.store.away == 1
