"""The rows of a GPU's running checksums: who asks for one that was never given out is told so."""

from typing import cast

import pytest

from kvredis.adapters.transfer.base import NO_ROW, Event
from kvredis.adapters.transfer.cuda.checksum import RingSums, Summing


class Passed:
    """An event that has been passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


def test_a_row_that_was_not_given_out_is_an_error_that_names_it() -> None:
    sums = RingSums(cast(Summing, None), 2)
    event = cast(Event, Passed())
    with pytest.raises(RuntimeError, match=r"row 1 .* sum_up"):
        sums.found([1], event)
    sums.found([NO_ROW], event)
    taken = sums.take(100)
    assert taken is not None
    sums.found([taken.row], event)
    assert taken.done()
