"""What a Store is opened with, and how a size is written: the one place that turns a user's words into bytes."""

import math
import re
from dataclasses import dataclass

from .disk.recovery import DiskOptions
from .errors import ConfigError
from .memory.arena import HugepageMode

GIB = 1024**3

_UNITS = {"b": 1, "k": 1024, "m": 1024**2, "g": GIB, "t": 1024**4}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*(?P<unit>[kmgt]i?b?|b)?", re.IGNORECASE)
_SIZE_BYTES_MAX = 2**57  # the address space of x86-64 with five-level page tables


def parse_size(value: str | int | float, *, key: str, source: str) -> int:
    """Give the bytes that a size means: a bare number is GiB (as LMCache's), a unit a power of 1024 (redis.conf's gb,
    Kubernetes' Gi).

    Raises ConfigError naming `key` and `source` for anything else, and for sizes that are not positive.
    """
    if isinstance(value, bool):
        raise ConfigError(key, value, source, "not a size")
    text = str(value).strip()
    if re.fullmatch(r"-\s*[\d.].*", text):
        raise ConfigError(key, value, source, "a size must be greater than 0")
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(key, value, source, 'not a size: write GiB as a number (5.0) or name a unit ("512MB", "5GB")')
    unit = match["unit"]
    nbytes = float(match["number"]) * (GIB if unit is None else _UNITS[unit[0].lower()])
    if not math.isfinite(nbytes) or nbytes > _SIZE_BYTES_MAX:
        hint = "; a number without a unit is GiB" if unit is None else ""
        raise ConfigError(key, value, source, f"more than a machine can address{hint}")
    if nbytes < 1:
        raise ConfigError(key, value, source, "a size must be greater than 0")
    return int(nbytes)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What `Store.open` makes: an arena of `capacity_bytes` and the policy that decides what leaves it.

    `prefault_threads` 0 leaves the pages untouched until they are used; `page_lock` locks them before `open` returns.
    With `disk` blocks that leave the arena go there, by `io_threads` threads; `keep` false makes the arena staging
    only: blocks stay in it only until they are on disk and not read. `spill_wait_s` is how long a caller who stores may
    be kept waiting for the disk before the coldest blocks leave unwritten.
    """

    capacity_bytes: int
    hugepages: HugepageMode = HugepageMode.AUTO
    cache_policy: str = "LRU"
    prefault_threads: int = 0
    page_lock: bool = False
    disk: DiskOptions | None = None
    keep: bool = True
    io_threads: int = 4
    spill_wait_s: float = 0.5
