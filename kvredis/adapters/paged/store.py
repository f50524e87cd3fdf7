"""One store out of an engine's pages: which chunks are new, in which order they go, when they can be seen.

Nothing is visible before it is whole. The tail is committed before the head, and what is stored of the head touched in
between, so that whatever eviction leaves of a prompt is a prefix (as engine/store.py does it for tensors).
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from itertools import groupby

import torch

from kvredis.adapters.engine.block import encode_header
from kvredis.adapters.engine.store import TOUCH_KEY_BYTES, TOUCH_SHARE
from kvredis.adapters.transfer.base import NO_ROW, Moving, Part, Sum
from kvredis.backends.base import Reservation

from .jobs import ChunkMove, Errand, Means

logger = logging.getLogger(__name__)


class ReservedChunk:
    """Room for one chunk's block, which commit makes visible with its header. Its holder commits or aborts it."""

    __slots__ = ("_reservation", "_room", "_row", "move", "passing", "tensor", "tokens")

    def __init__(self, means: Means, move: ChunkMove, reservation: Reservation) -> None:
        group = means.groups[move.group]
        self.move = move
        self.tokens = group.tokens_of(move)
        self._reservation = reservation
        self._room = reservation.view
        self.tensor = self._room[self._room.nbytes - group.layout.chunk_bytes(self.tokens) :]
        self.passing: Sum | None = None
        """Its checksum, where the transfer finds it."""
        self._row: int | None = None  # not decided yet

    def row_in(self, means: Means) -> int:
        """Where its group's transfer, which is given it next, adds up its checksum; NO_ROW where it does not. The first
        answer is the last: of a tensor that is on its way a sum would lack what has passed."""
        if self._row is None:
            self.passing = means.checking.passing(means.groups[self.move.group].transfer, self.tensor)
            self._row = NO_ROW if self.passing is None else self.passing.row
        return self._row

    def commit(self, means: Means, checksum: str) -> None:
        """Make it visible; `tensor` has been filled."""
        header = encode_header(means.groups[self.move.group].layout, self.tokens, checksum)
        self._room[: len(header)] = header
        self.tensor = self._room = memoryview(b"")
        self._reservation.commit()

    def abort(self) -> None:
        """Give the room back; nothing is copied into it any more."""
        if self.passing is not None:
            self.passing.cancel()
        self.tensor = self._room = memoryview(b"")
        self._reservation.abort()


def reserve(means: Means, move: ChunkMove) -> ReservedChunk | None:
    """Room for a chunk, None when there is none."""
    length = means.groups[move.group].value_bytes(move, is_checked=means.checking.is_on)
    reservation = means.backend.reserve(move.key, length)
    return None if reservation is None else ReservedChunk(means, move, reservation)


class Filled:
    """Chunks that are filled, and whose checksums are on their way; `commit` or `abort` ends it."""

    def __init__(self, means: Means, errand: Errand, chunks: list[ReservedChunk]) -> None:
        self.nbytes = sum(chunk.tensor.nbytes for chunk in chunks)
        self._means = means
        self._errand = errand
        self._chunks = [(chunk, chunk.passing or means.checking.sum_of(chunk.tensor)) for chunk in chunks]

    @property
    def is_known(self) -> bool:
        """Whether `commit` waits for nothing."""
        return all(checksum is None or checksum.done() for _, checksum in self._chunks)

    def commit(self) -> None:
        """Make them visible in their order, and count them. If one fails, those behind it are aborted."""
        try:
            for chunk, checksum in self._chunks:
                nbytes = chunk.tensor.nbytes
                chunk.commit(self._means, "" if checksum is None else checksum.result())
                self._errand.come += 1
                self._errand.tokens += chunk.tokens
                self._errand.nbytes += nbytes
                self._means.counters.add(stored_chunks=1, stored_bytes=nbytes)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give back the room of those that were not committed, when it is not hashed any more."""
        for chunk, checksum in self._chunks:
            if checksum is not None and not checksum.cancel():
                checksum.result()
            chunk.abort()


def by_group(moves: list[ChunkMove]) -> Iterator[list[ChunkMove]]:
    """The moves of one group after the other."""
    for _, run in groupby(moves, key=lambda move: move.group):
        yield list(run)


class ChunkStoring:
    """Stores an errand's moves behind the event `after`, if any. `run` may raise what backend and transfer raise; when
    it has ended no page is read any more, and no room held."""

    def __init__(self, means: Means, errand: Errand, after: torch.cuda.Event | None) -> None:
        self._means = means
        self._errand = errand
        self._after = after
        self._refused = 0
        self._next: list[ReservedChunk] = []
        self._under_way: deque[tuple[list[ReservedChunk], Moving]] = deque()
        self._filled: deque[Filled] = deque()
        self._held_bytes = 0
        """Reserved for what is under way, or filled."""
        self._head: list[bytes] = []
        """Keys before those that are being written."""
        self._untouched_bytes = 0
        """Reserved and committed since the head was touched last."""

    def run(self) -> None:
        """Store what is not there yet."""
        with self._means.bandwidth.row(is_load=False):
            self._run()

    def behind(self) -> None:
        """Nothing is left to do."""

    def _run(self) -> None:
        if not self._errand.is_sound():
            self._means.counters.add(dropped_stores=len(self._errand.moves))
            return
        try:
            for moves in by_group(self._errand.moves):
                if self._errand.cancelled:
                    break
                self._store_group(moves)
        finally:
            self._drop()

    def _store_group(self, moves: list[ChunkMove]) -> None:
        backend, group = self._means.backend, self._means.groups[moves[0].group]
        keys = [move.key for move in moves]
        head = present = backend.match(keys)
        missing = sum(group.tokens_of(move) for move in moves[present:])
        logger.info(
            "Storing KV cache for %d out of %d tokens for request %s", missing, self._errand.total, self._errand.request
        )
        self._refused = 0
        while not self._refused and not self._errand.cancelled and (stop := self._room(moves, head)) > head:
            self._store_run(moves[head:stop], keys[:head])
            head = stop
        if head > present:
            backend.touch(keys)
        left = 0 if self._errand.cancelled else len(moves) - head
        self._means.counters.add(present_chunks=present, refused_stores=self._refused, dropped_stores=left)
        if left or self._refused:
            text = "Dropped %d chunks of request %s: no more is taken for now"
            logger.info(text, left + self._refused, self._errand.request)

    def _room(self, moves: list[ChunkMove], head: int) -> int:
        """How many of `moves` can be stored now if the first `head` are; no more if it is not worth touching these."""
        left = len(moves) - head
        if not left:
            return head
        length = self._means.groups[moves[0].group].value_bytes(moves[0], is_checked=self._means.checking.is_on)
        worth = 1 + head * TOUCH_KEY_BYTES * TOUCH_SHARE // length
        return head + min(self._means.backend.room(length, min(left, worth)), left)

    def _store_run(self, moves: list[ChunkMove], head: list[bytes]) -> None:
        """Write these from the last to the first; `head` are the keys before them."""
        self._head = head
        for move in reversed(moves):
            if self._errand.cancelled:
                break
            chunk = reserve(self._means, move)
            if chunk is None:  # those nearer to the head are still worth storing
                self._touch_head(0)
                self._refused += 1
                continue
            self._next.append(chunk)  # ours to give back from here on
            self._touch_head(chunk.tensor.nbytes)  # room is taken from who is oldest
            if sum(each.tensor.nbytes for each in self._next) >= self._means.piece_bytes:
                self._send()
                self._advance()
                while self._held_bytes > self._means.options.window_bytes:
                    self._settle()
        if not self._errand.cancelled:
            self._send()
        while self._under_way or self._filled:
            self._settle()

    def _send(self) -> None:
        if self._next:
            nbytes = sum(chunk.tensor.nbytes for chunk in self._next)
            self._means.bandwidth.take(nbytes, is_load=False)
            parts = [Part(chunk.move.pages, chunk.tensor, row=chunk.row_in(self._means)) for chunk in self._next]
            transfer = self._means.groups[self._next[0].move.group].transfer
            self._under_way.append((self._next, transfer.store(parts, after=self._after)))
            self._held_bytes += nbytes
            self._next = []

    def _advance(self) -> None:
        """Take every step that waits for nothing."""
        while self._under_way and self._under_way[0][1].done:
            self._fill()
        while self._filled and self._filled[0].is_known:
            self._commit()

    def _settle(self) -> None:
        """Take one step, waiting for it: all that has moved is hashed at the same time."""
        if self._under_way:
            self._fill()
        else:
            self._commit()
        self._advance()

    def _fill(self) -> None:
        """Wait for the oldest batch to have moved, and let it be hashed."""
        chunks, moving = self._under_way[0]
        moving.wait()
        self._filled.append(Filled(self._means, self._errand, chunks))  # may find no thread to hash them
        self._under_way.popleft()

    def _commit(self) -> None:
        """Make the oldest batch visible."""
        filled = self._filled.popleft()
        self._held_bytes -= filled.nbytes
        try:
            self._touch_head(filled.nbytes)
        except BaseException:
            filled.abort()
            raise
        filled.commit()

    def _touch_head(self, nbytes: int) -> None:
        """So many bytes more are to be newer than what is before them: keep that newer."""
        self._untouched_bytes += nbytes
        if self._head and self._untouched_bytes >= len(self._head) * TOUCH_KEY_BYTES * TOUCH_SHARE:
            self._means.backend.touch(self._head)
            self._untouched_bytes = 0

    def _drop(self) -> None:
        """Give back what is left."""
        for chunks, moving in self._under_way:
            with contextlib.suppress(RuntimeError):  # the device failed, which was told already
                moving.wait()
            self._next += chunks
        for chunk in self._next:
            chunk.abort()
        for filled in self._filled:
            filled.abort()
        self._under_way.clear()
        self._filled.clear()
        self._next = []
