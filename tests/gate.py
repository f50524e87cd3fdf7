"""What the gate leaves to `make nightly` where it has something faster in its place."""

import itertools
from collections.abc import Sequence

import pytest
from _pytest.mark import ParameterSet


def nightly(*case: object, id: str | None = None) -> ParameterSet:
    """Mark a case of a parametrised test beside which the gate tries another."""
    return pytest.param(*case, marks=pytest.mark.nightly, id=id)


def diagonal(*axes: Sequence[object]) -> list[ParameterSet]:
    """Combine all values of the axes. The gate has as many cases as the longest axis has values, in which each value of
    each axis occurs; the others are for the night."""
    length = max(len(axis) for axis in axes)
    chosen = {tuple(at % len(axis) for axis in axes) for at in range(length)}
    places = itertools.product(*(range(len(axis)) for axis in axes))
    cases = [(place, [axis[at] for axis, at in zip(axes, place, strict=True)]) for place in places]
    return [pytest.param(*case) if place in chosen else nightly(*case) for place, case in cases]
