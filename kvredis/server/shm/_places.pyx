# cython: language_level=3, binding=False, nonecheck=True, wraparound=False, cdivision=True
"""Leases by their place in the arena, thousands at a time: attach.py says what is kept for a client and why, and does
itself what is left here. _places.pyi is the contract."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from kvredis.storage._core cimport PAYLOAD_OFFSET, Entry, LeaseRun, length_of, offset_of

cdef enum:
    DIGITS_MAX = 20
    PLACE_BYTES_MAX = 12 + 2 * DIGITS_MAX  # *2 CR LF :offset CR LF :length CR LF


cdef char *digits(char *to, Py_ssize_t number) noexcept:
    """Write a number that is not negative; where it ends."""
    cdef char text[DIGITS_MAX]
    cdef int at = DIGITS_MAX
    while True:
        at -= 1
        text[at] = 48 + number % 10
        number //= 10
        if number == 0:
            break
    memcpy(to, text + at, DIGITS_MAX - at)
    return to + DIGITS_MAX - at


def keep(list found, Py_ssize_t at, LeaseRun run, dict held, tuple room):
    cdef Py_ssize_t bytes_max, leases_max, past = len(found), index, nbytes, total = 0
    cdef Entry entry
    cdef char *text
    cdef char *to
    cdef char *place
    bytes_max, leases_max = room
    past = min(past, at + leases_max)
    if at < 0 or past <= at:
        return b"", at, 0
    text = to = <char *> malloc((past - at) * PLACE_BYTES_MAX)
    if text == NULL:
        raise MemoryError
    try:
        for index in range(at, past):
            item = found[index]
            if type(item) is not Entry:
                past = index
                break
            entry = item
            nbytes = length_of(entry.extent)
            if not nbytes or entry.length < 0 or total + nbytes > bytes_max:
                past = index
                break
            memcpy(to, b"*2\r\n:", 5)
            place = digits(to + 5, offset_of(entry.extent) + PAYLOAD_OFFSET)
            word = PyBytes_FromStringAndSize(to + 5, place - to - 5)
            if word in held:
                past = index
                break
            held[word] = run, index, nbytes
            memcpy(place, b"\r\n:", 3)
            to = digits(place + 3, entry.length)
            memcpy(to, b"\r\n", 2)
            to += 2
            total += nbytes
        return PyBytes_FromStringAndSize(text, to - text), past, total
    finally:
        free(text)


def take(list words, dict held):
    cdef list places = []
    cdef Py_ssize_t total = 0
    for word in words:
        if type(held.get(word)) is not tuple:
            return None
    for word in words:
        place = held.pop(word, None)
        if place is not None:
            places.append(place)
            total += (<tuple> place)[2]
    return places, total
