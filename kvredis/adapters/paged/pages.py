"""Opaque pages: what an engine that lays out its own host memory (vLLM's CPU tier, SGLang's host pools) has stored.

Such an engine hands over bytes, not tensors. PageStore moves them in and out of a Backend and answers for each page: it
counts as stored when it is there after the last answer of the server, as loaded when all of its bytes are those that
were stored. Trouble is never raised, it is a False. TierJobs does so in the background.

Key. Engines with different formats must not take each other's pages, however alike: a key names everything that its
bytes mean.

    key = kvredis:<model>@<first 16 hex digits of sha256(facts)>:<what the engine calls the page>

`facts` is the ASCII JSON object of all that shapes the bytes (model, dtype, layout, ranks, sizes, format), keys sorted,
no blanks. The model is written as engine/keys.py writes it. There is no hash tag: an engine's name for a page tells
nothing of the prompt that it belongs to, so in a cluster the pages of a prompt spread over the nodes.

Value. A page is stored as a safetensors file (https://huggingface.co/docs/safetensors, "Format"), as engine/block.py
has it: a header padded to 512 bytes, then one tensor "kv", of U8 and one dimension. Its `__metadata__` has format, the
facts that the engine's adapter gives, and xxh3, the xxh3-128 of the tensor's bytes in 32 hexadecimal digits. WHY the
sum: neither engine ever looks at the bytes that it loads. A page that was damaged at rest or on its way would become
wrong tokens; with the sum it is a miss.

Ways. Between a page and shared memory there is one copy, which is summed as it is made. Over a socket there is none of
ours: a page is summed where it lies, the kernel sends it from there, and receives it where the engine wants it.
"""

import ctypes
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple, TypeVar

from xxhash import xxh3_128

from kvredis.adapters.engine.background import Executor, Task
from kvredis.adapters.engine.block import safetensors_header
from kvredis.adapters.engine.keys import MODEL_CHARS_MAX
from kvredis.adapters.engine.load import Intake
from kvredis.backends.base import Backend, Lease
from kvredis.backends.remote.backend import RemoteBlocks
from kvredis.backends.resp.wire import Scattered
from kvredis.backends.shm.buffers import LentLease
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import copy

T = TypeVar("T")

TOUCHES_MAX: Final = 64
"""Touches that wait for their turn; more are advice that comes too late."""
LOAD_PART_PAGES: Final = 512
"""A long load is asked for in parts, so that closing down need not wait for all of it."""

logger = logging.getLogger(__name__)


def page_prefix(model: str, facts: Mapping[str, Any]) -> bytes:
    """What every key of pages of this model and these `facts`, of JSON's types, begins with."""
    whole = {"format": FORMAT, "model": model, **facts}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]
    return f"{model_prefix(model).decode('ascii')}{digest}:".encode("ascii")


def model_prefix(model: str) -> bytes:
    """What every key of pages of this model begins with."""
    name = re.sub(r"[^A-Za-z0-9._/-]", "_", model)[:MODEL_CHARS_MAX]
    return f"kvredis:{name}@".encode("ascii")


FORMAT = "kvredis-page-1"
"""Version of this header; part of every key."""
SUM_DIGITS = 32
_BLANK_SUM = "0" * SUM_DIGITS
STEP_BYTES = 256 * 1024
"""As much is summed and then copied, so that the copy finds it in the cache."""


class PageFormat:
    """The header of all pages of `nbytes` bytes with these `facts`. Raises LayoutError when the facts are too long."""

    def __init__(self, facts: Mapping[str, str], nbytes: int) -> None:
        metadata = {"format": FORMAT, **facts, "xxh3": _BLANK_SUM}
        tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
        header = safetensors_header(metadata, tensor)
        place = header.rindex(b'"xxh3":"') + len(b'"xxh3":"')
        self.nbytes = nbytes
        self._before, self._behind = header[:place], header[place + SUM_DIGITS :]

    @property
    def total_bytes(self) -> int:
        """Length of a value: header and page."""
        return len(self._before) + SUM_DIGITS + len(self._behind) + self.nbytes

    def write(self, value: memoryview, pieces: Sequence[memoryview]) -> None:
        """Fill `value`, of total_bytes, with the page that lies in `pieces`, one copy."""
        place = self.total_bytes - self.nbytes
        chain = xxh3_128()
        for piece in pieces:
            for start in range(0, len(piece), STEP_BYTES):
                part = piece[start : start + STEP_BYTES]
                chain.update(part)
                copy(value[place : place + len(part)], part)
                place += len(part)
        if place != self.total_bytes:
            raise LayoutError(f"the page's pieces do not have {self.nbytes} bytes")
        value[: self.total_bytes - self.nbytes] = self._before + chain.hexdigest().encode("ascii") + self._behind

    def lend(self, pieces: Sequence[memoryview]) -> Scattered:
        """The page in `pieces` as a value that is sent from there, or received there: a header of its own before them,
        which is empty until `head` fills it."""
        return Scattered((memoryview(bytearray(self.total_bytes - self.nbytes)), *pieces))

    def head(self, value: Scattered) -> None:
        """Fill the header of a page that was lent."""
        header, *pieces = value.views
        if len(value) != self.total_bytes:
            raise LayoutError(f"the page's pieces do not have {self.nbytes} bytes")
        header[:] = self._before + _sum_of(pieces) + self._behind

    def check(self, value: Scattered, *, verify: bool = True) -> None:
        """As `read`, of a page that has come to where it was lent."""
        header, *pieces = value.views
        at = len(self._before)
        if header[:at] != self._before or header[at + SUM_DIGITS :] != self._behind:
            raise LayoutError("a page whose header is not of this model, layout and size")
        if verify and header[at : at + SUM_DIGITS] != _sum_of(pieces):
            raise LayoutError("a page whose bytes are not those that were stored")

    def read(self, value: memoryview, pieces: Sequence[memoryview], *, verify: bool = True) -> None:
        """Copy the page out of `value` into `pieces`, which have nbytes together. Raises LayoutError when it is not
        one of this format, or not what was stored; what the pieces hold then is undefined."""
        place = self.total_bytes - self.nbytes
        at = len(self._before)
        if len(value) != self.total_bytes:
            raise LayoutError(f"a page of {len(value)} bytes, its format has {self.total_bytes}")
        if value[:at] != self._before or value[at + SUM_DIGITS : place] != self._behind:
            raise LayoutError("a page whose header is not of this model, layout and size")
        chain = xxh3_128()
        for piece in pieces:
            for start in range(0, len(piece), STEP_BYTES):
                part = value[place : place + min(STEP_BYTES, len(piece) - start)]
                if verify:
                    chain.update(part)
                copy(piece[start : start + len(part)], part)
                place += len(part)
        if place != self.total_bytes:
            raise LayoutError(f"the page's pieces do not have {self.nbytes} bytes")
        if verify and value[at : at + SUM_DIGITS] != chain.hexdigest().encode("ascii"):
            raise LayoutError("a page whose bytes are not those that were stored")


def _sum_of(pieces: Sequence[memoryview]) -> bytes:
    chain = xxh3_128()
    for piece in pieces:
        chain.update(piece)
    return chain.hexdigest().encode("ascii")


def memory_at(address: int, nbytes: int) -> memoryview:
    """The `nbytes` bytes at `address` as writable memory, which the caller keeps where it is."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


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
        self._remote = backend if isinstance(backend, RemoteBlocks) else None
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
        lent = page.format.lend(page.pieces)
        sent = None if self._remote is None else self._remote.lend(page.key, lent)
        if sent is not None:
            with sent:
                page.format.head(lent)
                sent.commit()
            return True
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
        intake = Intake(self.backend, self._refuse)
        keys = [page.key for page in pages]
        lent: dict[bytes, Scattered] = {}
        if self._remote is not None and len(set(keys)) == len(keys):
            lent = {page.key: page.format.lend(page.pieces) for page in pages}
        load = self.backend.load(keys) if self._remote is None else self._remote.load(keys, into=lent)
        try:
            with closing(load) as leases:
                for place, (page, lease) in enumerate(zip(pages, leases, strict=False)):
                    come[place] = lease is not None and self._take(page, lease, intake, lent)
                    if until_missing and not come[place]:
                        break
        finally:
            intake.forget()

    def _take(self, page: Page, lease: Lease, intake: Intake, lent: Mapping[bytes, Scattered]) -> bool:
        with lease:
            try:
                if isinstance(lease, LentLease):
                    page.format.check(lent[page.key], verify=self._verify)
                else:
                    page.format.read(lease.view, page.pieces, verify=self._verify)
            except LayoutError as error:
                intake.refuse(page.key, lease, error)
                return False
            return intake.is_held(lease)

    def _refuse(self, key: bytes, why: LayoutError) -> None:
        logger.warning("%s is computed again, and deleted: %s", key.decode("ascii", "replace"), why)
        self._count(corrupt=1)

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


class Done(NamedTuple):
    """What became of a job: for each of its pages whether it is where it should be, and what it took."""

    job: int
    come: list[bool]
    seconds: float
    nbytes: int
    is_load: bool


class _TierJob(Task):
    """Pages to be moved, or `keys` to be touched; `over` is called once, when it has ended or was turned away."""

    def __init__(
        self, over: Callable[["_TierJob"], None], number: int, pages: Sequence[Page], *, is_load: bool = False,
        keys: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.number = number
        self.pages = pages
        self.is_load = is_load
        self.keys = keys
        self.come = [False] * len(pages)
        self.seconds = 0.0
        self.nbytes = 0
        self._call_over = over

    def end(self, tokens: int) -> None:
        self._call_over(self)
        super().end(tokens)


class TierJobs:
    """Loads and stores through `store`, which stays the caller's, for an engine whose scheduler must never wait. All
    methods but `drain` and `close` return at once, and may be called from any thread.

    Loads and stores have separate threads, as requests wait for loads. Both queues are bounded: a job too many has
    failed at once, which costs the engine a computation at worst. What was submitted is always answered, once.
    """

    def __init__(self, store: PageStore, *, pages_max: int, load_threads: int = 2) -> None:
        """At most `pages_max` pages wait to be stored, and as many to be loaded; a single job may be larger when it is
        alone."""
        self._store = store
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._waiting = {True: 0, False: 0}  # pages of loads, of stores, queued or under way
        self._touches = 0
        self._done: list[Done] = []
        self.dropped_jobs = 0
        """Jobs that the bound has turned away."""
        jobs_max = pages_max + TOUCHES_MAX + 1
        self._loads: Executor[_TierJob] = Executor(self._run, "kvredis tier loads", jobs_max, threads=load_threads)
        self._stores: Executor[_TierJob] = Executor(self._run, "kvredis tier stores", jobs_max)

    def submit(self, number: int, pages: Sequence[Page], *, is_load: bool) -> None:
        """Have pages loaded into their memory, or stored from it, which is the engine's again when the job is in
        `take_done`. A job too many has failed there."""
        job = _TierJob(self._over, number, pages, is_load=is_load)
        with self._lock:
            has_room = not self._waiting[is_load] or self._waiting[is_load] + len(pages) <= self._pages_max
            self._waiting[is_load] += len(pages)
        if not has_room:
            job.end(0)
        if not has_room or not (self._loads if is_load else self._stores).submit(job):
            self.dropped_jobs += 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Have keys touched behind what is to be stored; one too many, or of no keys, is dropped."""
        with self._lock:
            if not keys or self._touches >= TOUCHES_MAX:
                return
            self._touches += 1
        self._stores.submit(_TierJob(self._over, -1, (), keys=keys))

    def take_done(self) -> list[Done]:
        """The jobs that have ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
            return done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way."""
        return self._loads.is_idle and self._stores.is_idle

    def drain(self) -> None:
        """Wait until no job touches the engine's memory: what is under way ends, what is queued is done."""
        self._loads.settle()
        self._stores.settle()

    def close(self) -> None:
        """Turn away what has not begun, wait for what has, and end the threads. A second call does nothing."""
        self._loads.close()
        self._stores.close()

    def _run(self, job: _TierJob) -> int:
        if job.keys:
            self._store.touch(job.keys)
            return 0
        began_s = time.monotonic()
        try:
            come = self._load(job) if job.is_load else self._store.store(job.pages)
            job.nbytes = sum(page.format.nbytes for page, has in zip(job.pages, come, strict=True) if has)
            job.come = come
        except BaseException:  # the engine waits for an answer
            logger.exception("a job of the kvredis tier failed")
        job.seconds = time.monotonic() - began_s
        return 0

    def _load(self, job: _TierJob) -> list[bool]:
        come: list[bool] = []
        for start in range(0, len(job.pages), LOAD_PART_PAGES):
            part = job.pages[start : start + LOAD_PART_PAGES]
            come += [False] * len(part) if job.cancelled else self._store.load(part)
        return come

    def _over(self, job: _TierJob) -> None:
        with self._lock:
            self._touches -= bool(job.keys)
            if not job.keys:
                self._waiting[job.is_load] -= len(job.pages)
                self._done.append(Done(job.number, job.come, job.seconds, job.nbytes, job.is_load))
