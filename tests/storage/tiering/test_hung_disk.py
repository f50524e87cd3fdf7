"""The end of a store whose disk has stopped answering: it comes, and says so."""

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.storage.fake_files import FakeFiles, Fault
from tests.storage.small_store import ARENA_BYTES, content
from tests.storage.tiered_store import MIB

HUNG_AFTER_S = 0.3
LONG_S = 60.0


class HungDisk:
    """A store over a disk, with threads, that hangs at a step of the given kind until `woken`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.woken = threading.Event()
        self.hangs = threading.Event()
        self._kind = kind
        files = FakeFiles(self._happen)
        disk = DiskTier.open(DiskOptions(folder, 4 * MIB, False, MIB), files, 0)
        self.store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
        self.store.add_disk(disk, io_threads=2)
        assert self.store.tiering is not None
        self.tiering = self.store.tiering
        self.tiering.hung_after_s = HUNG_AFTER_S
        assert self.store.put(b"key", content(1))
        self._armed = True

    _armed = False

    def _happen(self, _: int, what: str) -> Fault | None:
        if self._armed and what.startswith(self._kind):
            self.hangs.set()
            assert self.woken.wait(LONG_S)
        return None


@pytest.fixture(params=["pwrite", "sync segment", "index: begin", "index: commit"])
def hung(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HungDisk]:
    hung = HungDisk(tmp_path, request.param)
    yield hung
    hung.woken.set()


@pytest.mark.parametrize("save", [True, False], ids=["saving", "not saving"])
def test_a_store_ends_behind_a_disk_that_hangs_and_says_so(
    hung: HungDisk, save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    hung.tiering.saving.save(0, told.append)
    assert hung.hangs.wait(LONG_S)
    with caplog.at_level(logging.WARNING):
        hung.store.close(save=save)
    assert told == [False], "who waits for a save hears"
    assert any("the device does not answer" in message for message in caplog.messages)


def test_a_store_that_hangs_only_while_its_disk_is_closed_ends_too(tmp_path: Path) -> None:
    hung = HungDisk(tmp_path, "index: commit")
    assert hung.tiering.disk.unsettled is False
    hung.store.close(save=False)
    assert hung.hangs.is_set()
    hung.woken.set()


def test_a_device_that_is_slow_and_answers_is_waited_for(tmp_path: Path) -> None:
    """Ten writes, each of which takes longer than a third of what a hung one is given."""
    hung = HungDisk(tmp_path, "nothing")
    writing = threading.Event()

    def slowly(_: int, what: str) -> Fault | None:
        if what.startswith("pwrite"):
            writing.wait(HUNG_AFTER_S / 3)
        return None

    files = hung.tiering.disk._files
    assert isinstance(files, FakeFiles)
    files.plan = slowly
    for number in range(10):
        assert hung.store.put(b"n:%d" % number, content(number))
    hung.store.close(save=True)
    with closing(DiskTier.open(DiskOptions(tmp_path, 4 * MIB, False, MIB), None, 0)) as disk:
        assert len(disk) == 11
