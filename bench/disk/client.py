"""One client of a server with a disk tier: it stores values that it can tell apart, gets them, and asks what moved.

Values are slices of one random mapping, a page apart, so any two differ from their first bytes on and a thousand of
them need the memory of one. Which slice a key holds is known from its number and the pass in which it was stored.
"""

from __future__ import annotations

import time
from types import TracebackType

from kvredis.backends.config.url import Address
from kvredis.backends.resp.connection import Connection, Reply
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.servers import info_lines
from kvredis.bench.core.workload import PAGE_BYTES, VALUE_OFFSET_BYTES, Memory
from kvredis.storage.errors import BackendError

from .blocks import same_bytes

_SILENCE_S = 60.0


class Values:
    """What `count` keys of `size_bytes` hold, and the place where a value is received. Owns both mappings."""

    def __init__(self, size_bytes: int, count: int, seed: int) -> None:
        self.size_bytes, self.count = size_bytes, count
        self._source = Memory(size_bytes + (count + 1) * PAGE_BYTES, seed=seed)
        self._target = Memory(size_bytes + PAGE_BYTES)
        self.place = self._target.view[VALUE_OFFSET_BYTES : VALUE_OFFSET_BYTES + size_bytes]

    def key(self, index: int) -> bytes:
        """Give the name of key `index`."""
        return b"bench:%d:%05d" % (self.size_bytes, index)

    def value(self, index: int, shift: int = 0) -> memoryview:
        """Lend what key `index` holds after pass `shift`."""
        at = self._at(index, shift)
        return self._source.view[at : at + self.size_bytes]

    def _at(self, index: int, shift: int) -> int:
        return (index + shift) % self.count * PAGE_BYTES + VALUE_OFFSET_BYTES

    def wipe(self) -> None:
        """Forget the value that was received last."""
        self._target.wipe(self._target.nbytes)

    def check(self, index: int, shift: int, who: str) -> int:
        """Compare the value that was received last with that of key `index`, in full; give its bytes."""
        ours = self._source.address + self._at(index, shift)
        if not same_bytes(ours, self._target.address + VALUE_OFFSET_BYTES, self.size_bytes):
            raise VerificationError(f"{who} returned a wrong byte of {self.key(index).decode()}")
        return self.size_bytes


class BlockClient:
    """One connection, one request in flight. BackendError when it breaks; use it in a with-block."""

    def __init__(self, address: Address, values: Values) -> None:
        self.values = values
        self._connection = Connection.open(address, _SILENCE_S)

    def __enter__(self) -> BlockClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def store(self, index: int, shift: int = 0) -> None:
        """SET a key; BenchError when it is refused."""
        reply = self._connection.set(self.values.key(index), self.values.value(index, shift))
        if reply != "OK":
            raise BenchError(f"SET was answered {reply!r}")

    def load(self, index: int) -> float | None:
        """GET a key into the values' place; give the seconds from the request to the last byte, None for a miss."""
        key, place = self.values.key(index), self.values.place
        start_s = time.perf_counter()
        self._connection.send([b"GET", key])
        length = self._connection.read_bulk_into(lambda nbytes: place if nbytes == len(place) else None)
        took_s = time.perf_counter() - start_s
        if length is None:
            return None
        if isinstance(length, BackendError) or length != len(place):
            raise BenchError(f"GET of {len(place)} bytes was answered {length!r}")
        return took_s

    def save(self) -> None:
        """Have everything that this connection stored on disk; BenchError when it is not."""
        reply = self._call(b"WAITAOF", b"1", b"0", b"%d" % int(_SILENCE_S * 500))
        if reply != [1, 0]:
            raise BenchError(f"WAITAOF was answered {reply!r}")

    def prefetch(self, indices: list[int]) -> dict[str, int]:
        """KV.PREFETCH as a job, and wait for its end; gives what the server said of it at first."""
        words = self._call(b"KV.PREFETCH", *(self.values.key(index) for index in indices), b"JOB")
        if not isinstance(words, list):
            raise BenchError(f"KV.PREFETCH was answered {words!r}")
        said = {_text(name): value for name, value in zip(words[::2], words[1::2], strict=True)}
        job = said.get("job")
        if not isinstance(job, int):
            raise BenchError(f"KV.PREFETCH gave no job: {said!r}")
        ended = self._call(b"KV.JOB", b"%d" % job, b"WAIT", b"%d" % int(_SILENCE_S * 500))
        if isinstance(ended, BackendError) or ended is None:
            raise BenchError(f"KV.JOB was answered {ended!r}")
        return {name: value for name, value in said.items() if isinstance(value, int)}

    def counters(self) -> dict[str, int]:
        """Give the whole numbers in INFO's Kv section."""
        lines = info_lines(self._connection.call(b"INFO", b"kv"))
        return {name: int(text) for name, text in lines.items() if text.removeprefix("-").isdecimal()}

    def words(self) -> dict[str, str]:
        """Give INFO's Kv section as it is written."""
        return info_lines(self._connection.call(b"INFO", b"kv"))

    def _call(self, *args: bytes) -> Reply:
        return self._connection.call(*args)


def _text(reply: Reply) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)
