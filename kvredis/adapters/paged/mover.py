"""The worker's side of an engine, whichever it is: chunks between a Backend and the engine's pages, in the background.

A thread for loads and one for stores, each of which does one job after the other in few long calls without the GIL: an
engine that steps busily in the same process leaves little of it. A load that waits for another engine's stores has a
thread of its own, which hands the chunks that have come over to the thread for loads. Whatever happens there is a
failed page, a counter and a line in the log, and never an error of the engine's.

Until a job is over its pages are its own: a load writes them, a store reads them. `finished` says when that ends,
`cancel` makes it end sooner, and `let_go` for some of its pages.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import TypeVar

import torch

from kvredis.adapters.engine.background import Executor
from kvredis.adapters.engine.stats import log_speed
from kvredis.adapters.engine.tensors import event_on
from kvredis.adapters.transfer.checksum import Checksums
from kvredis.backends.base import Backend

from .awaited_load import AwaitedLoad
from .jobs import (
    ChunkMove,
    Counters,
    Finished,
    JobState,
    LoadJob,
    MoverContext,
    MoverTask,
    MovingOptions,
    Page,
    StoreJob,
    pages_of,
)
from .jobs import PagedGroup as PagedGroup
from .layerwise_store import LayerStores
from .load import ChunkLoad
from .rate_limit import Bandwidth
from .store import ChunkStore

logger = logging.getLogger(__name__)

AWAITED_MAX = 16
"""Loads that wait for what another engine stores, side by side: each has a thread, and a connection."""
STAND_BACK_S = 0.03
"""An engine that has waited for a load computes next, at first in Python: what is left of the load, a line in the log
and a question to the backend, holds it up for as long as it takes. By then its GPU has all that it is to do."""


AnyMoverTask = TypeVar("AnyMoverTask", bound=MoverTask)


class ChunkMover:
    """Moves chunks between `backend` and `groups`; both stay the caller's. Layers are told of by one thread, the rest
    is asked for by any. Nothing here raises."""

    def __init__(self, backend: Backend, groups: Sequence[PagedGroup], options: MovingOptions | None = None) -> None:
        self.options = MovingOptions() if options is None else options
        self.counters = Counters()
        bandwidth, checksums = Bandwidth(self.options.bytes_per_s), Checksums(is_on=self.options.verify)
        self._context = MoverContext(backend, list(groups), self.options, bandwidth, checksums, self.counters)
        self._loader: Executor[ChunkLoad] = Executor(self._run, "kvredis loads", self.options.max_load_chunks)
        self._awaiter: Executor[AwaitedLoad] = Executor(
            self._await, "kvredis awaited loads", self.options.max_load_chunks, threads=AWAITED_MAX
        )
        self._storer: Executor[MoverTask] = Executor(self._run, "kvredis stores", self.options.max_store_chunks)
        self._changed = self._context.changed  # of all below
        self._jobs: dict[str, list[JobState]] = {}
        self._chunks = {True: 0, False: 0}
        """Of jobs that are not over: loads, stores."""
        self._finished = Finished()
        self._failing = {True: False, False: False}
        """Whether the latest load, and store, has failed: one line a spell."""
        self.layer_stores: LayerStores | None = None
        """Those of this step."""

    def add(self, group: PagedGroup) -> int:
        """Take on a group of which moves may be asked for from now on, and give its number. It stays the caller's."""
        self._context.groups.append(group)
        return len(self._context.groups) - 1

    # ---- whole chunks ------------------------------------------------------------------------------------------------

    def load(self, job: LoadJob, after: torch.cuda.Event | None = None) -> None:
        """Bring a job's chunks in the background, behind the loads that were asked for before; on a GPU pages are
        written behind `after`, recorded behind what wrote them last."""
        state = JobState(job.request, job.moves)
        if not self._admit(state):
            return
        if job.waits_s:
            load = AwaitedLoad(self._context, state, job.waits_s, partial(self._load_part, after), self._join_part)
            self._submit(self._awaiter, load)
        else:
            self._submit(self._loader, ChunkLoad(self._context, state, after, self._begin_following))

    def store(self, job: StoreJob, after: torch.cuda.Event | None = None) -> JobState:
        """Store a job's chunks in the background; on a GPU behind `after`, recorded behind what computes them. Of what
        is returned `over` says when its pages are read no more."""
        state = self._storing(job)
        if self._admit(state):
            self._submit(self._storer, ChunkStore(self._context, state, after))
        return state

    def finished(self) -> Finished:
        """What is over since the last call; waits for nothing."""
        with self._changed:
            finished, self._finished = self._finished, Finished()
        return finished

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until `finished` has a load to tell of or none is under way, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._finished.loaded) or not self._chunks[True], timeout_s)

    def wait_over(self, jobs: Iterable[JobState], timeout_s: float) -> bool:
        """Wait until one of these is over, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: any(job.over for job in jobs), timeout_s)

    def is_storing(self, request: str) -> bool:
        """Whether a store of the request is not over."""
        with self._changed:
            return any(not job.is_load for job in self._jobs.get(request, ()))

    def cancel(self, request: str, wait_s: float = 0.0) -> bool:
        """Want no more of a request's loads and stores. True: its pages are free now. False: a copy is under way still
        when `wait_s` have passed; they are free when `finished` names the request."""
        with self._changed:
            self._cancel(request)
            return self._changed.wait_for(lambda: request not in self._jobs, wait_s)

    def let_go(self, request: str, pages: Set[Page], wait_s: float) -> bool:
        """Store nothing of a request that is in these pages, and the rest as before; stores that leave layer by layer
        end. True: the pages are free now. False: a copy out of them is under way still when `wait_s` have passed."""
        with self._changed:
            stores = [job for job in self._jobs.get(request, ()) if not job.is_load]
            for job in stores:
                job.gone |= pages
                if not job.is_whole:
                    self._give_up(job)
            return self._changed.wait_for(
                lambda: all(job.over or (job.is_whole and job.reading.isdisjoint(pages)) for job in stores), wait_s
            )

    def spoil(self, request: str, pages: Set[Page] | None = None) -> None:
        """Hear that these pages of a request's stores, or all of them, are written from now on although a copy may read
        them still: it is not stored, whenever it ends."""
        with self._changed:
            for job in self._jobs.get(request, ()):
                if not job.is_load:
                    job.gone |= {page for move in job.moves for page in pages_of(move)} if pages is None else pages
                    job.spoilt |= job.reading & job.gone

    # ---- layer by layer ----------------------------------------------------------------------------------------------

    def save_layer(self, place: int, jobs: Sequence[StoreJob]) -> None:
        """Let a layer leave that the model has computed (on a GPU: launched on the current stream). The jobs are the
        same for all layers of a step, which are said in their order; the first begins it."""
        stores = self.layer_stores
        if stores is not None and place != self._context.places[0] and place in stores.computed_s:
            return  # a draft's layer runs once for each draft
        if stores is None or not stores.computed(place, self._launched()):
            if stores is not None:
                stores.finish()
            states = [state for state in (self._storing(job, is_whole=False) for job in jobs) if self._admit(state)]
            self.layer_stores = LayerStores(self._context, states)
            self.layer_stores.computed(place, self._launched())
            if states:
                self._submit(self._storer, self.layer_stores)

    def end_layers(self) -> Sequence[JobState]:
        """End the step's stores by layers: they go on in the background; those that lack a layer are given up. Of what
        is returned `over` says when its pages are read no more."""
        stores, self.layer_stores = self.layer_stores, None
        if stores is None:
            return ()
        stores.finish()
        return stores.jobs

    # ---- all of it ---------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing that was asked for is under way, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, by name, and the chunks under way now."""
        with self._changed:
            under_way = {"loading_chunks": self._chunks[True], "storing_chunks": self._chunks[False]}
        return {**self.counters.sums(), **under_way}

    def close(self) -> None:
        """Give up what waits, end what is under way, and wait for that. Nothing may be asked for afterwards."""
        for executor in (self._awaiter, self._loader, self._storer):
            self._cancel_all()
            executor.close()
        self._context.checksums.close()
        self._cancel_all()  # what was asked for meanwhile has not begun, and does not any more

    # ---- jobs under way ----------------------------------------------------------------------------------------------

    def _begin_following(self, left_bytes: int) -> None:
        """Have the load that comes next begin, on the loader's thread, with so many bytes under way at most."""

        def accept(task: ChunkLoad) -> bool:
            with self._changed:
                if task.jobs[0].over:
                    return False
                task.jobs[0].started = True
            task.began_s = task.began_s or time.monotonic()
            return True

        task = self._loader.following(accept)
        if task is not None:
            task.begin(left_bytes)

    @staticmethod
    def _storing(job: StoreJob, *, is_whole: bool = True) -> JobState:
        state = JobState(job.request, job.moves, total=job.total, is_sound=job.is_sound, head_first=job.head_first)
        state.is_whole = is_whole
        return state

    def _load_part(self, after: torch.cuda.Event | None, part: JobState) -> None:
        """Load chunks of a larger load, which have come. What comes before they are begun joins them (_join_part)."""
        whole = part.part_of
        assert whole is not None
        with self._changed:
            whole.parts += 1
            self._jobs.setdefault(part.request, []).append(part)
        self._submit(self._loader, ChunkLoad(self._context, part, after, self._begin_following))

    def _join_part(self, part: JobState, moves: list[ChunkMove]) -> bool:
        """Add what has come behind a part to it, unless it has been begun: each takes a millisecond besides its
        bytes."""
        with self._changed:
            if part.started or part.over:
                return False
            part.moves += moves
            return True

    def _await(self, task: AwaitedLoad) -> int:
        """A load whose chunks come while it runs; raises nothing."""
        (job,) = task.jobs
        with self._changed:
            job.started = not job.over
        if not job.started:
            return 0
        began_s = time.monotonic()
        error = self._error_of(task.run)
        with self._changed:
            self._changed.wait_for(lambda: not job.parts)
            self._end(job)
        seconds = time.monotonic() - began_s
        self._awaiter.stand_back(STAND_BACK_S)
        log_speed(logger, "Retrieved", job.tokens, job.nbytes, seconds, job.request)
        later_error = self._error_of(task.clean_up)
        error = error or later_error
        if error is not None:
            self.counters.add(errors=1)
            logger.warning("Moving KV failed; the engine goes on without: %s", error, exc_info=error)
        return 0

    def _admit(self, job: JobState) -> bool:
        """Take a job on; False, and it is over, when its role forbids it, nothing is asked, or it is too much."""
        groups = len(self._context.groups)
        wrong = next((move for move in job.moves if not 0 <= move.group < groups or not move.pages), None)
        if wrong is not None:
            logger.error(
                "Request %s: there is nothing to move as pages %s of group %d", job.request, wrong.pages, wrong.group
            )
            self.counters.add(errors=1)
        bound = self.options.max_load_chunks if job.is_load else self.options.max_store_chunks
        is_mine = self.options.role != ("kv_producer" if job.is_load else "kv_consumer")
        with self._changed:
            self._jobs.setdefault(job.request, []).append(job)
            self._chunks[job.is_load] += len(job.moves)
            if not is_mine or not job.moves or wrong is not None:
                self._end(job)
            elif self._chunks[job.is_load] > bound:
                self._refuse(job)
            return not job.over

    def _submit(self, executor: Executor[AnyMoverTask], task: AnyMoverTask) -> None:
        if not executor.submit(task):
            with self._changed:
                for job in task.jobs:
                    self._refuse(job)

    def _refuse(self, job: JobState) -> None:
        """Refuse a job that is too much; holds the lock."""
        if not job.over:
            if job.is_load:
                self.counters.add(refused_loads=1)
            else:
                self.counters.add(dropped_stores=len(job.moves))
                logger.info("Dropped %d chunks of request %s: too many wait", len(job.moves), job.request)
            self._end(job)

    def _run(self, task: MoverTask) -> int:
        """One task of a background thread; raises nothing."""
        jobs, is_load = task.jobs, task.jobs[0].is_load
        with self._changed:
            for job in jobs:
                job.started = not job.over
        has_begun = any(job.started for job in jobs)
        began_s = task.began_s = task.began_s or time.monotonic()
        error = self._error_of(task.run) if has_begun else None
        seconds = time.monotonic() - began_s
        self.counters.add(**{"load_seconds" if is_load else "store_seconds": seconds, "errors": error is not None})
        with self._changed:
            for job in jobs:
                job.seconds = seconds if job.started else 0.0
                self._end(job)
        if is_load and has_begun:
            self._loader.stand_back(STAND_BACK_S)
        for job in jobs if jobs[0].part_of is None else ():
            verb = "Retrieved" if is_load else "Stored"
            log_speed(logger, verb, job.tokens, job.nbytes, seconds, job.request)
        later_error = self._error_of(task.clean_up) if has_begun else None
        self.counters.add(errors=later_error is not None)
        error = error or later_error
        if error is not None and not self._failing[is_load]:
            logger.warning("Moving KV failed; the engine goes on without: %s", error, exc_info=error)
        self._failing[is_load] = error is not None
        return 0

    @staticmethod
    def _error_of(work: Callable[[], None]) -> BaseException | None:
        try:
            work()
        except BaseException as error:  # whatever it is, the engine waits for the end of its jobs
            return error
        return None

    def _cancel_all(self) -> None:
        with self._changed:
            for request in tuple(self._jobs):
                self._cancel(request)

    def _cancel(self, request: str) -> None:
        """Holds the lock."""
        for job in tuple(self._jobs.get(request, ())):
            self._give_up(job)

    def _give_up(self, job: JobState) -> None:
        """Holds the lock."""
        job.cancelled = True
        if not job.started:
            self._end(job)

    def _end(self, job: JobState) -> None:
        """Enter a job's end; holds the lock. A second call does nothing."""
        if job.over:
            return
        job.over = True
        mine = self._jobs[job.request]
        mine.remove(job)
        if not mine:
            del self._jobs[job.request]
        if job.part_of is not None:
            self._end_part(job, job.part_of)
            return
        self._chunks[job.is_load] -= len(job.moves)
        self.counters.add(cancelled_jobs=job.cancelled, stores=not job.is_load)
        if not job.is_load and job.moved + job.present < len(job.moves):
            self._finished.unstored += [move.key for move in job.moves]
        if job.is_load:
            self._end_load(job, job.moves[job.moved :])
        elif not any(not other.is_load for other in mine):
            self._finished.stored.add(job.request)
        self._changed.notify_all()

    def _end_part(self, part: JobState, whole: JobState) -> None:
        if not whole.is_torn:
            whole.count(part.moved, part.tokens, part.nbytes)
        whole.is_torn |= part.moved < len(part.moves)
        whole.parts -= 1
        self._changed.notify_all()

    def _end_load(self, job: JobState, missing: Sequence[ChunkMove]) -> None:
        self.counters.add(loads=1)
        self._finished.loaded.add(job.request)
        if missing and not job.cancelled:
            self.counters.add(failed_chunks=len(missing))
            pages = self._finished.failed_pages.setdefault(job.request, [])
            pages += [(move.group, page) for move in missing for page in move.pages]

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        """Where the engine computes; None on the CPU."""
        device = self._context.groups[0].paged.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _launched(self) -> torch.cuda.Event | None:
        stream = self._stream
        return None if stream is None else event_on(stream)
