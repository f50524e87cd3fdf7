"""The state that a store and its tiers share: index, allocator, policies and byte accounts, under one lock.

Two take its `lock`: Store (store.py), which adds the verbs of clients, and the tiers (tiering/), which this file knows
by tier_protocols.py alone. The lock is short: never held across a copy or I/O. A step expects it to be held and leaves
everything in agreement; none copies a payload, waits or calls out. The few verbs at the end, which tiers need as
clients do, take it themselves.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import islice
from operator import attrgetter, itemgetter

from ._core import GRACE_TURNS as GRACE_TURNS
from ._core import StoreCore
from .database import Database
from .entry import ENTRY_OVERHEAD_BYTES, NOWHERE, Entry, Lease, LeaseRun
from .eviction.base import LRU, Policy
from .eviction.succession import Succession
from .expiry import Clock, Deadlines, unix_ms
from .index import Index
from .lmcache_pairs import Departed, other_half
from .memory.allocator import GRAIN_BYTES, Allocator, Extent
from .memory.arena import Arena
from .stats import StoreStats
from .tier_protocols import DeviceTier, LowerTier

INLINE_SHARE = 16
"""Inline values may cost up to 1/16 of the arena's capacity beside it, and at least INLINE_BYTES_LOW."""
INLINE_BYTES_LOW = 4 * 1024 * 1024

SPARED_PART = 2
"""A key whose presence was affirmed is spared by eviction for GRACE_TURNS, as long as others can go instead. Which part
of the room is spared at most: or what is new would leave for what is newer when a client affirms all there is."""

PUT_OFF_ENTRIES_MAX = 8 * 1024
"""How many entries that were looked up may wait for the order of eviction to learn of it."""

UNWRITTEN_PASSED_MAX = 512
UNWRITTEN_PART = 8
"""How many blocks that the disk has not yet, and what part of the arena, are passed over in search of some that can
leave at once."""

INLINE_LOOK_ENTRIES_MAX = 64
"""How many of the coldest small values are looked at for some that the disk has, while most wait to be written."""

SHRINK_ENTRIES_MAX = 1000
"""How many entries leave at a time for a bound that was lowered: a few milliseconds."""

SPARE_PART = 4
"""A value that grows gets a quarter of its length as room to grow on. So many appends copy it a few times in all."""

SLICE_ENTRIES = 1_000
"""How many entries are freed at a time: a millisecond or two."""

FLUSHED_AT_ONCE = 200
"""How many entries of a flushed database are given back between two looks at whether that makes room enough."""

HANDED_AT_ONCE = 300
"""How many entries a new policy takes over at a time: a millisecond or two."""

EXPIRY_SPAN_MS = 128
"""Ends of keys are swept so many milliseconds' worth at a time."""

Change = tuple[str, bytes, int]
"""What has happened ("set", "del", "expired", "evicted") to which key of which database."""

Lookup = tuple[list[Entry], float, int]
"""What was found, when (monotonic seconds), and in which turn."""


def drop_keys(buckets: list[set[bytes]], entries_max: int) -> None:
    """Free some of what SCAN had walked: it takes about an eighth of the time that as many entries take."""
    left = 8 * entries_max
    while buckets and left > 0:
        left -= 1 + len(buckets.pop())


class Discarded:
    """Entries that no reader can find any more, with the policies that still order them."""

    __slots__ = ("_buckets", "_entries", "_expiries", "_inline_policy", "_policy", "_unsaved")

    def __init__(self, entries: list[dict[bytes, Entry]], buckets: list[set[bytes]], state: "StoreState") -> None:
        self._entries, self._buckets = entries, buckets
        self._policy = state.policy
        self._inline_policy = state.inline_policy
        self._unsaved = state.unsaved
        self._expiries = state._expiries

    def drop(self, entries_max: int) -> bool:
        """Free up to `entries_max` entries; False when none is left."""
        drop_keys(self._buckets, entries_max)
        while self._entries and not self._entries[-1]:
            self._entries.pop()
        if not self._entries:
            return self._expiries.drop(8 * entries_max) or bool(self._buckets)
        entries = self._entries[-1]
        for _ in range(min(entries_max, len(entries))):
            _, entry = entries.popitem()
            self._unsaved.pop(entry, None)
            if entry.is_resident:
                (self._policy if entry.value is None else self._inline_policy).forget(entry)
        return True


class StoreState(StoreCore):
    """What is where, what holds it and what it costs, in an `arena` that it owns from here on. `now_ms` is wall-clock
    time, for expiry, `now_s` a monotonic clock, for idle times and lease limits; tests pass their own.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        policy: Policy | None = None,
        clock_ms: Callable[[], int] = unix_ms,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = arena
        self._memory = arena.view.toreadonly()
        self.stats = StoreStats()
        self.index = Index()
        self._spaces = self.index.spaces
        self.policy: Policy = LRU() if policy is None else policy
        self.inline_policy: Policy = type(self.policy)()
        self.inline_bytes_high = max(arena.nbytes // INLINE_SHARE, INLINE_BYTES_LOW)
        self.bound_bytes = 0
        """What all values may hold together where that is less than the arena (Redis' maxmemory); 0 = the arena."""
        self.beside_bytes = 0
        """What counts against that bound and is no value: what a server's clients hold, as it was told last."""
        self.allocator = Allocator(arena.nbytes)
        self.live_bytes: int = 0
        """Extents of visible entries."""
        self.retired_bytes: int = 0
        """Extents whose entry has left the index while a lease still holds it."""
        self.reserved_bytes: int = 0
        """Extents being written."""
        self.inline_bytes: int = 0
        """Cost of values outside the arena, overhead included."""
        self.leases = 0
        self.away = 0
        """Visible entries whose bytes are not in memory: on disk, on the GPU, or both."""
        self.tiering: LowerTier | None = None
        """What moves blocks between memory and disk; None where memory is the only tier."""
        self.gpu: DeviceTier | None = None
        """The tier in GPU memory; None where there is none."""
        self.keep = True
        """False: a block stays in memory only until it is on disk and not held."""
        self.unsaved: dict[Entry, int] = {}
        """With a disk: entries whose bytes are not there, each with the number of its write, in the order of those. A
        SWAPDB changes none of these numbers: see `write_of`."""
        self.writes = 0
        """How often something was made visible; the number of a write."""
        self.now_ms = Clock(clock_ms)
        self.now_s = clock_s
        self.affirmed_turn = 0
        """The last turn in which a key was affirmed."""
        self._looked_up: list[Lookup] = []  # runs that are not yet touched
        self._affirmed: list[Lookup] = []
        self._put_off_entries = 0
        self.journal: list[Change] | None = None
        """What has changed since the journal was last taken, in order; None while it is not kept."""
        self.end_holds: Callable[[], object] = lambda: None
        """Called before room is looked for: leases that are not needed any more can end."""
        self._evicts = True
        self.may_refuse = self.policy.selective
        """Whether a small value may find no room: nothing leaves, or not everything may, or there is a bound."""
        self.keep_expired = False
        """True: what has come to its end is not found any more, but stays (CLIENT PAUSE)."""
        self.turn = GRACE_TURNS + 1
        """A coarse clock that the server advances, ten turns a second: it dates `affirm`."""
        self._departed = Departed()
        self._succession: Iterator[None] | None = None
        """The steps in which a new policy takes over."""
        self._flushed_keys = []
        self._discarded: Discarded | None = None
        self._flushed = []
        # Keys, not entries: a deadline that is void by now must not keep a value alive that no account knows.
        self._expiries: Deadlines[tuple[bytes, Database]] = Deadlines(self.index.expires, EXPIRY_SPAN_MS)
        self._limits: Deadlines[Lease | LeaseRun] = Deadlines(lambda _, hold: hold.held)

    @property
    def evicts(self) -> bool:
        """False: a full store refuses new values instead of letting old ones go (Redis' noeviction)."""
        return self._evicts

    @evicts.setter
    def evicts(self, evicts: bool) -> None:
        self._evicts = evicts
        self._note_refusals()

    def _note_refusals(self) -> None:
        self.may_refuse = bool(not self._evicts or self.policy.selective or self.bound_bytes)

    def _put_off(self, kind: list[Lookup], entries: list[Entry]) -> None:
        """Note what was looked up, for when the order is asked for: a lookup of a thousand keys answers sooner."""
        if kind and len(entries) == len(kind[-1][0]) and entries == kind[-1][0]:
            kind[-1] = entries, self.now_s(), self.turn  # the same once more
            return
        kind.append((entries, self.now_s(), self.turn))
        self._put_off_entries += len(entries)
        if self._put_off_entries > PUT_OFF_ENTRIES_MAX:
            self.catch_up()

    def catch_up(self) -> None:
        """Touch the runs that were looked up, as far as they are still there, and spare what was affirmed."""
        looked_up, affirmed = self._looked_up[:], self._affirmed[:]
        self._looked_up.clear()
        self._affirmed.clear()
        self._put_off_entries = 0
        for run, when_s, _ in looked_up:
            try:
                self._touch_run(run, when_s)
            except KeyError:  # some have left meanwhile
                self._touch_run([entry for entry in run if self.index.get(entry.key, entry.space) is entry], when_s)
        for entries, _, turn in affirmed:
            for entry in entries:
                entry.affirmed_turn = turn

    def _touch_run(self, run: list[Entry], when_s: float | None = None) -> None:
        now_s = self.now_s() if when_s is None else when_s
        for entry in run:
            entry.accessed_s = now_s
        self.policy.touch_run([entry for entry in run if entry.extent is not NOWHERE])
        self.inline_policy.touch_run([entry for entry in run if entry.value is not None])
        if self.away and self.tiering is not None:
            self.tiering.touch_run([entry.record for entry in run if entry.record is not None])
        if self.gpu is not None:
            self.gpu.touch_run(run)

    def publish_away(self, entry: Entry, expire_at_ms: int) -> None:
        """Make an entry visible whose bytes are on the GPU."""
        self._publish(entry, expire_at_ms)

    def at_hand(self, entry: Entry) -> bool:
        """Whether memory or the GPU has an entry's bytes, so that it needs no record on disk."""
        return entry.is_resident or self._on_gpu(entry)

    def _on_gpu(self, entry: Entry) -> bool:
        return self.gpu is not None and self.gpu.has(entry)

    def is_unsaved(self, entry: Entry) -> bool:
        """Whether memory alone has an entry; one look into a dict needs no lock."""
        return entry in self.unsaved and not entry.database.flushed

    def write_of(self, entry: Entry) -> int:
        """The number of the write that made an unsaved entry what it is: its own, or a SWAPDB since."""
        return max(self.unsaved[entry], entry.database.swapped)

    def _give_back(self, entries_max: int = FLUSHED_AT_ONCE) -> bool:
        """Give back what entries of flushed databases hold, at most so many; False when there are none."""
        drop_keys(self._flushed_keys, entries_max)
        while self._flushed and not self._flushed[-1]:
            self._flushed.pop()
        if not self._flushed:
            return bool(self._flushed_keys)
        entries = self._flushed[-1]
        for _ in range(min(entries_max, len(entries))):
            self._retire(entries.popitem()[1])
        return True

    def give_back_flushed(self) -> bool:
        """The same for a tier that looks for room."""
        return self._give_back()

    def _drop_discarded(self) -> None:
        """Free a slice of what the last flush has thrown away; the lock is held."""
        if self._discarded is not None and not self._discarded.drop(SLICE_ENTRIES):
            self._discarded = None

    def _start_afresh(self, leaving: list[dict[bytes, Entry]], buckets: list[set[bytes]]) -> None:
        """Begin anew with an empty index, without reader or writer: nothing that is in the policies or falls due is
        there any more."""
        self.allocator = Allocator(self.arena.nbytes)
        self.live_bytes = self.inline_bytes = self.away = 0
        # One at a time: what an earlier flush left goes now, or flushing in a loop would pile garbage up.
        self._discarded = Discarded(leaving, buckets, self)
        self._flushed, self._flushed_keys = [], []
        if self.gpu is not None:
            self.gpu.start_afresh()
        self.unsaved = {}
        policy = self.policy.new if isinstance(self.policy, Succession) else self.policy
        self.policy, self.inline_policy, self._succession = type(policy)(), type(policy)(), None
        self._expiries = Deadlines(self.index.expires, EXPIRY_SPAN_MS)

    def _begin_succession(self, policy: Policy) -> None:
        """Let `policy` take over: at once from few entries, from many in steps."""
        self.catch_up()
        one, other = Succession(self.policy, policy), Succession(self.inline_policy, type(policy)())
        self.policy, self.inline_policy = one, other
        self._succession = self._succeed(one, other)
        if len(self.index) <= SLICE_ENTRIES:
            while self._give_back():
                pass
            while self._go_on_with_succession():
                pass

    def _go_on_with_succession(self) -> bool:
        """Take a step of it, of a millisecond or two; whether there are more. What was flushed has been given back."""
        if self._succession is not None and next(self._succession, self) is self:
            self._succession = None
        return self._succession is not None

    def _succeed(self, one: Succession, other: Succession) -> Iterator[None]:
        """Hand all entries over, coldest first, and then what was stored or used meanwhile. They are sorted in runs, by
        times as of then, and these are merged."""
        key = attrgetter("created_s" if one.name == "FIFO" else "accessed_s")
        is_whole = False
        while not is_whole:  # once more for those whose name, or database, has changed while the keys were walked
            runs: list[Iterator[tuple[float, Entry]]] = []
            for space in range(len(self.index.spaces)):
                place, walked = 0, False
                while not walked:
                    place, keys = self.index.scan(place, SLICE_ENTRIES, space)
                    found = map(self.index.spaces[space].__getitem__, keys)
                    run = sorted((each for each in found if each.is_resident), key=key)
                    runs.append(zip(array("d", map(key, run)), run, strict=True))
                    walked = not place
                    yield
            for number, (_, entry) in enumerate(merge(*runs, key=itemgetter(0))):
                (one if entry.value is None else other).hand_over(entry)
                if number % HANDED_AT_ONCE == 0:
                    yield
            while not (is_whole := one.end(HANDED_AT_ONCE) & other.end(HANDED_AT_ONCE)) and (one.late or other.late):
                yield
        self.policy, self.inline_policy = one.new, other.new

    def remember_expiry(self, entry: Entry) -> None:
        if entry.expire_at_ms:
            self._expiries.add(entry.expire_at_ms, (entry.key, entry.database), len(self.index))

    def place(self, length: int, *, drop: bool = True) -> Extent | None:
        """An extent of `length` bytes, by eviction if need be. Without `drop` no block leaves which the disk shall have
        and has not yet."""
        if self.bound_bytes and not self._shrink(length, drop=drop):
            return None
        extent = self.allocator.allocate(length)
        while extent is None and self._give_back():
            extent = self.allocator.allocate(length)
        lossless = self.tiering is not None and (not drop or not self.evicts)
        if extent is not None or length > self.arena.nbytes or not (self.evicts or lossless):
            return extent
        found = None
        if self.tiering is not None:
            found = self.allocator.window(length, self._ready_victims(self.victims(self.policy), drop=drop))
            if found is None and lossless:
                return None
        if found is None:
            found = self.allocator.window(length, self._droppable())
        if found is None and self._revoke_overdue():
            extent = self.allocator.allocate(length)  # what was revoked may have been deleted before: then it is free
            if extent is not None:
                return extent
            found = self.allocator.window(length, self._droppable())
        if found is None:
            return None
        extent, leaving = found
        for entry in leaving:
            self._evict(entry)
        self.allocator.allocate_at(extent)
        return extent

    def _lengthen(self, entry: Entry, length: int) -> bool:
        """See that an entry's extent has `length` bytes, by what is free behind it, of which it takes more than that:
        what has grown grows on."""
        extent = entry.extent
        if extent.length >= length:
            return True
        most = length + length // SPARE_PART // GRAIN_BYTES * GRAIN_BYTES
        if self.bound_bytes:
            most = min(most, (extent.length - self._excess_bytes(0)) // GRAIN_BYTES * GRAIN_BYTES)
        longer = self.allocator.extend(extent, length, most)
        if longer is None:
            return False
        self.live_bytes += longer.length - extent.length
        entry.extent = longer
        return True

    def victims(self, policy: Policy) -> Iterator[Entry]:
        """The entries that may leave memory, coldest first; those whose presence was affirmed a moment ago come last of
        all. With a disk below everything may, though not everything may be dropped."""
        if self._put_off_entries:
            self.catch_up()
        oldest = self.turn - GRACE_TURNS
        if self.affirmed_turn >= oldest:
            return self._spared_last(policy, oldest)
        return self._in_order(policy) if policy.selective else policy.victims()

    def _in_order(self, policy: Policy) -> Iterator[Entry]:
        if not policy.selective or self.tiering is None:
            return policy.victims()
        return merge(policy.victims(), policy.others(), key=policy.warmth)

    def _droppable(self) -> Iterator[Entry]:
        """The entries that may leave the arena, written or not."""
        victims = self.victims(self.policy)
        return filter(self.may_drop, victims) if self.policy.selective else victims

    def _victims_of_both(self) -> Iterator[Entry]:
        """The same of small values and the others together."""
        return merge(self.victims(self.policy), self.victims(self.inline_policy), key=self._warmth)

    def _policy_of(self, entry: Entry) -> Policy:
        return self.policy if entry.value is None else self.inline_policy

    def _warmth(self, entry: Entry) -> float:
        return self._policy_of(entry).warmth(entry)

    def _spared_last(self, policy: Policy, oldest: int) -> Iterator[Entry]:
        """The policy's victims; behind all others those that were affirmed in turn `oldest` or later, as far as the
        bound goes, the one affirmed last being the last to go. A client that is told of one half of a chunk comes back
        for both."""
        room_bytes = self.arena.nbytes if policy is self.policy else self.inline_bytes_high
        spared: list[tuple[int, int, Entry]] = []
        spared_bytes = 0
        for place, entry in enumerate(self._in_order(policy)):
            twin = self._twin(entry)
            turn = entry.affirmed_turn if twin is None else max(entry.affirmed_turn, twin.affirmed_turn)
            if turn < oldest:
                yield entry
                continue
            heappush(spared, (turn, place, entry))
            spared_bytes += entry.memory_bytes
            while spared_bytes * SPARED_PART > room_bytes:
                _, _, entry = heappop(spared)
                spared_bytes -= entry.memory_bytes
                yield entry
        while spared:
            yield heappop(spared)[2]

    def _ready_victims(self, victims: Iterator[Entry], *, drop: bool) -> Iterator[Entry]:
        """Which of `victims` may leave at once, coldest first. Those that are to be written first are passed over, but
        not many: behind them are blocks that are used, and a look through a full arena would take longer than the disk.
        A caller that will drop some of them otherwise looks further."""
        passed = passed_bytes = 0
        for entry in victims:
            if self.may_leave(entry):
                yield entry
                continue
            passed, passed_bytes = passed + 1, passed_bytes + self._held_bytes(entry)
            if passed > UNWRITTEN_PASSED_MAX or (not drop and passed_bytes * UNWRITTEN_PART > self.arena.nbytes):
                return

    def standing_at(self, nbytes: int) -> list[Entry]:
        """The entries that would leave memory for an extent of `nbytes`, written or not; nothing changes."""
        excess = self._excess_bytes(nbytes) if self.bound_bytes else 0
        if excess <= 0:
            found = self.allocator.window(nbytes, self.victims(self.policy))
            return [] if found is None else found[1]
        standing: list[Entry] = []
        for entry in islice(self._victims_of_both(), SHRINK_ENTRIES_MAX):
            standing.append(entry)
            excess -= self._held_bytes(entry)
            if excess <= 0:
                break
        return standing

    def may_leave(self, entry: Entry) -> bool:
        """Whether an entry can go without being written: the disk has it, or never shall."""
        return entry.record is not None or (self.may_drop(entry) and not self.is_due(entry))

    def may_drop(self, entry: Entry) -> bool:
        """Whether an entry can go, written or not, by the policy in force."""
        if entry.record is not None or self._on_gpu(entry):
            return True
        return self.evicts and (not self.policy.selective or entry.expire_at_ms != 0)

    def is_due(self, entry: Entry) -> bool:
        """Whether the disk shall have an entry before it leaves, and has not yet."""
        if entry.record is not None or self.tiering is None or not self.tiering.storable(entry):
            return False
        if entry.database.flushed or self._on_gpu(entry):
            return False
        return self._policy_of(entry).spills(entry) or not self.may_drop(entry)

    def _evict(self, entry: Entry) -> None:
        if entry.record is not None or self._on_gpu(entry):
            self._unload(entry)
            return
        if self.index.get(entry.key, entry.space) is not entry:
            return  # it has just gone with its other half
        if self.tiering is not None and self.is_due(entry):
            self.tiering.stats.spill_dropped += 1
        self.lapse(entry)

    def lapse(self, entry: Entry) -> None:
        """Let an entry leave all tiers, and with it the other half of what LMCache keeps under two keys: one alone
        would be found by a lookup and then not be there."""
        twin = self._twin(entry)
        if twin is None:
            self._departed.note(entry.key, entry.space, self.turn)
        for leaving in (entry,) if twin is None else (entry, twin):
            self.stats.evicted_away += not leaving.is_resident
            self._remove(leaving, "evicted")
            self.stats.evicted += 1
            self.stats.evicted_bytes += leaving.length

    def _twin(self, entry: Entry) -> Entry | None:
        """The other half of what LMCache keeps under two keys, if there is one."""
        other = other_half(entry.key)
        twin = None if other is None else self.index.get(other, entry.space)
        return None if twin is None or (self.policy.selective and not twin.expire_at_ms) else twin

    def _unload(self, entry: Entry) -> None:
        """Drop a block from memory that is on disk or on the GPU too: it stays visible."""
        assert entry.record is not None or self._on_gpu(entry), "no other tier has the bytes"
        if entry.value is not None:
            self.inline_policy.forget(entry)
            self.inline_bytes -= entry.memory_bytes
            entry.value = None
        else:
            self.policy.forget(entry)
            self.live_bytes -= entry.extent.length
            self.allocator.free(entry.extent)
            entry.extent = NOWHERE
        self.away += 1
        if self.gpu is not None:
            self.gpu.unloaded(entry)
        if self.tiering is not None and entry.record is not None:
            self.tiering.stats.unloaded += 1
            self.tiering.unloaded(entry, entry.record)

    def _fits_inline(self, old: Entry | None, length: int) -> bool:
        """Whether an inline value may take the place of `old`: one that needs no more than that always may."""
        growth = ENTRY_OVERHEAD_BYTES + length
        if old is not None and old.value is not None:
            growth -= old.memory_bytes
        return self._grows_inline(max(0, growth), old)

    def _grows_inline(self, growth: int, newest: Entry | None = None) -> bool:
        """Whether small values may take `growth` bytes more, after those have left that may; `newest` stays."""
        if self.bound_bytes and not self._shrink(growth, newest=newest):
            return False
        while self.inline_bytes + growth > self.inline_bytes_high and self._give_back():
            pass
        selective = self.policy.selective
        if growth == 0 or (self.evicts and not selective):
            return True  # what is too much leaves when the value is there
        if (selective or self.tiering is not None) and self.inline_bytes + growth > self.inline_bytes_high:
            self.evict_inline(newest, growth)
        return self.inline_bytes + growth <= self.inline_bytes_high

    def _shrink(self, coming_bytes: int = 0, *, newest: Entry | None = None, drop: bool = True) -> bool:
        """Bring what is held and what is coming within `bound_bytes`, the coldest of all leaving; `newest` stays. False
        when all that may leave is not enough. True also when SHRINK_ENTRIES_MAX have left and others go on, later: a
        bound that was lowered far is reached step by step, and refuses nothing meanwhile."""
        while (excess := self._excess_bytes(coming_bytes)) > 0 and self._give_back():
            pass
        if excess <= 0:
            return True
        if coming_bytes > self.bound_bytes:
            return False
        for lossless in (True, False):
            if lossless and self.tiering is None:
                continue
            victims = self._victims_of_both()
            if lossless:
                victims = self._ready_victims(victims, drop=drop)
            elif not (drop and self.evicts):
                break
            leaving: list[Entry] = []
            for entry in victims:
                if entry is newest or not self.may_drop(entry):
                    continue
                leaving.append(entry)
                excess -= self._held_bytes(entry)
                if excess <= 0 or len(leaving) == SHRINK_ENTRIES_MAX:
                    break
            for entry in leaving:
                self._evict(entry)
            excess = self._excess_bytes(coming_bytes)
            if excess <= 0 or len(leaving) == SHRINK_ENTRIES_MAX:
                return True
        return bool(self._revoke_overdue()) and self._excess_bytes(coming_bytes) <= 0

    @staticmethod
    def _held_bytes(entry: Entry) -> int:
        """What `used_bytes` has for an entry."""
        return entry.extent.length if entry.value is None else entry.memory_bytes

    def _excess_bytes(self, coming_bytes: int) -> int:
        return self.used_bytes + self.beside_bytes + coming_bytes - self.bound_bytes

    def evict_inline(self, newest: Entry | None, coming_bytes: int = 0) -> None:
        """Bring small values within their bound, less what is coming; `newest` stays."""
        while self.inline_bytes + coming_bytes > self.inline_bytes_high and self._give_back():
            pass
        victims = self.victims(self.inline_policy)
        leaving: list[Entry] = []
        excess = self.inline_bytes + coming_bytes - self.inline_bytes_high
        # They cannot wait for the disk, which is slower than small values come: a quarter more is its head start.
        lossless = self.tiering is not None and (excess * 4 < self.inline_bytes_high or not self.evicts)
        check = self.may_leave if lossless else self.may_drop if self.policy.selective else None
        for entry in islice(victims, INLINE_LOOK_ENTRIES_MAX) if lossless and self.evicts else victims:
            if excess <= 0:
                break
            if entry is not newest and (check is None or check(entry)):
                leaving.append(entry)
                excess -= entry.memory_bytes
        for entry in leaving:
            self._evict(entry)

    def _revoke_overdue(self) -> int:
        revoked = [entry for hold in self._limits.due(self.now_s()) for entry in hold.revoke()]
        for entry in revoked:
            self.unhold(entry)
        self.stats.leases_revoked += len(revoked)
        return len(revoked)

    @property
    def limit_bytes(self) -> int:
        """What values may hold: the arena, or less (`bound_bytes`)."""
        return self.bound_bytes or self.arena.nbytes

    @property
    def disk_evicts(self) -> bool:
        """Whether the disk's coldest records leave for new ones: it does not ask which of them has an end."""
        return self.evicts and not self.policy.selective

    @property
    def room_bytes(self) -> int:
        """How much more the arena may take without anything leaving it, fragmentation aside."""
        free = self.allocator.free_bytes
        return max(0, min(free, -self._excess_bytes(0))) if self.bound_bytes else free

    @property
    def flushed_entries(self) -> int:
        """How many entries were flushed and are not yet given back."""
        return sum(map(len, list(self._flushed)))

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that values hold, retired and half-written ones included."""
        return self.live_bytes + self.retired_bytes + self.reserved_bytes + self.inline_bytes

    # ---- verbs that tiers need too, which take the lock -------------------------------------------------------------

    def find(self, key: bytes, space: int = 0) -> Entry | None:
        """The entry under `key` for looking only: it counts no hit and touches no policy."""
        entry = self._spaces[space].get(key)  # one read of a dict needs no lock
        if entry is None or not entry.expire_at_ms:
            return entry
        with self.lock:
            return self._visible(key, space)

    def peek(self, key: bytes, space: int = 0) -> Lease | None:
        """Hold the value under `key` for looking only: it counts neither as a hit nor as a use."""
        with self.lock:
            entry = self._visible(key, space)
            return None if entry is None or not entry.is_resident else self._lease(entry)

    def touch(self, keys: Sequence[bytes], space: int = 0) -> int:
        """Note that `keys` were used at one instant, the first being the head; returns how many exist."""
        with self.lock:
            self.catch_up()
            with self.now_ms.one_moment():
                present = [entry for key in keys if (entry := self._visible(key, space)) is not None]
            self._touch_run(present)
            return len(present)
