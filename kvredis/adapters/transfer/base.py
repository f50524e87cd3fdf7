"""Chunks between an engine's paged memory and host memory: the step that PCIe bounds, behind one interface.

Host memory is a block's tensor: what a reservation or a lease lends behind the block's header, in the arena of this
process or mapped from the server's; or, for a GPU's transfer alone, a place in a server's GPU memory. cpu.py copies a
part at once. cuda/ring.py gathers pages into a ring of staging buffers, which leave by few large copies on streams of
their own. open_transfer chooses.
"""

import contextlib
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from kvredis.storage.errors import LayoutError

from .kv_cache import PagedKV

_READ_ONLY = attrgetter("memory.readonly")


NO_ROW = -1


class Part(NamedTuple):
    """Whole pages of one chunk, and the host memory of exactly their bytes: `layers` (default all) x planes x tokens x
    heads x dim, contiguous. `memory` stays borrowed until the Moving that it was given to is done. `row` is that of the
    Sum that its bytes are added to."""

    pages: Sequence[int]
    memory: memoryview
    layers: range | None = None
    row: int = NO_ROW


class Sum(Protocol):
    """The checksum (block.checksum_of) of one chunk, found where its bytes pass; to be asked as a Future is. Its
    owner asks for its result or cancels it."""

    @property
    def row(self) -> int:
        """What the chunk's parts are given with."""
        ...

    def done(self) -> bool:
        """Whether `result` waits for nothing."""
        ...

    def result(self) -> str:
        """Wait for it, once all parts have been given to the transfer. Raises RuntimeError when the device failed."""
        ...

    def cancel(self) -> bool:
        """Want it no more; True."""
        ...


class Event(Protocol):
    """A point in a stream of a GPU: torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has been passed."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Moving(Protocol):
    """Parts on their way. Their memory, both ends, is not to be touched before they have moved."""

    @property
    def parts_done(self) -> int:
        """How many parts, from the first on, have moved; never raises, asks the device and does not wait."""
        ...

    @property
    def done(self) -> bool:
        """Whether all have."""
        ...

    def wait(self, parts: int | None = None) -> None:
        """Block until the first `parts` (default all) have moved, without the GIL. Raises RuntimeError when the device
        failed: what has not moved then is undefined at its target."""
        ...


def wait_for_all(movings: Iterable[Moving]) -> None:
    """Wait until nothing is copied any more. What fails there is not raised: it was when the device failed first."""
    for moving in movings:
        with contextlib.suppress(RuntimeError):
            moving.wait()


class Layers(Protocol):
    """Chunks that leave layer by layer, planned once: what changes from layer to layer is where they begin."""

    def store(self, layer: int, count: int = 1, *, after: torch.cuda.Event | None = None) -> Moving:
        """As Transfer.store, of so many layers of each chunk that follow each other."""
        ...


class Transfer(Protocol):
    """Moves parts of one PagedKV. Loads and stores run beside each other and beside the engine's own work; those of one
    direction follow each other in the order in which they were asked for. One thread at a time a direction."""

    @property
    def paged(self) -> PagedKV:
        """The engine's side."""
        ...

    def store(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None) -> Moving:
        """Copy pages out to `memory` (writable). On a GPU what was recorded in `after` comes first, and nothing else is
        waited for: record it behind the forward pass. Raises LayoutError for memory of another length, or read-only."""
        ...

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        """Copy `memory` into pages. On a GPU the engine reads them only behind `Moving.wait`. `is_last`: a request
        waits for this, checksums included, and for nothing behind it."""
        ...

    def layers(self, parts: Sequence[Part]) -> Layers:
        """Plan whole chunks that leave layer by layer; their memory stays borrowed until the last Moving is done.
        Raises LayoutError, at once or with a layer, as `store` does."""
        ...

    def sum_of(self, nbytes: int) -> Sum | None:
        """Find the checksum of a chunk of so many bytes that moves next, as one part or as parts in the order of their
        layers. None where no device does: the caller hashes host memory."""
        ...

    def close(self) -> None:
        """Wait for what is under way and give staging memory back."""
        ...


def check_part(paged: PagedKV, part: Part) -> tuple[int, int, int, int, int]:
    """The shape of the part's memory as a tensor. Raises LayoutError for memory of another length, or no such layer or
    page: beyond the engine's pages a GPU's kernel would write over other memory."""
    layers = range(len(paged.layers)) if part.layers is None else part.layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= len(paged.layers):
        raise LayoutError(f"there are no layers {layers} among {len(paged.layers)}")
    if part.pages and not 0 <= min(part.pages) <= max(part.pages) < paged.pages:
        raise LayoutError(f"pages {min(part.pages)} to {max(part.pages)} are not all among {paged.pages}")
    shape = paged.shape(len(part.pages), len(layers))
    nbytes = torch.Size(shape).numel() * paged.dtype.itemsize
    if part.memory.nbytes != nbytes:
        raise LayoutError(f"{part.memory.nbytes} bytes are not {len(part.pages)} pages of {nbytes} bytes in all")
    return shape


def check_writable(parts: Sequence[Part]) -> None:
    """Raises LayoutError where memory to be stored into is read-only: a copy by address would end the process."""
    if any(map(_READ_ONLY, parts)):
        raise LayoutError("memory to store into is read-only")


def layer_parts(paged: PagedKV, parts: Sequence[Part], layer: int, count: int = 1) -> list[Part]:
    """So many layers, from that one on, of each of these whole chunks."""
    every, only = len(paged.layers), range(layer, layer + count)
    return [Part(part.pages, layers_bytes(part.memory, every, only), only, part.row) for part in parts]


def layers_bytes(chunk: memoryview, every: int, layers: range) -> memoryview:
    """The bytes of some layers of a chunk's tensor, which has `every` of them."""
    nbytes = chunk.nbytes // every
    return chunk[layers.start * nbytes : layers.stop * nbytes]
