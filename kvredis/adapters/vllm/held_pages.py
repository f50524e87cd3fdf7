"""Pages that the engine must not give away: those that the stores of a model with recurrent layers read, and those of a
request whose KV another engine waits for.

Behind the step that hands a state over, its page may become another request's long before the request ends, and the
store that reads it ends then (PagedWorker.before). Without prefix caching the pages of a request that has ended are the
first that vLLM gives to the next one. vLLM counts who uses a block (`BlockPool.touch`, `free_blocks`), so
a connector can be one of those. What is held is bounded in number and in time, and goes back at once where the engine
runs short: a store may then be given up, and the engine never waits.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvredis.adapters.paged.jobs import StoreJob

HELD_PART = 8
"""At most this part of the engine's blocks is held."""


class StoreOver(NamedTuple):
    """A worker's store that reads no page any more, whatever became of it: of which request and step, and what it has
    stored in which time."""

    request: str
    step: int
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Hold:
    pages: list[int]
    ranks: int
    """Which have not told that theirs is over."""
    since_s: float


class HeldPages:
    """The pages of one engine that are held. One thread calls it: the scheduler's."""

    def __init__(self, pool: Any, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`pool` is vLLM's BlockPool; nothing is held for longer than about `wait_s`."""
        self.ranks = 1
        """How many workers read each page."""
        self._pool, self._wait_s, self._clock = pool, wait_s, clock
        self._pages_max = int(pool.num_gpu_blocks) // HELD_PART
        self._holds: dict[tuple[str, int], _Hold] = {}
        self._call_before_reset()

    def __len__(self) -> int:
        """How many pages are held."""
        return sum(len(hold.pages) for hold in self._holds.values())

    def hold(self, step: int, stores: Iterable[StoreJob]) -> set[str]:
        """Hold the pages that a step's stores read: all of a store's, or none where that would be too much. What has
        been held for too long goes back. Gives the requests whose pages are held."""
        held, now_s = set[str](), self._clock()
        self._free([store for store, hold in self._holds.items() if now_s - hold.since_s > self._wait_s])
        for job in stores:
            pages = list(dict.fromkeys(page for move in job.moves for page in move.pages))
            if len(self) + len(pages) <= self._pages_max:
                self._pool.touch([self._pool.blocks[page] for page in pages])
                self._holds[job.request, step] = _Hold(pages, self.ranks, now_s)
                held.add(job.request)
        return held

    def over(self, stores: Iterable[StoreOver]) -> None:
        """Give back what these have read; each rank tells of each store once."""
        for store in stores:
            name = store.request, store.step
            if (hold := self._holds.get(name)) is not None:
                hold.ranks -= 1
                if hold.ranks <= 0:
                    self._free([name])

    def give_back(self) -> bool:
        """Give all of it back, and say whether that was anything."""
        has_any = bool(self._holds)
        self._free(list(self._holds))
        return has_any

    def _free(self, these: Iterable[tuple[str, int]]) -> None:
        for store in these:
            # The last one first, as vLLM frees: of what is cached the head is then found for the longest time.
            self._pool.free_blocks([self._pool.blocks[page] for page in reversed(self._holds.pop(store).pages)])

    def _call_before_reset(self) -> None:
        """A prefix cache is emptied only while no block is used, and sleep fails where it is not."""
        reset = self._pool.reset_prefix_cache

        def reset_behind() -> Any:
            self.give_back()
            return reset()

        self._pool.reset_prefix_cache = reset_behind
