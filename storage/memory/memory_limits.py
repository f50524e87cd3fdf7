"""Which limit of this machine stops an arena, found before the memory is touched.

A memfd's pages are not charged when it is made: without this check an arena larger than the machine starts well and is
killed by the kernel hours later, when it fills. Only limits that are cheap to read are looked at.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

from .hugepages import PROC_ROOT, SYS_ROOT, meminfo

_V1_UNLIMITED_BYTES = 1 << 60
"""Version 1 of control groups writes "no limit" as the largest whole number of pages."""


def memory_obstacle(nbytes: int, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> str | None:
    """Name the limit that leaves less than `nbytes` of ordinary memory, or None if none is known to."""
    available = meminfo(proc_root).get("MemAvailable")
    if available is not None and available < nbytes:
        return f"MemAvailable is {gib(available)}"
    for folder, limit in group_limits("memory", sys_root, proc_root):
        if limit - _firm_use(folder) < nbytes:
            return f"the memory limit of control group {folder} is {gib(limit)}"
    return _address_space_obstacle(nbytes, proc_root)


def hugetlb_obstacle(nbytes: int, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> str | None:
    """Name the limit that a hugetlb arena of `nbytes` would hit (as SIGBUS on first touch), or None."""
    for account in ("hugetlb.2MB", "hugetlb.2MB.rsvd"):
        for folder, limit in group_limits(account, sys_root, proc_root):
            if limit - _use(folder, account) < nbytes:
                return f"the 2 MiB hugepage limit of control group {folder} is {gib(limit)}"
    return _address_space_obstacle(nbytes, proc_root)


def group_limits(account: str, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> Iterator[tuple[Path, int]]:
    """Yield each control group of this process that bounds an account (memory, hugetlb.2MB, hugetlb.2MB.rsvd), with its
    bytes: files ACCOUNT.max of version 2, ACCOUNT.limit_in_bytes of version 1."""
    for folder in control_groups(account.partition(".")[0], sys_root, proc_root):
        for name in (f"{account}.max", f"{account}.limit_in_bytes"):
            limit = _number(folder / name)
            if limit is not None and limit < _V1_UNLIMITED_BYTES:
                yield folder, limit


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


def control_groups(controller: str, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> Iterator[Path]:
    """Yield this process's control groups of a controller, of either version, and those above them: each may set a
    limit. In a container a path may be the host's, and not there; the container's own group is the root then."""
    try:
        lines = (proc_root / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        root = sys_root / "fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            root /= controllers
        elif number != "0":
            continue
        folder = root / path.strip("/")
        yield folder
        while folder != root and root in folder.parents:
            folder = folder.parent
            yield folder


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _use(folder: Path, account: str) -> int:
    return _number(folder / f"{account}.current") or _number(folder / f"{account}.usage_in_bytes") or 0


def _firm_use(folder: Path) -> int:
    """Give what the group uses less its file cache, which the kernel gives back (it counts shmem as file: not that).
    Version 1 says `total_cache` of a group and those below it."""
    try:
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        stat = {}
    cache, shared = (stat.get(f"total_{name}", stat.get(name, 0)) for name in ("cache", "shmem"))
    return max(0, _use(folder, "memory") - max(0, stat.get("file", cache) - shared))
