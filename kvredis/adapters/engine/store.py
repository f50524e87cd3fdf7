"""Storing the chunks of a prompt, wherever their bytes come from: in which order, as far as there is room, and when
they can be seen.

What eviction leaves of a prompt is to be a prefix: the tail is stored before the head, and what is stored of the head
is touched in between. Where another engine waits for it the head goes first, and all is touched at the end. No block is
visible before it is whole. CacheEngine stores tensors of a whole prompt (TensorStore); paged/store.py and
paged/layerwise_store.py store an engine's pages by the same rules.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from kvredis.backends.base import Backend, Reservation
from kvredis.backends.shm.gpu_writer import GpuReservation

from .block import block_bytes, encode_header
from .keys import ChunkKey
from .layout import ChunkLayout
from .tensors import KV, gather, view_tensor

TOUCH_SHARE = 16
"""Touching the stored head while its tail is written may cost 1/16 of the bytes written, no more."""
TOUCH_KEY_BYTES = 128
"""What one key of a touch costs on the wire, roughly."""


class ReservedBlock:
    """Room for one block, which `commit` makes visible with its header. Its holder commits or aborts it; leaving a
    with-block aborts."""

    def __init__(self, reservation: Reservation, layout: ChunkLayout, tokens: int) -> None:
        self.tokens = tokens
        self._reservation = reservation
        self._layout = layout
        self._room = reservation.view
        self.tensor = self._room[self._room.nbytes - layout.chunk_bytes(tokens) :]
        """To be filled; empty once the hold has ended."""

    def filled(self, start: int, stop: int) -> None:
        """Note that bytes `start` to `stop` of `tensor` are there."""
        header = self._room.nbytes - self.tensor.nbytes
        self._reservation.filled(header + start, header + stop)

    def seal(self, checksum: str = "") -> None:
        """Write its header; `tensor` has been filled, or will be before the commit. On a server's GPU the header has
        come when this thread commits, and headers of several blocks are waited for once."""
        header = encode_header(self._layout, self.tokens, checksum)
        if isinstance(self._reservation, GpuReservation):
            self._reservation.write(header)
        else:
            self._room[: len(header)] = header

    def commit(self) -> None:
        """Make it visible; it has been sealed."""
        self.tensor = self._room = memoryview(b"")
        self._reservation.commit()

    def abort(self) -> None:
        """Give the room back; after a commit it does nothing."""
        self.tensor = self._room = memoryview(b"")
        self._reservation.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


class PrefixOrder:
    """The order in which the missing chunks of a prompt are stored. `keys` are those of all its chunks, of which
    `present` are stored, and a block has `nbytes` bytes. `head_first` for an engine that loads what it stores
    meanwhile."""

    def __init__(
        self, backend: Backend, keys: Sequence[bytes], present: int, nbytes: int, *, head_first: bool = False
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._present = present
        self._nbytes = nbytes
        self._head_first = head_first
        self._position = present
        self._head: Sequence[bytes] = ()
        """Keys before the run that is being written."""
        self._untouched_bytes = 0
        """Written since the head was touched last."""

    @property
    def left(self) -> int:
        """Chunks that no run has held: no more are taken for now."""
        return len(self._keys) - self._position

    def runs(self) -> Iterator[range]:
        """Give the numbers of the chunks to be stored next, in their order: all that are missing at once, or from the
        head on as many at a time as there is room for. Where one of a run could not be stored no other is
        asked for: what is behind a gap is worth nothing."""
        while count := self._room():
            start, self._position = self._position, self._position + count
            self._head = self._keys[:start]
            run = range(start, self._position)
            yield run if self._head_first else run[::-1]

    def written(self, nbytes: int) -> None:
        """Note that so many bytes more are, or are about to be, newer than the chunks before the run, and touch those
        where that costs little beside all that was written since."""
        self._untouched_bytes += nbytes
        if self._head and self._untouched_bytes >= len(self._head) * TOUCH_KEY_BYTES * TOUCH_SHARE:
            self._backend.touch(self._head)
            self._untouched_bytes = 0

    def finish(self) -> None:
        """Say of what is stored now that it was all one use."""
        if self._position > self._present:
            self._backend.touch(self._keys[: self._position])

    def _room(self) -> int:
        """Count the chunks that can be stored now; none if so few are not worth a touch of those before them."""
        if not self.left:
            return 0
        worth = 1 + self._position * TOUCH_KEY_BYTES * TOUCH_SHARE // self._nbytes
        return min(self._backend.room(self._nbytes, min(self.left, worth)), self.left)


class TensorStore:
    """Stores chunks of `kv`. The counts are right at any time, whatever `run` raises."""

    def __init__(self, backend: Backend, layout: ChunkLayout, kv: KV) -> None:
        self.tokens = 0
        """Of the chunks that were taken."""
        self.refused = 0
        """Chunks for which there was no room after all."""
        self.dropped = 0
        """Chunks that were not tried: no more is taken for now."""
        self._backend = backend
        self._layout = layout
        self._kv = kv

    def run(self, chunks: list[ChunkKey], present: int) -> None:
        """Store chunks[present:], as far as there is room."""
        nbytes = block_bytes(self._layout, self._layout.chunk_tokens)
        order = PrefixOrder(self._backend, [chunk.key for chunk in chunks], present, nbytes)
        for run in order.runs():
            for number in run:
                order.written(nbytes)
                self._store_chunk(chunks[number])
            if self.refused:
                break
        order.finish()
        self.dropped += order.left

    def _store_chunk(self, chunk: ChunkKey) -> None:
        tokens = chunk.stop - chunk.start
        reservation = self._backend.reserve(chunk.key, block_bytes(self._layout, tokens))
        if reservation is None:  # those nearer to the head are still worth storing
            self.refused += 1
            return
        with ReservedBlock(reservation, self._layout, tokens) as block:
            gather(self._kv, chunk.start, chunk.stop, view_tensor(block.tensor, self._layout, tokens))
            block.seal()
            block.commit()
        self.tokens += tokens
