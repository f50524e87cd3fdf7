"""What `kvredis top` knows: figures of one moment, what they say per second, and which prompts a server holds.

All of it is asked of INFO, KV.TIERS, SLOWLOG and CLIENT LIST in one exchange; what this user may not ask is left out.
Its own requests are not counted in the figures. The prompts come from KV.SCAN, a slice a moment, so that a server of
millions of keys is not asked for all of them at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvredis.cli.inspect.client import Connection, NotAllowed, Servers, mapped
from kvredis.cli.inspect.prefix_tree import Forest
from kvredis.cli.terminal import printable
from kvredis.storage.errors import BackendError

SLOW_MAX: Final = 32
WALK_KEYS: Final = 500
"""Keys that are looked at in one moment."""
_COUNTERS: Final = {
    "commands": "total_commands_processed",
    "in_bytes": "total_net_input_bytes",
    "out_bytes": "total_net_output_bytes",
    "hits": "keyspace_hits",
    "misses": "keyspace_misses",
    "disk_read_bytes": "disk_read_bytes",
    "disk_written_bytes": "disk_written_bytes",
    "evicted": "evicted_keys",
}
"""Our names of INFO's counters."""
_OF_TIER: Final = ("capacity", "used", "entries", "leases")


@dataclass(slots=True)
class Figures:
    """One moment of one server or of a cluster's. `counters` only grow; `commands` are (calls, microseconds); `parts`
    are those of each server by itself, where they are several."""

    at_s: float
    counters: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    commands: dict[str, tuple[int, int]] = field(default_factory=dict)
    slow: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, str]] = field(default_factory=list)
    clients_count: int = 0
    uptime_s: int = 0
    version: str = ""
    parts: dict[str, Figures] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rates:
    """What two moments say per second; `hit_rate` is of the lookups between them, None without any."""

    seconds: float
    per_s: dict[str, float]
    hit_rate: float | None
    calls_per_s: dict[str, float]


def figures(servers: Servers) -> Figures:
    """The figures of all servers together. Raises BackendError when one does not answer."""
    found = Figures(time.monotonic())
    for server in servers.each:
        ours, looked = dict(server.asked), server.looked  # what INFO has counted when it answers
        told = _without_us(_asked(server), ours, looked)
        _add(found, told)
        if len(servers.each) > 1:
            part = found.parts[str(server)] = Figures(found.at_s)
            _add(part, told)
    found.slow.sort(key=lambda one: -one["microseconds"])
    return found


def rates(before: Figures, after: Figures) -> Rates:
    """What happened between two moments. A server that began anew in between counts from its own beginning; one that
    has joined since says nothing yet."""
    seconds = max(after.at_s - before.at_s, 1e-3)
    per_s, calls = dict.fromkeys(after.counters, 0.0), dict.fromkeys(after.commands, 0.0)
    if after.parts:
        pairs = [(before.parts[name], part) for name, part in after.parts.items() if name in before.parts]
    else:
        pairs = [(before, after)]

    def grown(now: int, then: int) -> float:
        return (now - then if now >= then else now) / seconds

    for then, now in pairs:
        for name, count in now.counters.items():
            per_s[name] += grown(count, then.counters.get(name, 0))
        for name, (count, _) in now.commands.items():
            calls[name] += grown(count, then.commands.get(name, (0, 0))[0])
    looked_up = per_s.get("hits", 0) + per_s.get("misses", 0)
    return Rates(seconds, per_s, per_s["hits"] / looked_up if looked_up else None, calls)


def hit_rate(found: Figures) -> float | None:
    """The part of all lookups so far that found something."""
    hits, misses = found.counters.get("hits", 0), found.counters.get("misses", 0)
    return hits / (hits + misses) if hits + misses else None


def number(value: Any) -> int:
    """A figure as a server tells it; 0 for what is none."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def prompts(forest: Forest) -> list[dict[str, Any]]:
    """Every prompt of a forest, and of what has none every group; a copy that the forest's growing does not touch."""
    found = [(group, root, part) for group, root, part in forest.top_roots()]
    found += [(group, "", group.whole) for group in forest.groups.values() if not group.roots]
    return [
        {
            "model": group.name.model or "other keys",
            "rank": group.name.rank,
            "root": root,
            "keys": part.keys,
            "bytes": part.nbytes,
            "tokens": group.tokens(part)[0],
            "hits": part.hits,
            "idle_s": part.idle_s,
        }
        for group, root, part in found
    ]


class Walk:
    """A way through all keys, WALK_KEYS at a time, again and again. `forest` is the latest whole one, before there is
    one what has been seen so far."""

    def __init__(self) -> None:
        self.forest = self._growing = Forest()
        self._is_whole = False
        self._steps: Iterator[None] | None = None

    def step(self, servers: Servers) -> None:
        """Go on; for a user who may not look at keys there is nothing to see. Raises BackendError."""
        if self._steps is None:
            self._growing = Forest()
            if not self._is_whole:
                self.forest = self._growing
            self._steps = self._walk(servers)
        try:
            if next(self._steps, self) is self:
                self.forest, self._is_whole, self._steps = self._growing, True, None
        except NotAllowed:
            self._steps = None

    @property
    def is_whole(self) -> bool:
        """Whether every key has been seen."""
        return self._is_whole

    def forget(self) -> None:
        """Begin anew with the next step: the connection is another."""
        self._steps = None

    def _walk(self, servers: Servers) -> Iterator[None]:
        seen = 0
        for server in servers.each:
            for batch in server.walk(count=WALK_KEYS):
                for key, facts in batch:
                    if facts is not None:
                        self._growing.add(key, facts)
                seen += len(batch)
                if seen >= WALK_KEYS:
                    seen = 0
                    yield


# ---- inside ------------------------------------------------------------------------------------------------------


def _asked(server: Connection) -> list[Any]:
    questions: list[tuple[str | int, ...]] = [("INFO", "everything"), ("KV.TIERS",), ("SLOWLOG", "GET", SLOW_MAX)]
    found = server.ask_each([*questions, ("CLIENT", "LIST"), ("CLIENT", "ID")])
    if not isinstance(found[0], dict):
        raise BackendError(f"{server} does not let this user ask INFO, which `kvredis top` lives on: {found[0]}")
    return found


def _without_us(told: list[Any], asked: Mapping[str, int], looked: int) -> list[Any]:
    """The same without what this program has asked itself: its commands and lookups, its connection, its slow ones."""
    info, tiers, slow, clients, own = told
    info = dict(info)
    for name, count in asked.items():
        stat = info.get(f"cmdstat_{name}")
        if isinstance(stat, dict) and (calls := number(stat.get("calls"))):
            left = max(calls - count, 0)
            usec = number(stat.get("usec")) * left // calls  # as if each call took as long as the others
            info[f"cmdstat_{name}"] = stat | {"calls": left, "usec": usec}
            if not left:
                del info[f"cmdstat_{name}"]
    for name, count in (("total_commands_processed", sum(asked.values())), ("keyspace_hits", looked)):
        info[name] = max(number(info.get(name)) - count, 0)
    addr = b""
    if isinstance(clients, bytes | str) and isinstance(own, int):
        lines = (clients.encode() if isinstance(clients, str) else clients).splitlines()
        ours = next((line for line in lines if line.startswith(b"id=%d " % own)), b"")
        addr = next((word[5:] for word in ours.split() if word.startswith(b"addr=")), b"")
        clients = b"\n".join(line for line in lines if line is not ours)
        info["connected_clients"] = max(number(info.get("connected_clients")) - bool(ours), 0)
    if addr and not isinstance(slow, Exception):
        slow = [entry for entry in slow if len(entry) < 5 or entry[4] not in (addr, addr.decode("ascii", "replace"))]
    return [info, tiers, slow, clients]


def _add(found: Figures, told: Sequence[Any]) -> None:
    info, tiers, slow, clients = told
    for name, field_name in _COUNTERS.items():
        found.counters[name] = found.counters.get(name, 0) + number(info.get(field_name))
    found.clients_count += number(info.get("connected_clients"))
    found.uptime_s = max(found.uptime_s, number(info.get("uptime_in_seconds")))
    found.version = (
        f"kvredis {info['kvredis_version']}"
        if "kvredis_version" in info
        else (f"Redis {info.get('redis_version', '')}")
    )
    for name, stat in info.items():
        if name.startswith("cmdstat_") and isinstance(stat, dict):
            calls, microseconds = found.commands.get(name[8:], (0, 0))
            found.commands[name[8:]] = (calls + number(stat.get("calls")), microseconds + number(stat.get("usec")))
    _add_tiers(found, tiers, info)
    if not isinstance(slow, Exception):
        found.slow += [_slow(entry) for entry in slow]
    if isinstance(clients, bytes | str):
        text = clients.decode("utf-8", "replace") if isinstance(clients, bytes) else clients
        found.clients += [_client(line) for line in text.splitlines() if line]


def _add_tiers(found: Figures, told: Any, info: dict[str, Any]) -> None:
    each = {} if isinstance(told, Exception) else {name: mapped(reply) for name, reply in mapped(told).items()}
    if not each:  # a plain Redis
        spaces = [value for name, value in info.items() if re.fullmatch(r"db\d+", name) and isinstance(value, dict)]
        entries = sum(number(space.get("keys")) for space in spaces)
        each = {"memory": {"capacity": info.get("maxmemory"), "used": info.get("used_memory"), "entries": entries}}
    for name, figures_of in each.items():
        tier = found.tiers.setdefault(name, dict.fromkeys(_OF_TIER, 0))
        for figure in _OF_TIER:
            tier[figure] += number(figures_of.get(figure))


def _slow(entry: Sequence[Any]) -> dict[str, Any]:
    """An entry of SLOWLOG GET: number, when, microseconds, words, and since Redis 4 whose."""
    words = [word if isinstance(word, bytes) else str(word).encode() for word in entry[3]]
    return {
        "unix_s": int(entry[1]),
        "microseconds": int(entry[2]),
        "command": " ".join(printable(word) for word in words[:8]),
    }


def _client(line: str) -> dict[str, str]:
    fields = (word.partition("=") for word in line.split(" "))
    return {name: value for name, equals, value in fields if equals}
