"""GPU memory as a tier of the store: which blocks lie there, who holds them, and how they come into memory and leave.

Engines on the host write blocks there and read them there by themselves (memory/device_arena.py), as they read the
arena; the server copies only what must move. An entry's place on the GPU stands beside its extent and its record: it
may have any of the three. One whose bytes are on the GPU alone is *away*, like one on disk alone, and comes into memory
in the same way when a client asks for it that has no GPU: a transfer, which later readers join.

A block in memory that clients with a GPU lease again is copied to the GPU, where room is free or becomes free by what
is elsewhere too.

Room on the GPU is made as memory makes room with a disk below it. The coldest blocks are copied to memory ahead of
need, by a policy of the store's own kind, and leave at once when room is wanted. When blocks come faster than copies
go, a writer waits a bounded time, and then the coldest leave uncopied and are counted. What has left the GPU goes from
memory to disk as everything does; what is saved while it lies on the GPU is read from there.

What is on the GPU alone is lost with the server, as what is in memory alone is. A copy that the GPU refuses costs that
block: a miss, with a line in the log. A GPU that answers nothing any more is given up with all blocks that it alone
has, and the server goes on without it.

Lock order: the store's lock guards all that is here; it is never held across a copy.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final

from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.entry import NOWHERE, PAYLOAD_OFFSET_BYTES, SLACK_BYTES, Entry, Reservation, extent_length
from kvredis.storage.errors import DeviceError, KVRedisError
from kvredis.storage.eviction.base import Policy
from kvredis.storage.expiry import Deadlines
from kvredis.storage.memory.allocator import GRAIN_BYTES, Allocator, Extent
from kvredis.storage.memory.device_arena import DeviceArena
from kvredis.storage.state import StoreState
from kvredis.storage.stats import GpuStats
from kvredis.storage.tensor_facts import tokens_of

from .manager import Bringing, Tiering
from .transfers import Kind, NoRoom, State, Transfer, Transfers

log = logging.getLogger(__name__)

THREADS: Final = 2
"""One copy at a time keeps the link busy; a second thread takes the next one's bookkeeping."""

QUEUE_JOBS_MAX: Final = 8192
QUEUE_BYTES_LOW: Final = 1024**3

LIFTED_HITS_MIN: Final = 2
"""A block that lies in memory is copied to the GPU when a client with a GPU leases it and this is a further use: most
blocks are read once, and then the copy to the GPU is work for nothing."""

LIFTED_FOR_S: Final = 10.0
"""No block leaves the GPU for it that was used in the last ten seconds: a round over more than the GPU holds would have
each block copied each time, over the link that its readers need."""

LIFTED_PART: Final = 8
"""Blocks on their way to the GPU may take an eighth of its memory: what comes beyond that is leased again."""

AHEAD_PART: Final = 8
AHEAD_BYTES_MAX: Final = 1024**3
"""An eighth of the GPU's memory, but no more than this, is kept free or copied to memory already."""

AHEAD_ENTRIES_MAX: Final = 512
"""How many of the coldest blocks are looked through for that, and how many are passed over in search of some that can
leave at once."""

LOOK_PART: Final = 4
"""They are looked through when a quarter of that has been taken since the last look."""

SPILL_WAIT_S: Final = 0.5
"""How long a writer waits for room that copies are to make."""

ABANDONED_S: Final = 10.0
"""How long room is kept from others that a writer has left without a word and whose process still lives: what it has
asked its GPU to write may still come."""


class Block:
    """One entry's place on the GPU, and how many readers hold it there."""

    __slots__ = ("_tier", "entry", "extent", "holds")

    def __init__(self, tier: "GpuTier", entry: Entry, extent: Extent) -> None:
        self._tier = tier
        self.entry = entry
        self.extent = extent
        self.holds = 0

    def read(self, into: memoryview) -> bool:
        """Fill `into` with the bytes, for a caller who holds them; blocks, and takes the store's lock. False: the GPU
        did not give them, the block is there no more, and without another copy it is gone."""
        return self._tier.read(self, into)

    def unhold(self) -> None:
        """End a hold; the store's lock is held."""
        self._tier.unhold(self)


class GpuLease:
    """A reader's hold on a block's bytes on the GPU; they stay where they are until `release`, or until the tier
    revokes it after its time."""

    __slots__ = ("_tier", "block", "until_s")

    def __init__(self, tier: "GpuTier", block: Block, until_s: float) -> None:
        self._tier: GpuTier | None = tier
        self.block = block
        self.until_s = until_s

    @property
    def offset(self) -> int:
        """Where in the GPU's memory the value begins."""
        return self.block.extent.offset

    @property
    def length(self) -> int:
        """Bytes of the value."""
        return self.block.entry.length

    @property
    def nbytes(self) -> int:
        """What it keeps from others."""
        return self.block.extent.length

    @property
    def held(self) -> bool:
        """Whether the bytes have been that value until now."""
        return self._tier is not None

    def release(self) -> bool:
        """End the hold; False when it had ended before."""
        tier = self._tier
        if tier is None:
            return False
        with tier.store.lock:
            return self.revoke()

    def revoke(self) -> bool:
        """For the tier, under the store's lock: the same."""
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.unhold(self.block)
        return tier is not None


class GpuReservation(Reservation):
    """A writer's hold on room on the GPU, which the writer fills by itself: `view` is empty here. `place` is where.

    WHY `is_quiet` matters: a writer that ends without a word may have writes under way on its GPU. Its room is kept
    from others until `is_gone` says that its process has ended, or for ABANDONED_S.
    """

    __slots__ = ("is_gone", "is_quiet", "place")

    def __init__(self, tier: "GpuTier", key: bytes, space: int, length: int, place: Extent) -> None:
        super().__init__(tier, key, space, memoryview(bytearray(SLACK_BYTES)), NOWHERE)
        self.length = length
        self.place = place
        self.is_quiet = False
        """The writer has said that it writes no more."""
        self.is_gone: Callable[[], bool] = lambda: False


class GpuLost(KVRedisError):
    """What the transfer of a block ends with that the GPU did not give."""

    def __init__(self) -> None:
        super().__init__("the GPU did not give the block")


class GpuTier:
    """The blocks of one store that lie in `arena`, which is the tier's from here on. Any thread may call any public
    method without the store's lock, but for those that say that they want it held."""

    def __init__(self, store: StoreState, arena: DeviceArena, io: IoThreads | None = None) -> None:
        self.store = store
        self.arena = arena
        self.stats = GpuStats()
        queue_bytes_max = max(QUEUE_BYTES_LOW, arena.nbytes)
        self.io = io or IoThreads(THREADS, QUEUE_JOBS_MAX, queue_bytes_max, clock_s=store.now_s)
        self.transfers: Transfers[None] = Transfers(self.io)
        self.is_lost = False
        """The GPU answers nothing any more: nothing lies there."""
        self.live_bytes = 0
        """Extents of blocks whose entries have not been given back."""
        self.retired_bytes = 0
        """Extents whose entry has left while a reader holds them."""
        self.reserved_bytes = 0
        """Extents being written."""
        self.abandoned_bytes = 0
        """Extents whose writer has gone without a word."""
        self.holds = 0
        self.allocator = Allocator(arena.nbytes)
        self._blocks: dict[Entry, Block] = {}
        self._policy: Policy = type(store.policy)()
        self._kind = store.policy.name
        self._limits: Deadlines[GpuLease] = Deadlines(lambda _, lease: lease.held)
        self._abandoned: list[tuple[float, GpuReservation]] = []
        self._lifting: set[Entry] = set()
        self._lifting_bytes = 0
        self._ahead_bytes = min(arena.nbytes // AHEAD_PART, AHEAD_BYTES_MAX)
        self._taken_bytes = 0  # since the coldest were last looked through
        self._on_room: Callable[[], None] = lambda: None
        self._is_closed = False

    # ---- for the store, its lock held --------------------------------------------------------------------------------

    def has(self, entry: Entry) -> bool:
        """Whether an entry's bytes lie on the GPU; one look into a dict needs no lock."""
        return entry in self._blocks

    def forget(self, entry: Entry) -> None:
        """Forget an entry that has left the index."""
        if len(self.transfers):
            self.transfers.forget(entry.key, entry.space)
        self._drop(entry)

    def unloaded(self, entry: Entry) -> None:
        """Note that an entry has left memory: what is in flight for it brings nothing to those who ask from now on."""
        if len(self.transfers):
            self.transfers.forget(entry.key, entry.space)

    def renamed(self, old: tuple[bytes, int]) -> None:
        """Note that an entry has another name than this, under which others may be stored from now on."""
        self.transfers.forget(*old)

    def renamed_all(self, space: int | None) -> None:
        """The same of all entries of a database, or with None of all: it is emptied or exchanged."""
        self.transfers.forget_all(space)

    def touch_run(self, entries: Sequence[Entry]) -> None:
        """Note that a run of blocks, given head first, was wanted at one instant."""
        here = [entry for entry in entries if entry in self._blocks]
        if here:
            self._order().touch_run(here)

    def end_changed(self, entry: Entry) -> None:
        """Note that an entry has another end."""
        if entry in self._blocks:
            self._order().end_changed(entry)

    def start_afresh(self) -> None:
        """Let go of the entries of databases that were flushed."""
        for entry in [each for each in self._blocks if each.database.flushed]:
            self._drop(entry)

    def hold(self, entry: Entry) -> Block | None:
        """Keep an entry's bytes where they lie until `unhold`; None when they are not there."""
        block = self._blocks.get(entry)
        if block is not None:
            block.holds += 1
            self.holds += 1
        return block

    def unhold(self, block: Block) -> None:
        """End a hold."""
        block.holds -= 1
        self.holds -= 1
        if not block.holds and self._blocks.get(block.entry) is not block:
            self.retired_bytes -= block.extent.length
            self.allocator.free(block.extent)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, key: bytes, length: int, space: int = 0, *, drop: bool = True) -> GpuReservation | None:
        """Room for a value of `length` bytes on the GPU, for a writer that maps it. Without `drop` no block leaves that
        is nowhere else: None then also means that the coldest are being copied, and that it is worth asking again."""
        if self.is_lost or extent_length(length) > self.store.arena.nbytes:  # memory could never take it back
            return None
        nbytes = place_length(length)
        with self.store.lock:
            extent = self._place(nbytes, drop=drop)
            if extent is not None:
                self.reserved_bytes += nbytes
            elif drop:
                self.stats.refused += 1
        self._make_room(nbytes, urgent=extent is None)
        return None if extent is None else GpuReservation(self, key, space, length, extent)

    def commit(self, reservation: Reservation, expire_at_ms: int) -> bool:
        """Publish what a writer has laid down; called by Reservation.commit, which sees to it that it happens once.
        False: the GPU has been lost."""
        assert isinstance(reservation, GpuReservation)
        store = self.store
        entry = Entry(reservation.key, reservation.space, reservation.length, NOWHERE, None)
        with store.lock:
            if self.is_lost:
                return False
            self.reserved_bytes -= reservation.place.length
            self._enter(entry, reservation.place, partial(store.publish_away, entry, expire_at_ms))
            self.stats.stored += 1
            self.stats.stored_bytes += entry.length
        if not store.keep and isinstance(store.tiering, Tiering):
            store.tiering.spill([entry])
        return True

    def abort(self, reservation: Reservation) -> None:
        """Free what a reservation holds; called by Reservation.abort."""
        assert isinstance(reservation, GpuReservation)
        place = reservation.place
        with self.store.lock:
            self.store.stats.aborted += 1
            self.reserved_bytes -= place.length
            if reservation.is_quiet or reservation.is_gone():
                self.allocator.free(place)
            else:
                self.abandoned_bytes += place.length
                self._abandoned.append((self.store.now_s() + ABANDONED_S, reservation))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def lease(self, key: bytes, space: int, limit_s: float) -> GpuLease | None:
        """Hold the value under `key` on the GPU for `limit_s`, as Store.lease in memory; None when it is not there."""
        store = self.store
        entry = store.find(key, space)
        if entry is None or entry not in self._blocks:
            return None
        with store.lock:
            block = self.hold(entry)
            if block is None:
                return None
            entry.hits += 1
            entry.accessed_s = store.now_s()
            self._order().touch(entry)
            store.stats.hits += 1
            store.stats.hit_tokens += entry.tokens
            self.stats.leased_blocks += 1
            self.stats.leased_bytes += entry.length
            lease = GpuLease(self, block, store.now_s() + limit_s)
            self._limits.add(lease.until_s, lease, self.holds)
            return lease

    def bring(self, names: Iterable[tuple[bytes, int]], done: Callable[[Bringing], None]) -> Bringing | None:
        """As Tiering.bring, where there is no disk."""
        wanted = dict.fromkeys(names)
        if all((entry := self.store.find(*name)) is None or entry.is_resident for name in wanted):
            return None
        bringing = Bringing(self.store, done)
        bringing.start(wanted, self.promote)
        return bringing

    def promote(self, key: bytes, space: int, done: Callable[[Transfer[None]], None]) -> Transfer[None] | None:
        """Have a block copied to memory for a caller who waits; None when it is there or not on the GPU."""
        entry = self.store.find(key, space)
        if entry is None or entry.is_resident or entry not in self._blocks:
            return None
        return self.send_for(Kind.PROMOTE, entry, done)

    def send_for(self, kind: Kind, entry: Entry, done: Callable[[Transfer[None]], None] | None) -> Transfer[None]:
        """Have a block copied to memory, or join the transfer that does it."""
        read = partial(self._read_in, entry.key, entry.space, kind)
        start = partial(self.io.submit, kind.priority, entry.length, read)
        return self.transfers.join_or_start(kind, entry.key, entry.space, start, done)

    def read(self, block: Block, into: memoryview) -> bool:
        """As Block.read."""
        try:
            self.arena.read(block.extent.offset, into)
        except DeviceError as error:
            self._lose(block, error)
            return False
        return True

    def lift(self, entries: Iterable[Entry]) -> None:
        """Have blocks copied to the GPU that a client with a GPU has just leased in memory, as far as they are used
        again and there is room for them by itself or by what is elsewhere too."""
        store, most_bytes = self.store, self.arena.nbytes // LIFTED_PART
        for entry in entries:
            nbytes = place_length(entry.length)
            if entry.hits < LIFTED_HITS_MIN or self.is_lost or self._lifting_bytes + nbytes > most_bytes:
                continue
            with store.lock:
                if not self._may_lift(entry):
                    continue
                place = self._place(nbytes, drop=False, unused_since_s=store.now_s() - LIFTED_FOR_S)
                if place is None:
                    continue
                self.reserved_bytes += nbytes
                self._lifting_bytes += nbytes
                self._lifting.add(entry)
                entry.leases += 1
                store.leases += 1
            job = partial(self._lift, entry, place)
            if self.io.submit(Priority.SPILL, entry.length, job) is None:
                self._lifted(entry, place, is_written=False)

    # ---- life --------------------------------------------------------------------------------------------------------

    def call_on_room(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in one of the tier's threads, when a block has been copied or could not be: it is
        worth asking for room again. There is one such callback."""
        self._on_room = callback

    def tick(self) -> None:
        """To be called some ten times a second: what is due by the clock."""
        with self.store.lock:
            self._revoke_overdue()
            self._give_back_abandoned()

    def drain(self) -> None:
        """End its threads: from now on nothing is copied but what the disk saves."""
        self._on_room = lambda: None
        self.io.close()

    def close(self) -> None:
        """Give the GPU's memory back. Clients that have mapped it keep it until they let go."""
        self._is_closed = True
        self.arena.close()

    # ---- figures -----------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int | str]:
        """What KV.TIERS tells of the GPU; sizes in bytes. Holds the store's lock."""
        return {
            "capacity": self.arena.nbytes,
            "used": self.used_bytes,
            "free": self.allocator.free_bytes,
            "largest_free": self.allocator.longest_bytes,
            "reserved": self.reserved_bytes,
            "abandoned": self.abandoned_bytes,
            "entries": len(self._blocks),
            "leases": self.holds,
            "device": self.arena.device.number,
            "uuid": self.arena.device.uuid,
            "policy": self._policy.name,
            "lost": int(self.is_lost),
        }

    @property
    def used_bytes(self) -> int:
        """What values hold of it, half-written ones included."""
        return self.live_bytes + self.retired_bytes + self.reserved_bytes + self.abandoned_bytes

    def check_integrity(self, entries: set[Entry]) -> None:
        """Raise AssertionError unless blocks, policy, allocator and accounts agree; `entries` are all that are in the
        index, or flushed and not given back. Holds the store's lock."""
        self.allocator.check_integrity()
        self.transfers.check_integrity()
        assert self._blocks.keys() <= entries
        assert all(block.entry is entry for entry, block in self._blocks.items())
        assert len(self._policy) == len(self._blocks)
        assert all(entry in self._policy for entry in self._blocks)
        assert sum(block.extent.length for block in self._blocks.values()) == self.live_bytes
        assert self.used_bytes + self.allocator.free_bytes == self.arena.nbytes
        assert sum(reservation.place.length for _, reservation in self._abandoned) == self.abandoned_bytes
        assert sum(block.holds for block in self._blocks.values()) <= self.holds
        ends = 0
        for extent in sorted([*(block.extent for block in self._blocks.values()), *self.allocator.holes()]):
            assert extent.offset >= ends, "places overlap"
            ends = extent.offset + extent.length

    # ---- steps, the lock held ----------------------------------------------------------------------------------------

    def _order(self) -> Policy:
        """The policy, of the kind that the store has now. One of another kind takes over what entries know."""
        kind = self.store.policy
        if kind.name != self._kind:
            new = getattr(kind, "new", kind)  # of a succession the one that takes over
            self._kind, self._policy = kind.name, type(new)()
            for entry in sorted(self._blocks, key=lambda each: each.accessed_s):
                self._policy.restore(entry, entry.hits + 1)
        return self._policy

    def _enter(self, entry: Entry, extent: Extent, publish: Callable[[], None] | None = None) -> None:
        """Let an extent be an entry's place; `publish` makes the entry visible, in the place of another one."""
        self._blocks[entry] = Block(self, entry, extent)
        self.live_bytes += extent.length
        if publish is not None:
            publish()
        self._order().admit(entry)

    def _drop(self, entry: Entry) -> None:
        """Let an entry have no place on the GPU any more."""
        block = self._blocks.pop(entry, None)
        if block is None:
            return
        self._policy.forget(entry)
        tiering = self.store.tiering
        if tiering is not None and entry.record is not None and not (entry.is_resident or entry.database.flushed):
            tiering.unloaded(entry, entry.record)  # a reader who joins its way to disk now would wait in vain
        self.live_bytes -= block.extent.length
        if block.holds:
            self.retired_bytes += block.extent.length
        else:
            self.allocator.free(block.extent)

    def _coldest(self) -> Iterator[Block]:
        """Blocks that readers do not hold, coldest first."""
        order = self._order()
        for entry in chain(order.victims(), order.others()):
            block = self._blocks[entry]
            if not block.holds:
                yield block

    def _is_ready(self, block: Block) -> bool:
        """Whether a block can leave the GPU at once, being elsewhere too."""
        return block.entry.is_resident or block.entry.record is not None

    def _ready(self, unused_since_s: float) -> Iterator[Block]:
        """Those of the coldest that can leave at once. Others are passed over, but not many: behind them are blocks
        that are used, and the event loop waits."""
        passed = 0
        for block in self._coldest():
            if self._is_ready(block) and block.entry.accessed_s <= unused_since_s:
                yield block
                continue
            passed += 1
            if passed == AHEAD_ENTRIES_MAX:
                return

    def _may_leave(self, block: Block) -> bool:
        """Whether a block can leave, copied or not, by the policy in force."""
        return self._is_ready(block) or not self.store.policy.selective or block.entry.expire_at_ms != 0

    def _place(self, nbytes: int, *, drop: bool, unused_since_s: float = math.inf) -> Extent | None:
        """An extent of the GPU's memory. Without `drop` only blocks leave for it that are elsewhere too, and have not
        been used since `unused_since_s`."""
        extent = self.allocator.allocate(nbytes)
        if extent is None and nbytes <= self.arena.nbytes:
            self._revoke_overdue()
            self._give_back_abandoned()
            extent = self.allocator.allocate(nbytes)
            while extent is None and self.store.give_back_flushed():
                extent = self.allocator.allocate(nbytes)
        if extent is not None or nbytes > self.arena.nbytes:
            return extent
        found = self.allocator.window(nbytes, self._ready(unused_since_s))
        if found is None and drop and self.store.evicts:
            found = self.allocator.window(nbytes, filter(self._may_leave, self._coldest()))
        if found is None:
            return None
        extent, leaving = found
        for block in leaving:
            self._leave(block)
        self.allocator.allocate_at(extent)
        return extent

    def _leave(self, block: Block) -> None:
        """Let a block leave the GPU, and all tiers if it is nowhere else."""
        entry = block.entry
        if self._blocks.get(entry) is not block:
            return  # it has just gone with its other half
        if self._is_ready(block):
            self._drop(entry)
            self.stats.unloaded += 1
        else:
            self.stats.spill_dropped += 1
            self.store.lapse(entry)  # which tells us

    def _revoke_overdue(self) -> None:
        for lease in self._limits.due(self.store.now_s()):
            self.store.stats.leases_revoked += lease.revoke()

    def _give_back_abandoned(self) -> None:
        if not self._abandoned:
            return
        now_s, left = self.store.now_s(), []
        for until_s, reservation in self._abandoned:
            if now_s >= until_s or reservation.is_gone():
                self.abandoned_bytes -= reservation.place.length
                self.allocator.free(reservation.place)
            else:
                left.append((until_s, reservation))
        self._abandoned = left

    def _may_lift(self, entry: Entry) -> bool:
        return (
            entry.extent is not NOWHERE
            and entry not in self._blocks
            and entry not in self._lifting
            and self.store.index.get(entry.key, entry.space) is entry
        )

    # ---- making room -------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, *, urgent: bool) -> None:
        """Have the coldest copied to memory, since a writer has taken `nbytes`; first those that stand where a writer
        urgently wants them."""
        self._taken_bytes += nbytes
        if not urgent and self._taken_bytes * LOOK_PART < self._ahead_bytes:
            return
        with self.store.lock:
            self._taken_bytes = 0
            short_bytes = self._ahead_bytes - self.allocator.free_bytes
            standing = self.allocator.window(nbytes, self._coldest()) if urgent else None
            plan = [] if standing is None else [block.entry for block in standing[1] if not self._is_ready(block)]
            for block in islice(self._coldest(), AHEAD_ENTRIES_MAX):
                if short_bytes <= 0:
                    break
                short_bytes -= block.extent.length
                if not self._is_ready(block):
                    plan.append(block.entry)
        for entry in dict.fromkeys(plan):
            if self.transfers.find(entry.key, entry.space) is None:
                self.send_for(Kind.SPILL, entry, self._spilled)

    def _spilled(self, transfer: Transfer[None]) -> None:
        self.stats.spill_failed += transfer.state is not State.DONE
        self._on_room()

    # ---- copies, in the tier's threads -------------------------------------------------------------------------------

    def _read_in(self, key: bytes, space: int, kind: Kind) -> None:
        """Copy a block to memory; one that is wanted there and has left the GPU meanwhile is read from disk. NoRoom
        when there is none; but for a PROMOTE no block leaves unwritten for it."""
        store, drop = self.store, kind is Kind.PROMOTE
        with store.lock:
            entry = store.index.get(key, space)
            if entry is None or entry.is_resident:
                return
            block = self.hold(entry)
        if block is None:
            if isinstance(store.tiering, Tiering) and kind is not Kind.SPILL:
                store.tiering.disk_io.read_in(key, space, drop=drop)
            return
        began_s = store.now_s()
        extent = None
        try:
            extent = self._memory_for(entry.length, drop=drop)
            if extent is None:
                raise NoRoom
            start = extent.offset + PAYLOAD_OFFSET_BYTES
            image = store.arena.view[start : start + entry.length]
            given = self.read(block, image)
        except BaseException:
            with store.lock:
                self.unhold(block)
                if extent is not None:
                    self._give_back(extent)
            raise
        with store.lock:
            self.unhold(block)
            store.reserved_bytes -= extent.length
            if given and store.index.get(entry.key, entry.space) is entry and not entry.is_resident:
                store.away -= 1
                entry.extent = extent
                entry.tokens = tokens_of(image)
                store.live_bytes += extent.length
                store.policy.admit(entry)
                self.stats.spilled += 1
                self.stats.spilled_bytes += entry.length
                self.stats.spilling.add(store.now_s() - began_s)
            else:
                store.allocator.free(extent)
        if not given:
            raise GpuLost

    def _lift(self, entry: Entry, place: Extent) -> None:
        """Copy a block to the GPU; it is held in memory meanwhile."""
        start = entry.extent.offset + PAYLOAD_OFFSET_BYTES
        is_written = False
        try:
            self.arena.write(place.offset, self.store.arena.view[start : start + entry.length])
            is_written = True
        except DeviceError as error:
            self._give_up_if_dead(error)
        finally:
            self._lifted(entry, place, is_written=is_written)

    def _lifted(self, entry: Entry, place: Extent, *, is_written: bool) -> None:
        """Let the place be the entry's, if it is still what it was."""
        store = self.store
        with store.lock:
            self.reserved_bytes -= place.length
            self._lifting_bytes -= place.length
            self._lifting.discard(entry)
            is_there = store.index.get(entry.key, entry.space) is entry
            if is_written and is_there and not self.is_lost and entry not in self._blocks:
                self._enter(entry, place)
                self.stats.promoted += 1
                self.stats.promoted_bytes += entry.length
            else:
                self.allocator.free(place)
            store.unhold(entry)

    def _memory_for(self, length: int, *, drop: bool) -> Extent | None:
        """An extent of memory for a block that comes, counted as a reservation."""
        store, nbytes = self.store, extent_length(length)
        if isinstance(store.tiering, Tiering):
            return store.tiering.disk_io.room(nbytes, drop=drop)
        with store.lock:
            extent = store.place(nbytes, drop=drop)
            if extent is not None:
                store.reserved_bytes += nbytes
            return extent

    def _give_back(self, extent: Extent) -> None:
        self.store.reserved_bytes -= extent.length
        self.store.allocator.free(extent)

    def _give_up_if_dead(self, error: DeviceError) -> None:
        """The GPU has refused a block: it is given up if it answers nothing any more."""
        if not self._is_closed and not self.arena.answers():
            self._leave_all(error)

    def _lose(self, block: Block, error: DeviceError) -> None:
        """Let go of a block that the GPU did not give, and of all if it answers nothing any more."""
        if self._is_closed:
            return
        if not self.arena.answers():
            self._leave_all(error)
            return
        self._forget_lost([block])
        log.warning("GPU memory: a block could not be read and is a miss: %s", error)

    def _leave_all(self, error: DeviceError) -> None:
        with self.store.lock:
            was_lost, self.is_lost = self.is_lost, True
        if not was_lost:
            lost = self._forget_lost(list(self._blocks.values()))
            log.error("GPU memory: the GPU answers nothing any more and is given up, with %d blocks: %s", lost, error)

    def _forget_lost(self, blocks: Sequence[Block]) -> int:
        """Let blocks have no place on the GPU any more; those that are nowhere else are gone. How many those are."""
        store, lost = self.store, 0
        with store.lock:
            for each in blocks:
                entry = each.entry
                if self._blocks.get(entry) is not each:
                    continue
                is_elsewhere = self._is_ready(each) or entry.database.flushed
                self._drop(entry)
                if not is_elsewhere:
                    lost += 1
                    store.lapse(entry)
            self.stats.lost_blocks += lost
        return lost


def place_length(length: int) -> int:
    """Bytes of GPU memory for a payload of `length` bytes, which begins where its place begins."""
    return -(-length // GRAIN_BYTES) * GRAIN_BYTES or GRAIN_BYTES
