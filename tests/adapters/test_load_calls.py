"""Which calls of a transfer a load is made of: the last one is said to be that, since somebody waits for its end."""

from collections.abc import Sequence

import pytest
import torch

from kvredis.adapters.chunk_moves import LoadJob
from kvredis.adapters.paged import PagedKV
from kvredis.adapters.transfer import Moving, Part
from tests.adapters.manual_transfer import with_blocks
from tests.adapters.paged_engine import GatedTransfer, PagedEngine, mover_on, moves_of


class NotingTransfer(GatedTransfer):
    """Notes of each load its parts, and whether it was said to be the last."""

    def __init__(self, paged: PagedKV) -> None:
        super().__init__(paged)
        self.open.set()
        self.loads: list[tuple[int, bool]] = []

    def load(self, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False) -> Moving:
        self.loads.append((len(parts), is_last))
        return super().load(parts, after=after, is_last=is_last)


@pytest.mark.parametrize("batch_bytes", [1, 70_000, 1 << 30])
def test_a_transfer_is_told_of_the_last_call_of_a_load_and_of_no_other(batch_bytes: int) -> None:
    engine, job = PagedEngine(100, transfer=NotingTransfer), LoadJob("r", moves_of("a", 5) + moves_of("a", 4, group=1))
    backend, _ = with_blocks(job)
    with mover_on(backend, engine, batch_bytes=batch_bytes) as mover:
        assert mover.load_now(job) == 9
    first, second = (group.transfer.loads for group in engine.groups)  # type: ignore[attr-defined]
    assert [is_last for _, is_last in (*first, *second)] == [False] * (len(first) + len(second) - 1) + [True]
    assert [sum(count for count, _ in calls) for calls in (first, second)] == [5, 4]
