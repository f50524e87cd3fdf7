"""The proof that values of mixed sizes share an arena without compaction: none is refused, and it stays nearly full.

A seeded trace over 1 GiB of pure arithmetic, no memory. It places values as the store does until 20 times the arena has
gone through; what is in use is sampled at each placement from the second filling on. Only payload bytes count as used.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvredis.storage.entry import extent_length
from kvredis.storage.memory.allocator import Allocator, Extent

KIB = 1024
MIB = 1024 * KIB
ARENA_BYTES = 1024 * MIB
CHURN = 20
OCCUPANCY_MIN = 0.90

# Models in the order 3b, 7b, glm, 8b, 32b: KV of 16 tokens (an engine's block) and of 256 (a chunk).
BLOCKS = (576 * KIB, 896 * KIB, 1280 * KIB, 2 * MIB, 4 * MIB)
CHUNKS = (9 * MIB, 14 * MIB, 20 * MIB, 32 * MIB, 64 * MIB)
ALL = (64 * KIB, *BLOCKS, *CHUNKS)


@dataclass(slots=True, eq=False)
class Value:
    """One value of the trace."""

    extent: Extent
    length: int


class Trace:
    """A cache under load: some recent values are used again, new ones come all the time, the least recent leave."""

    def __init__(self, seed: int, capacity_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.allocator = Allocator(capacity_bytes)
        self.order: OrderedDict[Value, None] = OrderedDict()
        self.live_bytes = 0

    def use_a_recent_one(self) -> None:
        """Touch one of the fifty used last, three times out of ten."""
        if self.order and self.rng.random() < 0.3:
            back = self.rng.randrange(min(50, len(self.order)))
            recent = reversed(self.order)
            for _ in range(back):
                next(recent)
            self.order.move_to_end(next(recent))

    def add(self, length: int) -> None:
        """Place one value; nothing is leased, so it must never be refused."""
        wanted = extent_length(length)
        extent = self.allocator.allocate(wanted)
        if extent is None:
            found = self.allocator.window(wanted, iter(self.order))
            assert found is not None, f"{length} bytes were refused with all else evictable"
            extent, leaving = found
            for value in leaving:
                del self.order[value]
                self.live_bytes -= value.length
                self.allocator.free(value.extent)
            self.allocator.allocate_at(extent)
        self.order[Value(extent, length)] = None
        self.live_bytes += length

    def check_integrity(self) -> None:
        """Values and holes tile the arena."""
        self.allocator.check_integrity()
        at = 0
        for extent in sorted([*(value.extent for value in self.order), *self.allocator.holes()]):
            assert extent.offset == at, "overlap or gap"
            at += extent.length
        assert at == self.allocator.capacity_bytes


def occupancy(trace: Trace, sizes: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    """Run the whole churn; shares of the arena that hold live payload, sorted."""
    capacity_bytes = trace.allocator.capacity_bytes
    samples: list[float] = []
    written_bytes = 0
    while written_bytes < CHURN * capacity_bytes:
        trace.use_a_recent_one()
        length = trace.rng.choices(sizes, weights)[0]
        trace.add(length)
        written_bytes += length
        if written_bytes > 2 * capacity_bytes:
            samples.append(trace.live_bytes / capacity_bytes)
        if trace.rng.random() < 0.01:
            trace.check_integrity()
    trace.check_integrity()
    return sorted(samples)


@pytest.mark.parametrize(
    ("name", "sizes", "weights"),
    [
        ("all sizes, equally often", ALL, None),
        ("all sizes, equal bytes of each", ALL, [1 / size for size in ALL]),
        ("256-token chunks of five models", CHUNKS, None),
        ("16-token blocks of five models", BLOCKS, None),
    ],
)
def test_no_value_is_refused_and_nine_tenths_of_the_arena_hold_live_data(
    name: str, sizes: Sequence[int], weights: Sequence[float] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = occupancy(Trace(1, ARENA_BYTES), sizes, weights)
    mean = sum(shares) / len(shares)
    with capsys.disabled():
        print(f"\n  {name}: live {mean:.1%} mean, {shares[len(shares) // 20]:.1%} p5, {shares[0]:.1%} min", end="")
    assert mean >= OCCUPANCY_MIN
    assert shares[len(shares) // 20] >= OCCUPANCY_MIN
