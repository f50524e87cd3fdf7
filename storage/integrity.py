"""What a Store says of itself: the figures of each tier, and whether all that must agree does.

Both read the store from outside its hot path, so they live beside it; `Store.tiers` and `Store.check_integrity` are
the doors.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

from .entry import NOWHERE

if TYPE_CHECKING:
    from .store import Store


def tiers(store: "Store") -> dict[str, dict[str, int | str]]:
    """Figures of each tier, sizes in bytes: room, entries, holds and what the memory is made of."""
    arena = store.arena
    figures: dict[str, dict[str, int | str]] = {
        "memory": {
            "capacity": arena.nbytes,
            "used": store.used_bytes,
            "free": store.allocator.free_bytes,
            "largest_free": store.allocator.longest_bytes,
            "reserved": store.reserved_bytes,
            "inline": store.inline_bytes,
            "entries": len(store.index) + store.flushed_entries - store.away,
            "leases": store.leases,
            "pages": arena.nbytes // arena.page_bytes,
            "page_size": arena.page_bytes,
            "page_kind": arena.pages,
            "page_locked": arena.page_locked,
            "policy": store.policy.name,
        }
    }
    if store.tiering is not None:
        figures["memory"]["unsaved"] = len(store.unsaved)
        figures["disk"] = store.tiering.figures()
    return figures


def ends(store: "Store") -> list[tuple[int, int]]:
    """For each database, how many keys have an end, and the sum of those ends in Unix ms.

    Blocks seldom have one, so what is walked is the list of deadlines, unless that is long: then the keys cost less.
    """
    counts = [[0, 0] for _ in store.index.spaces]
    deadlines = store._expiries
    if len(deadlines) * 4 < len(store.index):
        found = [store.index.get(key, database.number) for key, database in deadlines.held()]
        entries = [entry for entry in found if entry is not None]
    else:
        entries = [entry for each in store.index.spaces for entry in list(each.values()) if entry.expire_at_ms]
    for entry in entries:
        counts[entry.space][0] += 1
        counts[entry.space][1] += entry.expire_at_ms
    return [(count, total) for count, total in counts]


def check_integrity(store: "Store") -> None:
    """Raise AssertionError unless index, policies, allocator and byte accounts agree; the store's lock is held."""
    store.index.check_integrity()
    store.allocator.check_integrity()
    flushed = [entry for entries in store._flushed for entry in entries.values()]
    in_arena = [entry for entry in (*store.index, *flushed) if entry.extent is not NOWHERE]
    away = [entry for entry in (*store.index, *flushed) if not entry.is_resident]
    assert len(away) == store.away
    assert all(entry.record is not None for entry in away), "a block is nowhere"
    if store.tiering is not None:
        kept = {entry for entry in store.unsaved if not entry.database.flushed}
        assert kept == {entry for entry in store.index if entry.record is None}
        store.tiering.superseded.check_integrity(store.unsaved)
    inline = [entry for entry in (*store.index, *flushed) if entry.value is not None]
    assert sum(entry.extent.length for entry in in_arena) == store.live_bytes
    assert sum(entry.memory_bytes for entry in inline) == store.inline_bytes
    assert len(store.policy) == len(in_arena)
    assert len(store.inline_policy) == len(inline)
    assert all(entry in store.policy for entry in in_arena)
    assert all(entry in store.inline_policy for entry in inline)
    held = store.live_bytes + store.retired_bytes + store.reserved_bytes
    assert held + store.allocator.free_bytes == store.arena.nbytes
    for extent, following in pairwise(sorted([*(entry.extent for entry in in_arena), *store.allocator.holes()])):
        assert extent.offset + extent.length <= following.offset, "extents overlap"
