"""What storage/_core.pyx lends to the server's hot path, which is compiled too: fields and steps without a frame."""

from cpython.long cimport PyLong_AsSsize_t
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_ITEM, PyTuple_GET_SIZE

cdef extern from "semaphore.h" nogil:
    ctypedef struct sem_t:
        pass


cdef enum:
    PAYLOAD_OFFSET = 512


cdef inline Py_ssize_t offset_of(object extent) except -1:
    assert PyTuple_Check(extent) and PyTuple_GET_SIZE(extent) == 2
    return PyLong_AsSsize_t(<object> PyTuple_GET_ITEM(extent, 0))


cdef inline Py_ssize_t length_of(object extent) except -1:
    assert PyTuple_Check(extent) and PyTuple_GET_SIZE(extent) == 2
    return PyLong_AsSsize_t(<object> PyTuple_GET_ITEM(extent, 1))


cdef class Times:
    cdef public long long nanoseconds
    cdef public list counts


cdef class StoreCounts:
    cdef public long long hits, hit_tokens, misses, created, overwritten, refused, aborted
    cdef public long long evicted, evicted_bytes, evicted_away, expired, deleted, flushed, leased_bytes, leases_revoked
    cdef public Times receiving


cdef class Lock:
    cdef bint taken
    cdef Py_ssize_t waiting  # threads before `turns` that no turn has been given
    cdef sem_t turns
    cdef int take(self) except -1
    cdef int give(self) except -1


cdef class Holes:
    cdef public Py_ssize_t capacity_bytes, free_bytes
    cdef Py_ssize_t hole_bytes
    cdef int start_bits, length_bits
    cdef unsigned long long *by_start
    cdef unsigned long long *by_length
    cdef Py_ssize_t count, room
    cdef unsigned long long placed(self, unsigned long long start, unsigned long long length) noexcept
    cdef unsigned long long sized(self, unsigned long long length, unsigned long long start) noexcept
    cdef unsigned long long start_of(self, Py_ssize_t at) noexcept
    cdef unsigned long long length_of(self, Py_ssize_t at) noexcept
    cdef unsigned long long turned(self, Py_ssize_t at) noexcept
    cdef void enter(self, unsigned long long *holes, Py_ssize_t at, unsigned long long hole) noexcept
    cdef void drop(self, unsigned long long *holes, Py_ssize_t at) noexcept
    cdef int replace_length(self, unsigned long long was, unsigned long long becomes) except -1
    cdef int insert(self, unsigned long long start, unsigned long long length, Py_ssize_t at) except -1
    cdef int lose(self, Py_ssize_t at) except -1
    cdef int change(self, Py_ssize_t at, unsigned long long start, unsigned long long length) except -1
    cdef object take(self, Py_ssize_t length)
    cdef int cut(self, Py_ssize_t at, unsigned long long start, unsigned long long length) except -1
    cdef int give(self, object extent) except -1


cdef struct Place:
    PyObject *order  # which has it; NULL where none does
    PyObject *older
    PyObject *newer  # entries beside it there


cdef class Entry:
    # What a use of a small value looks at comes first: where there are many entries each line of the cache is a miss.
    cdef Place places[2]  # in the order of the tier in memory, and in that of the tier on a GPU
    cdef public object value
    cdef public long long expire_at_ms, hits
    cdef public double accessed_s, created_s
    cdef public Py_ssize_t length, leases
    cdef public object record, encoding
    cdef public bytes key
    cdef public object database, extent
    cdef public long long tokens, affirmed_turn
    cdef Py_ssize_t cost(self) except -1


cdef class Reservation:
    cdef public object _store
    cdef public object extent
    cdef public bytes key
    cdef public Py_ssize_t length, space
    cdef public double made_s
    cdef object _view
    cdef bint publish(self, long long expire_at_ms) except -1
    cdef int drop(self) except -1


cdef class Lease:
    cdef object _store
    cdef public Entry entry
    cdef public object view
    cdef int end(self) except -1


cdef class LeaseRun:
    cdef public list entries
    cdef public double until_s


cdef class OneOrder:
    cdef PyObject *oldest
    cdef PyObject *newest
    cdef Py_ssize_t count
    cdef unsigned long long changes
    cdef public bint moves_when_used, moves_when_renewed, coldest_first
    cdef bint is_plain
    cdef Place *place(self, PyObject *entry) noexcept
    cdef void link(self, Place *place, PyObject *entry) noexcept
    cdef void unlink(self, Place *place) noexcept
    cdef int enter(self, Entry entry) except -1
    cdef int leave(self, Entry entry) except -1
    cdef int use(self, Entry entry, bint moves) except -1


cdef class Index:
    cdef public list spaces, databases
    cdef public list _buckets
    cdef Entry find(self, object key, Py_ssize_t space)
    cdef dict space(self, Py_ssize_t number)
    cdef Entry enter(self, Entry entry)
    cdef int leave(self, Entry entry) except -1
    cdef int end_at(self, Entry entry, long long at_ms, bint leaves) except -1
    cdef int discard(self, bytes key, Py_ssize_t space) except -1


cdef class StoreCore:
    cdef public object lock, arena, policy, inline_policy, tiering, gpu, now_ms, now_s, end_holds, holders
    cdef public StoreCounts stats
    cdef public Index index
    cdef public Holes allocator
    cdef public object _memory
    cdef public long long inline_bytes_high, bound_bytes, beside_bytes
    cdef public long long live_bytes, retired_bytes, reserved_bytes, inline_bytes
    cdef public long long leases, away, writes, turn, affirmed_turn
    cdef public bint keep, may_refuse, keep_expired
    cdef public object unsaved
    cdef public list journal, _looked_up, _affirmed, _flushed, _flushed_keys
    cdef public Py_ssize_t _put_off_entries
    cdef public object _limits, _departed
    cdef Lock guard
    cdef double now(self) except? -1
    cdef int touch(self, Entry entry) except -1
    cdef int renew(self, Entry entry) except -1
    cdef int admit(self, object policy, Entry entry) except -1
    cdef int forget(self, object policy, Entry entry) except -1
    cdef Entry coldest(self, object policy, Entry newest)
    cdef int evicted(self, Entry entry) except -1
    cdef object place_of_coldest(self, Py_ssize_t length)
    cdef Entry visible(self, object key, Py_ssize_t space)
    cdef Entry used(self, object key, Py_ssize_t space)
    cdef Lease lent(self, Entry entry)
    cdef int ended(self, Entry entry) except -1
    cdef int ended_alone(self, Entry entry) except -1
    cdef int unheld(self, Entry entry) except -1
    cdef int published(self, Entry entry, long long expire_at_ms) except -1
    cdef int renumber(self, Entry entry) except -1
    cdef int removed(self, Entry entry, str why) except -1
    cdef int retired(self, Entry entry, Entry successor) except -1
    cdef object fetched(self, object key, Py_ssize_t space)
    cdef object room_for(self, Py_ssize_t length, bint drop, Py_ssize_t spare)
    cdef Reservation reserved(self, bytes key, Py_ssize_t length, Py_ssize_t space, bint drop, Py_ssize_t spare)
    cdef bint committed(self, Reservation reservation, long long expire_at_ms) except -1
    cdef long long written(self, object extent, Py_ssize_t length, const char *value) except -1
    cdef int seen(
        self, Entry entry, long long tokens, Py_ssize_t space, long long expire_at_ms, double made_s
    ) except -1
    cdef bint placed(
        self, bytes key, const char *value, Py_ssize_t length, Py_ssize_t space, long long expire_at_ms
    ) except -1
    cdef int room_back(self, object extent) except -1
    cdef int aborted(self, Reservation reservation) except -1
    cdef bint stored(
        self, bytes key, bytes value, Py_ssize_t space, long long expire_at_ms, double now_s
    ) except -1
    cdef Py_ssize_t deleted(self, object keys, Py_ssize_t space) except -1
    cdef Py_ssize_t matched(self, list keys, Py_ssize_t space) except -1
    cdef int run_of(self, list keys, Py_ssize_t space, list run) except -1
    cdef Py_ssize_t affirmed(self, list keys, Py_ssize_t space) except -1
    cdef int touched(self, list keys, Py_ssize_t space) except -1
