"""What `kvredis doctor` says of memory: the arena's room and pages, what may be locked, and where it lies.

The arena is hugetlb pages or ordinary memory, never both, and limits of the one do not stop the other: five reserved
GiB are five less of MemAvailable. So what is asked first is which of the two `kvredis serve` would get.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from kvredis.backends.config.schema import Config
from kvredis.storage.memory.arena import HugepageMode, Machine
from kvredis.storage.memory.hugepages import (
    HUGEPAGE_BYTES,
    HugepagePool,
    anonymous_thp,
    meminfo,
    pages_needed,
    shmem_thp,
    shmem_thp_usable,
)
from kvredis.storage.memory.memory_limits import gib, group_limits, hugetlb_obstacle, memory_obstacle

from .finding import Finding

CAP_IPC_LOCK = 14
"""Its bit in CapEff of /proc/self/status, capability.h: who has it may lock more memory than the limit says."""

SWAPPINESS_MAX = 10
"""Above it the kernel swaps out an arena in favour of files that were read once."""


def hugepage_facts(nbytes: int, machine: Machine) -> dict[str, int | str | bool]:
    """Compare the 2 MiB pool with what an arena of `nbytes` needs, with the lines that grow it."""
    pool = HugepagePool.read(machine.sys_root, machine.proc_root)
    pages = pages_needed(nbytes)
    count = pool.pages_to_set(pages)
    sysctl = pool.default_page_bytes == HUGEPAGE_BYTES
    obstacle = _hugetlb_limit(nbytes, pool, machine)
    return {
        "bytes": nbytes,
        "pages_needed": pages,
        "page_bytes": HUGEPAGE_BYTES,
        "supported": pool.supported,
        "pool_total": pool.total,
        "pool_free": pool.unpromised,
        "pool_overcommit": pool.overcommit,
        "default_page_bytes": pool.default_page_bytes,
        "obstacle": obstacle or "",
        "ok": pool.available >= pages and obstacle is None,
        "command": pool.grow_command(pages),
        "persistent": (
            f"vm.nr_hugepages={count}   (in /etc/sysctl.conf)"
            if sysctl
            else f"hugepagesz=2M hugepages={count}   (on the kernel's command line)"
        ),
    }


def memory(config: Config, machine: Machine) -> list[Finding]:
    """Judge everything that an arena of this configuration depends on. Allocates nothing."""
    hugetlb = _gets_hugetlb(config, machine)
    return [
        _room(config, machine, hugetlb),
        _hugepages(config, machine),
        _shmem_thp(config, machine),
        Finding("THP (process memory)", None, anonymous_thp(machine.sys_root)),
        _groups(machine),
        _overcommit(config, machine, hugetlb),
        _swap(config, machine, hugetlb),
    ]


def memlock(config: Config, machine: Machine, *, gpu_locks: bool) -> Finding:
    """Judge the limit on locked memory; a GPU's driver that has taken a trial (`gpu_locks`) does not ask for it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    exceeds = _may_exceed_memlock(machine)
    enough = unlimited or soft >= config.capacity_bytes or exceeds
    found = "unlimited" if unlimited else f"{soft // 1024} KiB" + (" (root may exceed it)" if exceeds else "")
    return Finding(
        "memlock",
        enough if config.page_lock and not gpu_locks else None,
        found,
        f"{config.capacity_bytes // 1024} KiB",
        "" if enough else "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit file",
    )


def numa(machine: Machine) -> list[Finding]:
    """Tell the memory nodes, the hugepages of each and the GPUs beside them. No configuration asks for any of it."""
    nodes = _nodes(machine)
    if not nodes:
        return [Finding("NUMA", None, "unknown")]
    gpus = [f"GPU {name} at node {node}" for name, node in _gpus(machine)]
    each = [f"node {node.number}: {gib(node.nbytes)}, {node.pages} hugepages ({node.free} free)" for node in nodes]
    return [Finding("NUMA", None, "; ".join(each + gpus), "", _balance(nodes))]


@dataclass(frozen=True, slots=True)
class _Node:
    number: int
    nbytes: int
    pages: int
    free: int


def _hugetlb_limit(nbytes: int, pool: HugepagePool, machine: Machine) -> str | None:
    """Say which limit keeps this process from pages that the pool has."""
    if not pool.supported:
        return "this kernel has no 2 MiB hugepages"
    if (obstacle := hugetlb_obstacle(nbytes, machine.sys_root, machine.proc_root)) is not None:
        return obstacle
    nodes, allowed = _nodes(machine), _allowed_nodes(machine)
    free = sum(node.free for node in nodes if node.number in allowed)
    if allowed and any(node.free for node in nodes if node.number not in allowed) and free < pages_needed(nbytes):
        return f"only {free} of the free pages are at the memory nodes that this process may use"
    return None


def _gets_hugetlb(config: Config, machine: Machine) -> bool:
    wanted = config.hugepage_mode in (HugepageMode.AUTO, HugepageMode.REQUIRE)
    return wanted and bool(hugepage_facts(config.capacity_bytes, machine)["ok"])


def _room(config: Config, machine: Machine, hugetlb: bool) -> Finding:
    nbytes = config.capacity_bytes
    free = meminfo(machine.proc_root).get("MemAvailable")
    available = "unknown" if free is None else f"{gib(free)} available"
    if hugetlb:
        return Finding("memory", True, f"{available}, and the arena is hugepages", gib(nbytes))
    obstacle = memory_obstacle(nbytes, machine.sys_root, machine.proc_root)
    no_hugepages = hugepage_facts(nbytes, machine)["obstacle"]  # a limit of both, or one beside it
    other = "lift that limit" if no_hugepages else "use hugepages that the pool has"
    fix = "" if obstacle is None else f"{obstacle}: lower max_local_cpu_size, or {other}"
    return Finding("memory", obstacle is None, available, gib(nbytes), fix)


def _hugepages(config: Config, machine: Machine) -> Finding:
    facts = hugepage_facts(config.capacity_bytes, machine)
    enough = bool(facts["ok"])
    asked = config.hugepage_mode is HugepageMode.REQUIRE
    found = f"{facts['pool_total']} pages of 2 MiB, {facts['pool_free']} free"
    if not facts["supported"]:
        fix = "hugepages: auto does without" if asked else ""
    elif facts["obstacle"]:
        found += f", but {facts['obstacle']}"
        fix = "lift that limit, or lower max_local_cpu_size"
    else:
        fix = str(facts["command"])
    return Finding(
        "hugepages",
        enough or (False if asked else None),
        found if facts["supported"] else "none in this kernel",
        f"{facts['pages_needed']} pages",
        "" if enough else fix,
    )


def _shmem_thp(config: Config, machine: Machine) -> Finding:
    usable = shmem_thp_usable(machine.sys_root)
    asked = config.hugepage_mode is HugepageMode.THP
    fix = "" if usable else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Finding(
        "THP (memfd)", usable if asked else None, shmem_thp(machine.sys_root), "advise" if asked else "", fix
    )


def _groups(machine: Machine) -> Finding:
    """The tightest limits of our control groups: what a container was given."""
    told = []
    for account, what in (("memory", "memory"), ("hugetlb.2MB", "2 MiB hugepages")):
        limits = [limit for _, limit in group_limits(account, machine.sys_root, machine.proc_root)]
        told += [f"{what} {gib(min(limits))}"] if limits else []
    return Finding("control group", None, ", ".join(told) or "no limit")


def _overcommit(config: Config, machine: Machine, hugetlb: bool) -> Finding:
    """With vm.overcommit_memory=2 a memfd's pages are counted when they are touched: an arena may end half filled."""
    word = _text(machine.proc_root / "sys/vm/overcommit_memory")
    facts = meminfo(machine.proc_root)
    if word != "2" or "CommitLimit" not in facts:
        return Finding("overcommit", None, {"0": "heuristic", "1": "always", "2": "never"}.get(word, "unknown"))
    room = max(0, facts["CommitLimit"] - facts.get("Committed_AS", 0))
    enough = hugetlb or room >= config.capacity_bytes
    fix = "" if enough else "sysctl -w vm.overcommit_memory=0, or a larger vm.overcommit_ratio"
    return Finding("overcommit", enough, f"never, {gib(room)} uncommitted", gib(config.capacity_bytes), fix)


def _swap(config: Config, machine: Machine, hugetlb: bool) -> Finding:
    swap = meminfo(machine.proc_root).get("SwapTotal", 0)
    word = _text(machine.proc_root / "sys/vm/swappiness")
    if not swap:
        return Finding("swap", None, "none")
    at_risk = word.isdigit() and int(word) > SWAPPINESS_MAX and not hugetlb and not config.page_lock
    fix = "sysctl -w vm.swappiness=1, or page_lock: true, or hugepages" if at_risk else ""
    return Finding("swap", None, f"{gib(swap)}, swappiness {word or 'unknown'}", "", fix)


def _balance(nodes: list[_Node]) -> str:
    """The line that evens out a pool of which some node has less than half of its share: what is far is slower."""
    total = sum(node.pages for node in nodes)
    share = total // len(nodes)
    if share == 0 or min(node.pages for node in nodes) * 2 >= share:
        return ""
    folder = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
    return "; ".join(f"echo {share} > {folder.format(node.number)}" for node in nodes if node.pages != share)


def _nodes(machine: Machine) -> list[_Node]:
    found = []
    for folder in (machine.sys_root / "devices/system/node").glob("node[0-9]*"):
        pool = folder / "hugepages/hugepages-2048kB"
        words = _text(folder / "meminfo").split()  # Node 0 MemTotal: 16 kB ...
        kib = int(words[words.index("MemTotal:") + 1]) if "MemTotal:" in words else 0
        pages, free = (_whole(pool / name) for name in ("nr_hugepages", "free_hugepages"))
        found.append(_Node(int(folder.name.removeprefix("node")), kib * 1024, pages, free))
    return sorted(found, key=lambda node: node.number)


def _allowed_nodes(machine: Machine) -> set[int]:
    """The nodes that this process may have memory of; empty where the kernel does not say."""
    allowed: set[int] = set()
    for span in _status(machine, "Mems_allowed_list").split(","):
        first, _, last = span.partition("-")
        if first.isdigit():
            allowed.update(range(int(first), int(last or first) + 1))
    return allowed


def _gpus(machine: Machine) -> list[tuple[str, int]]:
    """NVIDIA's display controllers, by PCI address, and the node that each is at; -1: the machine does not say."""
    found = []
    for device in sorted((machine.sys_root / "bus/pci/devices").glob("*")):
        if _text(device / "vendor") == "0x10de" and _text(device / "class").startswith("0x03"):
            node = _text(device / "numa_node")
            found.append((device.name, int(node) if node.lstrip("-").isdigit() else -1))
    return found


def _may_exceed_memlock(machine: Machine) -> bool:
    """Say whether this process has CAP_IPC_LOCK: root has, unless a container or a unit took it away."""
    effective = _status(machine, "CapEff")
    return bool(int(effective, 16) >> CAP_IPC_LOCK & 1) if effective else os.geteuid() == 0


def _status(machine: Machine, name: str) -> str:
    lines = (line.partition(":") for line in _text(machine.proc_root / "self/status").splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def _whole(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
