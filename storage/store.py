"""The one interface to the blocks: reserve, lease, match, touch, delete, and the accounts that must always add up.

The store is synchronous and knows no sockets. One short lock covers index, allocator and policy; it is never held
across a copy or I/O, because callers fill and read the arena through the views of the Reservations and Leases that
they hold. Ordinary outcomes (a miss, no room) are None or a count.
"""

from contextlib import ExitStack
from itertools import pairwise

from .background import IoThreads
from .disk.tier import DiskTier
from .entry import NOWHERE, PAYLOAD_OFFSET_BYTES, SLACK_BYTES, Entry, Lease, extent_length
from .eviction.base import Policy, make_policy
from .memory.arena import Arena
from .memory.device_arena import DeviceArena
from .options import StoreOptions
from .state import SLICE_ENTRIES, Change, StoreState
from .tensor_facts import tokens_of
from .tiering.gpu import GpuTier
from .tiering.manager import Tiering

RANDOM_TRIES = 100
"""How often another key is drawn where expired ones are kept."""

QUEUE_JOBS_MAX = 8192
"""Disk jobs of one priority that may wait."""
ZEROS = memoryview(bytes(1024 * 1024))
"""What a gap in a value is filled with, a piece at a time: it may be as long as a value."""
QUEUE_BYTES_LOW = 1024**3
"""What they may move together, at least; more where the arena is larger."""

Name = tuple[bytes, int]
"""A key and its database."""


class Store(StoreState):
    """Blocks of bytes under keys, in an arena of fixed size; when it is full the policy says which block leaves."""

    tiering: Tiering | None
    gpu: GpuTier | None

    @classmethod
    def open(cls, options: StoreOptions) -> "Store":
        """A store over a new arena, as `options` describe it. Raises what make_policy, DiskTier.open and
        Arena raise, and then nothing stays open."""
        policy = make_policy(options.cache_policy)
        disk = None if options.disk is None else DiskTier.open(options.disk)
        with ExitStack() as undo:
            if disk is not None:
                undo.callback(disk.close)  # or its directory stays locked
            arena = Arena.create(options.capacity_bytes, options.hugepages)
            if options.prefault_threads:
                arena.prefault(options.prefault_threads)
            if options.page_lock:
                arena.lock()
            store = cls(arena, policy=policy)
            if disk is not None:
                store.add_disk(
                    disk, io_threads=options.io_threads, spill_wait_s=options.spill_wait_s, keep=options.keep
                )
            undo.pop_all()
        return store

    def add_disk(self, disk: DiskTier, *, io_threads: int = 4, spill_wait_s: float = 0.5, keep: bool = True) -> None:
        """Put a disk tier, which is the store's from here on, below an empty store; what it holds is there at once."""
        io = IoThreads(io_threads, QUEUE_JOBS_MAX, max(QUEUE_BYTES_LOW, 2 * self.arena.nbytes), clock_s=self.now_s)
        self.keep = keep
        self.tiering = Tiering(self, disk, io, spill_wait_s)
        self.tiering.gpu = self.gpu
        self.tiering.load()
        io.start()

    def add_gpu(self, arena: DeviceArena) -> None:
        """Put a tier of GPU memory, which is the store's from here on, beside memory."""
        self.gpu = GpuTier(self, arena)
        self.gpu.io.start()
        if self.tiering is not None:
            self.tiering.gpu = self.gpu

    @property
    def below(self) -> Tiering | GpuTier | None:
        """What brings blocks into memory that are away: the disk's tier, which knows the GPU, or the GPU's alone."""
        return self.gpu if self.tiering is None else self.tiering

    # ---- writing -------------------------------------------------------------------------------------------------

    def patch(self, key: bytes, offset: int, patch: bytes, space: int = 0) -> bool:
        """Lay `patch` over the value under `key` at `offset`, in the arena where the value lies; it grows as far as
        need be, with zeros between its end and `offset`, and expires when it would have.

        False, and nothing has changed, where that cannot be: the value is absent, short (INLINE_BYTES_MAX), on disk or
        on the GPU, a reader holds it, or there is no room behind it. Costs a copy of `patch`, made under the lock.
        """
        with self.lock:
            entry = self._visible(key, space)
            if entry is None or entry.extent is NOWHERE or entry.leases or entry.record is not None:
                return False
            if self._on_gpu(entry):
                return False
            length = max(entry.length, offset + len(patch))
            if not self._lengthen(entry, extent_length(length)):
                return False
            memory = self.arena.view[entry.extent.offset + PAYLOAD_OFFSET_BYTES :][: length + SLACK_BYTES]
            zero(memory, entry.length, offset)
            memory[offset : offset + len(patch)] = patch
            entry.length, entry.hits = length, 0
            entry.tokens = tokens_of(memory)
            entry.created_s = entry.accessed_s = self.now_s()
            self.policy.touch(entry)
            self.stats.overwritten += 1
            self._renumber(entry)
            if self.journal is not None:
                self.journal.append(("set", key, space))
        return True

    def expire(self, key: bytes, at_ms: int, space: int = 0) -> bool:
        """Set when `key` shall be gone (Unix ms; 0 = never; the past = at once). False when there is no such key."""
        with self.lock:
            entry = self._visible(key, space)
            if entry is None:
                return False
            self.index.set_end(entry, at_ms)
            if at_ms and at_ms <= self.now_ms():
                self._remove(entry, "del")
                self.stats.deleted += 1
            else:
                self.remember_expiry(entry)
                if entry.is_resident:
                    self._policy_of(entry).end_changed(entry)
                if self.gpu is not None:
                    self.gpu.end_changed(entry)
                if self.tiering is not None:
                    self.tiering.set_expiry(entry)
                self._renumber(entry)
                if self.journal is not None:
                    self.journal.append(("set", key, space))
            return True

    # ---- reading -------------------------------------------------------------------------------------------------

    def fetch_untouched(self, key: bytes, space: int = 0) -> bytes | Lease | None:
        """`fetch` for a reader who must not keep a block alive by looking at it: CLIENT NO-TOUCH."""
        with self.lock:
            entry = self._visible(key, space)
            if entry is None:
                self.stats.misses += 1
                return None
            if not entry.is_resident:
                return None
            self.stats.hits += 1
            return self._lease(entry) if entry.value is None else entry.value

    # ---- telling of changes ------------------------------------------------------------------------------------------

    def keep_journal(self, wanted: bool) -> None:
        """Begin or end to list what changes. Under the lock, as is all that follows: the disk's threads write to it."""
        with self.lock:
            if not wanted:
                self.journal = None
            elif self.journal is None:
                self.journal = []

    def take_journal(self) -> list[Change]:
        """What has changed since the last time, in order; nothing while it is not kept."""
        with self.lock:
            if not self.journal:
                return []
            taken, self.journal = self.journal, []
            return taken

    # ---- other names: every byte stays where it is, and readers keep their leases ------------------------------------

    def move(self, old: Name, new: Name) -> bool:
        """Put the block under `old` under `new`, in place of what is there; its end goes with it. False without one.

        Leases on it stay good, and their `key` is the new one from now on.
        """
        with self.lock:
            entry = self._visible(*old)
            if entry is None or old == new:
                return entry is not None
            self._visible(*new)  # what is there may have expired, which is not the same as being replaced
            cost_bytes = entry.memory_bytes
            replaced = self.index.rename(entry, *new)
            if replaced is not None:
                self._retire(replaced, entry)
                self.stats.overwritten += 1
            if self.journal is not None:
                self.journal += [("del", *old), ("set", *new)]
            if self.gpu is not None:
                self.gpu.renamed(old)
            if self.tiering is not None and not self.tiering.rename(entry, old):
                self.lapse(entry)  # the disk has let go of it a moment ago
                return True
            self._renumber(entry)
            if entry.value is not None:
                self.inline_bytes += entry.memory_bytes - cost_bytes  # the key is part of it
                if self.inline_bytes > self.inline_bytes_high:
                    self.evict_inline(entry)
            self.remember_expiry(entry)
            return True

    def swap(self, first: int, second: int) -> None:
        """Exchange two databases: each key of one is in the other from now on. Costs no step a key, but with a disk one
        for each value that memory alone has, or where memory has many and the disk few, for each of those."""
        if first == second:
            return
        with self.lock:
            if self.tiering is not None:
                self.tiering.swap(first, second)
                self.writes += 1
            if self.gpu is not None:
                for space in (first, second):
                    self.gpu.renamed_all(space)
            self.index.swap(first, second, self.writes)

    # ---- leaving -------------------------------------------------------------------------------------------------

    def flush(self, space: int | None = None, *, later: bool = False) -> int:
        """Delete everything, or everything of one database; returns how many keys that were. The journal does not list
        them: its reader is told of a flush as one thing. With `later` what they hold may still be held: the caller sees
        to `give_back`."""
        with self.lock:
            spaces = range(len(self.index.spaces)) if space is None else (space,)
            if self.tiering is not None:
                self.tiering.clear(space)
            if self.gpu is not None:
                self.gpu.renamed_all(space)
            leaving: list[dict[bytes, Entry]] = []
            buckets: list[set[bytes]] = []
            for each in spaces:
                entries, of_entries = self.index.take(each)
                leaving.append(entries)
                buckets += of_entries
            count = sum(map(len, leaving))
            self.stats.flushed += count
            if len(self.index) or self.leases or self.reserved_bytes:
                self._flushed += filter(None, leaving)
                self._flushed_keys += buckets
            elif count:
                self._start_afresh([*leaving, *self._flushed], [*buckets, *self._flushed_keys])
            if not later:
                while self._give_back(SLICE_ENTRIES):
                    pass
            return count

    def give_back(self, entries_max: int | None = SLICE_ENTRIES) -> bool:
        """Give back what flushed entries hold, of at most so many or None = of all, or hand some entries over to a new
        policy; whether there is more to do. To be called every so often; what room is wanted for is given back by
        itself."""
        with self.lock:
            more = self._give_back(SLICE_ENTRIES if entries_max is None else entries_max)
            while more and entries_max is None:
                more = self._give_back(SLICE_ENTRIES)
            if more:
                return True
            self._drop_discarded()
            return self._discarded is not None or self._go_on_with_succession()

    def collect_expired(self, entries_max: int = 200) -> int:
        """Remove up to `entries_max` blocks whose time has come; returns how many. To be called every so often, as it
        also does what was put off."""
        collected = 0
        with self.lock:
            self.catch_up()
            for key, database in self._expiries.due(self.now_ms()):
                self._remove(self.index.spaces[database.number][key], "expired")
                self.stats.expired += 1
                collected += 1
                if collected == entries_max:
                    break
            self._give_back(SLICE_ENTRIES)
            self._drop_discarded()
        return collected

    def revoke_overdue(self) -> int:
        """End the leases whose time limit has passed; returns how many. Done by itself when room is short."""
        with self.lock:
            return self._revoke_overdue()

    def close(self, *, save: bool = True) -> None:
        """Give the arena back, with `save` after writing to disk, where there is one, all that is not there; that takes
        as long as it takes. No Reservation or Lease may be used afterwards."""
        self.give_back(None)
        if self.gpu is not None:
            self.gpu.drain()
        if self.tiering is not None:
            self.tiering.close(save=save)
        if self.gpu is not None:
            self.gpu.close()
        self._memory.release()
        self.arena.close()

    # ---- what leaves for what is new -----------------------------------------------------------------------------

    def set_eviction(self, policy: Policy | None) -> None:
        """Let `policy`, a fresh one, decide from now on which block leaves, or with None let no block leave (Redis'
        noeviction; the order stays what it was). A policy of another kind takes over what the entries themselves know:
        when each was used last, and how often; of many some in each `give_back`."""
        with self.lock:
            self.evicts = policy is not None
            if policy is not None and policy.name != self.policy.name:
                self._begin_succession(policy)
            self._note_refusals()

    def set_bound(self, nbytes: int) -> None:
        """Let all values together hold `nbytes` at most (Redis' maxmemory), 0 or the arena's size being no bound beside
        the arena. What is held beyond it leaves by `shrink`."""
        with self.lock:
            self.bound_bytes = nbytes if nbytes < self.arena.nbytes else 0
            self._note_refusals()

    def shrink(self) -> bool:
        """Let some of the coldest leave while more is held than the bound; whether there is more to leave. To be called
        when the bound was lowered, and every so often, since what is leased or being written stays."""
        if not self.bound_bytes:
            return False
        with self.lock:
            before = self.stats.evicted + (0 if self.tiering is None else self.tiering.stats.unloaded)
            self._shrink()
            after = self.stats.evicted + (0 if self.tiering is None else self.tiering.stats.unloaded)
            return after > before and self._excess_bytes(0) > 0

    def admits_inline(self, growth_bytes: int) -> bool:
        """Whether small values may take so many bytes more; entries that may leave for them leave now."""
        if not self.may_refuse:
            return True
        with self.lock:
            return self._grows_inline(max(0, growth_bytes))

    # ---- looking around ------------------------------------------------------------------------------------------

    def tier_of(self, entry: Entry) -> str:
        """The fastest tier for a client without a GPU that has an entry's bytes: memory, gpu or disk."""
        return "gpu" if not entry.is_resident and self._on_gpu(entry) else entry.tier

    def names(self, place: int, count: int, space: int = 0) -> tuple[int, list[bytes]]:
        """As `scan`, but expired keys that are not collected yet are among them."""
        with self.lock:
            return self.index.scan(place, count, space)

    def count(self, space: int = 0) -> int:
        """Keys of a database; expired ones count until they are collected, as in Redis."""
        return len(self.index.spaces[space])

    def random_key(self, space: int = 0) -> bytes | None:
        """Any key of a database, None when it is empty. While what has expired is kept, that may be one of those, as
        in Redis."""
        with self.lock:
            tries = 0
            while (key := self.index.random_key(space)) is not None:
                tries += self.keep_expired
                if tries == RANDOM_TRIES or self._visible(key, space) is not None:
                    return key
            return None

    def scan(self, cursor: int, count: int, space: int = 0) -> tuple[int, list[bytes]]:
        """One step of SCAN: the next cursor (0 = done) and at least `count` keys unless the walk ends first."""
        with self.lock, self.now_ms.one_moment():
            following, keys = self.index.scan(cursor, count, space)
            return following, [key for key in keys if self._visible(key, space) is not None]

    def tiers(self) -> dict[str, dict[str, int | str]]:
        """Figures of each tier, sizes in bytes: room, entries, holds and what the memory is made of."""
        with self.lock:
            arena = self.arena
            figures: dict[str, dict[str, int | str]] = {
                "memory": {
                    "capacity": arena.nbytes,
                    "used": self.used_bytes,
                    "free": self.allocator.free_bytes,
                    "largest_free": self.allocator.longest_bytes,
                    "reserved": self.reserved_bytes,
                    "inline": self.inline_bytes,
                    "entries": len(self.index) + self.flushed_entries - self.away,
                    "leases": self.leases,
                    "pages": arena.nbytes // arena.page_bytes,
                    "page_size": arena.page_bytes,
                    "page_kind": arena.pages,
                    "page_locked": arena.page_locked,
                    "policy": self.policy.name,
                }
            }
            if self.tiering is not None:
                figures["memory"]["unsaved"] = len(self.unsaved)
                figures["disk"] = self.tiering.figures()
            if self.gpu is not None:
                figures["gpu"] = self.gpu.figures()
            return figures

    def ends(self) -> list[tuple[int, int]]:
        """For each database, how many keys have an end, and the sum of those ends in Unix ms."""
        return [(database.ends, database.ends_ms) for database in self.index.databases]

    def check_integrity(self) -> None:
        """Raise AssertionError unless index, policies, allocator and byte accounts agree with one another."""
        with self.lock:
            self.index.check_integrity()
            self.allocator.check_integrity()
            flushed = [entry for entries in self._flushed for entry in entries.values()]
            in_arena = [entry for entry in (*self.index, *flushed) if entry.extent is not NOWHERE]
            away = [entry for entry in (*self.index, *flushed) if not entry.is_resident]
            assert len(away) == self.away
            nowhere = [entry for entry in away if entry.record is None and not self._on_gpu(entry)]
            assert all(entry.database.flushed for entry in nowhere), "a block is nowhere"
            if self.gpu is not None:
                self.gpu.check_integrity({*self.index, *flushed})
            if self.tiering is not None:
                kept = {entry for entry in self.unsaved if not entry.database.flushed}
                assert kept == {entry for entry in self.index if entry.record is None}
                self.tiering.superseded.check_integrity(self.unsaved)
            inline = [entry for entry in (*self.index, *flushed) if entry.value is not None]
            assert sum(entry.extent.length for entry in in_arena) == self.live_bytes
            assert sum(entry.memory_bytes for entry in inline) == self.inline_bytes
            assert len(self.policy) == len(in_arena)
            assert len(self.inline_policy) == len(inline)
            assert all(entry in self.policy for entry in in_arena)
            assert all(entry in self.inline_policy for entry in inline)
            held = self.live_bytes + self.retired_bytes + self.reserved_bytes
            assert held + self.allocator.free_bytes == self.arena.nbytes
            for extent, following in pairwise(sorted([*(entry.extent for entry in in_arena), *self.allocator.holes()])):
                assert extent.offset + extent.length <= following.offset, "extents overlap"


def zero(memory: memoryview, start: int, end: int) -> None:
    """Fill a gap in a value with zero bytes, nothing when `end` is not behind `start`: an extent still holds what was
    there before."""
    for at in range(start, end, len(ZEROS)):
        stop = min(end, at + len(ZEROS))
        memory[at:stop] = ZEROS[: stop - at]
