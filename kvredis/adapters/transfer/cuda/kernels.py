"""Two Triton kernels, for all layers at once: paged memory into a staging buffer, and back.

The engine's layers are an array of addresses, so one launch reads however many there are. A program moves one tile of
one unit: what a page holds in one plane of one layer, at the strides that the engine chose. Copies need no arithmetic,
so elements are moved as the widest integers that addresses and strides are multiples of.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import triton  # where there is none, ring.py does not load this file
import triton.language as tl

from kvredis.adapters.transfer.kv_cache import INTEGERS, PagedKV
from kvredis.storage.errors import LayoutError

from .plan import Launch

logger = logging.getLogger(__name__)

_TILE_BYTES: Final = 32 * 1024
"""64 MiB are gathered in 37.6 us and scattered in 38.1, back to back; by 16 KiB in 38.5 and 38.6 (H200)."""
_WARPS: Final = 8
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
    """Index (index_kernels.py) by one launch for all layers. Making one compiles both kernels, in a second or two, or
    takes them from Triton's cache."""

    takes_handle = True

    def __init__(self, paged: PagedKV) -> None:
        word, sizes, strides = words_of(paged)
        tokens, heads, dim = sizes
        unit = tokens * heads * dim
        tile = min(triton.next_power_of_2(unit), _TILE_BYTES // word)
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
        """As Index.gather."""
        self._launch(launch, slot, pages, stream, scatter=False)

    def scatter(self, launch: Launch, slot: torch.Tensor, pages: torch.Tensor, stream: int = 0) -> None:
        """As Index.scatter."""
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
            *self._strides, *self._constants, scatter, num_warps=_WARPS,
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
