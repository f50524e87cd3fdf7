"""What storage/_core.pyx is to Python, and what each part promises."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import ClassVar, Final, Protocol

from .database import Database
from .disk.segment import Record
from .eviction.base import Policy
from .expiry import Clock, Deadlines
from .index import Index as FullIndex
from .lmcache_pairs import Departed
from .memory.allocator import Allocator
from .memory.arena import Arena
from .memory.extent import Extent
from .stats import StoreStats

INLINE_BYTES_MAX: Final = 16384
"""A value shorter than this is one Python bytes object: it would waste a page of the arena and gain nothing there."""

PAYLOAD_OFFSET_BYTES: Final = 512
"""Payloads begin this far past a page boundary. A reply's header is some 10 bytes long; source and destination of the
kernel's copy would then differ by 1..31 bytes modulo 4096, which `rep movsb` runs at less than half speed on Zen.
512 also keeps O_DIRECT possible."""

SLACK_BYTES: Final = 2
"""Room behind each payload, so that a protocol's terminator can be received by the same system call."""

ENTRY_OVERHEAD_BYTES: Final = 256
"""What an entry costs beside its key and value (the object, two dict slots, the policy's link), for the accounts."""

GRAIN_BYTES: Final = 4096
"""Extents begin and end on this boundary: the smallest page, and what O_DIRECT and a mapping need."""

BUCKETS: Final = 1024
"""A power of two; a SCAN call returns at least one bucket, so its replies grow beyond COUNT above about 10,000 keys."""

TIMED_BYTES_MIN: Final = 262144
"""Of longer values it is noted how long they take to arrive: it costs half a microsecond."""

LONG_AGO_MS: Final = 1
"""When what is stored too late has expired."""

GRACE_TURNS: Final = 50
"""For how many turns eviction spares a key whose presence was affirmed."""

NOWHERE: Final[Extent]
"""The extent of an inline value, and of one whose bytes are not in memory."""

def extent_length(length: int) -> int:
    """Bytes of arena for a payload of `length` bytes."""

class Times:
    """How long something took, each time: a count for each power of two, because adding is all that it may cost."""

    nanoseconds: int
    counts: list[int]
    """By the bit length of their nanoseconds: counts[n] took less than 2**n ns and at least half of that."""

    def __init__(self, nanoseconds: int = 0, counts: list[int] | None = None) -> None: ...
    def add(self, seconds: float) -> None:
        """Enter one; a clock that went back took no time."""

    def reset(self) -> None:
        """Forget all of them."""

class StoreCounts:
    """What became of values; bytes are payload bytes."""

    names: ClassVar[tuple[str, ...]]
    """Of the counters."""
    hits: int
    hit_tokens: int
    """Tokens of the blocks in the arena that were handed out whole, as far as they say how many they hold."""
    misses: int
    created: int
    """Values stored under a key that had none."""
    overwritten: int
    """Values stored in place of an older one."""
    refused: int
    """Values for which there was no room: everything evictable was leased, or the value exceeds the arena."""
    aborted: int
    """Reservations given back without a commit."""
    evicted: int
    evicted_bytes: int
    evicted_away: int
    """Those of them that had left memory before and had to leave the disk, or were lost there."""
    expired: int
    deleted: int
    flushed: int
    """Blocks that left with all others of their database."""
    leased_bytes: int
    """Of blocks that clients read in the arena by themselves."""
    leases_revoked: int
    """Leases ended by their time limit, not by their holder."""
    receiving: Times
    """From there being room in the arena for a long value (TIMED_BYTES_MIN) to its being visible."""

class Lock:
    """As threading.Lock, without time limits; for steps that are compiled it costs no call."""

    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Holes:
    """The free holes of an arena, in the order of their addresses and in that of their lengths."""

    capacity_bytes: int
    free_bytes: int

    def __init__(self, capacity_bytes: int, hole_bytes: int) -> None: ...
    def allocate(self, length: int) -> Extent | None:
        """Take `length` bytes (a multiple of GRAIN_BYTES) from the tightest hole; None when no hole is long enough."""

    def free(self, extent: Extent) -> None:
        """Give an extent back; it joins the holes on both sides at once. AssertionError when it was free."""

    def allocate_at(self, extent: Extent) -> None:
        """Take exactly `extent`, which must lie inside one hole, else ValueError: the end of what `window` began."""

    def past(self, start: int) -> int | None:
        """Past the end of the hole that begins there; None: none does."""

    def start(self, past: int) -> int | None:
        """Where the hole begins that ends there; None: none does."""

    def spans(self) -> list[tuple[int, int]]:
        """First byte and past the end of every free hole, by address."""

    def lengths(self) -> list[tuple[int, int]]:
        """Length and first byte of every free hole, the shortest first, those of one length by address."""

    @property
    def longest_bytes(self) -> int:
        """The longest hole; 0 when there is none."""

class Entry:
    """One block: `key` in `database`, `length` bytes in `value`, else in `extent`, else in `record` on disk."""

    key: bytes
    database: Database
    length: int
    extent: Extent
    value: bytes | None
    record: Record | None
    """Where the same bytes lie on disk; None for a block that is in memory alone."""
    expire_at_ms: int
    """Unix time in ms at which the block is gone; 0 = never."""
    hits: int
    leases: int
    created_s: float
    accessed_s: float
    encoding: str | None
    """What some want to know of how `value` came about, in a word; None again when it is written over."""
    tokens: int
    """How many tokens the block says that it holds (tensor_facts.py); 0 for what says nothing and for small values."""
    affirmed_turn: int
    """The store's turn in which a client was told that the key is there; 0 = never."""

    def __init__(self, key: bytes, space: int, length: int, extent: Extent, value: bytes | None) -> None: ...
    @property
    def space(self) -> int:
        """The number of its database."""

    @property
    def is_resident(self) -> bool:
        """Whether the bytes are in memory."""

    @property
    def tier(self) -> str:
        """The fastest tier that holds the bytes."""

    @property
    def memory_bytes(self) -> int:
        """What this block costs in memory, all told: the figure of MEMORY USAGE."""

class Writer(Protocol):
    """What a Reservation ends by: the store that gave the room."""

    def commit(self, reservation: Reservation, expire_at_ms: int) -> bool:
        """Publish what the reservation holds; False when there is no room for it after all."""

    def abort(self, reservation: Reservation) -> None:
        """Free what the reservation holds."""

class Holder(Protocol):
    """What a Lease ends by: the store that has the bytes."""

    def release(self, entry: Entry) -> None:
        """End one hold on an entry."""

class Reservation:
    """A writer's hold on room for one value: fill `view`, then `commit` or `abort`; a with-block aborts by default.

    Until `commit` no reader can see the bytes. The store owns the memory: no view may be used once the hold has ended.
    """

    _store: Writer | None
    extent: Extent
    key: bytes
    length: int
    space: int
    made_s: float
    """When there was room, on the store's clock; 0 for a value of which that is not asked."""
    view_with_slack: memoryview
    """The value's bytes and SLACK_BYTES more, which a protocol may let its terminator fall into."""

    def __init__(
        self, store: Writer, key: bytes, space: int, memory: memoryview, extent: Extent, made_s: float = 0.0
    ) -> None: ...
    @property
    def view(self) -> memoryview:
        """Exactly the value's bytes, to be written."""

    @property
    def offset(self) -> int | None:
        """Where in the arena the value begins; None for one that is not there."""

    def shorten(self, length: int) -> None:
        """Let the value be the first `length` bytes only; the extent stays as it is."""

    def filled(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are where they stay."""

    def commit(self, expire_at_ms: int = 0) -> bool:
        """Make the value visible under its key, in place of an older one. Ends the hold; a second call does nothing.

        False: a store that evicts no block has no room for it after all, as only a value outside the arena may find.
        The hold then goes on.
        """

    def abort(self) -> None:
        """Give the room back. Ends the hold; after a commit it does nothing."""

    def __enter__(self) -> Reservation: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Lease:
    """A reader's hold: `view` is read-only and stays what it was, whatever happens to the key, until `release`.

    A lease taken with a time limit may be revoked by the store after that: its view then raises ValueError on use,
    and `held` is False. A reader that has to know asks `held` after it has used the bytes.
    """

    entry: Entry
    view: memoryview

    def __init__(self, store: Holder, entry: Entry, view: memoryview) -> None: ...
    @property
    def key(self) -> bytes:
        """The key under which the block was found."""

    @property
    def length(self) -> int:
        """Bytes of payload."""

    @property
    def offset(self) -> int | None:
        """Where in the arena the value begins; None for one that is not there."""

    @property
    def held(self) -> bool:
        """Whether the bytes have been that value until now: neither released nor revoked."""

    def release(self) -> None:
        """End the hold; a second call does nothing."""

    def revoke(self) -> tuple[Entry, ...]:
        """For the store alone, under its lock: end the hold without its holder; of what there was one until now. A
        reader that has made a tensor of the view keeps the view, and asks `held`."""

    def __enter__(self) -> Lease: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class LeaseRun:
    """Holds that were taken together and have one time limit, for clients that ask for many at a time and read the
    arena by themselves: a list, where a Lease for each would cost an object and a view.

    `entries` has an entry for each hold that goes on, and None for each that has ended or never was.
    """

    entries: list[Entry | None]
    until_s: float
    """When the store may revoke them, on its own clock."""

    def __init__(self, entries: list[Entry | None], until_s: float) -> None: ...
    @property
    def held(self) -> bool:
        """Whether any of them goes on."""

    def revoke(self) -> tuple[Entry, ...]:
        """For the store alone, under its lock: end them without their holder; of what there was one until now."""

class OneOrder:
    """What the policies of one order share (eviction/base.py): a list through the entries, with what arrived last at
    its end. An entry is in two such orders at most (RuntimeError), those of two tiers. An iterator raises RuntimeError
    when the order changes meanwhile."""

    moves_when_used: bool
    """Whether an entry that is used goes to the end ..."""
    moves_when_renewed: bool
    """... and one that is written over where it is."""
    coldest_first: bool
    """Whether what is first in it and has no lease is what leaves next."""

    def __init__(self) -> None: ...
    def admit(self, entry: Entry) -> None: ...
    def restore(self, entry: Entry, uses: int) -> None: ...
    def touch(self, entry: Entry, /) -> None: ...
    def end_changed(self, entry: Entry) -> None: ...
    def forget(self, entry: Entry) -> None: ...
    def others(self) -> Iterator[Entry]: ...
    def spills(self, entry: Entry) -> bool: ...
    def uses(self, entry: Entry) -> int | None: ...
    def __len__(self) -> int: ...
    def __contains__(self, entry: object) -> bool: ...
    def __iter__(self) -> Iterator[Entry]: ...
    def __reversed__(self) -> Iterator[Entry]: ...

class Index:
    """The keys of SPACES databases (index.py)."""

    spaces: list[dict[bytes, Entry]]
    databases: list[Database]
    """What the entries of each refer to."""
    _buckets: list[list[set[bytes]] | None]

    def __init__(self) -> None: ...
    def get(self, key: bytes, space: int) -> Entry | None:
        """The visible entry under `key`, expired or not."""

    def put(self, entry: Entry) -> Entry | None:
        """Make `entry` visible under its key; returns the one that it replaces."""

    def remove(self, entry: Entry) -> None:
        """Take away a visible entry."""

    def set_end(self, entry: Entry, at_ms: int) -> None:
        """Give a visible entry another end, in Unix ms, or 0 = none."""

    def rename(self, entry: Entry, key: bytes, space: int) -> Entry | None:
        """Make a visible entry visible under another name and no longer under its own; returns the one it replaces."""

class StoreCore:
    """What a command does to the store; StoreState (state.py) says what the fields mean, and sets them."""

    lock: Lock
    arena: Arena
    stats: StoreStats
    policy: Policy
    inline_policy: Policy
    now_ms: Clock
    now_s: Callable[[], float]
    end_holds: Callable[[], object]
    holders: Collection[object]
    """Who may hold leases that `end_holds` ends, which is not called while there are none."""
    allocator: Allocator
    index: FullIndex
    _memory: memoryview
    inline_bytes_high: int
    bound_bytes: int
    beside_bytes: int
    live_bytes: int
    retired_bytes: int
    reserved_bytes: int
    inline_bytes: int
    leases: int
    away: int
    writes: int
    turn: int
    affirmed_turn: int
    keep: bool
    may_refuse: bool
    keep_expired: bool
    unsaved: dict[Entry, int]
    journal: list[tuple[str, bytes, int]] | None
    _looked_up: list[tuple[list[Entry], float, int]]
    _flushed: list[dict[bytes, Entry]]
    """Out of the index; in all else until they are given back."""
    _flushed_keys: list[set[bytes]]
    _affirmed: list[tuple[list[Entry], float, int]]
    _put_off_entries: int
    _limits: Deadlines[Lease | LeaseRun]
    _departed: Departed

    # With the lock held.
    def _visible(self, key: bytes, space: int) -> Entry | None:
        """The entry under `key`, if its time has not come: else it leaves now."""

    def _hit(self, key: bytes, space: int) -> Entry | None:
        """The entry under `key`, used now, or None: a miss, or a block on disk alone, which is neither hit nor miss."""

    def _lease(self, entry: Entry) -> Lease:
        """A hold on `entry`."""

    def unhold(self, entry: Entry) -> None:
        """End one hold on `entry`."""

    def _publish(self, entry: Entry, expire_at_ms: int) -> None:
        """Make an entry visible whose bytes are already counted; what it replaces is retired."""

    def _renumber(self, entry: Entry) -> None:
        """Number an entry that was changed anew: a client that changed it waits for it to be on disk, if at all."""

    def _remove(self, entry: Entry, why: str) -> None:
        """Take a visible entry away; `why` is for the journal."""

    def _retire(self, entry: Entry, successor: Entry | None = None) -> None:
        """Let go of an entry that has just left the index, on disk too, there when its successor has been written."""

    # The verbs, which take it.
    def reserve(
        self, key: bytes, length: int, space: int = 0, *, drop: bool = True, spare: int = 0
    ) -> Reservation | None:
        """Room for a value of `length` bytes, or None: all that could leave is leased, or the arena is smaller. A value
        that will grow gets `spare` bytes behind it, if there is room for them.

        Blocks that must leave for it leave now. An older value under `key` stays visible until `commit`. Without `drop`
        no block leaves that shall go to disk and is not there yet: None then also means that the disk has been told to
        make room, and that `tiering.makes_room` says whether it is worth asking again.
        """

    def commit(self, reservation: Reservation, expire_at_ms: int = 0) -> bool:
        """Publish what a reservation holds; called by Reservation.commit, which sees to it that it happens once."""

    def abort(self, reservation: Reservation) -> None:
        """Free what a reservation holds; called by Reservation.abort."""

    def put(self, key: bytes, value: bytes, space: int = 0, expire_at_ms: int = 0) -> bool:
        """Store a value that is at hand as bytes: reserve, copy and commit in one. False when there is no room."""

    def fetch(self, key: bytes, space: int = 0) -> bytes | Lease | None:
        """The value as the server sends it: small ones as bytes, which need no hold, the others under a Lease.

        None, as of every method that gives bytes, also for a block that is on disk alone: `find` tells the two apart,
        and `tiering.bring` fetches it.
        """

    def lease(self, key: bytes, space: int = 0, limit_s: float = 0.0) -> Lease | None:
        """Hold the value under `key`, or None. With `limit_s` the hold may be revoked that many seconds from now."""

    def lease_run(
        self, keys: Sequence[bytes], space: int, limit_s: float
    ) -> tuple[list[Entry | bytes | None], LeaseRun]:
        """What there is under each key, blocks being held from now on, for `limit_s` or until `end_leases`. Each is
        used as by `lease`."""

    def end_leases(self, places: Sequence[tuple[LeaseRun, int, int]]) -> int:
        """End holds; returns how many of them had not ended before."""

    def release(self, entry: Entry) -> None:
        """End one hold on `entry`; called by Lease.release, which sees to it that it happens once."""

    def delete(self, keys: Iterable[bytes], space: int = 0) -> int:
        """Take keys away; returns how many there were. Leased bytes stay with their readers until released."""

    def match(self, keys: Sequence[bytes], space: int = 0) -> int:
        """How many of `keys`, from the first on, are present without a gap. The run is touched, its tail coldest: at
        the latest when another block is stored, evicted or lent out of the arena."""

    def affirm(self, keys: Sequence[bytes], space: int = 0) -> int:
        """How many of `keys` are present, one named twice counting twice; for a grace time they are evicted last.

        A client that is told that a block is there comes back at once: LMCache looks up first and then gets, and some
        of its clients wait for ever for a value that has left in between. No order changes, and half the room may be
        spared.
        """
