"""The disk tier after a crash at any step: a kill, or a loss of power.

One seeded workload is run as often as it has steps (each call of the kernel and each step of the index), dies at each
of them in turn, and what is left is opened and compared. Which names there are must be just what one of the settled
batches said: after a kill the last, after a loss of power one since the last `sync`. What lies under a name is, to the
bit, what was written as that record, or after a loss of power nothing; and a record that `sync` confirmed and that was
not dropped since is there, under whichever name it has by then.
"""

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from kvredis.storage.disk.segment import Name
from kvredis.storage.disk.tier import DiskTier
from tests.storage.fake_files import FakeFiles, Fault, Killed, Plan, at

from .small_disk import content, got, index_agrees, put, small_disk, written

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
