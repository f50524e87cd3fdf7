"""What the page draws of the arena, and which prompts hold it: one walk over all blocks, in slices.

A walk over 100,000 blocks takes some 200 ms, for which no client may be kept waiting. So it goes in slices
of a millisecond (slices.py), and a reader who asks meanwhile waits for the same walk. What is drawn is therefore no
single instant: each block is where it was when the walk came by.

Looking changes nothing: entries are read, not held, and neither hits, idle times, the policy's order nor expiry hear of
it. The arena is told in at most CELLS_MAX cells, however many blocks there are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import chain
from time import perf_counter
from typing import Final

from kvredis.storage.entry import NOWHERE, Entry
from kvredis.storage.memory.allocator import GRAIN_BYTES
from kvredis.storage.store import Store

from .facts import Told, is_there, shown
from .slices import in_slices

CELLS_MAX: Final = 4096

GROUPS_MAX: Final = 65_536
"""Prefixes that are told apart in a walk; blocks of any further ones are counted together."""

GROUPS_SHOWN: Final = 16
"""Prefixes that are told of: so many with most hits, and so many with most bytes."""

PREFIX_BYTES_MAX: Final = 512

KINDS: Final = ("prompt chunk", "engine page", "LMCache chunk", "other value", "being written, or read after its end")
"""What a block is, by its key (adapters/engine/keys.py, adapters/paged/pages.py, LMCache's CacheEngineKey); and
room that is taken by what has no key yet, or none any more."""
PROMPT_CHUNK, ENGINE_PAGE, LMCACHE_CHUNK, OTHER_VALUE, KEYLESS = range(len(KINDS))
NO_KIND: Final = -1

LMCACHE_FIELDS: Final = 4
"""`format@model@world@worker@hash...`: so many fields before the hash."""


def kind_of(key: bytes) -> int:
    """Which of KINDS a key's form says that its block is."""
    if key.startswith(b"kvredis:"):
        return PROMPT_CHUNK if b"@{" in key else ENGINE_PAGE
    return LMCACHE_CHUNK if key.count(b"@") >= LMCACHE_FIELDS else OTHER_VALUE


def prefix_of(key: bytes) -> bytes:
    """What a key has in common with those that belong to it: everything up to its hash tag's end, which prompts that
    begin alike share; LMCache's fields before the hash; else everything up to the last colon. b"" where there is
    none of these."""
    opened = key.find(b"{")
    closed = key.find(b"}", opened + 2) if opened >= 0 and key[opened + 1 : opened + 2] != b"}" else -1
    if closed >= 0:
        return key[: closed + 1][:PREFIX_BYTES_MAX]
    if key.count(b"@") >= LMCACHE_FIELDS and not key.startswith(b"kvredis:"):
        return b"@".join(key.split(b"@", LMCACHE_FIELDS)[:LMCACHE_FIELDS])[: PREFIX_BYTES_MAX - 1] + b"@"
    return key[: key.rfind(b":") + 1][:PREFIX_BYTES_MAX]


class Group:
    """The blocks of one prefix in one database; bytes are payload bytes."""

    __slots__ = ("accessed_s", "blocks", "hits", "kind", "nbytes", "prefix", "resident", "space", "tokens", "untold")

    def __init__(self, prefix: bytes, first: Entry) -> None:
        self.prefix = prefix
        self.space = first.space
        self.kind = kind_of(first.key)
        self.blocks = self.nbytes = self.hits = self.resident = self.tokens = 0
        self.untold = 0
        """Blocks that do not say how many tokens they hold, or have not been in memory since the start."""
        self.accessed_s = first.accessed_s

    def add(self, entry: Entry) -> None:
        """Count one more."""
        self.blocks += 1
        self.nbytes += entry.length
        self.hits += entry.hits
        self.tokens += entry.tokens
        self.untold += not entry.tokens
        self.resident += entry.value is not None or entry.extent is not NOWHERE
        if entry.accessed_s > self.accessed_s:
            self.accessed_s = entry.accessed_s

    def told(self, now_s: float) -> Told:
        """For the page."""
        return {
            "prefix": shown(self.prefix),
            "db": self.space,
            "kind": self.kind,
            "blocks": self.blocks,
            "resident": self.resident,
            "bytes": self.nbytes,
            "hits": self.hits,
            "idle": max(0, int(now_s - self.accessed_s)),
            "tokens": self.tokens,
            "untold": self.untold,
        }


class Cells:
    """The arena in equal pieces. Columns are by cell: bytes, but `starts`, blocks that begin there, and `idle`, the
    sum of bytes x seconds since their last use."""

    def __init__(self, arena_bytes: int) -> None:
        grains = -(-arena_bytes // GRAIN_BYTES)
        self.arena_bytes = arena_bytes
        self.cell_bytes = -(-grains // CELLS_MAX) * GRAIN_BYTES
        self.count = -(-arena_bytes // self.cell_bytes)
        self.used, self.leased, self.saved, self.free, self.starts = ([0] * self.count for _ in range(5))
        self.idle = [0.0] * self.count
        self.kinds = [[0] * self.count for _ in range(KEYLESS)]

    def pieces(self, offset: int, length: int) -> Iterable[tuple[int, int]]:
        """Which cells a range of the arena lies in, and with how many bytes."""
        size = self.cell_bytes
        first, past = offset // size, offset + length
        if past <= (first + 1) * size:
            return ((first, length),)
        last = min((past - 1) // size, self.count - 1)
        return chain(
            ((first, (first + 1) * size - offset),),
            ((cell, size) for cell in range(first + 1, last)),
            ((last, past - last * size),),
        )

    def add(self, entry: Entry, idle_s: float) -> None:
        """A block that lies in the arena."""
        offset, length = entry.extent
        if not length:
            return  # it has left since we looked
        kind = self.kinds[kind_of(entry.key)]
        self.starts[offset // self.cell_bytes] += 1
        for cell, nbytes in self.pieces(offset, length):
            self.used[cell] += nbytes
            kind[cell] += nbytes
            self.idle[cell] += nbytes * idle_s
            if entry.leases:
                self.leased[cell] += nbytes
            if entry.record is not None:
                self.saved[cell] += nbytes

    def add_free(self, start: int, past: int) -> None:
        """A hole between blocks."""
        for cell, nbytes in self.pieces(start, past - start):
            self.free[cell] += nbytes

    async def told(self) -> Told:
        """As columns for the page: percent of the cell, or of what is used in it; seconds; an index of KINDS."""
        columns: dict[str, list[int]] = {name: [] for name in ("used", "idle", "kind", "leased", "saved")}

        def take(cells: Sequence[int]) -> None:
            for cell in cells:
                for column, value in zip(columns.values(), self._facts(cell), strict=True):
                    column.append(value)

        await in_slices(range(self.count), take)
        sizes = {"bytes": self.arena_bytes, "cell_bytes": self.cell_bytes}
        return {**sizes, "kinds": KINDS, **columns, "starts": self.starts}

    def _facts(self, cell: int) -> tuple[int, int, int, int, int]:
        """One cell's entries in the columns."""
        live = self.used[cell]
        size = min(self.cell_bytes, self.arena_bytes - cell * self.cell_bytes)
        keyless = max(0, size - self.free[cell] - live)
        amounts = [*(column[cell] for column in self.kinds), keyless]
        most = max(amounts)
        return (
            _percent(live + keyless, size),
            round(self.idle[cell] / live) if live else -1,
            amounts.index(most) if most else NO_KIND,
            _percent(self.leased[cell], live),
            _percent(self.saved[cell], live),
        )


def _percent(part: int, whole: int) -> int:
    """0 to 100; no part that there is shows as 0."""
    return min(100, max(1, 100 * part // whole)) if part and whole else 0


class Survey:
    """One walk over a store. `told` is what has come of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cells = Cells(store.arena.nbytes)
        self._blocks = {"arena": 0, "beside": 0, "disk": 0} | ({} if store.gpu is None else {"gpu": 0})
        self._found: dict[tuple[int, bytes], Group] = {}
        self._ungrouped = 0
        self._by_hits: list[Group] = []
        self._by_bytes: list[Group] = []

    async def told(self) -> Told:
        """Walk, on the server's loop. `blocks` lie in the arena, are small and lie beside it, are on disk or on the GPU
        alone; `ungrouped` are those whose prefix was one too many."""
        spaces = self._store.index.spaces
        for space in range(len(spaces)):
            await in_slices(list(spaces[space].values()), self._take)
        # Holes come last: what has been stored since the walk began is taken room then, and what has left is a hole.
        await in_slices(self._store.allocator.spans(), self._take_holes)
        await in_slices(list(self._found.values()), self._rank)
        leading = dict.fromkeys([*self._by_hits, *self._by_bytes])
        now_s = self._store.now_s()
        return {
            "arena": await self._cells.told(),
            "blocks": self._blocks,
            "prefixes": [group.told(now_s) for group in leading],
            "prefixes_in_all": len(self._found),
            "ungrouped": self._ungrouped,
        }

    def _take(self, entries: Sequence[Entry]) -> None:
        store = self._store
        now_s = store.now_s()
        for entry in entries:
            if not is_there(store, entry):
                continue
            if entry.extent is not NOWHERE:
                self._blocks["arena"] += 1
                self._cells.add(entry, max(0.0, now_s - entry.accessed_s))
            else:
                self._blocks[store.tier_of(entry) if entry.value is None else "beside"] += 1
            self._group(entry)

    def _group(self, entry: Entry) -> None:
        name = entry.space, prefix_of(entry.key)
        group = self._found.get(name)
        if group is None:
            if len(self._found) >= GROUPS_MAX:
                self._ungrouped += 1
                return
            group = self._found[name] = Group(name[1], entry)
        group.add(entry)

    def _take_holes(self, holes: Sequence[tuple[int, int]]) -> None:
        for start, past in holes:
            self._cells.add_free(start, past)

    def _rank(self, groups: Sequence[Group]) -> None:
        """Keep those that lead so far."""
        self._by_hits = nlargest(GROUPS_SHOWN, [*self._by_hits, *groups], key=lambda group: (group.hits, group.nbytes))
        self._by_bytes = nlargest(GROUPS_SHOWN, [*self._by_bytes, *groups], key=lambda group: group.nbytes)


class Surveys:
    """The latest survey as JSON, made when a reader asks and the last one has aged: all who ask share it."""

    def __init__(self, store: Store, fresh_s: float = 1.0) -> None:
        self._store = store
        self._fresh_s = fresh_s
        self._latest = b""
        self._until_s = 0.0
        self._running: asyncio.Task[bytes] | None = None

    async def latest(self) -> bytes:
        """One that is no older than `fresh_s`, or than three times what it took."""
        if self._latest and perf_counter() < self._until_s:
            return self._latest
        if self._running is None:
            self._running = asyncio.create_task(self._make())
        return await asyncio.shield(self._running)  # a reader that goes away does not end it for the others

    async def _make(self) -> bytes:
        began_s = perf_counter()
        try:
            self._latest = json.dumps(await Survey(self._store).told(), separators=(",", ":")).encode()
            ended_s = perf_counter()
            self._until_s = ended_s + max(self._fresh_s, 3 * (ended_s - began_s))
            return self._latest
        finally:
            self._running = None
