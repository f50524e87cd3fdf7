"""The values that the bench moves, and the proof that the right ones came back.

Values are slices of one seeded pseudo-random mapping, so no two are alike and a value under the wrong key is noticed.
Which slice a key holds shifts by one with every pass of SETs (`shift`), so a server that forgets a SET and keeps the
older value is noticed as well. Bodies are received into a second mapping, wiped before each timed phase and compared in
full after it.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvredis.storage.memory.memory_limits import gib, memory_obstacle

from .errors import BenchError, VerificationError
from .statistics import size_text

PAGE_BYTES = 4096
VALUE_OFFSET_BYTES = 512  # past a page start: a body placed there never hits the slow path of `rep movsb` on Zen
_FILL_BYTES = 1 << 20

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int


def same_bytes(ours: int, theirs: int, nbytes: int) -> bool:
    """Compare two stretches of memory, by address."""
    return not _libc.memcmp(ours, theirs, nbytes)


class Memory:
    """One anonymous mapping, asked for as huge pages and touched: client memory as an engine with an arena has it."""

    def __init__(self, nbytes: int, *, seed: int | None = None) -> None:
        """Map `nbytes`; filled with the pseudo-random bytes of `seed`, or with zeros. BenchError when a limit of the
        machine is known to be in the way: the kernel would end the bench, without a word, while it fills them."""
        if (obstacle := memory_obstacle(nbytes)) is not None:
            raise BenchError(f"The bench's values need {gib(nbytes)}, but {obstacle}")
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if seed is None:
            self.wipe(nbytes)
            return
        source = random.Random(seed)
        for start in range(0, nbytes, _FILL_BYTES):
            piece = min(_FILL_BYTES, nbytes - start)
            self.view[start : start + piece] = source.randbytes(piece)

    def wipe(self, nbytes: int) -> None:
        """Zero the first `nbytes`."""
        ctypes.memset(self.address, 0, min(nbytes, self.nbytes))


def stride_bytes(size_bytes: int) -> int:
    """Give the distance between two values' places: whole pages and one more for the offset."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES


def working_set(size_bytes: int, working_set_bytes: int) -> int:
    """Give how many keys of `size_bytes` make the working set: at least 2."""
    return max(2, working_set_bytes // size_bytes)


def memory_bytes(sizes: Sequence[int], working_set_bytes: int) -> int:
    """Give the mapping that the largest working set of `sizes` needs."""
    return max(working_set(size, working_set_bytes) * stride_bytes(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Job:
    """One operation: a key, and the view that is its value (SET) or receives it (GET)."""

    key: bytes
    view: memoryview


class Workload:
    """The keys of one value size with their values and the places for what comes back."""

    def __init__(self, size_bytes: int, count: int, source: Memory, target: Memory) -> None:
        self.size_bytes, self.count = size_bytes, count
        self._source, self._target = source, target
        self._stride = stride_bytes(size_bytes)
        if count * self._stride > min(source.nbytes, target.nbytes):
            raise ValueError(f"{count} values of {size_bytes} bytes do not fit the bench's memory")
        self.keys = [b"bench:%d:%05d" % (size_bytes, index) for index in range(count)]

    def memories(self) -> tuple[Memory, Memory]:
        """Lend the mapping of the values and the one that bodies are received in."""
        return self._source, self._target

    def _at(self, slot: int) -> int:
        return slot * self._stride + VALUE_OFFSET_BYTES

    def value(self, index: int, shift: int) -> memoryview:
        """Give the value that key `index` has after the SETs of pass `shift`."""
        at = self._at((index + shift) % self.count)
        return self._source.view[at : at + self.size_bytes]

    def offset(self, index: int, shift: int) -> int:
        """Give where value(index, shift) lies in the values' mapping."""
        return self._at((index + shift) % self.count)

    def place(self, index: int) -> memoryview:
        """Give where the body of key `index` is received."""
        at = self._at(index)
        return self._target.view[at : at + self.size_bytes]

    def indices(self, part: int, parts: int) -> range:
        """Give the keys of connection `part` of `parts`: all of them, or key by key in turn; never none."""
        return range(part % self.count, self.count, parts)

    def sets(self, shift: int, part: int = 0, parts: int = 1) -> list[Job]:
        """Give one pass of SETs over the keys of connection `part`."""
        return [Job(self.keys[index], self.value(index, shift)) for index in self.indices(part, parts)]

    def gets(self, part: int = 0, parts: int = 1) -> list[Job]:
        """Give one pass of GETs over the keys of connection `part`."""
        return [Job(self.keys[index], self.place(index)) for index in self.indices(part, parts)]

    def wipe(self) -> None:
        """Forget every received body, so that a later comparison cannot pass on an old one."""
        self._target.wipe(self.count * self._stride)

    def verify(self, shift: int, who: str) -> int:
        """Compare every received body with its value, in full; give the bytes compared, or raise VerificationError."""
        return self.verify_pairs([(index, index) for index in range(self.count)], shift, who)

    def verify_pairs(self, pairs: Sequence[tuple[int, int]], shift: int, who: str) -> int:
        """The same where the value of key pair[0] was received in place pair[1]."""
        for key, place in pairs:
            ours = self._source.address + self._at((key + shift) % self.count)
            theirs = self._target.address + self._at(place)
            if not same_bytes(ours, theirs, self.size_bytes):
                self._accuse(key, shift, who, place)
        return len(pairs) * self.size_bytes

    def _accuse(self, index: int, shift: int, who: str, place: int) -> None:
        value, body = self.value(index, shift), self.place(place)
        at = next(each for each in range(self.size_bytes) if value[each] != body[each])
        raise VerificationError(
            f"{who} returned a wrong byte: key {self.keys[index].decode()} ({size_text(self.size_bytes)}), byte {at}: "
            f"{body[at]:#04x} instead of {value[at]:#04x}"
        )
