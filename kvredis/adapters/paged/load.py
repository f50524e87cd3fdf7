"""One load into an engine's pages: chunks by key, head first, for as long as they come and are what was stored.

A chunk has come when its last byte has been copied, its lease was held until then, and its bytes have the checksum that
they were stored with. All that is asked while the next chunks are on their way.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from kvredis.adapters.engine.block import HEADER_BYTES_MAX, Block, open_block
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.load import Intake
from kvredis.adapters.engine.tensors import view_tensor
from kvredis.adapters.transfer.base import Moving, Part, Transfer, wait_for_all
from kvredis.backends.base import Lease
from kvredis.backends.shm.leases import GpuLease
from kvredis.storage.errors import LayoutError

from .jobs import ChunkMove, JobState, MoverContext, MoverTask

logger = logging.getLogger(__name__)

NEAR_S = 0.5e-3
"""A block that is leased so fast, on average, is in memory that both sides share. One that comes through a socket, or
from disk, takes milliseconds."""


HEADS_TOGETHER = 64
HEADS_GROW = 8
HEADS_FIRST = 16
"""Chunks on a GPU are leased together, and their headers read, before the first of them is opened: a header takes the
link no time, but 25 us to be asked and waited for. So many times as many each time, up to HEADS_TOGETHER: the first are
waited for. 60 of 32 MiB came in 13.3 ms, and in 16.3 by eight (two H200s). Where the last load found its chunks there,
HEADS_FIRST are the first: as many as come together while another engine stores them."""


class LeasedChunk:
    """A chunk whose bytes are lent, and look like its layout's. Its holder releases it."""

    def __init__(self, context: MoverContext, move: ChunkMove, lease: Lease, head: memoryview | None) -> None:
        """`head` has the first bytes of a block that is on a GPU. Raises LayoutError where they do not."""
        group = context.groups[move.group]
        is_locked = group.paged.device.type == "cuda"
        whole, tokens = open_block(lease.view, group.layout, head), group.tokens_of(move)
        if whole.tokens < tokens:
            raise LayoutError(f"block covers {whole.tokens} tokens, its pages {tokens}")
        self.move = move
        self.lease = lease
        is_whole = tokens == whole.tokens and group.heads is None
        self.checksum = context.checksums.of(whole.tensor, is_wanted=bool(whole.checksum))
        if isinstance(lease, GpuLease) and not (is_whole and self.checksum.is_found_by(group.transfer, whole.tensor)):
            whole = on_host(lease, whole, is_locked=is_locked)
            self.checksum.drop()
            self.checksum = context.checksums.of(whole.tensor, is_wanted=bool(whole.checksum))
        self.block = excerpt(whole, group.layout, tokens, heads=group.heads, is_locked=is_locked)

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.block.tensor.nbytes

    def part(self, transfer: Transfer) -> Part:
        """What its group's transfer is given next."""
        tensor = self.block.tensor
        return Part(self.move.pages, tensor, row=self.checksum.row_in(transfer, tensor))

    def release(self) -> None:
        """End the lease, when the bytes are not hashed any more."""
        self.checksum.drop()
        self.block = Block(memoryview(b""), 0)
        self.lease.release()


def heads_of(leases: Sequence[Lease | None], *, is_locked: bool) -> list[memoryview | None]:
    """The first bytes of those blocks that are in a server's GPU memory, all of which are waited for once."""
    on_gpu = [lease for lease in leases if isinstance(lease, GpuLease)]
    rooms = torch.empty((len(on_gpu), HEADER_BYTES_MAX), dtype=torch.uint8, pin_memory=is_locked and bool(on_gpu))
    heads = {id(lease): room.numpy().data[: lease.length] for lease, room in zip(on_gpu, rooms, strict=True)}
    try:
        for lease in on_gpu:
            lease.begin_read(heads[id(lease)])
    finally:  # nothing is copied into memory that is another's by then
        for lease in on_gpu:
            lease.settle()
    return [heads.get(id(lease)) for lease in leases]


def on_host(lease: GpuLease, block: Block, *, is_locked: bool) -> Block:
    """A block in a server's GPU memory, copied: processors are to hash it, or to copy a part of it. For a GPU it is in
    page-locked memory."""
    whole = torch.empty(lease.length, dtype=torch.uint8, pin_memory=is_locked).numpy().data
    lease.read_into(whole)
    return block._replace(tensor=whole[lease.length - block.tensor.nbytes :])


def excerpt(
    block: Block, layout: ChunkLayout, tokens: int, *, heads: range | None = None, is_locked: bool = False
) -> Block:
    """The block itself, or a copy of its last tokens or of some heads, for a GPU in page-locked memory: a layer's bytes
    must lie together. Of a load one block is so that is partly there already, or that a window begins in; all are of
    an engine of fewer ranks."""
    if tokens == block.tokens and heads is None:
        return block
    chosen = range(layout.kv_heads) if heads is None else heads
    whole = view_tensor(block.tensor, layout, block.tokens)
    chosen_part = whole[:, :, block.tokens - tokens :, chosen.start : chosen.stop]
    tail = torch.empty(chosen_part.shape, dtype=chosen_part.dtype, pin_memory=is_locked).copy_(chosen_part)
    return Block(tail.view(-1).view(torch.uint8).numpy().data, tokens, block.checksum)


def touch_loaded(context: MoverContext, job: JobState) -> None:
    """Say that what has come of a load was used once: its head was used first, which would make it the first to be
    evicted."""
    if job.moved:
        context.backend.touch([move.key for move in job.moves[: job.moved]])


class ChunkLoad(MoverTask):
    """Loads a job's moves, on a GPU into pages that are free behind `after`. The job's `moved` is right whatever
    happens. Until `clean_up` the last leases are held.

    Behind its last copies a device would rest until the next load has leased its chunks, planned and asked for the
    first. So `run` has the next one `begin` (`meanwhile` is told how many bytes may be under way) while its own last
    copies move."""

    def __init__(
        self,
        context: MoverContext,
        job: JobState,
        after: torch.cuda.Event | None = None,
        meanwhile: Callable[[int], None] = lambda left_bytes: None,
    ) -> None:
        super().__init__(context, [job])
        self._job = job
        self._after = after
        self._meanwhile = meanwhile
        self._intake = Intake(context.backend, self._refuse, lambda: context.counters.add(expired_chunks=1))
        self._leases: Generator[Lease | None, None, None] | None = None
        self._leased = 0
        self._lease_s = 0.0
        """Moves whose chunks have been leased, and how long that took."""
        self._at_hand: deque[tuple[Lease | None, memoryview | None]] = deque()
        """Those of them that have not been taken, and the heads of blocks on a GPU."""
        self._taken = 0
        self._failure: BaseException | None = None
        self._waits = True
        """Whether it may wait for its own copies."""
        self._next: list[LeasedChunk] = []  # of one group
        self._next_bytes = 0
        self._piece_bytes = context.piece_bytes  # the first is waited for; asking for those behind it is to cost little
        self._under_way: deque[tuple[list[LeasedChunk], Moving]] = deque()
        self._under_way_bytes = 0
        self._gap = False
        """Whether a chunk has not come: what is behind it is of no use."""
        self._is_sent = False
        """Whether all that is to come is under way."""
        self._judged: list[LeasedChunk] = []
        """The last ones, which the engine does not wait to see released."""

    def begin(self, left_bytes: int) -> None:
        """Ask for chunks while so many bytes may be under way, and wait for none of them: an earlier load does, and may
        ask again. `run` goes on from there, on the same thread, and raises what fails here, behind which nothing more
        is asked for: a chunk that comes would count in place of one that has failed."""
        self._waits = False
        try:
            while self._failure is None and not self._is_sent and self._under_way_bytes + self._next_bytes < left_bytes:
                self._take()
        except BaseException as error:  # it is this load's, whatever it is
            self._failure = error
        finally:
            self._waits = True

    def cancel(self) -> None:
        """As Task.cancel, before it has begun. Then its copies write pages, which `run` waits for."""
        if not self.began_s:
            super().cancel()

    def _run(self) -> None:
        """Load until the first chunk that does not come, or until the job is cancelled."""
        try:
            if self._failure is not None:
                raise self._failure
            while not self._is_sent:
                self._take()
            while self._under_way and not self._gap:
                if self._has_time:
                    self._meanwhile(self._context.options.window_bytes - self._under_way_bytes)
                self._settle()
        finally:
            self._drop()
        self._intake.forget()

    def _take(self) -> None:
        """Lease the next chunk. Behind the last one, or the first that does not come, all is sent."""
        moves = self._job.moves
        if self._leases is None:
            self._leases = self._context.backend.load([move.key for move in moves])
        if not self._at_hand:
            self._lease(self._leases)
        move, (lease, head) = moves[self._taken], self._at_hand.popleft()
        self._taken += 1
        chunk, is_last = self._open(move, lease, head), self._taken == len(moves)
        if chunk is not None and self._add(chunk, is_last=is_last) and not is_last:
            return
        self._leases.close()
        if not self._gap and not self._job.cancelled:
            self._send(is_last=True)
        self._is_sent = True

    def _lease(self, leases: Iterator[Lease | None]) -> None:
        """Lease the next chunk; behind one that is on a GPU several, since their heads are waited for."""
        last = self._context.last_lease
        together = min(HEADS_GROW * self._leased or HEADS_FIRST, HEADS_TOGETHER) if last.is_on_gpu else 1
        count = min(together, len(self._job.moves) - self._leased)
        began_s = time.perf_counter()
        some: list[Lease | None] = []
        try:
            while len(some) < count and (not some or some[-1] is not None):
                some.append(next(leases))
            is_locked = self._context.groups[0].paged.device.type == "cuda"
            heads = heads_of(some, is_locked=is_locked)
        except BaseException:
            for lease in some:
                if lease is not None:
                    lease.release()
            raise
        last.is_on_gpu = isinstance(some[-1], GpuLease)
        if last.is_on_gpu:
            self._piece_bytes = self._context.gpu_piece_bytes
        self._lease_s += time.perf_counter() - began_s
        self._leased += len(some)
        self._at_hand += zip(some, heads, strict=True)

    def clean_up(self) -> None:
        """What the engine does not wait for: the last leases end, and keys are touched, those of a part with the
        whole."""
        for chunk in self._judged:
            chunk.release()
        self._judged = []
        if self._job.part_of is None:
            touch_loaded(self._context, self._job)

    def _open(self, move: ChunkMove, lease: Lease | None, head: memoryview | None) -> LeasedChunk | None:
        """The chunk that was leased, or None: it is missing, or not what the layout says. Its lease has ended then."""
        if lease is None:
            self._context.counters.add(missing_chunks=1)
            return None
        try:
            return LeasedChunk(self._context, move, lease, head)
        except LayoutError as error:
            self._intake.refuse(move.key, lease, error)
            lease.release()
        except BaseException:  # no memory for a part of it, say
            lease.release()
            raise
        return None

    def _add(self, chunk: LeasedChunk, *, is_last: bool) -> bool:
        """Take a chunk along, and say whether to go on. The last one waits for the end of all, and is sent as such."""
        if self._next and self._next[0].move.group != chunk.move.group:
            self._send()
        self._next.append(chunk)
        self._next_bytes += chunk.nbytes
        if self._job.cancelled:
            return False
        if self._next_bytes >= self._piece_bytes and not is_last:
            self._send()
            if not self._context.last_lease.is_on_gpu:
                self._piece_bytes = min(2 * self._piece_bytes, self._context.piece_bytes_max)
            while self._under_way and not self._gap and ((self._waits and self._is_full) or self._is_known):
                self._settle()
        return not self._gap

    @property
    def _has_time(self) -> bool:
        """Whether the next load can be begun at once while a device still copies, or adds up, for this one."""
        is_near = self._lease_s < NEAR_S * self._leased
        chunks, moving = self._under_way[-1]
        is_busy = not moving.done or any(each.checksum.is_passing and not each.checksum.is_known for each in chunks)
        return is_near and is_busy and not self._context.bandwidth.is_bound

    @property
    def _is_full(self) -> bool:
        return self._under_way_bytes > self._context.options.window_bytes

    @property
    def _is_known(self) -> bool:
        """Whether the oldest batch can be judged at once: the sooner its leases end the better."""
        chunks, moving = self._under_way[0]
        return moving.done and all(chunk.checksum.is_known for chunk in chunks)

    def _send(self, *, is_last: bool = False) -> None:
        if self._next:
            self._context.bandwidth.take(self._next_bytes, is_load=True)
            transfer = self._context.groups[self._next[0].move.group].transfer
            parts = [chunk.part(transfer) for chunk in self._next]
            moving = transfer.load(parts, after=self._after, is_last=is_last)
            chunks = self._next
            self._under_way.append((chunks, moving))
            self._under_way_bytes += self._next_bytes
            self._next, self._next_bytes = [], 0
            for chunk in chunks:
                chunk.checksum.begin()  # beside the copies, and behind them where there is one core for both

    def _settle(self) -> None:
        """Wait for the oldest batch, and judge it."""
        chunks, moving = self._under_way[0]
        moving.wait()
        self._under_way.popleft()
        nbytes = sum(chunk.nbytes for chunk in chunks)
        self._under_way_bytes -= nbytes
        come = 0
        try:
            while come < len(chunks) and self._is_good(chunks[come]):
                come += 1
        finally:
            nbytes = sum(chunk.nbytes for chunk in chunks[:come])
            self._job.count(come, sum(chunk.block.tokens for chunk in chunks[:come]), nbytes)
            self._context.counters.add(loaded_chunks=come, loaded_bytes=nbytes)
            if self._is_sent and not self._under_way:
                self._judged = chunks
            else:
                for chunk in chunks:
                    chunk.release()
        self._gap = come < len(chunks)

    def _is_good(self, chunk: LeasedChunk) -> bool:
        """Whether what has been copied, to the last byte, is what was stored."""
        checksum = chunk.checksum.result()
        if checksum and checksum != chunk.block.checksum:
            self._intake.refuse(chunk.move.key, chunk.lease, LayoutError("its bytes do not have its checksum"))
            return False
        return self._intake.is_held(chunk.lease)

    def _refuse(self, key: bytes, why: LayoutError) -> None:
        self._context.counters.add(corrupt_chunks=1)
        text = "A stored block was refused and counts as a miss: %s: %s"
        logger.warning(text, key.decode("ascii", "replace"), why)

    def _drop(self) -> None:
        """End what is left: no page is written behind this, whatever the backend raises where its part ends."""
        try:
            if self._leases is not None:
                self._leases.close()
        finally:
            wait_for_all(moving for _, moving in self._under_way)
            for chunks in (self._next, *(chunks for chunks, _ in self._under_way)):
                for chunk in chunks:
                    chunk.release()
            for lease, _ in self._at_hand:
                if lease is not None:
                    lease.release()
            self._at_hand.clear()
            self._under_way.clear()
            self._next = []
