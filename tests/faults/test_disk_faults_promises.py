"""What WAITAOF and the end of a server promise while the disk, or who asked, is not as one would wish."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from tests.faults.crash_model import value
from tests.faults.disk_live import DiskServer, found, info, store_blocks, wait_saved
from tests.faults.disk_store import bury, open_store, run_jobs, save, tiering_of
from tests.server.live import MIB, run_on, until
from tests.storage.fake_files import FakeFiles, Fault, on
from tests.storage.small_store import Clock

LOOP = "uvloop"


class BrokenIndex(FakeFiles):
    """FakeFiles whose index can be told to fail."""

    broken = False

    def step(self, what: str) -> None:
        super().step(what)
        if self.broken and what == "index: commit":
            raise sqlite3.OperationalError("database or disk is full")


def test_an_index_that_cannot_be_written_is_never_reported_as_saved(tmp_path: Path) -> None:
    files = BrokenIndex()
    store = open_store(tmp_path / "disk", files, Clock(), 10)
    assert store.put(b"key", value(1, 50_000))
    files.broken = True
    assert save(store) is False
    assert tiering_of(store).disk.stats.index_errors > 0
    files.broken = False
    assert save(store) is True
    bury(store)


def test_one_who_has_gone_does_not_keep_others_waiting_for_their_save(tmp_path: Path) -> None:
    """A client's event loop is closed when his WAITAOF comes to its end, and the end of the server waits for the next
    round."""

    def has_gone(_: bool) -> None:
        raise RuntimeError("Event loop is closed")

    store = open_store(tmp_path / "disk", None, Clock(), 10)
    assert store.put(b"key", value(1, 50_000))
    answers: list[bool] = []
    tiering_of(store).saving.save(0, has_gone)
    tiering_of(store).saving.save(0, answers.append)
    tiering_of(store).saving.save(0, answers.append)
    run_jobs(store)
    bury(store)
    assert answers == [True, True]


def test_a_client_that_leaves_while_it_waits_for_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path) as live:
            leaver, other = await live.connect(), await live.connect()
            await store_blocks(leaver, range(20))
            live.tiering.io.pause()
            await leaver.send("WAITAOF", "1", "0", "0")
            await leaver.send("GET", "block:0")
            await until(lambda: live.tiering.saving._round is not None)
            leaver.reset()
            await until(lambda: len(live.server.sessions) == 1)
            live.tiering.io.resume()
            assert await wait_saved(other) == [1, 0]
            assert await found(other, range(20)) == list(range(20))

    run_on(LOOP, story())


def test_a_spell_of_failed_writes_costs_none_of_what_the_disk_has(tmp_path: Path) -> None:
    async def story() -> None:
        old, new = range(60), range(100, 160)
        async with DiskServer(tmp_path, disk_bytes=10 * MIB) as live:
            client = await live.connect()
            await store_blocks(client, old)
            assert await wait_saved(client) == [1, 0]
            live.files.plan = on("pwrite", Fault.EIO)
            for _ in range(3):
                await store_blocks(client, new)
            live.files.plan = None
            kept = await found(client, old)
            await store_blocks(client, range(10))
            saved = await wait_saved(client)
        assert kept == list(old)
        assert saved == [1, 0], "the disk is well again"

    run_on(LOOP, story())


@pytest.mark.parametrize(
    ("words", "renamed"),
    [
        (("RENAME", "block:1", "block:6"), "block:6"),
        (("MOVE", "block:1", "5"), "block:1"),
        (("SWAPDB", "0", "5"), "block:1"),
        (("PEXPIRE", "block:1", "100000"), "block:1"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_waitaof_covers_a_block_of_another_client_that_this_one_has_changed(
    tmp_path: Path, words: tuple[str, ...], renamed: str
) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path) as live:
            writer, other = await live.connect(), await live.connect()
            await store_blocks(writer, range(3))
            assert (await other.ask(*words)) in (b"+OK\r\n", b":1\r\n")
            assert await wait_saved(other) == [1, 0]
            unsaved = {entry.key.decode() for entry in live.store.unsaved}
        assert renamed not in unsaved

    run_on(LOOP, story())


def test_a_value_that_cannot_be_put_on_disk_makes_waitaof_say_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with DiskServer(tmp_path) as live:
            client = await live.connect()
            await store_blocks(client, range(3))
            longest = "k" * 1000  # longer than a record's header can name
            assert await client.ask("SET", longest, "v" * 100_000) == b"+OK\r\n"
            assert await asyncio.wait_for(wait_saved(client, 500), 10) == [0, 0]
            assert await client.ask("DEL", longest) == b":1\r\n"
            assert await wait_saved(client) == [1, 0]
            assert await info(client, "tier_spilled") == 3

    run_on(LOOP, story())
