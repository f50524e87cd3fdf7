"""Torch tensors over the bytes of a reservation or a lease, and the one copy between them and a model's KV tensors.

A view made here borrows: it is valid only while the reservation or lease that lent the bytes is held.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch

from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import COPIES_STRIDED, Strides, copy_strided

from .layout import ChunkLayout

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "u8": torch.uint8,
    }
)

Made = TypeVar("Made")

WORD = torch.complex128
"""The widest element that torch copies: 16 bytes."""

LayerKV = Sequence[torch.Tensor] | torch.Tensor
"""K and V of one layer, each (tokens, kv_heads, head_dim) with any strides: a pair, or one tensor of (2, ...)."""

KV = Sequence[LayerKV] | torch.Tensor
"""K and V of every layer, in order, indexed by absolute token position; a tensor of AXES' order, with any strides, is
one too, and the fastest."""


def dtype_name(dtype: torch.dtype) -> str:
    """kvredis' name of a torch dtype. Raises LayoutError for one that a block cannot hold."""
    for name, known in TORCH_DTYPES.items():
        if known == dtype:
            return name
    raise LayoutError(f"KV of {dtype} cannot be stored; known: {', '.join(TORCH_DTYPES)}")


def view_tensor(view: memoryview, layout: ChunkLayout, tokens: int) -> torch.Tensor:
    """The bytes of one block's tensor as a torch tensor of layout.shape(tokens), without a copy.

    `view` has exactly layout.chunk_bytes(tokens) bytes, else LayoutError. torch has no read-only tensors: writing into
    what a lease lent is the caller's fault, so such a tensor must not leave the engine.
    """
    nbytes = layout.chunk_bytes(tokens)
    if len(view) != nbytes:
        raise LayoutError(f"{len(view)} bytes are not {tokens} tokens of {layout.bytes_per_token} bytes")
    return borrow(view, TORCH_DTYPES[layout.dtype]).view(layout.shape(tokens))


def borrow(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """All the bytes of a view as a flat tensor, without a copy; what was said of read-only ones holds here too."""
    lender: object = view
    if view.readonly:
        # torch.frombuffer warns of read-only memory, and silencing that per call is not thread-safe: borrow by address.
        hold = np.frombuffer(view, np.uint8)
        memory = (ctypes.c_char * view.nbytes).from_address(hold.ctypes.data)
        memory.hold = hold  # type: ignore[attr-defined]  # the view cannot be released under the tensor
        lender = memory
    return torch.frombuffer(lender, dtype=torch.uint8, count=view.nbytes).view(dtype)


def check_kv(kv: KV, layout: ChunkLayout, tokens: int) -> None:
    """Raises LayoutError unless `kv` has the layout's layers, heads, head_dim, dtype and at least `tokens` tokens."""
    if (
        isinstance(kv, torch.Tensor)
        and kv.dtype == TORCH_DTYPES[layout.dtype]
        and kv.ndim == 5
        and kv.shape[2] >= tokens
        and tuple(kv.shape) == layout.shape(kv.shape[2])
    ):
        return  # at once: an engine that stores after every step asks often
    if len(kv) != layout.layers:
        raise LayoutError(f"KV has {len(kv)} layers, the layout says {layout.layers}")
    for index, layer in enumerate(kv):
        if len(layer) != 2:
            raise LayoutError(f"KV of layer {index} is not a pair of K and V")
        for tensor in layer:
            if tensor.dtype != TORCH_DTYPES[layout.dtype]:
                raise LayoutError(f"KV of layer {index} is {tensor.dtype}, the layout says {layout.dtype}")
            if tensor.ndim != 3 or tuple(tensor.shape[1:]) != (layout.kv_heads, layout.head_dim):
                raise LayoutError(
                    f"KV of layer {index} has shape {tuple(tensor.shape)}, "
                    f"the layout says (tokens, {layout.kv_heads}, {layout.head_dim})"
                )
            if tensor.shape[0] < tokens:
                raise LayoutError(f"KV of layer {index} covers {tensor.shape[0]} tokens, not {tokens}")


class SpareMemory:
    """The memory of KV that has ended, for the next that needs as much: pages that were touched need not be faulted in
    again, which takes several times as long as the copy into them. One mapping at most is kept."""

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque(maxlen=1)
        """Threads take and give without a lock, which a finalizer could find held by its own thread: each step of a
        deque is one, so that no mapping is given twice."""
        self._is_closed = False

    def take(self, nbytes: int) -> mmap.mmap | None:
        """Memory of at least so many bytes, and of twice as many at most; None where there is none."""
        try:
            found = self._spare.pop()
        except IndexError:
            return None
        return found if nbytes <= len(found) <= 2 * nbytes else None

    def give(self, memory: mmap.mmap) -> None:
        """Take back what no tensor refers to any more; called by the thread that lets go of the last one."""
        if not self._is_closed:
            self._spare.append(memory)

    def close(self) -> None:
        """Give all of it to the system, now and from now on."""
        self._is_closed = True
        self._spare.clear()


def empty_kv(layout: ChunkLayout, tokens: int, device: torch.device, spare: SpareMemory | None = None) -> torch.Tensor:
    """Memory for `tokens` tokens of KV, with any bytes in it: a tensor of AXES' order, in memory with heads outside
    tokens as engines want.

    On the CPU it is a mapping of its own that asks for transparent huge pages: a prefix is written once into fresh
    memory, where faulting in 4 KiB pages takes longer than the copy itself (measured 1.3 against 5 GB/s). It comes from
    `spare`, and goes back there when nothing refers to the tensor any more.
    """
    shape = (layout.layers, layout.planes, layout.kv_heads, tokens, layout.head_dim)
    dtype = TORCH_DTYPES[layout.dtype]
    nbytes = layout.chunk_bytes(tokens)
    if device.type != "cpu" or nbytes < mmap.PAGESIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device).transpose(2, 3)
    memory = None if spare is None else spare.take(nbytes)
    if memory is None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them still gives memory
            memory.madvise(mmap.MADV_HUGEPAGE)
    lender = (ctypes.c_char * nbytes).from_buffer(memory)  # the tensor keeps it, and the mapping, alive
    if spare is not None:
        weakref.finalize(lender, spare.give, memory).atexit = False
    flat = torch.frombuffer(lender, dtype=torch.uint8)
    return flat.view(dtype).view(shape).transpose(2, 3)


@torch.no_grad()
def gather(kv: KV, start: int, stop: int, block: torch.Tensor) -> None:
    """Copies tokens [start, stop) of every layer into `block` of (layers, 2, stop - start, kv_heads, head_dim)."""
    if isinstance(kv, torch.Tensor):
        _copy(block, kv[:, :, start:stop])
        return
    for layer, pair in zip(block, kv, strict=True):
        _copy(layer[0], pair[0][start:stop])
        _copy(layer[1], pair[1][start:stop])


@torch.inference_mode()
def scatter(block: torch.Tensor, out: KV, start: int, tokens: slice = slice(None)) -> None:
    """Copies those `tokens` of a block into `out` from absolute position `start` on, and touches no other.

    Into a GPU's memory it is copied behind what the current stream has been given, and not waited for.
    """
    # WHY inference_mode: a thread of ours is in none, and outside of it a tensor that was made in it is not written.
    part = block[:, :, tokens]
    stop = start + part.shape[2]
    if isinstance(out, torch.Tensor):
        if out.is_cuda and not part.is_contiguous():
            # Cut on the GPU: here it would be copied twice, and the second time out of memory that is not page-locked.
            part = block.to(out.device, non_blocking=True)[:, :, tokens]
        # One copy for all layers: a copy per layer costs two dozen thread barriers a block.
        _copy(out[:, :, start:stop], part, non_blocking=True)
        return
    for layer, pair in zip(part, out, strict=True):
        _copy(pair[0][start:stop], layer[0], non_blocking=True)
        _copy(pair[1][start:stop], layer[1], non_blocking=True)


def _copy(to: torch.Tensor, given: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy all of one tensor into another of its shape and dtype; on a CPU by our own copy where both allow it."""
    strides = strides_of(to, given)
    if strides is not None:
        copy_strided([to.data_ptr()], [given.data_ptr()], strides)
        return
    to, given = in_words(to, given)
    to.copy_(given, non_blocking=non_blocking)


def strides_of(to: torch.Tensor, given: torch.Tensor) -> Strides | None:
    """How our own copy goes from one tensor to another of its shape and dtype; None where torch's has to be taken."""
    if not (
        COPIES_STRIDED
        and to.device.type == given.device.type == "cpu"
        and to.stride(-1) == given.stride(-1) == 1
        and to.shape == given.shape
        and to.dtype == given.dtype  # our copy trusts both; torch raises for what does not fit
    ):
        return None
    size, run = to.itemsize, to.shape[-1]
    order = sorted(range(to.ndim - 1), key=given.stride, reverse=True)  # read as it lies: writes are streamed
    while order and to.stride(order[-1]) == given.stride(order[-1]) == run:
        run *= to.shape[order.pop()]
    return Strides(
        tuple(to.shape[at] for at in order),
        run * size,
        tuple(to.stride(at) * size for at in order),
        tuple(given.stride(at) * size for at in order),
    )


def in_words(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape and dtype, as the same bytes in elements of 16 each where both allow that.

    What is not contiguous torch copies on a GPU element by element (ATen/native/cuda/CUDALoops.cuh vectorizes
    contiguous tensors alone): eight times as many loads and stores for bf16, each with its arithmetic of strides.
    """
    count = WORD.itemsize // one.itemsize
    if all(
        not each.data_ptr() % WORD.itemsize
        and not each.storage_offset() % count
        and not each.shape[-1] % count
        and each.stride(-1) == 1
        and not any(stride % count for stride in each.stride()[:-1])
        for each in (one, other)
    ):
        return one.view(WORD), other.view(WORD)
    return one, other


def outside_pools(make: Callable[[], Made]) -> Made:
    """What `make` returns or raises, called in a thread of its own: it takes a GPU's memory from where torch always
    does, not from a pool that this thread has chosen.

    An engine registers its KV within a pool that sleeps with it, and whatever is taken there is unmapped then. A pool
    is its own thread's alone (torch.cuda.use_mem_pool says so), as is the device that is chosen.
    """
    made: list[Made] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="kvredis outside pools")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return made[0]


def gpus_of(kv: KV) -> list[torch.device]:
    """The GPUs that KV is on: several where a model's layers are spread over them."""
    devices = [kv.device] if isinstance(kv, torch.Tensor) else [layer[0].device for layer in kv]
    return [device for device in dict.fromkeys(devices) if device.type == "cuda"]


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that the stream has been given until now: record_event, of a type that says which."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An event that is asked on its own device. A thread that has chosen no device is on GPU 0, where the runtime makes
    a context for whatever it is asked: half a GiB that another engine counts on."""

    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        """Whether it has been passed."""
        with torch.cuda.device(self.device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for it."""
        with torch.cuda.device(self.device):
            self.event.synchronize()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what the stream is given from now on come behind it."""
        self.event.wait(stream)
