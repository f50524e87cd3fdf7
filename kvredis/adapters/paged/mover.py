"""The worker's side of an engine, whichever it is: chunks between a Backend and the engine's pages, in the background.

A thread for loads and one for stores, each of which does one job after the other in few long calls without the GIL: an
engine that steps busily in the same process leaves little of it. Whatever happens there is a failed page, a counter and
a line in the log, and never an error of the engine's.

Until a job is over its pages are its own: a load writes them, a store reads them. `finished` says when that ends, and
`cancel` makes it end sooner.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvredis.adapters.engine.background import Behind, Later
from kvredis.adapters.engine.tensors import event_on
from kvredis.backends.base import Backend

from .jobs import ChunkMove, Counters, Errand, Finished, LoadJob, Means, MovingOptions, StoreJob
from .jobs import PagedGroup as PagedGroup
from .layerwise_store import LayerStores
from .load import ChunkLoading
from .rate_limit import Bandwidth
from .store import ChunkStoring
from .verify import Checking

logger = logging.getLogger(__name__)

STAND_BACK_S = 0.03
"""An engine that has waited for a load computes next, at first in Python: what is left of the load, a line in the log
and a question to the backend, holds it up for as long as it takes. By then its GPU has all that it is to do."""


class _Turn(Later):
    """One whole errand in the queue of a background thread."""

    def __init__(self, errand: Errand, work: ChunkLoading | ChunkStoring) -> None:
        super().__init__(0)
        self.errands = [errand]
        self.work = work
        self.run = work.run
        self.behind = work.behind
        self.began_s = 0.0
        """When it was begun, on the thread's clock; 0 before."""

    def cancel(self) -> None:
        """As Later.cancel, before it has begun. Then its copies write pages, which `run` waits for."""
        if not self.began_s:
            super().cancel()


Turn = _Turn | LayerStores


class ChunkMover:
    """Moves chunks between `backend` and `groups`; both stay the caller's. Layers are told of by
    one thread, the rest is asked for by any. Nothing here raises."""

    def __init__(self, backend: Backend, groups: Sequence[PagedGroup], options: MovingOptions | None = None) -> None:
        self.options = MovingOptions() if options is None else options
        self.counters = Counters()
        bandwidth, checking = Bandwidth(self.options.bytes_per_s), Checking(is_on=self.options.verify)
        self._means = Means(backend, tuple(groups), self.options, bandwidth, checking, self.counters)
        self._loader: Behind[Turn] = Behind(self._run, "kvredis loads", self.options.max_load_chunks)
        self._storer: Behind[Turn] = Behind(self._run, "kvredis stores", self.options.max_store_chunks)
        self._changed = threading.Condition()  # of all below
        self._errands: dict[str, list[Errand]] = {}
        self._chunks = {True: 0, False: 0}
        """Of errands that are not over: loads, stores."""
        self._finished = Finished()
        self._failing = {True: False, False: False}
        """Whether the latest load, and store, has failed: one line a spell."""
        self._layer_stores: LayerStores | None = None

    # ---- whole chunks ------------------------------------------------------------------------------------------------

    def load(self, job: LoadJob, after: torch.cuda.Event | None = None) -> None:
        """Bring a job's chunks in the background, behind the loads that were asked for before; on a GPU pages are
        written behind `after`, recorded behind what wrote them last."""
        self._load(job, after)

    def load_now(self, job: LoadJob) -> int:
        """The same before it returns: how many of the job's first moves have come. What has failed is in the next
        `finished`, as with `load`."""
        errand = self._load(job, None)
        self._wait_for([errand])
        return errand.come

    def store(self, job: StoreJob, after: torch.cuda.Event | None = None) -> None:
        """Store a job's chunks in the background; on a GPU behind `after`, recorded behind what computes them."""
        errand = Errand(job.request, job.moves, total=job.total, is_sound=job.is_sound)
        if self._admit(errand):
            self._submit(self._storer, _Turn(errand, ChunkStoring(self._means, errand, after)))

    def finished(self) -> Finished:
        """What is over since the last call; waits for nothing."""
        with self._changed:
            finished, self._finished = self._finished, Finished()
        return finished

    def wait_loaded(self, timeout_s: float) -> bool:
        """Wait until `finished` has a load to tell of or none is under way, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._finished.loaded) or not self._chunks[True], timeout_s)

    def is_storing(self, request: str) -> bool:
        """Whether a store of the request is not over."""
        with self._changed:
            return any(not errand.is_load for errand in self._errands.get(request, ()))

    def cancel(self, request: str, wait_s: float = 0.0) -> bool:
        """Want no more of a request's loads and stores. True: its pages are free now. False: a copy is under way still
        when `wait_s` have passed; they are free when `finished` names the request."""
        with self._changed:
            self._cancel(request)
            return self._changed.wait_for(lambda: request not in self._errands, wait_s)

    # ---- layer by layer ----------------------------------------------------------------------------------------------

    def save_layer(self, place: int, jobs: Sequence[StoreJob]) -> None:
        """That layer of the model is computed (on a GPU: launched on the current stream): it may leave. The jobs are
        the same for all layers of a step, which are said in their order; the first begins it."""
        stores = self._layer_stores
        if stores is not None and place != self._means.places[0] and place in stores.computed_s:
            return  # a draft's layer runs once for each draft
        if stores is None or not stores.computed(place, self._launched()):
            if stores is not None:
                stores.finish()
            errands = [Errand(job.request, job.moves, total=job.total, is_sound=job.is_sound) for job in jobs]
            errands = [errand for errand in errands if self._admit(errand)]
            self._layer_stores = LayerStores(self._means, errands)
            self._layer_stores.computed(place, self._launched())
            if errands:
                self._submit(self._storer, self._layer_stores)

    def end_layers(self) -> None:
        """The step is over. Stores go on in the background; those that lack a layer are given up."""
        if self._layer_stores is not None:
            self._layer_stores.finish()
        self._layer_stores = None

    @property
    def layer_stores(self) -> LayerStores | None:
        """Those of this step."""
        return self._layer_stores

    # ---- all of it ---------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing that was asked for is under way, at most so long; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._errands, timeout_s)

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, by name, and the chunks under way now."""
        with self._changed:
            under_way = {"loading_chunks": self._chunks[True], "storing_chunks": self._chunks[False]}
        return {**self.counters.sums(), **under_way}

    def close(self) -> None:
        """Give up what waits, end what is under way, and wait for that. Nothing may be asked for afterwards."""
        for behind in (self._loader, self._storer):
            self._cancel_all()
            behind.close()
        self._means.checking.close()
        self._cancel_all()  # what was asked for meanwhile has not begun, and does not any more

    # ---- errands -----------------------------------------------------------------------------------------------------

    def _load(self, job: LoadJob, after: torch.cuda.Event | None) -> Errand:
        errand = Errand(job.request, job.moves)
        if self._admit(errand):
            self._submit(self._loader, _Turn(errand, ChunkLoading(self._means, errand, after, self._begin_following)))
        return errand

    def _begin_following(self, left_bytes: int) -> None:
        """Have the load that comes next begin, on the loader's thread, with so many bytes under way at most."""

        def accept(turn: Turn) -> bool:
            if not isinstance(turn, _Turn):
                return False
            with self._changed:
                if turn.errands[0].over:
                    return False
                turn.errands[0].started = True
            turn.began_s = turn.began_s or time.monotonic()
            return True

        turn = self._loader.following(accept)
        if isinstance(turn, _Turn) and isinstance(turn.work, ChunkLoading):
            turn.work.begin(left_bytes)

    def _wait_for(self, errands: Sequence[Errand]) -> None:
        """Until they are over; what is done behind them goes on."""
        with self._changed:
            self._changed.wait_for(lambda: all(errand.over for errand in errands))

    def _admit(self, errand: Errand) -> bool:
        """Take an errand on; False, and it is over, when its role forbids it, nothing is asked, or it is too much."""
        groups = len(self._means.groups)
        wrong = next((move for move in errand.moves if not 0 <= move.group < groups or not move.pages), None)
        if wrong is not None:
            logger.error(
                "Request %s: there is nothing to move as pages %s of group %d", errand.request, wrong.pages, wrong.group
            )
            self.counters.add(errors=1)
        bound = self.options.max_load_chunks if errand.is_load else self.options.max_store_chunks
        is_mine = self.options.role != ("kv_producer" if errand.is_load else "kv_consumer")
        with self._changed:
            self._errands.setdefault(errand.request, []).append(errand)
            self._chunks[errand.is_load] += len(errand.moves)
            if not is_mine or not errand.moves or wrong is not None:
                self._end(errand)
            elif self._chunks[errand.is_load] > bound:
                self._refuse(errand)
            return not errand.over

    def _submit(self, behind: Behind[Turn], turn: Turn) -> None:
        if not behind.add(turn):
            with self._changed:
                for errand in turn.errands:
                    self._refuse(errand)

    def _refuse(self, errand: Errand) -> None:
        """It is too much; holds the lock."""
        if not errand.over:
            if errand.is_load:
                self.counters.add(refused_loads=1)
            else:
                self.counters.add(dropped_stores=len(errand.moves))
                logger.info("Dropped %d chunks of request %s: too many wait", len(errand.moves), errand.request)
            self._end(errand)

    def _run(self, turn: Turn) -> int:
        """One turn of a background thread; raises nothing."""
        errands, is_load = turn.errands, turn.errands[0].is_load
        with self._changed:
            for errand in errands:
                errand.started = not errand.over
        began_s, has_begun = time.monotonic(), any(errand.started for errand in errands)
        if isinstance(turn, _Turn):
            began_s = turn.began_s = turn.began_s or began_s
        error = self._error_of(turn.run) if has_begun else None
        seconds = time.monotonic() - began_s
        self.counters.add(**{"load_seconds" if is_load else "store_seconds": seconds, "errors": error is not None})
        with self._changed:
            for errand in errands:
                self._end(errand)
        if is_load and has_begun:
            self._loader.stand_back(STAND_BACK_S)
        for errand in errands:
            self._log(errand, seconds)
        error_behind = self._error_of(turn.behind) if has_begun else None
        self.counters.add(errors=error_behind is not None)
        error = error or error_behind
        if error is not None and not self._failing[is_load]:
            logger.warning("Moving KV failed; the engine goes on without: %s", error, exc_info=error)
        self._failing[is_load] = error is not None
        return 0

    @staticmethod
    def _error_of(work: Callable[[], None]) -> Exception | None:
        try:
            work()
        except Exception as error:
            return error
        return None

    def _cancel_all(self) -> None:
        with self._changed:
            for request in tuple(self._errands):
                self._cancel(request)

    def _cancel(self, request: str) -> None:
        """Holds the lock."""
        for errand in tuple(self._errands.get(request, ())):
            errand.cancelled = True
            if not errand.started:
                self._end(errand)

    def _end(self, errand: Errand) -> None:
        """It is over; holds the lock. A second call does nothing."""
        if errand.over:
            return
        errand.over = True
        mine = self._errands[errand.request]
        mine.remove(errand)
        if not mine:
            del self._errands[errand.request]
        self._chunks[errand.is_load] -= len(errand.moves)
        self.counters.add(cancelled_jobs=errand.cancelled, stores=not errand.is_load)
        if errand.is_load:
            self._end_load(errand, errand.moves[errand.come :])
        elif not any(not other.is_load for other in mine):
            self._finished.stored.add(errand.request)
        self._changed.notify_all()

    def _end_load(self, errand: Errand, missing: Sequence[ChunkMove]) -> None:
        self.counters.add(loads=1)
        self._finished.loaded.add(errand.request)
        if missing and not errand.cancelled:
            self.counters.add(failed_chunks=len(missing))
            pages = self._finished.failed_pages.setdefault(errand.request, [])
            pages += [(move.group, page) for move in missing for page in move.pages]

    def _log(self, errand: Errand, seconds: float) -> None:
        if errand.come and logger.isEnabledFor(logging.INFO):
            verb, gb = "Retrieved" if errand.is_load else "Stored", errand.nbytes / 1e9
            text = "%s %d tokens for request %s: %.4f GB in %.1f ms, %.2f GB/s"
            logger.info(text, verb, errand.tokens, errand.request, gb, seconds * 1e3, gb / max(seconds, 1e-9))

    @property
    def _stream(self) -> torch.cuda.Stream | None:
        """Where the engine computes; None on the CPU."""
        device = self._means.groups[0].paged.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _launched(self) -> torch.cuda.Event | None:
        stream = self._stream
        return None if stream is None else event_on(stream)
