"""The world ends at every single step that a Store over a disk makes: what was confirmed is there, nothing is wrong.

One seeded script of writes, deletes, renames, flushes and WAITAOFs runs as often as it has steps, each call of the
kernel and each step of the index being one, and dies at another of them each time. Then what that leaves behind is
opened again: the directory as it is, or, for a loss of power, without some of what was not yet synced.
"""

import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX
from kvredis.storage.store import Store
from tests.faults.crash_model import VALUE_BYTES_MIN, Held, Name, Writes, value
from tests.faults.disk_store import KIB, bury, look, look_at_all, open_store, run_jobs, save, tiering_of
from tests.gate import nightly
from tests.storage.fake_files import FakeFiles, Fault, Killed, Plan, at
from tests.storage.small_store import Clock

KEYS: Final = 6
OPS: Final = 90
PATIENCE: Final = 20
"""Jobs that a SET waits for, one after the other; more than that is the disk's fault."""
ROOMY, TIGHT = 10, 2
"""Segments: room for all that the keys can hold and more, and for half of it."""

STRIDE: Final = pytest.mark.parametrize("stride", [pytest.param(5, id="each fifth"), nightly(1, id="each")])
"""Of the steps the gate takes each fifth, which meets every kind of step, and the night all of them."""

VERBS: Final = {
    **{"set": 30, "small": 6, "delete": 5, "rename": 7, "expire": 5, "swap": 3, "flush": 1},
    **{"look": 12, "prefetch": 4, "save": 10, "tick": 14, "later": 5},
}


class IndexFiles(FakeFiles):
    """FakeFiles whose index fails as SQLite says it does, and not once it has committed."""

    def step(self, what: str) -> None:
        try:
            super().step(what)
        except OSError as error:
            if what in ("index: begin", "index: commit"):
                raise sqlite3.OperationalError("disk I/O error") from error


class Script:
    """The writes of one client, and what else happens, drawn from a seed."""

    def __init__(self, store: Store, clock: Clock, seed: int, *, misses: bool) -> None:
        self.writes = Writes()
        self._store = store
        self._clock = clock
        self._rng = random.Random(seed)
        self._misses = misses

    def run(self, alive: Callable[[], bool]) -> None:
        """All of it, or as much as there is time for."""
        steps = {verb: getattr(self, f"_{verb}") for verb in VERBS}
        for _ in range(OPS):
            verb = self._rng.choices(list(VERBS), list(VERBS.values()))[0]
            steps[verb](self._name())
            run_jobs(self._store, self._rng.choice((0, 0, 1, 3)))
            if not alive():
                return
            self._store.check_integrity()
        self._save(self._name())

    def _name(self) -> Name:
        return b"key %d" % self._rng.randrange(KEYS), self._rng.randrange(2)

    def _length(self) -> int:
        return self._rng.choice((self._rng.randrange(INLINE_BYTES_MAX, 40 * KIB), self._rng.randrange(40, 100) * KIB))

    def _set(self, name: Name) -> None:
        length = self._length()
        reservation = None
        for _ in range(PATIENCE):  # who waits asks again whenever a block has been written
            reservation = self._store.reserve(name[0], length, name[1], drop=False)
            if reservation is not None or not run_jobs(self._store) or not self._alive():
                break
        if reservation is None and self._misses:
            reservation = self._store.reserve(name[0], length, name[1])
        if not self._alive():
            return
        assert reservation is not None, "no thread makes room, and no caller is told"
        expire_at_ms = self._end()
        reservation.view[:] = value(self.writes.set(name, expire_at_ms), length)
        reservation.commit(expire_at_ms)

    def _small(self, name: Name) -> None:
        length = self._rng.randrange(VALUE_BYTES_MIN, INLINE_BYTES_MAX)
        expire_at_ms = self._end()
        assert self._store.put(name[0], value(self.writes.set(name, expire_at_ms), length), name[1], expire_at_ms)

    def _end(self) -> int:
        return self._clock.ms() + self._rng.randrange(1000, 20_000) if self._rng.random() < 0.2 else 0

    def _delete(self, name: Name) -> None:
        self.writes.delete([name])
        self._store.delete([name[0]], name[1])

    def _rename(self, name: Name) -> None:
        new = self._name()
        if name != new and self._is_there(name):
            self.writes.rename(name, new)
            assert self._store.move(name, new)

    def _expire(self, name: Name) -> None:
        if self._is_there(name):
            at_ms = self._end()
            self.writes.expire(name, at_ms)
            assert self._store.expire(name[0], at_ms, name[1])

    def _swap(self, _: Name) -> None:
        self.writes.swap(0, 1)
        self._store.swap(0, 1)

    def _flush(self, name: Name) -> None:
        self.writes.delete([each for each in self.writes.names() if each[1] == name[1]])
        self._store.flush(name[1])

    def _look(self, name: Name) -> None:
        self._compare(name)

    def _prefetch(self, name: Name) -> None:
        tiering_of(self._store).prefetch([b"key %d" % number for number in range(3)], name[1])

    def _save(self, _: Name) -> None:
        sent = self.writes.sent
        if save(self._store):
            self.writes.confirm(sent)

    def _tick(self, _: Name) -> None:
        self._clock.now_s += 1
        self._store.collect_expired()
        tiering_of(self._store).tick()

    def _later(self, _: Name) -> None:
        run_jobs(self._store)

    def _is_there(self, name: Name) -> bool:
        """Whether a name holds something still."""
        if self._store.find(*name) is not None:
            return True
        if self.writes.latest(name).ident:
            self._compare(name)  # so that the model learns of it
        return False

    def _compare(self, name: Name) -> None:
        expected, found = self.writes.latest(name), look(self._store, name)
        if not self._alive():
            return
        assert found is not None, f"{name} is there and cannot be had"
        if found != expected:
            assert not found.ident, f"{name} holds {found} instead of {expected}"
            assert expected.is_over(self._clock.ms()) or self._misses, f"{name} is lost"
            self.writes.vanished(name)

    def _alive(self) -> bool:
        files = tiering_of(self._store).disk._files
        return not (isinstance(files, FakeFiles) and files.dead)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in memory where there is one: SQLite would sync a real one thousands of times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def play(folder: Path, seed: int, plan: Plan | None, *, segments: int, power: bool, ends: bool = True) -> list[str]:
    """Run the script until the plan ends it (or, unless it `ends`, in spite of it), open what is left and compare;
    gives the steps that were made."""
    here, there = folder / "here", folder / "there"
    files, clock = IndexFiles(), Clock()
    store = open_store(here, files, clock, segments)
    files.plan, files.words = plan, []
    misses = segments == TIGHT or not ends
    script = Script(store, clock, seed, misses=misses)
    script.run(lambda: not files.dead)
    closed = False
    if not files.dead and not store.unsaved:
        with suppress(Killed):
            store.close()
            closed = True
    files.leave_behind(there, random.Random(seed) if power else None)
    if not closed:
        bury(store)
    clock.now_s += random.Random(seed).choice((0, 5))
    again = open_store(there, None, clock, segments)
    try:
        script.writes.compare(look_at_all(again, script.writes.names(), clock), misses=misses)
        quarantined = tiering_of(again).disk.stats.quarantined
        assert power or not ends or not quarantined, "what a killed process wrote is all there"
        again.check_integrity()
        assert again.put(b"new", value(1 << 40, 50_000))
        assert save(again)
        assert look(again, (b"new", 0)) == Held(1 << 40)
        again.check_integrity()
        tiering_of(again).disk.check_integrity()
    finally:
        bury(again)
        shutil.rmtree(here)
        shutil.rmtree(there)
    return files.words


@pytest.mark.parametrize(
    ("segments", "power"),
    [
        pytest.param(ROOMY, True, id="roomy-power lost"),
        pytest.param(TIGHT, False, id="evicting-killed"),
        nightly(ROOMY, False, id="roomy-killed"),
        nightly(TIGHT, True, id="evicting-power lost"),
    ],
)
@STRIDE
def test_a_store_comes_back_right_whichever_step_was_its_last(
    folder: Path, segments: int, power: bool, stride: int
) -> None:
    seed = 10 + segments + power
    steps = play(folder, seed, None, segments=segments, power=power)
    assert {step.split()[0] for step in steps} >= {"pwrite", "pread", "sync", "allocate", "index:"}
    for number in range(1, len(steps) + 1, stride):
        play(folder, seed, at(number, Fault.TEAR), segments=segments, power=power)


@pytest.mark.parametrize("segments", [nightly(ROOMY, id="roomy"), pytest.param(TIGHT, id="evicting")])
@STRIDE
def test_a_store_survives_a_fault_at_any_step_without_a_wrong_byte(folder: Path, segments: int, stride: int) -> None:
    steps = play(folder, 30, None, segments=segments, power=False)
    faults = (Fault.EIO, Fault.ENOSPC, Fault.HALF, Fault.FLIP)
    for number, what in list(enumerate(steps, 1))[::stride]:
        fault = faults[number % 4] if what.startswith("pwrite") else faults[number % 2]
        play(folder, 30, at(number, fault), segments=segments, power=False, ends=False)
