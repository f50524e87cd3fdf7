"""A server over a disk tier that is killed time and again under load: nothing confirmed is lost, nothing is wrong.

A dynasty is one directory and the servers that live on it one after the other. Each looks after what the one before has
left, is loaded by several clients for a moment and dies: by SIGKILL, now and then while it starts or saves, or by
SIGTERM alone, after which all that was answered must be there. CRASH_ROUNDS and CRASH_SEED in the environment ask for
more deaths (`make crash`: 300) and for a certain course of things, as far as timing repeats.
"""

import os
import random
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.faults.crash_client import LIMIT_S, Load, Wire, figure, look
from tests.faults.crash_server import CrashServer

ROUNDS: Final = int(os.environ.get("CRASH_ROUNDS", "6"))
SEED: Final = int(os.environ.get("CRASH_SEED", "0")) or random.randrange(1, 2**32)
DYNASTY_ROUNDS: Final = 3
AT_ONCE: Final = 2
CLIENTS: Final = 4
MIB: Final = 1024 * 1024
STILLBORN: Final = 0.1
"""How often a server is killed on its way to being ready."""


class Realm(NamedTuple):
    """How the servers of one dynasty are started; `misses`: the disk is too small for all, so blocks may be missing."""

    flags: Sequence[str]
    segment_bytes: int = 8 * MIB
    misses: bool = False


PATIENT: Final = ("--spill-wait", "15")
"""No block leaves memory unwritten: a client that stores waits for the disk."""

REALMS: Final = (
    Realm((*PATIENT, "--max-local-disk-size", "256MB"), segment_bytes=256 * MIB),
    Realm((*PATIENT, "--max-local-disk-size", "256MB", "--cache-policy", "LFU", "--no-local-cpu")),
    Realm(("--max-local-disk-size", "24MB"), misses=True),
    Realm((*PATIENT, "--max-local-disk-size", "256MB", "--disk-io-threads", "1", "--no-disk-direct")),
)


class Dynasty:
    """One directory and those who have lived on it."""

    def __init__(self, folder: Path, number: int) -> None:
        self._directory = folder / f"dynasty-{number}"
        self._realm = REALMS[number % len(REALMS)]
        self._rng = random.Random(f"{SEED} {number}")
        self.at_stake = 0
        """Confirmed values that had been written over, and the new ones not confirmed, when a server was killed."""
        self._loads = [Load(each, self._rng.randrange(2**32), misses=self._realm.misses) for each in range(CLIENTS)]

    def run(self, rounds: int) -> int:
        """So many deaths, and a last look; gives how often the disk has confirmed something."""
        for number in range(rounds + 1):
            try:
                if self._rng.random() < STILLBORN:
                    self._start().kill_after(self._rng.uniform(0.2, 1.0))
                with self._start() as server:
                    self._look_after(server)
                    if number < rounds:
                        self._die(server)
                    else:
                        assert server.end() == 0, server.log()
            except BaseException as error:
                error.add_note(f"CRASH_SEED={SEED}, {self._directory.name}, round {number}, {self._realm}")
                raise
        shutil.rmtree(self._directory)  # what a failure leaves is kept; hundreds of directories would fill a disk
        return sum(load.saved for load in self._loads)

    def _start(self) -> CrashServer:
        return CrashServer(self._directory, self._realm.flags, segment_bytes=self._realm.segment_bytes)

    def _look_after(self, server: CrashServer) -> None:
        """Check a server that no client has written to: what it has is what the last one left."""
        for load in self._loads:
            seen = look(server.port, load.writes.names())
            try:
                load.writes.compare(seen, misses=self._realm.misses)
            except AssertionError as error:
                error.add_note("\n".join(map(repr, load.journal)))
                raise
            load.journal.append(["-- looked at --"])
        wire = Wire(server.port)
        quarantined = figure(wire, b"disk", b"quarantined")
        wire.close()
        assert not quarantined, "what a killed process wrote is all there"

    def _die(self, server: CrashServer) -> None:
        threads = [threading.Thread(target=load.run, args=(server.port,)) for load in self._loads]
        for thread in threads:
            thread.start()
        threads[0].join(self._rng.uniform(0.1, 0.8))
        hung_up = [load.trouble for load, thread in zip(self._loads, threads, strict=True) if not thread.is_alive()]
        assert not hung_up, f"clients that were sent away: {hung_up}; {server.log()}"
        death = self._rng.choices(("kill", "end", "both"), (14, 4, 3))[0]
        if death == "end":
            assert server.end() == 0, server.log()
        else:
            if death == "both":
                server.process.terminate()
            server.kill_after(self._rng.uniform(0.0, 0.2) if death == "both" else 0.0)
        for thread in threads:
            thread.join(2 * LIMIT_S)
            assert not thread.is_alive()
        for load in self._loads:
            if load.trouble is not None:
                raise load.trouble
            self.at_stake += load.writes.at_stake() if death != "end" else 0
            if death == "end" and not self._realm.misses:
                load.writes.confirm(load.acknowledged)


def test_a_server_that_is_killed_time_and_again_loses_nothing_confirmed_and_serves_nothing_wrong(
    tmp_path: Path,
) -> None:
    dynasties = [Dynasty(tmp_path, number) for number in range(-(-ROUNDS // DYNASTY_ROUNDS))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        confirmed = list(pool.map(lambda each: each.run(DYNASTY_ROUNDS), dynasties))
    at_stake = sum(each.at_stake for each in dynasties)
    deaths = f"{len(dynasties) * DYNASTY_ROUNDS} deaths, {sum(confirmed)} confirmations"
    print(f"{deaths}, {at_stake} confirmed values written over at the time, CRASH_SEED={SEED}")
    assert sum(confirmed) > ROUNDS // 3, "the disk was hardly ever asked"
