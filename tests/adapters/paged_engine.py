"""An engine's paged memory in a few pages of random bytes, and what tests of moving chunks ask of it."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from kvredis.adapters.engine.block import checksum_of, encode_header
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import TORCH_DTYPES
from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, MovingOptions
from kvredis.adapters.paged.mover import ChunkMover, PagedGroup
from kvredis.adapters.transfer.base import Moving, Part, Transfer
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.backends.base import Backend
from kvredis.backends.local import LocalBackend
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.paged_layouts import block_of
from tests.backends.nodes import wait_until

PAGE = 8
CHUNK = 32
PAGES_A_CHUNK = CHUNK // PAGE
DENSE = ChunkLayout(4, 2, 32, "bf16", CHUNK, model="tiny")  # 32 KiB a chunk
LATENT = ChunkLayout(2, 1, 136, "fp16", CHUNK, model="tiny", planes=1, part="latent")  # 17 KiB
WAIT_S = 40


def memory(layout: ChunkLayout, pages: int, seed: int) -> list[torch.Tensor]:
    """Layers of random bits, in vLLM's two orders."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim, dtype = layout.kv_heads, layout.head_dim, TORCH_DTYPES[layout.dtype]
    layers = []
    for _ in range(layout.layers):
        nbytes = pages * PAGE * layout.bytes_per_token // layout.layers
        raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype)
        if layout.planes == 1:
            layers.append(raw.view(pages, 1, PAGE, heads, dim))
        else:
            layers.append(raw.view(pages, heads, PAGE, 2, dim).permute(0, 3, 2, 1, 4))
    return layers


def words(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bits as integers, by page: NaNs are equal to themselves."""
    return [layer.contiguous().view(torch.int16).flatten(1) for layer in layers]


class PagedEngine:
    """Pages of two groups of layers; `places` of the layers are interleaved. `transfer` moves them."""

    def __init__(
        self, seed: int = 1, pages: int = 40, transfer: Callable[[PagedKV], Transfer] = HostTransfer, groups: int = 2
    ) -> None:
        self.layouts = [DENSE, LATENT][:groups]
        self.memory = [memory(layout, pages, seed + number) for number, layout in enumerate(self.layouts)]
        paged = [PagedKV(layers) for layers in self.memory]
        places = [(0, 1, 3, 4), (2, 5)] if groups == 2 else [()]
        self.groups = [
            PagedGroup(*each) for each in zip(self.layouts, paged, map(transfer, paged), places, strict=False)
        ]
        self.before = self.bits()

    def bits(self) -> list[list[torch.Tensor]]:
        """All that is in the pages now."""
        return [[each.clone() for each in words(layers)] for layers in self.memory]

    def bytes_of(self, move: ChunkMove) -> bytes:
        """What a block of the move must hold."""
        return block_of(self.memory[move.group], move.pages).numpy().tobytes()

    def changed_pages(self) -> set[tuple[int, int]]:
        """(group, page) of what is not as it was at first."""
        return {
            (group, int(page))
            for group, (then, now) in enumerate(zip(self.before, self.bits(), strict=True))
            for old, new in zip(then, now, strict=True)
            for page in (old != new).any(1).nonzero()
        }


def moves_of(
    name: str, chunks: int, seed: int = 0, *, group: int = 0, pages: int = 40, first: int = 0
) -> list[ChunkMove]:
    """Chunks `first` and following of a prompt, in random pages of their own."""
    free = list(range(pages))
    random.Random(f"{name} {seed} {group}").shuffle(free)
    return [
        ChunkMove(
            f"kv:{name}:{group}:{first + number}".encode(),
            group,
            tuple(free[number * PAGES_A_CHUNK : (number + 1) * PAGES_A_CHUNK]),
        )
        for number in range(chunks)
    ]


def block_for(engine: PagedEngine, move: ChunkMove, *, is_checked: bool = True) -> bytes:
    """The stored block of a move's pages."""
    tensor = engine.bytes_of(move)
    checksum = checksum_of(memoryview(tensor)) if is_checked else ""
    return encode_header(engine.layouts[move.group], len(move.pages) * PAGE, checksum) + tensor


def pages_in(moves: Sequence[ChunkMove]) -> set[tuple[int, int]]:
    """(group, page) of all pages of the moves."""
    return {(move.group, page) for move in moves for page in move.pages}


@contextmanager
def mover_on(backend: Backend, engine: PagedEngine, **options: object) -> Iterator[ChunkMover]:
    """A mover; at the end nothing may be held any more."""
    with closing(ChunkMover(backend, engine.groups, MovingOptions(**options))) as mover:  # type: ignore[arg-type]
        yield mover
    assert_rests(backend)
    stats = mover.stats()
    assert stats["loading_chunks"] == stats["storing_chunks"] == 0


def load_now(mover: ChunkMover, job: LoadJob) -> int:
    """Load before it returns: how many of the job's first moves have come. No other load may be under way."""
    before = mover.stats()["loaded_chunks"]
    mover.load(job)
    assert mover.settle(WAIT_S)
    return int(mover.stats()["loaded_chunks"] - before)


def assert_rests(backend: Backend) -> None:
    """Neither leases nor reservations."""
    if isinstance(backend, FakeBackend):
        assert backend.leases == 0
    elif isinstance(backend, LocalBackend):
        store = backend.store  # whose disk may be writing still what was stored last
        wait_until(lambda: store.leases == store.reserved_bytes == 0, "no hold is left", WAIT_S)
        backend.store.check_integrity()


class GatedTransfer(HostTransfer):
    """Copies when it is told to; `began` says that a copy was asked for."""

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.open = threading.Event()
        self.began = threading.Event()
        self.calls: list[tuple[str, int, object]] = []
        """Direction, parts and event of each call."""

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        self._pass("store", parts, after)
        return super().store(parts, after=after)

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        self._pass("load", parts, after)
        return super().load(parts, after=after, is_last=is_last)

    def _pass(self, way: str, parts: Sequence[Part], after: object) -> None:
        self.calls.append((way, len(parts), after))
        self.began.set()
        assert self.open.wait(WAIT_S)
