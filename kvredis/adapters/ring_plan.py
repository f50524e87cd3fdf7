"""How parts become a few large copies: which of their pages share a staging buffer, and what is copied from where.

Arithmetic alone: it touches no device, and no page. The unit is what one page holds in one plane of one layer: so many
bytes are contiguous in a part's memory, whose units lie in the order of (layers, planes, pages). Any run of a part's
units is one extent of host memory then, and a part may be cut between any two units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvredis.storage.addresses import address_of

from .paged import PagedKV
from .transfer import Part, check_part

Addresses = npt.NDArray[np.uint64]

_RAMP = 8
"""The first buffer of a job is filled to an eighth: nothing is copied before it is gathered, and planned."""
_WHOLE = 8
"""A part that is no larger than an eighth of a buffer is never cut: a copy more costs more than the room does."""


class Piece(NamedTuple):
    """Units [start, stop) of a part."""

    part: int
    start: int
    stop: int


class Launch(NamedTuple):
    """What one kernel gathers or scatters: `parts` alike, `units` of each from its unit `start` on.

    Unit g of the launch lies in the buffer at unit `slot_unit` + g. It is unit u = start + g % units of part
    g // units: layer `layer` + u // (planes * pages), plane u // pages % planes, and of the job's page numbers the one
    at `first_page` + g // units * pages + u % pages.
    """

    slot_unit: int
    parts: int
    units: int
    start: int
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
    """A checked job. By part: how many units and pages it has, its first layer and where its page numbers begin among
    `pages`, which are those of all parts behind each other."""

    parts: Sequence[Part]
    unit_bytes: int
    planes: int
    units: list[int]
    page_counts: list[int]
    layers: list[int]
    first_pages: list[int]
    pages: npt.NDArray[np.int64]

    def slots(self, slot_bytes: int) -> Iterator[list[Piece]]:
        """Give what each staging buffer holds, one after another; see slots_of. A part is cut between two layers where
        a layer of it is small enough, so that a layer's bytes are one copy."""
        most = max(slot_bytes // self.unit_bytes, 1)
        grains = []
        for units, pages in zip(self.units, self.page_counts, strict=True):
            layer = self.planes * pages
            grains.append(units if units * _WHOLE <= most else layer if layer * _WHOLE <= most else 1)
        return slots_of(self.units, grains, most)

    def launches(self, pieces: Sequence[Piece]) -> list[Launch]:
        """Give the kernels for one buffer: neighbours that are whole and alike share one."""
        found: list[Launch] = []
        slot_unit = 0
        for part, start, stop in pieces:
            pages, layer, units = self.page_counts[part], self.layers[part], stop - start
            last = found[-1] if found else None
            if (
                last is not None
                and units == self.units[part] == last.units
                and (last.start, last.pages, last.layer) == (0, pages, layer)
                and last.first_page + last.parts * pages == self.first_pages[part]
            ):
                found[-1] = last._replace(parts=last.parts + 1)
            else:
                found.append(Launch(slot_unit, 1, units, start, pages, self.first_pages[part], layer))
            slot_unit += units
        return found

    def extents(self, pieces: Sequence[Piece]) -> Extents:
        """Give the copies for one buffer; what adjoins in host memory is one."""
        host = np.array(
            [address_of(self.parts[part].memory) + start * self.unit_bytes for part, start, _ in pieces], np.uint64
        )
        nbytes = np.array([(stop - start) * self.unit_bytes for _, start, stop in pieces], np.uint64)
        return merged(host, nbytes)


def plan(paged: PagedKV, parts: Sequence[Part]) -> Plan:
    """Check all parts as check_part does, at once, and give their plan. Raises LayoutError, and nothing has moved."""
    every = range(len(paged.layers))
    unit_elements = paged.page_tokens * paged.kv_heads * paged.head_dim
    unit_bytes = unit_elements * paged.dtype.itemsize
    page_counts = [len(part.pages) for part in parts]
    layers = [every if part.layers is None else part.layers for part in parts]
    units = [len(chosen) * paged.planes * count for chosen, count in zip(layers, page_counts, strict=True)]
    pages = np.fromiter(chain.from_iterable(part.pages for part in parts), np.int64, sum(page_counts))
    if (
        any(part.memory.nbytes != count * unit_bytes for part, count in zip(parts, units, strict=True))
        or any(part.layers is not None for part in parts)
        or (pages.size and not 0 <= int(pages.min()) <= int(pages.max()) < paged.pages)
    ):
        for part in parts:  # one by one, slowly: for the words of the error, or for the layers
            check_part(paged, part)
    return Plan(
        parts,
        unit_bytes,
        paged.planes,
        units,
        page_counts,
        [chosen.start for chosen in layers],
        list(accumulate(page_counts, initial=0))[:-1],
        pages,
    )


def slots_of(units: Sequence[int], grains: Sequence[int], most: int) -> Iterator[list[Piece]]:
    """Share parts of so many `units` out to buffers of at most `most` units, in order and without gaps.

    A part is cut only behind a multiple of its grain, unless not even one grain fits into an empty buffer. A buffer
    that is half full is left at that where the next part, or its rest, would have to be cut but fits into a new one.
    The first buffer is smaller, when there is more than one.
    """
    room = most if sum(units) <= most // 2 else max(most // _RAMP, 1)
    slot: list[Piece] = []
    held = 0
    for part, total in enumerate(units):
        start = 0
        while start < total:
            left = total - start
            stop = start + min(left, room - held)
            if stop < total:
                if slot and left <= most and 2 * held >= room:
                    stop = start
                elif (whole := stop - stop % grains[part]) > start:
                    stop = whole
                elif slot:
                    stop = start
            if stop > start:
                slot.append(Piece(part, start, stop))
                held += stop - start
            if stop == start or held >= room:
                yield slot
                slot, held, room = [], 0, most
            start = stop
    if slot:
        yield slot


def merged(host: Addresses, nbytes: Addresses) -> Extents:
    """Extents that follow each other in a buffer without gaps, as the fewest copies."""
    ends = np.cumsum(nbytes, dtype=np.uint64)
    place = ends - nbytes
    first = np.concatenate(([True], host[1:] != host[:-1] + nbytes[:-1]))
    starts = np.flatnonzero(first)
    return Extents(host[starts], place[starts], np.add.reduceat(nbytes, starts).astype(np.uint64))
