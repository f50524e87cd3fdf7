"""A step's stores, layer by layer: each layer leaves the engine's pages while the next is computed.

Room for whole chunks is held from the first layer to the last, and a chunk is visible when its last layer is in it:
never a part. So the copy out of the engine is over when the step is, but for one layer, or as many small ones as leave
together: asking for each by itself takes the interpreter, and slowed a step of 1,024 tokens down from 25 ms to 31 and
more (vLLM on an H200). Over a socket the bytes leave this process only then, as whole values.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from kvredis.adapters.transfer.base import Layers, Moving, wait_for_all

from .jobs import ChunkMove, JobState, MoverContext, MoverTask
from .store import ReservedChunk, alike, by_group, bytes_of, commit, count_present, reserve

ROW_BYTES = 32 * 1024 * 1024
"""Layers behind the first leave together until they are so much, as far as they are computed ..."""
ROW_MAX = 8
"""... and at most so many."""
AHEAD = 2
"""Rows of layers under way behind the one that is waited for."""


class LayerStores(MoverTask):
    """The stores of one step: `computed` and `finish` are the engine's, `run` is the storing thread's."""

    def __init__(self, context: MoverContext, jobs: Sequence[JobState]) -> None:
        super().__init__(context, jobs)
        self.computed_s: dict[int, float] = {}
        """When each layer was said to be computed (time.monotonic)."""
        self.stored_s: dict[int, float] = {}
        """When each layer's bytes had left the engine's pages."""
        self._places = context.places
        self._changed = threading.Condition()
        self._computed: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._wanted = 1
        """How many layers leave next."""
        self._finished = False
        self._reserved: list[tuple[JobState, ReservedChunk]] = []
        self._moving: deque[tuple[list[int], list[Moving]]] = deque()
        self._planned: dict[int, tuple[int, Layers]] = {}
        """Of each group, its chunks that are wanted still: how many, and their plan."""

    def computed(self, place: int, after: torch.cuda.Event | None) -> bool:
        """Take a layer of the model that is computed, on a GPU when `after` has passed. False: it is not this step's
        next."""
        with self._changed:
            if self._finished or (self.computed_s and place <= max(self.computed_s)):
                return False
            self.computed_s[place] = time.monotonic()
            self._computed.append((place, after))
            if len(self._computed) >= self._wanted:  # the storing thread would take the interpreter for nothing
                self._changed.notify_all()
        return True

    def finish(self) -> None:
        """No more layers are computed."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def cancel(self) -> None:
        super().cancel()
        self.finish()

    def _run(self) -> None:
        """Store what is not there yet; when it has ended no room is held."""
        try:
            for job in self.jobs:
                for moves in by_group(job.moves):
                    self._reserve(job, moves)
            sent = 0
            while row := self._next():
                places, after = [place for place, _ in row], row[-1][1]
                if places != self._places[sent : sent + len(places)]:  # the engine has left one out
                    break
                sent += len(places)
                self._moving.append((places, []))
                self._send(places, after, self._moving[-1][1])
                self._wanted = self._together()
            is_whole = list(self.stored_s) == self._places
            if is_whole and all(job.is_sound() for job in self.jobs):
                self._commit()
            elif self._reserved:
                self._context.counters.add(dropped_stores=len(self._reserved))
        finally:
            wait_for_all(moving for _, movings in self._moving for moving in movings)
            for _, chunk in self._reserved:
                chunk.abort()
            self._reserved = []

    def _reserve(self, job: JobState, moves: list[ChunkMove]) -> None:
        """Room for what is not stored yet, from the head on as far as there is any."""
        if job.cancelled or self.cancelled:
            return
        present = count_present(self._context, job, moves)
        left = len(moves) - present
        count = min(self._context.backend.room(self._context.value_bytes(moves[0])), left) if left else 0
        wanted, refused = moves[present : present + count], 0
        while wanted and not refused:
            together = alike(wanted)
            chunks = reserve(self._context, together)
            self._reserved += [(job, chunk) for chunk in chunks]
            refused = int(len(chunks) < len(together))  # what is behind a gap is worth nothing
            left -= len(chunks)
            wanted = wanted[len(together) :]
        self._context.counters.add(present_chunks=present, refused_stores=refused, dropped_stores=left - refused)

    def _together(self) -> int:
        """How many layers leave together."""
        nbytes = bytes_of(chunk for _, chunk in self._reserved) // len(self._places)
        return max(min(self._context.bandwidth.piece_bytes(ROW_BYTES) // max(nbytes, 1), ROW_MAX), 1)

    def _next(self) -> list[tuple[int, torch.cuda.Event | None]]:
        """The next layers that have been computed, none behind the last. Meanwhile those under way arrive."""
        while True:
            with self._changed:
                if not self._moving:
                    self._changed.wait_for(self._is_row)
                is_ready = bool(self._moving) and all(moving.done for moving in self._moving[0][1])
                if (
                    self._computed
                    and self._is_row()
                    and not (self.cancelled or is_ready)
                    and len(self._moving) <= AHEAD
                ):
                    return [self._computed.popleft() for _ in range(min(self._wanted, len(self._computed)))]
                if not self._moving:
                    return []
            self._settle()

    def _is_row(self) -> bool:
        """Whether as many are computed as leave together, or no more will be."""
        return len(self._computed) >= self._wanted or self._finished

    def _settle(self) -> None:
        places, movings = self._moving[0]
        for moving in movings:
            moving.wait()
        self._moving.popleft()
        self.stored_s |= dict.fromkeys(places, time.monotonic())
        for number, group in enumerate(self._context.groups):
            own = [layer for place in places if (layer := group.layer_of(place)) is not None]
            for job, chunk in self._reserved if own else ():
                if chunk.move.group == number and not job.cancelled:
                    chunk.has_layers(own[-1] + 1, is_last=own[-1] + 1 == group.layout.layers)

    def _send(self, places: Sequence[int], after: torch.cuda.Event | None, movings: list[Moving]) -> None:
        """Let layers leave that follow each other and are computed when `after` has passed."""
        for number, group in enumerate(self._context.groups):
            own = [layer for place in places if (layer := group.layer_of(place)) is not None]
            if not own:
                continue
            wanted = [chunk for job, chunk in self._reserved if not job.cancelled and chunk.move.group == number]
            if not wanted:
                continue
            if number not in self._planned or self._planned[number][0] != len(wanted):  # fewer only: some are cancelled
                parts = [chunk.part(group.transfer) for chunk in wanted]
                self._planned[number] = len(wanted), group.transfer.layers(parts)
            nbytes = bytes_of(wanted) // group.layout.layers
            self._context.bandwidth.take(nbytes * len(own), is_load=False)
            movings.append(self._planned[number][1].store(own[0], len(own), after=after))

    def _commit(self) -> None:
        """Make all visible, of each job and group the tail first, unless another engine waits."""
        for job in self.jobs:
            if job.cancelled:
                continue
            mine = [chunk for owner, chunk in self._reserved if owner is job]
            if not job.head_first:
                mine.reverse()
            for chunk in mine:
                chunk.checksum.begin()  # may find no thread
            self._reserved = [(owner, chunk) for owner, chunk in self._reserved if owner is not job]
            commit(self._context, job, mine)
            for moves in by_group(job.moves):
                self._context.backend.touch([move.key for move in moves])
