# cython: language_level=3, binding=False, nonecheck=True, wraparound=False, cdivision=True
"""The store's hot core: entries, holds, the index, the accounts, and the steps that each command takes through them.

All of it is Python's to see: `storage/entry.py`, `index.py` and `memory/allocator.py` hand the classes on, `state.py`
adds to StoreCore what is rare (eviction, tiers, flushes), and `store.py` the other verbs. It is compiled because a SET
or a GET takes each of these steps once, and as bytecode they took most of its time. Beside each `def` for Python stands
a `cdef` without a frame for the server's hot path (kvredis/server/protocol/_hot.pyx); there is one body for both.

Nothing here lets the interpreter's lock go, so a step that calls no Python is one step to every other thread. The
store's own lock is taken all the same where accounts must agree: another thread may stand in the middle of Python.
"""

from contextlib import suppress
from time import monotonic

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_SetItem
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memmove
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from .database import SPACES, Database, unplaced
from .memory.extent import Extent
from .tensor_facts import LOOKED_AT_BYTES, tokens_of

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object, object) except? NULL
    object PyType_GenericAlloc(PyTypeObject *, Py_ssize_t)
    void PyTuple_SET_ITEM(object, Py_ssize_t, object)
    Py_buffer *PyMemoryView_GET_BUFFER(object)
    int PyBUF_READ

cdef extern from "semaphore.h" nogil:
    int sem_init(sem_t *, int, unsigned int)
    int sem_destroy(sem_t *)
    int sem_wait(sem_t *)
    int sem_post(sem_t *)

cdef enum:
    INLINE_MAX = 16 * 1024
    SLACK = 2
    OVERHEAD = 256
    GRAIN = 4096
    BUCKET_COUNT = 1024
    LOOKED_AT = 512
    TIMED_MIN = 256 * 1024
    GRACE = 50
    HALF_NAME = 8  # lmcache_pairs.py: "metadata" and "kv_bytes"
    LONG_AGO = 1

INLINE_BYTES_MAX = INLINE_MAX
PAYLOAD_OFFSET_BYTES = PAYLOAD_OFFSET
SLACK_BYTES = SLACK
ENTRY_OVERHEAD_BYTES = OVERHEAD
GRAIN_BYTES = GRAIN
BUCKETS = BUCKET_COUNT
TIMED_BYTES_MIN = TIMED_MIN
LONG_AGO_MS = LONG_AGO
GRACE_TURNS = GRACE
assert LOOKED_AT_BYTES == LOOKED_AT

NOWHERE = Extent(0, 0)
cdef object nowhere = NOWHERE
cdef type extent_type = Extent


cdef inline object extent_at(Py_ssize_t offset, Py_ssize_t length):
    """An Extent, whose own way of being made is Python."""
    cdef object extent = PyType_GenericAlloc(<PyTypeObject *> extent_type, 2)
    cdef object first = offset, second = length
    Py_INCREF(first)
    PyTuple_SET_ITEM(extent, 0, first)
    Py_INCREF(second)
    PyTuple_SET_ITEM(extent, 1, second)
    return extent


cdef inline Py_ssize_t extent_bytes(Py_ssize_t length) noexcept:
    return (PAYLOAD_OFFSET + length + SLACK + GRAIN - 1) // GRAIN * GRAIN


def extent_length(Py_ssize_t length):
    return extent_bytes(length)


cdef inline bint has_other_half(bytes key) noexcept:
    """Whether LMCache keeps a chunk under this key and another (lmcache_pairs.py)."""
    cdef Py_ssize_t at = PyBytes_GET_SIZE(key) - HALF_NAME
    cdef const char *name = PyBytes_AS_STRING(key)
    return at >= 0 and (memcmp(name + at, b"kv_bytes", HALF_NAME) == 0 or memcmp(name + at, b"metadata", HALF_NAME) == 0)


cdef inline int bit_length(unsigned long long number) noexcept:
    cdef int bits = 0
    while number:
        bits += 1
        number >>= 1
    return bits


# ---- counts of times -------------------------------------------------------------------------------------------------


cdef class Times:
    """stats.py says what it counts."""

    def __init__(self, nanoseconds=0, counts=None):
        self.nanoseconds = nanoseconds
        self.counts = [0] * 64 if counts is None else counts

    def add(self, double seconds):
        cdef long long nanoseconds = <long long> (seconds * 1e9) if seconds > 0 else 0
        cdef int power = bit_length(nanoseconds)
        self.nanoseconds += nanoseconds
        self.counts[power] = self.counts[power] + 1

    def reset(self):
        self.nanoseconds = 0
        self.counts = [0] * 64


cdef class StoreCounts:
    """What StoreStats counts (stats.py says what each is), and the class's `names` in their order."""

    names = (
        "hits", "hit_tokens", "misses", "created", "overwritten", "refused", "aborted", "evicted", "evicted_bytes",
        "evicted_away", "expired", "deleted", "flushed", "leased_bytes", "leases_revoked",
    )

    def __cinit__(self):
        self.receiving = Times()


# ---- the lock --------------------------------------------------------------------------------------------------------


cdef class Lock:
    """As threading.Lock, and without a call of Python for steps that are compiled.

    All that looks at it holds the interpreter's lock, so a flag says whether it is taken: a Python lock reads the clock
    each time, which was 5 % of what an MSET takes. Only threads that wait let the interpreter go, before `turns`.
    """

    def __cinit__(self):
        if sem_init(&self.turns, 0, 0):
            raise MemoryError

    def __dealloc__(self):
        sem_destroy(&self.turns)

    cdef int take(self) except -1:
        while self.taken:
            self.waiting += 1
            with nogil:
                while sem_wait(&self.turns):  # a signal came
                    pass
        self.taken = True
        return 0

    cdef int give(self) except -1:
        self.taken = False
        if self.waiting:
            self.waiting -= 1
            sem_post(&self.turns)
        return 0

    def acquire(self, bint blocking=True):
        if not blocking and self.taken:
            return False
        self.take()
        return True

    def release(self):
        if not self.taken:
            raise RuntimeError("release unlocked lock")
        self.give()

    def locked(self):
        return self.taken

    def __enter__(self):
        self.take()
        return True

    def __exit__(self, kind, error, trace):
        self.give()


# ---- free memory -----------------------------------------------------------------------------------------------------


cdef class Holes:
    """The free holes of an arena: what memory/allocator.py says of taking and giving back, and of nothing else.

    Two arrays of the same holes, each in order, a number of 64 bits each: where a hole begins above how long it is, and
    how long it is above where it begins, in grains. The first knows a hole's neighbours, the second the tightest hole.
    """

    def __init__(self, Py_ssize_t capacity_bytes, Py_ssize_t hole_bytes):
        self.start_bits, self.length_bits = (capacity_bytes // GRAIN).bit_length(), (hole_bytes // GRAIN).bit_length()
        if self.start_bits + self.length_bits > 64:
            raise ValueError(f"holes of {hole_bytes} bytes in {capacity_bytes} are more than numbers of 64 bits tell")
        self.capacity_bytes, self.hole_bytes = capacity_bytes, hole_bytes
        self.free_bytes = self.count = self.room = 0

    def __dealloc__(self):
        free(self.by_start)
        free(self.by_length)

    cdef unsigned long long placed(self, unsigned long long start, unsigned long long length) noexcept:
        """A hole as `by_start` has it."""
        return start << self.length_bits | length

    cdef unsigned long long sized(self, unsigned long long length, unsigned long long start) noexcept:
        """A hole as `by_length` has it."""
        return length << self.start_bits | start

    cdef unsigned long long start_of(self, Py_ssize_t at) noexcept:
        return upper(self.by_start[at], self.length_bits)

    cdef unsigned long long length_of(self, Py_ssize_t at) noexcept:
        return lower(self.by_start[at], self.length_bits)

    cdef unsigned long long turned(self, Py_ssize_t at) noexcept:
        """The hole at that place of `by_start` as `by_length` has it."""
        return self.sized(self.length_of(at), self.start_of(at))

    cdef void enter(self, unsigned long long *holes, Py_ssize_t at, unsigned long long hole) noexcept:
        memmove(holes + at + 1, holes + at, (self.count - at) * sizeof(hole))
        holes[at] = hole

    cdef void drop(self, unsigned long long *holes, Py_ssize_t at) noexcept:
        memmove(holes + at, holes + at + 1, (self.count - at - 1) * sizeof(unsigned long long))

    cdef int replace_length(self, unsigned long long was, unsigned long long becomes) except -1:
        """Let a hole have another length or beginning in the array that is ordered by length."""
        cdef Py_ssize_t old = first_from(self.by_length, self.count, was)
        cdef Py_ssize_t new = first_from(self.by_length, self.count, becomes)
        if new > old:
            new -= 1
            memmove(self.by_length + old, self.by_length + old + 1, (new - old) * sizeof(was))
        else:
            memmove(self.by_length + new + 1, self.by_length + new, (old - new) * sizeof(was))
        self.by_length[new] = becomes
        return 0

    cdef int insert(self, unsigned long long start, unsigned long long length, Py_ssize_t at) except -1:
        """Have one hole more, at that place of those in the order of their addresses."""
        cdef Py_ssize_t wanted = max(2 * self.room, <Py_ssize_t> 64)
        cdef unsigned long long sized = self.sized(length, start)
        if self.count == self.room:
            # Both before anything is changed.
            more = <unsigned long long *> realloc(self.by_start, wanted * sizeof(start))
            if more == NULL:
                raise MemoryError
            self.by_start = more
            more = <unsigned long long *> realloc(self.by_length, wanted * sizeof(start))
            if more == NULL:
                raise MemoryError
            self.by_length, self.room = more, wanted
        self.enter(self.by_start, at, self.placed(start, length))
        self.enter(self.by_length, first_from(self.by_length, self.count, sized), sized)
        self.count += 1
        return 0

    cdef int lose(self, Py_ssize_t at) except -1:
        """Have the hole at that place no more."""
        self.drop(self.by_length, first_from(self.by_length, self.count, self.turned(at)))
        self.drop(self.by_start, at)
        self.count -= 1
        return 0

    cdef int change(self, Py_ssize_t at, unsigned long long start, unsigned long long length) except -1:
        """Let the hole at that place be where it stays between the same neighbours."""
        self.replace_length(self.turned(at), self.sized(length, start))
        self.by_start[at] = self.placed(start, length)
        return 0

    cdef object take(self, Py_ssize_t length):
        cdef unsigned long long wanted, start
        cdef Py_ssize_t at
        if length <= 0 or length > self.hole_bytes:  # any client may ask for more than its bits tell
            return None
        wanted = length // GRAIN
        at = first_from(self.by_length, self.count, self.sized(wanted, 0))
        if at == self.count:
            return None
        start = lower(self.by_length[at], self.start_bits)
        self.cut(first_from(self.by_start, self.count, self.placed(start, 0)), start, wanted)
        return extent_at(start * GRAIN, length)

    cdef int cut(self, Py_ssize_t at, unsigned long long start, unsigned long long length) except -1:
        """Take grains out of the hole at that place, which has them."""
        cdef unsigned long long first = self.start_of(at), past = first + self.length_of(at)
        if start + length < past:
            if start == first:
                self.change(at, start + length, past - start - length)
            else:
                self.insert(start + length, past - start - length, at + 1)
                self.change(at, first, start - first)
        elif start > first:
            self.change(at, first, start - first)
        else:
            self.lose(at)
        self.free_bytes -= length * GRAIN
        return 0

    cdef int give(self, object extent) except -1:
        cdef Py_ssize_t at, nbytes = length_of(extent)
        cdef unsigned long long start, length, left
        cdef bint is_behind = False  # the hole before it ends where it begins
        assert offset_of(extent) >= 0 and 0 < nbytes <= self.capacity_bytes - offset_of(extent), extent
        start, length = offset_of(extent) // GRAIN, nbytes // GRAIN
        at = first_from(self.by_start, self.count, self.placed(start, 0))
        if at:
            left = self.start_of(at - 1) + self.length_of(at - 1)
            assert left <= start, f"{extent} was free"
            is_behind = left == start
        assert at == self.count or start + length <= self.start_of(at), f"{extent} was free"
        if is_behind:
            if at < self.count and start + length == self.start_of(at):
                length += self.length_of(at)
                self.lose(at)
            self.change(at - 1, self.start_of(at - 1), self.length_of(at - 1) + length)
        elif at < self.count and start + length == self.start_of(at):
            self.change(at, start, length + self.length_of(at))
        else:
            self.insert(start, length, at)
        self.free_bytes += nbytes
        return 0

    def allocate(self, Py_ssize_t length):
        return self.take(length)

    def free(self, extent):
        self.give(extent)

    def allocate_at(self, extent):
        cdef Py_ssize_t at, nbytes = length_of(extent)
        cdef unsigned long long start, length
        if offset_of(extent) >= 0 and 0 < nbytes <= self.capacity_bytes - offset_of(extent):
            start, length = offset_of(extent) // GRAIN, nbytes // GRAIN
            at = first_from(self.by_start, self.count, self.placed(start + 1, 0))  # behind the one that has it, if any
            if at and start + length <= self.start_of(at - 1) + self.length_of(at - 1):
                self.cut(at - 1, start, length)
                return
        raise ValueError(f"{extent} is not free")

    def past(self, Py_ssize_t start):
        cdef Py_ssize_t at
        if 0 <= start < self.capacity_bytes:
            at = first_from(self.by_start, self.count, self.placed(start // GRAIN, 0))
            if at < self.count and <Py_ssize_t> self.start_of(at) * GRAIN == start:
                return start + <Py_ssize_t> self.length_of(at) * GRAIN
        return None

    def start(self, Py_ssize_t past):
        cdef Py_ssize_t at
        if 0 < past <= self.capacity_bytes:
            at = first_from(self.by_start, self.count, self.placed(past // GRAIN, 0)) - 1
            if at >= 0 and <Py_ssize_t> (self.start_of(at) + self.length_of(at)) * GRAIN == past:
                return <Py_ssize_t> self.start_of(at) * GRAIN
        return None

    def spans(self):
        cdef Py_ssize_t at
        found = []
        for at in range(self.count):
            found.append((self.start_of(at) * GRAIN, (self.start_of(at) + self.length_of(at)) * GRAIN))
        return found

    def lengths(self):
        cdef Py_ssize_t at
        cdef unsigned long long hole
        found = []
        for at in range(self.count):
            hole = self.by_length[at]
            found.append((upper(hole, self.start_bits) * GRAIN, lower(hole, self.start_bits) * GRAIN))
        return found

    @property
    def longest_bytes(self):
        return upper(self.by_length[self.count - 1], self.start_bits) * GRAIN if self.count else 0


cdef inline unsigned long long upper(unsigned long long hole, int bits) noexcept:
    """What is above so many bits."""
    return hole >> bits


cdef inline unsigned long long lower(unsigned long long hole, int bits) noexcept:
    return hole & ((<unsigned long long> 1 << bits) - 1)


cdef Py_ssize_t first_from(const unsigned long long *holes, Py_ssize_t count, unsigned long long least) noexcept:
    """The place of the first that is `least` or more, else `count`."""
    cdef Py_ssize_t low = 0, middle
    while low < count:
        middle = (low + count) // 2
        if holes[middle] < least:
            low = middle + 1
        else:
            count = middle
    return low


# ---- entries and holds -----------------------------------------------------------------------------------------------


@cython.no_gc  # it refers to nothing that refers to it: a million of them are not walked
cdef class Entry:
    """entry.py says what an entry is."""

    def __init__(self, bytes key, space, Py_ssize_t length, extent, value):
        self.key = key
        self.database = unplaced(space)
        self.length = length
        self.extent = extent
        self.value = value

    @property
    def space(self):
        return self.database.number

    @property
    def is_resident(self):
        return self.value is not None or self.extent is not nowhere

    @property
    def tier(self):
        return "disk" if self.value is None and self.extent is nowhere else "memory"

    @property
    def memory_bytes(self):
        return self.cost()

    cdef Py_ssize_t cost(self) except -1:
        return (length_of(self.extent) if self.value is None else self.length) + len(self.key) + OVERHEAD


cdef Entry new_entry(bytes key, Py_ssize_t length, object extent, object value):
    """An entry that is not in a database before the index has it."""
    cdef Entry entry = Entry.__new__(Entry)
    entry.key, entry.length, entry.extent, entry.value = key, length, extent, value
    return entry


class Writer:
    """A name for type checkers: _core.pyi has the protocol."""


class Holder:
    """As Writer."""


cdef class Reservation:
    """entry.py says what it promises."""

    def __init__(self, store, bytes key, Py_ssize_t space, memory, extent, double made_s=0.0):
        self._store = store
        self.made_s = made_s
        self.key = key
        self.space = space
        self.extent = extent
        self.length = len(memory) - SLACK
        self._view = memory

    @property
    def view_with_slack(self):
        if self._view is None:  # few of those that are made by the thousand are asked for it
            if self._store is None:
                raise ValueError("the reservation has ended")
            self._view = self._store.arena.view[self.offset :][: self.length + SLACK]
        return self._view

    @property
    def view(self):
        return self.view_with_slack[: self.length]

    @property
    def offset(self):
        return None if self.extent is nowhere else offset_of(self.extent) + PAYLOAD_OFFSET

    def shorten(self, Py_ssize_t length):
        assert 0 <= length <= self.length
        self.length = length

    def filled(self, start, stop):
        pass

    cdef bint publish(self, long long expire_at_ms) except -1:
        store, self._store = self._store, None
        if store is None:
            return True
        if (<StoreCore> store).committed(self, expire_at_ms) if isinstance(store, StoreCore) else store.commit(self, expire_at_ms):
            return True
        self._store = store
        return False

    cdef int drop(self) except -1:
        store, self._store = self._store, None
        if isinstance(store, StoreCore):
            (<StoreCore> store).aborted(self)
        elif store is not None:
            store.abort(self)
        return 0

    def commit(self, expire_at_ms=0):
        return self.publish(expire_at_ms)

    def abort(self):
        self.drop()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.abort()  # of what is more than this, its own


cdef class Lease:
    """entry.py says what it promises."""

    def __init__(self, store, Entry entry, view):
        self._store = store
        self.entry = entry
        self.view = view

    @property
    def key(self):
        return self.entry.key

    @property
    def length(self):
        return self.entry.length

    @property
    def offset(self):
        return None if self.entry.extent is nowhere else offset_of(self.entry.extent) + PAYLOAD_OFFSET

    @property
    def held(self):
        return self._store is not None

    cdef int end(self) except -1:
        store, self._store = self._store, None
        if isinstance(store, StoreCore):
            (<StoreCore> store).ended_alone(self.entry)
        elif store is not None:
            store.release(self.entry)
        return 0

    def release(self):
        self.end()

    def revoke(self):
        if self._store is None:
            return ()
        self._store = None
        with suppress(BufferError):
            self.view.release()
        return (self.entry,)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.end()


cdef class LeaseRun:
    """entry.py says what it promises."""

    def __init__(self, list entries, double until_s):
        self.entries = entries
        self.until_s = until_s

    @property
    def held(self):
        return any(self.entries)

    def revoke(self):
        entries = tuple(filter(None, self.entries))
        self.entries[:] = [None] * len(self.entries)
        return entries


# ---- the order of eviction -------------------------------------------------------------------------------------------


cdef class OneOrder:
    """What the policies of one order share (eviction/base.py): a list through the entries, with what arrived last at
    its end. WHY no dict: to look an entry up by itself costs three misses of the cache where there are many. An entry
    has a place in two lists at most, and each holds a reference to it."""

    def __init__(self):
        self.is_plain = type(self).admit is OneOrder.admit and type(self).forget is OneOrder.forget

    def __dealloc__(self):
        cdef PyObject *entry
        while self.oldest != NULL:
            entry = self.oldest
            self.unlink(self.place(entry))
            Py_DECREF(<object> entry)

    cdef Place *place(self, PyObject *entry) noexcept:
        """An entry's own place in this order, or NULL."""
        cdef Place *places = (<Entry> entry).places
        if places[0].order == <PyObject *> self:
            return &places[0]
        return &places[1] if places[1].order == <PyObject *> self else NULL

    cdef void link(self, Place *place, PyObject *entry) noexcept:
        """Put an entry at the end."""
        place.order, place.older, place.newer = <PyObject *> self, self.newest, NULL
        if self.newest == NULL:
            self.oldest = entry
        else:
            self.place(self.newest).newer = entry
        self.newest = entry
        self.count += 1
        self.changes += 1

    cdef void unlink(self, Place *place) noexcept:
        """Take the entry of a place out."""
        if place.older == NULL:
            self.oldest = place.newer
        else:
            self.place(place.older).newer = place.newer
        if place.newer == NULL:
            self.newest = place.older
        else:
            self.place(place.newer).older = place.older
        place.order = place.older = place.newer = NULL
        self.count -= 1
        self.changes += 1

    cdef int enter(self, Entry entry) except -1:
        if self.place(<PyObject *> entry) == NULL:
            if entry.places[0].order != NULL and entry.places[1].order != NULL:
                raise RuntimeError(f"{entry.key!r} is in two orders already")
            self.link(&entry.places[entry.places[0].order != NULL], <PyObject *> entry)
            Py_INCREF(entry)
        return 0

    cdef int leave(self, Entry entry) except -1:
        cdef Place *place = self.place(<PyObject *> entry)
        if place == NULL:
            raise KeyError(entry)
        self.unlink(place)
        Py_DECREF(entry)
        return 0

    cdef int use(self, Entry entry, bint moves) except -1:
        """Note a use, by which an entry goes to the end if it `moves`; KeyError when it is not in the order."""
        cdef Place *place = self.place(<PyObject *> entry)
        if place == NULL:
            raise KeyError(entry)
        if moves and place.newer != NULL:
            self.unlink(place)
            self.link(place, <PyObject *> entry)
        return 0

    def admit(self, Entry entry):
        self.enter(entry)

    def restore(self, Entry entry, uses):
        self.enter(entry)

    def touch(self, Entry entry):
        self.use(entry, self.moves_when_used)

    def end_changed(self, entry):
        pass

    def forget(self, Entry entry):
        self.leave(entry)

    def others(self):
        return iter(())

    def spills(self, entry):
        return True

    def uses(self, entry):
        return None

    def __len__(self):
        return self.count

    def __contains__(self, entry):
        return isinstance(entry, Entry) and self.place(<PyObject *> entry) != NULL

    def __iter__(self):
        return self._walk(True)

    def __reversed__(self):
        return self._walk(False)

    def _walk(self, bint forwards):
        cdef unsigned long long changes = self.changes
        cdef Py_ssize_t left = self.count
        cdef Entry entry = None
        cdef PyObject *next_one = self.oldest if forwards else self.newest
        cdef Place *place
        while left:
            entry = <Entry> next_one
            yield entry
            if self.changes != changes:
                raise RuntimeError("the order has changed")
            place = self.place(<PyObject *> entry)
            next_one = place.newer if forwards else place.older
            left -= 1


# ---- the index -------------------------------------------------------------------------------------------------------


cdef class Index:
    """Which key is which entry: index.py says more, and has what SCAN and checks ask."""

    def __init__(self):
        self.spaces = [{} for _ in range(SPACES)]
        self.databases = [Database(number) for number in range(SPACES)]
        self._buckets = [None] * SPACES

    cdef Entry find(self, object key, Py_ssize_t space):
        cdef PyObject *found = PyDict_GetItemWithError(self.space(space), key)
        return None if found == NULL else <Entry> found

    cdef dict space(self, Py_ssize_t number):
        if number < 0 or number >= len(self.spaces):
            raise IndexError(number)
        return <dict> self.spaces[number]

    cdef Entry enter(self, Entry entry):
        cdef Py_ssize_t space = entry.database.number
        cdef dict keys = self.space(space)
        cdef PyObject *found = PyDict_GetItemWithError(keys, entry.key)
        cdef Entry old = None if found == NULL else <Entry> found
        database = entry.database = self.databases[space]
        PyDict_SetItem(keys, entry.key, entry)
        if entry.expire_at_ms:
            database.ends += 1
            database.ends_ms += entry.expire_at_ms
        if old is None:
            buckets = self._buckets[space]
            if buckets is None:
                buckets = self._buckets[space] = [set() for _ in range(BUCKET_COUNT)]
            (<set> (<list> buckets)[hash(entry.key) & (BUCKET_COUNT - 1)]).add(entry.key)
        elif old.expire_at_ms:
            database.ends -= 1
            database.ends_ms -= old.expire_at_ms
        return old

    cdef int leave(self, Entry entry) except -1:
        self.end_at(entry, 0, True)
        return self.discard(entry.key, entry.database.number)

    cdef int end_at(self, Entry entry, long long at_ms, bint leaves) except -1:
        if at_ms or entry.expire_at_ms:
            database = entry.database
            database.ends += bool(at_ms) - bool(entry.expire_at_ms)
            database.ends_ms += at_ms - entry.expire_at_ms
        if not leaves:
            entry.expire_at_ms = at_ms
        return 0

    cdef int discard(self, bytes key, Py_ssize_t space) except -1:
        PyDict_DelItem(self.space(space), key)
        buckets = self._buckets[space]
        assert buckets is not None, "a visible key is in a bucket"
        (<set> (<list> buckets)[hash(key) & (BUCKET_COUNT - 1)]).discard(key)
        return 0

    def get(self, key, Py_ssize_t space):
        return self.find(key, space)

    def put(self, Entry entry):
        return self.enter(entry)

    def remove(self, Entry entry):
        self.leave(entry)

    def set_end(self, Entry entry, long long at_ms):
        self.end_at(entry, at_ms, False)

    def rename(self, Entry entry, bytes key, Py_ssize_t space):
        old_key, old_space = entry.key, entry.database.number
        self.end_at(entry, 0, True)
        entry.key, entry.database = key, self.databases[space]
        replaced = self.enter(entry)
        self.discard(old_key, old_space)
        return replaced


# ---- the store -------------------------------------------------------------------------------------------------------


cdef class StoreCore:
    """What a command does to the store. StoreState (state.py) says what the fields mean, sets them, and brings what is
    called by name here: catch_up, place, evict_inline, _fits_inline, remember_expiry, _unload."""

    def __cinit__(self, *args, **kwargs):
        self.lock = self.guard = Lock()
        self.holders = ()

    cdef double now(self) except? -1:
        """`now_s`, which is mostly the system's."""
        cdef timespec now
        if self.now_s is monotonic:
            clock_gettime(CLOCK_MONOTONIC, &now)
            return now.tv_sec + now.tv_nsec / 1e9
        return self.now_s()

    cdef int touch(self, Entry entry) except -1:
        """Tell the order of eviction of a use; KeyError when the entry is not in it."""
        policy = self.policy if entry.value is None else self.inline_policy
        if isinstance(policy, OneOrder):
            (<OneOrder> policy).use(entry, (<OneOrder> policy).moves_when_used)
        else:
            policy.touch(entry)
        return 0

    cdef int renew(self, Entry entry) except -1:
        """Tell the order of eviction that a small value is written over where it is."""
        policy = self.inline_policy
        if isinstance(policy, OneOrder):
            (<OneOrder> policy).use(entry, (<OneOrder> policy).moves_when_renewed)
        else:
            policy.touch(entry)
        return 0

    cdef int admit(self, object policy, Entry entry) except -1:
        """Let the order of eviction have an entry."""
        if isinstance(policy, OneOrder) and (<OneOrder> policy).is_plain:
            (<OneOrder> policy).enter(entry)
        else:
            policy.admit(entry)
        return 0

    cdef int forget(self, object policy, Entry entry) except -1:
        """Take an entry from the order of eviction."""
        if isinstance(policy, OneOrder) and (<OneOrder> policy).is_plain:
            (<OneOrder> policy).leave(entry)
        else:
            policy.forget(entry)
        return 0

    # ---- with the lock held ------------------------------------------------------------------------------------------

    cdef Entry coldest(self, object policy, Entry newest):
        """The entry that leaves next, where that is simply the first in the order; None: StoreState has to look closer
        (`victims`, `place`, `evict_inline`)."""
        cdef Entry entry = None
        if self.may_refuse or self.tiering is not None or self.gpu is not None or self._flushed or self._flushed_keys:
            return None
        if self.affirmed_turn >= self.turn - GRACE or not isinstance(policy, OneOrder):
            return None
        if not (<OneOrder> policy).is_plain or not (<OneOrder> policy).coldest_first:
            return None
        if self._put_off_entries:
            self.catch_up()
        if (<OneOrder> policy).oldest == NULL:
            return None
        entry = <Entry> (<OneOrder> policy).oldest
        if entry is newest or entry.leases or has_other_half(entry.key):
            return None
        return entry if self.index.find(entry.key, entry.database.number) is entry else None

    cdef int evicted(self, Entry entry) except -1:
        self.removed(entry, "evicted")
        self.stats.evicted += 1
        self.stats.evicted_bytes += entry.length
        return 0

    cdef object place_of_coldest(self, Py_ssize_t length):
        """The extent of the block that leaves next, if it is as long as what is wanted, and free now; or None."""
        cdef Entry entry = self.coldest(self.policy, None)
        if entry is None or length_of(entry.extent) != length:
            return None
        extent = entry.extent
        self.evicted(entry)
        self.allocator.allocate_at(extent)
        return extent

    cdef Entry visible(self, object key, Py_ssize_t space):
        cdef Entry entry = self.index.find(key, space)
        if entry is not None and entry.expire_at_ms and entry.expire_at_ms <= self.now_ms():
            if not self.keep_expired:
                self.removed(entry, "expired")
                self.stats.expired += 1
            return None
        return entry

    cdef Entry used(self, object key, Py_ssize_t space):
        """The entry under `key`, used now, or None: a miss, or a block on disk alone, which is neither hit nor miss.

        This is what a hit does: the order of eviction learns of the lookups that were put off, then of this use; the
        store and the entry count it; the entry notes the time.
        """
        cdef Entry entry = self.index.find(key, space)
        if entry is None or (entry.expire_at_ms and self.visible(key, space) is None):
            self.stats.misses += 1
            return None
        if entry.value is None and entry.extent is nowhere:
            return None
        if self._put_off_entries:
            self.catch_up()
        self.stats.hits += 1
        entry.hits += 1
        entry.accessed_s = self.now()
        self.touch(entry)
        return entry

    cdef Lease lent(self, Entry entry):
        """A hold on `entry`."""
        cdef Lease lease = Lease.__new__(Lease)
        cdef Py_ssize_t start
        lease.entry = entry
        if entry.value is not None:
            lease.view = memoryview(entry.value)
        else:
            start = offset_of(entry.extent) + PAYLOAD_OFFSET
            lease.view = self._memory[start : start + entry.length]
        lease._store = self
        entry.leases += 1
        self.leases += 1
        return lease

    cdef int ended(self, Entry entry) except -1:
        entry.leases -= 1
        self.leases -= 1
        if not entry.leases:
            self.unheld(entry)
        return 0

    cdef int unheld(self, Entry entry) except -1:
        if self.index.find(entry.key, entry.database.number) is not entry:
            if entry.database.flushed and entry in (self.policy if entry.value is None else self.inline_policy):
                return 0  # it is still to be given back
            if entry.extent is not nowhere:
                self.retired_bytes -= length_of(entry.extent)
                self.allocator.give(entry.extent)
        elif not self.keep and entry.record is not None and (entry.value is not None or entry.extent is not nowhere):
            self._unload(entry)
        return 0

    cdef int published(self, Entry entry, long long expire_at_ms) except -1:
        """Make an entry visible whose bytes are already counted; what it replaces is retired."""
        cdef Entry old
        if self._put_off_entries:
            self.catch_up()
        if self._departed.turns and self._departed.left_behind(entry.key, entry.database.number, self.turn):
            expire_at_ms = LONG_AGO
        entry.expire_at_ms = expire_at_ms
        entry.created_s = entry.accessed_s = self.now()
        old = self.index.enter(entry)
        if old is None:
            self.stats.created += 1
        else:
            self.retired(old, entry)
            self.stats.overwritten += 1
        if entry.value is not None:
            self.admit(self.inline_policy, entry)
        elif entry.extent is not nowhere:
            self.admit(self.policy, entry)
        else:
            self.away += 1  # it is on the GPU
        if expire_at_ms:
            self.remember_expiry(entry)
        if self.tiering is not None:
            self.writes += 1
            self.unsaved[entry] = self.writes
        if self.journal is not None:
            self.journal.append(("set", entry.key, entry.database.number))
        return 0

    cdef int renumber(self, Entry entry) except -1:
        """Number an entry that was changed anew: a client that changed it waits for it to be on disk, if at all."""
        if self.tiering is not None and self.unsaved.pop(entry, None) is not None:
            self.writes += 1
            self.unsaved[entry] = self.writes
        return 0

    cdef int removed(self, Entry entry, str why) except -1:
        self.index.leave(entry)
        self.retired(entry, None)
        if self.journal is not None:
            self.journal.append((why, entry.key, entry.database.number))
        return 0

    cdef int retired(self, Entry entry, Entry successor) except -1:
        """Let go of an entry that has just left the index, on disk too, there when its successor has been written."""
        if self.tiering is not None:
            self.unsaved.pop(entry, None)
            if entry.database.flushed:
                pass  # the disk was cleared, and what is there by now under its name is another's
            elif successor is None:
                self.tiering.forget(entry)
            else:
                self.tiering.supersede(entry, successor)
        if self.gpu is not None:
            self.gpu.forget(entry)
        if entry.extent is nowhere and entry.value is None:
            self.away -= 1
            return 0
        if entry.value is not None:
            self.forget(self.inline_policy, entry)
            self.inline_bytes -= entry.cost()
            return 0
        self.forget(self.policy, entry)
        self.live_bytes -= length_of(entry.extent)
        if entry.leases:
            self.retired_bytes += length_of(entry.extent)
        else:
            self.allocator.give(entry.extent)
        return 0

    def _visible(self, key, Py_ssize_t space):
        return self.visible(key, space)

    def _hit(self, key, Py_ssize_t space):
        return self.used(key, space)

    def _lease(self, Entry entry):
        return self.lent(entry)

    def unhold(self, Entry entry):
        self.ended(entry)

    def _publish(self, Entry entry, long long expire_at_ms):
        self.published(entry, expire_at_ms)

    def _renumber(self, Entry entry):
        self.renumber(entry)

    def _remove(self, Entry entry, str why):
        self.removed(entry, why)

    def _retire(self, Entry entry, Entry successor=None):
        self.retired(entry, successor)

    # ---- verbs, which take it ----------------------------------------------------------------------------------------

    cdef int ended_alone(self, Entry entry) except -1:
        self.guard.take()
        try:
            return self.ended(entry)
        finally:
            self.guard.give()

    cdef object fetched(self, object key, Py_ssize_t space):
        """`fetch`: bytes, a Lease or None."""
        cdef Entry entry = self.index.find(key, space)
        if entry is not None and entry.value is not None and not (entry.expire_at_ms or self._put_off_entries):
            # `used` for the commonest case. It needs no lock, because nothing that must add up is changed.
            value = entry.value
            try:
                self.touch(entry)
            except KeyError:
                pass  # another thread has just taken the entry away: it was a hit before that
            self.stats.hits += 1
            entry.hits += 1
            entry.accessed_s = self.now()
            return value
        self.guard.take()
        try:
            entry = self.used(key, space)
            if entry is None:
                return None
            return self.lent(entry) if entry.value is None else entry.value
        finally:
            self.guard.give()

    cdef object room_for(self, Py_ssize_t length, bint drop, Py_ssize_t spare):
        """An extent for a block of `length` bytes, or with `spare` more; None, and nothing has changed, when there is
        none."""
        extent = None
        if self.holders:
            self.end_holds()
        self.guard.take()
        try:
            if spare:
                extent = self.place(extent_bytes(length + spare), drop=drop)
            if extent is None and not self.bound_bytes:
                extent = self.allocator.take(extent_bytes(length))
                if extent is None:
                    extent = self.place_of_coldest(extent_bytes(length))
            if extent is None:
                extent = self.place(extent_bytes(length), drop=drop)
            if extent is not None:
                self.reserved_bytes += length_of(extent)
            elif drop:
                self.stats.refused += 1
        finally:
            self.guard.give()
        if self.tiering is not None:
            try:
                self.tiering.make_room(extent_bytes(length), urgent=extent is None)
            except BaseException:
                if extent is not None:
                    self.room_back(extent)
                raise
        return extent

    cdef Reservation reserved(self, bytes key, Py_ssize_t length, Py_ssize_t space, bint drop, Py_ssize_t spare):
        cdef Reservation reservation
        if length < INLINE_MAX:
            return Reservation(self, key, space, memoryview(bytearray(length + SLACK)), nowhere)
        extent = self.room_for(length, drop, spare)
        if extent is None:
            return None
        reservation = Reservation.__new__(Reservation)
        reservation.key, reservation.space, reservation.length, reservation.extent = key, space, length, extent
        if length >= TIMED_MIN:
            reservation.made_s = self.now()
        reservation._store = self
        return reservation

    cdef bint committed(self, Reservation reservation, long long expire_at_ms) except -1:
        if reservation.extent is nowhere:
            # Inline values are bytes objects, which readers can share without a hold: a copy of under 16 KiB.
            return self.stored(reservation.key, bytes(reservation.view), reservation.space, expire_at_ms, 0)
        self.seen(
            new_entry(reservation.key, reservation.length, reservation.extent, None),
            self.written(reservation.extent, reservation.length, NULL),
            reservation.space, expire_at_ms, reservation.made_s,
        )
        return True

    cdef long long written(self, object extent, Py_ssize_t length, const char *value) except -1:
        """How many tokens the value in an extent says that it holds. NULL, or a value that is copied there before."""
        cdef Py_buffer memory
        cdef char *there
        PyObject_GetBuffer(self._memory, &memory, PyBUF_SIMPLE)  # ValueError when the store is closed
        try:
            there = <char *> memory.buf + offset_of(extent) + PAYLOAD_OFFSET
            if value != NULL:
                memcpy(there, value, length)
            if length >= LOOKED_AT and there[8] == c"{":
                return tokens_of(PyMemoryView_FromMemory(there, length, PyBUF_READ))
        finally:
            PyBuffer_Release(&memory)
        return 0

    cdef int seen(
        self, Entry entry, long long tokens, Py_ssize_t space, long long expire_at_ms, double made_s
    ) except -1:
        """Make a block visible whose bytes are where `room_for` has given room, since `made_s` if that is to be
        counted."""
        entry.tokens = tokens
        self.guard.take()
        try:
            entry.database = self.index.databases[space]
            self.reserved_bytes -= length_of(entry.extent)
            self.live_bytes += length_of(entry.extent)
            self.published(entry, expire_at_ms)
            if made_s:
                self.stats.receiving.add(entry.created_s - made_s)
        finally:
            self.guard.give()
        if not self.keep and self.tiering is not None:
            self.tiering.spill([entry])
        return 0

    cdef bint placed(
        self, bytes key, const char *value, Py_ssize_t length, Py_ssize_t space, long long expire_at_ms
    ) except -1:
        """`put` of a value that belongs into the arena, by one copy."""
        cdef Entry entry
        cdef long long tokens
        extent = self.room_for(length, True, 0)
        if extent is None:
            return False
        try:
            tokens = self.written(extent, length, value)
            entry = new_entry(key, length, extent, None)
        except BaseException:
            self.room_back(extent)
            raise
        self.seen(entry, tokens, space, expire_at_ms, 0.0)
        return True

    cdef int room_back(self, object extent) except -1:
        """Give back what `room_for` gave."""
        self.guard.take()
        try:
            self.reserved_bytes -= length_of(extent)
            self.allocator.give(extent)
        finally:
            self.guard.give()
        return 0

    cdef int aborted(self, Reservation reservation) except -1:
        self.stats.aborted += 1
        if reservation.extent is not nowhere:
            self.room_back(reservation.extent)
        return 0

    cdef bint stored(
        self, bytes key, bytes value, Py_ssize_t space, long long expire_at_ms, double now_s
    ) except -1:
        """`put`, at a time that was read already, if it is not 0."""
        cdef Entry entry, leaving
        if len(value) >= INLINE_MAX:
            return self.placed(key, PyBytes_AS_STRING(value), len(value), space, expire_at_ms)
        self.guard.take()
        try:
            entry = self.index.find(key, space)
            if self.may_refuse and not self._fits_inline(entry, len(key) + len(value)):
                self.stats.refused += 1
                return False
            if (
                entry is not None
                and entry.value is not None
                and entry.record is None
                and not (expire_at_ms or entry.expire_at_ms or entry.leases)
            ):
                # The commonest small write, onto an entry without a hold: it may change.
                self.inline_bytes += len(value) - entry.length
                entry.length = len(value)
                entry.value, entry.hits, entry.encoding = value, 0, None
                entry.created_s = entry.accessed_s = now_s or self.now()
                self.renew(entry)
                self.stats.overwritten += 1
                self.renumber(entry)
                if self.journal is not None:
                    self.journal.append(("set", key, space))
            else:
                entry = new_entry(key, len(value), nowhere, value)
                entry.database = self.index.databases[space]
                self.inline_bytes += entry.cost()
                self.published(entry, expire_at_ms)
            while self.inline_bytes > self.inline_bytes_high:
                leaving = self.coldest(self.inline_policy, entry)
                if leaving is None:
                    self.evict_inline(entry)
                    break
                self.evicted(leaving)
        finally:
            self.guard.give()
        if self.tiering is not None:
            self.tiering.make_inline_room(entry)
        return True

    cdef Py_ssize_t deleted(self, object keys, Py_ssize_t space) except -1:
        """`delete`."""
        cdef Py_ssize_t count = 0
        cdef Entry entry
        self.guard.take()
        try:
            for key in keys:
                entry = self.visible(key, space)
                if entry is not None:
                    self.removed(entry, "del")
                    count += 1
            self.stats.deleted += count
        finally:
            self.guard.give()
        return count

    cdef Py_ssize_t matched(self, list keys, Py_ssize_t space) except -1:
        """`match`."""
        cdef list run = []
        self.guard.take()
        try:
            if len(self._expiries):
                with self.now_ms.one_moment():  # a key named twice is there twice
                    self.run_of(keys, space, run)
            else:
                self.run_of(keys, space, run)
            self._put_off(self._looked_up, run)
        finally:
            self.guard.give()
        return len(run)

    cdef int run_of(self, list keys, Py_ssize_t space, list run) except -1:
        """Add the entries of the first keys that are present."""
        cdef Entry entry
        for key in keys:
            entry = self.index.find(key, space)
            if entry is not None and entry.expire_at_ms:
                entry = self.visible(key, space)
            if entry is None:
                break
            run.append(entry)
        return 0

    cdef Py_ssize_t affirmed(self, list keys, Py_ssize_t space) except -1:
        """`affirm`."""
        cdef list found = []
        cdef Entry entry
        self.guard.take()
        try:
            for key in keys:
                entry = self.index.find(key, space)
                if entry is not None:
                    found.append(entry)
            if len(self._expiries):
                with self.now_ms.one_moment():
                    found = [each for each in found if self.visible((<Entry> each).key, space) is not None]
            self._put_off(self._affirmed, found)
            self.affirmed_turn = self.turn
        finally:
            self.guard.give()
        return len(found)

    cdef int touched(self, list keys, Py_ssize_t space) except -1:
        """`touch`, for keys of which none has an end."""
        cdef list in_arena = [], inline = []
        cdef Entry entry
        self.guard.take()
        try:
            if self._put_off_entries or self.tiering is not None or self.gpu is not None:
                self.catch_up()
                self._touch_run([entry for key in keys if (entry := self.visible(key, space)) is not None])
                return 0
            now_s = self.now()
            for key in keys:
                entry = self.visible(key, space)
                if entry is not None:
                    entry.accessed_s = now_s
                    (in_arena if entry.value is None else inline).append(entry)
            if in_arena:
                self.policy.touch_run(in_arena)
            if inline:
                self.inline_policy.touch_run(inline)
        finally:
            self.guard.give()
        return 0

    def reserve(self, bytes key, Py_ssize_t length, Py_ssize_t space=0, *, bint drop=True, Py_ssize_t spare=0):
        return self.reserved(key, length, space, drop, spare)

    def commit(self, Reservation reservation, long long expire_at_ms=0):
        return self.committed(reservation, expire_at_ms)

    def abort(self, Reservation reservation):
        self.aborted(reservation)

    def put(self, bytes key, bytes value, Py_ssize_t space=0, long long expire_at_ms=0):
        return self.stored(key, value, space, expire_at_ms, 0)

    def fetch(self, key, Py_ssize_t space=0):
        return self.fetched(key, space)

    def release(self, Entry entry):
        self.ended_alone(entry)

    def delete(self, keys, Py_ssize_t space=0):
        return self.deleted(keys, space)

    def match(self, keys, Py_ssize_t space=0):
        return self.matched(list(keys), space)

    def affirm(self, keys, Py_ssize_t space=0):
        return self.affirmed(list(keys), space)

    def lease(self, key, Py_ssize_t space=0, double limit_s=0.0):
        cdef Entry entry
        cdef Lease lease
        self.guard.take()
        try:
            entry = self.used(key, space)
            if entry is None:
                return None
            lease = self.lent(entry)
            if limit_s:
                self._limits.add(self.now() + limit_s, lease, self.leases)
            return lease
        finally:
            self.guard.give()

    def lease_run(self, keys, Py_ssize_t space, double limit_s):
        cdef list found = [], held = []
        cdef Entry entry
        cdef double now_s
        cdef Py_ssize_t count = 0, simple = 0
        cdef long long nbytes = 0, tokens = 0
        self.guard.take()
        try:
            if self._put_off_entries:
                self.catch_up()
            now_s = self.now()
            touch = self.policy.touch
            for key in keys:
                entry = self.index.find(key, space)
                if entry is None or entry.value is not None or entry.extent is nowhere or entry.expire_at_ms:
                    entry = self.used(key, space)
                    if entry is None or entry.value is not None:
                        found.append(None if entry is None else entry.value)
                        held.append(None)
                        continue
                else:  # `used` for a block of the arena without an end
                    touch(entry)
                    entry.hits += 1
                    entry.accessed_s = now_s
                    simple += 1
                entry.leases += 1
                self.leases += 1
                nbytes += entry.length
                tokens += entry.tokens
                count += 1
                found.append(entry)
                held.append(entry)
            self.stats.hits += simple
            self.stats.leased_bytes += nbytes
            self.stats.hit_tokens += tokens
            run = LeaseRun(held, now_s + limit_s)
            if count:
                self._limits.add(run.until_s, run, self.leases)
            return found, run
        finally:
            self.guard.give()

    def end_leases(self, places):
        cdef Py_ssize_t ended = 0, at
        cdef LeaseRun run
        cdef Entry entry
        self.guard.take()
        try:
            for run, at, _ in places:
                entry = run.entries[at]
                if entry is not None:
                    run.entries[at] = None
                    ended += 1
                    self.ended(entry)
            return ended
        finally:
            self.guard.give()
