"""Machines for `kvredis doctor`: trees of /proc and sysfs with the files that it reads, as a test wants them."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvredis.cli.main import main
from kvredis.storage.memory.arena import Machine

GIB = 1024**3
POOL = "kernel/mm/hugepages/hugepages-2048kB"


def write(path: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(root: Path) -> Machine:
    """Write a machine with 16 GiB free and an empty 2 MiB pool."""
    machine = Machine(root / "sys", root / "proc")
    set_pool(machine, total=0, free=0)
    write(machine.sys_root / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write(machine.sys_root / "kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]")
    set_meminfo(machine)
    return machine


def set_pool(machine: Machine, total: int, free: int) -> None:
    """Give the machine a pool of 2 MiB pages."""
    for name, count in (("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", 0)):
        write(machine.sys_root / POOL / name, str(count))


def set_meminfo(machine: Machine, *lines: str, available: int = 16 * GIB, page_kib: int = 2048) -> None:
    """Write /proc/meminfo; its own HugePages_Total is another pool's, which no reader may believe."""
    first = f"MemAvailable: {available // 1024} kB\nHugePages_Total: 7\nHugepagesize: {page_kib} kB\n"
    write(machine.proc_root / "meminfo", first + "\n".join(lines))


def set_nodes(machine: Machine, *pools: tuple[int, int]) -> None:
    """Give the machine memory nodes of 64 GiB, each with so many pages and so many of them free."""
    for number, (total, free) in enumerate(pools):
        node = machine.sys_root / f"devices/system/node/node{number}"
        write(node / "meminfo", f"Node {number} MemTotal:       67108864 kB\nNode {number} MemFree: 1 kB")
        write(node / "hugepages/hugepages-2048kB/nr_hugepages", str(total))
        write(node / "hugepages/hugepages-2048kB/free_hugepages", str(free))
    set_pool(machine, sum(total for total, _ in pools), sum(free for _, free in pools))


def run(machine: Machine, *args: str, **env: str) -> Result:
    """Run `kvredis doctor ARGS` on a machine, with no other configuration than this; port 0 unless it says another."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("LMCACHE_", "KVREDIS_")):
                patch.delenv(name)
        given = {"KVREDIS_PORT": "0", "KVREDIS_MAXCLIENTS": "16"} | env
        return CliRunner(env=given).invoke(main, ["doctor", *args], obj=machine)
