"""A disk that fails under a live server: SETs go on, what cannot be read is a miss and counted, no lie is told."""

import asyncio
from pathlib import Path

import pytest

from tests.faults.clients import standing_at
from tests.faults.disk_live import DiskServer, StuckFiles, found, info, store_blocks, wait_saved
from tests.server.live import MIB, run_on, until
from tests.storage.fake_files import FakeFiles, Fault, on

LOOP = "uvloop"
MANY = range(60)
"""Three times as many as memory has room for."""


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC], ids=str)
def test_stores_go_on_while_the_disk_takes_nothing_and_spills_resume_when_it_does(tmp_path: Path, fault: Fault) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path, disk_bytes=32 * MIB) as live:
            client = await live.connect()
            live.files.plan = on("pwrite", fault)
            await store_blocks(client, MANY)
            there = await found(client, MANY)
            assert there[-10:] == list(MANY)[-10:], "the coldest have gone"
            assert len(there) < len(MANY)
            assert await wait_saved(client) == [0, 0]
            assert await info(client, "tier_spill_failed") > 0
            assert await info(client, "tier_spill_dropped") > 0
            assert await info(client, "tier_spilled") == 0
            live.files.plan = None
            await store_blocks(client, MANY)
            assert await wait_saved(client) == [1, 0]
            assert await info(client, "tier_spilled") > len(MANY) / 2
            later = range(60, 90)
            await store_blocks(client, later)
            assert await found(client, later) == list(later), "nobody leaves unwritten any more"
        assert live.warnings

    run_on(LOOP, story())


def test_a_block_that_cannot_be_read_is_a_miss_and_counted_and_the_others_are_served(tmp_path: Path) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path) as live:
            client = await live.connect()
            await store_blocks(client, MANY)
            assert await wait_saved(client) == [1, 0]
            away = [
                n for n in MANY if (entry := live.store.find(b"block:%d" % n)) is not None and not entry.is_resident
            ]
            live.files.plan = on("pread", Fault.EIO)
            assert await found(client, range(3)) == []
            live.files.plan = None
            assert away[:3] == [0, 1, 2]
            assert await found(client, MANY) == list(MANY)[3:]
            assert await info(client, "tier_lost") == await info(client, "disk_quarantined") == 3
            assert await info(client, "disk_read_errors") == 3
            await store_blocks(client, range(3))
            assert await found(client, range(3)) == [0, 1, 2]

    run_on(LOOP, story())


def test_writes_that_half_arrive_are_misses_and_never_wrong_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        files = FakeFiles(lambda step, what: (Fault.HALF, Fault.FLIP, None)[step % 3] if "pwrite" in what else None)
        async with DiskServer(tmp_path, files) as live:
            client = await live.connect()
            await store_blocks(client, MANY)
            there = await found(client, MANY)
            assert 0 < len(there) < len(MANY)
            assert await info(client, "disk_quarantined") == len(MANY) - len(there)

    run_on(LOOP, story())


def test_a_device_that_has_once_refused_to_sync_confirms_nothing_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path) as live:
            client = await live.connect()
            await store_blocks(client, range(10))
            assert await wait_saved(client) == [1, 0]
            await store_blocks(client, range(10, 20))
            live.files.plan = on("sync segment", Fault.EIO)
            assert await wait_saved(client) == [0, 0]
            live.files.plan = None
            assert await wait_saved(client) == [0, 0], "what the kernel did with those pages is not known"
            await store_blocks(client, range(20, 60))
            assert await wait_saved(client) == [0, 0]
            assert await info(client, "disk_sync_errors") > 0
            assert await found(client, MANY) == list(MANY), "they are served all the same"

    run_on(LOOP, story())


def test_others_are_served_while_a_client_waits_for_a_stuck_disk_and_then_it_stores_all_the_same(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        files = StuckFiles()
        async with DiskServer(tmp_path, files, spill_wait_s=60) as live:
            began_s = live.store.now_s()
            live.server.now_s = live.store.now_s = standing_at(began_s)
            writer, other = await live.connect(), await live.connect()
            storing = asyncio.ensure_future(store_blocks(writer, MANY))
            try:
                waiting = live.server.admission.disk_room
                await until(lambda: len(waiting) and files.stuck.is_set())
                assert await other.ask("PING") == b"+PONG\r\n"
                resident = [n for n in MANY if live.store.find(b"block:%d" % n) is not None]
                assert await found(other, range(len(resident))) == resident
                assert len(resident) < len(MANY)
                assert len(waiting) == 1
                assert not storing.done()
                live.server.now_s = live.store.now_s = standing_at(began_s + 61)
                await storing
                assert live.store.used_bytes <= live.store.arena.nbytes
                assert await info(other, "tier_spill_waits") == 1, "a disk that writes nothing is waited for once"
                assert await info(other, "tier_spill_dropped") > 0
                assert await wait_saved(writer, 50) == [0, 0]
            finally:
                files.released.set()
                storing.cancel()
            assert await wait_saved(writer) == [1, 0]
            await store_blocks(writer, MANY)
            assert await found(writer, MANY) == list(MANY), "it is trusted again"

    run_on(LOOP, story())
