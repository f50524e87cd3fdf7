"""KV.* on GPU memory: written and leased by clients that map it, read by every other Redis client; what is left behind
when one of them, or the GPU, goes."""

import asyncio
import os
import random
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvredis.server.http.page.survey import Survey
from kvredis.server.shm import attach as attach_module
from kvredis.storage.disk.recovery import DiskOptions
from kvredis.storage.disk.tier import DiskTier
from kvredis.storage.memory import cuda
from kvredis.storage.tiering import gpu as tier_module
from tests.server.feed import request
from tests.server.gpu_server import GPU_BYTES, GpuClient, GpuServer, on_gpu
from tests.server.lane_client import attached, connected
from tests.server.live import MIB, OOM, LiveServer, pattern, until
from tests.server.tiered_server import info
from tests.stand_in_cuda import stand_in_cuda

OLD, NEW = pattern(MIB, 1), pattern(MIB, 2)
SHARE_USED = "OOM this connection has leased its share of the GPU's memory"


@pytest.fixture(autouse=True)
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test says which copies fail."""
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(tmp_path / "fails"))
    return tmp_path / "fails"


async def test_a_value_written_on_the_gpu_is_read_there_and_by_every_redis_client(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as writer, on_gpu(live) as reader:
        await writer.put("k", OLD)
        (place,) = await reader.ask("KV.LEASE", 0, "k")
        assert place[1:] == [len(OLD), b"gpu"]
        assert reader.bytes_at(place) == OLD
        assert live.store.find(b"k").is_resident is False  # type: ignore[union-attr]
        client = await live.connect("tcp")
        assert await client.get("k") == OLD
        assert await client.ask("STRLEN", "k") == b":%d\r\n" % len(OLD)
        assert await reader.ask("KV.RELEASE", place[0]) == 1
        assert await reader.ask("KV.RELEASE", place[0]) == 0
        assert (live.gpu.stats.stored, live.gpu.stats.leased_blocks, live.gpu.stats.spilled) == (1, 1, 1)


async def test_attaching_tells_of_the_memory_and_old_clients_see_no_change(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, attached(live) as old, on_gpu(live) as new:
        told = {name: new.facts[name] for name in new.facts.keys() - old.facts.keys()}
        assert told == {
            b"gpu-bytes": GPU_BYTES,
            b"gpu-base": live.store.arena.nbytes,
            b"gpu-uuid": b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
            b"gpu-granularity": 2 * MIB,
        }
        await new.put("k", OLD)
        ((offset, length),) = await old.ask("KV.LEASE", 0, "k")
        assert old.bytes_at([offset, length]) == OLD
        assert str(await old.ask("KV.RESERVE", "k", MIB, "GPU")) == (
            "ERR this connection is not attached to GPU memory: KV.ATTACH GPU"
        )


async def test_of_rooms_that_are_asked_for_together_one_waits_where_there_is_none(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as holder, on_gpu(live) as other, on_gpu(live) as writer:
        for number, client in enumerate([holder, other] * 3 + [holder]):
            await client.put(str(number), pattern(MIB, number))
            assert isinstance((await client.ask("KV.LEASE", 0, str(number)))[0], list)
        await writer.put("last", OLD)
        for number in range(5):
            writer.sock.sendall(request("KV.RESERVE", f"new{number}", str(MIB + MIB // 2), "GPU"))
        assert [str(await writer.read())[:3] for _ in range(5)] == ["OOM"] * 5
        assert live.gpu.stats.spill_waits == 1
        assert live.gpu.stats.refused == 5


async def test_one_lease_names_places_of_both_memories_and_one_release_ends_them(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        for number in range(3):
            await client.put(f"gpu{number}", pattern(MIB, number))
            assert await client.ask("SET", f"host{number}", pattern(MIB, 10 + number)) == b"OK"
        await client.ask("SET", "small", "s")
        words = ["host0", "gpu0", "gpu1", "none", "small", "host1", "host2", "gpu2"]
        found = await client.ask("KV.LEASE", 0, *words)
        assert [len(place) if isinstance(place, list) else place for place in found] == [2, 3, 3, None, b"s", 2, 2, 3]
        assert [client.bytes_at(found[at]) for at in (1, 2, 7)] == [pattern(MIB, number) for number in range(3)]
        assert live.server.shm.leases == 6
        assert str(await client.ask("KV.RELEASE", found[1][0], "x")).startswith("ERR value is not an integer")
        assert live.server.shm.leases == 6, "none ends"
        assert await client.ask("KV.RELEASE", *(place[0] for place in found if isinstance(place, list))) == 6
        assert live.server.shm.leases == 0
        assert str(await client.ask("KV.RELEASE", "x")).startswith("ERR value is not an integer")


@pytest.mark.parametrize(
    "change",
    [["SET", "k", NEW], ["DEL", "k"], ["FLUSHALL"], ["RENAME", "k", "other"], ["PEXPIREAT", "k", "1"], ["GETDEL", "k"]],
    ids=lambda words: words[0],
)
async def test_leased_bytes_stay_what_they_were_whatever_becomes_of_the_key(change: list[Any], tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("k", OLD)
        (place,) = await client.ask("KV.LEASE", 0, "k")
        await client.ask(*change)
        for number in range(3):
            await client.put(f"more{number}", NEW)
        assert client.bytes_at(place) == OLD
        assert await client.ask("KV.RELEASE", place[0]) == 1
        assert live.gpu.retired_bytes == 0


async def test_a_value_that_changes_is_changed_for_both(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("k", OLD)
        assert await client.ask("APPEND", "k", "more") == len(OLD) + 4
        assert await client.ask("GET", "k") == OLD + b"more"
        await client.put("k", NEW)
        assert await client.ask("GET", "k") == NEW
        (place,) = await client.ask("KV.LEASE", 0, "k")
        assert client.bytes_at(place) == NEW
        assert await client.ask("KV.COMMIT", await client.reserve("k", OLD), "NX") is None
        assert live.gpu.reserved_bytes == live.gpu.abandoned_bytes == 0


async def test_more_is_stored_than_the_gpu_holds_and_all_of_it_is_read(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path, arena_bytes=64 * MIB) as live, on_gpu(live) as client:
        for number in range(24):
            await client.put(f"k{number}", pattern(MIB, number))
        found = await info(await live.connect())
        assert int(found["gpu_spilled"]) >= 15
        assert int(found["gpu_spill_dropped"]) == 0
        for number in range(24):
            assert await client.ask("GET", f"k{number}") == pattern(MIB, number)


async def test_a_value_in_memory_that_is_leased_again_comes_to_the_gpu(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.ask("SET", "k", OLD)
        for _ in range(2):
            ((offset, _length),) = await client.ask("KV.LEASE", 0, "k")
            await client.ask("KV.RELEASE", offset)
        await until(lambda: live.gpu.stats.promoted)
        (place,) = await client.ask("KV.LEASE", 0, "k")
        assert client.bytes_at(place) == OLD


async def test_a_transaction_and_mget_read_what_is_on_the_gpu(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("a", OLD)
        await client.put("b", NEW)
        plain = await live.connect()
        await plain.send("MGET", "a", "none", "b")
        assert await plain.read_line() == b"*3\r\n"
        assert [await plain.read_bulk() for _ in range(3)] == [OLD, None, NEW]
        await client.put("a", NEW)
        await client.ask("MULTI")
        await client.ask("GET", "a")
        assert await client.ask("EXEC") == [NEW]


async def test_a_reservation_on_the_gpu_has_its_bounds(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        ask = client.ask
        assert str(await ask("KV.RESERVE", "k", MIB, "CPU")) == "ERR syntax error"
        assert str(await ask("KV.RESERVE", "k", 100, "GPU")) == "ERR a value on the GPU has at least 16384 bytes"
        assert str(await ask("KV.RESERVE", "k", 2 * GPU_BYTES, "GPU")).startswith("OOM")
        number, _ = await ask("KV.RESERVE", "k", GPU_BYTES // 2, "GPU")
        assert str(await ask("KV.WRITE", number, 0, b"x")) == (
            "ERR this reservation lies on the GPU: the client writes to it by itself"
        )
        assert str(await ask("KV.WRITE", number, 0, pattern(MIB))).startswith("ERR this reservation lies on the GPU")
        assert str(await ask("KV.RESERVE", "l", MIB, "GPU")).startswith("OOM")
        assert await ask("KV.ABORT", number) == 1
        assert live.gpu.used_bytes == 0


async def test_a_client_keeps_half_of_the_memory_leased_at_most(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        for number in range(5):
            await client.put(f"k{number}", OLD)
        *places, refused = await client.ask("KV.LEASE", 0, *(f"k{number}" for number in range(5)))
        assert str(refused) == SHARE_USED
        assert await client.ask("KV.LEASE", 0, "k1") == [places[1]], "the same place once more takes nothing more"
        assert await client.ask("KV.RELEASE", places[1][0]) == 1
        assert await client.ask("KV.RELEASE", places[0][0]) == 1
        assert len((await client.ask("KV.LEASE", 0, "k4"))[0]) == 3
        await client.ask("RESET")
        await until(lambda: live.gpu.holds == 0)


async def test_leases_end_by_their_limits_and_those_of_one_place_in_their_order(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("k", OLD)
        (place,) = await client.ask("KV.LEASE", 60_000, "k")
        assert await client.ask("KV.LEASE", 1, "k") == [place]
        await until(lambda: live.gpu.holds == 1)
        assert await client.ask("KV.RELEASE", place[0]) == 0, "of the one whose limit has passed"
        assert await client.ask("KV.RELEASE", place[0]) == 1
        assert live.gpu.holds == 0


async def test_what_ended_by_itself_is_not_counted_when_more_is_leased(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        for number in range(6):
            await client.put(f"k{number}", OLD)
        await client.ask("KV.LEASE", 1, *(f"k{number}" for number in range(4)))
        await until(lambda: live.gpu.holds == 0)
        assert [len(place) for place in await client.ask("KV.LEASE", 0, "k4", "k5")] == [3, 3]


async def test_another_user_or_one_without_every_key_is_not_given_it(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with GpuServer(tmp_path) as live:
        await (await live.connect()).ask("ACL", "SETUSER", "reader", "on", ">pw", "+@all", "%R~*")
        async with connected(live) as plain:
            client = GpuClient(plain.sock)
            assert await client.ask("AUTH", "reader", "pw") == b"OK"
            assert str(await client.attach()) == (
                "NOPERM GPU memory lies open to writing, and this user may not write every key"
            )
        await (await live.connect()).ask("ACL", "SETUSER", "writer", "on", ">pw", "+@all", "~*")
        monkeypatch.setattr(attach_module, "os", SimpleNamespace(**{**vars(os), "geteuid": lambda: -1}))
        async with connected(live) as plain:
            client = GpuClient(plain.sock)
            assert await client.ask("AUTH", "writer", "pw") == b"OK"
            assert str(await client.attach()).startswith("NOPERM GPU memory is for the server's own user")
            assert len(await plain.attach()) == 12


async def test_a_server_without_one_says_so(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path) as live, connected(live) as client:
        assert str(await client.ask("KV.ATTACH", "GPU")) == "ERR there is no GPU memory here (--gpu-memory)"
        assert str(await client.ask("KV.ATTACH", "TPU")) == "ERR syntax error"


async def test_a_client_that_vanishes_leaves_nothing_behind(loop: str, tmp_path: Path) -> None:
    """Its leases end with its connection, the room that it was writing to when its process has ended."""
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.server.gpu_server import *\n"
        "async def main():\n"
        "    async with on_gpu(type('', (), {'server': type('', (), {'unixsocket': sys.argv[1]})})) as client:\n"
        "        await client.ask('KV.LEASE', 0, 'k')\n"
        "        await client.reserve('new', bytes(1 << 20))\n"
        "        print('held', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    async with GpuServer(tmp_path) as live:
        async with on_gpu(live) as client:
            await client.put("k", OLD)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(live.server.unixsocket),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        assert child.stdout is not None
        assert await child.stdout.readline() == b"held\n"
        assert (live.gpu.holds, live.gpu.reserved_bytes) == (1, MIB)
        child.kill()
        await child.wait()
        await until(lambda: live.gpu.used_bytes == MIB and not live.gpu.holds)
        assert live.gpu.abandoned_bytes == 0
        assert live.store.find(b"new") is None


async def test_room_that_a_living_process_leaves_is_kept_from_others_for_a_time(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "ABANDONED_S", 0.2)
    async with GpuServer(tmp_path) as live:
        async with on_gpu(live) as client:
            await client.ask("KV.RESERVE", "k", MIB, "GPU")
        await until(lambda: live.gpu.abandoned_bytes == MIB)
        await until(lambda: live.gpu.used_bytes == 0)


async def test_it_is_kept_for_that_time_also_by_a_server_with_more_than_a_thousand_descriptors(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "ABANDONED_S", 0.2)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        async with GpuServer(tmp_path) as live:
            async with on_gpu(live) as client:
                await client.ask("KV.RESERVE", "k", MIB, "GPU")
            await until(lambda: live.gpu.abandoned_bytes == MIB)
            await until(lambda: live.gpu.used_bytes == 0)


async def test_a_block_that_the_gpu_does_not_give_is_a_miss_and_the_server_goes_on(
    loop: str, tmp_path: Path, fails: Path
) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("a", OLD)
        await client.put("b", NEW)
        fails.write_text("1")
        plain = await live.connect()
        assert await plain.get("a") is None
        assert await plain.get("b") == NEW
        assert [told.partition(":")[0] for told in live.complaints] == ["GPU memory"]
        live.complaints.clear()


async def test_a_gpu_that_is_lost_costs_what_it_alone_had(loop: str, tmp_path: Path, fails: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("a", OLD)
        await client.ask("SET", "b", NEW)
        fails.write_text("-1")
        plain = await live.connect()
        assert await plain.get("a") is None
        assert await plain.get("b") == NEW
        assert str(await client.ask("KV.RESERVE", "k", MIB, "GPU")).startswith("OOM")
        assert str(await plain.ask("KV.ATTACH", "GPU")).startswith("b'-ERR there is no GPU memory")
        assert (await info(plain))["gpu_memory_lost"] == "1"
        assert len(live.complaints) == 1
        live.complaints.clear()


async def test_tiers_scan_and_metrics_tell_of_it(loop: str, tmp_path: Path) -> None:
    async with GpuServer(tmp_path) as live, on_gpu(live) as client:
        await client.put("k", OLD)
        assert b" tier=gpu " in (await client.ask("KV.SCAN", 0))[1][1]
        tiers = await client.ask("KV.TIERS")
        figures = dict(zip(tiers[3][::2], tiers[3][1::2], strict=True))
        assert tiers[2] == b"gpu"
        assert (figures[b"capacity"], figures[b"used"], figures[b"entries"]) == (GPU_BYTES, MIB, 1)
        assert (await Survey(live.store).told())["blocks"] == {"arena": 0, "beside": 0, "disk": 0, "gpu": 1}
        found = await info(await live.connect())
        assert (found["gpu_memory_used_bytes"], found["gpu_memory_blocks"]) == (str(MIB), "1")


def _told(key: int, version: int) -> bytes:
    """A value that says whose it is."""
    length = 100_000 + 997 * key
    return b"%08d" % version + pattern(length, 100 * key + version % 89)


def _is_right(key: int, value: bytes) -> bool:
    return value == _told(key, int(value[:8]))


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
async def test_a_crowd_on_and_beside_the_gpu_reads_no_wrong_byte(tmp_path: Path, disk: bool) -> None:
    """Three write and lease on the GPU, three write and read over TCP; all of it is several times what the GPU has."""
    rng, keys, versions = random.Random(3), 40, iter(range(1, 1 << 20))
    live = GpuServer(tmp_path, arena_bytes=4 * MIB, gpu_bytes=2 * MIB)
    if disk:
        live.store.add_disk(DiskTier.open(DiskOptions(tmp_path / "disk", 32 * MIB, False, MIB)))
    seen = {"leased": 0, "read": 0, "stored": 0}

    async def at_the_gpu() -> None:
        async with on_gpu(live) as client:
            for _ in range(60):
                key = rng.randrange(keys)
                if rng.random() < 0.5:
                    value = _told(key, next(versions))
                    room = await client.ask("KV.RESERVE", f"k{key}", len(value), "GPU")
                    if not isinstance(room, list):
                        continue
                    assert client.gpu is not None
                    client.gpu.write(client.at(room[1]), value)
                    assert await client.ask(*rng.choice([("KV.COMMIT", room[0])] * 4 + [("KV.ABORT", room[0])])) in (
                        b"OK",
                        1,
                    )
                    seen["stored"] += 1
                else:
                    (place,) = await client.ask("KV.LEASE", 0, f"k{key}")
                    if isinstance(place, list):
                        assert len(place) == 2 or _is_right(key, client.bytes_at(place))
                        seen["leased"] += len(place) == 3
                        assert await client.ask("KV.RELEASE", place[0]) == 1

    async def beside() -> None:
        client = await live.connect("tcp")
        for _ in range(60):
            key = rng.randrange(keys)
            act = rng.random()
            if act < 0.2:
                assert await client.ask("SET", f"k{key}", _told(key, next(versions))) in (b"+OK\r\n", OOM)
            elif act < 0.25:
                await client.ask("DEL", f"k{key}")
            elif act < 0.3:
                await client.ask("SWAPDB", "0", "1")
            else:
                value = await client.get(f"k{key}")
                assert value is None or _is_right(key, value)
                seen["read"] += value is not None

    async with live:
        await asyncio.gather(*(at_the_gpu() for _ in range(3)), *(beside() for _ in range(3)))
        assert min(seen.values()) > 10, seen
        assert live.gpu.stats.spilled > 0
        await until(lambda: live.gpu.holds == 0 and live.gpu.io.drain(0.0))
