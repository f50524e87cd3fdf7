"""A Backend in a dictionary: least recently used leaves first, trouble comes when the test says so."""

from collections import OrderedDict
from collections.abc import Generator, Sequence

from kvredis.backends.base import NothingToFetch, Tier, reserve_each


class FakeReservation:
    """Room for one value; visible after commit."""

    def __init__(self, backend: "FakeBackend", key: bytes, length: int) -> None:
        self.backend, self.key = backend, key
        self.value = bytearray(length)
        self.view = memoryview(self.value)

    def filled(self, start: int, stop: int) -> None:
        self.backend.filled.append((self.key, start, bytes(self.view[start:stop])))

    def commit(self) -> None:
        self.backend.put(self.key, bytes(self.value))

    def abort(self) -> None:
        pass

    def __enter__(self) -> "FakeReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class FakeLease:
    """A hold that the backend counts."""

    def __init__(self, backend: "FakeBackend", value: bytes) -> None:
        self.backend = backend
        self.view = memoryview(value)
        self.held = True
        backend.leases += 1

    def release(self) -> None:
        self.view.release()  # raises BufferError under a reader who keeps a tensor of it
        self.held = False
        self.backend.leases -= 1

    def __enter__(self) -> "FakeLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FakeBackend:
    """Holds up to `blocks_max` values. `broken` makes every verb raise; `full` makes reserve answer None."""

    def __init__(self, blocks_max: int = 1000) -> None:
        self.values: OrderedDict[bytes, bytes] = OrderedDict()
        self.blocks_max = blocks_max
        self.written: list[bytes] = []
        self.filled: list[tuple[bytes, int, bytes]] = []
        self.leases = 0
        self.refused = 0
        self.refusal = ""
        self.full = self.broken = self.closed = False

    def put(self, key: bytes, value: bytes) -> None:
        self.values.pop(key, None)
        while len(self.values) >= self.blocks_max:
            self.values.popitem(last=False)
        self.values[key] = value
        self.written.append(key)

    def match(self, keys: Sequence[bytes]) -> int:
        self._try()
        run = 0
        while run < len(keys) and keys[run] in self.values:
            run += 1
        self.touch(keys[:run])
        return run

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self._try()
        return [key in self.values for key in keys]

    def expect(self, keys: Sequence[bytes], within_s: float) -> int:
        self._try()
        return self.present(keys).count(False)

    def coming(self, keys: Sequence[bytes]) -> int:
        return self.match(keys)

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> int:
        return [*self.present(keys), False].index(False)

    def reserve(self, key: bytes, length: int) -> FakeReservation | None:
        self._try()
        return None if self.full else FakeReservation(self, key, length)

    def reserve_all(self, keys: Sequence[bytes], length: int) -> list[FakeReservation]:
        return reserve_each(self.reserve, keys, length)

    def tiers_of(self, keys: Sequence[bytes]) -> list[Tier]:
        return ["memory"] * len(keys)

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        self._try()
        for key in keys:
            value = self.values.get(key)
            yield None if value is None else FakeLease(self, value)

    def touch(self, keys: Sequence[bytes]) -> int:
        self._try()
        present = [key for key in keys if key in self.values]
        for key in reversed(present):
            self.values.move_to_end(key)
        return len(present)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.values.pop(key, None) is not None for key in keys)

    def room(self, length: int, at_least: int = 1) -> int:
        return 1 << 30

    def prefetch(self, keys: Sequence[bytes]) -> NothingToFetch:
        self._try()
        return NothingToFetch(resident=len(keys), refused=self.refusal)

    def flush(self) -> int:
        self._try()
        refused, self.refused = self.refused, 0
        return refused

    def stats(self) -> dict[str, int | float | str]:
        return {}

    def close(self) -> None:
        self.closed = True

    def _try(self) -> None:
        if self.broken:
            raise ConnectionResetError("the other side went away")
