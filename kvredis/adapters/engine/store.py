"""One store under way: which chunks go, in which order, so that whatever eviction leaves of a prompt is a prefix."""

from kvredis.backends.base import Backend

from .block import block_bytes, encode_header
from .keys import ChunkKey
from .layout import ChunkLayout
from .tensors import KV, gather, view_tensor

TOUCH_SHARE = 16
"""Touching the stored head while its tail is written may cost 1/16 of the bytes written, no more."""
TOUCH_KEY_BYTES = 128
"""What one key of a touch costs on the wire, roughly."""


class Storing:
    """Writes chunks of `kv` to the backend. The counts are right at any time, whatever `run` raises."""

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

    def run(self, keys: list[ChunkKey], present: int) -> None:
        """Write keys[present:], all at once or from the head on as many at a time as there is room for. Ends at the
        first chunk that is not taken: what is behind a gap is worth nothing."""
        head = present
        while not self.refused and (stop := self._room(keys, head)) > head:
            self._store_chunks(keys[:stop], head)
            head = stop
        self.dropped += len(keys) - head

    def _room(self, keys: list[ChunkKey], head: int) -> int:
        """How many of `keys` can be stored now if the first `head` are; no more if it is not worth a touch of these."""
        left = len(keys) - head
        if not left:
            return head
        length = block_bytes(self._layout, self._layout.chunk_tokens)
        return head + min(self._backend.room(length, min(left, self._touch_every(head))), left)

    def _touch_every(self, head: int) -> int:
        """Chunks to be written for each touch of `head` others."""
        return 1 + head * TOUCH_KEY_BYTES * TOUCH_SHARE // self._layout.chunk_bytes()

    def _store_chunks(self, keys: list[ChunkKey], present: int) -> None:
        """Write keys[present:] from the last to the first."""
        head = [chunk.key for chunk in keys[:present]]
        touch_every = self._touch_every(present)
        for count, chunk in enumerate(reversed(keys[present:])):
            if head and count % touch_every == 0:
                self._backend.touch(head)
            if self._store_chunk(chunk):
                self.tokens += chunk.stop - chunk.start
            else:  # those nearer to the head are still worth storing
                self.refused += 1
        self._backend.touch([chunk.key for chunk in keys])

    def _store_chunk(self, chunk: ChunkKey) -> bool:
        tokens = chunk.stop - chunk.start
        reservation = self._backend.reserve(chunk.key, block_bytes(self._layout, tokens))
        if reservation is None:
            return False
        with reservation:
            header = encode_header(self._layout, tokens)
            reservation.view[: len(header)] = header
            block = view_tensor(reservation.view[len(header) :], self._layout, tokens)
            gather(self._kv, chunk.start, chunk.stop, block)
            reservation.commit()
        return True
