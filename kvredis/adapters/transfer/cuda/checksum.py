"""Checksums of chunks that a GPU finds in passing: the end of XXH3-64, and which chunk has which row of the device's.

The device keeps eight lanes for each chunk (`Summing`; kernels.py); here they become a number. Facts:
https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm", inputs of more than 240 bytes with the default
secret and seed 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch

from kvredis.adapters.transfer.base import NO_ROW, Event

from .plan import Launch

BLOCK_BYTES: Final = 1024
"""Behind so many the lanes are scrambled. Only inputs of whole blocks are known here."""
LANES: Final = 8
SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
LAST_STRIPE: Final = 121
"""Where in the secret the last stripe's part begins."""

_PRIMES_32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIMES_64: Final = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip
INITIAL: Final[tuple[int, ...]] = (_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0])
_MERGE: Final = 11  # where in the secret merging begins
_AVALANCHE: Final = 0x165667919E3779F9
_ALL: Final = (1 << 64) - 1


_KEYS: Final = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(_MERGE, _MERGE + 8 * LANES, 8)]


def digest_of(lanes: Sequence[int], nbytes: int) -> int:
    """The checksum of `nbytes` bytes whose last lanes these are."""
    total = nbytes * _PRIMES_64[0]
    for pair in range(0, LANES, 2):
        product = (lanes[pair] ^ _KEYS[pair]) * (lanes[pair + 1] ^ _KEYS[pair + 1])
        total += (product & _ALL) ^ (product >> 64)
    total &= _ALL
    total = (total ^ (total >> 37)) * _AVALANCHE & _ALL
    return total ^ (total >> 32)


class Summing(Protocol):
    """Running checksums of chunks, by rows, whose bytes lie in staging buffers. `scratch` is a buffer's own."""

    def scratch(self, slot_bytes: int) -> torch.Tensor:
        """Give memory for what lies in a buffer of that size to be folded into."""
        ...

    def fold(
        self, launches: Sequence[Launch], slot: torch.Tensor, scratch: torch.Tensor, pages: torch.Tensor,
        rows_at: int, stream: Any,
    ) -> None:  # fmt: skip
        """Enqueue what can be found of a buffer's bytes without what came before them. The row of each part of the job
        is in `pages`, from `rows_at` on."""
        ...

    def chain(self, launches: Sequence[Launch], scratch: torch.Tensor, stream: Any) -> None:
        """Enqueue the rest; of one chunk in the order of its bytes. A row begins anew with a chunk's first byte."""
        ...

    def digest(self, row: int, nbytes: int) -> str:
        """Tell the checksum of a row whose chunk, of so many bytes, has been folded and chained to the end."""
        ...


class RingSum:
    """Sum (transfer/base.py): one row of the device's, until its checksum is known or given up."""

    __slots__ = ("_digest", "_nbytes", "_sums", "event", "row")

    def __init__(self, sums: RingSums, row: int, nbytes: int) -> None:
        self.row = row
        self.event: Event | None = None
        """Behind what was enqueued for it last."""
        self._sums: RingSums | None = sums
        self._nbytes = nbytes
        self._digest = ""

    def done(self) -> bool:
        return self._sums is None or (self.event is not None and self.event.query())

    def result(self) -> str:
        sums = self._sums
        if sums is not None:
            if self.event is None:
                raise RuntimeError("no byte of this chunk has passed the GPU")
            sums.wait(self.event)
            self._digest = sums.summing.digest(self.row, self._nbytes)
            self._end()
        return self._digest

    def cancel(self) -> bool:
        """As Sum.cancel; waits until the device does no more for it."""
        if self._sums is not None:
            if self.event is not None:
                with suppress(RuntimeError):  # the device is lost, and nothing runs on it any more
                    self.event.synchronize()
            self._end()
        return True

    def _end(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.give_back(self.row)


class RingSums:
    """The rows of a device's running checksums, and which chunk has which. Any thread."""

    def __init__(self, summing: Summing, rows: int) -> None:
        self.summing = summing
        self._passed: Event | None = None
        self._free = deque(range(rows))
        self._taken: dict[int, RingSum] = {}

    def take(self, nbytes: int) -> RingSum | None:
        """Give a row; None while all are taken."""
        try:
            row = self._free.popleft()
        except IndexError:
            return None
        taken = self._taken[row] = RingSum(self, row, nbytes)
        return taken

    def found(self, rows: Sequence[int], event: Event) -> None:
        """Behind `event` these rows hold what was enqueued until now. Raises RuntimeError for a row that `sum_up` has
        not given out."""
        for row in rows:
            if row == NO_ROW:
                continue
            taken = self._taken.get(row)
            if taken is None:
                raise RuntimeError(f"row {row} of the checksums is not in use: sum_up comes first")
            taken.event = event

    def wait(self, event: Event) -> None:
        """Wait until that has been passed; the device is asked once where many rows end behind the same. Raises
        RuntimeError when it failed."""
        if event is not self._passed:
            event.synchronize()
            self._passed = event

    def give_back(self, row: int) -> None:
        """Free a row for which nothing is enqueued any more, and of which its owner does not ask again."""
        del self._taken[row]
        self._free.append(row)
