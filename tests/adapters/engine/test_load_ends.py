"""The end of a load, which a caller waits for: a transfer is told of it, and a ring brings it in smaller pieces."""

from collections.abc import Sequence

import pytest
import torch

from kvredis.adapters.paged.jobs import LoadJob
from kvredis.adapters.transfer.base import Moving, Part
from kvredis.adapters.transfer.kv_cache import PagedKV
from tests.adapters.paged_engine import GatedTransfer, PagedEngine, load_now, mover_on, moves_of
from tests.adapters.paged_layouts import block_of, planes_first
from tests.adapters.transfer.manual_transfer import with_blocks
from tests.adapters.transfer.test_passing_sums import COUNTS, ring, summed, true_sum


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
        assert load_now(mover, job) == 9
    transfers = [group.transfer for group in engine.groups]
    first, second = (each.loads for each in transfers if isinstance(each, NotingTransfer))
    assert [is_last for _, is_last in (*first, *second)] == [False] * (len(first) + len(second) - 1) + [True]
    assert [sum(count for count, _ in calls) for calls in (first, second)] == [5, 4]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("counts", [[7], COUNTS, [3] * 50])
def test_a_ring_s_last_load_comes_in_more_pieces_with_all_its_bytes_and_sums(seed: int, counts: list[int]) -> None:
    pieces = list[int]()
    for is_last in (False, True):
        layers = [planes_first((160, 2, 16, 2, 32), torch.bfloat16) for _ in range(3)]
        transfer, gpu = ring(layers, seed, units=64)
        parts, sums = summed(transfer, counts)
        moving = transfer.load(parts, is_last=is_last)
        assert [each.result() for each in sums] == [true_sum(part.memory) for part in parts]
        moving.wait()
        assert all(block_of(layers, part.pages).numpy().tobytes() == bytes(part.memory) for part in parts)
        pieces.append(len(gpu.copies))
    assert pieces[1] >= pieces[0] + 2
