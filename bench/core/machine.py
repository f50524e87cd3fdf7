"""What a figure was measured on: without these facts it cannot be compared with another."""

import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvredis.storage.memory.copy import KIND

Machine = dict[str, str | int]

_PACKAGES: Final = ("uvloop",)
_BUSY_SHARE: Final = 0.5
"""Of the cores: with a larger load average before it begins, a bench shares them with other work."""


def machine_facts() -> Machine:
    """Give CPU model, usable cores, memory (bytes), kernel, page settings, the way of copying and what else matters."""
    facts: Machine = {
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


def busy(machine: Mapping[str, Any]) -> str:
    """Warn when the load average before a bench says that its machine had other work; empty when it had none."""
    load, cores = float(machine.get("load_1min", 0)), int(machine["cores"])
    if load <= cores * _BUSY_SHARE:
        return ""
    return f"Warning: the machine is busy: its load average is {load:.2f} on {cores} cores, so figures will vary"


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
