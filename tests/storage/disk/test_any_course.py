"""Commands in any order on a few keys of two databases, also while a thread waits for the device, and a kill: nothing
confirmed is lost, or found where it never was.

What real servers are tried with (tests/faults/test_crash_rounds.py) in half a second a round, in a twentieth of that. A
failure says what was done; CRASH_SEED repeats it.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.faults.crash_model import NOTHING, Held, Name, Seen, Writes, ident_of, value
from tests.storage.tiered_store import TieredStore

SEED: Final = int(os.environ.get("CRASH_SEED", "0")) or random.randrange(1, 2**32)
STEPS_MAX: Final = 24
KEYS: Final = (b"a", b"b")
LENGTHS: Final = (60, 9_000)  # kept beside the arena, and in it
HOUR_MS: Final = 3_600_000


class Course:
    """One store, what was done to it, and what may be found when it is killed."""

    def __init__(self, folder: Path, seed: str) -> None:
        self._folder = folder
        self._rng = random.Random(seed)
        self._writes = Writes()
        self._tiers = TieredStore(folder / "here")
        self._store = self._tiers.store
        self._commands: Callable[[], None]
        self.steps: list[str] = []

    def run(self) -> None:
        """Some steps, a kill, and a look at what it has left."""
        rng = self._rng
        writes = (self._set, self._delete, self._rename, self._copy, self._expire, self._swap, self._flush)
        threads = (self._spill, self._settle, self._tick, self._save)
        self._commands = lambda: rng.choices(writes, (8, 3, 3, 2, 2, 6, 0.5))[0]()
        for _ in range(3):
            self._set()
        self._save()
        for _ in range(rng.randrange(4, STEPS_MAX)):
            rng.choices((self._commands, *threads), (25, 4, 4, 0.5, 0.5))[0]()
            if rng.random() < 0.3:
                self._tiers.during(rng.choice(("pwrite", "index: begin", "index: commit", "sync")), self._meanwhile)
        self._tiers.files.plan = None
        self._tiers.files.leave_behind(self._folder / "there")
        names = [(key, space) for space in range(2) for key in KEYS]
        with TieredStore(self._folder / "there", clock=self._tiers.clock) as again:
            now_ms = self._tiers.clock.ms()
            seen = {}
            for name in names:
                found = again.get(*name)
                entry = again.store.find(*name)
                held = NOTHING if found is None or entry is None else Held(ident_of(found), entry.expire_at_ms)
                seen[name] = Seen(held, now_ms, now_ms)
        self._writes.compare(seen, misses=False)
        with self._tiers:
            self._tiers.check()

    def _meanwhile(self) -> None:
        """Clients go on while a thread waits for the device."""
        self._note("- meanwhile")
        for _ in range(self._rng.randrange(1, 4)):
            self._commands()
        self._note("- then")

    def _name(self) -> Name:
        return self._rng.choice(KEYS), self._rng.randrange(2)

    def _note(self, *words: object) -> None:
        self.steps.append(" ".join(map(str, words)))

    def _set(self) -> None:
        name = self._name()
        ident = self._writes.set(name)
        self._note("SET", name, ident)
        assert self._store.put(name[0], value(ident, self._rng.choice(LENGTHS)), name[1])

    def _delete(self) -> None:
        name = self._name()
        self._writes.delete([name])
        self._note("DEL", name, self._store.delete([name[0]], name[1]))

    def _rename(self) -> None:
        old, new = self._name(), self._name()
        if old != new and self._writes.latest(old).ident:
            self._writes.rename(old, new)
            self._note("RENAME", old, new)
            self._store.move(old, new)

    def _copy(self) -> None:
        """SETRANGE or APPEND, as the store sees it: another value in the place of one, with its end."""
        name = self._name()
        before = self._writes.latest(name)
        if before.ident:
            ident = self._writes.set(name, before.expire_at_ms)
            self._note("SET KEEPTTL", name, ident)
            assert self._store.put(name[0], value(ident, self._rng.choice(LENGTHS)), name[1], before.expire_at_ms)

    def _expire(self) -> None:
        name = self._name()
        if self._writes.latest(name).ident:
            at_ms = self._rng.choice((0, self._tiers.clock.ms() + HOUR_MS + len(self.steps)))
            self._writes.expire(name, at_ms)
            self._note("PEXPIREAT", name, at_ms)
            self._store.expire(name[0], at_ms, name[1])

    def _swap(self) -> None:
        self._writes.swap(0, 1)
        self._note("SWAPDB")
        self._store.swap(0, 1)

    def _flush(self) -> None:
        space = self._rng.randrange(2)
        self._writes.delete([name for name in self._writes.names() if name[1] == space])
        self._note("FLUSHDB", space)
        self._store.flush(space)

    def _spill(self) -> None:
        name = self._name()
        entry = self._store.index.spaces[name[1]].get(name[0])
        if entry is not None and self._store.is_unsaved(entry):
            self._note("spill", name)
            self._tiers.tiering.spill([entry])
            self._tiers.io.run()

    def _settle(self) -> None:
        self._note("settle", self._tiers.disk.settle())

    def _tick(self) -> None:
        self._tiers.clock.now_s += 2
        self._tiers.tiering.tick()
        self._tiers.io.run()
        self._note("tick")

    def _save(self) -> None:
        sent = self._writes.sent
        assert self._tiers.save()
        self._note("WAITAOF")
        self._writes.confirm(sent)


@pytest.mark.parametrize("courses", [60, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_whatever_is_done_before_a_kill_each_name_is_found_as_it_was_or_became(tmp_path: Path, courses: int) -> None:
    for number in range(courses):
        course = Course(tmp_path / str(number), f"{SEED} {number}")
        try:
            course.run()
        except BaseException as error:
            error.add_note(f"CRASH_SEED={SEED}, course {number}:\n" + "\n".join(course.steps))
            raise
