"""What the operating system says of this process: its size in memory."""

import os
import resource
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory that the process has now: the arena's touched small pages included, hugetlb pages not, as the kernel
    counts."""
    return int(STATM.read_text().split()[1]) * PAGE_BYTES


def resident_peak_bytes() -> int:
    """The most that it ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
