"""A step's loads, layer by layer: attention of layer 0 begins when layer 0 is there, and the rest comes meanwhile.

All chunks are leased first, or were while the engine prepared the step (preload.py), then one layer of all of them
moves after the other; while one is waited for, the next two are asked for already, so that a device is never idle. On a
GPU the engine does not wait, but its stream does: it launches what reads a layer as soon as that is on its way. What an
engine sees of it is the leasing and one layer, and of many chunks layer 0 of the first moves while the next are leased.
Asking costs the interpreter, which the engine needs to launch its own kernels: so where layers come sooner than they
are computed several move together, as many as the engine still has in hand. Where a lease is the bytes themselves
(memory of this process, or of a server on this host) leasing takes microseconds; through a socket a whole block must
have come before its layer 0 moves, so there it hides the copies and not the network.

Whether a chunk was good is known when its last layer has moved, and `finished` says so behind the forward pass: the
engine may have computed with it by then, and computes again.
"""

import contextlib
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch

from kvredis.adapters.engine.background import Later
from kvredis.adapters.transfer.base import Event, Moving, layer_parts

from .jobs import Errand, Means
from .load import Intake, LeasedChunk, note_come
from .preload import LeasesAhead, PlannedLayers, parts_of, plan_layers

AHEAD = 2
"""Rows of layers asked for behind the one that is waited for; none behind layer 0 and one behind layer 1, which asking
for more would delay."""

AHEAD_OF_STREAM = 4
"""The same where the engine's stream waits and not the engine, which launches a layer while those before come; one
behind layer 0, while it launches what reads that."""

ROW_MAX = 8
"""Layers that move together at most: a load that is given up ends behind them."""

FIRST_BYTES = 24 * 1024 * 1024
"""Layer 0 of the first chunks is asked for when it has so much, of the next when it has twice that, and so on: asking
takes as long as a GPU copies 20 MB, in which less would have come."""

ROW_BYTES = 16 * 1024 * 1024
"""Into a GPU layers behind the first move together until they are so much, for the same reason."""

YIELD_S = 20e-6
"""For so long, and what the system adds, the interpreter is left to an engine that has waited for what has come, or is
on its way."""


def has_moved(movings: Sequence[Moving]) -> bool:
    """Whether waiting for them takes no time."""
    return all(moving.done for moving in movings)


@dataclass(slots=True, eq=False)
class _Load:
    errand: Errand
    chunks: list[LeasedChunk] = field(default_factory=list)


class LayerLoads(Later):
    """The loads of one step: `run`, on the thread that loads, brings them; `wait_layer` is the engine's, or with
    `by_stream` `hold_back` is."""

    def __init__(
        self,
        means: Means,
        errands: Sequence[Errand],
        after: torch.cuda.Event | None = None,
        *,
        by_stream: bool = False,
        ahead: LeasesAhead | None = None,
    ) -> None:
        """On a GPU the pages are free behind `after`. The errands' chunks may have been leased `ahead`."""
        super().__init__(0)
        self.errands = list(errands)
        self._loads = [_Load(errand) for errand in errands]
        self.loaded_s: dict[int, float] = {}
        """When each layer had come (time.monotonic)."""
        self._means = means
        self._after = after
        self._ahead_leases = ahead
        self._intake = Intake(means)
        self._places = means.places
        self._by_stream = by_stream
        self._changed = threading.Condition()  # of all below
        self._under_way: deque[tuple[list[int], list[Moving]]] = deque()
        """Rows of layers that have not come, and what of each is on its way."""
        self._asked = 0
        self._come = 0
        self._reached = 0
        """Layers that are asked for, have come, and that the engine has got to."""
        self._marks: deque[tuple[int, Event]] = deque()
        """The engine has got to so many when an event has been passed."""
        self._is_waited = False
        self._awaited = 0
        """Layers that the engine waits for to be asked for."""
        self._ended = False
        self._hashed = 0
        self._planned: dict[int, tuple[tuple[_Load, ...], PlannedLayers]] = {}
        """Of each group, with the loads that it is of."""
        self._rows: deque[range] = deque()
        """Those layers that are staged."""
        self._owed = 0
        """Bytes that went first, whose time is to be booked."""

    def end(self, tokens: int) -> None:
        """As Later.end; no layer is waited for any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._ahead_leases is not None:  # which are still there if this was never run
            self._ahead_leases.drop()
        super().end(tokens)

    def wait_layer(self, place: int) -> None:
        """Block until that layer of the model and all before it have come, or nothing more comes."""
        wanted = bisect_right(self._places, place)
        with self._changed:
            self._reached = max(self._reached, wanted)
            self._is_waited = True
            self._changed.wait_for(lambda: self._ended or self._come >= wanted)
            self._is_waited = False

    def hold_back(self, place: int, stream: torch.cuda.Stream, mark: Event) -> None:
        """Block until that layer of the model and all before it are on their way, or nothing more comes, and let what
        the engine's stream is given from now on come behind them. `mark` is behind what it has been given before."""
        wanted = bisect_right(self._places, place)
        with self._changed:
            self._marks.append((wanted, mark))
            self._awaited = wanted
            self._changed.wait_for(lambda: self._ended or self._asked >= wanted)
            self._awaited = 0
            rows = [] if self._ended else [movings for row, movings in self._under_way if row[0] <= place]
        for moving in chain.from_iterable(rows):
            moving.precede(stream)

    def run(self) -> None:
        """Bring all layers; each errand's `come` is right when it ends. Raises what backend and transfer raise."""
        with self._means.bandwidth.row(is_load=True):
            try:
                self._run()
            finally:
                for _, planned in self._planned.values():  # while where the chunks' sums are kept is theirs
                    with contextlib.suppress(Exception):  # there is something to be done only behind a failure
                        planned.sum_up()
                for moving in (each for _, movings in self._under_way for each in movings):
                    with contextlib.suppress(RuntimeError):  # the device failed, which was told already
                        moving.wait()
                if self._ahead_leases is not None:
                    self._ahead_leases.settle()
                for chunk in (chunk for load in self._loads for chunk in load.chunks):
                    chunk.release()
                self._means.bandwidth.owe(self._owed)
        self._intake.forget()

    def _run(self) -> None:
        if self._take_over():
            row = self._next()
            self._ask(row, partial(self._send, row))
        else:
            self._ask(self._places[:1], self._send_first)
        self._sum_up()
        self._plan()
        while self._asked < len(self._places):
            while self._under_way and (len(self._under_way) > self._ahead or has_moved(self._under_way[0][1])):
                self._settle()
            row = self._next()
            while self._under_way and self._means.bandwidth.waits(self._layer_bytes * len(row)):
                self._settle()  # or a layer that is there waited for the next one's turn
            self._ask(row, partial(self._send, row))
            self._sum_up()
        while self._under_way:
            self._settle()
        for load in self._loads:
            self._judge(load)

    def _ask(self, row: list[int], send: Callable[[list[Moving]], None]) -> None:
        """For these layers. What `send` gives of them is waited for, whatever happens."""
        movings: list[Moving] = []
        with self._changed:
            self._under_way.append((row, movings))
        send(movings)
        with self._changed:
            self._asked += len(row)
            goes_on = 0 < self._awaited <= self._asked
            self._changed.notify_all()
        if goes_on:
            time.sleep(YIELD_S)

    def _next(self) -> list[int]:
        """The layers that move next: those that are staged as they are, and then as many as move together."""
        count = len(self._rows.popleft()) if self._rows else self._together()
        return self._places[self._asked : self._asked + count]

    @property
    def _ahead(self) -> int:
        return min(AHEAD_OF_STREAM, self._come + 1) if self._by_stream else min(AHEAD, self._come)

    def _together(self) -> int:
        """How many layers move next: as many as have come and the engine has not got to yet. Where loading is the
        slower there are none, and a few go that are small; with a bound no more than it lets through at once."""
        while self._marks and self._marks[0][1].query():
            self._reached = self._marks.popleft()[0]
        nbytes = max(self._layer_bytes, 1)
        most = self._means.bandwidth.piece_bytes(ROW_MAX * nbytes) // nbytes
        least = ROW_BYTES // nbytes if self._by_stream and self._asked else 1
        return max(min(max(self._come - self._reached, least), most), 1)

    @property
    def _layer_bytes(self) -> int:
        """Of one layer of all chunks, once they are leased; of groups whose layers alternate somewhat more."""
        return sum(planned.nbytes for _, planned in self._planned.values())

    def _send_first(self, movings: list[Moving]) -> None:
        """Lease all chunks, and ask for the first layer of those that have come while the next do."""
        left = sum(len(load.errand.moves) for load in self._loads)
        wanted, nbytes, fresh = FIRST_BYTES, 0, list[LeasedChunk]()
        for chunk in chain.from_iterable(map(self._leased, self._loads)):
            fresh.append(chunk)
            nbytes += chunk.nbytes // self._means.groups[chunk.move.group].layout.layers
            left -= 1
            if nbytes >= wanted and left > len(fresh) // 2:
                self._send_some(fresh, movings)
                wanted, nbytes, fresh = 2 * wanted, 0, []
        self._send_some(fresh, movings)

    def _take_over(self) -> bool:
        """Take what was leased ahead; False where nothing was."""
        ahead = self._ahead_leases
        chunks = None if ahead is None else ahead.take()
        if ahead is None or chunks is None:
            return False
        for load, mine in zip(self._loads, chunks, strict=True):
            load.chunks = mine
        self._intake, self._owed = ahead.intake, ahead.owed
        loads = tuple(self._loads)
        self._planned = {number: (loads, planned) for number, planned in enumerate(ahead.planned)}
        self._rows.extend(ahead.planned[0].staged)
        return True

    def _plan(self) -> None:
        """The next layer, while the first is on its way."""
        for number, group in enumerate(self._means.groups):
            if any(group.layer_of(place) is not None for place in self._places[1:2]):
                self._layers_of(number)

    def _leased(self, load: _Load) -> Iterator[LeasedChunk]:
        moves = () if load.errand.cancelled or self.cancelled else load.errand.moves
        with closing(self._means.backend.load([move.key for move in moves])) as leases:
            for move, lease in zip(moves, leases, strict=True):
                chunk = self._intake.open(move, lease)
                if chunk is None:
                    break
                load.chunks.append(chunk)
                yield chunk
                if load.errand.cancelled or self.cancelled:
                    break

    def _send_some(self, chunks: Sequence[LeasedChunk], movings: list[Moving]) -> None:
        """As `_send`, of the first layer of some chunks."""
        for number, group in enumerate(self._means.groups):
            layer = group.layer_of(self._places[0])
            if layer is None or self.cancelled:
                continue
            parts = layer_parts(group.transfer.paged, parts_of(group, number, chunks), layer)
            if parts:
                self._pass(sum(part.memory.nbytes for part in parts))
                movings.append(group.transfer.load(parts, after=self._after))

    def _send(self, row: Sequence[int], movings: list[Moving]) -> None:
        """Ask for these layers, which follow each other, of all chunks that are wanted still; what is under way is in
        `movings` in any case."""
        for number, group in enumerate(self._means.groups):
            own = [layer for place in row if (layer := group.layer_of(place)) is not None]
            if not own:
                continue
            planned = self._layers_of(number)
            if planned.layers is not None:
                fresh = sum(not any(layer in row for row in planned.staged) for layer in own)
                if fresh:
                    self._pass(planned.nbytes * fresh)
                movings.append(planned.layers.load(own[0], len(own), after=self._after))

    def _pass(self, nbytes: int) -> None:
        """Wait for the turn of so many bytes."""
        if self._asked:
            self._means.bandwidth.take(nbytes, is_load=True)
        else:
            self._means.bandwidth.go_first()
            self._owed += nbytes

    def _sum_up(self) -> None:
        """What checksums need of the layers that were asked for, which the engine does not wait for."""
        for _, planned in self._planned.values():
            planned.sum_up()

    def _layers_of(self, number: int) -> PlannedLayers:
        """All chunks of a group that are wanted still; planned anew when fewer are."""
        wanted = () if self.cancelled else tuple(load for load in self._loads if not load.errand.cancelled)
        loads, planned = self._planned.get(number, (None, None))
        if planned is None or loads != wanted:
            chunks = chain.from_iterable(load.chunks for load in wanted)
            planned = plan_layers(self._means.groups[number], number, chunks)
            self._planned[number] = wanted, planned
        return planned

    def _settle(self) -> None:
        row, movings = self._under_way[0]
        for moving in movings:
            moving.wait()
        with self._changed:
            self._under_way.popleft()
            self._come += len(row)
            self.loaded_s |= dict.fromkeys(row, time.monotonic())
            is_waited = self._is_waited
            self._changed.notify_all()
        if is_waited:
            time.sleep(YIELD_S)
        self._hash_some(len(row))

    def _hash_some(self, layers: int) -> None:
        """Begin to hash so many chunks that all are begun with the last layer: sooner would delay the next layers, and
        an answer is not wanted before."""
        chunks = [chunk for load in self._loads for chunk in load.chunks]
        share = -(-len(chunks) * layers // len(self._places))
        for chunk in chunks[self._hashed : self._hashed + share]:
            chunk.verdict.begin()
        self._hashed += share

    def _judge(self, load: _Load) -> None:
        if load.errand.cancelled or self.cancelled:
            return
        come = 0
        while come < len(load.chunks) and self._intake.judge(load.chunks[come]):
            come += 1
        note_come(self._means, load.errand, load.chunks[:come])

    def behind(self) -> None:
        """What the engine does not wait for."""
        for load in self._loads:
            if load.errand.come:
                self._means.backend.touch([move.key for move in load.errand.moves[: load.errand.come]])
