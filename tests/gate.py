"""What the gate leaves to `make nightly` where it has something faster in its place."""

import pytest
from _pytest.mark import ParameterSet


def nightly(*case: object, id: str | None = None) -> ParameterSet:
    """Mark a case of a parametrised test beside which the gate tries another."""
    return pytest.param(*case, marks=pytest.mark.nightly, id=id)
