"""A step's loads are known when the engine has scheduled it, and begin when it has prepared it: milliseconds (3.7 in
vLLM 0.26 on an H200, profiled) in which the chunks that come layer by layer are leased, looked at and planned, and the
first layers staged beside the pages that may not be touched yet. What is left then is to ask for the rest."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain

from kvredis.adapters.engine.background import Later
from kvredis.adapters.transfer.base import Layers, Moving, Part

from .jobs import Counters, LoadJob, Means, PagedGroup
from .load import Intake, LeasedChunk


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """All chunks of one group that are wanted, planned, and a layer's bytes of them. None: there are none."""

    layers: Layers | None
    nbytes: int
    staged: dict[range, Moving] = field(default_factory=dict)
    """The first layers, as they are to be loaded."""

    def sum_up(self) -> None:
        """As Layers.sum_up."""
        if self.layers is not None:
            self.layers.sum_up()


class LeasesAhead(Later):
    """The chunks of some jobs: `run`, on the thread that loads, leases them; the step's loads take them over. What
    is not taken is let go by `drop`."""

    def __init__(self, means: Means, jobs: Sequence[LoadJob]) -> None:
        super().__init__(0)
        self.jobs: list[LoadJob] = []
        """Those of them that may be under way at once."""
        left = means.options.max_load_chunks
        for job in jobs:
            if len(job.moves) <= left:
                self.jobs.append(job)
                left -= len(job.moves)
        self._counters = Counters()  # of what is not loaded nothing is counted
        self.intake = Intake(means, self._counters)
        """Which chunks were damaged."""
        self.planned: list[PlannedLayers] = []
        """Of each group, once they are leased."""
        self.owed = 0
        """Bytes that are staged, whose time the loads that take them over book, or `drop`."""
        self._means = means
        self._changing = threading.Lock()  # of what follows
        self._chunks: list[list[LeasedChunk]] = []
        self._is_whole = False

    def run(self) -> None:
        """Lease. Raises what the backend raises; then there is nothing to take."""
        try:
            for job in self.jobs:
                self._chunks.append([])
                self._lease(job, self._chunks[-1])
            self.planned = [
                plan_layers(group, number, chain.from_iterable(self._chunks))
                for number, group in enumerate(self._means.groups)
            ]
            with self._means.bandwidth.row(is_load=True):
                self._stage()
        except BaseException:
            self.cancel()
            raise
        finally:
            with self._changing:
                self._is_whole = not self.cancelled
                if self.cancelled:
                    self._release()

    def take(self) -> list[list[LeasedChunk]] | None:
        """Give the chunks of each job, head first as far as they are there, which are the caller's now, as is what was
        counted of them; None where there are none to be had any more, or their leases have ended."""
        with self._changing:
            if not self._is_whole:
                return None
            self._is_whole = False
            if not all(chunks[0].lease.held for chunks in self._chunks if chunks):  # the oldest, or with all others
                self._release()
                return None
            chunks, self._chunks = self._chunks, []
        self._means.counters.add(**self._counters.sums())
        self._means.counters.add(leased_ahead_chunks=sum(map(len, chunks)))
        self.intake.counters = self._means.counters
        return chunks

    def settle(self) -> None:
        """Wait until nothing is staged any more; what failed on the way fails again when it is loaded."""
        for moving in chain.from_iterable(planned.staged.values() for planned in self.planned):
            with suppress(RuntimeError):
                moving.wait()

    def drop(self) -> None:
        """They are not wanted. Any thread; waits for what is being staged."""
        with self._changing:
            self.cancel()
            if self._is_whole:
                self._is_whole = False
                self._release()

    def _lease(self, job: LoadJob, chunks: list[LeasedChunk]) -> None:
        with closing(self._means.backend.load([move.key for move in job.moves])) as leases:
            for move, lease in zip(job.moves, leases, strict=True):
                chunk = self.intake.open(move, lease)
                if chunk is None:
                    break
                chunks.append(chunk)
                if self.cancelled:
                    break

    def _stage(self) -> None:
        """Stage the first layers, as many as there is room for; with a bound only what is needed first, which else had
        to wait for the rest. Not of several groups, whose layers take turns: engines load those before the step."""
        planned, bandwidth = self.planned[0], self._means.bandwidth
        if planned.layers is None or len(self.planned) > 1:
            return
        for row in planned.layers.rows:
            if self.cancelled or (planned.staged and bandwidth.is_bound):
                return
            most = bandwidth.piece_bytes(planned.nbytes * len(row)) // max(planned.nbytes, 1)
            some = row[: max(most, 1)]
            bandwidth.go_first()
            self.owed += planned.nbytes * len(some)
            planned.staged[some] = planned.layers.stage(some.start, len(some))

    def _release(self) -> None:
        self.settle()
        for each in chain.from_iterable(self._chunks):
            each.release()
        self._chunks = []
        self.planned = []
        self._means.bandwidth.owe(self.owed)


class NextLeases:
    """What has been leased ahead and not asked for yet; one at a time, from any thread."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._ahead: LeasesAhead | None = None

    def replace(self, ahead: LeasesAhead | None) -> None:
        """Have this instead; what there was is dropped."""
        with self._changing:
            before, self._ahead = self._ahead, ahead
        if before is not None:
            before.drop()

    def take(self, jobs: Sequence[LoadJob]) -> LeasesAhead | None:
        """Give what there is, if it is for these jobs, and else drop it."""
        with self._changing:
            ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.jobs != list(jobs):
            ahead.drop()
            return None
        return ahead


def parts_of(group: PagedGroup, number: int, chunks: Iterable[LeasedChunk]) -> list[Part]:
    """Those chunks that are of this group, which has this number."""
    return [
        Part(chunk.move.pages, chunk.block.tensor, row=chunk.verdict.row_in(group.transfer, chunk.block.tensor))
        for chunk in chunks
        if chunk.move.group == number
    ]


def plan_layers(group: PagedGroup, number: int, chunks: Iterable[LeasedChunk]) -> PlannedLayers:
    """Plan the chunks of this group, which has this number. Raises what the transfer raises."""
    parts = parts_of(group, number, chunks)
    nbytes = sum(part.memory.nbytes for part in parts) // group.layout.layers
    return PlannedLayers(group.transfer.layers(parts) if parts else None, nbytes)
