"""How parts become a few large copies: which of their pages share a staging buffer, and what is copied from where.

Arithmetic alone: it touches no device, and no page. The unit is what one page holds in one plane of one layer: so many
bytes are contiguous in a part's memory, whose units lie in the order of (layers, planes, pages). The units of a job are
those of its parts behind each other, counted from 0; a buffer holds a run of them. What one part has of that run is one
extent of host memory. The first buffer is to be planned within microseconds: for each part as little as possible
is done, by what Python does in C, and for each buffer nothing by numpy, whose calls cost more than so few numbers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvredis.storage.addresses import address_of

from .paged import PagedKV
from .transfer import Part, check_part

Addresses = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_WHOLE = 8
"""A part that is no larger than an eighth of a buffer is never cut: a copy more costs more than the room does."""


class Span(NamedTuple):
    """Units [start, stop) of a job."""

    start: int
    stop: int


class Launch(NamedTuple):
    """What one kernel gathers or scatters: `total` units of parts alike, of `units` each, from unit `start` of the
    first of them on.

    Unit g of the launch lies in the buffer at unit `slot_unit` + g. It is unit u = (start + g) % units of part
    (start + g) // units: layer `layer` + u // (planes * pages), plane u // pages % planes, and of the job's page
    numbers the one at `first_page` + (start + g) // units * pages + u % pages.
    """

    slot_unit: int
    total: int
    start: int
    units: int
    pages: int
    first_page: int
    layer: int


class Extents(NamedTuple):
    """Copies between host memory and a buffer: host addresses, places in the buffer, and sizes, all in bytes."""

    host: Addresses
    place: Addresses
    nbytes: Addresses


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked job. `begins` says where the units of each part begin, and at last how many there are; `alike` which
    parts begin a row of parts with as many units, as many pages and the same first layer, and at last how many parts
    there are. `pages` are the page numbers of all parts behind each other; each part's begin at one of `first_pages`.
    """

    memories: Sequence[memoryview]
    unit_bytes: int
    planes: int
    begins: list[int]
    alike: list[int]
    page_counts: list[int]
    first_pages: list[int]
    first_layers: list[int]
    pages: Numbers

    def slots(self, slot_bytes: int, first_share: int = 1) -> Iterator[Span]:
        """Give what each staging buffer holds, one after another; see spans_of. A part is cut between two layers where
        a layer of it is small enough, so that a layer's bytes are one copy. The first buffer of several is filled to
        one `first_share`-th."""
        most = max(slot_bytes // self.unit_bytes, 1)

        def grain(part: int) -> int:
            units, layer = self.begins[part + 1] - self.begins[part], self.planes * self.page_counts[part]
            return units if units * _WHOLE <= most else layer if layer * _WHOLE <= most else 1

        room = most if self.begins[-1] <= most // 2 else max(most // first_share, 1)
        return spans_of(self.begins, grain, most, room)

    def parts_before(self, unit: int) -> int:
        """How many of the first parts have no unit from `unit` on."""
        return bisect_right(self.begins, unit) - 1

    def held(self, span: Span) -> range:
        """The parts that have units there."""
        return range(bisect_right(self.begins, span.start) - 1, bisect_left(self.begins, span.stop))

    def launches(self, span: Span) -> list[Launch]:
        """Give the kernels for one buffer: one for each row of parts alike."""
        found: list[Launch] = []
        at, begins = span.start, self.begins
        while at < span.stop:
            part = bisect_right(begins, at) - 1
            until = self.alike[bisect_right(self.alike, part)]
            stop = min(begins[until], span.stop)
            units, pages = begins[part + 1] - begins[part], self.page_counts[part]
            first_page, layer = self.first_pages[part], self.first_layers[part]
            found.append(Launch(at - span.start, stop - at, at - begins[part], units, pages, first_page, layer))
            at = stop
        return found

    def extents(self, span: Span) -> Extents:
        """Give the copies for one buffer; what adjoins in host memory is one."""
        held = self.held(span)
        edges = self.begins[held.start : held.stop + 1]
        skipped = (span.start - edges[0]) * self.unit_bytes
        edges[0], edges[-1] = span
        addresses = list(map(address_of, self.memories[held.start : held.stop]))
        addresses[0] += skipped
        return merged(addresses, [(stop - start) * self.unit_bytes for start, stop in pairwise(edges)])


def plan(paged: PagedKV, parts: Sequence[Part]) -> Plan:
    """Check all parts as check_part does, at once, and give their plan. Raises LayoutError, and nothing has moved."""
    memories = [part.memory for part in parts]
    page_counts = [len(part.pages) for part in parts]
    first_pages = list(accumulate(page_counts, initial=0))
    pages = np.fromiter(chain.from_iterable([part.pages for part in parts]), np.int64, first_pages[-1])
    layers = [part.layers for part in parts]
    width = paged.planes * len(paged.layers)
    units, first_layers = [count * width for count in page_counts], [0] * len(parts)
    if layers.count(None) != len(parts):
        widths = [width if each is None else paged.planes * len(each) for each in layers]
        units = list(map(mul, widths, page_counts))
        first_layers = [0 if each is None else each.start for each in layers]
    unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
    if (
        layers.count(None) != len(parts)
        or [memory.nbytes for memory in memories] != [count * unit_bytes for count in units]
        or (pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < paged.pages)
    ):
        for part in parts:  # one by one, slowly: for the words of the error, or for the layers
            check_part(paged, part)
    kinds = list(zip(page_counts, units, first_layers, strict=True))
    alike = [0, len(parts)]
    if kinds and kinds.count(kinds[0]) < len(kinds):
        alike[1:1] = [at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]]
    begins = list(accumulate(units, initial=0))
    return Plan(memories, unit_bytes, paged.planes, begins, alike, page_counts, first_pages, first_layers, pages)


def spans_of(begins: Sequence[int], grain: Callable[[int], int], most: int, room: int) -> Iterator[Span]:
    """Share parts out to buffers of at most `most` units, the first of `room`: in order and without gaps. `begins` says
    where each part begins, and at last how many units there are.

    A part is cut only behind a multiple of its grain, unless not even one grain fits into an empty buffer. A buffer
    that is half full is left at that where the next part, or its rest, would have to be cut but fits into a new one.
    """
    at = 0
    while at < begins[-1]:
        stop = min(at + room, begins[-1])
        part = bisect_right(begins, stop) - 1  # begins there, or would be cut
        if begins[part] < stop:
            first = max(begins[part], at)
            held, left = first - at, begins[part + 1] - first
            whole = stop - (stop - begins[part]) % grain(part)
            if held and left <= most and 2 * held >= room:
                stop = first
            elif whole > first:
                stop = whole
            elif held:
                stop = first
        yield Span(at, stop)
        at, room = stop, most


def merged(addresses: Sequence[int], nbytes: Sequence[int]) -> Extents:
    """Extents that follow each other in a buffer without gaps, as the fewest copies; none for what is empty."""
    host, place, sizes = list[int](), list[int](), list[int]()
    end, at = -1, 0
    for address, size in zip(addresses, nbytes, strict=True):
        if not size:
            continue  # where nothing lies is next to nobody
        if address == end:
            sizes[-1] += size
        else:
            host.append(address)
            place.append(at)
            sizes.append(size)
        end, at = address + size, at + size
    return Extents(np.array(host, np.uint64), np.array(place, np.uint64), np.array(sizes, np.uint64))
