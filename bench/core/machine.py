"""What a figure was measured on: without these facts it cannot be compared with another."""

import os
import platform
import time
from importlib import metadata
from pathlib import Path

from kvredis.storage.memory.copy import KIND

_PACKAGES = ("uvloop",)


def machine_facts() -> dict[str, str | int]:
    """Give CPU model, usable cores, memory (bytes), kernel, page settings, the way of copying and what else matters."""
    facts: dict[str, str | int] = {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": KIND,
        "transparent_hugepages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "hugepages_2mib_reserved": _text(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")),
        "load_1min": f"{os.getloadavg()[0]:.2f}",
    }
    return facts | {package: _version(package) for package in _PACKAGES}


def _cpu_model() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _chosen(path: Path) -> str:
    """Give the word in brackets of a sysfs choice such as `always [madvise] never`."""
    return _text(path).partition("[")[2].partition("]")[0] or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
