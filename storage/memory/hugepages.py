"""What the kernel's 2 MiB hugepage pool and shmem THP have to give, so that the arena can choose before it asks.

The facts come from sysfs, never from HugePages_* in /proc/meminfo: those describe the default pool, which on some
machines holds 1 GiB pages. `vm.nr_hugepages` sets that default pool too, so the advice depends on its page size.
Every reader takes the roots of sysfs and procfs, and tests hand in a tree of their own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

HUGEPAGE_BYTES = 2 * 1024 * 1024
SYS_ROOT = Path("/sys")
PROC_ROOT = Path("/proc")

_POOL = "kernel/mm/hugepages/hugepages-2048kB"
_THP = "kernel/mm/transparent_hugepage"


@dataclass(frozen=True, slots=True)
class HugepagePool:
    """The 2 MiB pool in pages. `free` counts pages that were never touched, `reserved` those of them already
    promised."""

    total: int
    free: int
    reserved: int
    overcommit: int = 0
    surplus: int = 0
    supported: bool = True
    default_page_bytes: int = HUGEPAGE_BYTES

    @classmethod
    def read(cls, sys_root: Path = SYS_ROOT, proc_root: Path = PROC_ROOT) -> Self:
        """Read the pool as it is now; a kernel without 2 MiB hugepages gives an empty one with `supported` False."""
        folder = sys_root / _POOL
        if not folder.is_dir():
            return cls(total=0, free=0, reserved=0, supported=False)
        return cls(
            total=_number(folder / "nr_hugepages"),
            free=_number(folder / "free_hugepages"),
            reserved=_number(folder / "resv_hugepages"),
            overcommit=_number(folder / "nr_overcommit_hugepages"),
            surplus=_number(folder / "surplus_hugepages"),
            default_page_bytes=meminfo(proc_root).get("Hugepagesize", HUGEPAGE_BYTES),
        )

    @property
    def unpromised(self) -> int:
        """Pages of the pool that a new mapping may still reserve."""
        return max(0, self.free - self.reserved)

    @property
    def available(self) -> int:
        """Unpromised pages and those that the kernel may add by itself (nr_overcommit_hugepages)."""
        return self.unpromised + max(0, self.overcommit - self.surplus)

    def pages_to_set(self, pages: int) -> int:
        """Give the pool size that leaves `pages` for a new arena, beside those that others hold or were promised."""
        return max(self.total, self.total - self.unpromised + pages)

    def grow_command(self, pages: int) -> str:
        """Give the shell line (as root) that makes room for `pages` more."""
        count = self.pages_to_set(pages)
        if self.default_page_bytes == HUGEPAGE_BYTES:
            return f"sysctl -w vm.nr_hugepages={count}"
        return f"echo {count} > /sys/{_POOL}/nr_hugepages"


def pages_needed(nbytes: int) -> int:
    """Give the 2 MiB pages that hold `nbytes`: 5 GiB are 2560."""
    return -(-nbytes // HUGEPAGE_BYTES)


def shortage_text(pool: HugepagePool, nbytes: int) -> str:
    """Say what the pool has, what was asked and the line that mends it. The wording is public (CONTRACT)."""
    pages = pages_needed(nbytes)
    return (
        f"Failed to allocate huge pages. Pool has {pool.total} pages ({pool.unpromised} free, each 2 MiB). "
        f"Requested {nbytes / 1024**3:.2f} GiB ({pages} pages). Run: {pool.grow_command(pages)}"
    )


def shmem_thp(sys_root: Path = SYS_ROOT) -> str:
    """Give the word that decides 2 MiB pages in a memfd: always, within_size, advise, force, never or deny.

    Since Linux 6.10 each size has a word of its own, which may say `inherit` (Documentation/admin-guide/mm/transhuge).
    """
    overall = _chosen(sys_root / _THP / "shmem_enabled")
    if overall in ("deny", "force"):
        return overall
    own = _chosen(sys_root / _THP / "hugepages-2048kB" / "shmem_enabled", otherwise="inherit")
    return overall if own == "inherit" else own


def shmem_thp_usable(sys_root: Path = SYS_ROOT) -> bool:
    """Say whether MADV_HUGEPAGE on a memfd can have any effect at all."""
    return shmem_thp(sys_root) not in ("never", "deny")


def anonymous_thp(sys_root: Path = SYS_ROOT) -> str:
    """Give the word for ordinary process memory: always, madvise or never. The arena does not depend on it."""
    return _chosen(sys_root / _THP / "enabled")


def meminfo(proc_root: Path = PROC_ROOT) -> dict[str, int]:
    """Read /proc/meminfo: sizes in bytes, counts (HugePages_*) as they stand; empty where it cannot be read."""
    facts: dict[str, int] = {}
    for line in _text(proc_root / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return facts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _chosen(path: Path, otherwise: str = "never") -> str:
    """Give the bracketed word of a sysfs choice such as `always [madvise] never`."""
    _, found, rest = _text(path).partition("[")
    return rest.partition("]")[0] if found else otherwise
