# cython: language_level=3, binding=False, nonecheck=True, wraparound=False, cdivision=True
"""From bytes to replies for plain commands: GET, SET, MGET, MSET, EXISTS, DEL, KV.MATCH and PING as clients write them,
from a client with nothing special about it.

HotSession receives what has arrived, reads the commands where they lie in the scratch, does to the store what each
says (storage/_core.pyx), and gathers the replies in one buffer; no Python runs for any of it. The first command that is
anything else is left where it is, with all behind it, for Session._run (client/session.py), which knows every rule;
the same for a client that is paused, waits, or has been given a reason by `reconsider`.

A command has the same effects on either way: both call the same steps of the store. What may be said of commands here
and not there is how they are read, and it is little: arguments are bulks whose lengths are written as clients write
them, and a value from PAYLOAD_MIN on is received into its extent, as parser.py does it for other commands.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memmove, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from kvredis.storage._core cimport (
    PAYLOAD_OFFSET,
    Entry,
    Lease,
    Reservation,
    StoreCore,
    Times,
    length_of,
    offset_of,
)

from kvredis.server.protocol import request
from kvredis.server.protocol.replies import OUT_OF_MEMORY
from kvredis.server.protocol.request import REFUSED
from kvredis.storage._core import GRAIN_BYTES, INLINE_BYTES_MAX, SLACK_BYTES

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    Py_ssize_t recv(int, void *, size_t, int)
    Py_ssize_t sendmsg(int, const msghdr *, int)

cdef extern from "Python.h":
    Py_buffer *PyMemoryView_GET_BUFFER(object)
    Py_ssize_t PyObject_LengthHint(object, Py_ssize_t) except -1

cdef enum:
    ARGS_MAX = 1024
    NAME_MAX = 8
    ARGS_QUICK = 16  # what takes no time worth a look at the clock
    PLAIN_MAX = 16 * 1024  # arguments of a command that is split here for others, and bytes of each
    PAYLOAD_MIN = 16 * 1024
    EVIDENCE_FROM = 1024 * 1024  # request.py's bounds of what is to be seen of a long value before it has room
    EVIDENCE_SHIFT = 13
    EVIDENCE_MAX = 8 * 1024
    ARGUMENT_COST = 64
    OUT_BYTES = 64 * 1024
    REPLY_HIGH = 1024 * 1024
    PARTS_MAX = 64  # of what is sent at once
    LENT_MAX = 512 * 1024  # of longer ones a thread may send some (net/io_threads.py)
    SHARE_OF_ARENA = 4
    SLACK = 2
    GRAIN = 4096
    SCRATCH_BYTES = 20 * 1024  # request.py says why
    WIDE_VALUE_MAX = 32 * 1024  # longer values are received faster than they are copied out of the wide scratch
    HEAD_BYTES = 512
    PAGE_BYTES = 4096
    CLEAR_BYTES = 1024
    TURN_RECEIVES = 32  # what libuv receives of one client at most before it looks at the others
    TURN_WIDE = 12  # and how many of these may fill the wide scratch
    TURN_BODIES = 3  # receives of values here, between two of the loop; more were no faster
    BODY_MAX = 2 * 1024 * 1024  # of what is missing: others wait for less than that of a longer value

# Bounds that others have too: those that import this file have them from here, and of those that it imports it has its
# own, as numbers that the compiler knows.
PLAIN_ARGS_MAX, REPLY_BYTES_HIGH, REPLY_BYTES_MIN, SHARE = ARGS_QUICK, REPLY_HIGH, LENT_MAX, SHARE_OF_ARENA
assert (PAYLOAD_MIN, SLACK, GRAIN) == (INLINE_BYTES_MAX, SLACK_BYTES, GRAIN_BYTES)
assert (PAYLOAD_MIN, SCRATCH_BYTES, HEAD_BYTES) == (
    request.PAYLOAD_BYTES_MIN, request.SCRATCH_BYTES, request.HEAD_BYTES
)
assert (EVIDENCE_FROM, EVIDENCE_SHIFT, EVIDENCE_MAX) == (
    request.EVIDENCE_FROM_BYTES, request.EVIDENCE_SHIFT, request.EVIDENCE_BYTES_MAX
)
assert ARGUMENT_COST == request.ARGUMENT_BYTES

cdef enum Kind:
    OTHER, GET, SET, MGET, MSET, EXISTS, DEL, MATCH, PING

cdef enum Found:
    DONE  # the command has run
    MORE  # it has not come as a whole
    STRANGE  # it is not for this reader
    HALT  # it has run, or runs, and nothing more is to be run now

cdef tuple NAMES = ("", "get", "set", "mget", "mset", "exists", "del", "kv.match", "ping")

NO_COMMANDS = iter(())
cdef object no_commands = NO_COMMANDS
NO_SCRATCH = bytearray()
NO_VIEW = memoryview(NO_SCRATCH)


cdef inline long long clock_ns() noexcept:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * 1000000000LL + now.tv_nsec


cdef class CallTimes(Times):
    """The calls of one command: metrics/stats.py says what each count is."""

    cdef public long long calls, rejected_calls, failed_calls

    def observe(self, long long calls, long long nanoseconds):
        """Enter a run of `calls` >= 1 calls that took so long together."""
        self.enter(calls, nanoseconds)

    cdef int enter(self, long long calls, long long nanoseconds) except -1:
        cdef int power = 0
        cdef long long each = nanoseconds // calls
        while each > 0:
            each >>= 1
            power += 1
        self.calls += calls
        self.nanoseconds += nanoseconds
        self.counts[power] = self.counts[power] + calls
        return 0


cdef struct Words:
    Py_ssize_t count
    const char *at[ARGS_MAX]
    Py_ssize_t length[ARGS_MAX]
    Py_ssize_t complete  # how many are there
    Py_ssize_t payload  # the length of the next argument, if it is to be received into the arena, else 0
    const char *past


cdef Words words  # of the command that is being run: there is one at a time


cdef inline Found number_line(const char **at, const char *end, char kind, Py_ssize_t *number) noexcept:
    """Read the line `kind` (* or $) and a number, as clients write it; *at is behind it then."""
    cdef const char *here = at[0]
    cdef const char *digits = here + 1
    cdef Py_ssize_t value = 0
    if here == end:
        return MORE
    if here[0] != kind:
        return STRANGE
    here += 1
    while here < end and 48 <= here[0] <= 57 and here - digits < 7:
        value = 10 * value + here[0] - 48
        here += 1
    if here == end:
        return MORE
    if here == digits or here[0] != 13 or (digits[0] == 48 and here - digits > 1):
        return STRANGE
    if here + 1 == end:
        return MORE
    if here[1] != 10:
        return STRANGE
    number[0] = value
    at[0] = here + 2
    return DONE


cdef Found read_bulks(const char **at, const char *end, list commands) except *:
    """Read one command into a list that is added to `commands`. Nothing is made before all of it is there."""
    cdef const char *here = at[0]
    cdef const char *first
    cdef Py_ssize_t count, number, length
    cdef Found found = number_line(&here, end, 42, &count)
    cdef list command
    if found != DONE:
        return found
    if count < 1 or count > PLAIN_MAX:
        return STRANGE
    first = here
    for number in range(count):
        found = number_line(&here, end, 36, &length)
        if found != DONE:
            return found
        if length > PLAIN_MAX:
            return STRANGE
        if end - here < length + 2:
            return STRANGE if end - here > length and here[length] != 13 else MORE
        if here[length] != 13 or here[length + 1] != 10:
            return STRANGE
        here += length + 2
    command = []
    here = first
    for number in range(count):
        number_line(&here, end, 36, &length)
        command.append(PyBytes_FromStringAndSize(here, length))
        here += length + 2
    commands.append(command)
    at[0] = here
    return DONE


cdef Kind kind_of(const char *name, Py_ssize_t length) noexcept:
    """Which command a name is, in either of the spellings that clients use."""
    if length == 3:
        if memcmp(name, "GET", 3) == 0 or memcmp(name, "get", 3) == 0:
            return GET
        if memcmp(name, "SET", 3) == 0 or memcmp(name, "set", 3) == 0:
            return SET
        if memcmp(name, "DEL", 3) == 0 or memcmp(name, "del", 3) == 0:
            return DEL
    elif length == 4:
        if memcmp(name, "MGET", 4) == 0 or memcmp(name, "mget", 4) == 0:
            return MGET
        if memcmp(name, "MSET", 4) == 0 or memcmp(name, "mset", 4) == 0:
            return MSET
        if memcmp(name, "PING", 4) == 0 or memcmp(name, "ping", 4) == 0:
            return PING
    elif length == 6:
        if memcmp(name, "EXISTS", 6) == 0 or memcmp(name, "exists", 6) == 0:
            return EXISTS
    elif length == 8:
        if memcmp(name, "KV.MATCH", 8) == 0 or memcmp(name, "kv.match", 8) == 0:
            return MATCH
    return OTHER


cdef inline bint takes(Kind kind, Py_ssize_t count) noexcept:
    """Whether a command has so many arguments, itself included, when it is plain."""
    if kind == GET:
        return count == 2
    if kind == SET:
        return count == 3
    if kind == PING:
        return count == 1
    if kind == MSET:
        return count >= 3 and count % 2 == 1
    return kind != OTHER and count >= 2


cdef Found read_words(const char *at, const char *end, Words *words, Kind *kind) noexcept:
    """Read one command."""
    cdef Py_ssize_t number, length
    cdef Found found = number_line(&at, end, 42, &words.count)
    if found != DONE:
        return found
    if words.count < 1 or words.count > ARGS_MAX:
        return STRANGE
    words.complete = words.payload = 0
    words.past = at
    for number in range(words.count):
        found = number_line(&at, end, 36, &length)
        if found != DONE:
            return found
        if number == 0 and length > NAME_MAX:
            return STRANGE
        if length >= PAYLOAD_MIN:
            if number == 0 or number % 2 or not (kind[0] == SET or kind[0] == MSET):
                return STRANGE
            if kind[0] == MSET or end - at < length + 2:  # the value of a SET that is there as a whole is a word
                words.payload = length
                words.past = at
                return DONE
        if end - at < length + 2:
            words.past = at
            if (end - at > length and at[length] != 13) or (number == 0 and end - at == length + 1):
                return STRANGE
            return MORE
        if at[length] != 13 or at[length + 1] != 10:
            return STRANGE
        words.at[number] = at
        words.length[number] = length
        if number == 0:
            kind[0] = kind_of(at, length)
            if not takes(kind[0], words.count):
                return STRANGE
        at += length + 2
        words.complete += 1
        words.past = at
    return DONE


cdef class Reader:
    """What parser.py's Parser has read so far: fields that its methods and HotSession share."""

    cdef public bytearray _scratch
    cdef public object _view
    cdef public Py_ssize_t _start, _end
    """Unread bytes of the scratch: [_start, _end)."""
    cdef public bint _after_payload, _gathered, _plain, authenticated
    cdef bint _wide
    """More of short commands has come than the scratch holds, so the next receive is into the one that all share."""
    cdef bint _brings_values
    """A value for the arena was among what came last. Else it is not wide: commands take longer than their bytes."""
    cdef int _filled_wide, _narrow
    """Receives that have filled that, and how many are to be narrow behind them: others wait while a loop finds more."""
    cdef public Py_ssize_t _gather_tries
    cdef public list _args
    cdef public Py_ssize_t _held_bytes, _arena_bytes, _remaining, _length, _filled
    cdef public object _body, _body_hold, _scratches
    cdef public Py_ssize_t bulk_bytes_max, query_bytes_max

    def _take_scratch(self):
        """Have a scratch, most likely that of the client that has received last."""
        cdef Reader last = self._scratches.holder
        self._scratches.holder = self
        if last is not None and last._start == last._end and PyByteArray_GET_SIZE(last._scratch) == SCRATCH_BYTES:
            if PyByteArray_GET_SIZE(self._scratch):
                self._scratches.keep(last._scratch)
            else:
                self._scratch, self._view = last._scratch, last._view
            last._scratch, last._view = NO_SCRATCH, NO_VIEW
        if not PyByteArray_GET_SIZE(self._scratch):
            self._scratch, self._view = self._scratches.get()

    cdef int _take_wide(self) except -1:
        """Have the wide scratch, in which nothing of any client is left between two turns."""
        cdef Reader last = self._scratches.wide_holder
        cdef Py_ssize_t unread = self._end - self._start, start = self._start
        cdef bytearray scratch
        if last is not None:  # it has received nothing
            last._leave_wide()
        scratch = self._scratch
        if self._scratches.holder is self:
            self._scratches.holder = None
        self._scratches.keep(self._scratch)
        self._scratch, self._view = self._scratches.wide, self._scratches.wide_view
        # The kernel's copy of what a client sends begins with a page, mostly. To a few bytes behind that in a page of ours,
        # which is where a long bytearray begins, `rep movsb` of AMD's Zen 3 copies four times as slowly.
        self._end = unread
        self._end += (CLEAR_BYTES - <size_t> PyByteArray_AS_STRING(self._scratch) - unread) % PAGE_BYTES
        self._start = self._end - unread
        memcpy(
            PyByteArray_AS_STRING(self._scratch) + self._start, PyByteArray_AS_STRING(scratch) + start, unread
        )
        self._scratches.wide_holder = self
        return 0

    cdef int _leave_wide(self) except -1:
        """Take what is unread out of the wide scratch, into one as long as it must be."""
        cdef Py_ssize_t unread = self._end - self._start, room = SCRATCH_BYTES
        self._scratches.wide_holder = None
        if self._scratch is not self._scratches.wide:
            return 0
        while room <= unread:
            room *= 4
        if not unread:
            self._scratch, self._view = NO_SCRATCH, NO_VIEW
            if self._scratches.holder is self:  # what came behind a value went into the wide one
                self._scratches.holder = None
        elif room == SCRATCH_BYTES:
            self._scratch, self._view = self._scratches.get()
        else:
            self._scratch = bytearray(room)
            self._view = memoryview(self._scratch)
        memcpy(
            PyByteArray_AS_STRING(self._scratch), PyByteArray_AS_STRING(self._scratches.wide) + self._start, unread
        )
        self._start, self._end = 0, unread
        return 0

    def buffer(self, sizehint=-1):
        """Where the next bytes belong; never empty. Valid until `take`. The hint is asyncio's and not needed."""
        cdef Py_ssize_t unread
        if self._body is not None:
            if self._body_hold is REFUSED:
                if self._scratches.holder is not self:
                    self._take_scratch()
                return self._view[: min(SCRATCH_BYTES, self._length + SLACK - self._filled)]
            return self._body[self._filled :]
        if self._wide and self._brings_values and self._plain and self._end - self._start < SCRATCH_BYTES:
            if self._scratch is not self._scratches.wide:
                self._take_wide()
            return self._view[self._end :]
        if self._start == self._end:
            self._start = self._end = 0
            if self._scratches.holder is not self:
                self._take_scratch()
            if not self._plain or (PyByteArray_GET_SIZE(self._scratch) > SCRATCH_BYTES and not self._gathered):
                self._renew()
            return self._view[:HEAD_BYTES] if self._after_payload else self._view
        if self._end == PyByteArray_GET_SIZE(self._scratch):
            unread = self._end - self._start
            if unread == self._end:
                self._grow(2)
                self._plain = False
            else:
                memmove(PyByteArray_AS_STRING(self._scratch), PyByteArray_AS_STRING(self._scratch) + self._start, unread)
                self._start, self._end = 0, unread
        return self._view[self._end :]

    def _take_overflow(self):
        """What has come behind the value that is complete now, into its extent, goes to the scratch, which is empty."""
        cdef Py_ssize_t past = self._length + SLACK, extra = self._filled - past
        cdef char *behind
        if extra <= 0:
            return
        if self._scratches.holder is not self:
            self._take_scratch()
        self._start, self._end = 0, extra
        behind = <char *> PyMemoryView_GET_BUFFER(self._body).buf + past
        memcpy(PyByteArray_AS_STRING(self._scratch), behind, extra)
        memset(behind, 0, extra)  # it may be what only this client and we are to know

    def _take_plain(self):
        """The commands at the front of the scratch that are written as clients write them, of up to PLAIN_MAX arguments
        of up to PLAIN_MAX bytes. `_plain` says whether what is left may be such a command that has not ended."""
        cdef list commands = []
        cdef const char *base = PyByteArray_AS_STRING(self._scratch)
        cdef const char *at = base + self._start
        cdef Found found = DONE
        while found == DONE and at < base + self._end:
            found = read_bulks(&at, base + self._end, commands)
        self._start = at - base
        self._plain = found != STRANGE
        return commands

    def _read_so_far(self):
        """Of a plain command that has not come as a whole and waits in the scratch: how many bytes of it make complete
        arguments, how many these are, and their own bytes."""
        cdef Kind kind = OTHER
        cdef Py_ssize_t number, nbytes = 0
        cdef Words words  # not those of a command that may just be running
        cdef const char *base = PyByteArray_AS_STRING(self._scratch)
        if self._remaining or self._body is not None or self._start == self._end:
            return 0, 0, 0
        words.complete = 0
        if read_words(base + self._start, base + self._end, &words, &kind) != MORE or not words.complete:
            return 0, 0, 0
        for number in range(words.complete):
            nbytes += words.length[number]
        return words.past - base - self._start, words.complete, nbytes

    def __cinit__(self, *args, **kwargs):
        self._scratch, self._view = NO_SCRATCH, NO_VIEW
        self._args = []
        self._length = -1
        self._plain = self.authenticated = True


cdef bint busy = False
cdef char *out = NULL  # replies that are not yet a bytes object, of the session that runs
cdef Py_ssize_t out_bytes = 0, out_room = 0


cdef char *room_for(Py_ssize_t nbytes) except NULL:
    """Where the next `nbytes` of replies go."""
    global out, out_bytes, out_room
    cdef Py_ssize_t wanted = max(out_room, <Py_ssize_t> OUT_BYTES)
    cdef char *larger
    if out_bytes + nbytes > out_room:
        while wanted < out_bytes + nbytes:
            wanted *= 2
        larger = <char *> realloc(out, wanted)
        if larger == NULL:
            raise MemoryError
        out, out_room = larger, wanted
    out_bytes += nbytes
    return out + out_bytes - nbytes


cdef int say(const char *text, Py_ssize_t length) except -1:
    memcpy(room_for(length), text, length)
    return 0


cdef int say_number(char mark, Py_ssize_t number) except -1:
    """`mark`, a number that is not negative, and the end of the line."""
    cdef char line[24]
    cdef int at = 22
    line[22], line[23] = 13, 10
    while True:
        at -= 1
        line[at] = 48 + number % 10
        number //= 10
        if number == 0:
            break
    at -= 1
    line[at] = mark
    return say(line + at, 24 - at)


cdef bint says(Py_ssize_t number, const char *lower, Py_ssize_t length) noexcept:
    """Whether an argument behind the first is that word, in letters of either case."""
    cdef Py_ssize_t at
    if number < 2 or words.length[number] != length:
        return False
    for at in range(length):
        if (words.at[number][at] | 32) != lower[at]:
            return False
    return True


cdef inline bytes word(Py_ssize_t number):
    return PyBytes_FromStringAndSize(words.at[number], words.length[number])


cdef list words_from(Py_ssize_t first):
    return [word(number) for number in range(first, words.count)]


cdef class HotSession:
    """The part of Session that plain commands need."""

    cdef public StoreCore store
    cdef public object server
    cdef public Reader _parser
    cdef public Py_ssize_t input_bytes, reads, output_bytes, writes, space
    cdef public bint _may_run, _is_behind, _paused, _ended, _lends, _holds_back, close_after_reply, observed, no_touch, splices
    cdef public object waiting, _stream, _transport, _loop, _commands, _checks, _waiting_for_room
    cdef public list _replies, _lent, _pushes
    cdef public Py_ssize_t _reply_bytes
    cdef public Py_ssize_t _marked_bytes_min, _threaded_bytes_min
    cdef public int _fd
    cdef int _receives_left
    cdef public bytes nil
    cdef public long long unsaved_since, _writes_before
    cdef public str last_command
    cdef public double last_command_s
    cdef object _stats, _admission, _called, _signs, _receiving

    def __cinit__(self, *args, **kwargs):
        self._commands = no_commands
        self._replies, self._lent, self._pushes = [], [], []
        self.last_command = "NULL"
        self.nil = b"$-1\r\n"
        self._fd = -1

    def _take_part(self, server, Reader parser):
        """Note what the hot path looks at, once it is made."""
        self.server, self.store, self._parser = server, server.store, parser
        self._stats, self._admission = server.stats, server.admission
        self._checks = None if server.cluster is None else server.cluster.checks
        self._waiting_for_room, self._called, self._signs, self._receiving = server.admission.tables()

    # ---- a turn ------------------------------------------------------------------------------------------------------

    def buffer_updated(self, Py_ssize_t nbytes):
        """Bytes have arrived (or, with 0, the client has caught up): run what they complete and send the replies."""
        global busy
        cdef Found found
        cdef bint was_long = self.has_long_body()
        self.input_bytes += nbytes
        self.reads += 1
        if busy or not self.is_plain():
            self._parser._wide = False
            self._run(nbytes)
            self.leave_wide()
            return
        busy = True
        self._receives_left = TURN_BODIES
        try:
            found = self.run_plain(nbytes)
            if found == STRANGE or self.has_more_to_say():
                self.settle()
            elif self._parser._body is not None and not self._lent and self._reply_bytes < OUT_BYTES:
                self.hold_back()
            else:
                self.send()
        finally:
            self.settle()
            busy = False
        if found == STRANGE:
            self._parser._wide = False
            self._run(0)
        self.leave_wide()
        if found == STRANGE:
            return
        if (self._replies and not self._holds_back) or self.has_more_to_say() or self._waiting_for_room:
            self._end_turn()
        elif was_long or self.has_long_body():
            self._mind_body()

    cdef int note_filled(self, Py_ssize_t room) except -1:
        """Note whether the last receive filled its scratch, and so what the next one is into."""
        cdef Reader reader = self._parser
        cdef bint is_wide = room > SCRATCH_BYTES and reader._scratch is reader._scratches.wide
        if reader._end < room:
            reader._filled_wide = reader._narrow = 0  # the loop has turned to others
        elif reader._narrow:
            reader._narrow -= 1
        elif is_wide:
            reader._filled_wide += 1
            if reader._filled_wide == TURN_WIDE:
                reader._wide, reader._filled_wide, reader._narrow = False, 0, TURN_RECEIVES
        elif room == SCRATCH_BYTES:
            reader._wide = True
        reader._brings_values = False
        return 0

    cdef int leave_wide(self) except -1:
        """Give the wide scratch back for the next client."""
        cdef Reader reader = self._parser
        if PyByteArray_GET_SIZE(reader._scratch) > SCRATCH_BYTES and reader._scratches.wide_holder is reader:
            reader._leave_wide()
        return 0

    cdef bint has_long_body(self) noexcept:
        """Whether a value comes in which the session is to look after: a thread might receive the rest, or the socket
        have a mark for it."""
        cdef Reader reader = self._parser
        return reader._body is not None and reader._length >= min(self._marked_bytes_min, self._threaded_bytes_min)

    cdef bint is_plain(self) except -1:
        """Whether what has come is for this reader."""
        cdef Reader reader = self._parser
        if not self._may_run or self._paused or self.waiting is not None or self.close_after_reply or self.no_touch:
            return False
        if self._checks is not None or self._stream is not None or not reader._plain:
            return False
        if self._commands is not no_commands:
            if PyObject_LengthHint(self._commands, 0):
                return False
            self._commands = no_commands
        if not reader._remaining:
            return reader._body is None
        if reader._body is not None and type(reader._body_hold) is not Reservation:
            return False
        return takes(self.kind_gathered(), len(reader._args) + reader._remaining)

    cdef Kind kind_gathered(self) except *:
        """Which command is being gathered, if it is one that brings values for the arena."""
        cdef Kind kind = OTHER
        cdef list args = self._parser._args
        if args and type(args[0]) is bytes:
            kind = kind_of(PyBytes_AS_STRING(args[0]), PyBytes_GET_SIZE(args[0]))
        return kind if kind == SET or kind == MSET else OTHER

    cdef bint has_more_to_say(self) except -1:
        """Whether the end of this turn is not the usual one."""
        return self._is_behind or self._paused or self.close_after_reply or self._ended or len(self._pushes) > 0

    cdef Found run_plain(self, Py_ssize_t nbytes) except *:
        """Run what is plain and gather the replies; STRANGE when something else comes next."""
        cdef Reader reader = self._parser
        cdef Kind kind, current = OTHER
        cdef Found found = DONE
        cdef long long calls = 0, began_ns = clock_ns()
        cdef Py_ssize_t unread
        cdef const char *base
        self._writes_before = self.store.writes
        if reader._body is not None:
            reader._filled += nbytes
            if self.receive_body() == MORE:
                return MORE
        else:
            reader._end += nbytes
            if nbytes:
                self.note_filled(PyByteArray_GET_SIZE(reader._scratch))
        if reader._remaining or reader._args:
            current = self.kind_gathered()
            found = self.go_on()
            calls = found == DONE or found == HALT
        unread = reader._end - reader._start
        while found == DONE and reader._start < reader._end:
            base = PyByteArray_AS_STRING(reader._scratch)
            kind = OTHER
            found = read_words(base + reader._start, base + reader._end, &words, &kind)
            if found != DONE:
                if found == MORE and reader._end - reader._start == PyByteArray_GET_SIZE(reader._scratch):
                    found = STRANGE  # the scratch is to grow, and whether it shall is for others to say
                break
            if kind != current:
                if calls:
                    began_ns = self.enter(current, calls, began_ns)
                current, calls = kind, 0
            if words.payload:
                found = self.gather(base)
                calls += found == DONE or found == HALT
                continue
            try:
                found = self.run_one(kind)
            except Exception:
                answer = self.apologize(words_from(0))
                say(PyBytes_AS_STRING(answer), PyBytes_GET_SIZE(answer))
                found = HALT
            if found == STRANGE:
                break
            calls += 1
            reader._start = words.past - base
            reader._after_payload = False
            if words.count > ARGS_QUICK:
                reader._gathered = unread > SCRATCH_BYTES
                if kind == MSET or kind == DEL:
                    self.note_if_slow(words_from(0), clock_ns() - began_ns)
            if self._reply_bytes + out_bytes >= REPLY_HIGH:
                self.send()
                if self._paused or self._transport is None or self._transport.is_closing():  # the client has hung up
                    found = HALT
        if calls:
            reader._gather_tries = 0
            self.enter(current, calls, began_ns)
        return found

    cdef long long enter(self, Kind kind, long long calls, long long began_ns) except -1:
        """Enter a run of calls into the statistics; returns the time now."""
        cdef long long now_ns = clock_ns()
        cdef str name = NAMES[<int> kind]
        cdef dict commands = self._stats.commands
        cdef CallTimes record = commands.get(name)
        if record is None:
            record = self._stats.command(name)
        record.enter(calls, now_ns - began_ns)
        if not self.unsaved_since and (kind == SET or kind == MSET or kind == DEL):
            self.unsaved_since = self._writes_before + 1
        self._stats.commands_processed += calls
        self.last_command = name
        self.last_command_s = now_ns / 1e9
        return now_ns

    cdef int note_if_slow(self, list args, long long took_ns) except -1:
        """Tell of a command that took long, perhaps with those of its kind before it."""
        if took_ns >= self.server.slow_ns:
            self.note_slow(args, took_ns)
        return 0

    # ---- values that are received into the arena ---------------------------------------------------------------------
    #
    # What has come of such a command is kept as the Parser keeps it, so that either can go on with it.

    cdef Found gather(self, const char *base) except *:
        """Begin with a command of which a value is to be received into the arena."""
        cdef Reader reader = self._parser
        cdef Py_ssize_t number
        if self.store.tiering is not None or (words.count > 3 and self.store.may_refuse):
            return STRANGE
        if words.payload > reader.bulk_bytes_max:
            return STRANGE
        reader._args = [word(number) for number in range(words.complete)]
        reader._remaining, reader._length = words.count - words.complete, words.payload
        reader._held_bytes = reader._arena_bytes = 0
        for number in range(words.complete):
            reader._held_bytes += words.length[number]
        reader._start = words.past - base
        return self.go_on()

    cdef Found go_on(self) except *:
        """Take in the arguments that are still missing, and run the command once it is whole."""
        cdef Reader reader = self._parser
        cdef Py_ssize_t length
        cdef const char *at
        cdef const char *end
        cdef Found found
        while reader._remaining:
            at = PyByteArray_AS_STRING(reader._scratch) + reader._start
            end = PyByteArray_AS_STRING(reader._scratch) + reader._end
            if reader._length < 0:
                found = number_line(&at, end, 36, &length)
                if found != DONE:
                    return found
                if length > reader.bulk_bytes_max:
                    return STRANGE
                reader._start = at - PyByteArray_AS_STRING(reader._scratch)
                reader._length = length
            length = reader._length
            if length >= PAYLOAD_MIN - SLACK:
                found = self.open_body(at, end)
                if found != DONE:
                    return found
                continue
            if length + reader._held_bytes + ARGUMENT_COST * (len(reader._args) + 1) > reader.query_bytes_max:
                return STRANGE
            if end - at < length + SLACK:
                return MORE if end - at < PyByteArray_GET_SIZE(reader._scratch) else STRANGE
            reader._args.append(PyBytes_FromStringAndSize(at, length))
            reader._held_bytes += length
            reader._start += length + SLACK
            reader._remaining -= 1
            reader._length = -1
        return self.run_gathered()

    cdef bint may_come(self, Py_ssize_t length, Py_ssize_t held_bytes, Py_ssize_t arguments) except -1:
        """Whether nothing stands against room for a value, behind so many arguments (client/admission.py has the
        rules)."""
        cdef Reader reader = self._parser
        cdef StoreCore store = self.store
        if length > reader.bulk_bytes_max:
            return False
        if length + held_bytes + ARGUMENT_COST * (arguments + 1) > reader.query_bytes_max:
            return False
        if self._waiting_for_room or self._called or self._signs or store.tiering is not None:
            return False
        return not store.reserved_bytes or store.reserved_bytes + length + GRAIN + PAYLOAD_OFFSET + SLACK <= (
            (store.bound_bytes or store.allocator.capacity_bytes) // SHARE_OF_ARENA
        )

    cdef Found open_body(self, const char *at, const char *end) except *:
        """Give a value its room, and take in what is there of it."""
        cdef Reader reader = self._parser
        cdef StoreCore store = self.store
        cdef Py_ssize_t length = reader._length, here, start, past
        cdef Reservation hold
        if length < PAYLOAD_MIN or len(reader._args) % 2:
            return STRANGE
        if length >= EVIDENCE_FROM and end - at < min(length >> EVIDENCE_SHIFT, <Py_ssize_t> EVIDENCE_MAX):
            return STRANGE
        if not self.may_come(length, reader._held_bytes, len(reader._args)):
            return STRANGE
        hold = store.reserved(reader._args[len(reader._args) - 1], length, self.space, True, 0)
        if hold is None:
            store.stats.refused -= 1  # others ask once more
            return STRANGE
        reader._held_bytes += length
        reader._arena_bytes += length
        if end - at >= length + SLACK:
            reader._brings_values = True
            reader._args.append(hold)
            store.written(hold.extent, length, at)
            reader._start += length + SLACK
            reader._remaining -= 1
            reader._length = -1
            reader._after_payload, reader._gathered = length > SCRATCH_BYTES, False
            return DONE
        reader._wide = reader._wide and length <= WIDE_VALUE_MAX
        reader._brings_values = True
        # What comes behind the value may fall into the rest of its extent: a whole value is then one receive and not two,
        # and one that is the last of what has come ends without a receive for nothing. Not so where more is received
        # at once than that.
        start = offset_of(hold.extent) + PAYLOAD_OFFSET
        past = start + length + SLACK
        if not reader._wide:
            past += min(<Py_ssize_t> HEAD_BYTES, offset_of(hold.extent) + length_of(hold.extent) - past)
        reader._body = store.arena.view[start:past]
        reader._body_hold = hold
        here = min(end - at, length + SLACK)
        memcpy(PyMemoryView_GET_BUFFER(reader._body).buf, at, here)
        reader._start += here
        reader._filled = here
        if self not in self._receiving:
            self._admission.begin_receiving(self)
        return self.receive_body()

    cdef Found receive_body(self) except *:
        """Receive what has come of the value, unless a thread does. The loop would take a turn for each piece: SETs of
        2 MiB over TCP took 1.18 times as long (2 cores)."""
        cdef Reader reader = self._parser
        cdef Py_ssize_t got, room, wanted = reader._length + SLACK
        cdef Py_ssize_t missing = wanted - reader._filled
        cdef char *there
        if missing >= self._threaded_bytes_min and self._receive_elsewhere(missing):
            return MORE
        if out_bytes:  # of another loop's session none may be said while the interpreter's lock is not ours
            self.settle()
        while reader._filled < wanted:
            if self._fd < 0 or not self._receives_left or wanted - reader._filled > BODY_MAX:
                return MORE
            self._receives_left -= 1
            there = <char *> PyMemoryView_GET_BUFFER(reader._body).buf + reader._filled
            room = PyMemoryView_GET_BUFFER(reader._body).len - reader._filled
            with nogil:
                got = recv(self._fd, there, room, MSG_DONTWAIT)
            if got <= 0:
                return MORE  # the transport finds out whether that is the end
            reader._filled += got
            self.input_bytes += got
            self.reads += 1
        self.close_body()
        return DONE

    cdef int close_body(self) except -1:
        """The value is there: an argument like others."""
        cdef Reader reader = self._parser
        reader._take_overflow()
        reader._args.append(reader._body_hold)
        reader._after_payload, reader._gathered = reader._length > SCRATCH_BYTES, False
        reader._body = reader._body_hold = None
        reader._filled = 0
        reader._remaining -= 1
        reader._length = -1
        return 0

    cdef Found run_gathered(self) except *:
        """Run the command that has been gathered."""
        cdef Reader reader = self._parser
        cdef list args = reader._args
        cdef StoreCore store = self.store
        cdef Kind kind = self.kind_gathered()
        cdef long long began_ns = clock_ns()
        cdef Py_ssize_t number
        reader._args = []
        reader._held_bytes = reader._arena_bytes = 0
        if kind == MSET and store.may_refuse:  # since it began
            self._commands = iter([args])
            return STRANGE
        try:
            for number in range(1, len(args), 2):
                value = args[number + 1]
                if type(value) is Reservation:
                    (<Reservation> value).publish(0)
                elif not store.stored(args[number], value, self.space, 0, 0):
                    self.refuse(kind)  # a SET: each value of an MSET is sure of its room
                    return DONE
        except Exception:
            answer = self.apologize(args)
            say(PyBytes_AS_STRING(answer), PyBytes_GET_SIZE(answer))
            return HALT
        if kind == MSET:
            self.count_repeats(args[1::2])
            self.note_if_slow(args, clock_ns() - began_ns)
        say(b"+OK\r\n", 5)
        return DONE

    # ---- the commands ------------------------------------------------------------------------------------------------

    cdef Found run_one(self, Kind kind) except *:
        """Run the command that was read; STRANGE, with nothing done, when others know better how."""
        cdef StoreCore store = self.store
        cdef Entry entry
        if kind == GET:
            return self.say_value(word(1), store.tiering is not None or store.gpu is not None)
        if kind == SET:
            if words.length[2] >= PAYLOAD_MIN:
                return self.set_block()
            if store.stored(word(1), word(2), self.space, 0, 0):
                say(b"+OK\r\n", 5)
            else:
                self.refuse(kind)
        elif kind == MGET:
            return self.get_many()
        elif kind == MSET:
            return self.set_many()
        elif kind == EXISTS:
            if words.count == 2:
                entry = store.index.find(word(1), self.space)
                if entry is not None and entry.expire_at_ms:
                    entry = store.find(word(1), self.space)
                if entry is not None:
                    entry.affirmed_turn = store.affirmed_turn = store.turn
                say_number(58, entry is not None)
            else:
                say_number(58, store.affirmed(words_from(1), self.space))
        elif kind == MATCH:
            if says(words.count - 2, b"wait", 4) or says(words.count - 1, b"expected", 8):
                return STRANGE
            say_number(58, store.matched(words_from(1), self.space))
        elif kind == DEL:
            say_number(58, store.deleted(words_from(1), self.space))
        else:
            say(b"+PONG\r\n", 7)
        return DONE

    cdef int refuse(self, Kind kind) except -1:
        """Answer that there is no room."""
        say(PyBytes_AS_STRING(OUT_OF_MEMORY), PyBytes_GET_SIZE(OUT_OF_MEMORY))
        self._stats.count_error(OUT_OF_MEMORY)
        self._stats.command(NAMES[<int> kind]).failed_calls += 1
        return 0

    cdef Found say_value(self, bytes key, bint may_be_away) except *:
        """The value under a key, lent if it lies in the arena; nil without one."""
        cdef Lease lease
        value = self.store.fetched(key, self.space)
        if value is None:
            if may_be_away and self.store.index.find(key, self.space) is not None:
                return STRANGE
            say(PyBytes_AS_STRING(self.nil), PyBytes_GET_SIZE(self.nil))
        elif type(value) is bytes:
            say_number(36, PyBytes_GET_SIZE(value))
            say(PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
            say(b"\r\n", 2)
        else:
            lease = <Lease?> value
            self._lent.append(lease)
            if lease.entry.tokens:
                self.store.stats.hit_tokens += lease.entry.tokens
            say_number(36, lease.entry.length)
            self.settle()
            self._replies.append(lease.view)
            self._reply_bytes += lease.entry.length
            say(b"\r\n", 2)
        return DONE

    cdef Found get_many(self) except *:
        """MGET of what is in memory and goes out at once: more than that is looked up as the client takes it."""
        cdef StoreCore store = self.store
        cdef Py_ssize_t nbytes = 0
        cdef list keys
        cdef Entry entry
        if store.tiering is not None or store.gpu is not None:
            return STRANGE
        keys = words_from(1)
        for key in keys:
            entry = store.index.find(key, self.space)
            if entry is not None:
                nbytes += entry.length + 12
        if nbytes + 5 * words.count >= REPLY_HIGH:
            return STRANGE
        say_number(42, words.count - 1)
        for key in keys:
            self.say_value(key, False)
        store.touched(keys, self.space)
        return DONE

    cdef Found set_block(self) except *:
        """SET of a value that has come as a whole and belongs into the arena."""
        cdef StoreCore store = self.store
        cdef Py_ssize_t length = words.length[2]
        if not self.may_come(length, words.length[0] + words.length[1], 2):
            return STRANGE
        if not store.placed(word(1), words.at[2], length, self.space, 0):
            store.stats.refused -= 1  # others ask once more
            return STRANGE
        self._parser._brings_values = True
        say(b"+OK\r\n", 5)
        return DONE

    cdef int count_repeats(self, list keys) except -1:
        """Count the keys of an MSET that it has named before."""
        cdef Py_hash_t hashes[ARGS_QUICK]
        cdef Py_ssize_t number, other, repeats = len(keys) > ARGS_QUICK
        for number in range(0 if repeats else len(keys)):  # a set of ten keys takes longer than all the pairs of them
            hashes[number] = hash(keys[number])
            for other in range(number):
                repeats += hashes[other] == hashes[number]
        if repeats:
            repeats = len(keys) - len(set(keys))
        if repeats:
            self._stats.sets_duplicate += repeats
        return 0

    cdef Found set_many(self) except *:
        """MSET, where no value can be refused."""
        cdef StoreCore store = self.store
        cdef Py_ssize_t number
        cdef list keys = []
        cdef double now_s
        if store.may_refuse:
            return STRANGE
        now_s = store.now()
        for number in range(1, words.count, 2):
            key = word(number)
            keys.append(key)
            store.stored(key, word(number + 1), self.space, 0, now_s)
        self.count_repeats(keys)
        say(b"+OK\r\n", 5)
        return DONE

    # ---- replies -----------------------------------------------------------------------------------------------------

    cdef int settle(self) except -1:
        """Make what was said a reply of its own."""
        global out, out_bytes, out_room
        if out_bytes:
            self._replies.append(PyBytes_FromStringAndSize(out, out_bytes))
            self._reply_bytes += out_bytes
            out_bytes = 0
            if out_room > REPLY_HIGH:
                free(out)
                out, out_room = NULL, 0
        return 0

    cdef int hold_back(self) except -1:
        """Keep the replies until the loop has dealt with what it knows to have come: a value is coming in already, so
        this client has sent more than it has answers to, and they may leave in one write."""
        self.settle()
        if self._replies and not self._holds_back:
            self._holds_back = True
            self._loop.call_soon(self._send_held_back)
        return 0

    def _send_held_back(self):
        """Send what was held back, if it has not left since."""
        self._holds_back = False
        if not self._replies or self._transport is None or self._transport.is_closing():
            return
        if busy:  # with another loop's client, of which replies are in `out`
            self.send_gathered()
        else:
            self.send()

    cdef bint goes_at_once(self) except -1:
        """Whether what was gathered may go around the transport, which has nothing to send before it, and is not for
        others to send."""
        cdef Py_ssize_t nbytes = self._reply_bytes + out_bytes
        if self._fd < 0 or self._is_behind or nbytes >= LENT_MAX:
            return False
        return not (self.splices and self._lent) or nbytes < self.server.splicing.value_bytes_min * len(self._lent)

    cdef bint sent_at_once(self) except -1:
        """Give what was gathered to the socket; False when it does not take all, and what is gone is then gathered no
        more."""
        global out_bytes
        cdef iovec parts[PARTS_MAX]
        cdef msghdr message
        cdef Py_buffer *view
        cdef Py_ssize_t sent, nbytes = 0
        cdef size_t count = 0
        if len(self._replies) >= PARTS_MAX:
            return False
        for reply in self._replies:
            if type(reply) is bytes:
                parts[count].iov_base, parts[count].iov_len = PyBytes_AS_STRING(reply), PyBytes_GET_SIZE(reply)
            elif type(reply) is memoryview:
                view = PyMemoryView_GET_BUFFER(reply)
                parts[count].iov_base, parts[count].iov_len = view.buf, view.len
            else:
                return False
            nbytes += parts[count].iov_len
            count += 1
        if out_bytes:
            parts[count].iov_base, parts[count].iov_len = out, out_bytes
            nbytes += out_bytes
            count += 1
        memset(&message, 0, sizeof(message))
        message.msg_iov, message.msg_iovlen = parts, count
        sent = sendmsg(self._fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent <= 0:
            return False  # the transport finds out why
        self.output_bytes += sent
        self.writes += 1
        if sent < nbytes:
            self.settle()
            self.drop_sent(sent)
            return False
        out_bytes = 0
        self._replies, self._reply_bytes = [], 0
        if self._lent:
            self.end_lent()
        return True

    cdef int drop_sent(self, Py_ssize_t sent) except -1:
        """Take what is gone from what was gathered."""
        cdef list replies = self._replies
        cdef Py_ssize_t at = 0
        self._reply_bytes -= sent
        while sent >= len(replies[at]):
            sent -= len(replies[at])
            at += 1
        self._replies = [memoryview(replies[at])[sent:], *replies[at + 1 :]]
        return 0

    cdef int end_lent(self) except -1:
        """End what was lent for replies that have left."""
        lent, self._lent = self._lent, []
        for lease in lent:
            (<Lease?> lease).end()
        return 0

    cdef int send(self) except -1:
        """Send what was gathered, as Session._flush does, which is asked where that may not be all."""
        if not out_bytes and not self._replies:
            return 0
        if self.goes_at_once() and self.sent_at_once():
            return 0
        self.settle()
        return self.send_gathered()

    cdef int send_gathered(self) except -1:
        """The same by the transport, without what is in `out`."""
        cdef list replies = self._replies
        cdef Py_ssize_t nbytes = 0
        if self._is_behind or (self._lent and (self.splices or not self._lends)) or self._reply_bytes >= LENT_MAX:
            if self._lent:
                self._flush()
            else:
                self._replies, self._reply_bytes = [], 0
                self._send(b"".join(replies))
            return 0
        self._replies, self._reply_bytes = [], 0
        for reply in replies:
            nbytes += len(reply)
        self.output_bytes += nbytes
        self.writes += 1
        if not self._lent:
            self._transport.write(replies[0] if len(replies) == 1 else b"".join(replies))
            return 0
        self._transport.writelines(replies)
        if not self._paused:
            self.end_lent()
        return 0
