"""Fixture machines (a sysfs and a procfs tree) and, where this machine lets us, real hugepages."""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvredis.storage.memory.arena import Machine
from kvredis.storage.memory.hugepages import HugepagePool
from kvredis.storage.store import Store

from .small_store import Clock, small_store

POOL_FILES = {
    "nr_hugepages": "total",
    "free_hugepages": "free",
    "resv_hugepages": "reserved",
    "nr_overcommit_hugepages": "overcommit",
    "surplus_hugepages": "surplus",
}
NR_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
HUGEPAGES_WANTED = 8

MakeMachine = Callable[..., Machine]


@pytest.fixture
def clock() -> Clock:
    """Time that passes when the test says so."""
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    store = small_store(clock)
    yield store
    store.check_integrity()
    store.close()


@pytest.fixture
def make_machine(tmp_path: Path) -> MakeMachine:
    """Give a function that writes a machine: its 2 MiB pool, THP words, free memory and default hugepage size."""

    def make(
        *,
        shmem: str = "always within_size advise [never] deny force",
        available_kb: int = 1 << 24,
        page_kb: int = 2048,
        **pool: int,
    ) -> Machine:
        sys_root, proc_root = tmp_path / "sys", tmp_path / "proc"
        folder = sys_root / "kernel/mm/hugepages/hugepages-2048kB"
        thp = sys_root / "kernel/mm/transparent_hugepage"
        for path in (folder, thp, proc_root / "self"):
            path.mkdir(parents=True, exist_ok=True)
        for name, field in POOL_FILES.items():
            (folder / name).write_text(f"{pool.get(field, 0)}\n")
        (thp / "shmem_enabled").write_text(shmem + "\n")
        (thp / "enabled").write_text("always [madvise] never\n")
        (proc_root / "meminfo").write_text(
            f"MemTotal:       24576000 kB\nMemAvailable:   {available_kb} kB\n"
            f"HugePages_Total:       7\nHugePages_Free:        7\nHugepagesize:    {page_kb} kB\n"
        )
        return Machine(sys_root, proc_root)

    return make


@pytest.fixture
def real_hugepages() -> Iterator[int]:
    """Have a few free 2 MiB pages in the kernel's pool, and put its size back afterwards; one test at a time, in
    whichever process."""
    with (Path(tempfile.gettempdir()) / "kvredis-tests-hugepages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = HugepagePool.read()
        try:
            NR_HUGEPAGES.write_text(str(before.pages_to_set(HUGEPAGES_WANTED)))
        except OSError as error:
            pytest.skip(f"hugepages: the pool cannot be grown here ({error})")
        try:
            if HugepagePool.read().available < HUGEPAGES_WANTED:
                pytest.skip("hugepages: the kernel has no contiguous memory for the pool")
            yield HUGEPAGES_WANTED
        finally:
            NR_HUGEPAGES.write_text(str(before.total - before.surplus))
