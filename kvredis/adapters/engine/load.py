"""Loading blocks: which of those that are lent are good, and what becomes of the others (Intake); and one load under
way, blocks into the engine's tensors, head first, for as long as they come and are worth it (TensorLoad).

Into a GPU's memory a few blocks are on their way at a time, and leases end behind their copies: while one is copied the
next is opened.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass

import torch

from kvredis.backends.base import Backend, Lease, Tier
from kvredis.storage.errors import LayoutError

from .block import block_bytes, open_block
from .break_even import BreakEven, Piece, Watch
from .keys import ChunkKey
from .layout import ChunkLayout
from .tensors import KV, event_on, gpus_of, scatter, view_tensor

ON_THEIR_WAY = 4
"""Blocks that a GPU is given before the first of them is waited for."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a prompt that are to come into `out`; `chunks` are those of the prompt, up to the last
    that is wanted, and `first` the place of the first that is. Without the span the pass that follows computes `rest`
    tokens, those of other prompts too that it computes together with this one."""

    chunks: list[ChunkKey]
    first: int
    out: KV
    start: int
    stop: int
    request: str
    rest: int

    @property
    def wanted(self) -> list[ChunkKey]:
        """The chunks that hold tokens of the span."""
        return self.chunks[self.first :]


def pieces_of(chunks: list[ChunkKey], tiers: list[Tier], layout: ChunkLayout, start: int, stop: int) -> list[Piece]:
    """What loading each chunk for the tokens [start, stop) moves and saves."""
    return [
        Piece(
            tier, block_bytes(layout, chunk.stop - chunk.start), max(min(chunk.stop, stop) - max(chunk.start, start), 0)
        )
        for chunk, tier in zip(chunks, tiers, strict=True)
    ]


class Intake:
    """Tells blocks that are what was stored from those that are not, for all that load. `forget` deletes what was
    damaged: it would be found, and missed, again and again, and never stored anew."""

    def __init__(
        self,
        backend: Backend,
        on_damaged: Callable[[bytes, LayoutError], None],
        on_expired: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_damaged` is told of a block's key and what is wrong with it, `on_expired` that a lease has ended under
        its reader."""
        self._backend = backend
        self._on_damaged = on_damaged
        self._on_expired = on_expired
        self.damaged: list[bytes] = []
        """Keys of blocks to be deleted."""

    def refuse(self, key: bytes, lease: Lease, why: LayoutError) -> None:
        """Note that what was read is no such block. The block is damaged only if its lease was held: else the memory is
        another value's by now."""
        if self.is_held(lease):
            self.damaged.append(key)
            self._on_damaged(key, why)

    def is_held(self, lease: Lease) -> bool:
        """Whether what was read, to the last byte, was the block."""
        if not lease.held:
            self._on_expired()
            return False
        return True

    def forget(self) -> None:
        """Delete what was damaged."""
        damaged, self.damaged = self.damaged, []
        if damaged:
            self._backend.delete(damaged)


class TensorLoad:
    """Loads a span. `position` says how far `out` is valid, at any time and whatever a method raises: what the backend
    and a GPU raise. `intake` hears of blocks that are not what the layout says."""

    def __init__(
        self,
        backend: Backend,
        layout: ChunkLayout,
        span: Span,
        intake: Intake,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.position = span.start
        self.copy_s = 0.0
        """What copies into `out` have taken."""
        self.skipped = 0
        """Tokens that were to come, but not fast enough."""
        self._backend = backend
        self._layout = layout
        self._span = span
        self._intake = intake
        self._is_cancelled = is_cancelled
        self._gpus = gpus_of(span.out)
        self._copied: deque[tuple[Lease, int, list[torch.cuda.Event]]] = deque()
        """What is on its way: the lease, where its tokens end, and the events behind its copies."""
        self._given = span.start
        """How far `out` is valid when all of that has come."""

    def run(self) -> None:
        """Load until the first chunk that is missing."""
        self._load(self._span.wanted)
        self._touch()

    def run_while_worth(self, break_even: BreakEven) -> None:
        """Load what comes sooner than it is computed, as far as is known, and no more when that proves wrong. What is
        learnt of a tier at its first block counts for the next."""
        chunks, is_slow = self._span.wanted, False
        rest = self._span.rest
        while chunks:
            tiers = self._backend.tiers_of([chunk.key for chunk in chunks])
            pieces = pieces_of(chunks, tiers, self._layout, self.position, self._span.stop)
            pieces = pieces[: break_even.worth(pieces, rest)]
            pieces = pieces[: break_even.first_part(pieces)]
            if not pieces:
                is_slow = self.position > self._span.start  # else it was not looked whether they are there
                break
            watch = break_even.watch(pieces, rest)
            if not self._load(chunks[: len(pieces)], watch):
                is_slow = watch.stopped
                break
            chunks = chunks[len(pieces) :]
        if is_slow:
            self.skipped = min(chunks[-1].stop, self._span.stop) - self.position
        self._touch()

    def _load(self, chunks: list[ChunkKey], watch: Watch | None = None) -> bool:
        """Load these, and say whether to go on behind them."""
        within_s = None if watch is None else watch.within_s
        ahead = 0 if watch is not None or not self._gpus else ON_THEIR_WAY - 1
        go_on = False
        try:
            with closing(self._backend.load([chunk.key for chunk in chunks], within_s=within_s)) as leases:
                for chunk, lease in zip(chunks, leases, strict=False):
                    has_come = lease is not None and self._take(chunk, lease) and self._land(ahead)
                    go_on = has_come if watch is None else watch.lap(has_come)
                    go_on = go_on and not self._is_cancelled()
                    if not go_on:
                        break
        finally:
            go_on = self._land() and go_on
            if watch is not None:
                watch.end()
        return go_on

    def _touch(self) -> None:
        """Loading used the head first, which would make it the first to be evicted: say that it was all one use."""
        if self.position > self._span.start:
            self._backend.touch([chunk.key for chunk in self._span.chunks if chunk.start < self.position])

    def _take(self, chunk: ChunkKey, lease: Lease) -> bool:
        """Give the copy of the chunk's tokens, from `_given` to the span's end. False: it is no such block."""
        try:
            stop = self._copy(chunk, lease.view)
            copied = [event_on(torch.cuda.current_stream(gpu)) for gpu in self._gpus]
        except BaseException as error:
            with lease:
                for gpu in self._gpus:  # layers that were copied before it failed are in no event
                    with suppress(RuntimeError):  # the device is lost, and copies nothing any more
                        torch.cuda.current_stream(gpu).synchronize()
                if not isinstance(error, LayoutError):
                    raise
                self._intake.refuse(chunk.key, lease, error)
            return False
        self._copied.append((lease, stop, copied))
        self._given = stop
        return True

    def _land(self, ahead: int = 0) -> bool:
        """Wait until no more than `ahead` are on their way, and move `position` behind those that have come. False, and
        none is any more: the bytes of one were not the block's any more when they had been copied."""
        failure: RuntimeError | None = None
        is_sound = True
        while self._copied and (len(self._copied) > ahead or not is_sound):
            lease, stop, copied = self._copied.popleft()
            with lease:
                try:
                    for event in copied:
                        event.synchronize()
                except RuntimeError as error:  # the GPU's: nothing is copied any more
                    failure = error
                is_sound = is_sound and failure is None and self._intake.is_held(lease)
            if is_sound:
                self.position = stop
        if failure is not None:
            raise failure
        return is_sound

    def _copy(self, chunk: ChunkKey, view: memoryview) -> int:
        """Copy the chunk's tokens from `_given` up to the span's end, and say where they end."""
        block = open_block(view, self._layout)
        if block.tokens != chunk.stop - chunk.start:
            raise LayoutError(f"block covers {block.tokens} tokens, its key {chunk.stop - chunk.start}")
        stop = min(chunk.stop, self._span.stop)
        tensor = view_tensor(block.tensor, self._layout, block.tokens)
        began_s = time.perf_counter()
        scatter(tensor, self._span.out, self._given, slice(self._given - chunk.start, stop - chunk.start))
        self.copy_s += time.perf_counter() - began_s
        return stop
