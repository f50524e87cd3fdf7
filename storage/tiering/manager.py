"""What moves blocks between memory and disk: when to spill which entries, how a block comes back, and which callers are
told.

The store decides under its lock what is in memory and what on disk. Here its decisions become jobs for the disk's
threads, which disk_io.py does.

Spilling is done ahead of need. The coldest blocks are written while the arena still has room, so that a caller who
stores finds some that the disk has already and that can go at once. When stores come faster than the disk writes, they
wait a bounded time (the caller decides how: `makes_room`, `on_room`); then the coldest leave unwritten, and are
counted.

Bringing is one wait for blocks: on their way into memory, and held there until the caller has used them. Without the
hold a block could be evicted between its arrival and the moment when the caller runs on, and a crowd that wants more
than memory holds would push out each other's blocks for ever.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from heapq import merge
from itertools import islice
from typing import Final, Protocol

from kvredis.storage.background import CLOSE_TIMEOUT_S, IoThreads, Priority
from kvredis.storage.disk.segment import Record
from kvredis.storage.disk.superseded import Superseded
from kvredis.storage.disk.tier import DiskTier
from kvredis.storage.entry import NOWHERE, Entry, Lease, extent_length
from kvredis.storage.state import StoreState
from kvredis.storage.stats import TierStats

from .disk_io import DiskIo
from .prefetch import PrefetchJob, PrefetchJobs
from .saving import Saving
from .transfers import Kind, State, Transfer, Transfers

AHEAD_PART: Final = 2
AHEAD_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Half of the arena, but no more than this, is kept free or on disk already. An engine stores a batch of prompts in one
go, a GiB and more in less than a second, and then computes for longer than the disk needs for as much: what is not
written in that time would be dropped when the next batch comes."""

AHEAD_DISK_PART: Final = 2
"""Nor more than half of the disk: on one that is smaller than what is looked through, what is written last would push
off what was written first, which would be written again at the next look, and so on."""

LOOK_PART: Final = 4
LOOK_BYTES_MAX: Final = 64 * 1024 * 1024
"""We look for entries to write when a quarter of that is taken, and when this much has been stored at the latest. A
disk that took nothing last time is tried with no more than that quarter: what is coldest of it leaves before it is
tried."""

REPLACED_WAIT_S: Final = 1.0
"""How long a kill may bring back what was deleted or replaced, when the index has to wait for the device before it
learns of it: as often as Redis syncs its log (appendfsync everysec)."""

SYNC_TRIES: Final = 8
"""How often a sync writes what one more SWAPDB makes it wait for."""

HUNG_PART: Final = 30
"""Once it has hung, a thirtieth of that time is waited for each step that is left."""

UNSAVED_AT_ONCE: Final = 500
"""How many entries are looked at under one lock for those that a save has to write."""

DECIDED_AT_ONCE: Final = 300
DECIDE_PAUSE_S: Final = 0.0005
"""How many entries are looked at under one lock for those that the index waits for, and how long the thread that does
it leaves the lock to others after that."""

SUPERSEDED_PART: Final = 8
"""When superseded records take more than an eighth of the disk, the values that supersede them are written."""

AHEAD_ENTRIES_MAX: Final = 512
"""How many of the coldest entries are looked through for that: a tenth of a millisecond."""

URGENT_ENTRIES: Final = 16
"""How many of the coldest are written for a caller who waits, when none of them is in the way."""

INLINE_AHEAD_PART: Final = 8
"""Small values are written when less than an eighth of their bound is left."""

INLINE_LOOK_PART: Final = 128
"""... and when another 128th of that bound has come since we last looked."""


class Gpu(Protocol):
    """What brings blocks from the GPU into memory."""

    def has(self, entry: Entry) -> bool:
        """Say whether an entry's bytes lie there."""
        ...

    def send_for(self, kind: Kind, entry: Entry, done: "Callable[[Transfer[None]], None] | None") -> "Transfer[None]":
        """Have a block copied to memory."""
        ...


Promote = Callable[[bytes, int, Callable[[Transfer[None]], None]], Transfer[None] | None]


class Bringing:
    """One wait for some blocks. Any thread may call any method; `done` is called once, without a lock held, unless
    `release` came first."""

    __slots__ = ("_done", "_leases", "_left", "_lock", "_released", "_store", "_transfers", "refused")

    def __init__(self, store: StoreState, done: "Callable[[Bringing], None]") -> None:
        self.refused = False
        """Memory or the queue had no room for one of them: it may have later."""
        self._store = store
        self._done = done
        self._lock = threading.Lock()
        self._leases: list[Lease] = []
        self._transfers: set[Transfer[None]] = set()
        self._left = 1  # transfers that are not over, and `start`
        self._released = False

    def start(self, names: Iterable[tuple[bytes, int]], promote: Promote) -> None:
        """Hold the blocks that are in memory and send for the others; those that are nowhere are left out."""
        try:
            for name in names:
                if not self._hold(*name):
                    self._send_for(name, promote)
        except BaseException:
            self.release()  # the caller has nothing to release it by
            raise
        self._one_less()

    def _send_for(self, name: tuple[bytes, int], promote: Promote) -> None:
        with self._lock:
            self._left += 1
        transfer = promote(*name, self._arrived)
        if transfer is None:  # it has come or gone a moment ago
            self._hold(*name)
            self._one_less()
            return
        with self._lock:
            if not transfer.is_over:
                self._transfers.add(transfer)

    def release(self) -> None:
        """End the holds, and want no more of what has not come; again is nothing."""
        with self._lock:
            self._released = True
            leases, self._leases = self._leases, []
            transfers, self._transfers = self._transfers, set()
        for transfer in transfers:
            transfer.withdraw(self._arrived, None if self._store.keep else self._let_go)
        for lease in leases:
            lease.release()

    def _hold(self, key: bytes, space: int) -> bool:
        lease = self._store.peek(key, space)
        if lease is None:
            return False
        with self._lock:
            if not self._released:
                self._leases.append(lease)
                return True
        lease.release()
        return True

    def _arrived(self, transfer: Transfer[None]) -> None:
        with self._lock:
            self._transfers.discard(transfer)
            self.refused = self.refused or transfer.state is State.REFUSED
        if not self._released:
            self._hold(transfer.key, transfer.space)
        elif not self._store.keep:
            self._let_go(transfer)
        self._one_less()

    def _let_go(self, transfer: Transfer[None]) -> None:
        """What was under way has come though it is not wanted: a memory that keeps nothing lets it go as a hold
        ends."""
        lease = self._store.peek(transfer.key, transfer.space) if transfer.state is State.DONE else None
        if lease is not None:
            lease.release()

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            told = self._left == 0 and not self._released
        if told:
            self._done(self)


log = logging.getLogger(__name__)


class Tiering:
    """The ways between one store's memory and its disk. Any thread may call any public method without the store's lock,
    but for those that say that they want it held."""

    def __init__(self, store: StoreState, disk: DiskTier, io: IoThreads, spill_wait_s: float) -> None:
        self.disk = disk
        self.io = io
        self.transfers: Transfers[None] = Transfers(io)
        self.jobs: PrefetchJobs[None] = PrefetchJobs(self._begin, clock_s=store.now_s)
        self.saving = Saving(self, io)
        self.gpu: Gpu | None = None
        """The tier in GPU memory, from which a block that is there comes sooner."""
        self.spill_wait_s = spill_wait_s
        """How long a caller who stores should wait for the disk to make room."""
        self._store = store
        self.stats = TierStats()
        self.superseded = Superseded(disk)
        disk.decide = self._decide
        self.disk_io = DiskIo(store, disk, self.superseded, self.stats)
        self._ahead_bytes = min(store.arena.nbytes // AHEAD_PART, AHEAD_BYTES_MAX, disk.limit_bytes // AHEAD_DISK_PART)
        self._failing_bytes = self._ahead_bytes // LOOK_PART
        self._look_bytes = min(self._failing_bytes, LOOK_BYTES_MAX)
        self._taken_bytes = self._ahead_bytes  # since we last looked
        self._listed_bytes = 0  # of prefetches that are not over
        self._inline_taken_bytes = 0
        self._inline_spill: Future[None] | None = None
        self.hung_after_s = CLOSE_TIMEOUT_S
        """At the end a device that answers nothing for so long is given up."""
        self._settling: Future[bool] | None = None
        self._settled_s = 0.0
        self._successors: Future[None] | None = None

    # ---- for the store, its lock held --------------------------------------------------------------------------------

    def storable(self, entry: Entry) -> bool:
        """Whether such a block can be put on this disk at all."""
        return self.disk.storable(entry.key, entry.length)

    def touch_run(self, records: Sequence[Record]) -> None:
        """Note that records were used, given head first: of these the last is the coldest."""
        for record in reversed(records):
            self.disk.touch(record)

    def forget(self, entry: Entry) -> None:
        """Forget an entry that has left the index."""
        if len(self.transfers):
            self.transfers.forget(entry.key, entry.space)
        self.superseded.forget(entry)

    def supersede(self, old: Entry, entry: Entry) -> None:
        """Note that an entry has left the index, since `entry` has come in its place."""
        if len(self.transfers):
            self.transfers.forget(old.key, old.space)
        self.superseded.take_over(old, entry)

    def unloaded(self, entry: Entry, record: Record) -> None:
        """Note that an entry has left memory. What is still in flight for it brings nothing to callers that ask for it
        from now on."""
        if len(self.transfers):
            self.transfers.forget(entry.key, entry.space)
        self.disk.touch(record)

    def clear(self, space: int | None) -> None:
        """A database, or all, is emptied."""
        self.transfers.forget_all(space)
        self.superseded.clear(space)

    def rename(self, entry: Entry, old: tuple[bytes, int]) -> bool:
        """Note that an entry has another name. False when the disk has let go of it meanwhile and memory does not have
        it."""
        self.transfers.forget(*old)
        if not self.superseded.rename(entry, old):
            self.disk_io.let_go(entry)
        return entry.record is not None or self._store.at_hand(entry)

    def swap(self, first: int, second: int) -> None:
        """Two databases are about to be exchanged."""
        for space in (first, second):
            self.transfers.forget_all(space)
        self.superseded.swap(first, second, unsaved=bool(self._store.unsaved))

    def set_expiry(self, entry: Entry) -> None:
        """Note that an entry has another end."""
        if entry.record is not None:
            self.disk.set_expiry(entry.key, entry.space, entry.expire_at_ms)

    # ---- life --------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make everything that the disk holds visible in a store that is empty."""
        store, now_s = self._store, self._store.now_s()
        for record in self.disk.records():
            entry = Entry(record.key, record.space, record.length, NOWHERE, None)
            entry.record, entry.expire_at_ms = record, record.expire_at_ms
            entry.created_s = entry.accessed_s = now_s
            store.index.put(entry)
            store.away += 1
            store.remember_expiry(entry)

    def tick(self) -> None:
        """To be called some ten times a second: what is due by the clock."""
        self.io.drop_overdue()
        self.jobs.cancel_overdue()
        self._write_successors()
        now_s = self._store.now_s()
        due = self.disk.unsettled and (not self.disk.replaces or now_s - self._settled_s >= REPLACED_WAIT_S)
        if due and (self._settling is None or self._settling.done()):
            self._settled_s = now_s
            # As urgent as a demand: behind a stream of those it would never run, and a kill would bring back everything
            # that was deleted or written over meanwhile.
            self._settling = self.io.submit(Priority.DEMAND, 0, self.disk.settle)

    def _write_successors(self) -> None:
        """Have the entries written for which the index waits, or which keep too much of the disk's room taken."""
        if (self.disk.waits or self._takes_too_much()) and (self._successors is None or self._successors.done()):
            self._successors = self.io.submit(Priority.SPILL, 0, self._write_some_successors)

    def _takes_too_much(self) -> bool:
        return self.disk.superseded_bytes * SUPERSEDED_PART > self.disk.limit_bytes

    def _write_some_successors(self) -> None:
        self.disk.settle()  # it may have to find out first for which entries it waits
        self._write_waited_for()
        if self._takes_too_much():
            with self._store.lock:
                plan = list(filter(self.storable, islice(self.superseded, AHEAD_ENTRIES_MAX)))
            self._write_all(plan)

    def _write_waited_for(self) -> None:
        """Write the values without which the index learns of nothing."""
        before: list[tuple[bytes, int]] = []
        while (names := self.disk.untrue) and names != before:
            with self._store.lock:
                plan = self.waited_for(names)
            self._write_all(plan)
            before = names

    def _decide(self) -> None:
        """As DiskState's; the store's lock is held for a millisecond at a time."""
        store = self._store
        while self.disk.undecided:
            with store.lock:
                self.superseded.decide(store.index, store.unsaved, DECIDED_AT_ONCE)
            time.sleep(DECIDE_PAUSE_S)

    def waited_for(self, names: Iterable[tuple[bytes, int]]) -> list[Entry]:
        """The unsaved entries of these names. Holds the store's lock."""
        found = [self._store.index.get(*name) for name in names]
        return [entry for entry in found if entry is not None and entry in self._store.unsaved]

    def close(self, *, save: bool) -> None:
        """Tell those who still wait that nothing more is safe: the disk's threads have ended."""
        store = self._store
        self.disk_io.on_room = None
        wait_s = self.hung_after_s
        if save and not self._save_all():
            wait_s /= HUNG_PART
        ended = self.io.close(wait_s)
        if not ended:
            wait_s = self.hung_after_s / HUNG_PART
        self.saving.close()
        with store.lock:
            store.catch_up()
        order = [entry for policy in (store.inline_policy, store.policy) for entry in policy.victims()]
        # Behind a hung device the thread that hangs may hold what `close` needs.
        if not (self._close_disk([(entry.key, entry.space) for entry in order], wait_s) and ended):
            log.warning("Disk tier: the device does not answer; what it was asked for last is given up")

    def _close_disk(self, order: Sequence[tuple[bytes, int]], hung_after_s: float) -> bool:
        """Close the disk, in a thread that is left to itself when the device does not answer: False."""
        errors: list[BaseException] = []

        def close() -> None:
            try:
                self.disk.close(order)
            except BaseException as error:  # the caller's
                errors.append(error)

        thread = threading.Thread(target=close, name="kvredis-closes-disk", daemon=True)
        thread.start()

        def ended(wait_s: float) -> bool:
            thread.join(wait_s)
            return not thread.is_alive()

        closed = self._wait_while_it_answers(ended, hung_after_s)
        if errors:
            raise errors[0]
        return closed

    def _wait_while_it_answers(self, wait: Callable[[float], bool], hung_after_s: float) -> bool:
        """Call `wait`, which waits for so many seconds and says whether it is over; False when it is not, and the
        device has answered nothing for `hung_after_s`."""
        answers, until_s = self.disk.answers, time.monotonic() + hung_after_s
        while not wait(max(0.0, min(1.0, until_s - time.monotonic()))):
            if self.disk.answers != answers:
                answers, until_s = self.disk.answers, time.monotonic() + hung_after_s
            elif time.monotonic() >= until_s:
                return False
        return True

    def _save_all(self) -> bool:
        """Save what memory alone has; False when the device does not answer."""
        store = self._store
        with store.lock:
            count, nbytes = len(store.unsaved), sum(entry.length for entry in store.unsaved)
        if not count:
            return True
        began_s = store.now_s()
        log.info("Disk tier: saving %d blocks (%.2f GiB)", count, nbytes / 1024**3)
        done = threading.Event()
        self.saving.save(0, lambda _: done.set())
        answers = self._wait_while_it_answers(done.wait, self.hung_after_s)
        if store.unsaved:
            log.warning("Disk tier: %d blocks could not be saved and are lost", len(store.unsaved))
        log.info("Disk tier: saved in %.1f s", store.now_s() - began_s)
        return answers

    # ---- making room -------------------------------------------------------------------------------------------------

    @property
    def makes_room(self) -> bool:
        """Whether it is worth waiting for the disk."""
        return not (self.disk_io.failing or self.disk_io.stalled)

    def call_on_room(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in an I/O thread, when a block has reached the disk or could not be written, so that
        it is worth asking for room again; there is one such callback."""
        self.disk_io.on_room = callback

    def waited_in_vain(self, since_s: float) -> None:
        """Note that a caller has waited from `since_s`, on the store's clock, and no room has come. When no block at
        all has reached the disk since, no caller shall wait until one does."""
        self.disk_io.stalled = self.disk_io.stalled or self.disk_io.written_s < since_s

    def make_room(self, nbytes: int, *, urgent: bool) -> None:
        """Make room for the next caller, since one has taken an extent of `nbytes`, or urgently wants one."""
        self._taken_bytes += nbytes
        if urgent or self._taken_bytes >= self._look_bytes:
            with self._store.lock:
                self._taken_bytes = 0
                plan = self._plan(nbytes if urgent else 0)
            self.spill(plan)

    def make_inline_room(self, newest: Entry) -> None:
        """The same for small values, of which `newest` has just arrived."""
        store, high = self._store, self._store.inline_bytes_high
        if store.bound_bytes:
            high = min(high, store.inline_bytes + store.room_bytes)
        self._inline_taken_bytes += newest.memory_bytes
        if not store.keep:
            self.spill([newest])
        elif self._inline_taken_bytes * INLINE_LOOK_PART > high and store.inline_bytes * INLINE_AHEAD_PART > high * (
            INLINE_AHEAD_PART - 1
        ):
            if self._inline_spill is not None and not self._inline_spill.done():
                return
            with store.lock:
                self._inline_taken_bytes = 0
                coldest = islice(store.victims(store.inline_policy), AHEAD_ENTRIES_MAX)
                plan = [entry for entry in coldest if store.is_due(entry)]
            if plan:
                job = partial(self._write_all, plan)
                self._inline_spill = self.io.submit(Priority.SPILL, sum(entry.length for entry in plan), job)

    def wait_for_room(self, timeout_s: float) -> bool:
        """Block until something has been written; False when nothing was. Not for an event loop."""
        with self.disk_io.written:
            return self.disk_io.written.wait(timeout_s)

    def spill(self, entries: Iterable[Entry]) -> None:
        """Have blocks written that are not on their way; those that the queue has no room for are met again."""
        due = [entry for entry in dict.fromkeys(entries) if self.transfers.find(entry.key, entry.space) is None]
        for parcel in self.disk_io.parcels(due):
            job = partial(self._write_all, parcel)
            start = cache(partial(self.io.submit, Priority.SPILL, sum(entry.length for entry in parcel), job))
            for entry in parcel:  # all have the one job
                self.transfers.join_or_start(Kind.SPILL, entry.key, entry.space, start)

    def _plan(self, wanted_bytes: int) -> list[Entry]:
        """The entries to write: those that stand where `wanted_bytes` could be, then the coldest as far ahead as we
        look."""
        store = self._store
        standing = store.standing_at(wanted_bytes) if wanted_bytes else []
        plan = [entry for entry in standing if store.is_due(entry)]
        ahead_bytes = self._failing_bytes if self.disk_io.failing else self._ahead_bytes
        short_bytes = min(ahead_bytes, store.limit_bytes // AHEAD_PART) - store.room_bytes
        if short_bytes > 0:
            for entry in islice(store.victims(store.policy), AHEAD_ENTRIES_MAX):
                if store.is_due(entry):
                    plan.append(entry)
                short_bytes -= entry.extent.length
                if short_bytes <= 0:
                    break
        if wanted_bytes and not plan:  # a window lies behind more unwritten ones than the store passes over
            coldest = islice(store.victims(store.policy), AHEAD_ENTRIES_MAX)
            plan = list(islice(filter(store.is_due, coldest), URGENT_ENTRIES))
        return plan

    def unsaved_since(self, since: int) -> list[tuple[Entry, int]]:
        """The entries whose write had number `since` or a later one and that the disk has not, with those numbers. All
        of them (0) in the order in which they would leave: if the disk is too small it has the hottest in the end. For
        a thread that may block; it looks at a few at a time."""
        store = self._store
        with store.lock:
            swapped = since > 0 and any(database.swapped >= since for database in store.index.databases)
            newest = list(islice(reversed(store.unsaved.items()), UNSAVED_AT_ONCE))
            few = since > 0 and not swapped and newest[-1:] != [] and newest[-1][1] < since
            entries = [entry for entry, _ in reversed(newest)] if few else list(store.unsaved)
        found: list[tuple[Entry, int]] = []
        runs: list[list[tuple[bool, bool, float, int, Entry]]] = []
        for at in range(0, len(entries), UNSAVED_AT_ONCE):
            some = entries[at : at + UNSAVED_AT_ONCE]
            with store.lock:
                if since > 0:
                    numbers = [(entry, store.write_of(entry)) for entry in some if store.is_unsaved(entry)]
                    found += [each for each in numbers if each[1] >= since]
                else:
                    runs.append(self._by_warmth(some, at))
            time.sleep(0)
        if not since:
            for *_, entry in merge(*runs):
                if (number := store.unsaved.get(entry)) is not None:
                    found.append((entry, max(number, entry.database.swapped)))
        return found

    def _by_warmth(self, entries: Sequence[Entry], first: int) -> list[tuple[bool, bool, float, int, Entry]]:
        """The entries that are unsaved still, small ones first, the coldest of each first; what is read comes last.
        `first` is the place of the first one among all. Holds the store's lock."""
        store = self._store
        warmths = (
            (
                entry.leases > 0,
                entry.value is None,
                (store.policy if entry.value is None else store.inline_policy).warmth(entry),
                n,
                entry,
            )
            for n, entry in enumerate(entries, first)
            if store.is_unsaved(entry)
        )
        return sorted(warmths)

    def sync(self) -> bool:
        """Have all that has been written or deleted survive a crash; blocks. For a SWAPDB that has come meanwhile some
        more is written, since nothing can be confirmed before."""
        for _ in range(SYNC_TRIES):
            saved = self.disk.sync()
            if saved or not self.disk.waits:
                return saved
            self._write_waited_for()
        return False

    def want_replaced(self, entries: Mapping[Entry, object] | None) -> int:
        """Have it noted what comes in the place of these entries, or None = of any, after the write whose number it
        gives."""
        with self._store.lock:
            self.superseded.replaced.want(entries)
            return self._store.writes

    def exchanged_since(self, write: int) -> bool:
        """Whether databases were exchanged after that write."""
        with self._store.lock:
            return any(database.swapped > write for database in self._store.index.databases)

    def is_unsaved(self, entry: Entry) -> bool:
        """Whether memory alone has an entry; one look into a dict needs no lock."""
        return self._store.is_unsaved(entry)

    def _write_all(self, entries: Sequence[Entry]) -> None:
        for parcel in self.disk_io.parcels(entries):
            self.disk_io.write_out(parcel)

    # ---- asking for blocks -------------------------------------------------------------------------------------------

    def bring(self, names: Iterable[tuple[bytes, int]], done: Callable[[Bringing], None]) -> Bringing | None:
        """Have blocks, each a key and its database, brought into memory and held there; None when none of them is away.

        `done` is called with what this returns once all that can be had is there: in an I/O thread as a rule, perhaps
        before this returns. The caller ends the hold with `release`.
        """
        wanted = dict.fromkeys(names)
        if all((entry := self._store.find(*name)) is None or entry.is_resident for name in wanted):
            return None
        bringing = Bringing(self._store, done)
        bringing.start(wanted, self.promote)
        return bringing

    def promote(self, key: bytes, space: int, done: Callable[[Transfer[None]], None]) -> Transfer[None] | None:
        """Have a block brought in for a caller who waits; None when it is in memory or nowhere."""
        entry = self._store.find(key, space)
        if entry is None or entry.is_resident:
            return None
        return self._send_for(Kind.PROMOTE, entry, done)

    def prefetch(
        self, keys: Sequence[bytes], space: int = 0, *, kind: Kind = Kind.PREFETCH, deadline_s: float | None = None
    ) -> PrefetchJob[None] | None:
        """Have blocks brought in ahead of need, head first; answers at once. None when there are too many such jobs.

        What is here counts as used now, and the rest when it has come, its tail as the coldest. What memory could not
        hold at one time has no room from the start. `deadline_s` is on the store's monotonic clock.
        """
        store = self._store
        job = self.jobs.open(deadline_s, kind)
        if job is None:
            return None
        left_bytes = store.limit_bytes - store.retired_bytes - store.reserved_bytes - self._listed_bytes
        here: list[bytes] = []
        wanted: list[bytes] = []
        wanted_bytes = missing = no_room = 0
        for key in keys:
            entry = store.find(key, space)
            if entry is None:
                missing += 1
                continue
            needed = extent_length(entry.length)
            if entry.is_resident:
                here.append(key)
                left_bytes -= needed
            elif needed > left_bytes - wanted_bytes:
                no_room += 1
            else:
                wanted.append(key)
                wanted_bytes += needed
        job.count(resident=len(here), missing=missing, no_room=no_room)
        job.fetch(wanted, space)
        store.touch(here, space)
        if wanted:
            with store.lock:
                self._listed_bytes += wanted_bytes
            job.add_done(partial(self._prefetched, wanted, space, wanted_bytes))
        job.seal()
        return job

    def _prefetched(self, keys: list[bytes], space: int, nbytes: int, job: PrefetchJob[None]) -> None:
        with self._store.lock:
            self._listed_bytes -= nbytes
        self._store.touch(keys, space)  # they came head first, and would leave so

    def _begin(
        self, kind: Kind, key: bytes, space: int, done: Callable[[Transfer[None]], None]
    ) -> Transfer[None] | State:
        """Put one block of a prefetch on its way."""
        entry = self._store.find(key, space)
        if entry is None:
            return State.CANCELLED
        if entry.is_resident:
            return State.DONE
        return self._send_for(kind, entry, done)

    def _send_for(self, kind: Kind, entry: Entry, done: Callable[[Transfer[None]], None]) -> Transfer[None]:
        gpu = self.gpu
        if gpu is not None and gpu.has(entry):
            return gpu.send_for(kind, entry, done)
        record = entry.record
        if record is not None:  # else what has to leave memory for it could push it off a full disk
            self.disk.touch(record)
        read = partial(self.disk_io.read_in, entry.key, entry.space, drop=kind is Kind.PROMOTE)
        start = partial(self.io.submit, kind.priority, entry.length, read)
        return self.transfers.join_or_start(kind, entry.key, entry.space, start, done)

    # ---- figures -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int | str]:
        """What KV.TIERS tells of the disk; sizes in bytes."""
        jobs = self.io.figures()
        return {
            **self.disk.figures(),
            "queued_promotes": jobs[Priority.DEMAND].queued,
            "queued_prefetches": jobs[Priority.PREFETCH].queued,
            "queued_spills": jobs[Priority.SPILL].queued,
            "prefetch_jobs": len(self.jobs),
        }
