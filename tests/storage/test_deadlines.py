"""Deadlines: what falls due comes out in time order and once, and what has become void does not pile up."""

import random

from kvredis.storage.expiry import STALE_MAX, Deadlines


def always(at: float, item: object) -> bool:
    return True


def test_what_is_due_comes_out_earliest_first_and_once() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for at, item in ((3, "c"), (1, "a"), (2, "b"), (9, "z")):
        deadlines.add(at, item, 10)
    assert list(deadlines.due(3)) == ["a", "b", "c"]
    assert list(deadlines.due(3)) == []
    assert len(deadlines) == 1
    assert list(deadlines.due(9)) == ["z"]


def test_nothing_is_due_before_its_time() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    deadlines.add(10.0, "a", 1)
    assert list(deadlines.due(9.999)) == []
    assert list(deadlines.due(10.0)) == ["a"]


def test_items_that_cannot_be_ordered_may_fall_due_together() -> None:
    deadlines: Deadlines[object] = Deadlines(always)
    items = [object() for _ in range(50)]
    for item in items:
        deadlines.add(1, item, 50)
    assert list(deadlines.due(1)) == items


def test_what_is_not_consumed_stays() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for item in "abc":
        deadlines.add(1, item, 3)
    assert next(deadlines.due(1)) == "a"
    assert list(deadlines.due(1)) == ["b", "c"]


def test_a_deadline_that_is_void_is_not_given() -> None:
    current = {"a": 5.0, "b": 7.0}
    deadlines: Deadlines[str] = Deadlines(lambda at, item: current.get(item) == at)
    for at, item in ((5, "a"), (6, "b"), (7, "b"), (7, "gone")):
        deadlines.add(at, item, 2)
    assert list(deadlines.due(100)) == ["a", "b"]


def test_void_deadlines_do_not_pile_up_and_the_ones_that_hold_survive_the_sweep() -> None:
    current: dict[str, float] = {}
    deadlines: Deadlines[str] = Deadlines(lambda at, item: current.get(item) == at)
    for at in range(20 * STALE_MAX):
        name = "abc"[at % 3]
        current[name] = at
        deadlines.add(at, name, len(current))
        assert len(deadlines) <= 2 * len(current) + STALE_MAX
    assert sorted(deadlines.due(1e9)) == ["a", "b", "c"]


def test_after_a_sweep_what_holds_still_comes_out_in_time_order() -> None:
    rng = random.Random(1)
    current: dict[int, float] = {}
    deadlines: Deadlines[int] = Deadlines(lambda at, item: current.get(item) == at)
    for _ in range(20 * STALE_MAX):
        item, at = rng.randrange(STALE_MAX), rng.random()
        current[item] = at
        deadlines.add(at, item, len(current))
    for now in (0.25, 0.5, 1.0):
        expected = [item for at, item in sorted((at, item) for item, at in current.items()) if at <= now]
        assert list(deadlines.due(now)) == expected
        for item in expected:
            del current[item]


def test_the_same_deadline_again_and_again_does_not_pile_up() -> None:
    deadlines: Deadlines[str] = Deadlines(always)
    for _ in range(10 * STALE_MAX):
        deadlines.add(5, "a", 1)
    assert len(deadlines) <= 2 + STALE_MAX


def test_as_many_deadlines_as_hold_are_kept() -> None:
    deadlines: Deadlines[int] = Deadlines(always)
    for number in range(10 * STALE_MAX):
        deadlines.add(number, number, number + 1)
    assert list(deadlines.due(1e9)) == list(range(10 * STALE_MAX))


def test_what_is_held_is_each_thing_once_and_nothing_void() -> None:
    current = {"a": 5.0, "b": 7.0}
    deadlines: Deadlines[str] = Deadlines(lambda at, item: current.get(item) == at)
    for at, item in ((5, "a"), (5, "a"), (3, "b"), (7, "b"), (9, "c")):
        deadlines.add(at, item, 3)
    assert deadlines.held() == {"a", "b"}
    assert len(deadlines) == 5, "looking takes nothing out"
