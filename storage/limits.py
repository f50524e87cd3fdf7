"""Which limit of this machine stops an arena, found before the memory is touched.

A memfd's pages are not charged when it is made: without this check an arena larger than the machine starts well and is
killed by the kernel hours later, when it fills. Only limits that are cheap to read are looked at.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

from .hugepages import PROC_ROOT, SYS_ROOT, meminfo


def memory_obstacle(nbytes: int, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> str | None:
    """Name the limit that leaves less than `nbytes` of ordinary memory, or None if none is known to."""
    available = meminfo(proc_root).get("MemAvailable")
    if available is not None and available < nbytes:
        return f"MemAvailable is {gib(available)}"
    for folder in _cgroup_folders(sys_root, proc_root):
        limit = _limit(folder / "memory.max")
        if limit is not None and limit - _firm_use(folder) < nbytes:
            return f"the memory limit of control group {folder} is {gib(limit)}"
    return _address_space_obstacle(nbytes, proc_root)


def hugetlb_obstacle(nbytes: int, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> str | None:
    """Name the limit that a hugetlb arena of `nbytes` would hit (as SIGBUS on first touch), or None."""
    for folder in _cgroup_folders(sys_root, proc_root):
        for account in ("hugetlb.2MB", "hugetlb.2MB.rsvd"):
            limit = _limit(folder / f"{account}.max")
            if limit is not None and limit - (_limit(folder / f"{account}.current") or 0) < nbytes:
                return f"the 2 MiB hugepage limit of control group {folder} is {gib(limit)}"
    return _address_space_obstacle(nbytes, proc_root)


def gib(nbytes: int) -> str:
    """Write a size for people, in the unit that the configuration speaks."""
    return f"{nbytes / 1024**3:.2f} GiB"


def _address_space_obstacle(nbytes: int, proc_root: Path) -> str | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        mapped = int((proc_root / "self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        mapped = 0
    if soft - mapped < nbytes:
        return f"RLIMIT_AS (ulimit -v) is {gib(soft)}"
    return None


def _cgroup_folders(sys_root: Path, proc_root: Path) -> Iterator[Path]:
    """Yield this process's control group (version 2) and those above it; each may set a limit of its own."""
    root = sys_root / "fs/cgroup"
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return
    folder = root / path.strip("/")
    yield folder
    while folder != root and root in folder.parents:
        folder = folder.parent
        yield folder


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _firm_use(folder: Path) -> int:
    """Give what the group uses less its file cache, which the kernel gives back (it counts shmem as file: not that)."""
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        stat = {}
    cache = max(0, stat.get("file", 0) - stat.get("shmem", 0))
    return max(0, (_limit(folder / "memory.current") or 0) - cache)
