"""The random walk over a store with a disk, with GPU memory beside: blocks are written and leased there too."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvredis.storage.entry import INLINE_BYTES_MAX
from kvredis.storage.memory import cuda
from kvredis.storage.memory.device_arena import DeviceArena
from kvredis.storage.tiering.gpu import GpuLease, GpuReservation, GpuTier
from kvredis.storage.tiering.manager import Bringing
from tests.gate import nightly
from tests.stand_in_cuda import stand_in_cuda
from tests.storage.test_random_walk_tiers import HOLDS_MAX, Terrain, Value, Walk
from tests.storage.tiered_store import MIB, TieredStore

from .fake_io import ManualIo

STEPS = 800
FAULT_PART = 0.02
"""How often the next copy of the GPU fails."""


class GpuWalk(Walk):
    """As Walk; some writers and readers are on the GPU."""

    def __init__(self, terrain: Terrain, directory: Path, fails: Path) -> None:
        self.fails = fails
        self.copies = False  # the GPU's threads are at work
        self.alone = False  # none comes in between
        self.gpu_writers: list[tuple[GpuReservation, bytes]] = []
        self.gpu_leases: list[tuple[GpuLease, bytes]] = []
        self.swaps = 0
        super().__init__(terrain, directory)

    def open(self) -> TieredStore:
        tiers = super().open()
        self.gpu_writers, self.gpu_leases = [], []  # of a store before this one
        self.gpu_io = ManualIo()
        self.gpu_io.clock = tiers.clock
        self.gpu = tiers.store.gpu = GpuTier(tiers.store, DeviceArena.create(2 * MIB), self.gpu_io)
        tiers.tiering.gpu = self.gpu
        self.gpu_run = self.gpu_io.run
        disk_run, gpu_run = tiers.io.run, self.gpu_turn
        for name in ("read", "write"):
            setattr(self.gpu.arena, name, partial(self.copy, getattr(self.gpu.arena, name)))

        def run(jobs_max: int = 1 << 40) -> int:
            """Run jobs of both, by turns, until there is none."""
            count = 0
            while count < jobs_max and (done := disk_run(1) + gpu_run(1)):
                count += done
            return count

        tiers.io.run = run  # type: ignore[method-assign]
        return tiers

    def gpu_turn(self, jobs_max: int) -> int:
        """Run jobs of the GPU's threads."""
        self.copies = True
        try:
            return self.gpu_run(jobs_max)
        finally:
            self.copies = False

    def copy(self, move: Callable[[int, memoryview], None], offset: int, memory: memoryview) -> None:
        """Copy a block; another thread comes in between."""
        if self.copies and not (self.nested or self.alone) and self.rng.random() < 0.3:
            self.nested = True
            with self.noted():
                self.act()
            self.nested = False
        move(offset, memory)

    def bring(self) -> None:
        """What is waited for comes, if it is still what its name holds, there is room and nothing fails."""
        names = [self.name() for _ in range(self.rng.randrange(1, 5))]
        wanted = {name: self.store.find(*name) for name in names}
        swaps = self.swaps

        def told(bringing: Bringing) -> None:
            self.told.append(bringing)
            if bringing.refused or self.terrain.faults or self.swaps != swaps:
                return
            with self.noted():
                for name, entry in wanted.items():
                    there = entry is None or entry.is_resident or self.store.index.get(*name) is not entry
                    assert there, f"{name} was waited for and has not come"

        bringing = self.tiers.tiering.bring(names, told)
        self.follow()
        self.waits += [] if bringing is None else [bringing]
        if len(self.waits) > HOLDS_MAX:
            self.waits.pop(0).release()

    def swap(self) -> None:
        super().swap()
        self.swaps += 1

    def bytes_at(self, offset: int, length: int) -> bytes:
        """What lies on the GPU, as a client that maps it sees it."""
        fd = self.gpu.arena.share()
        with DeviceArena.attach(fd, self.gpu.arena.nbytes, 1) as mapped, open(fd, "rb"):
            found = bytearray(length)
            self.fails.unlink(missing_ok=True)
            mapped.read(offset, found)
            return bytes(found)

    def gpu_reserve(self) -> None:
        (key, space), value = self.name(), self.value()
        value.data = (value.data * (1 + INLINE_BYTES_MAX // len(value.data)))[: 256 * 1024]
        room = self.gpu.reserve(key, len(value.data), space, drop=self.rng.random() < 0.3)
        self.follow()
        if room is None:
            self.totals["gpu refused"] += 1
            return
        self.fails.unlink(missing_ok=True)
        self.gpu.arena.write(room.place.offset, value.data)
        if self.rng.random() < 0.8 or len(self.gpu_writers) >= HOLDS_MAX:
            self.commit(room, value)
        else:
            self.gpu_writers.append((room, value.data))

    def gpu_finish(self) -> None:
        if self.gpu_writers:
            room, data = self.gpu_writers.pop(self.rng.randrange(len(self.gpu_writers)))
            assert self.bytes_at(room.place.offset, len(data)) == data, "another writer wrote into it"
            room.is_quiet = self.rng.random() < 0.5
            self.commit(room, Value(data, 0)) if self.rng.random() < 0.7 else room.abort()

    def gpu_lease(self) -> None:
        name = self.name()
        value, lease = self.visible(name), self.gpu.lease(*name, 5.0)
        self.follow()
        if lease is None:
            return
        assert value is not None
        assert lease.length == len(value.data)
        assert self.bytes_at(lease.offset, lease.length) == value.data
        if len(self.gpu_leases) < HOLDS_MAX and self.rng.random() < 0.5:
            self.gpu_leases.append((lease, value.data))
        else:
            assert lease.release()

    def gpu_release(self) -> None:
        if self.gpu_leases:
            self.gpu_leases.pop(self.rng.randrange(len(self.gpu_leases)))[0].release()

    def gpu_lift(self) -> None:
        entries = [entry for _ in range(3) if (entry := self.store.find(*self.name())) is not None]
        self.follow()
        self.gpu.lift(entries)

    def gpu_work(self) -> None:
        self.tiers.io.run(5)

    def pass_time(self) -> None:
        super().pass_time()
        self.gpu.tick()

    def act(self) -> None:
        if self.terrain.faults and self.rng.random() < FAULT_PART:
            self.fails.write_text("1")
        steps: list[tuple[Callable[[], None], int]] = [
            (super().act, 60), (self.gpu_reserve, 20), (self.gpu_finish, 4), (self.gpu_lease, 12),
            (self.gpu_release, 6), (self.gpu_lift, 8), (self.gpu_work, 0 if self.nested else 8),
        ]  # fmt: skip
        self.follow()
        self.rng.choices([step for step, _ in steps], [weight for _, weight in steps])[0]()
        self.follow()
        self.check()

    def check(self) -> None:
        super().check()
        for lease, data in self.gpu_leases:
            assert not lease.held or self.bytes_at(lease.offset, lease.length) == data, "a writer wrote under a reader"

    def let_go(self) -> None:
        for lease, _ in self.gpu_leases:
            lease.release()
        for room, _ in self.gpu_writers:
            room.is_quiet = True
            room.abort()
        self.gpu_leases, self.gpu_writers = [], []
        self.fails.unlink(missing_ok=True)
        super().let_go()
        self.clock.now_s += 11
        self.gpu.tick()
        gpu = self.gpu
        assert gpu.holds == gpu.reserved_bytes == gpu.retired_bytes == gpu.abandoned_bytes == 0
        assert not len(gpu.transfers)
        self.totals.update(gpu.stats.as_dict())

    def end(self) -> None:
        self.alone = True
        super().end()
        assert self.gpu.allocator.free_bytes == self.gpu.arena.nbytes
        self.totals.update(self.gpu.stats.as_dict())


TERRAINS = [
    Terrain(1),
    nightly(Terrain(2, disk_bytes=8 * MIB)),
    Terrain(3, faults=True),
    nightly(Terrain(4, "S3FIFO")),
    nightly(Terrain(5, "MRU", faults=True)),
    nightly(Terrain(6, "LFU", keep=False)),
    Terrain(7, "FIFO", evicts=False, disk_bytes=32 * MIB),
    nightly(Terrain(8, keep=False, faults=True)),
    nightly(Terrain(9, "VOLATILE-LRU")),
    Terrain(16, "LFU", keep=False, disk_bytes=8 * MIB),
    Terrain(47, "MRU", disk_bytes=4 * MIB),
]


@pytest.mark.parametrize("terrain", TERRAINS, ids=str)
def test_a_store_with_a_gpu_and_a_disk_agrees_with_a_dict_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terrain: Terrain
) -> None:
    fails = tmp_path / "fails"
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(fails))
    walk = GpuWalk(terrain, tmp_path / "disk", fails)
    try:
        for step in range(STEPS):
            walk.act()
            if step % 200 == 199:
                walk.restart()
        walk.end()
    finally:
        walk.tiers.store.close(save=False)
    totals = walk.totals
    assert (
        min(totals[name] for name in ("stored", "leased_blocks", "promoted", "spilled", "unloaded", "saved", "hits"))
        > 0
    ), totals
    assert terrain.evicts or totals["evicted"] == totals["spill_dropped"] == 0
