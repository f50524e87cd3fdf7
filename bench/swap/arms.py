"""The ways of moving pages that `kvredis bench swap` compares, the memory they move between, and the link itself."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.shapes import BLOCK_TOKENS, ModelShape
from kvredis.bench.core.statistics import GB
from kvredis.bench.store_overhead.compute import DTYPES
from kvredis.storage.memory.copy import address_of
from kvredis.storage.memory.page_lock import PageLock, lock_pages

from .result import DIRECTIONS, OURS, Direction, LinkSample

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis.adapters.transfer.base import Part
    from kvredis.adapters.transfer.kv_cache import PagedKV

_SEED: Final = 20250106
_HEADER_BYTES: Final = 512
_BLANK: Final = 0xA5
"""What is written over bytes before others are to come there."""
_ROW_BYTES: Final = 64 * 1024 * 1024
ONE_BYTES: Final = 1024**3
PER_PAGE: Final = "a copy a layer, page, K/V"
TORCH: Final = "torch index, ring"
ARMS: Final = (PER_PAGE, TORCH, OURS)

Arm = Callable[[Sequence["Part"], Direction], None]
"""Moves the parts and returns when they have moved."""


class HostMemory:
    """`nbytes` of a process's own memory, known to the GPU's driver where there is one."""

    def __init__(self, nbytes: int, *, lock: bool) -> None:
        self._mapping = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._mapping)
        import numpy as np

        self.array: Any = np.frombuffer(self.view, np.uint8)
        self.array[:] = 0
        self._lock: PageLock | None = lock_pages(address_of(self.view), nbytes) if lock else None
        self.locked = self._lock is not None and self._lock.name == "cuda"

    def close(self) -> None:
        """Give it back."""
        if self._lock is not None:
            self._lock.release()
        del self.array


class Swap:
    """One shape's KV: twice as many pages as are moved, random, and the parts of one task by chunk."""

    def __init__(self, shape: ModelShape, tokens: int, device: Any) -> None:
        import torch

        from kvredis.adapters.engine.tensors import TORCH_DTYPES
        from kvredis.adapters.transfer.kv_cache import PagedKV

        self.shape = shape
        self.tokens = tokens
        count = 2 * (tokens // BLOCK_TOKENS)
        torch.manual_seed(_SEED)
        size = (2, count, BLOCK_TOKENS, shape.kv_heads, shape.head_dim * shape.dtype_bytes)
        made = [torch.randint(0, 256, size, dtype=torch.uint8, device=device) for _ in range(shape.layers)]
        dtype = TORCH_DTYPES[DTYPES[shape.dtype_bytes]]
        self.paged: PagedKV = PagedKV([layer.view(dtype).transpose(0, 1) for layer in made])
        self._true = [layer.clone() for layer in made]
        self._held = made
        self.pages = random.Random(_SEED).sample(range(count), tokens // BLOCK_TOKENS)
        self.nbytes = shape.block_bytes(tokens)

    def parts(self, host: memoryview, chunk_tokens: int) -> list[Part]:
        """Give the task's pages by chunks, each with its own block: as in an arena, behind headers, in random order."""
        from kvredis.adapters.transfer.base import Part

        held = chunk_tokens // BLOCK_TOKENS
        nbytes = self.shape.block_bytes(chunk_tokens)
        places = list(range(self.tokens // chunk_tokens))
        random.Random(_SEED + 1).shuffle(places)
        found = []
        for at, place in enumerate(places):
            start = place * (nbytes + _HEADER_BYTES) + _HEADER_BYTES
            found.append(Part(self.pages[at * held : (at + 1) * held], host[start : start + nbytes]))
        return found

    def host_bytes(self, chunk_tokens: int) -> int:
        """Give what `parts` needs."""
        return self.tokens // chunk_tokens * (self.shape.block_bytes(chunk_tokens) + _HEADER_BYTES)

    def blank(self, parts: Sequence[Part]) -> None:
        """Overwrite the parts' blocks: from the device's memory, which is faster than the CPU's own writing."""
        import torch

        from kvredis.adapters.engine.tensors import borrow

        blank = torch.full((parts[0].memory.nbytes,), _BLANK, dtype=torch.uint8, device=self.paged.device)
        for part in parts:
            borrow(part.memory, torch.uint8).copy_(blank, non_blocking=True)
        settle(self.paged.device)

    def check_out(self, parts: Sequence[Part]) -> int:
        """Compare every block with the pages it is of, on the device; VerificationError at a wrong byte. Give the bytes
        compared."""
        import torch

        from kvredis.adapters.engine.tensors import borrow

        device = self.paged.device
        found = torch.empty((len(parts), parts[0].memory.nbytes), dtype=torch.uint8, device=device)
        for row, part in zip(found, parts, strict=True):
            row.copy_(borrow(part.memory, torch.uint8), non_blocking=True)
        pages = torch.tensor([part.pages for part in parts], device=device)
        wanted = torch.stack([layer[:, pages] for layer in self._true])  # layers, 2, parts, pages of a part, ...
        wanted = wanted.permute(2, 0, 1, *range(3, wanted.ndim)).reshape(found.shape)
        if not torch.equal(found, wanted):
            raise VerificationError(f"{self.shape.name}: a block that was stored has other bytes than its pages")
        return found.numel()

    def wipe(self) -> None:
        """Overwrite the task's pages, and no other."""
        import torch

        pages = torch.tensor(self.pages, device=self.paged.device)
        for layer in self._held:
            layer[:, pages] = _BLANK

    def check_in(self) -> int:
        """Compare all memory of the KV with what it was; VerificationError at a wrong byte."""
        import torch

        for layer, wanted in zip(self._held, self._true, strict=True):
            if not torch.equal(layer, wanted):
                raise VerificationError(f"{self.shape.name}: pages that were loaded, or others, have other bytes")
        return self.nbytes

    def spoil(self, parts: Sequence[Part], direction: Direction) -> None:
        """Overwrite what is to be moved to; what moves in has been stored and compared just before."""
        if direction == "out":
            self.blank(parts)
        else:
            self.wipe()
        settle(self.paged.device)

    def check(self, parts: Sequence[Part], direction: Direction) -> int:
        """Compare what was moved to; gives the bytes."""
        return self.check_out(parts) if direction == "out" else self.check_in()


def settle(device: Any) -> None:
    """Wait for all that a GPU has been given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def arm_of(name: str, paged: PagedKV) -> tuple[Arm, Callable[[], None]]:
    """Make a way of moving, and what gives its memory back."""
    from kvredis.adapters.transfer.cpu import HostTransfer
    from kvredis.adapters.transfer.cuda.device import CudaDevice
    from kvredis.adapters.transfer.cuda.ring import RingTransfer
    from kvredis.adapters.transfer.factory import open_transfer

    if name == PER_PAGE:
        return (_per_page_gpu(paged) if paged.device.type == "cuda" else _per_page_cpu(paged)), lambda: None
    if name == OURS:
        transfer = open_transfer(paged)
    elif paged.device.type == "cuda":
        transfer = RingTransfer(paged, CudaDevice(paged, "torch"))
    else:
        transfer = HostTransfer(paged)

    def move(parts: Sequence[Part], direction: Direction) -> None:
        (transfer.store(parts) if direction == "out" else transfer.load(parts)).wait()

    return move, transfer.close


def _per_page_cpu(paged: PagedKV) -> Arm:
    from kvredis.adapters.engine.tensors import borrow

    def move(parts: Sequence[Part], direction: Direction) -> None:
        for part in parts:
            block = borrow(part.memory, paged.dtype).view(
                len(paged.layers), 2, len(part.pages), *paged.layers[0].shape[2:]
            )
            for layer, planes in zip(paged.layers, block, strict=True):
                for at, page in enumerate(part.pages):
                    for plane in (0, 1):
                        here, there = layer[page, plane], planes[plane, at]
                        if direction == "out":
                            there.copy_(here)
                        else:
                            here.copy_(there)

    return move


def _per_page_gpu(paged: PagedKV) -> Arm:
    """One cudaMemcpyAsync for each layer, page and plane, from Python: what the first engines with offloading did."""
    import torch

    from kvredis.adapters.transfer.cuda.runtime import cuda_runtime

    runtime = cuda_runtime()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    import numpy as np

    bases = np.array([layer.data_ptr() for layer in paged.layers], np.uint64)
    page, plane = (stride * paged.dtype.itemsize for stride in paged.layers[0].stride()[:2])
    unit = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize

    def move(parts: Sequence[Part], direction: Direction) -> None:
        assert runtime is not None
        for part in parts:
            pages = np.array(part.pages, np.uint64) * np.uint64(page)
            there = bases[:, None, None] + np.array([0, plane], np.uint64)[None, :, None] + pages[None, None, :]
            host = np.uint64(address_of(part.memory)) + np.arange(there.size, dtype=np.uint64) * np.uint64(unit)
            sizes = np.full(there.size, unit, np.uint64)
            target, source = (host, there.ravel()) if direction == "out" else (there.ravel(), host)
            runtime.copy(target.tolist(), source.tolist(), sizes.tolist(), stream.cuda_stream, batch=False)
        stream.synchronize()

    return move


class Link:
    """The copy engine by itself: page-locked memory to and from the GPU, or on the CPU one tensor to another."""

    def __init__(self, host: HostMemory, device: Any, nbytes: int) -> None:
        import torch

        self.nbytes = min(nbytes, len(host.view))
        self._host: Tensor = torch.from_numpy(host.array[: self.nbytes])
        self._there = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._on_gpu = self._there.is_cuda
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]

    def sample(self, repeat: int) -> list[LinkSample]:
        """Time one copy of all, and a row of 64 MiB ones, each way."""
        found = []
        for direction in DIRECTIONS:
            rates = [self._timed(direction, self.nbytes), self.row(direction)]
            found.append(LinkSample(repeat=repeat, direction=direction, one_gb_per_s=rates[0], row_gb_per_s=rates[1]))
        return found

    def row(self, direction: Direction) -> float:
        """Copy all in pieces of 64 MiB, which the device is given at once; GB/s."""
        return self._timed(direction, _ROW_BYTES)

    def _timed(self, direction: Direction, step: int) -> float:
        import torch

        began_s = time.perf_counter()
        with torch.cuda.stream(self._stream):
            for start in range(0, len(self._host), step):
                host, there = self._host[start : start + step], self._there[start : start + step]
                if direction == "out":
                    host.copy_(there, non_blocking=True)
                else:
                    there.copy_(host, non_blocking=True)
        if self._on_gpu:
            self._stream.synchronize()
        return len(self._host) / GB / (time.perf_counter() - began_s)
