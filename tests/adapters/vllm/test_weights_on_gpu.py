"""Sums and probes of weights on a real GPU, where there is one."""

import pytest
import torch

from kvredis.adapters.vllm.weights import CHUNK_BYTES, Prober, WeightsWatch, digest_of, sum_of, table_of

from .test_weights import Block

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_a_gpu_finds_the_sums_that_a_processor_finds() -> None:
    model = Block(5)
    here = table_of([model])
    assert table_of([model.cuda()]) == here
    made = torch.randn(3 * CHUNK_BYTES["cuda"] // 4 // 1024, 1024)
    assert int(sum_of(made)) == int(sum_of(made.cuda()))


def test_on_a_gpu_a_probe_comes_behind_what_was_launched_and_before_what_follows() -> None:
    model = Block().cuda()
    watch = WeightsWatch(lambda: [model])
    digest = digest_of(watch.look())
    assert watch.begin(1, digest).holds()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    check = watch.begin(2, digest)
    assert not check.done(), "it waits on the GPU, and not here"
    model.up.data[:, 9].neg_()
    assert check.holds()
    check = watch.begin(3, digest)
    model.up.data[:, 9].neg_()
    assert not check.holds()
    assert watch.begin(4, digest).holds()
    report = watch.report()
    assert report is not None
    assert (report.since, report.table) == (4, None)


def test_on_a_gpu_places_that_are_probed_lie_outside_an_engine_s_pool() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        blocks = [Block(seed).cuda() for seed in range(20)]
        model = torch.nn.ModuleList(blocks)
        before: list[dict[str, int]] = pool.snapshot()  # type: ignore[no-untyped-call]
        prober = Prober([model])
        after: list[dict[str, int]] = pool.snapshot()  # type: ignore[no-untyped-call]
    assert sum(each["allocated_size"] for each in before) == sum(each["allocated_size"] for each in after)
    seen = prober.probe([model])
    assert seen is not None
    first = seen.result()
    for block in blocks[:3]:
        block.norm.data.neg_()
        again = prober.probe([model])
        assert again is not None
        assert again.result() != first
        first = again.result()
