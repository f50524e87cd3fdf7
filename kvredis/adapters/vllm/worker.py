"""The connector's worker side: between the step that its scheduler describes and the chunks that are moved.

The engine asks before, in and behind each forward pass; a ChunkMover works in the background. This is what lies
between the two: whose pages must be let go before a forward writes them, which loads are over, and which pages have
failed.

A connector is made and called by its worker, and is not told which it is: `worker_of` finds it. The worker has the
model, whose weights are part of what keys stand for, and before 0.33 it alone knows that the KV cache is about to be
unmapped. Interface: vllm/v1/worker/worker_base.py (get_model since 0.9), gpu_worker.py (get_draft_model, sleep,
wake_up).
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from kvredis.adapters.engine.keys import key_of_shard
from kvredis.adapters.engine.tensors import event_on
from kvredis.adapters.paged.jobs import ChunkMove, JobState, LoadJob, MovingOptions, PagedGroup, StoreJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer import open_transfer
from kvredis.adapters.transfer.base import Transfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.base import Backend
from kvredis.backends.remote.backend import RemoteBackend

from .held_pages import StoreOver
from .kv_layout import LayerGroup, in_order, paged_view, split_anew, state_view
from .request import Step
from .weights import Check, WeightsWatch


def worker_of(vllm_config: Any) -> Any:
    """The worker in this process that runs the engine of that configuration; None where there is none. Looks at all
    objects of the process once: some 0.1 s."""
    from vllm.v1.worker.worker_base import WorkerBase

    for found in gc.get_objects():
        # By the type itself: isinstance would ask proxies for what they stand for.
        if issubclass(type(found), WorkerBase):
            theirs = getattr(found, "vllm_config", None)
            # A connector that holds several gives each a copy of the configuration, whose parts are the same.
            if theirs is not None and theirs.compilation_config is vllm_config.compilation_config:
                return found
    return None


def models_of(worker: Any) -> list[Any]:
    """The model that a worker runs, and the one that drafts for it; none where there is no worker, or no model yet."""
    if worker is None:
        return []
    found = [getattr(worker, name, lambda: None)() for name in ("get_model", "get_draft_model")]
    return [model for model in found if hasattr(model, "named_modules")]


def call_around_sleep(worker: Any, before: Callable[[], None], behind: Callable[[], None]) -> None:
    """Have `before` called before the worker's memory is unmapped, and `behind` when its KV cache is mapped again, as
    vLLM calls unregister_kv_caches and restore_kv_caches since 0.33."""
    sleep, wake_up = worker.sleep, worker.wake_up

    def sleep_behind(*args: Any, **kwargs: Any) -> Any:
        before()
        return sleep(*args, **kwargs)

    def wake_up_before(tags: Sequence[str] | None = None) -> Any:
        woken = wake_up(tags)
        if tags is None or "kv_cache" in tags:
            behind()
        return woken

    worker.sleep, worker.wake_up = sleep_behind, wake_up_before


def _view(cache: torch.Tensor | Sequence[torch.Tensor], group: LayerGroup, pages: int, name: str) -> torch.Tensor:
    if not group.is_state:
        assert isinstance(cache, torch.Tensor)
        return paged_view(cache, group, pages, name)
    return state_view([cache] if isinstance(cache, torch.Tensor) else cache, group, pages, name)


logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 30.0
"""How long a forward pass waits for the copy of a page that it is about to write; longer, and the copy is broken, and
not stored."""
REST_WAIT_S = 30.0
"""How long an engine that goes to sleep waits for stores under way before it breaks them."""
IDLE_WAIT_S = 0.006
"""An engine with nothing to compute asks as fast as it can whether a load is over, and so keeps it from being so: a
wait, which a load's end ends, leaves the interpreter to the moving thread. A request that comes meanwhile waits as
well. On an H200 134 MB take 4 ms; a load that ends between two waits is heard of behind all that the engine does
there."""
IDLE_STORE_WAIT_S = 0.002
"""As well while stores read pages that are held. No request waits for these: one that comes is to wait less."""


@dataclass(slots=True)
class Results:
    """What is over since the last question: requests whose stores so far are over, those whose load's pages are the
    engine's again, those of these that have failed, and the pages (of the only group, where there is one) that hold
    nothing. `over` are stores that read no page any more, where layers are recurrent or the scheduler has held pages;
    `unstored` are keys of those of which something was not stored."""

    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)
    over: list[StoreOver] = field(default_factory=list)
    unstored: list[bytes] = field(default_factory=list)


class PagedWorker:
    """One rank's KV memory and what moves in and out of it. Methods come from one thread: the engine's."""

    def __init__(
        self,
        backend: Backend,
        groups: Sequence[LayerGroup],
        caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        pages: int,
        options: MovingOptions,
        weights: WeightsWatch | None = None,
        rank: int = 0,
    ) -> None:
        """`caches` are the engine's tensors by layer name, several for a recurrent layer, of `pages` pages. `weights`
        are this rank's (of all stages'), which are compared with those that a step's keys are of. Raises LayoutError
        where tensors are not what `groups` say."""
        self.groups = list(groups)
        names = sorted((name for group in groups for name in group.names), key=in_order)
        self.places = {name: place for place, name in enumerate(names)}
        """Each layer's number in the order of the forward pass."""
        self.weights = weights
        self._rank = rank
        self._check: Check | None = None  # of the step that was compared last
        self._compared_in: Step | None = None
        self._checks: dict[str, Check] = {}  # of loads
        self._undecided: dict[str, list[tuple[int, int]]] = {}  # loads that are over, and what has failed of them
        self._ratios: list[int] = []
        paged_groups = []
        for group in groups:
            paged = PagedKV([_view(caches[name], group, pages, name) for name in group.names])
            paged.check(group.layout)
            self._ratios.append(1 if group.is_state else group.page_tokens // paged.page_tokens)
            places = tuple(self.places[name] for name in group.names)
            paged_groups.append(PagedGroup(group.layout, paged, open_transfer(paged, sums=options.verify), places))
        self._device = paged_groups[0].paged.device
        self._paged = paged_groups
        self._transfers = [group.transfer for group in paged_groups]
        self._transfers_of_others: list[Transfer] = []
        self._shards = [group.layout.shard.encode("ascii") for group in groups]
        self._of_others: dict[tuple[int, int, int], int] = {}
        """The mover's groups for what engines of other sizes have stored, by our group, their ranks, and which one."""
        self._place_of = list(range(len(paged_groups)))
        """Of each of the mover's groups ours."""
        self.mover = ChunkMover(backend, paged_groups, options)
        self._waited_for: dict[str, LoadJob] = {}  # loads that requests wait for outside of the batch
        self._storing: dict[str, dict[int, set[int]]] = {}
        """The pages that stores read, by request and by group."""
        self._to_store: set[str] = set()  # requests of whose step's stores the mover has not heard yet
        self._tells_over = any(group.is_state for group in groups)
        self._unread: dict[str, int] = {}  # of the step's stores, until the mover has heard of them: its number
        self._reading: dict[tuple[str, int], JobState] = {}
        self._spoilt: set[str] = set()
        self._cancelled: set[str] = set()
        self._results = Results()
        self._has_told = False
        """Whether the scheduler is about to hear of a load that is over: it has something to compute then."""
        self._backend = backend

    # -- in the order of a step --------------------------------------------------------------------------------------

    def before(self, step: Step) -> None:
        """Before anything of the step is written: end what is not wanted, and what reads a page that is written now."""
        if self._check is not None and self._check.done():
            self._check.holds()
        if self.weights is not None and (step.check_weights or self.weights.is_suspect):
            self._compare(step)
        for name in step.moves.cancelled:
            self.mover.cancel(name)  # its pages are its own until it is told of
            self._cancelled |= {name} & self._waited_for.keys()
        for name, by_group in list(self._storing.items()):
            taken = {group: mine for group, pages in by_group.items() if (mine := pages & step.taken)}
            if taken:
                self._give_pages(name, taken)

    def _compare(self, step: Step) -> Check | None:
        """Whether the weights are those of the step's keys; None where that is not asked. Once a step."""
        if self._compared_in is not step:
            self._compared_in, self._check = step, self._compared(step)
        return self._check

    def _compared(self, step: Step) -> Check | None:
        if self.weights is None or not step.weights:
            return None
        try:
            digest = step.weights[self._rank]
            return self.weights.begin(step.number, digest, is_full=step.check_weights)
        except Exception as error:
            logger.warning("The model's weights cannot be compared: nothing is loaded or stored: %s", error)
            self.mover.counters.add(errors=1)
            self.weights.suspect()
            return self.weights.failed()

    def _give_pages(self, name: str, taken: Mapping[int, set[int]]) -> None:
        """Let go of pages, by group, that a request's stores read. Of layers with a window the rest of its prompt is as
        good as ever without them; layers that see the whole prefix have no use for what is behind a gap."""
        if name in self._waited_for or any(self.groups[group].window is None for group in taken):
            self._end_stores(name)
            return
        for group, pages in taken.items():
            self._storing[name][group] -= pages
        gone = {(group, page) for group, pages in taken.items() for page in self._kernel_pages(group, tuple(pages))}
        if not self.mover.let_go(name, gone, CANCEL_WAIT_S):
            self.mover.spoil(name, gone)
            logger.error("A copy of request %s is stuck: its pages are used all the same", name)

    def _end_stores(self, name: str) -> None:
        if name in self._waited_for:
            self._spoilt.add(name)  # its load ends with it, and is no load any more
        if not self.mover.cancel(name, CANCEL_WAIT_S):
            self.mover.spoil(name)
            logger.error("A copy of request %s is stuck: its pages are used all the same", name)
        del self._storing[name]

    def launched(self) -> torch.cuda.Event | None:
        """What the engine has given its GPU until now; None on a CPU."""
        return event_on(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None

    def load(self, step: Step, after: torch.cuda.Event | None = None) -> None:
        """Begin the step's loads. Their requests run in a later step: a load is over, and its bytes are known to be
        those that were stored, before a forward pass reads them. `after` is what was launched before the step: an
        engine that schedules ahead of its GPU has given pages anew that a forward pass under way still writes."""
        for job in step.moves.loads:
            job = replace(job, moves=self._loads(job.moves))
            self._waited_for[job.request] = job
            self.mover.load(job, after)
        if step.moves.loads:
            check = self._compare(step)  # now, so that the answer is there before the load is over
            if check is not None:
                self._checks |= dict.fromkeys((job.request for job in step.moves.loads), check)
        if step.is_idle and not self._has_told and self._waited_for:
            self.mover.wait_loaded(IDLE_WAIT_S)
        elif step.is_idle and self._reading:
            self.mover.wait_over(self._reading.values(), IDLE_STORE_WAIT_S)
        self._has_told = False

    def stores(self, step: Step) -> list[StoreJob]:
        """The step's stores as this rank has them. Their pages are watched from here on."""
        jobs: list[StoreJob] = []
        self._to_store = set()
        for job in step.moves.stores:
            if self._tells_over or job.request in step.held:
                self._unread[job.request] = step.number
        for job in step.moves.stores:
            ours = [move for move in job.moves if not self.groups[move.group].stored_by_another]
            if not ours:
                continue
            self._to_store.add(job.request)
            watched = self._storing.setdefault(job.request, {})
            for move in ours:
                watched.setdefault(move.group, set()).update(move.pages)
            jobs.append(replace(job, moves=[self._move(move) for move in ours]))
        return jobs

    def compared(self, step: Step, jobs: Sequence[StoreJob]) -> list[StoreJob]:
        """The jobs of a step, which are stored only where it computes with the weights that its keys are of."""
        check = self._compare(step) if jobs else None
        if check is not None and check.done():
            check.holds()  # so that the next step knows where it does not
        return [job if check is None else replace(job, is_sound=check.holds) for job in jobs]

    def store(self, step: Step, jobs: Sequence[StoreJob]) -> None:
        """Behind the forward pass, which is still running on a GPU: store what it has computed, and end the stores of
        layers that have left one by one. While it runs the weights are compared: before it that would be a millisecond
        or two of the first token."""
        after = self.launched() if jobs else None
        if step.compares:
            self._compare(step)
        states = [*self.mover.end_layers(), *(self.mover.store(job, after) for job in self.compared(step, jobs))]
        for state in states:
            if state.request in self._unread:
                self._reading[state.request, self._unread.pop(state.request)] = state
        self._results.over += [StoreOver(*each) for each in self._unread.items()]  # this rank stores nothing of them
        self._unread.clear()
        self._to_store = set()

    def results(self) -> Results:
        """What has come to an end."""
        over = self.mover.finished()
        self._results.stored |= over.stored
        self._results.unstored += over.unstored
        for name in over.stored:
            # Else one that came later reads its pages, and is told of when over: with speculative decoding vLLM asks
            # for results before it hands the step's stores over.
            if name not in self._to_store and not self.mover.is_storing(name):
                self._storing.pop(name, None)
        failed = {
            name: [(self._place_of[group], page) for group, page in pages] for name, pages in over.failed_pages.items()
        }
        ended = {name: failed.get(name, []) for name in over.loaded}
        ended, self._undecided = self._undecided | ended, {}
        for name, bad in ended.items():
            check = self._checks.get(name)
            if check is not None and not check.done():
                self._undecided[name] = bad
                continue
            if check is not None:
                del self._checks[name]
                self._spoilt |= set() if check.holds() else {name}
            job = self._waited_for.pop(name, None)
            moves = job.moves if job else []
            asked_for = [(self._place_of[move.group], page) for move in moves for page in move.pages]
            if name in self._cancelled:  # before it was known what has come
                self._cancelled.discard(name)
                self._clear(asked_for)
            if name in self._spoilt:
                self._spoilt.discard(name)
                bad = asked_for
            if bad:
                self._results.failed.add(name)
                self._clear(bad)
                self._results.failed_pages |= {page // self._ratios[group] for group, page in bad}
            if job is not None:
                self._results.loaded.add(name)
        for store, state in list(self._reading.items()):
            if state.over:
                del self._reading[store]
                self._results.over.append(StoreOver(*store, state.nbytes, state.seconds))
        results, self._results = self._results, Results()
        self._has_told = bool(results.loaded)
        return results

    def rest(self) -> None:
        """Let go of the engine's pages, which are unmapped, or lose what is in them, when this returns: loads that no
        scheduler knows to be over have failed, and stores have ended. Until the next step no page is touched."""
        for name in self._waited_for:
            self._spoilt.add(name)
            self.mover.cancel(name)
        if not self.mover.settle(REST_WAIT_S):
            logger.error("A store is not over after %d s: the engine sleeps without it", REST_WAIT_S)
        for name in list(self._storing):
            self._end_stores(name)
        if self.weights is not None:
            self.weights.suspect()

    def close(self) -> None:
        """End what is under way, and give the transfers' memory back."""
        self.mover.close()
        for transfer in (*self._transfers, *self._transfers_of_others):
            transfer.close()

    def use_gpu_memory(self) -> None:
        """Have blocks written to a server's GPU memory, and read there, by this rank's GPU. Their checksums must be
        found in passing then: no processor can hash them."""
        if self._device.type != "cuda" or not isinstance(self._backend, RemoteBackend):
            return
        for group in self._paged:
            passing = group.transfer.sum_of(group.layout.chunk_bytes()) if self.mover.options.verify else None
            if passing is not None:
                passing.cancel()
            elif self.mover.options.verify:
                logger.info("a server's GPU memory is not used: this GPU finds no checksums of this KV")
                return
        self._backend.use_gpu(self._device.index or 0)

    def warm_up(self) -> None:
        """Have connections opened before a request waits for them. No key is that short."""
        with contextlib.suppress(Exception), closing(self._backend.load([b"-"])) as leases:
            for lease in leases:
                if lease is not None:
                    lease.release()

    # -- shared ------------------------------------------------------------------------------------------------------

    def _move(self, move: ChunkMove) -> ChunkMove:
        """A move in this rank's key and in the kernels' pages."""
        shard = self._shards[move.group]
        if shard == b"0" and self._ratios[move.group] == 1:
            return move
        return ChunkMove(key_of_shard(move.key, shard), move.group, self._kernel_pages(move.group, move.pages))

    def _loads(self, moves: Sequence[ChunkMove]) -> list[ChunkMove]:
        """A load's moves. What an engine of another size has stored comes from those of its ranks which have some of
        this rank's heads, one behind the other."""
        if not any(move.ranks for move in moves):
            return [self._move(move) for move in moves]
        found: list[ChunkMove] = []
        for (group, ranks), run in groupby(moves, lambda move: (move.group, move.ranks)):
            if not ranks:
                found += map(self._move, run)
                continue
            chunks = [(move.key, self._kernel_pages(group, move.pages)) for move in run]
            own = self.groups[group].layout
            each = max(ranks // own.world_size, 1)  # of their ranks there are that many with heads of this one
            first = own.rank * ranks // own.world_size
            for rank in range(first, first + each):
                number, shard = self._group_of_other(group, ranks, rank)
                found += [ChunkMove(key_of_shard(key, shard), number, pages) for key, pages in chunks]
        return found

    def _group_of_other(self, place: int, ranks: int, rank: int) -> tuple[int, bytes]:
        """The mover's group for what that rank of so many has stored of ours, and how keys spell it."""
        group = self._paged[place]
        layout = replace(split_anew(group.layout, ranks), rank=rank)
        number = self._of_others.get((place, ranks, rank))
        if number is None:
            apart = group.layout.rank * group.layout.kv_heads - rank * layout.kv_heads
            if apart >= 0 and layout.kv_heads >= group.layout.kv_heads:
                heads = range(apart, apart + group.layout.kv_heads)
                made = replace(group, layout=layout, heads=heads)
            else:  # some of our pages' heads are all of its block's: no copy
                with torch.inference_mode(False):  # of a step, in which other threads could not write what is made
                    paged = PagedKV([layer[:, :, :, -apart : layout.kv_heads - apart] for layer in group.paged.layers])
                transfer = open_transfer(paged, is_rare=True)
                made = replace(group, layout=layout, paged=paged, transfer=transfer)
                self._transfers_of_others.append(transfer)
            number = self._of_others[place, ranks, rank] = self.mover.add(made)
            self._place_of.append(place)
        return number, layout.shard.encode("ascii")

    def _clear(self, pages: Collection[tuple[int, int]]) -> None:
        """Make zeros of what is not what was stored. What was damaged may be no number, and attention that reads a page
        to its end, weighing what is behind the last token with 0, gives none then: to the request that gets that
        page next."""
        for number, transfer in enumerate(self._transfers):
            if mine := sorted({page for group, page in pages if group == number}):
                transfer.paged.clear(mine)

    def _kernel_pages(self, group: int, pages: tuple[int, ...]) -> tuple[int, ...]:
        ratio = self._ratios[group]
        if ratio == 1:
            return pages
        # The engine waits: by a generator it takes twice as long.
        return tuple([page * ratio + part for page in pages for part in range(ratio)])
