"""What a real server makes of a directory that somebody has been at, that is not its own, or that cannot be used.

A cache may lose blocks to that, never serve a wrong byte, and it says so: by its counters, or by not starting.
"""

import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.faults.crash_client import KIB, Reply, Wire, figure, look
from tests.faults.crash_model import Name, value
from tests.faults.crash_server import CrashServer

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
        *((remove_segment, True), (cut_segment, True), (tear_segment, True), (add_wal, True)),
        *(
            (exchange_segments, False),
            (damage_index, False),
            (cut_index, False),
            (remove_index, False),
            (age_index, False),
        ),
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
