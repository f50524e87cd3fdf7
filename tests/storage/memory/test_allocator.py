"""The allocator: where values go, who must leave for them, and when there is truly no room."""

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise, permutations

import pytest

from kvredis.storage.memory.allocator import BEYOND, GRAIN_BYTES, Allocator, Extent, windows


class Block:
    """Something that lies in the arena, in grains."""

    def __init__(self, extent: Extent, name: str = "") -> None:
        self.extent = extent
        self.name = name
        self.leased = False

    def __repr__(self) -> str:
        return self.name or repr(self.extent)


def grains(start: int, count: int) -> Extent:
    return Extent(start * GRAIN_BYTES, count * GRAIN_BYTES)


def tiled(layout: str) -> tuple[Allocator, dict[str, Block]]:
    """An arena as drawn, a letter a grain: equal letters are one block, dots are free."""
    allocator = Allocator(len(layout) * GRAIN_BYTES)
    blocks: dict[str, Block] = {}
    for name in dict.fromkeys(layout.replace(".", "")):
        assert name * layout.count(name) in layout, "a block is in one piece"
        extent = grains(layout.index(name), layout.count(name))
        allocator.allocate_at(extent)
        blocks[name] = Block(extent, name)
    allocator.check_integrity()
    return allocator, blocks


def window(layout: str, wanted: int, victims: str) -> tuple[Extent, str] | None:
    """What `Allocator.window` says for `wanted` grains, with `victims` from the coldest on."""
    allocator, blocks = tiled(layout)
    found = allocator.window(wanted * GRAIN_BYTES, (blocks[name] for name in victims))
    return found and (found[0], "".join(block.name for block in found[1]))


# ---- holes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -GRAIN_BYTES, GRAIN_BYTES + 1])
def test_an_arena_is_whole_grains(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Allocator(capacity)


def test_the_tightest_hole_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator, _ = tiled("....a..b...c..d")
    assert allocator.allocate(2 * GRAIN_BYTES) == grains(5, 2)
    assert allocator.allocate(2 * GRAIN_BYTES) == grains(12, 2)
    assert allocator.allocate(2 * GRAIN_BYTES) == grains(8, 2)
    assert allocator.holes() == [grains(0, 4), grains(10, 1)]
    allocator.check_integrity()


def test_what_fits_no_hole_is_not_placed_however_much_is_free() -> None:
    allocator, _ = tiled("..a..b..")
    assert allocator.allocate(3 * GRAIN_BYTES) is None
    assert allocator.free_bytes == 6 * GRAIN_BYTES


def test_the_whole_arena_can_be_one_value() -> None:
    allocator = Allocator(8 * GRAIN_BYTES)
    extent = allocator.allocate(8 * GRAIN_BYTES)
    assert extent == grains(0, 8)
    assert allocator.allocate(GRAIN_BYTES) is None
    assert allocator.holes() == []
    allocator.check_integrity()


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_freed_neighbours_are_one_hole_at_once(order: tuple[str, ...]) -> None:
    allocator, blocks = tiled("aabbbcd")
    for name in order:
        allocator.free(blocks[name].extent)
        allocator.check_integrity()
    assert allocator.holes() == [grains(0, 7)]
    assert allocator.free_bytes == 7 * GRAIN_BYTES


def test_an_extent_is_cut_out_of_the_middle_of_a_hole() -> None:
    allocator = Allocator(10 * GRAIN_BYTES)
    allocator.allocate_at(grains(3, 4))
    assert allocator.holes() == [grains(0, 3), grains(7, 3)]
    allocator.check_integrity()


@pytest.mark.parametrize("extent", [grains(0, 3), grains(2, 1), grains(1, 3), grains(4, 3), grains(6, 1)])
def test_an_extent_that_is_not_wholly_free_is_not_taken(extent: Extent) -> None:
    allocator, _ = tiled("..a...")
    with pytest.raises(ValueError, match="not free"):
        allocator.allocate_at(extent)
    allocator.check_integrity()


@pytest.mark.parametrize("wrong", [grains(0, 2), grains(1, 3), grains(6, 2), grains(-1, 1), grains(8, 1), grains(2, 1)])
def test_an_extent_given_back_that_was_free_or_never_there_is_noticed(wrong: Extent) -> None:
    allocator, _ = tiled("..aabb.c")
    if wrong == grains(2, 1):
        allocator.free(grains(2, 2))  # the part was given back with the whole
    with pytest.raises(AssertionError):
        allocator.free(wrong)
    allocator.check_integrity()


@pytest.mark.parametrize(
    "length", [0, -GRAIN_BYTES, 9 * GRAIN_BYTES, GRAIN_BYTES << 32, (GRAIN_BYTES << 32) + GRAIN_BYTES]
)
def test_no_hole_has_what_no_arena_has(length: int) -> None:
    allocator, _ = tiled("..a.....")
    assert allocator.allocate(length) is None
    allocator.check_integrity()


def test_the_largest_arena_that_can_be_is_cut_like_others() -> None:
    capacity = 0xFFFF_FFFF * GRAIN_BYTES
    allocator = Allocator(capacity)
    assert allocator.start(capacity) == 0
    allocator.allocate_at(grains(0, 1))
    allocator.allocate_at(grains(0xFFFF_FFFE, 1))
    assert allocator.holes() == [grains(1, 0xFFFF_FFFD)]
    allocator.check_integrity()
    with pytest.raises(ValueError, match="64 bits"):
        Allocator(capacity + GRAIN_BYTES)


@pytest.mark.parametrize(("start_bits", "length_bits"), [(36, 28), (63, 1), (33, 31)])
def test_an_arena_of_short_holes_may_be_larger_and_is_cut_up_to_its_last_grain(
    start_bits: int, length_bits: int
) -> None:
    capacity, hole = (1 << min(start_bits, 50)) - 1, (1 << length_bits) - 1
    allocator = Allocator(capacity * GRAIN_BYTES, hole * GRAIN_BYTES)
    assert allocator.allocate(GRAIN_BYTES) is None, "it begins full"
    top = grains(capacity - hole, hole)
    allocator.free(top)
    allocator.free(grains(0, hole))
    assert allocator.longest_bytes == hole * GRAIN_BYTES
    assert allocator.allocate((hole + 1) * GRAIN_BYTES) is None
    assert allocator.start(capacity * GRAIN_BYTES) == top.offset
    assert allocator.past(top.offset) == capacity * GRAIN_BYTES
    allocator.allocate_at(grains(capacity - 1, 1))
    assert allocator.allocate(hole * GRAIN_BYTES) == grains(0, hole)
    allocator.free(grains(capacity - 1, 1))
    assert allocator.holes() == [top]
    allocator.check_integrity()


def test_holes_far_apart_are_taken_and_given_back_at_random_as_near_ones_are() -> None:
    rng, hole = random.Random(7), 64
    far, near = Allocator(((1 << 40) + hole) * GRAIN_BYTES, hole * GRAIN_BYTES), Allocator(4 * (hole + 1) * GRAIN_BYTES)
    assert near.allocate(near.capacity_bytes) is not None
    places = dict(zip(range(0, 4 * (hole + 1), hole + 1), (0, 1 << 20, (1 << 33) + 5, 1 << 40), strict=True))
    for start, place in places.items():
        near.free(grains(start, hole))
        far.free(grains(place, hole))
    held: list[tuple[Extent, Extent]] = []
    for _ in range(3000):
        if held and rng.random() < 0.45:
            for allocator, extent in zip((near, far), held.pop(rng.randrange(len(held))), strict=True):
                allocator.free(extent)
            continue
        nbytes = rng.randint(1, 12) * GRAIN_BYTES
        here, there = near.allocate(nbytes), far.allocate(nbytes)
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            start = here.offset // GRAIN_BYTES // (hole + 1) * (hole + 1)
            assert there.offset - places[start] * GRAIN_BYTES == here.offset - start * GRAIN_BYTES
            held.append((here, there))
    assert len(held) > 20
    near.check_integrity()
    far.check_integrity()


def test_wrong_accounts_and_lost_holes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, _ = tiled("..a..")
    allocator.free_bytes += GRAIN_BYTES
    with pytest.raises(AssertionError):
        allocator.check_integrity()
    allocator, _ = tiled("..a..")
    monkeypatch.setattr(Allocator, "lengths", lambda _: [(2 * GRAIN_BYTES, 0)])
    with pytest.raises(AssertionError):
        allocator.check_integrity()


# ---- windows -----------------------------------------------------------------------------------------------------


def test_with_equal_lengths_the_coldest_leaves_and_no_other() -> None:
    rng = random.Random(1)
    allocator = Allocator(64 * 3 * GRAIN_BYTES)
    order = [Block(grains(3 * number, 3)) for number in range(64)]
    for block in order:
        allocator.allocate_at(block.extent)
    for _ in range(500):
        rng.shuffle(order)
        found = allocator.window(3 * GRAIN_BYTES, order)
        assert found is not None
        assert found == (order[0].extent, [order[0]])
        for block in found[1]:
            allocator.free(block.extent)
        allocator.allocate_at(found[0])


@pytest.mark.parametrize(
    ("layout", "wanted", "victims", "extent", "leaving"),
    [
        ("aabbcc", 2, "bca", grains(2, 2), "b"),
        ("aabbcc", 4, "bac", grains(0, 4), "ab"),
        ("aabbcc", 3, "cba", grains(2, 3), "bc"),
        ("aab.cc", 3, "bca", grains(3, 3), "c"),  # a hole beside the second coldest spares one
        ("aa.b.c", 3, "bac", grains(2, 3), "b"),  # holes on both sides count
        ("a.b.c.", 6, "bca", grains(0, 6), "abc"),
        ("abcdef", 3, "faecdb", grains(2, 3), "cde"),  # the first three that adjoin, not the first three
        ("xaybcz", 2, "abc", grains(3, 2), "bc"),  # x, y and z are leased: a is the coldest, and of no use
        ("aaaaxbb", 2, "ab", grains(5, 2), "b"),  # a tighter window a little further on
        ("aaaaxbb", 2, "a", grains(0, 2), "a"),
        ("aaab.cc", 4, "cab", grains(3, 4), "bc"),  # of the runs that one victim completes, the one that loses least
    ],
)
def test_the_victims_are_a_run_of_neighbours_as_cold_and_as_tight_as_can_be(
    layout: str, wanted: int, victims: str, extent: Extent, leaving: str
) -> None:
    assert window(layout, wanted, victims) == (extent, leaving)


@pytest.mark.parametrize(("layout", "wanted", "victims"), [("aabb", 5, "ab"), ("axbyc", 2, "abc"), ("xx.y", 2, "")])
def test_without_neighbours_enough_there_is_no_window(layout: str, wanted: int, victims: str) -> None:
    assert window(layout, wanted, victims) is None


@pytest.mark.parametrize(("between", "leaving"), [(BEYOND * 2, "b"), (BEYOND * 2 + 1, "a")])
def test_a_tighter_window_is_looked_for_so_far_and_no_further(between: int, leaving: str) -> None:
    """The coldest block wastes 1 grain, a great one lies behind it in the order, then one that fits exactly."""
    layout = "aaax" + "c" * between + "ybb"
    found = window(layout, 2, "acb")
    assert found is not None
    assert found[1] == leaving


def test_nothing_changes_until_the_caller_acts() -> None:
    allocator, blocks = tiled("aabb.ccd..e")
    before = allocator.holes(), allocator.free_bytes
    found = allocator.window(6 * GRAIN_BYTES, blocks.values())
    assert found is not None
    assert (allocator.holes(), allocator.free_bytes) == before
    for block in found[1]:
        allocator.free(block.extent)
    allocator.allocate_at(found[0])
    allocator.check_integrity()


def test_victims_are_not_walked_beyond_an_exact_fit() -> None:
    allocator, blocks = tiled("aabbcc")
    walked: list[str] = []

    def coldest_first() -> Iterator[Block]:
        for name in "bac":
            walked.append(name)
            yield blocks[name]

    allocator.window(2 * GRAIN_BYTES, coldest_first())
    assert walked == ["b"]


# ---- with leased blocks, against brute force ---------------------------------------------------------------------


def longest_run(capacity: int, staying: Iterable[Block]) -> int:
    """The longest stretch of grains that no block of `staying` covers."""
    best = at = 0
    for extent in sorted(block.extent for block in staying):
        best = max(best, extent.offset // GRAIN_BYTES - at)
        at = (extent.offset + extent.length) // GRAIN_BYTES
    return max(best, capacity - at)


@pytest.mark.parametrize("seed", range(6))
def test_a_value_is_refused_only_when_no_run_of_free_and_evictable_bytes_would_hold_it(seed: int) -> None:
    rng = random.Random(seed)
    capacity = 96
    allocator = Allocator(capacity * GRAIN_BYTES)
    order: list[Block] = []
    refused = placed = 0
    for _ in range(3000):
        wanted = rng.choice((1, 1, 2, 3, 5, 8, 13, 21))
        extent = allocator.allocate(wanted * GRAIN_BYTES)
        if extent is None:
            found = allocator.window(wanted * GRAIN_BYTES, (block for block in order if not block.leased))
            run = longest_run(capacity, (block for block in order if block.leased))
            assert (found is not None) == (run >= wanted)
            if found is None:
                refused += 1
            else:
                extent, leaving = found
                for block in leaving:
                    assert not block.leased
                    assert block.extent.offset < extent.offset + extent.length, "left in vain"
                    assert block.extent.offset + block.extent.length > extent.offset, "left in vain"
                    order.remove(block)
                    allocator.free(block.extent)
                allocator.allocate_at(extent)
        if extent is not None:
            placed += 1
            order.append(Block(extent))
        for block in rng.sample(order, min(3, len(order))):
            block.leased = rng.random() < 0.4
        tiles = sorted([*(block.extent for block in order), *allocator.holes()])
        assert sum(tile.length for tile in tiles) == capacity * GRAIN_BYTES
        assert all(a.offset + a.length == b.offset for a, b in pairwise(tiles)), "overlap or gap"
        allocator.check_integrity()
    assert refused > 50
    assert placed > 1000


# ---- many windows in one walk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "wanted", "victims", "expected"),
    [
        ("abcd", 1, "dbca", ["d", "b", "c", "a"]),
        ("abcdefgh", 2, "acegbdfh", ["ab", "cd", "ef", "gh"]),
        ("abcdefgh", 3, "acegbdfh", ["abc", "def"]),
        ("a.b.c", 3, "cab", ["ab"]),
        ("a..b", 3, "ba", ["b"]),
        ("aabbbcc", 3, "acb", ["ab"]),
        ("abc", 4, "abc", []),
    ],
)
def test_one_walk_names_window_after_window_and_no_victim_twice(
    layout: str, wanted: int, victims: str, expected: list[str]
) -> None:
    allocator, blocks = tiled(layout)
    found = windows(wanted * GRAIN_BYTES, (blocks[name] for name in victims), allocator.spans())
    assert ["".join(block.name for block in leaving) for leaving in found] == expected


@pytest.mark.parametrize("seed", range(20))
def test_all_windows_of_a_walk_can_be_had_together(seed: int) -> None:
    rng = random.Random(seed)
    letters = [chr(ord("A") + number) for number in range(50)]
    layout = "".join(rng.choice((letter, letter * 2, letter * 3, letter + ".")) for letter in letters)
    allocator, blocks = tiled(layout)
    order = list(blocks.values())
    rng.shuffle(order)
    found = list(windows(4 * GRAIN_BYTES, order, allocator.spans()))
    first = allocator.window(4 * GRAIN_BYTES, order)
    assert first is not None
    assert len(found) > 5
    for block in (block for leaving in found for block in leaving):
        allocator.free(block.extent)  # which fails for one that is named twice
    assert all(allocator.allocate(4 * GRAIN_BYTES) for _ in found)
    allocator.check_integrity()


def test_the_largest_arena_is_handed_out_to_its_last_grain_and_a_larger_one_is_refused_by_its_size() -> None:
    most = 2**32 - 1
    allocator = Allocator(most * GRAIN_BYTES)
    assert allocator.allocate((most - 2) * GRAIN_BYTES) == grains(0, most - 2)
    assert [allocator.allocate(GRAIN_BYTES) for _ in range(3)] == [grains(most - 2, 1), grains(most - 1, 1), None]
    allocator.free(grains(0, most - 2))
    allocator.free(grains(most - 1, 1))
    assert allocator.holes() == [grains(0, most - 2), grains(most - 1, 1)]
    allocator.free(grains(most - 2, 1))
    assert allocator.holes() == [grains(0, most)]
    with pytest.raises(ValueError, match=f"in {(most + 1) * GRAIN_BYTES} are more than numbers of 64 bits tell"):
        Allocator((most + 1) * GRAIN_BYTES)
