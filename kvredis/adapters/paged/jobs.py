"""The plain values of moving chunks: the jobs of one step, groups of layers, options, outcomes, counters.

A scheduler tells its workers what to move as plain values that pickle (ChunkMove, LoadJob, StoreJob, Moves): chunks by
key, and the engine's pages that they belong to. A chunk is always made of whole pages; one of which a page is missing
(a sliding window has let go of it) is not moved at all. The rest is the worker's: ChunkMover (mover.py) makes a
JobState of each job, and hands its MoverContext to loads and stores.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvredis.adapters.engine.background import Task
from kvredis.adapters.engine.block import block_bytes
from kvredis.adapters.engine.config import Role
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transfer.base import Transfer
from kvredis.adapters.transfer.checksum import Checksums
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config

from .rate_limit import Bandwidth


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One stored block and its place in the engine: `pages` of layer group `group`, in the order of the tokens. A load
    may name the chunk's last pages alone: the others are not written. `ranks` is how many ranks the engine has that
    stored it, 0 for as many as this one's."""

    key: bytes
    group: int
    pages: tuple[int, ...]
    ranks: int = 0


@dataclass(slots=True)
class LoadJob:
    """Chunks that a request waits for: head first, one group behind the other. With `waits_s` another engine stores
    them just now, and for the next one it is waited so long at most."""

    request: str
    moves: list[ChunkMove]
    waits_s: float = 0.0


@dataclass(slots=True)
class StoreJob:
    """Chunks of a request that have been computed, or will be when this step's forward pass is over: head first, one
    group behind the other. `total` is the prompt's length so far in tokens, for the log. With `head_first`
    another engine waits for them. A worker that learns only later whether what is computed may be stored gives
    `is_sound`, which waits for that; a scheduler does not."""

    request: str
    moves: list[ChunkMove]
    total: int
    is_sound: Callable[[], bool] | None = None
    head_first: bool = False


@dataclass(slots=True)
class Moves:
    """All that one step asks for. A request of `cancelled` wants nothing more of what was asked for it before."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)


BATCH_BYTES = 32 * 1024 * 1024
WINDOW_BYTES = 16 * BATCH_BYTES
WINDOW_PART = 8
PIECES = 4
"""What is under way at once is that many pieces at least: while one is waited for the others move."""
GPU_PIECES = 2
"""The same where they move between GPUs, sooner than they are asked for."""
GPU_PART = 4
"""A store may have reserved so large a part of a server's GPU memory, which is half of what the server lets one client
have: the copies of a whole prompt are then asked for while it is computed."""


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """Layers that share page numbers: what their chunks look like, where they are, and their transfer.

    `places` gives for each of the group's layers its number in the model, rising, for layer-wise work; () stands for
    0, 1, 2 ... Where blocks have more heads than the pages, `heads` are those of a block that are loaded; none of them
    is stored.
    """

    layout: ChunkLayout
    paged: PagedKV
    transfer: Transfer
    places: tuple[int, ...] = ()
    heads: range | None = None

    def __post_init__(self) -> None:
        """Raises LayoutError unless layout and pages agree, ValueError for places that do not fit."""
        self.paged.check(self.layout if self.heads is None else replace(self.layout, kv_heads=len(self.heads)))
        if self.places and (len(self.places) != self.layout.layers or list(self.places) != sorted(set(self.places))):
            raise ValueError(f"{self.layout.layers} layers cannot have the places {self.places}")

    def layer_of(self, place: int) -> int | None:
        """Which of the group's layers is the model's layer `place`; None: it is another group's."""
        if not self.places:
            return place if 0 <= place < self.layout.layers else None
        return self.places.index(place) if place in self.places else None

    def tokens_of(self, move: ChunkMove) -> int:
        """How many tokens the pages of a move hold."""
        return len(move.pages) * self.paged.page_tokens


@dataclass(frozen=True, slots=True)
class MovingOptions:
    """Bounds and habits of a ChunkMover."""

    role: Role = "kv_both"
    """A producer asked to load fails it, a consumer asked to store drops it, both at once and without a count."""
    max_load_chunks: int = 1024
    """Of all loads that are not over. One that would exceed it fails at once, so no job should have more."""
    max_store_chunks: int = 4096
    """Of all stores that are not over. One that would exceed it is dropped and counted."""
    verify: bool = True
    """Whether a loaded block's checksum, where it has one, is compared, and stored blocks get one."""
    batch_bytes: int = BATCH_BYTES
    """How much is given to a transfer in one call; a chunk at least."""
    window_bytes: int = WINDOW_BYTES
    """How much of what was leased or reserved may be under way at once, in each direction; a batch at least. It takes
    room in the backend's memory, so it should be an eighth of that at most. Layer by layer it does not hold: there all
    chunks of a step are under way at once."""
    bytes_per_s: float | None = None
    """Bound on what is moved, loads and stores together; loads go first."""

    def __post_init__(self) -> None:
        """Raises ValueError for a bound below one."""
        for name in ("max_load_chunks", "max_store_chunks", "batch_bytes", "window_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not 1 or more")


def options_of(config: Config, role: Role = "kv_both") -> MovingOptions:
    """What a configuration asks for. The window is an eighth of the arena at most: what is leased there takes room that
    the next blocks of the same load may need, and without it they are misses."""
    window = min(WINDOW_BYTES, config.capacity_bytes // WINDOW_PART)
    return MovingOptions(
        role=role,
        max_load_chunks=config.max_load_chunks,
        verify=config.verify_blocks,
        batch_bytes=max(min(BATCH_BYTES, window // 8), 1),
        window_bytes=max(window, 1),
        bytes_per_s=config.bandwidth_gb_s * 1e9 or None,
    )


@dataclass(slots=True)
class Finished:
    """What has come to an end since the last question.

    `loaded` has each load's request once the job is over, come or failed, and `failed_pages` which (group, page) of it
    have not come: their content is undefined. `stored` has a request whenever the last of its stores so far is over,
    stored or dropped: its pages may be written again. A cancelled one is told of too, but without failed pages, which
    may be another request's by now. `unstored` are the keys of stores of which something was not stored.
    """

    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed_pages: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    unstored: list[bytes] = field(default_factory=list)


Page = tuple[int, int]
"""A group's number, and a page of its memory."""


def pages_of(move: ChunkMove) -> set[Page]:
    """The pages of a move."""
    return {(move.group, page) for page in move.pages}


def _yes() -> bool:
    return True


class JobState:
    """A LoadJob or StoreJob under way: `moves` in or out of the engine's pages; a store's `total` are the tokens of the
    prompt so far. `is_sound` says whether it may be stored, and may wait for that. `cancelled` may be read without a
    lock, `moved` and what follows it belong to the thread that does the work, and the rest to the mover."""

    __slots__ = (
        *("cancelled", "gone", "head_first", "is_load", "is_sound", "is_torn", "is_whole"),
        *("moved", "moves", "nbytes", "over", "part_of", "parts", "present", "reading"),
        *("request", "seconds", "spoilt", "started", "tokens", "total"),
    )

    def __init__(
        self,
        request: str,
        moves: list[ChunkMove],
        *,
        total: int | None = None,
        is_sound: Callable[[], bool] | None = None,
        head_first: bool = False,
        part_of: "JobState | None" = None,
    ) -> None:
        self.request = request
        self.moves = moves
        self.total = total or 0
        self.is_load = total is None
        self.head_first = head_first
        self.is_sound: Callable[[], bool] = _yes if is_sound is None else is_sound
        self.moved = 0
        """Of a load, how many of its first moves have come; of a store, how many moves were stored."""
        self.tokens = self.nbytes = 0
        """Of these."""
        self.present = 0
        """Of a store, how many moves were stored before."""
        self.seconds = 0.0
        """How long it took, once it is over; 0 where it was not begun."""
        self.part_of = part_of
        self.parts = 0
        """Of a load in parts, how many are not over; each counts as this one's when it is."""
        self.is_torn = False
        """Whether one of them has not come whole."""
        self.gone: set[Page] = set()
        """Of a store, pages that are another's from now on; these, `reading` and `spoilt` are under the context's
        lock."""
        self.reading: set[Page] = set()
        """Those that are being read."""
        self.spoilt: set[Page] = set()
        """Those of them that are written meanwhile all the same."""
        self.is_whole = True
        """Whether its chunks leave whole, and not layer by layer."""
        self.cancelled = self.started = self.over = False

    def count(self, chunks: int, tokens: int, nbytes: int) -> None:
        """Note that so much more has moved."""
        self.moved += chunks
        self.tokens += tokens
        self.nbytes += nbytes


class Counters:
    """Sums by name, of several threads."""

    NAMES = (
        *("loads", "loaded_chunks", "loaded_bytes", "failed_chunks", "refused_loads"),
        *("corrupt_chunks", "expired_chunks", "missing_chunks", "cancelled_jobs"),
        *("stores", "stored_chunks", "stored_bytes", "present_chunks", "refused_stores", "dropped_stores", "errors"),
    )
    SECONDS = ("load_seconds", "store_seconds")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, int | float] = {**dict.fromkeys(self.NAMES, 0), **dict.fromkeys(self.SECONDS, 0.0)}

    def add(self, **amounts: float) -> None:
        """Add to some; KeyError for an unknown name."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def sums(self) -> Mapping[str, int | float]:
        """All of them, as they are now."""
        with self._lock:
            return dict(self._sums)


@dataclass(slots=True)
class LastLease:
    """What a mover's loads have found of late. The thread that loads alone reads and writes it."""

    is_on_gpu: bool = False
    """Whether the chunk that was leased last is in a server's GPU memory. The next one is likely to be there, too."""


@dataclass(frozen=True, slots=True)
class MoverContext:
    """All that the loads and stores of one ChunkMover share."""

    backend: Backend
    groups: list[PagedGroup]
    options: MovingOptions
    bandwidth: Bandwidth
    checksums: Checksums
    counters: Counters
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Of what the mover knows of its jobs."""
    last_lease: LastLease = field(default_factory=LastLease)

    @property
    def places(self) -> list[int]:
        """The layers of the model that there are, in order."""
        found = {place for group in self.groups for place in (group.places or range(group.layout.layers))}
        return sorted(found)

    def value_bytes(self, move: ChunkMove) -> int:
        """Length of the block that is stored for a move."""
        group = self.groups[move.group]
        return block_bytes(group.layout, group.tokens_of(move), is_checked=self.checksums.is_on)

    @property
    def piece_bytes(self) -> int:
        """How much one call of a transfer should move."""
        return self.bandwidth.piece_bytes(self.options.batch_bytes)

    @property
    def piece_bytes_max(self) -> int:
        """How much it may, where others are under way already."""
        return max(self.piece_bytes, self.bandwidth.piece_bytes(self.options.window_bytes // PIECES))

    @property
    def gpu_piece_bytes(self) -> int:
        """The same between GPUs."""
        return max(self.piece_bytes, self.bandwidth.piece_bytes(self.options.window_bytes // GPU_PIECES))


class MoverTask(Task):
    """What a thread of a ChunkMover does at a time: the moves of one job, or the stores of a step layer by layer."""

    def __init__(self, context: MoverContext, jobs: Sequence[JobState]) -> None:
        super().__init__(0)
        self.jobs = jobs
        """At least one where it is queued, all of them loads or all stores."""
        self.began_s = 0.0
        """When it was begun (time.monotonic); 0 before."""
        self._context = context

    def run(self) -> None:
        """Move what is asked for. Raises what backend and transfer raise; when it has ended no page is read or written
        any more."""
        with self._context.bandwidth.row(is_load=self.jobs[0].is_load):
            self._run()

    def clean_up(self) -> None:
        """Do what the engine does not wait for; called behind `run` in any case."""

    def _run(self) -> None:
        raise NotImplementedError
