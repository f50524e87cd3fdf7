"""The pool's facts and the advice drawn from them, on fixture machines."""

import shutil
from pathlib import Path

import pytest

from kvredis.storage.memory.hugepages import (
    HugepagePool,
    anonymous_thp,
    meminfo,
    pages_needed,
    shmem_thp,
    shmem_thp_usable,
    shortage_text,
)
from kvredis.storage.memory.memory_limits import hugetlb_obstacle, memory_obstacle
from tests.storage.conftest import MakeMachine

GIB = 1024**3


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(5 * GIB, 2560), (1, 1), (2 * 1024**2, 1), (2 * 1024**2 + 1, 2), (GIB // 2, 256)]
)
def test_pages_needed_rounds_up(nbytes: int, pages: int) -> None:
    assert pages_needed(nbytes) == pages


def test_the_pool_is_read_from_sysfs_and_not_from_meminfo(make_machine: MakeMachine) -> None:
    machine = make_machine(total=100, free=60, reserved=20, overcommit=8, surplus=3)
    pool = HugepagePool.read(machine.sys_root, machine.proc_root)
    assert meminfo(machine.proc_root)["HugePages_Total"] == 7
    assert (pool.total, pool.free, pool.reserved, pool.supported) == (100, 60, 20, True)
    assert pool.unpromised == 40
    assert pool.available == 45


def test_a_kernel_without_the_pool_is_said_to_be_one(tmp_path: Path) -> None:
    pool = HugepagePool.read(tmp_path, tmp_path)
    assert not pool.supported
    assert pool.available == 0


def test_the_shortage_text_of_an_empty_pool_is_the_public_one(make_machine: MakeMachine) -> None:
    machine = make_machine()
    assert shortage_text(HugepagePool.read(machine.sys_root, machine.proc_root), 5 * GIB) == (
        "Failed to allocate huge pages. Pool has 0 pages (0 free, each 2 MiB). Requested 5.00 GiB (2560 pages). "
        "Run: sysctl -w vm.nr_hugepages=2560"
    )


def test_the_advice_counts_the_pages_that_others_use_or_were_promised(make_machine: MakeMachine) -> None:
    machine = make_machine(total=100, free=60, reserved=20)
    pool = HugepagePool.read(machine.sys_root, machine.proc_root)
    assert pool.pages_to_set(256) == 60 + 256
    assert "Pool has 100 pages (40 free, " in shortage_text(pool, GIB // 2)
    assert pool.pages_to_set(10) == 100, "room enough: never advise to shrink the pool"


def test_the_advice_writes_sysfs_where_the_default_pages_are_larger(make_machine: MakeMachine) -> None:
    machine = make_machine(page_kb=1048576)
    text = shortage_text(HugepagePool.read(machine.sys_root, machine.proc_root), 5 * GIB)
    assert text.endswith("Run: echo 2560 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


@pytest.mark.parametrize(
    ("overall", "own", "word", "usable"),
    [
        ("always within_size advise [never] deny force", None, "never", False),
        ("always within_size advise never [deny] force", "[always] inherit", "deny", False),
        ("always within_size [advise] never deny force", None, "advise", True),
        ("always within_size [advise] never deny force", "always [inherit] never", "advise", True),
        ("always within_size [advise] never deny force", "always inherit [never]", "never", False),
        ("always within_size advise [never] deny force", "always inherit [advise] never", "advise", True),
        ("", None, "never", False),
    ],
)
def test_shmem_thp_follows_the_word_in_brackets(
    make_machine: MakeMachine, overall: str, own: str | None, word: str, usable: bool
) -> None:
    machine = make_machine(shmem=overall)
    if own is not None:
        folder = machine.sys_root / "kernel/mm/transparent_hugepage/hugepages-2048kB"
        folder.mkdir()
        (folder / "shmem_enabled").write_text(own)
    assert shmem_thp(machine.sys_root) == word
    assert shmem_thp_usable(machine.sys_root) is usable
    assert anonymous_thp(machine.sys_root) == "madvise"


def test_too_little_memory_is_named(make_machine: MakeMachine) -> None:
    machine = make_machine(available_kb=1024**2)
    assert memory_obstacle(GIB, machine.sys_root, machine.proc_root) is None
    assert memory_obstacle(GIB + 1, machine.sys_root, machine.proc_root) == "MemAvailable is 1.00 GiB"


def test_a_limit_of_a_control_group_above_ours_is_named(make_machine: MakeMachine) -> None:
    machine = make_machine()
    group = machine.sys_root / "fs/cgroup/pod"
    (group / "container").mkdir(parents=True)
    (machine.proc_root / "self/cgroup").write_text("0::/pod/container\n")
    (group / "memory.max").write_text(f"{2 * GIB}\n")
    (group / "memory.current").write_text(f"{GIB}\n")
    (group / "memory.stat").write_text(f"file {GIB // 2}\nshmem {GIB // 4}\n")
    fits = GIB + GIB // 4  # the file cache that is not shmem comes back
    assert memory_obstacle(fits, machine.sys_root, machine.proc_root) is None
    assert str(group) in str(memory_obstacle(fits + 1, machine.sys_root, machine.proc_root))
    (group / "container/hugetlb.2MB.max").write_text(f"{GIB}\n")
    assert hugetlb_obstacle(GIB, machine.sys_root, machine.proc_root) is None
    assert "2 MiB hugepage limit" in str(hugetlb_obstacle(GIB + 1, machine.sys_root, machine.proc_root))


def test_unlimited_control_groups_and_missing_files_stop_nothing(make_machine: MakeMachine) -> None:
    machine = make_machine()
    (machine.proc_root / "self/cgroup").write_text("12:memory:/old\n0::/\n")
    (machine.sys_root / "fs/cgroup").mkdir(parents=True)
    (machine.sys_root / "fs/cgroup/memory.max").write_text("max\n")
    assert memory_obstacle(GIB, machine.sys_root, machine.proc_root) is None
    shutil.rmtree(machine.proc_root)
    assert memory_obstacle(GIB, machine.sys_root, machine.proc_root) is None
