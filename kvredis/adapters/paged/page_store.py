"""Pages in and out of a Backend for engines that call us in threads of their own, and want to know of each page.

Every answer here is about single pages and is true: a page counts as stored when it is there after the last answer
of the server, as loaded when all of its bytes are those that were stored. Trouble is never raised, it is a False.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, NamedTuple, TypeVar

from kvredis.backends.base import Backend, Lease
from kvredis.storage.errors import LayoutError

from .page_value import PageFormat

T = TypeVar("T")

logger = logging.getLogger(__name__)

COUNTERS: Final = ("looked_up", "found", "loaded", "missed", "corrupt", "stored", "already_stored", "refused")
"""What pages are counted under."""


class Page(NamedTuple):
    """A page of an engine's memory: its key, its format, and where it lies, in one or several pieces."""

    key: bytes
    format: PageFormat
    pieces: Sequence[memoryview]


class PageStore:
    """Pages behind `backend`, which this owns. Any thread may call anything; the calls wait for the server."""

    def __init__(self, backend: Backend, *, verify: bool = True) -> None:
        """With `verify` false the sums are written and not looked at."""
        self.backend = backend
        self._verify = verify
        self._lock = threading.Lock()
        self._counts: dict[str, int | float] = dict.fromkeys(COUNTERS, 0)
        self._counts |= {"bytes_in": 0, "bytes_out": 0, "load_s": 0.0, "store_s": 0.0}
        self._failing = False
        self.is_paused = False
        """While it is set nothing is found, loaded or stored: the engine changes what its pages mean."""

    # -- what is there ---------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of `keys` are there from the first on without a gap; one round trip."""
        run = self._tried("looking up", lambda: self.backend.match(keys), 0)
        self._count(looked_up=len(keys), found=run)
        return run

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each of `keys` is there: one round trip for a run, and one more for what is behind its end."""
        found = self._tried("looking up", lambda: self._present(keys), [False] * len(keys))
        self._count(looked_up=len(keys), found=sum(found))
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that `keys`, head first, were used."""
        self._tried("touching", lambda: self.backend.touch(keys), 0)

    def _present(self, keys: Sequence[bytes]) -> list[bool]:
        run = self.backend.match(keys) if keys else 0
        rest = keys[run + 1 :]
        return [True] * run + [False] * (run < len(keys)) + (self.backend.present(rest) if rest else [])

    # -- storing ---------------------------------------------------------------------------------------------------

    def store(self, pages: Sequence[Page]) -> list[bool]:
        """Store what is not there yet, tail first, and wait for the server; whether each page is there now."""
        began_s = time.perf_counter()
        there = self._tried("storing", lambda: self._store(pages), [False] * len(pages))
        self._count(store_s=time.perf_counter() - began_s, refused=there.count(False))
        return there

    def _store(self, pages: Sequence[Page]) -> list[bool]:
        keys = [page.key for page in pages]
        there = self._present(keys)
        missing = [place for place, found in enumerate(there) if not found]
        self._count(already_stored=len(pages) - len(missing))
        if not missing:
            return there
        sent = [place for place in reversed(missing) if self._put(pages[place])]
        self.backend.flush()
        arrived = self._present([keys[place] for place in sent]) if sent else []
        for place, has in zip(sent, arrived, strict=True):
            there[place] = has
        written = [pages[place] for place, has in zip(sent, arrived, strict=True) if has]
        self._count(stored=len(written), bytes_out=sum(page.format.nbytes for page in written))
        self.backend.touch(keys)
        return there

    def _put(self, page: Page) -> bool:
        room = self.backend.reserve(page.key, page.format.total_bytes)
        if room is None:  # the queue is full: this is a thread that may wait for it
            self.backend.flush()
            room = self.backend.reserve(page.key, page.format.total_bytes)
        if room is None:
            return False
        with room:
            page.format.write(room.view, page.pieces)
            room.commit()
        return True

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(self, pages: Sequence[Page], *, until_missing: bool = False) -> list[bool]:
        """Load pages into their pieces; whether each has come, and is what was stored. With `until_missing` those
        behind the first that has not are not asked for."""
        began_s = time.perf_counter()
        come = [False] * len(pages)
        self._tried("loading", lambda: self._load(pages, come, until_missing), None)
        nbytes = sum(page.format.nbytes for page, has in zip(pages, come, strict=True) if has)
        self._count(loaded=sum(come), missed=come.count(False), bytes_in=nbytes, load_s=time.perf_counter() - began_s)
        return come

    def _load(self, pages: Sequence[Page], come: list[bool], until_missing: bool) -> None:
        with closing(self.backend.load([page.key for page in pages])) as leases:
            for place, (page, lease) in enumerate(zip(pages, leases, strict=False)):
                come[place] = lease is not None and self._take(page, lease)
                if until_missing and not come[place]:
                    break

    def _take(self, page: Page, lease: Lease) -> bool:
        with lease:
            try:
                page.format.read(lease.view, page.pieces, verify=self._verify)
            except LayoutError as error:
                if lease.held:  # else the memory was another value's already
                    self._forget(page, error)
                return False
            return lease.held

    def _forget(self, page: Page, error: LayoutError) -> None:
        """Take a damaged page away, or it would be found again and again, and never stored anew."""
        logger.warning("%s is computed again, and deleted: %s", page.key.decode("ascii", "replace"), error)
        self._count(corrupt=1)
        self.backend.delete([page.key])

    # -- the rest --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: pages by COUNTERS, bytes, and seconds of loading and storing."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()

    def _count(self, **by: int | float) -> None:
        with self._lock:
            for name, count in by.items():
                self._counts[name] += count

    def _tried(self, doing: str, work: Callable[[], T], otherwise: T) -> T:
        """What `work` gives, or `otherwise` when it raises; the first of a spell of failures is logged."""
        if self.is_paused:
            return otherwise
        try:
            result = work()
        except Exception:
            if not self._failing:
                logger.exception("kvredis failed in %s; the engine goes on without", doing)
            self._failing = True
            return otherwise
        self._failing = False
        return result
