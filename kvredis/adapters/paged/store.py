"""One store out of an engine's pages: which chunks are new, how their bytes come, when they can be seen.

The order and the rules of engine/store.py hold. Here chunks leave whole, in batches; layerwise_store.py has them leave
layer by layer. Both reserve a ReservedChunk for each, and commit it when its bytes have come and its checksum is known.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby, takewhile
from math import ceil

import torch

from kvredis.adapters.engine.store import PrefixOrder, ReservedBlock
from kvredis.adapters.transfer.base import Moving, Part, Transfer, wait_for_all
from kvredis.backends.base import Reservation
from kvredis.backends.shm.gpu_writer import GpuReservation

from .jobs import GPU_PART, ChunkMove, JobState, MoverContext, MoverTask, pages_of

logger = logging.getLogger(__name__)

TOLD_BYTES = 4 * 1024 * 1024
"""Layers of a chunk leave together until they are so much: each message takes the interpreter, and a server's threads
copy no less each."""


class ReservedChunk(ReservedBlock):
    """Room for the block of one move, and its checksum."""

    def __init__(self, context: MoverContext, move: ChunkMove, reservation: Reservation) -> None:
        group = context.groups[move.group]
        super().__init__(reservation, group.layout, group.tokens_of(move))
        self.move = move
        self.checksum = context.checksums.of(self.tensor)
        self.gpu_bytes = reservation.memory_bytes if isinstance(reservation, GpuReservation) else 0
        """How much GPU memory the server has, where the room is there."""
        self._told = 0
        """Bytes of which the backend knows that they are there."""

    def part(self, transfer: Transfer) -> Part:
        """What its group's transfer is given next."""
        return Part(self.move.pages, self.tensor, row=self.checksum.row_in(transfer, self.tensor))

    @property
    def is_on_gpu(self) -> bool:
        """Whether the room is a server's GPU's."""
        return bool(self.gpu_bytes)

    def has_layers(self, count: int, *, is_last: bool) -> None:
        """Note that its first `count` layers have come. They may leave when they are as much as is worth a message."""
        stop = self.tensor.nbytes // self._layout.layers * count
        if is_last or stop - self._told >= TOLD_BYTES:
            self.filled(self._told, stop)
            self._told = stop

    def abort(self) -> None:
        """As ReservedBlock.abort; nothing is copied into the room any more, nor hashed."""
        self.checksum.drop()
        super().abort()


def alike(moves: Sequence[ChunkMove]) -> Sequence[ChunkMove]:
    """The first moves of one group whose chunks have as many pages as the first one's."""
    wanted = len(moves[0].pages)
    return list(takewhile(lambda move: len(move.pages) == wanted, moves))


def reserve(context: MoverContext, moves: Sequence[ChunkMove]) -> list[ReservedChunk]:
    """Room for chunks that are alike, up to the first for which there is none: also where that is on a GPU, and a
    processor would have to hash it."""
    group, nbytes = context.groups[moves[0].group], context.value_bytes(moves[0])
    reservations = context.backend.reserve_all([move.key for move in moves], nbytes)
    chunks: list[ReservedChunk] = []
    with ExitStack() as undo:
        for reservation in reservations:
            undo.callback(reservation.abort)
        for move, reservation in zip(moves, reservations, strict=False):
            chunk = ReservedChunk(context, move, reservation)
            undo.callback(chunk.abort)
            if chunk.is_on_gpu and not chunk.checksum.is_found_by(group.transfer, chunk.tensor):
                chunk.abort()
                break
            chunks.append(chunk)
        undo.pop_all()
    for reservation in reservations[len(chunks) :]:
        reservation.abort()
    return chunks


def commit(context: MoverContext, job: JobState, chunks: Sequence[ReservedChunk]) -> None:
    """Make filled chunks visible in their order, and count them. If one fails, those behind it are aborted."""
    try:
        for chunk in chunks:
            chunk.seal(chunk.checksum.result())
        for chunk in chunks:
            nbytes = chunk.tensor.nbytes
            chunk.commit()
            job.count(1, chunk.tokens, nbytes)
            context.counters.add(stored_chunks=1, stored_bytes=nbytes)
    finally:
        for chunk in chunks:
            chunk.abort()


def count_present(context: MoverContext, job: JobState, moves: list[ChunkMove]) -> int:
    """How many of one group's moves, from the head on, are stored already."""
    group = context.groups[moves[0].group]
    present = context.backend.match([move.key for move in moves])
    job.present += present
    missing = sum(group.tokens_of(move) for move in moves[present:])
    logger.info("Storing KV cache for %d out of %d tokens for request %s", missing, job.total, job.request)
    return present


def by_group(moves: list[ChunkMove]) -> Iterator[list[ChunkMove]]:
    """The moves of one group after the other."""
    for _, run in groupby(moves, key=lambda move: move.group):
        yield list(run)


class UnsoundError(Exception):
    """What a job is to store is not what its keys say."""


class ChunkStore(MoverTask):
    """Stores a job's moves behind the event `after`, if any; when `run` has ended no room is held."""

    def __init__(self, context: MoverContext, job: JobState, after: torch.cuda.Event | None) -> None:
        super().__init__(context, [job])
        self._job = job
        self._after = after
        self._refused = 0
        self._next: list[ReservedChunk] = []
        self._under_way: deque[tuple[list[ReservedChunk], Moving]] = deque()
        self._filled: deque[list[ReservedChunk]] = deque()
        self._held_bytes = 0
        """Reserved for what is under way, or filled."""
        self._piece_bytes = context.piece_bytes
        self._window_bytes = context.options.window_bytes

    def _run(self) -> None:
        try:
            for moves in by_group(self._job.moves):
                if self._job.cancelled:
                    break
                self._store_group(moves)
        except UnsoundError:
            self._context.counters.add(dropped_stores=len(self._job.moves))
        finally:
            self._drop()

    def _store_group(self, moves: list[ChunkMove]) -> None:
        context, job = self._context, self._job
        present, self._refused = count_present(context, job, moves), 0
        keys, nbytes = [move.key for move in moves], context.value_bytes(moves[0])
        order = PrefixOrder(context.backend, keys, present, nbytes, head_first=job.head_first)
        for run in order.runs():
            self._store_run([moves[number] for number in run], order)
            if self._refused or job.cancelled:
                break
        order.finish()
        left = 0 if job.cancelled else order.left
        context.counters.add(present_chunks=present, refused_stores=self._refused, dropped_stores=left)
        if left or self._refused:
            text = "Dropped %d chunks of request %s: no more is taken for now"
            logger.info(text, left + self._refused, job.request)

    def _store_run(self, moves: Sequence[ChunkMove], order: PrefixOrder) -> None:
        at, nbytes = 0, self._context.value_bytes(moves[0])
        while at < len(moves) and not self._job.cancelled:
            if not self._job.gone.isdisjoint(pages_of(moves[at])):
                self._context.counters.add(dropped_stores=1)
                at += 1
                continue
            left_bytes = self._piece_bytes - bytes_of(self._next)
            together = alike(moves[at : at + max(ceil(left_bytes / nbytes), 1)])
            chunks = reserve(self._context, together)
            self._next += chunks  # ours to give back from here on
            at += len(together)
            order.written(bytes_of(chunks))  # room is taken from what is oldest
            if len(chunks) < len(together):
                self._refused += 1
                at += len(chunks) + 1 - len(together)
                if self._job.head_first:  # what is behind a gap is worth nothing
                    self._context.counters.add(dropped_stores=len(moves) - at)
                    break  # else those nearer to the head are still worth storing
            if chunks and chunks[-1].is_on_gpu:  # copies between GPUs are sooner over than asked for
                self._piece_bytes = self._context.gpu_piece_bytes
                self._window_bytes = max(self._window_bytes, chunks[-1].gpu_bytes // GPU_PART)
            if bytes_of(self._next) >= self._piece_bytes:
                self._send()
                self._advance(order)
                while self._held_bytes > self._window_bytes:
                    self._settle(order)
        if not self._job.cancelled:
            self._send()
        while self._under_way or self._filled:
            self._settle(order)

    def _send(self) -> None:
        if self._next:
            self._context.bandwidth.take(bytes_of(self._next), is_load=False)
            self._take_pages()
        if self._next:
            transfer = self._context.groups[self._next[0].move.group].transfer
            parts = [chunk.part(transfer) for chunk in self._next]
            self._under_way.append((self._next, transfer.store(parts, after=self._after)))
            self._held_bytes += bytes_of(self._next)
            self._next = []

    def _take_pages(self) -> None:
        """Say which pages are read from now on. The next chunks are without those whose pages are gone."""
        with self._context.changed:
            chunks, self._next = self._next, []
            for chunk in chunks:
                pages = pages_of(chunk.move)
                if self._job.gone.isdisjoint(pages):
                    self._next.append(chunk)
                    self._job.reading |= pages
        gone = set(chunks).difference(self._next)
        for chunk in gone:
            chunk.abort()
        self._context.counters.add(dropped_stores=len(gone))

    def _give_pages_back(self, chunks: Sequence[ReservedChunk]) -> list[ReservedChunk]:
        """The pages of these are read no more. Gives those that were not written meanwhile."""
        job = self._job
        with self._context.changed:
            for chunk in chunks:
                job.reading -= pages_of(chunk.move)
            self._context.changed.notify_all()
            return [chunk for chunk in chunks if job.spoilt.isdisjoint(pages_of(chunk.move))]

    def _advance(self, order: PrefixOrder) -> None:
        """Take every step that waits for nothing."""
        while self._under_way and self._under_way[0][1].done:
            self._fill()
        while self._filled and all(chunk.checksum.is_known for chunk in self._filled[0]):
            self._commit(order)

    def _settle(self, order: PrefixOrder) -> None:
        """Take one step, waiting for it: all that has moved is hashed at the same time. What passes a GPU is hashed
        whether this thread asks or not, and can be seen the sooner."""
        if self._under_way and not (self._filled and self._filled[0][-1].checksum.is_passing):
            self._fill()
        else:
            self._commit(order)
        self._advance(order)

    def _fill(self) -> None:
        """Wait for the oldest batch to have moved, and let it be hashed."""
        chunks, moving = self._under_way[0]
        moving.wait()
        good = self._give_pages_back(chunks)
        if len(good) < len(chunks):
            self._held_bytes -= bytes_of(chunks) - bytes_of(good)
            for chunk in set(chunks).difference(good):
                chunk.abort()
            self._context.counters.add(dropped_stores=len(chunks) - len(good))
        for chunk in good:
            chunk.checksum.begin()  # may find no thread
        if good:
            self._filled.append(good)
        self._under_way.popleft()

    def _commit(self, order: PrefixOrder) -> None:
        """Make the oldest batch visible. Raises UnsoundError where the job may not be stored: the answer is waited for
        here, since it may come behind the forward pass, as the copies do."""
        if not self._job.is_sound():
            raise UnsoundError
        nbytes = bytes_of(self._filled[0])
        self._held_bytes -= nbytes
        order.written(nbytes)
        commit(self._context, self._job, self._filled.popleft())

    def _drop(self) -> None:
        """Give back what is left."""
        wait_for_all(moving for _, moving in self._under_way)
        for chunks in (self._next, *(chunks for chunks, _ in self._under_way), *self._filled):
            for chunk in chunks:
                chunk.abort()
        self._under_way.clear()
        self._filled.clear()
        self._next = []


def bytes_of(chunks: Iterable[ReservedChunk]) -> int:
    """How many bytes chunks have that are reserved and not committed."""
    return sum(chunk.tensor.nbytes for chunk in chunks)
