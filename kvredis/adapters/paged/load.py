"""One load into an engine's pages: chunks by key, head first, for as long as they come and are what was stored.

A chunk has come when its last byte has been copied, its lease was held until then, and its bytes have the checksum that
they were stored with. All that is asked while the next chunks are on their way.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from kvredis.adapters.engine.block import Block, open_block
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import view_tensor
from kvredis.adapters.transfer.base import Moving, Part
from kvredis.backends.base import Lease
from kvredis.storage.errors import LayoutError

from .jobs import ChunkMove, Errand, Means
from .verify import Verdict

logger = logging.getLogger(__name__)

NEAR_S = 0.5e-3
"""A block that is leased so fast, on average, is in memory that both sides share. One that comes through a socket, or
from disk, takes milliseconds."""


@dataclass(slots=True)
class LeasedChunk:
    """A chunk whose bytes are lent, and look like its layout's. Its holder releases it."""

    move: ChunkMove
    lease: Lease
    block: Block
    verdict: Verdict

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.block.tensor.nbytes

    def release(self) -> None:
        """End the lease, when the bytes are not hashed any more."""
        self.verdict.drop()
        self.block = Block(memoryview(b""), 0)
        self.lease.release()


class Intake:
    """Takes leases in and tells good chunks from others, which it counts. `forget` deletes blocks that were damaged:
    they would be found, and missed, again and again."""

    def __init__(self, means: Means) -> None:
        self._counters = means.counters
        self._means = means
        self._damaged: list[bytes] = []

    def open(self, move: ChunkMove, lease: Lease | None) -> LeasedChunk | None:
        """The chunk that was leased, or None: it is missing, or not what the layout says. Its lease has ended then."""
        if lease is None:
            self._counters.add(missing_chunks=1)
            return None
        group = self._means.groups[move.group]
        try:
            block = open_block(lease.view, group.layout)
            if block.tokens < group.tokens_of(move):
                raise LayoutError(f"block covers {block.tokens} tokens, its pages {group.tokens_of(move)}")
            wanted = last_tokens(block, group.layout, group.tokens_of(move))
        except LayoutError as error:
            self._refuse(move, lease, str(error))
            lease.release()
            return None
        except BaseException:  # no memory for a part of it, say
            lease.release()
            raise
        return LeasedChunk(move, lease, wanted, self._means.checking.verdict(block))

    def judge(self, chunk: LeasedChunk) -> bool:
        """Whether what has been copied, to the last byte, is what was stored."""
        if not chunk.verdict.wait():
            self._refuse(chunk.move, chunk.lease, "its bytes do not have its checksum")
            return False
        if not chunk.lease.held:
            self._counters.add(expired_chunks=1)
            return False
        return True

    def forget(self) -> None:
        """Delete what was damaged."""
        if self._damaged:
            self._means.backend.delete(self._damaged)
            self._damaged = []

    def _refuse(self, move: ChunkMove, lease: Lease, why: str) -> None:
        if not lease.held:  # the memory is another value's by now
            self._counters.add(expired_chunks=1)
            return
        self._counters.add(corrupt_chunks=1)
        self._damaged.append(move.key)
        logger.warning(
            "A stored block was refused and counts as a miss: %s: %s", move.key.decode("ascii", "replace"), why
        )


def last_tokens(block: Block, layout: ChunkLayout, tokens: int) -> Block:
    """The block itself, or a copy of its last tokens: a layer's bytes must lie together, and of a block that is partly
    there already, or that a window begins in, only one of a load is so."""
    if tokens == block.tokens:
        return block
    tail = view_tensor(block.tensor, layout, block.tokens)[:, :, block.tokens - tokens :].contiguous()
    return Block(tail.view(-1).view(torch.uint8).numpy().data, tokens, block.checksum)


def note_come(means: Means, errand: Errand, chunks: list[LeasedChunk]) -> None:
    """Count chunks that have come."""
    nbytes = sum(chunk.nbytes for chunk in chunks)
    errand.come += len(chunks)
    errand.tokens += sum(chunk.block.tokens for chunk in chunks)
    errand.nbytes += nbytes
    means.counters.add(loaded_chunks=len(chunks), loaded_bytes=nbytes)


class ChunkLoading:
    """Loads an errand's moves, on a GPU into pages that are free behind `after`; `run` may raise what backend and
    transfer raise. The errand's `come` is right whatever happens, and when `run` has ended nothing is written any
    more. `behind` is called in any case: until then the last leases are held.

    Behind its last copies a device would rest until the next load has leased its chunks, planned and asked for the
    first. So `run` has the next one `begin` (`meanwhile` is told how
    many bytes may be under way) while its own last copies move."""

    def __init__(
        self,
        means: Means,
        errand: Errand,
        after: torch.cuda.Event | None = None,
        meanwhile: Callable[[int], None] = lambda left_bytes: None,
    ) -> None:
        self._means = means
        self._errand = errand
        self._after = after
        self._meanwhile = meanwhile
        self._intake = Intake(means)
        self._leases: Generator[Lease | None, None, None] | None = None
        self._leased = 0
        self._lease_s = 0.0
        """Moves whose chunks have been leased, and how long that took."""
        self._failure: Exception | None = None
        self._waits = True
        """Whether it may wait for its own copies."""
        self._next: list[LeasedChunk] = []  # of one group
        self._next_bytes = 0
        self._piece_bytes = means.piece_bytes  # the first is waited for; asking for those behind it is to cost little
        self._under_way: deque[tuple[list[LeasedChunk], Moving]] = deque()
        self._under_way_bytes = 0
        self._gap = False
        """Whether a chunk has not come: what is behind it is of no use."""
        self._is_sent = False
        """Whether all that is to come is under way."""
        self._judged: list[LeasedChunk] = []
        """The last ones; who waits for the load need not wait until the backend has them back."""

    def begin(self, left_bytes: int) -> None:
        """Ask for chunks while so many bytes may be under way, and wait for none of them: an earlier load does. `run`
        goes on from there, on the same thread, and raises what fails here."""
        self._waits = False
        try:
            while not self._is_sent and self._under_way_bytes + self._next_bytes < left_bytes:
                self._take()
        except Exception as error:
            self._failure = error
        finally:
            self._waits = True

    def run(self) -> None:
        """Load until the first chunk that does not come, or until the errand is cancelled."""
        with self._means.bandwidth.row(is_load=True):
            self._run()

    def _run(self) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            while not self._is_sent:
                self._take()
            while self._under_way and not self._gap:
                if self._has_time:
                    self._meanwhile(self._means.options.window_bytes - self._under_way_bytes)
                self._settle()
        finally:
            self._drop()
        self._intake.forget()

    def _take(self) -> None:
        """Lease the next chunk. Behind the last one, or the first that does not come, all is sent."""
        moves = self._errand.moves
        if self._leases is None:
            self._leases = self._means.backend.load([move.key for move in moves])
        move, began_s = moves[self._leased], time.perf_counter()
        lease = next(self._leases)
        self._lease_s += time.perf_counter() - began_s
        self._leased += 1
        chunk, is_last = self._intake.open(move, lease), self._leased == len(moves)
        if chunk is not None and self._add(chunk, is_last=is_last) and not is_last:
            return
        self._leases.close()
        if not self._gap and not self._errand.cancelled:
            self._send(is_last=True)
        self._is_sent = True

    def behind(self) -> None:
        """What the engine does not wait for: the last leases end, and keys are touched."""
        for chunk in self._judged:
            chunk.release()
        self._judged = []
        if self._errand.come:  # the head was used first, which would make it the first to be evicted
            self._means.backend.touch([move.key for move in self._errand.moves[: self._errand.come]])

    def _add(self, chunk: LeasedChunk, *, is_last: bool) -> bool:
        """Take a chunk along, and say whether to go on. The last one waits for the end of all, and is sent as such."""
        if self._next and self._next[0].move.group != chunk.move.group:
            self._send()
        self._next.append(chunk)
        self._next_bytes += chunk.nbytes
        if self._errand.cancelled:
            return False
        if self._next_bytes >= self._piece_bytes and not is_last:
            self._send()
            self._piece_bytes = min(2 * self._piece_bytes, self._means.piece_bytes_max)
            while self._under_way and not self._gap and ((self._waits and self._is_full) or self._is_known):
                self._settle()
        return not self._gap

    @property
    def _has_time(self) -> bool:
        """Whether the next load can be begun at once while a device still copies for this one."""
        is_near = self._lease_s < NEAR_S * self._leased
        return is_near and not self._means.bandwidth.is_bound and not self._under_way[-1][1].done

    @property
    def _is_full(self) -> bool:
        return self._under_way_bytes > self._means.options.window_bytes

    @property
    def _is_known(self) -> bool:
        """Whether the oldest batch can be judged at once: the sooner its leases end the better."""
        chunks, moving = self._under_way[0]
        return moving.done and all(chunk.verdict.is_known for chunk in chunks)

    def _send(self, *, is_last: bool = False) -> None:
        if self._next:
            self._means.bandwidth.take(self._next_bytes, is_load=True)
            transfer = self._means.groups[self._next[0].move.group].transfer
            parts = [Part(chunk.move.pages, tensor := chunk.block.tensor, row=chunk.verdict.row_in(transfer, tensor))
                     for chunk in self._next]  # fmt: skip
            moving = transfer.load(parts, after=self._after, is_last=is_last)
            self._under_way.append((self._next, moving))
            for chunk in self._next:
                chunk.verdict.begin()  # beside the copies, and behind them where there is one core for both
            self._under_way_bytes += self._next_bytes
            self._next, self._next_bytes = [], 0

    def _settle(self) -> None:
        """Wait for the oldest batch, and judge it."""
        chunks, moving = self._under_way[0]
        moving.wait()
        self._under_way.popleft()
        nbytes = sum(chunk.nbytes for chunk in chunks)
        self._under_way_bytes -= nbytes
        come = 0
        try:
            while come < len(chunks) and self._intake.judge(chunks[come]):
                come += 1
        finally:
            note_come(self._means, self._errand, chunks[:come])
            if self._is_sent and not self._under_way:
                self._judged = chunks
            else:
                for chunk in chunks:
                    chunk.release()
        self._gap = come < len(chunks)

    def _drop(self) -> None:
        """End what is left: no page is written behind this."""
        if self._leases is not None:
            self._leases.close()
        for chunks, moving in self._under_way:
            with contextlib.suppress(RuntimeError):  # the device failed, which was told already
                moving.wait()
            self._next += chunks
        for chunk in self._next:
            chunk.release()
        self._under_way.clear()
        self._next = []
