"""Memory of one kind of page, and the proof from the kernel that it is of that kind.

4 KiB and hugetlb pages come from the arena, as a store has them. Transparent huge pages come from an anonymous mapping,
because most kernels give a memfd none; torch's memory comes from torch's own allocator, since that is what a program
without any of this has. What was got is read back from /proc/self/smaps and told, never assumed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvredis.bench.core.errors import BenchError
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.hugepages import HUGEPAGE_BYTES, HugepagePool, anonymous_thp, meminfo, pages_needed
from kvredis.storage.memory.memory_limits import gib

TORCH, SMALL, THP, HUGETLB = "torch", "4 KiB", "THP", "hugetlb"
KINDS: Final = (SMALL, THP, HUGETLB)
_SMAPS: Final = Path("/proc/self/smaps")
HUGE_SHARE_MIN: Final = 0.9


@dataclass(frozen=True, slots=True)
class Region:
    """Writable bytes with their address; whoever made it keeps it mapped."""

    view: memoryview
    address: int

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


@dataclass(frozen=True, slots=True)
class Backing:
    """What the kernel says is behind a mapping."""

    page_bytes: int
    huge_share: float  # of the mapping's memory: in huge pages of whichever kind

    def text(self) -> str:
        """Write it for people: 4 KiB pages, 97 % of them merged into huge ones."""
        if self.page_bytes >= HUGEPAGE_BYTES:
            return f"hugetlb pages of {self.page_bytes // 1024} KiB"
        return f"{self.page_bytes // 1024} KiB pages, {self.huge_share * 100:.0f} % in transparent huge pages"


def obstacle(kind: str, nbytes: int, hugepages_max: int | None) -> str | None:
    """Say why there is no memory of `kind` here, or None. `hugepages_max` caps what may be taken from the pool."""
    if kind == THP and (not hasattr(mmap, "MADV_HUGEPAGE") or anonymous_thp() == "never"):
        return "transparent huge pages are off (/sys/kernel/mm/transparent_hugepage/enabled is never)"
    if kind == HUGETLB:
        needed, pool = pages_needed(nbytes), HugepagePool.read()
        if hugepages_max is not None and hugepages_max < needed:
            return f"needs {needed} pages of 2 MiB and --hugepages allows {hugepages_max}"
        if pool.available < needed:
            return f"needs {needed} pages of 2 MiB and the pool has {pool.available} free"
    return None


@contextmanager
def region(kind: str, nbytes: int) -> Iterator[Region]:
    """Lend `nbytes` of one kind of page, all of them touched.

    Raises BenchError when the kernel gave other pages than were asked for, ArenaError when it gave none.
    """
    if kind == TORCH:
        yield _torch_region(nbytes)
        return
    if kind == THP:
        with _mapped(nbytes) as made:
            yield _proven(made, kind)
        return
    with Arena.create(nbytes, HugepageMode.REQUIRE if kind == HUGETLB else HugepageMode.OFF) as arena:
        arena.prefault(1)
        yield _proven(Region(arena.view[:nbytes], arena.address), kind)


def backing(address: int, smaps: Path = _SMAPS) -> Backing:
    """Read what is behind the mapping that holds `address`; raises BenchError when no mapping does."""
    fields: dict[str, int] = {}
    inside = False
    for line in smaps.read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if not head.endswith(":"):
            if inside:
                break
            start, _, end = head.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and line.endswith("kB"):
            fields[head[:-1]] = int(line.split()[1])
    if not inside:
        raise BenchError(f"no mapping holds address {address:#x}")
    huge = sum(fields.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"))
    page_bytes = fields.get("KernelPageSize", 0) * 1024
    share = 1.0 if page_bytes >= HUGEPAGE_BYTES else huge / max(1, fields.get("Rss", 0))
    return Backing(page_bytes, min(1.0, share))


def available_bytes() -> int:
    """Give what the kernel could hand out now without swapping (MemAvailable)."""
    return meminfo().get("MemAvailable", 0)


@contextmanager
def _mapped(nbytes: int) -> Iterator[Region]:
    """Map anonymous memory on a 2 MiB boundary and in whole huge pages: the kernel makes no others."""
    whole = pages_needed(nbytes) * HUGEPAGE_BYTES
    mapping = mmap.mmap(-1, whole + HUGEPAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    skipped = -address % HUGEPAGE_BYTES
    ctypes.memset(address + skipped, 0, whole)
    yield Region(memoryview(mapping)[skipped : skipped + nbytes], address + skipped)
    # No close: tensors may still view it; the mapping goes with the last of them.


def _torch_region(nbytes: int) -> Region:
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor.fill_(0)  # zeros may be calloc's, which nothing is behind yet
    array: Any = tensor.numpy()
    return Region(memoryview(array), tensor.data_ptr())


def _proven(made: Region, kind: str) -> Region:
    found = backing(made.address)
    right = {
        SMALL: found.page_bytes < HUGEPAGE_BYTES and found.huge_share < 1 - HUGE_SHARE_MIN,
        THP: found.huge_share >= HUGE_SHARE_MIN,
        HUGETLB: found.page_bytes == HUGEPAGE_BYTES,
    }[kind]
    if not right:
        raise BenchError(f"{gib(made.nbytes)} of {kind} memory turned out to be {found.text()}")
    return made
