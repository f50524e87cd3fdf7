"""All that Triton compiles: pages into a staging buffer and back, and checksums of what lies in one.

Moving: the engine's layers are an array of addresses, so one launch reads however many there are. A program moves one
tile of one unit: what a page holds in one plane of one layer, at the strides that the engine chose. Copies need no
arithmetic, so elements are moved as the widest integers that addresses and strides are multiples of.

Checksums: XXH3-64 of chunks, found while they lie in a staging buffer; a core would read host memory again for it. XXH3
(https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm", inputs of more than 240 bytes) adds up 16
stripes of 64 bytes in eight lanes, and scrambles the lanes behind each such block of 1 KiB. What a block adds does not
depend on what came before it, so a first kernel, `_fold`, finds that for all blocks at once. The scrambling alone is
one block behind the other: `_chain`, for a sixteenth of the bytes, one program a chunk. What the lanes hold in the end
is made a number on the host (checksum.py).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import logging
import math
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch
import triton  # where there is none, device.py does not load this file
import triton.language as tl
from xxhash import xxh3_64_hexdigest

from kvredis.adapters.transfer.kv_cache import INTEGERS, PagedKV
from kvredis.storage.errors import LayoutError

from .checksum import BLOCK_BYTES, INITIAL, LANES, LAST_STRIPE, SECRET, digest_of
from .plan import Launch
from .tuning import TUNING, Tuning

logger = logging.getLogger(__name__)

_ALIGNED: Final = 16
_TL_INTEGERS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

# What differs between launches is not to be compiled anew for each value that is 1 or a multiple of 16.
_VARYING: Final = ["slot_unit", "units", "start", "page_count", "first_page", "first_layer"]


@triton.jit(do_not_specialize=_VARYING)
def _move(
    layers, pages, slot, slot_unit, units, start, page_count, first_page, first_layer,
    page_stride, plane_stride, token_stride, head_stride, dim_stride,
    plane_count: tl.constexpr, unit_words: tl.constexpr, heads: tl.constexpr, dim: tl.constexpr,
    tile: tl.constexpr, integer: tl.constexpr, scatter: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    part = (start + unit) // units
    inside = (start + unit) % units
    number = tl.load(pages + first_page + part * page_count + inside % page_count)
    plane = (inside // page_count) % plane_count
    layer = first_layer + inside // (page_count * plane_count)
    base = tl.load(layers + layer).to(tl.pointer_type(integer))
    base += number * page_stride + plane.to(tl.int64) * plane_stride
    word = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = word < unit_words
    token = (word // (heads * dim)).to(tl.int64)
    head = ((word // dim) % heads).to(tl.int64)
    paged = base + token * token_stride + head * head_stride + (word % dim).to(tl.int64) * dim_stride
    staged = slot + (slot_unit + unit).to(tl.int64) * unit_words + word
    if scatter:
        tl.store(paged, tl.load(staged, mask=mask), mask=mask)
    else:
        tl.store(staged, tl.load(paged, mask=mask), mask=mask)


class TritonIndex:
    """Index (device.py) by one launch for all layers. Making one compiles both kernels, in a second or two, or
    takes them from Triton's cache."""

    takes_handle = True

    def __init__(self, paged: PagedKV, tuning: Tuning = TUNING) -> None:
        self._warps = tuning.kernel_warps
        word, sizes, strides = words_of(paged)
        tokens, heads, dim = sizes
        unit = tokens * heads * dim
        tile = min(triton.next_power_of_2(unit), tuning.move_tile_bytes // word)
        self._tiles = triton.cdiv(unit, tile)
        self._word = INTEGERS[word]
        self._addresses = torch.tensor([layer.data_ptr() for layer in paged.layers], device=paged.device)
        self._addresses_at = self._addresses.data_ptr()
        self._strides = strides
        self._constants = (paged.planes, unit, heads, dim, tile, _TL_INTEGERS[word])
        nothing = Launch(slot_unit=0, total=0, start=0, units=1, pages=1, first_page=0, layer=0)
        room = torch.empty(unit * word, dtype=torch.uint8, device=paged.device)
        pages = torch.empty(1, dtype=torch.int64, device=paged.device)
        self._compiled: dict[bool, Any] = {}
        for scatter in (False, True):
            self._compiled[scatter] = self._launch_slowly(nothing, room, pages, scatter=scatter)
        stream = torch.cuda.current_stream(paged.device).cuda_stream if paged.device.type == "cuda" else 0
        try:
            for scatter in (False, True):
                self._launch(nothing, room, pages, stream, scatter=scatter)
            is_right = self._reads_right(paged, room, pages, stream)
        except Exception as error:  # whatever another release's launcher says to our arguments
            logger.info("Triton's compiled kernels are not called directly: %s", error)
            is_right = False
        if not is_right:
            self._compiled = {}

    def _reads_right(self, paged: PagedKV, room: torch.Tensor, pages: torch.Tensor, stream: int) -> bool:
        """Whether arguments arrive where the kernel looks for them: it reads one page, as torch does."""
        pages.zero_()
        room.zero_()
        last = len(paged.layers) - 1
        one = Launch(slot_unit=0, total=1, start=0, units=1, pages=1, first_page=0, layer=last)
        self._launch(one, room, pages, stream, scatter=False)
        wanted = paged.layers[last][0, 0].contiguous().view(-1).view(torch.uint8)
        if torch.equal(room, wanted):
            return True
        logger.warning("Triton's compiled kernels are not called directly: a page that was read is another's")
        return False

    def gather(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        self._launch(launch, slot, pages, stream, scatter=False)

    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        self._launch(launch, slot, pages, stream, scatter=True)

    def _launch(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int, *, scatter: bool) -> None:
        """Call the compiled kernel itself, with addresses and the stream's handle: finding it again by its arguments'
        types costs Triton more than the launch, and of each tensor it would ask the driver where that is. It may expect
        addresses that are multiples of 16, as those that it was compiled with are."""
        compiled, slot_at, pages_at = self._compiled.get(scatter), slot.data_ptr(), pages.data_ptr()
        if compiled is None or (slot_at | pages_at) % _ALIGNED:
            with _given(stream, slot.device):
                self._launch_slowly(launch, slot, pages, scatter=scatter)
            return
        slot_unit, total, start, units, page_count, first, layer, _ = launch
        compiled[total, self._tiles, 1](
            self._addresses_at, pages_at, slot_at, slot_unit, units, start, page_count, first, layer,
            *self._strides, *self._constants, scatter, stream=stream,
        )  # fmt: skip

    def _launch_slowly(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, *, scatter: bool) -> Any:
        """Give the compiled kernel; None from Triton's interpreter."""
        slot_unit, total, start, units, page_count, first, layer, _ = launch
        kernel: Any = _move  # what triton.jit has made of it
        return kernel[(total, self._tiles)](
            self._addresses, pages, slot.view(self._word), slot_unit, units, start, page_count, first, layer,
            *self._strides, *self._constants, scatter, num_warps=self._warps,
        )  # fmt: skip


def _given(stream: int, device: torch.device) -> AbstractContextManager[Any]:
    """Within it kernels go to that stream; Triton's interpreter has none."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))  # type: ignore[no-untyped-call]


def words_of(paged: PagedKV) -> tuple[int, tuple[int, int, int], tuple[int, int, int, int, int]]:
    """Bytes of the widest word that the KV can be copied by; (tokens, heads, words of a head) of a unit, axes that
    follow each other without a gap made one; strides of (page, plane, token, head, word) in words. Raises LayoutError
    where layers have different strides."""
    first = paged.layers[0]
    if any(layer.stride() != first.stride() for layer in paged.layers):
        raise LayoutError("the layers of this paged KV have different strides")
    itemsize = paged.dtype.itemsize
    page, plane, token, head, dim = (stride * itemsize for stride in first.stride())
    tokens, heads, width = paged.page_tokens, paged.kv_heads, paged.head_dim * itemsize
    word = itemsize
    if dim == itemsize or paged.head_dim == 1:
        if heads == 1 or head == width:
            heads, width, head = 1, heads * width, heads * width
            if tokens == 1 or token == width:
                tokens, width, token = 1, tokens * width, tokens * width
        axes = ((paged.pages, page), (paged.planes, plane), (tokens, token), (heads, head))
        moved = [stride for count, stride in axes if count > 1]
        word = math.gcd(8, width, *moved, *(layer.data_ptr() for layer in paged.layers))
        dim = word
    strides = (page // word, plane // word, token // word, head // word, dim // word)
    return word, (tokens, heads, width // word), strides


_SUMS_VARYING: Final = [
    *("first", "total", "start", "blocks", "chunk_blocks", "first_block", "room", "rows_at"),
]


@triton.jit(do_not_specialize=_SUMS_VARYING)
def _fold(
    slot, sums, pages, constants, first, total, start, blocks, chunk_blocks, first_block, room, rows_at,
    tile: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * tile + tl.arange(0, tile)
    here = block < total
    position = first_block + (start + block) % blocks
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    at = (first + block)[:, None, None].to(tl.int64) * 128 + stripe * 8 + lane
    value = tl.load(slot + at, mask=here[:, None, None], other=0).to(tl.uint64)
    even, odd = tl.split(tl.reshape(value, (tile, 16, 4, 2)))
    beside = tl.reshape(tl.join(odd, even), (tile, 16, 8))  # every word's neighbour, which takes no second load
    is_last = (position == chunk_blocks - 1)[:, None, None] & (stripe == 15)
    key = tl.load(constants + tl.where(is_last, 24 + lane, stripe + lane)).to(tl.uint64)
    keyed = value ^ key
    folded = tl.sum(beside + (keyed & 0xFFFFFFFF) * (keyed >> 32), axis=1)
    to = (first + block)[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :]
    tl.store(sums + to, folded.to(tl.int64), mask=here[:, None])
    row = tl.load(pages + rows_at + (start + block) // blocks, mask=here, other=0)
    tl.store(sums + room + first + block, row, mask=here)


@triton.jit
def _scrambled(lanes, key):
    return ((lanes ^ (lanes >> 47)) ^ key) * 0x9E3779B1


@triton.jit(do_not_specialize=_SUMS_VARYING)
def _chain(
    sums, states, results, constants, first, total, start, blocks, chunk_blocks, first_block, room,
    unrolled: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    begin = tl.maximum(part * blocks - start, 0)
    count = tl.minimum((part + 1) * blocks - start, total) - begin
    row = tl.load(sums + room + first + begin)
    if row >= 0:
        lane = tl.arange(0, 8)
        position = first_block + start + begin - part * blocks
        key = tl.load(constants + 16 + lane).to(tl.uint64)
        state = states + row * 8 + lane
        initial = tl.load(constants + 32 + lane)
        lanes = tl.where(position == 0, initial, tl.load(state)).to(tl.uint64)
        is_last = position + count == chunk_blocks
        whole = count - is_last.to(tl.int32)
        source = sums + (first + begin).to(tl.int64) * 8 + lane
        sectors = tl.arange(0, 2 * unrolled)
        ahead = sums + (first + begin + unrolled).to(tl.int64) * 8 + sectors * 4
        touched = sectors.to(tl.int64)
        while whole >= unrolled:
            near = tl.load(ahead, mask=sectors < 2 * (whole - unrolled), other=0)
            for place in tl.static_range(unrolled):
                lanes = _scrambled(lanes + tl.load(source + place * 8).to(tl.uint64), key)
            touched += near
            source += unrolled * 8
            ahead += unrolled * 8
            whole -= unrolled
        while whole > 0:
            lanes = _scrambled(lanes + tl.load(source).to(tl.uint64), key)
            source += 8
            whole -= 1
        if is_last:
            lanes += tl.load(source).to(tl.uint64)
            tl.store(results + row * 8 + lane, lanes.to(tl.int64))
        tl.store(state, lanes.to(tl.int64))
        tl.store(sums + (first + begin).to(tl.int64) * 8, tl.sum(touched))


class TritonSums:
    """Summing (device.py) for chunks of `paged`, by rows. Making one compiles both kernels and hashes a test
    pattern. Raises whatever Triton raises, and ValueError where a page's bytes in a layer are not whole blocks, or the
    pattern's checksum is not xxhash's."""

    def __init__(self, paged: PagedKV, rows: int, tuning: Tuning = TUNING) -> None:
        self._tuning = tuning
        unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
        if unit_bytes % BLOCK_BYTES:
            raise ValueError(f"a page of {unit_bytes} bytes a layer is not made of whole KiB")
        self._unit_blocks = unit_bytes // BLOCK_BYTES
        self._planes, self._layers = paged.planes, len(paged.layers)
        words = [*struct.unpack("<24q", SECRET), *struct.unpack_from("<8q", SECRET, LAST_STRIPE)]
        words += np.array(INITIAL, np.uint64).view(np.int64).tolist()
        on_gpu = paged.device.type == "cuda"
        self._constants = torch.tensor(words, dtype=torch.int64, device=paged.device)
        self._states = torch.zeros(rows * LANES, dtype=torch.int64, device=paged.device)
        # Written by the GPU itself, 64 bytes a chunk: a copy would wait behind those of the KV.
        self._results = torch.zeros(rows * LANES, dtype=torch.int64, pin_memory=on_gpu)
        self._found = self._results.numpy().view(np.uint64).reshape(rows, LANES)
        self._compiled: dict[Any, Any] = {}
        self._try_out(paged)

    def scratch(self, slot_bytes: int) -> torch.Tensor:
        """Memory for what a buffer's blocks add up to."""
        blocks = -(-slot_bytes // BLOCK_BYTES)
        return torch.empty(blocks * (LANES + 1), dtype=torch.int64, device=self._states.device)

    def fold(
        self, launches: Sequence[Launch], slot: torch.Tensor, scratch: torch.Tensor, pages: torch.Tensor,
        rows_at: int, stream: Any,
    ) -> None:  # fmt: skip
        tile = self._tuning.fold_tile_blocks
        for launch in launches:
            shape = self._shape(launch)
            arguments = (slot, scratch, pages, self._constants, *shape, _room(scratch), rows_at + launch.part, tile)
            self._launch(_fold, triton.cdiv(shape[1], tile), arguments, stream, self._tuning.kernel_warps)

    def chain(self, launches: Sequence[Launch], scratch: torch.Tensor, stream: Any) -> None:
        unrolled = self._tuning.chain_unrolled
        for launch in launches:
            shape = self._shape(launch)
            parts = -(-(launch.start + launch.total) // launch.units)
            arguments = (scratch, self._states, self._results, self._constants, *shape, _room(scratch), unrolled)
            self._launch(_chain, parts, arguments, stream, 1)

    def digest(self, row: int, nbytes: int) -> str:
        return f"{digest_of(self._found[row].tolist(), nbytes):016x}"

    def _shape(self, launch: Launch) -> tuple[int, int, int, int, int, int]:
        """In blocks of 1 KiB: where the launch begins in the buffer, how many it has, where in its first part it
        begins, how many a part has, how many its whole chunk, and how many of that come before the part."""
        each, layer = self._unit_blocks, self._planes * launch.pages * self._unit_blocks
        return (
            launch.slot_unit * each, launch.total * each, launch.start * each, launch.units * each,
            self._layers * layer, launch.layer * layer,
        )  # fmt: skip

    def _launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], stream: Any, warps: int) -> None:
        """Call the compiled kernel itself, as TritonIndex does, where the tensors are aligned as those it was compiled
        with."""
        compiled = self._compiled.get(kernel)
        if compiled is not None:
            given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
            if not (given[0] | given[1] | given[2]) % 16:
                compiled[programs, 1, 1](*given, stream=stream.cuda_stream)
                return
        views = (arguments[0].view(torch.int64), *arguments[1:])
        if stream is None:
            self._compiled[kernel] = kernel[(programs,)](*views, num_warps=warps)
            return
        with torch.cuda.stream(stream):
            kernel[(programs,)](*views, num_warps=warps)

    def _try_out(self, paged: PagedKV) -> None:
        """Compile, and see that two chunks of two pages have the checksums that xxhash finds."""
        units = self._planes * self._layers * 2
        part_bytes = units * self._unit_blocks * BLOCK_BYTES
        pattern = torch.arange(2 * part_bytes // 8, dtype=torch.int64) * 0x9E3779B97F4A7C1
        slot = pattern.view(torch.uint8).to(paged.device)
        scratch = self.scratch(slot.nbytes)
        rows = torch.tensor([1, 0], dtype=torch.int64, device=paged.device)
        launches = [Launch(slot_unit=0, total=2 * units, start=0, units=units, pages=2, first_page=0, layer=0, part=0)]
        stream = None
        for _ in range(2):  # the first time compiles, the second calls what was compiled
            self._found[:2] = 0
            self.fold(launches, slot, scratch, rows, 0, stream)
            self.chain(launches, scratch, stream)
            if slot.is_cuda:
                torch.cuda.synchronize(paged.device)
                stream = torch.cuda.current_stream(paged.device)
            data = pattern.view(torch.uint8).numpy().data
            wanted = [xxh3_64_hexdigest(data[part_bytes:]), xxh3_64_hexdigest(data[:part_bytes])]
            if [self.digest(0, part_bytes), self.digest(1, part_bytes)] != wanted:
                raise ValueError("the GPU's checksum of a test pattern is not xxhash's")
        if not slot.is_cuda:
            self._compiled = {}


def _room(scratch: torch.Tensor) -> int:
    """Where the rows of blocks begin in a scratch."""
    return scratch.numel() // (LANES + 1) * LANES
