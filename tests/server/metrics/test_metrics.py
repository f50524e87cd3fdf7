"""The table of figures: INFO and /metrics tell the same, and a figure that is not there is not told as 0."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from kvredis.server.metrics.metrics import FIGURES, Kind, fields, read_all
from kvredis.server.server import Server
from kvredis.storage.memory import cuda
from kvredis.storage.memory.device_arena import DeviceArena
from tests.server.http.http_client import ask
from tests.server.live import MIB, LiveServer, until
from tests.server.net.spliced import promising
from tests.server.tiered_server import TieredServer
from tests.stand_in_cuda import stand_in_cuda

CHANGING = ("uptime_seconds", "clients_http", "sent_bytes_", "received_bytes_", "start_time_seconds")
"""What asking changes."""


async def info(live: LiveServer, section: str = "kv") -> dict[str, str]:
    """The fields of one section of INFO."""
    client = await live.connect()
    await client.send("INFO", section)
    text = (await client.read_bulk() or b"").decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


async def test_info_and_metrics_say_the_same(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, metrics_port=-1) as live:
        client = await live.connect()
        for number in range(20):
            await client.ask("SET", f"k{number}", b"v" * 20_000)
            await client.get(f"k{number}")
        await client.ask("DEL", "k1")
        told = await info(live)
        text = (await ask(live, "/metrics")).body.decode()
        compared = 0
        for family in parse(text):
            for sample in family.samples:
                labels = [value for label, value in sample.labels.items() if label != "le"]
                if not sample.name.startswith("kvredis_") or sample.name.endswith("_bucket"):
                    continue
                if "command" in sample.labels or sample.name == "kvredis_build_info":
                    continue  # commandstats and the section Server have those
                base = sample.name.removeprefix("kvredis_")
                if labels and family.type == "histogram":
                    base, _, suffix = base.rpartition("_")
                    name = f"{base}_{labels[0]}_{suffix}"
                else:
                    name = "_".join([base, *labels])
                assert name in told, name
                compared += 1
                if not name.startswith(CHANGING):
                    assert float(told[name]) == float(f"{sample.value:.6g}") or float(told[name]) == sample.value
        assert compared > 80


async def test_info_kv_still_has_the_fields_that_a_block_store_is_asked_for(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 8 * 1024 * 1024) as live:
        client = await live.connect()
        await client.ask("SET", "k", b"v" * 100_000)
        told = await info(live)
        assert int(told["block_size"]) * int(told["num_blocks"]) == 8 * 1024 * 1024
        assert int(told["full"]) + int(told["free"]) == int(told["num_blocks"])
        assert int(told["full"]) * int(told["block_size"]) == int(told["memory_used"]) > 100_000
        assert int(told["arena_free_bytes"]) == int(told["free"]) * int(told["block_size"])


def test_without_a_disk_nothing_is_told_of_one(server: Server) -> None:
    names = {figure.full_name for figure, _ in read_all(server)}
    assert not [name for name in names if "disk" in name or "spill" in name or "promote" in name]
    assert "kvredis_arena_free_bytes" in names


async def test_every_figure_of_the_table_has_a_value_with_a_disk_and_a_gpu(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    async with TieredServer(tmp_path) as live:
        live.store.add_gpu(DeviceArena.create(1))
        client = await live.connect()
        await client.ask("PING")
        missing = {figure.name for figure in FIGURES} - {figure.name for figure, _ in read_all(live.server)}
        assert missing == {"cluster_slots"}


def test_names_of_fields_are_not_used_twice(server: Server) -> None:
    names = [name for name, _ in fields(server)]
    assert len(set(names)) == len(names)


async def test_config_resetstat_begins_counters_anew_and_leaves_gauges(loop: str, live: LiveServer) -> None:
    client = await live.connect()
    await client.ask("SET", "k", b"v" * 300_000)
    await client.get("k")
    assert (await info(live))["copy_seconds_receive_count"] == "1"
    await client.ask("CONFIG", "RESETSTAT")
    for figure, values in read_all(live.server):
        if figure.name == "sent_bytes":
            assert values == dict.fromkeys(values, 0) | {"unix": len("+OK\r\n")}
        elif figure.kind is Kind.COUNTER and figure.label != "command":
            assert set(values.values()) == {0}, figure.name
    told = await info(live)
    assert (told["memory_blocks"], told["copy_seconds_receive_count"]) == ("1", "0")


async def test_bytes_that_are_spliced_are_those_of_no_other_lane_from_the_first_on(tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 32 * MIB) as live:

        def sent() -> tuple[float, float]:
            told = dict(fields(live.server))
            return told["sent_bytes_total_unix"], told["sent_bytes_total_spliced"]

        client, value = await promising(live), b"v" * (4 * MIB)
        await client.ask("SET", "k", value)
        copied, _ = sent()
        await client.send("GET", "k")
        await until(lambda: sent() != (copied, 0))
        assert sent()[0] == copied, "what has yet to be taken is counted on one side alone"
        assert await client.read_bulk() == value
        assert sent()[0] == copied
        assert sent()[1] > len(value)


async def test_a_reply_that_is_taken_little_by_little_is_sent_once(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 32 * MIB) as live:
        client, value = await live.connect(), b"v" * (8 * MIB)
        await client.ask("SET", "k", value)
        await client.send("GET", "k")
        (session,) = live.server.sessions.values()
        await until(lambda: session.unsent_bytes)
        assert await client.read_bulk() == value
        await until(lambda: any(live.server.stats.sending.counts))
        assert await client.ask("PING") == b"+PONG\r\n"
        assert sum(live.server.stats.sending.counts) == 1


def test_fragmentation_is_what_the_longest_hole_leaves(server: Server) -> None:
    store = server.store
    for number in range(4):
        assert store.put(b"%d" % number, bytes(100_000))
    store.delete([b"0"])
    told = dict(fields(server))
    free, largest = told["arena_free_bytes"], told["arena_largest_free_bytes"]
    assert 0 < told["arena_fragmentation_ratio"] == 1 - largest / free < 0.05
