"""The disk tier after the end: clean stops, and hands that meddled. What a crash leaves is test_crashes.py's."""

import random
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvredis.storage.database import unplaced
from kvredis.storage.disk.files import RealFiles
from kvredis.storage.disk.index import INDEX_NAME, Batch, DiskIndex, row_of
from kvredis.storage.disk.segment import HEADER_BYTES, Name, Record, geometry
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.errors import ConfigError
from tests.storage.fake_files import FakeFiles, Fault, Killed, Plan, at, on

from .small_disk import SEGMENT_BYTES, content, got, index_agrees, keys, put, small_disk, taken, written

FILLS_A_SEGMENT = SEGMENT_BYTES - HEADER_BYTES
NAMES = (b"a", b"b", b"c")


def filled(directory: Path) -> None:
    """Leave three blocks of a segment each behind."""
    with closing(small_disk(directory)) as disk:
        for name in NAMES:
            assert put(disk, name, content(name, FILLS_A_SEGMENT))


def sound(disk: DiskTier) -> list[bytes]:
    """The keys whose bytes are as `filled` put them, coldest first."""
    disk.check_integrity()
    return [name for name in keys(disk) if got(disk, name) == content(name, FILLS_A_SEGMENT)]


# ---- clean stops -----------------------------------------------------------------------------------------------------


def test_all_is_there_after_a_clean_stop_in_the_order_of_eviction(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(small_disk(tmp_path)) as disk:
        assert sound(disk) == [b"a", b"b", b"c"]
        assert disk.stats.recovered == 3
        record = disk.get(b"a", 0)
        assert record is not None
        disk.touch(record)
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"b", b"c", b"a"]
        disk.close(order=[(b"a", 0), (b"gone", 0), (b"b", 0)])
        disk.close()
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"c", b"a", b"b"], "who is not named is the coldest"
        assert put(disk, b"d", b"")
        assert keys(disk) == [b"a", b"b", b"d"], "what is written later is hotter than all that was there"


def test_room_that_was_reserved_and_never_written_is_free_after_a_clean_stop(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert put(disk, b"key", b"payload")
        assert disk.place(10_000)[0] is not None
        assert written(disk, b"unpublished", b"payload") is not None
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert keys(disk) == [b"key"]
        assert disk.free_bytes == SEGMENT_BYTES - 4096
        disk.check_integrity()


def test_sequence_numbers_grow_over_restarts_even_if_nothing_was_settled(tmp_path: Path) -> None:
    seen = []
    for number in range(3):
        files = FakeFiles()
        disk = small_disk(tmp_path / str(number), files)
        assert put(disk, b"key", b"payload")
        seen += [record.seq for record in disk.records()]
        files.leave_behind(tmp_path / str(number + 1))
        disk.close()
    assert seen == sorted(set(seen))


def test_blocks_whose_time_has_come_are_not_taken_over(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for name, expire_at_ms in ((b"soon", 1000), (b"later", 1001), (b"never", 0), (b"moved", 500)):
            assert put(disk, name, name, expire_at_ms=expire_at_ms)
        assert disk.set_expiry(b"moved", 0, 2000)
        assert not disk.set_expiry(b"nobody", 0, 2000)
    with closing(small_disk(tmp_path, now_ms=1000)) as disk:
        assert keys(disk) == [b"later", b"never", b"moved"]
        assert [record.expire_at_ms for record in disk.records()] == [1001, 0, 2000]
        assert disk.stats.dropped == 1
        disk.check_integrity()


# ---- meddling --------------------------------------------------------------------------------------------------------


def test_a_missing_segment_takes_only_its_own_blocks_along(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "segment-0001.kv").unlink()
    with closing(small_disk(tmp_path)) as disk:
        assert sound(disk) == [b"a", b"c"]
        assert put(disk, b"b", content(b"b", FILLS_A_SEGMENT))
        assert sound(disk) == [b"a", b"c", b"b"], "the segment was begun anew"


def test_a_start_that_may_not_open_all_segments_is_refused_and_costs_none_of_them(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(ConfigError, match="local_disk: cannot be used: Too many open files"):
        small_disk(tmp_path, FakeFiles(on("open segment-0001", Fault.EMFILE)))
    with closing(small_disk(tmp_path)) as disk:
        assert sound(disk) == list(NAMES)


def test_a_shortened_segment_loses_what_lay_beyond_its_end(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"first", b"1")
        assert put(disk, b"second", b"2")
    with open(tmp_path / "segment-0000.kv", "r+b") as file:
        file.truncate(4096 + 4095)
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"first"]
        assert got(disk, b"first") == b"1"
        assert disk.file_bytes == SEGMENT_BYTES
        disk.check_integrity()


def test_a_segment_that_is_cut_while_the_server_runs_is_a_miss(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"key", b"payload")
        with open(tmp_path / "segment-0000.kv", "r+b") as file:
            file.truncate(100)
        assert got(disk, b"key") is None
        assert disk.stats.quarantined == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_bit_that_turned_on_disk_is_a_miss_wherever_it_is(tmp_path: Path, seed: int) -> None:
    filled(tmp_path)
    rng = random.Random(seed)
    with open(tmp_path / "segment-0001.kv", "r+b") as file:
        where = rng.choice((rng.randrange(HEADER_BYTES), rng.randrange(SEGMENT_BYTES)))
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    with closing(small_disk(tmp_path)) as disk:
        assert sound(disk) == [b"a", b"c"]
        assert got(disk, b"b") is None
        assert disk.stats.quarantined == 1
        disk.sync()
        assert disk._index.quarantined()[0][:2] == (b"b", 0)
    with closing(small_disk(tmp_path)) as disk:
        assert sound(disk) == [b"a", b"c"]
        assert taken(disk, FILLS_A_SEGMENT), "after a restart the room is free again"


@pytest.mark.parametrize("damage", [b"this is no database" * 400, b"\xff" * 100], ids=["all", "head"])
def test_a_damaged_index_costs_the_contents_and_no_more(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    with open(tmp_path / INDEX_NAME, "r+b") as file:
        file.write(damage)
    (tmp_path / "notes.txt").write_text("not ours")
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == []
        assert disk.file_bytes == 0
        assert put(disk, b"key", b"payload")
        assert "are discarded" in caplog.text
    assert (tmp_path / "notes.txt").read_text() == "not ours"


def test_pages_of_the_index_that_turn_to_noise_never_make_wrong_bytes(tmp_path: Path) -> None:
    for seed in range(30):
        directory = tmp_path / str(seed)
        filled(directory)
        rng = random.Random(seed)
        with open(directory / INDEX_NAME, "r+b") as file:
            file.seek(rng.randrange(4096, file.seek(0, 2) - 300))
            file.write(rng.randbytes(300))
        with closing(small_disk(directory)) as disk:
            for record in list(disk.records()):
                payload = got(disk, record.key, record.space)
                assert payload is None or payload == content(record.key, FILLS_A_SEGMENT)
            disk.check_integrity()


def with_index(directory: Path, *statements: str) -> None:
    """Do something to the index behind our back."""
    with closing(sqlite3.connect(directory / INDEX_NAME, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_of_two_rows_that_overlap_the_newer_is_kept(tmp_path: Path) -> None:
    filled(tmp_path)
    with_index(tmp_path, "UPDATE records SET segment=0 WHERE key=x'62'")
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"b", b"c"]
        assert sound(disk) == [b"c"]
        disk.check_integrity()


@pytest.mark.parametrize(
    "change",
    [
        *("segment=-1", "segment=99", "segment='x'", "offset=1", "offset=-4096", "offset=4096", "offset='x'"),
        *("length=-5", "length=1<<40", "space=16", "space=-1", "space='x'", "key='text'", "checksum=0"),
        *("expire_at_ms='x'", "seq=1.5"),
    ],
)
def test_rows_that_cannot_be_are_dropped(tmp_path: Path, change: str) -> None:
    filled(tmp_path)
    with_index(tmp_path, f"UPDATE records SET {change} WHERE key=x'62'")
    with closing(small_disk(tmp_path)) as disk:
        assert b"b" not in sound(disk)
        disk.check_integrity()


def test_an_older_format_is_discarded_and_a_newer_one_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with_index(tmp_path, "PRAGMA user_version=2")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"local_disk: it was written in format 2, by a newer kvredis \(got '"):
            small_disk(tmp_path)
    with_index(tmp_path, "PRAGMA user_version=0")
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == []


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    with_index(tmp_path, "CREATE TABLE precious (thing)")
    with pytest.raises(ConfigError, match="another program's database"):
        small_disk(tmp_path)
    with_index(tmp_path, "SELECT * FROM precious")


@pytest.mark.parametrize("words", ["make_directory", "index: schema", "index: begin"])
def test_a_directory_that_cannot_be_used_is_a_named_error_and_let_go(tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match="local_disk: cannot be used: Input/output error"):
        small_disk(tmp_path, FakeFiles(on(words, Fault.EIO)))
    small_disk(tmp_path).close()


def test_a_path_that_is_a_file_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        small_disk(tmp_path / "file")
    with pytest.raises(ConfigError, match="hold nothing"):
        DiskTier.open(DiskOptions(tmp_path, 4095))


def test_a_smaller_limit_keeps_what_fits_and_gives_the_rest_back(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(small_disk(tmp_path, segments=2)) as disk:
        assert sound(disk) == [b"a", b"b"]
        assert not (tmp_path / "segment-0002.kv").exists()
    with closing(DiskTier.open(DiskOptions(tmp_path, SEGMENT_BYTES - 1, False), now_ms=0)) as disk:
        assert keys(disk) == []
        assert disk.limit_bytes < SEGMENT_BYTES
    with closing(DiskTier.open(DiskOptions(tmp_path, 10 * SEGMENT_BYTES, False), now_ms=0)) as disk:
        assert put(disk, b"key", b"payload")
        assert disk.limit_bytes <= 10 * SEGMENT_BYTES


# ---- size ------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_blocks_are_read_in_quickly(tmp_path: Path) -> None:
    blocks, segment_bytes = 100_000, 1 << 20
    limit_bytes = 512 * segment_bytes
    cut = geometry(limit_bytes, 2 * segment_bytes)
    index = DiskIndex.open(tmp_path, RealFiles())
    index.begin_epoch(cut.segment_bytes)
    a_segment = cut.segment_bytes // 4096
    rows = (
        Record(
            b"key %d" % n, unplaced(0), cut.address(n // a_segment, n % a_segment * 4096, 4096), 1, 0, n + 1, bytes(16)
        )
        for n in range(blocks)
    )
    batch = Batch()
    for row in rows:
        batch.note(row.name, row_of(row))
    index.apply(batch, cut, durable=False)
    index.close(())
    for number in range(cut.count):
        (tmp_path / f"segment-{number:04d}.kv").touch()
        with open(tmp_path / f"segment-{number:04d}.kv", "r+b") as file:
            file.truncate(cut.segment_bytes)
    started_s = time.perf_counter()
    disk = DiskTier.open(DiskOptions(tmp_path, limit_bytes, False, 2 * segment_bytes))
    took_s = time.perf_counter() - started_s
    assert len(disk) == blocks
    order = [record.name for record in disk.records()]
    order.reverse()
    started_s = time.perf_counter()
    disk.close(order)
    closing_s = time.perf_counter() - started_s
    print(f"{blocks} records opened in {took_s:.2f} s, closed in {closing_s:.2f} s")
    assert took_s < 5, "about half a second on an idle core; the bound is for a busy machine"
    with closing(DiskTier.open(DiskOptions(tmp_path, limit_bytes, False, 2 * segment_bytes))) as disk:
        assert [record.name for record in disk.records()] == order
        started_s = time.perf_counter()
        disk.rename((b"key 1", 0), (b"key 1", 1))
        assert disk.clear(0) == blocks - 1
        took_s = time.perf_counter() - started_s
        print(f"cleared in {took_s * 1000:.1f} ms")
        assert took_s < 0.5, "some 15 ms, on the event loop; the bound is for a busy machine"
        index_agrees(disk)


# The disk tier after a crash at any step: a kill, or a loss of power. One seeded workload is run as often as it has
# steps (each call of the kernel and each step of the index), dies at each of them in turn, and what is left is
# opened and compared. Which names there are must be just what one of the settled batches said: after a kill the
# last, after a loss of power one since the last `sync`. What lies under a name is, to the bit, what was written as
# that record, or after a loss of power nothing; and a record that `sync` confirmed and that was not dropped since
# is there, under whichever name it has by then.

OPS = 80


SPACES = 2


class Recording(FakeFiles):
    """Takes down which record had which name whenever the index was about to commit that."""

    def __init__(self, plan: Plan | None) -> None:
        super().__init__(plan)
        self.disk: DiskTier | None = None
        self.batches: list[dict[Name, int]] = [{}]
        """Names and sequence numbers as of each commit, the last of which may not have come about."""
        self.durable = 0
        """Which of them no loss of power undoes."""

    def happen(self, what: str) -> Fault | None:
        if self.disk is not None and what == "index: commit":
            self.batches.append({record.name: record.seq for record in self.disk.records()})
        fault = super().happen(what)
        if self.disk is not None and what == "index: durable":
            self.durable = len(self.batches) - 1
        return fault


class Workload:
    """A seeded run of all that changes a disk."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.payloads: dict[int, bytes] = {}
        """What was written as which record."""
        self.confirmed: set[int] = set()
        """The records that were there when `sync` returned last."""

    def run(self, disk: DiskTier) -> None:
        verbs = ("put",) * 6 + ("rename",) * 3 + ("forget", "swap", "clear", "settle", "settle", "sync")
        for number in range(OPS):
            verb = self.rng.choice(verbs)
            key, other = (b"k%d" % self.rng.randrange(6) for _ in range(2))
            space, another = (self.rng.randrange(SPACES) for _ in range(2))
            if verb == "put":
                payload = key + content((number, self.rng.random()), self.rng.choice((20, 3000, 9000)))
                record = written(disk, key, payload, space)
                assert record is not None
                self.payloads[record.seq] = payload
                assert disk.publish(record)
            elif verb == "rename":
                disk.rename((key, space), (other, another))
            elif verb == "forget":
                disk.forget(key, space)
            elif verb == "swap":
                disk.swap(0, 1)
            elif verb == "clear":
                disk.clear(self.rng.choice((0, 1, None)))
            elif verb == "settle":
                assert disk.settle()
            else:
                assert disk.sync()
                self.confirmed = {record.seq for record in disk.records()}


def compare(again: DiskTier, files: Recording, workload: Workload, *, power: bool) -> None:
    """Raise AssertionError unless the batches that were settled explain what was found."""
    found = {record.name: record.seq for record in again.records()}
    assert found in (files.batches[files.durable :] if power else files.batches[-2:])
    kept = {record.seq for record in files.disk.records()} & workload.confirmed if files.disk is not None else set()
    assert kept <= set(found.values())
    for name, seq in found.items():
        payload = got(again, *name)
        assert payload == workload.payloads[seq] or (payload is None and power and seq not in kept), name
    again.check_integrity()


def crash(tmp_path: Path, seed: int, plan: Plan | None, *, segments: int, power: bool) -> list[str]:
    """Run the workload until the plan ends it, open what is left and compare; gives the steps that were made."""
    files = Recording(plan)
    workload = Workload(seed)
    here, there = tmp_path / "here", tmp_path / "there"
    with suppress(Killed):
        files.disk = small_disk(here, files, segments)
        workload.run(files.disk)
    if not here.exists():
        here.mkdir()
        files.directory = here
    files.leave_behind(there, random.Random(seed) if power else None)
    again = small_disk(there, segments=segments)
    try:
        compare(again, files, workload, power=power)
        assert put(again, b"new", b"life goes on")
        assert again.sync()
        assert got(again, b"new") == b"life goes on"
        index_agrees(again)
    finally:
        again.close()
        if files.disk is not None:
            _bury(files.disk)
        shutil.rmtree(here)
        shutil.rmtree(there)
    return files.words


def _bury(disk: DiskTier) -> None:
    """Let go of a dead process' descriptors, as the kernel would."""
    disk._index.abandon()
    for file in disk._segments.values():
        file.close()
    disk._held.close()


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("segments", [1, 4], ids=["evicting", "roomy"])
def test_whichever_step_is_the_last_what_was_confirmed_is_there_and_nothing_is_wrong(
    tmp_path: Path, segments: int, power: bool
) -> None:
    seed = 2 * segments + power
    steps = crash(tmp_path, seed, None, segments=segments, power=power)
    assert len(steps) > 60
    for number, what in enumerate(steps, 1):
        crash(tmp_path, seed, at(number, Fault.TEAR), segments=segments, power=power)
        if what.startswith("pwrite"):
            crash(tmp_path, seed, at(number, Fault.DIE), segments=segments, power=power)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("seed", range(100, 108))
def test_other_runs_that_end_in_the_middle_are_explained_as_well(tmp_path: Path, seed: int, power: bool) -> None:
    steps = crash(tmp_path, seed, None, segments=2, power=power)
    last = random.Random(seed).randrange(10, len(steps))
    crash(tmp_path, seed, at(last, Fault.TEAR), segments=2, power=power)
