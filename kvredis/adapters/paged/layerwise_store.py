"""A step's stores, layer by layer: each layer leaves the engine's pages while the next is computed.

Room for whole chunks is held from the first layer to the last, and a chunk is visible when its last layer is in it:
never a part. So the copy out of the engine is over when the step is, but for one layer, or as many small ones as leave
together: asking for each by itself takes the interpreter, and slowed a step of 1,024 tokens down from 25 ms to 31 and
more (vLLM on an H200). Over a socket the bytes leave this process only then, as whole values.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from kvredis.adapters.engine.background import Later
from kvredis.adapters.transfer.base import Layers, Moving, Part

from .jobs import ChunkMove, Errand, Means
from .store import Filled, ReservedChunk, by_group, reserve

logger = logging.getLogger(__name__)

ROW_BYTES = 32 * 1024 * 1024
"""Layers behind the first leave together until they are so much, as far as they are computed ..."""
ROW_MAX = 8
"""... and at most so many."""
AHEAD = 2
"""Rows of layers under way behind the one that is waited for."""


class LayerStores(Later):
    """The stores of one step: `computed` and `finish` are the engine's, `run` is the storing thread's."""

    def __init__(self, means: Means, errands: Sequence[Errand]) -> None:
        super().__init__(0)
        self.errands = list(errands)
        self.computed_s: dict[int, float] = {}
        """When each layer was said to be computed (time.monotonic)."""
        self.stored_s: dict[int, float] = {}
        """When each layer's bytes had left the engine's pages."""
        self._means = means
        self._places = means.places
        self._changed = threading.Condition()
        self._computed: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._wanted = 1
        """How many layers leave next."""
        self._finished = False
        self._rooms: list[tuple[Errand, ReservedChunk]] = []
        self._moving: deque[tuple[list[int], list[Moving]]] = deque()
        self._planned: dict[int, tuple[int, Layers]] = {}
        """Of each group, its chunks that are wanted still: how many, and their plan."""

    def computed(self, place: int, after: torch.cuda.Event | None) -> bool:
        """A layer of the model is there, on a GPU when `after` has passed. False: it is not this step's next."""
        with self._changed:
            if self._finished or (self.computed_s and place <= max(self.computed_s)):
                return False
            self.computed_s[place] = time.monotonic()
            self._computed.append((place, after))
            if len(self._computed) >= self._wanted:  # who stores would take the interpreter for nothing
                self._changed.notify_all()
        return True

    def finish(self) -> None:
        """No more layers are computed."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def cancel(self) -> None:
        """As Later.cancel."""
        super().cancel()
        self.finish()

    def run(self) -> None:
        """Store what is not there yet. Raises what backend and transfer raise; when it has ended no page is read any
        more, and no room held."""
        with self._means.bandwidth.row(is_load=False):
            self._run()

    def behind(self) -> None:
        """Nothing is left to do."""

    def _run(self) -> None:
        try:
            for errand in self.errands:
                for moves in by_group(errand.moves):
                    self._reserve(errand, moves)
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
            if is_whole and all(errand.is_sound() for errand in self.errands):
                self._commit()
            elif self._rooms:
                self._means.counters.add(dropped_stores=len(self._rooms))
        finally:
            for moving in (each for _, movings in self._moving for each in movings):
                with contextlib.suppress(RuntimeError):  # the device failed, which was told already
                    moving.wait()
            for _, chunk in self._rooms:
                chunk.abort()
            self._rooms = []

    def _reserve(self, errand: Errand, moves: list[ChunkMove]) -> None:
        """Room for what is not stored yet, from the head on as far as there is any."""
        if errand.cancelled or self.cancelled:
            return
        group = self._means.groups[moves[0].group]
        present = self._means.backend.match([move.key for move in moves])
        missing = sum(group.tokens_of(move) for move in moves[present:])
        logger.info("Storing KV cache for %d out of %d tokens for request %s", missing, errand.total, errand.request)
        left = len(moves) - present
        length = group.value_bytes(moves[0], is_checked=self._means.checking.is_on)
        count = min(self._means.backend.room(length), left) if left else 0
        refused = 0
        for move in moves[present : present + count]:
            chunk = reserve(self._means, move)
            if chunk is None:  # what is behind a gap is worth nothing
                refused = 1
                break
            left -= 1
            self._rooms.append((errand, chunk))
        self._means.counters.add(present_chunks=present, refused_stores=refused, dropped_stores=left - refused)

    def _together(self) -> int:
        """How many layers leave together."""
        nbytes = sum(chunk.tensor.nbytes for _, chunk in self._rooms) // len(self._places)
        return max(min(self._means.bandwidth.piece_bytes(ROW_BYTES) // max(nbytes, 1), ROW_MAX), 1)

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

    def _send(self, places: Sequence[int], after: torch.cuda.Event | None, movings: list[Moving]) -> None:
        """Let layers leave that follow each other and are computed when `after` has passed."""
        for number, group in enumerate(self._means.groups):
            own = [layer for place in places if (layer := group.layer_of(place)) is not None]
            if not own:
                continue
            wanted = [chunk for errand, chunk in self._rooms if not errand.cancelled and chunk.move.group == number]
            if number not in self._planned or self._planned[number][0] != len(wanted):  # fewer only: some are cancelled
                parts = [Part(chunk.move.pages, chunk.tensor, row=chunk.row_in(self._means)) for chunk in wanted]
                self._planned[number] = len(wanted), group.transfer.layers(parts)
            if wanted:
                nbytes = sum(chunk.tensor.nbytes for chunk in wanted) // group.layout.layers
                self._means.bandwidth.take(nbytes * len(own), is_load=False)
                movings.append(self._planned[number][1].store(own[0], len(own), after=after))

    def _commit(self) -> None:
        """Make all visible, of each errand and group the tail first."""
        for errand in self.errands:
            if errand.cancelled:
                continue
            mine = [chunk for owner, chunk in self._rooms if owner is errand]
            filled = Filled(self._means, errand, mine[::-1])  # may find no thread to hash them
            self._rooms = [(owner, chunk) for owner, chunk in self._rooms if owner is not errand]
            filled.commit()
            for moves in by_group(errand.moves):
                self._means.backend.touch([move.key for move in moves])
