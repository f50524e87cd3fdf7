"""/metrics as Prometheus reads it: both formats, names by its conventions, LMCache's names, and what they say."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvredis.adapters.engine.block import encode_header
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.server.http.page import slices
from kvredis.server.metrics.metrics import FIGURES, Kind
from kvredis.server.metrics.prometheus import buckets
from kvredis.server.server import Server
from kvredis.storage.stats import Times
from tests.deploy.promtool import promtool
from tests.server.http.http_client import ask
from tests.server.live import LiveServer, run_on
from tests.server.tiered_server import TieredServer

OPENMETRICS = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
LAYOUT = ChunkLayout(2, 2, 64, "bf16", 256)

Found = Mapping[tuple[str, tuple[str, ...]], float]


def samples(families: Iterable[Metric]) -> Found:
    """Every sample by its name and the values of its labels."""
    return {(each.name, tuple(each.labels.values())): each.value for family in families for each in family.samples}


async def scraped(live: LiveServer) -> Found:
    """What /metrics says now."""
    return samples(parse_text((await ask(live, "/metrics")).body.decode()))


def test_both_formats_say_the_same_and_prometheus_own_checker_finds_nothing_wrong(loop: str, tmp_path: Path) -> None:
    async def story() -> tuple[bytes, bytes]:
        async with TieredServer(tmp_path, metrics_port=-1) as live:
            client = await live.connect()
            await client.ask("SET", "k", b"v" * 20_000)
            await client.get("k")
            plain, open_ = await ask(live, "/metrics"), await ask(live, "/metrics", OPENMETRICS)
            assert plain.headers["content-type"].startswith("text/plain; version=")
            assert open_.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            assert open_.body.endswith(b"# EOF\n")
            return plain.body, open_.body

    plain, open_ = run_on(loop, story())
    first, second = samples(parse_text(plain.decode())), samples(parse_openmetrics(open_.decode()))  # type: ignore[no-untyped-call]
    assert len(first) > 200
    assert {name for name, _ in first} == {name for name, _ in second}
    ours = [line for line in plain.splitlines(keepends=True) if b"lmcache:" not in line]  # whose names it may not like
    promtool("check", "metrics", given=b"".join(ours))


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
async def test_a_long_scrape_is_made_in_turns_and_is_whole(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)  # a rest after each part, however quick

    async with LiveServer(tmp_path, metrics_port=-1) as live:
        for number in range(100):
            live.server.stats.command(f"command{number}").observe(number + 1, 5000)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        both = await asyncio.gather(ask(live, "/metrics", *filter(None, [accept])), ask(live, "/health"))
        counting.cancel()
        assert turns > 100
        text = both[0].body.decode()
        families = list((parse_openmetrics if accept else parse_text)(text))
        assert len({each.name for each in families}) == len(families)
        found = samples(families)
        calls = [found["kvredis_command_seconds_count", (f"command{number}",)] for number in range(100)]
        assert calls == [number + 1 for number in range(100)]
        assert text.count("# TYPE kvredis_command_seconds ") == 1
        assert text.count("# EOF\n") == bool(accept)


def test_names_are_as_prometheus_wants_them() -> None:
    names = [figure.full_name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for figure in FIGURES:
        name = figure.full_name
        assert name.startswith("kvredis_")
        assert name == name.lower()
        assert name.endswith("_total") == (figure.kind is Kind.COUNTER), name
        assert not {"ms", "kb", "mb", "percent", "milliseconds"} & set(name.split("_")), "base units"
        assert figure.help.endswith("."), name
        assert figure.label not in ("job", "instance", "le", "quantile"), "Prometheus has its own of these names"


async def test_what_clients_did_is_what_is_told(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, metrics_port=-1) as live:
        block = encode_header(LAYOUT, 200).ljust(100_000, b"\1")
        unix, tcp = await live.connect(), await live.connect("tcp")
        await unix.ask("SET", "block", block)
        for _ in range(3):
            await tcp.get("block")
        await tcp.get("nothing")
        await unix.ask("SETRANGE", "small", "0", "x")
        await tcp.send("GETRANGE", "block", "0", "511")
        await tcp.read_bulk()
        found = await scraped(live)
        assert found["kvredis_hits_total", ("memory",)] == 4
        assert found["kvredis_misses_total", ()] == 1
        assert found["kvredis_hit_tokens_total", ("memory",)] == 600, "a part of a block is no hit of its tokens"
        assert found["lmcache:num_hit_tokens_total", ()] == 600
        await tcp.send("GETRANGE", "block", "512", "-1")
        await tcp.read_bulk()
        found = await scraped(live)
        assert found["kvredis_hit_tokens_total", ("memory",)] == 800, "but the last part is"
        assert 300_000 < found["kvredis_sent_bytes_total", ("tcp",)] < 401_000
        assert 100_000 < found["kvredis_received_bytes_total", ("unix",)] < 101_000
        assert found["kvredis_received_bytes_total", ("tls",)] == 0
        assert found["kvredis_clients", ("tcp",)] == found["kvredis_clients", ("unix",)] == 1
        assert found["kvredis_clients", ("http",)] == 1
        assert found["kvredis_command_seconds_count", ("get",)] == 4
        assert found["kvredis_copy_seconds_count", ("receive",)] == 0, "it was short"
        await unix.ask("SET", "long", b"v" * 300_000)
        assert (await scraped(live))["kvredis_copy_seconds_count", ("receive",)] == 1
        assert found["kvredis_memory_blocks", ()] == found["lmcache:active_memory_objs_count", ()] == 2
        assert found["kvredis_stores_total", ("created",)] == 2
        assert found["kvredis_healthy", ()] == 1


async def test_blocks_leave_for_one_reason_each(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, 4 * 1024 * 1024, metrics_port=-1) as live:
        client = await live.connect()
        for number in range(10):
            await client.ask("SET", f"k{number}", b"v" * 900_000)
        await client.ask("SET", "k9", b"w" * 900_000)
        await client.ask("DEL", "k9")
        await client.ask("SET", "e", "v", "PX", "1")
        live.clock_ms += 10
        assert await client.get("e") is None
        await client.ask("SET", "f", "v")
        left = await client.ask("DBSIZE")
        await client.ask("FLUSHALL")
        found = await scraped(live)
        reasons = {labels[0]: count for (name, labels), count in found.items() if name == "kvredis_evictions_total"}
        assert reasons["overwritten"] == reasons["deleted"] == reasons["expired"] == 1
        assert reasons["flushed"] == int(left[1:])
        stored = found["kvredis_stores_total", ("created",)]
        assert sum(reasons.values()) - reasons["overwritten"] == stored, "each block has left once"
        assert reasons["room"] > 5


async def test_a_block_that_comes_back_from_disk_is_a_hit_of_the_disk(loop: str, tmp_path: Path) -> None:
    async with TieredServer(tmp_path, threads=2, metrics_port=-1) as live:
        client = await live.connect()
        block = encode_header(LAYOUT, 256).ljust(100_000, b"\1")
        await client.ask("SET", "cold", block)
        await client.ask("WAITAOF", "1", "0", "0")
        await client.read_line()
        await client.read_line()
        with live.store.lock:
            live.store._unload(live.store.index.spaces[0][b"cold"])
        before = await scraped(live)
        assert before["kvredis_evictions_total", ("spilled",)] == 1
        assert await client.get("cold") == block
        assert await client.get("cold") == block
        after = await scraped(live)
        for what in ("hits", "hit_tokens"):
            name, each = f"kvredis_{what}_total", 256 if what == "hit_tokens" else 1
            assert (after[name, ("disk",)], after[name, ("memory",)]) == (each, each)
        assert after["kvredis_promoted_blocks_total", ("demand",)] == 1
        assert after["kvredis_copy_seconds_count", ("promote",)] == 1
        assert after["kvredis_copy_seconds_count", ("spill",)] == after["kvredis_spilled_blocks_total", ()] == 1
        assert after["kvredis_disk_blocks", ()] == 1
        assert after["lmcache:local_storage_usage", ()] > 100_000
        with live.store.lock:
            live.store._unload(live.store.index.spaces[0][b"cold"])
            live.store.lapse(live.store.index.spaces[0][b"cold"])
        after = await scraped(live)
        gone = {reason: after["kvredis_evictions_total", (reason,)] for reason in ("room", "spilled", "disk_room")}
        assert gone == {"room": 0, "spilled": 2, "disk_room": 1}, "it has left memory twice and the disk once"
        assert after["lmcache:local_cpu_evict_keys_count_total", ()] == 2


def test_no_counter_goes_back_while_a_block_from_disk_has_come_and_is_not_yet_read(server: Server) -> None:
    assert server.stats.floor("demanded", 7) == 7
    assert server.stats.floor("demanded", 6) == 7
    assert server.stats.floor("demanded_tokens", 1) == 1
    server.stats.reset()
    assert server.stats.floor("demanded", 0) == 0


def test_buckets_hold_every_time_and_only_grow(server: Server) -> None:
    times = Times()
    for seconds in (0.0, 1e-9, 5e-6, 0.001, 1.0, 1000.0, -1.0):
        times.add(seconds)
    edges = buckets(times)
    counts = [count for _, count in edges]
    assert counts == sorted(counts)
    assert edges[-1] == ("+Inf", 7)
    for edge, count in edges[:-1]:
        assert count == sum(each < float(edge) for each in (0.0, 1e-9, 5e-6, 0.001, 1.0, 1000.0, 0.0)), edge


@pytest.mark.parametrize("accept", ["", "*/*", "text/html", "application/json", "application/openmetrics-text;q=x"])
async def test_whatever_is_accepted_something_is_told(loop: str, tmp_path: Path, accept: str) -> None:
    async with LiveServer(tmp_path, metrics_port=-1) as live:
        answer = await ask(live, "/metrics", f"Accept: {accept}")
        assert answer.status == 200
        assert b"kvredis_uptime_seconds" in answer.body
