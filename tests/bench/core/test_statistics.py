"""The arithmetic behind every figure, on numbers small enough to check by hand."""

import pytest

from kvredis.bench.core.statistics import middle, paired_ratio, paired_ratios, percentile, rotated, size_text


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, percent) for percent in (1, 20, 21, 50, 80, 99, 100)] == [1, 1, 2, 3, 4, 5, 5]


def test_the_99th_percentile_of_a_hundred_leaves_out_the_slowest_one() -> None:
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile(list(range(1, 11)), 99) == 10


def test_nothing_has_percentile_and_median_zero() -> None:
    assert percentile([], 99) == 0.0
    assert middle([]) == 0.0


def test_ratios_pair_what_ran_in_the_same_repeat() -> None:
    ours, theirs = {0: 10.0, 1: 4.0, 2: 9.0}, {0: 5.0, 1: 1.0, 2: 3.0}
    assert paired_ratios(ours, theirs) == [2.0, 4.0, 3.0]
    assert paired_ratio(ours, theirs) == 3.0


def test_a_repeat_that_one_side_lacks_does_not_count() -> None:
    assert paired_ratios({0: 2.0, 1: 3.0}, {1: 1.0, 2: 5.0}) == [3.0]
    assert paired_ratio({0: 1.0}, {}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None


def test_each_server_begins_once_in_as_many_turns_as_there_are_servers() -> None:
    assert [rotated("abcd", turn) for turn in range(5)] == [
        ["a", "b", "c", "d"],
        ["b", "a", "d", "c"],
        ["c", "d", "a", "b"],
        ["d", "c", "b", "a"],
        ["a", "b", "c", "d"],
    ]
    assert rotated([], 3) == []


@pytest.mark.parametrize("count", [2, 3, 6, 9])
def test_no_arm_is_always_behind_the_same_one(count: int) -> None:
    turns = [rotated(range(count), turn) for turn in range(2 * count)]
    assert [turn[0] for turn in turns] == 2 * list(range(count))
    before = {each: {turn[turn.index(each) - 1] for turn in turns if turn[0] != each} for each in range(count)}
    assert all(len(found) == min(count - 1, 2) for found in before.values())


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(100, "100 B"), (64 << 10, "64 KiB"), (1025, "1025 B"), (32 << 20, "32 MiB"), (2 << 30, "2 GiB")],
)
def test_sizes_are_written_with_the_largest_unit_that_divides_them(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
