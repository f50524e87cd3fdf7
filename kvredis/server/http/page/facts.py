"""What the page shows of keys, blocks and commands, as JSON: every answer bounded, and nothing changed by asking.

Keys, names and headers are strangers' bytes. They leave as printable ASCII with everything else escaped, and cut to a
length, so that no reader has to be careful; `meant` is the way back, for a search by what was shown.

Looking is not using: keys are read from the index as it is, so that not even one that has expired goes because of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from heapq import nsmallest
from time import perf_counter
from typing import Final

from kvredis import __version__
from kvredis.server.commands.kv import block_facts
from kvredis.server.config.settings import value_of
from kvredis.server.context import Context
from kvredis.server.http.health import trouble
from kvredis.server.metrics.metrics import FIGURES, Seen, Values
from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.store import Store

from .slices import SLICE_S, in_slices

Told = dict[str, object]
"""What goes out as a JSON object. Sizes in bytes, times in seconds unless the name says otherwise."""

SHOWN_BYTES_MAX: Final = 256
"""Of a key, a name or a header's text."""

AXES_SHOWN: Final = 16

KEYS_WANTED: Final = 50
"""A search ends when it has found so many. A step of SCAN is one bucket of 1,024 and is told whole, so it may find
some more."""

KEYS_WALKED_MAX: Final = 200_000
"""A search that has looked at so many keys answers with what it has, and where to go on."""

BLOCKS_SHOWN: Final = 64
"""Blocks that are told of one piece of the arena."""

COMMANDS_SHOWN: Final = 12
SLOW_SHOWN: Final = 10

_ESCAPE: Final = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(\\))")


def shown(raw: bytes, bytes_max: int = SHOWN_BYTES_MAX) -> str:
    """Bytes as text: printable ASCII as it is but for a doubled backslash, all else as \\xNN. Of more than `bytes_max`
    bytes the first ones, and how many there are."""
    text = "".join(_SHOWN[byte] for byte in raw[:bytes_max])
    return text if len(raw) <= bytes_max else f"{text}… ({len(raw):,} bytes)"


_SHOWN: Final = [
    "\\\\" if byte == ord("\\") else chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in range(256)
]


def meant(text: str) -> bytes:
    """The bytes that `shown` made this text of; what it never makes stands for itself, in UTF-8."""
    raw, at = b"", 0
    for found in _ESCAPE.finditer(text):
        raw += text[at : found.start()].encode("utf-8", "replace")
        raw += bytes.fromhex(found[1]) if found[1] else b"\\"
        at = found.end()
    return raw + text[at:].encode("utf-8", "replace")


def told_block(store: Store, entry: Entry) -> Told:
    """One block: what KV.META says of it, where it lies, whether the disk has it and when it ends."""
    facts: Told = {}
    for name, value in block_facts(store, entry).items():
        if isinstance(value, str):
            value = value if len(value) <= SHOWN_BYTES_MAX else value[:SHOWN_BYTES_MAX] + "…"
        facts[name] = value[:AXES_SHOWN] if isinstance(value, list) else value
    return {
        "key": shown(entry.key),
        "db": entry.space,
        **facts,
        "offset": None if entry.extent is NOWHERE else entry.extent.offset,
        "saved": entry.record is not None,
        "ends_in": max(0, (entry.expire_at_ms - store.now_ms()) // 1000) if entry.expire_at_ms else None,
    }


def is_there(store: Store, entry: Entry | None) -> bool:
    """Whether a client that asked for this entry's key would find it."""
    if entry is None or store.index.get(entry.key, entry.space) is not entry:
        return False
    return not 0 < entry.expire_at_ms <= store.now_ms()


async def search(store: Store, prefix: bytes, cursor: int = 0, space: int = 0) -> Told:
    """Keys of a database that begin with `prefix`, from a cursor on: SCAN's guarantee, in slices. `cursor` in the
    answer is where to go on, 0 at the end."""
    found: list[Entry] = []
    walked = 0
    began_s = perf_counter()
    while True:
        cursor, keys = store.index.scan(cursor, 1, space)
        walked += len(keys)
        entries = [store.index.get(key, space) for key in keys if key.startswith(prefix)]
        found += [entry for entry in entries if entry is not None and is_there(store, entry)]
        if not cursor or len(found) >= KEYS_WANTED or walked >= KEYS_WALKED_MAX:
            break
        if perf_counter() - began_s >= SLICE_S:
            await asyncio.sleep(SLICE_S)
            began_s = perf_counter()
    found.sort(key=lambda entry: entry.key)
    return {
        "keys": await told_blocks(store, found),
        "cursor": cursor,
        "walked": walked,
        "in_database": len(store.index.spaces[space]),
    }


async def told_blocks(store: Store, entries: Sequence[Entry]) -> list[Told]:
    """The blocks of these that are still there."""
    told: list[Told] = []

    def take(some: Sequence[Entry]) -> None:
        told.extend(told_block(store, entry) for entry in some if is_there(store, entry))

    await in_slices(entries, take, batch=1)  # a header may take as long as a hundred steps of a walk
    return told


async def blocks_between(store: Store, first: int, past: int) -> Told:
    """Which blocks lie in [first, past) of the arena, in the order of their places: BLOCKS_SHOWN of them, and how many
    there are."""
    leading: list[Entry] = []
    count = 0
    if first >= past:
        return {"blocks": leading, "count": count}

    def take(entries: Sequence[Entry]) -> None:
        nonlocal leading, count
        there: list[Entry] = []
        for entry in entries:
            offset, length = entry.extent
            if offset < past and offset + length > first and length and is_there(store, entry):
                there.append(entry)
        if there:
            count += len(there)
            leading = nsmallest(BLOCKS_SHOWN, [*leading, *there], key=lambda entry: entry.extent.offset)

    for space in range(len(store.index.spaces)):
        await in_slices(list(store.index.spaces[space].values()), take)
    return {"blocks": await told_blocks(store, leading), "count": count}


def commands(server: Context) -> list[Told]:
    """The commands that took most time in all; microseconds. None where latency-tracking is off."""
    if value_of(server, "latency-tracking") == "no":
        return []
    timed = sorted(server.stats.timed(), key=lambda each: -each[1].nanoseconds)[:COMMANDS_SHOWN]
    return [
        {
            "name": name.replace("|", " ").upper(),
            "calls": record.calls,
            "total_us": record.nanoseconds // 1000,
            "p50_us": round(record.percentile(50), 1),
            "p99_us": round(record.percentile(99), 1),
            "p999_us": round(record.percentile(99.9), 1),
        }
        for name, record in timed
    ]


def slow_commands(server: Context) -> Told:
    """The slowest of the slow log, and what it takes to be in it."""
    log = server.slowlog
    entries = sorted(log.entries, key=lambda entry: -entry.microseconds)[:SLOW_SHOWN]
    return {
        "threshold_us": log.threshold_us,
        "entries": [
            {
                "id": entry.id,
                "unix_s": entry.unix_s,
                "us": entry.microseconds,
                "command": [shown(arg) for arg in entry.args[:8]],
                "more_args": max(0, len(entry.args) - 8),
                "client": shown(entry.name) if entry.name else "",
                "addr": shown(entry.addr),
            }
            for entry in entries
        ],
    }


def identity(server: Context) -> Told:
    """Which server this is; `run_id` is another one after each start."""
    cluster = server.cluster
    return {
        "version": __version__,
        "run_id": server.run_id,
        "uptime": int(server.uptime_s),
        "addresses": [shown(each.encode("utf-8", "surrogateescape")) for each in server.addresses],
        "node": "" if cluster is None else shown(cluster.myself.name.encode("utf-8", "surrogateescape")),
        "policy": server.store.policy.name,
        "fallback": "" if server.store.arena.fallback is None else " ".join(server.store.arena.fallback.split()),
    }


LANES: Final = {
    "tcp": "TCP",
    "tls": "TLS",
    "unix": "unix socket",
    "spliced": "unix socket, spliced",
    "shared_memory": "shared memory",
}
"""How the page calls what metrics/metrics.py labels."""


def lanes(read: Callable[[str], Values]) -> list[Told]:
    """Bytes that have come in and gone out so far by each lane that was used; the page draws how fast they grow. The
    disk is the last, where there is one: what was read and written; `socket` is false of it."""
    received, sent = read("received_bytes"), read("sent_bytes")
    told: list[Told] = [
        {"lane": name, "in": received.get(lane, 0), "out": sent.get(lane, 0), "socket": True}
        for lane, name in LANES.items()
        if lane == "tcp" or received.get(lane) or sent.get(lane)
    ]
    if read("disk_read_bytes"):
        disk = {"in": read("disk_read_bytes")[""], "out": read("disk_written_bytes")[""]}
        told.append({"lane": "disk (read, written)", **disk, "socket": False})
    return told


def state(server: Context) -> Told:
    """All that the page draws but blocks and keys, out of the table of figures. What counts up is told as it stands,
    and `now`, in seconds, with it."""
    seen = Seen(server)

    def read(name: str) -> Values:
        return _BY_NAME[name].read(seen)

    return {
        "now": server.now_s(),
        "server": identity(server),
        "trouble": trouble(server),
        "clients": len(server.sessions),
        "calls": server.stats.commands_processed,
        "hits": read("hits"),
        "misses": read("misses")[""],
        "hit_tokens": read("hit_tokens"),
        "tiers": seen.tiers,
        "lanes": lanes(read),
        "commands": commands(server),
        "slow": slow_commands(server),
    }


_BY_NAME: Final = {figure.name: figure for figure in FIGURES}
