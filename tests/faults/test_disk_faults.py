"""What a real server makes of a directory that an operator has changed, that is not its own, or that cannot be used.

A cache may lose blocks to that, never serve a wrong byte, and it says so: by its counters, or by not starting.
"""

import asyncio
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.faults.clients import standing_at
from tests.faults.crash_client import KIB, Reply, Wire, figure, look
from tests.faults.crash_model import Name, value
from tests.faults.crash_server import CrashServer
from tests.faults.disk_live import DiskServer, StuckFiles, found, info, store_blocks, wait_saved
from tests.faults.disk_store import bury, open_store, run_jobs, save, tiering_of
from tests.gate import nightly
from tests.server.live import MIB, until
from tests.storage.fake_files import FakeFiles, Fault, on
from tests.storage.small_store import Clock

BLOCKS: Final = 60
NAMES: Final[list[Name]] = [(b"block:%d" % number, number % 2) for number in range(BLOCKS)]
SEGMENT_BYTES: Final = 4 << 20
DISK: Final = ("--max-local-disk-size", "64MB")
ROUNDS_MAX: Final = 200
"""After a refusal the tier places 256 blocks before it asks for another segment; what is dropped is not placed."""


def length(number: int) -> int:
    return 20 * KIB + number * 5501 % (200 * KIB)


def server_over(directory: Path, *more: str) -> CrashServer:
    return CrashServer(directory, (*DISK, *more), segment_bytes=SEGMENT_BYTES)


@contextmanager
def connected(server: CrashServer) -> Iterator[Wire]:
    wire = Wire(server.port)
    try:
        yield wire
    finally:
        wire.close()


def store_all(wire: Wire) -> None:
    """SET every block, each in its database."""
    for number, (key, space) in enumerate(NAMES):
        assert wire.ask("SELECT", str(space)) == b"OK"
        assert wire.ask("SET", key, value(number + 1, length(number))) == b"OK"


def saved(wire: Wire) -> Reply:
    return wire.ask("WAITAOF", "1", "0", "10000")


def there(server: CrashServer) -> set[Name]:
    """Who is served; AssertionError for a wrong byte, or for a block under another's name."""
    seen = look(server.port, NAMES)
    for number, name in enumerate(NAMES):
        assert seen[name].held.ident in (0, number + 1), f"{name} holds {seen[name].held}"
    return {name for name in NAMES if seen[name].held.ident}


def ended(server: CrashServer) -> None:
    assert server.end() == 0, server.log()
    assert "Traceback" not in server.log()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds every block, left in good order."""
    directory = tmp_path_factory.mktemp("pristine") / "disk"
    with server_over(directory) as server:
        with connected(server) as wire:
            store_all(wire)
        ended(server)
    return directory


@pytest.fixture
def disk(pristine: Path, tmp_path: Path) -> Path:
    """A copy of that."""
    shutil.copytree(pristine, tmp_path / "disk")
    return tmp_path / "disk"


def segments(directory: Path) -> list[Path]:
    found = sorted(directory.glob("segment-*.kv"))
    assert len(found) > 1
    return found


def turn_bits(path: Path, rng: random.Random, count: int) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        for _ in range(count):
            where = rng.randrange(size)
            file.seek(where)
            byte = file.read(1)[0]
            file.seek(where)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


@pytest.fixture
def live(tmp_path: Path) -> DiskServer:
    return DiskServer(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_bits_that_turned_are_misses_that_are_counted_and_never_wrong_bytes(disk: Path, seed: int) -> None:
    rng = random.Random(seed)
    for path in segments(disk):
        turn_bits(path, rng, 5)
    with server_over(disk) as server:
        lost = BLOCKS - len(there(server))
        assert 0 < lost < BLOCKS
        with connected(server) as wire:
            assert figure(wire, b"disk", b"quarantined") == lost
            assert f"disk_quarantined:{lost}\r\n".encode() in wire.ask("INFO", "kv")  # type: ignore[operator]
            store_all(wire)
            assert saved(wire) == [1, 0]
        assert there(server) == set(NAMES)
        ended(server)


def remove_segment(disk: Path) -> None:
    segments(disk)[0].unlink()


def cut_segment(disk: Path) -> None:
    with segments(disk)[0].open("r+b") as file:
        file.truncate(SEGMENT_BYTES // 3)


def tear_segment(disk: Path) -> None:
    """The first third of each record of a segment is what was there before."""
    with segments(disk)[0].open("r+b") as file:
        for at in range(0, SEGMENT_BYTES, 96 * KIB):
            file.seek(at)
            file.write(bytes(32 * KIB))


def exchange_segments(disk: Path) -> None:
    one, other = segments(disk)[:2]
    one.rename(disk / "aside")
    other.rename(one)
    (disk / "aside").rename(other)


def damage_index(disk: Path) -> None:
    turn_bits(disk / "index.sqlite", random.Random(1), 2000)


def cut_index(disk: Path) -> None:
    with (disk / "index.sqlite").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)


def remove_index(disk: Path) -> None:
    (disk / "index.sqlite").unlink()


def add_wal(disk: Path) -> None:
    (disk / "index.sqlite-wal").write_bytes(random.Random(2).randbytes(50_000))


def age_index(disk: Path) -> None:
    with closing(sqlite3.connect(disk / "index.sqlite", isolation_level=None)) as index:
        index.execute("PRAGMA user_version=0")


@pytest.mark.parametrize(
    ("hurt", "kept"),
    [
        *((remove_segment, True), nightly(cut_segment, True), (tear_segment, True), (add_wal, True)),
        *(nightly(exchange_segments, False), (damage_index, False), nightly(cut_index, False)),
        *(nightly(remove_index, False), (age_index, False)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_hurt_directory_costs_blocks_and_no_more(disk: Path, hurt: Callable[[Path], None], kept: bool) -> None:
    hurt(disk)
    with server_over(disk) as server:
        found = there(server)
        assert bool(found) == kept
        assert (len(found) < BLOCKS) == (hurt is not add_wal)
        with connected(server) as wire:
            store_all(wire)
            assert saved(wire) == [1, 0]
        ended(server)
    with server_over(disk) as server:
        assert there(server) == set(NAMES)
        ended(server)


def test_a_directory_of_a_newer_kvredis_is_refused_and_left_as_it_is(disk: Path) -> None:
    with closing(sqlite3.connect(disk / "index.sqlite", isolation_level=None)) as index:
        index.execute("PRAGMA user_version=99")
    text = server_over(disk).refusal()
    assert "local_disk" in text
    assert "--local-disk" in text, "where it was said"
    assert "newer kvredis" in text
    assert len(segments(disk)) > 1


def test_a_file_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("not a directory")
    text = server_over(tmp_path / "disk").refusal()
    assert "local_disk" in text
    assert "--local-disk" in text
    assert str(tmp_path / "disk") in text


@contextmanager
def mounted(at: Path, *words: str) -> Iterator[None]:
    """Something mounted at a new directory; skips where this machine does not let us."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *words, str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: not permitted here ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "ro", "tmpfs"):
        text = server_over(tmp_path / "disk").refusal()
    assert "local_disk" in text
    assert "--local-disk" in text
    assert "Read-only file system" in text


def test_a_second_server_in_a_directory_is_refused_and_the_first_does_not_notice(disk: Path) -> None:
    with server_over(disk) as first:
        text = server_over(disk).refusal()
        assert "local_disk" in text
        assert "--local-disk" in text
        assert "another server has it open" in text
        assert there(first) == set(NAMES)
        with connected(first) as wire:
            store_all(wire)
            assert saved(wire) == [1, 0]
        ended(first)


def fill_up(filler: Path) -> None:
    """Take all the room that its file system has left."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(64 * KIB))


def test_a_full_disk_costs_hits_and_nothing_else_and_is_used_again_when_it_has_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "-t", "tmpfs", "-o", "size=40m", "tmpfs"):
        filler = tmp_path / "full" / "filler"
        with server_over(tmp_path / "full" / "disk", "--max-local-cpu-size", "4MB") as server:
            with connected(server) as wire:
                fill_up(filler)
                store_all(wire)
                assert saved(wire) == [0, 0]
                assert 0 < len(there(server)) < BLOCKS
                kv = wire.ask("INFO", "kv")
                assert isinstance(kv, bytes)
                assert b"tier_spilled:0\r\n" in kv
                assert b"tier_spill_failed:0\r\n" not in kv
                assert b"tier_spill_dropped:0\r\n" not in kv
                filler.unlink()
                for _ in range(ROUNDS_MAX):
                    store_all(wire)
                    if saved(wire) == [1, 0]:
                        break
                store_all(wire)
                assert saved(wire) == [1, 0]
                assert there(server) == set(NAMES)
            ended(server)


# A disk that fails under a live server: SETs go on, what cannot be read is a miss and counted, no lie is told.

LOOP = "uvloop"


MANY = range(60)


"""Three times as many as memory has room for."""


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC], ids=str)
async def test_stores_go_on_while_the_disk_takes_nothing_and_spills_resume_when_it_does(
    tmp_path: Path, fault: Fault
) -> None:
    async with DiskServer(tmp_path, disk_bytes=32 * MIB) as live:
        client = await live.connect()
        live.files.plan = on("pwrite", fault)
        await store_blocks(client, MANY)
        there = await found(client, MANY)
        # An old one that was on its way to the disk when room was needed could not leave, so the newest must have.
        assert there[-5:] == list(MANY)[-5:], "the coldest have gone"
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
        assert await found(client, later) == list(later), "no block leaves unwritten any more"
    assert live.warnings


async def test_a_block_that_cannot_be_read_is_a_miss_and_counted_and_the_others_are_served(live: DiskServer) -> None:
    client = await live.connect()
    await store_blocks(client, MANY)
    assert await wait_saved(client) == [1, 0]
    away = [n for n in MANY if (entry := live.store.find(b"block:%d" % n)) is not None and not entry.is_resident]
    lost = away[:3]
    assert len(lost) == 3
    live.files.plan = on("pread", Fault.EIO)
    assert await found(client, lost) == []
    live.files.plan = None
    assert await found(client, MANY) == [n for n in MANY if n not in lost]
    assert await info(client, "tier_lost") == await info(client, "disk_quarantined") == 3
    assert await info(client, "disk_read_errors") == 3
    await store_blocks(client, lost)
    assert await found(client, lost) == lost


async def test_writes_that_half_arrive_are_misses_and_never_wrong_bytes(tmp_path: Path) -> None:
    files = FakeFiles(lambda step, what: (Fault.HALF, Fault.FLIP, None)[step % 3] if "pwrite" in what else None)
    async with DiskServer(tmp_path, files) as live:
        client = await live.connect()
        await store_blocks(client, MANY)
        there = await found(client, MANY)
        assert 0 < len(there) < len(MANY)
        assert await info(client, "disk_quarantined") == len(MANY) - len(there)


async def test_a_device_that_has_once_refused_to_sync_confirms_nothing_more(live: DiskServer) -> None:
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


async def test_others_are_served_while_a_client_waits_for_a_stuck_disk_and_then_it_stores_all_the_same(
    tmp_path: Path,
) -> None:
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


# What WAITAOF and the end of a server promise while the disk, or who asked, is not as one would wish.


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


def test_a_client_that_has_gone_does_not_keep_others_waiting_for_their_save(tmp_path: Path) -> None:
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


async def test_a_client_that_leaves_while_it_waits_for_the_disk_leaves_nothing_behind(live: DiskServer) -> None:
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


async def test_a_spell_of_failed_writes_costs_none_of_what_the_disk_has(tmp_path: Path) -> None:
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
async def test_waitaof_covers_a_block_of_another_client_that_this_one_has_changed(
    tmp_path: Path, words: tuple[str, ...], renamed: str
) -> None:
    async with DiskServer(tmp_path) as live:
        writer, other = await live.connect(), await live.connect()
        await store_blocks(writer, range(3))
        assert (await other.ask(*words)) in (b"+OK\r\n", b":1\r\n")
        assert await wait_saved(other) == [1, 0]
        unsaved = {entry.key.decode() for entry in live.store.unsaved}
    assert renamed not in unsaved


async def test_a_value_that_cannot_be_put_on_disk_makes_waitaof_say_so(live: DiskServer) -> None:
    client = await live.connect()
    await store_blocks(client, range(3))
    longest = "k" * 1000  # longer than a record's header can name
    assert await client.ask("SET", longest, "v" * 100_000) == b"+OK\r\n"
    assert await asyncio.wait_for(wait_saved(client, 500), 10) == [0, 0]
    assert await client.ask("DEL", longest) == b":1\r\n"
    assert await wait_saved(client) == [1, 0]
    assert await info(client, "tier_spilled") == 3
