"""How parts become a few large copies: which of their pages share a staging buffer, and what is copied from where.

Arithmetic alone: it touches no device, and no page. The unit is what one page holds in one plane of one layer: so many
bytes are contiguous in a part's memory, whose units lie in the order of (layers, planes, pages). The units of a job are
those of its parts behind each other, counted from 0; a buffer holds a run of them. What one part has of that run is one
extent of host memory. The first buffer is to be planned within microseconds: for each part as little as possible
is done, by what Python does in C, and for each buffer nothing by numpy, whose calls cost more than so few numbers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, compress, pairwise
from operator import attrgetter, mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvredis.adapters.transfer.base import NO_ROW, Part, check_part, layer_parts
from kvredis.adapters.transfer.kv_cache import PagedKV
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.copy import addresses_of

Numbers = npt.NDArray[np.int64]

_nbytes = attrgetter("nbytes")
_lender = attrgetter("obj")

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
    numbers the one at `first_page` + (start + g) // units * pages + u % pages. `part` is the first part's place in the
    job.
    """

    slot_unit: int
    total: int
    start: int
    units: int
    pages: int
    first_page: int
    layer: int
    part: int = 0


class Extents(NamedTuple):
    """Copies between host memory and a buffer: host addresses, places in the buffer, and sizes, all in bytes."""

    host: list[int]
    place: list[int]
    nbytes: list[int]


@dataclass(frozen=True)
class Plan:
    """A checked job but for its page numbers, which are looked at when they are asked for: a load's first copy need not
    wait for that. `begins` says where the units of each part begin, and at last how many there are; `alike` which parts
    begin a row of parts with as many units, as many pages and the same first layer, and at last how many parts there
    are. Of the page numbers of all parts behind each other each part's begin at one of `first_pages`.
    """

    paged: PagedKV
    parts: Sequence[Part]
    memories: Sequence[memoryview]
    unit_bytes: int
    planes: int
    begins: list[int]
    alike: list[int]
    page_counts: list[int]
    first_pages: list[int]
    first_layers: list[int]
    rows: Sequence[int] | None
    """Of each part, where its checksum is kept (transfer/base.py); None where none is wanted."""
    is_layered: bool
    """Whether some parts are layers of chunks."""
    locked: dict[int, bool] = field(default_factory=dict)
    """Whether memory that lenders have lent is page-locked, as far as the device was asked, by their identity."""
    known_numbers: Numbers | None = None
    """`numbers`, where another plan has the same."""

    def slots(self, slot_bytes: int, first_share: int = 1, last_share: int = 1) -> Iterator[Span]:
        """Give what each staging buffer holds, one after another; see spans_of. A part is cut between two layers where
        a layer of it is small enough, so that a layer's bytes are one copy. The first buffer of several is filled to
        one `first_share`-th, the last ones to less and less, down to one `last_share`-th."""
        most = max(slot_bytes // self.unit_bytes, 1)

        def grain(part: int) -> int:
            units, layer = self.begins[part + 1] - self.begins[part], self.planes * self.page_counts[part]
            return units if units * _WHOLE <= most else layer if layer * _WHOLE <= most else 1

        room = most if self.begins[-1] <= most // 2 else max(most // first_share, 1)
        return spans_of(self.begins, grain, most, room, max(most // last_share, 1))

    @property
    def units(self) -> int:
        """Of all parts."""
        return self.begins[-1]

    @property
    def rows_at(self) -> int:
        """Where the rows begin in `numbers`."""
        return self.first_pages[-1]

    @cached_property
    def numbers(self) -> Numbers:
        """What kernels look up: the page numbers, and behind them the rows. Raises LayoutError for a page that there is
        not, every time."""
        if self.known_numbers is not None:
            return self.known_numbers
        pages = np.fromiter(chain.from_iterable([part.pages for part in self.parts]), np.int64, self.rows_at)
        if pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < self.paged.pages:
            for part in self.parts:  # one by one, slowly: for the words of the error
                check_part(self.paged, part)
        return pages if self.rows is None else np.concatenate((pages, np.array(self.rows, np.int64)))

    def parts_before(self, unit: int) -> int:
        """How many of the first parts have no unit from `unit` on."""
        return bisect_right(self.begins, unit) - 1

    def held(self, span: Span) -> range:
        """The parts that have units there."""
        return range(bisect_right(self.begins, span.start) - 1, bisect_left(self.begins, span.stop))

    def lenders(self, span: Span) -> Mapping[int, memoryview]:
        """What lends the host memory of a buffer, each once: by the identity of that object, a view of it."""
        held = self.held(span)
        return {id(memory.obj): memory for memory in self.memories[held.start : held.stop]}

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
            found.append(Launch(at - span.start, stop - at, at - begins[part], units, pages, first_page, layer, part))
            at = stop
        return found

    def extents(self, span: Span, *, is_merged: bool = True) -> Extents:
        """Give the copies for one buffer; what adjoins in host memory that one object lends is one, unless each part is
        asked for."""
        held = self.held(span)
        memories = self.memories[held.start : held.stop]
        edges = self.begins[held.start : held.stop + 1]
        skipped = (span.start - edges[0]) * self.unit_bytes
        edges[0], edges[-1] = span
        addresses = addresses_of(memories)
        addresses[0] += skipped
        nbytes = [(stop - start) * self.unit_bytes for start, stop in pairwise(edges)]
        if is_merged:
            return merged(addresses, nbytes, list(map(id, map(_lender, memories))))
        return Extents(addresses, list(accumulate(nbytes[:-1], initial=0)), nbytes)


def plan(paged: PagedKV, parts: Sequence[Part]) -> Plan:
    """Check all parts as check_part does but for pages, at once, and give their plan. Raises LayoutError."""
    pages, memories, layers, rows = zip(*parts, strict=True) if parts else ((), (), (), ())
    page_counts = list(map(len, pages))
    are_alike = all(column.count(column[0]) == len(parts) for column in (page_counts, layers) if column)
    is_layered = layers.count(None) != len(parts)
    width = paged.planes * len(paged.layers)
    units, first_layers = [count * width for count in page_counts], [0] * len(parts)
    if is_layered:
        widths = [width if each is None else paged.planes * len(each) for each in layers]
        units = list(map(mul, widths, page_counts))
        first_layers = [0 if each is None else each.start for each in layers]
    unit_bytes = paged.page_tokens * paged.kv_heads * paged.head_dim * paged.dtype.itemsize
    wanted = [units[0] * unit_bytes] * len(parts) if parts and are_alike else [count * unit_bytes for count in units]
    if not all(is_range_of(each, len(paged.layers)) for each in set(layers)) or list(map(_nbytes, memories)) != wanted:
        for part in parts:  # one by one, slowly: for the words of the error, or for the layers
            check_part(paged, part)
    alike = [0, len(parts)]
    if not are_alike:
        kinds = list(zip(page_counts, units, first_layers, strict=True))
        alike[1:1] = [at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]]
    return Plan(
        paged,
        parts,
        memories,
        unit_bytes,
        paged.planes,
        list(accumulate(units, initial=0)),
        alike,
        page_counts,
        list(accumulate(page_counts, initial=0)),
        first_layers,
        None if rows.count(NO_ROW) == len(parts) else rows,
        is_layered,
    )


def is_range_of(layers: range | None, count: int) -> bool:
    """Whether these are layers that follow each other among `count`; None are all."""
    return layers is None or (layers.step == 1 and 0 <= layers.start < layers.stop <= count)


class LayerPlans:
    """Plans of one layer after the other of the same chunks, whose buffers and kernels are alike."""

    def __init__(self, paged: PagedKV, chunks: Sequence[Part]) -> None:
        """Raises LayoutError as `plan` does."""
        self.parts = layer_parts(paged, chunks, 0)
        self._first = plan(paged, self.parts)
        if any(
            whole.layers is not None or whole.memory.nbytes != len(paged.layers) * part.memory.nbytes
            for whole, part in zip(chunks, self.parts, strict=True)
        ):
            raise LayoutError("only whole chunks move by layers")
        self.nbytes = sum(memory.nbytes for memory in self._first.memories)
        """Of one layer."""
        self._chunks = chunks
        self._layers = range(len(paged.layers))
        self._locked: dict[int, bool] = {}
        self._spans: dict[tuple[int, int, int], list[Span]] = {}
        self._launches: dict[Span, list[Launch]] = {}
        self._extents: dict[Span, tuple[Extents, list[int]]] = {}
        self._lenders: dict[Span, Mapping[int, memoryview]] = {}

    def at(self, layer: int) -> "LayerPlan":
        """The plan of that layer. Raises LayoutError where there is none."""
        if layer not in self._layers:
            raise LayoutError(f"there is no layer {layer} among {len(self._layers)}")
        self._locked = {lender: True for lender, is_so in self._locked.items() if is_so}  # else it may be by now
        return LayerPlan(self, self._first, layer, self._locked)

    def together(self, layers: range) -> Plan:
        """The plan of several as one job, in which what adjoins in a chunk is one copy. Raises LayoutError."""
        made = plan(self._first.paged, layer_parts(self._first.paged, self._chunks, layers.start, len(layers)))
        return replace(made, known_numbers=self._first.numbers)

    def slots(self, slot_bytes: int, first_share: int, last_share: int = 1) -> list[Span]:
        kind = (slot_bytes, first_share, last_share)
        if kind not in self._spans:
            self._spans[kind] = list(self._first.slots(*kind))
        return self._spans[kind]

    def launches(self, span: Span) -> list[Launch]:
        """As Plan.launches, for layer 0."""
        if span not in self._launches:
            self._launches[span] = self._first.launches(span)
        return self._launches[span]

    def extents(self, span: Span) -> tuple[Extents, list[int]]:
        """As Plan.extents, for layer 0, and how far apart the layers of each are. None are merged: layers of chunks
        that adjoin do not."""
        if span not in self._extents:
            held, first = self._first.held(span), self._first
            apart = [(first.begins[part + 1] - first.begins[part]) * first.unit_bytes for part in held]
            found = first.extents(span, is_merged=False)
            some = list(map(bool, found.nbytes))
            host, place, nbytes, apart = (list(compress(column, some)) for column in (*found, apart))
            self._extents[span] = Extents(host, place, nbytes), apart
        return self._extents[span]

    def lenders(self, span: Span) -> Mapping[int, memoryview]:
        """As Plan.lenders; the first layer lies where the others do."""
        if span not in self._lenders:
            self._lenders[span] = self._first.lenders(span)
        return self._lenders[span]


class LayerPlan:
    """A Plan of one layer."""

    is_layered = True

    def __init__(self, plans: LayerPlans, first: Plan, layer: int, locked: dict[int, bool]) -> None:
        self.locked = locked
        self.memories = first.memories
        self.units = first.units
        self.rows = first.rows
        self.rows_at = first.rows_at
        self._plans = plans
        self._layer = layer
        self._first = first

    @property
    def numbers(self) -> Numbers:
        return self._first.numbers

    def slots(self, slot_bytes: int, first_share: int = 1, last_share: int = 1) -> list[Span]:
        return self._plans.slots(slot_bytes, first_share, last_share)

    def parts_before(self, unit: int) -> int:
        return self._first.parts_before(unit)

    def held(self, span: Span) -> range:
        return self._first.held(span)

    def lenders(self, span: Span) -> Mapping[int, memoryview]:
        return self._plans.lenders(span)

    def launches(self, span: Span) -> list[Launch]:
        return [launch._replace(layer=self._layer) for launch in self._plans.launches(span)]

    def extents(self, span: Span) -> Extents:
        first, apart = self._plans.extents(span)
        layer = self._layer
        return first._replace(host=[host + layer * each for host, each in zip(first.host, apart, strict=True)])


def spans_of(begins: Sequence[int], grain: Callable[[int], int], most: int, room: int, least: int) -> Iterator[Span]:
    """Share parts out to buffers of at most `most` units, the first of `room`: in order and without gaps. `begins` says
    where each part begins, and at last how many units there are. With `least` below `most` no buffer holds more than
    half of what is left then, or `least`.

    A part is cut only behind a multiple of its grain, unless not even one grain fits into an empty buffer. A buffer
    that is half full is left at that where the next part, or its rest, would have to be cut but fits into a new one.
    """
    at = 0
    while at < begins[-1]:
        if least < most:
            room = min(room, max(-(-(begins[-1] - at) // 2), least))
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


def merged(addresses: Sequence[int], nbytes: Sequence[int], lenders: Sequence[int]) -> Extents:
    """Extents that follow each other in a buffer without gaps, as the fewest copies; none for what is empty. CUDA
    refuses a copy that reaches from one page-locked allocation into the next: `lenders` tell them apart."""
    host, place, sizes = list[int](), list[int](), list[int]()
    end, at, last = -1, 0, 0
    for address, size, lender in zip(addresses, nbytes, lenders, strict=True):
        if not size:
            continue  # what is empty adjoins nothing
        if address == end and lender == last:
            sizes[-1] += size
        else:
            host.append(address)
            place.append(at)
            sizes.append(size)
        end, at, last = address + size, at + size, lender
    return Extents(host, place, sizes)
