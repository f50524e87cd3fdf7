"""An engine without a remote whose disk fills up, or fails: it generates on with the same tokens, keeps what memory can
hold, says so, and uses the disk again when that is well.
"""

from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.local import LocalBackend
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.backends.nodes import wait_until
from tests.faults.engine_runs import STORED, Subject, warnings_of
from tests.faults.small_disk import full_disk, grow
from tests.storage.fake_files import FakeFiles, Fault, on

__all__ = ["full_disk"]

MEMORY_BYTES = 1 << 20
SEGMENT_BYTES = 1 << 20
MANY = range(28)
"""Prompts of which memory holds half."""
LINES_MAX = 50
"""Of what a disk tier cannot write or read it logs so many, a line each, and then no more."""


def test_an_engine_whose_own_disk_is_full_keeps_what_its_memory_can_hold(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk: dict[str, Any] = {"local_disk": str(full_disk), "max_local_disk_size": "32MB", "max_local_cpu_size": "1MB"}
    with Subject(None, "layered", **disk) as subject:
        for number in MANY:
            assert subject.ask(number) == 0
        assert subject.ask(MANY[-1]) == STORED
        assert not subject.knows(0)
        assert 1 <= len(warnings_of(caplog)) <= 2, warnings_of(caplog)  # room is asked for again after 256 blocks
        grow(full_disk)

        def is_used_again() -> bool:
            for number in range(40, 60):  # more than memory holds
                subject.ask(number)
            return subject.ask(40) == STORED

        wait_until(is_used_again, "the disk has room and is used again")  # a busy machine may drop some in between
        assert subject.engine.stats.errors == 0


def disk_of(folder: Path, files: FakeFiles) -> LocalBackend:
    """Memory for half of MANY, above a disk for all."""
    store = Store(Arena.create(MEMORY_BYTES, HugepageMode.OFF))
    store.add_disk(DiskTier.open(DiskOptions(folder, 64 << 20, False, SEGMENT_BYTES), files), spill_wait_s=0.2)
    return LocalBackend(store)


def assert_told(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells of the disk, and of nothing else."""
    said = warnings_of(caplog)
    assert 0 < len(said) <= LINES_MAX
    assert all(line.startswith("Disk tier: ") for line in said)


@pytest.mark.nightly  # a real disk that is full: test_an_engine_whose_own_disk_is_full_keeps_what_its_memory_can_hold
@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC], ids=str)
def test_a_disk_that_takes_nothing_leaves_the_engine_its_memory(
    tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    files = FakeFiles()
    with Subject(None, "layered", disk_of(tmp_path, files)) as subject:
        files.plan = on("pwrite", fault)
        for number in MANY:
            assert subject.ask(number) == 0
        assert subject.ask(MANY[-1]) == STORED
        assert not subject.knows(0)
        assert_told(caplog)
        files.plan = None
        for number in range(100, 160):
            assert subject.ask(number) == 0
        assert subject.ask(130) == STORED, "from disk: memory has less than the last twenty"
        assert subject.engine.stats.errors == 0


def test_blocks_that_cannot_be_read_are_computed_and_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FakeFiles()
    with Subject(None, "layered", disk_of(tmp_path, files)) as subject:
        for number in MANY:
            subject.ask(number)
        assert subject.ask(0) == STORED
        files.plan = on("pread", Fault.EIO)
        for number in range(1, 5):
            assert subject.ask(number) == 0
        assert_told(caplog)
        files.plan = None
        for number in range(1, 5):
            assert subject.ask(number) == STORED, "stored again when it was computed"
        assert subject.engine.stats.errors == 0


def test_blocks_that_were_written_wrong_are_never_a_wrong_token(tmp_path: Path) -> None:
    turns = (Fault.HALF, Fault.FLIP, None)
    files = FakeFiles(lambda step, what: turns[step % 3] if "pwrite" in what else None)
    with Subject(None, "layered", disk_of(tmp_path, files)) as subject:
        for number in MANY:
            subject.ask(number)
        found = [subject.ask(number) for number in MANY]
        assert 0 in found
        assert subject.engine.stats.errors == 0
