"""Everything at once: random walks over the disk tier, alone against a dict, and in several threads."""

import random
import sqlite3
import threading
from pathlib import Path

import pytest

from kvredis.storage.disk.segment import Facts, Name
from kvredis.storage.disk.tier import DiskTier
from tests.storage.fake_files import FakeFiles, Fault

from .small_disk import content, got, image_of, index_agrees, put, small_disk

SPACES = 3


class Model:
    """A disk tier and the dict that it should be, changed together by what an event loop may ask at any moment."""

    def __init__(self, disk: DiskTier, rng: random.Random) -> None:
        self.disk = disk
        self.rng = rng
        self.payloads: dict[Name, bytes] = {}

    def name(self) -> Name:
        return b"k%d" % self.rng.randrange(12), self.rng.randrange(SPACES)

    def decide(self) -> None:
        """Forget, rename, exchange or clear something."""
        name, other = self.name(), self.name()
        verb = self.rng.choice(("forget", "rename", "rename", "rename", "swap", "clear", "clear all", "expiry"))
        if verb == "forget":
            assert self.disk.forget(*name) == (self.payloads.pop(name, None) is not None)
        elif verb == "rename":
            assert self.disk.rename(name, other) == (name in self.payloads)
            if name in self.payloads:
                self.payloads[other] = self.payloads.pop(name)
        elif verb == "swap":
            self.disk.swap(name[1], other[1])
            places = {name[1]: other[1], other[1]: name[1]}
            self.payloads = {(key, places.get(space, space)): each for (key, space), each in self.payloads.items()}
        elif verb == "expiry":
            assert self.disk.set_expiry(*name, self.rng.randrange(1, 100)) == (name in self.payloads)
        elif verb == "clear" or self.rng.random() < 0.3:
            space = name[1] if verb == "clear" else None
            gone = [each for each in self.payloads if space in (None, each[1])]
            assert self.disk.clear(space) == len(gone)
            for each in gone:
                del self.payloads[each]

    def put(self, payload: bytes) -> None:
        key, space = self.name()
        extent, left = self.disk.place(len(payload))
        for gone in left:
            del self.payloads[gone.name]
        record = extent and self.disk.write(extent, image_of(payload), Facts(key, space, len(payload), 0))
        if record:
            assert self.disk.publish(record)
            self.payloads[key, space] = payload

    def compare(self) -> None:
        name = self.name()
        assert got(self.disk, *name) == self.payloads.get(name)
        assert {record.name for record in self.disk.records()} == set(self.payloads)
        self.disk.check_integrity()


class Meddling(FakeFiles):
    """Lets the event loop decide things while the index is being written, which sometimes fails; so do writes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.model: Model | None = None
        """Whose decisions come in between; None = none do, and the index does not fail either."""

    def happen(self, what: str) -> Fault | None:
        if what.startswith("pwrite") and self.rng.random() < 0.01:
            self.plan = lambda *_: Fault.EIO
        try:
            super().happen(what)
        finally:
            self.plan = None
        if self.model is not None and what == "index: commit":
            for _ in range(self.rng.randrange(4)):
                self.model.decide()
            if self.rng.random() < 0.3:
                raise sqlite3.OperationalError("the fake fails")
        return None


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_agrees_with_a_dict_and_the_index_with_memory(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = Meddling(rng)
    model = Model(small_disk(tmp_path, files), rng)
    failed = 0
    for step in range(400):
        verb = rng.choice(("put", "put", "put", "put", "decide", "decide", "settle", "sync", "touch", "reopen"))
        if verb == "put":
            model.put(content(step, rng.choice((10, 4000, 9000, 30_000))))
        elif verb == "decide":
            model.decide()
        elif verb == "touch" and (found := model.disk.get(*model.name())) is not None:
            model.disk.touch(found)
        elif verb in ("settle", "sync"):
            files.model = model
            failed += not (model.disk.settle() if verb == "settle" else model.disk.sync())
            files.model = None
            if rng.random() < 0.5:
                index_agrees(model.disk)
        elif verb == "reopen" and rng.random() < 0.2:
            order = [each.name for each in model.disk.records()]
            model.disk.close()
            model.disk = small_disk(tmp_path, files)
            assert [each.name for each in model.disk.records()] == order
            index_agrees(model.disk)
        model.compare()
    assert failed, "the walk met the failures that it is about"
    model.disk.close()


def test_threads_that_write_read_and_forget_never_see_wrong_bytes(tmp_path: Path) -> None:
    disk = small_disk(tmp_path, segments=4)
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for step in range(120):
            key = b"k%d" % rng.randrange(6)
            verb = rng.randrange(5)
            if verb < 2:
                length = rng.choice((100, 20_000))
                put(disk, key, key + content(f"{seed} {step}", length))
            elif verb == 4:
                disk.forget(key, 0)
            elif (payload := got(disk, key)) is not None and not payload.startswith(key):
                failures.append(f"{key!r} got {payload[:4]!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert disk.stats.quarantined == 0
    disk.check_integrity()
    disk.close()
