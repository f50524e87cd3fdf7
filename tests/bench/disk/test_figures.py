"""What the samples of gets and pings amount to: medians over the repeats, ratios of what ran in the same one."""

from __future__ import annotations

import pytest

from kvredis.bench.disk.clients import GetPlan, GetSample, PingSample, summarize_gets, summarize_pings

MIB = 1024**2


def got(repeat: int, pread: float, spilled: float, resident: float, prefetched: float = 0.5) -> GetSample:
    return GetSample(
        repeat=repeat,
        blocks=8,
        skipped=0,
        pread_ms=pread,
        spilled_ms=spilled,
        resident_ms=resident,
        prefetched_ms=prefetched,
        prefetched_again_ms=0.5,
        spilled_cpu_s_per_gb=0.3,
        resident_cpu_s_per_gb=0.1,
        verified_bytes=1,
    )


def pinged(repeat: int, quiet: float, busy: float, rate: float, dropped: int = 0) -> PingSample:
    return PingSample(
        repeat=repeat,
        quiet_p50_ms=quiet,
        quiet_p99_ms=quiet,
        quiet_max_ms=quiet,
        busy_p50_ms=busy,
        busy_p99_ms=busy,
        busy_max_ms=busy,
        set_gb_per_s=rate,
        server_cpu_s_per_gb=0.2,
        counters={"spilled": 10, "spill_dropped": dropped},
        missing=dropped,
        verified_bytes=1,
    )


def test_a_get_from_disk_is_related_to_the_preadv_of_its_own_repeat() -> None:
    samples = [got(0, 1.0, 2.0, 0.5), got(1, 2.0, 3.0, 0.5, prefetched=0.6), got(2, 1.0, 1.5, 0.5, prefetched=0.7)]
    row = summarize_gets("unix", 2 * MIB, "direct", samples)
    assert row["ratio_spilled"] == 1.5
    assert row["ratio_spilled_net"] == 1.25
    assert row["ratio_prefetched"] == pytest.approx(1.2)
    assert (row["pread_ms"], row["spilled_ms"], row["resident_ms"]) == (1.0, 2.0, 0.5)


def test_blocks_that_were_never_on_disk_make_no_ratio() -> None:
    row = summarize_gets("unix", 2 * MIB, "direct", [got(0, 0.0, 0.0, 0.0, prefetched=0.0)])
    assert (row["ratio_spilled"], row["ratio_spilled_net"], row["ratio_prefetched"]) == (None, None, None)


def test_more_keys_than_memory_holds_are_asked_for_and_what_is_prefetched_fits() -> None:
    plan = GetPlan(256 * MIB)
    for size in plan.sizes:
        assert plan.keys(size) * size >= 3 * 256 * MIB
        assert plan.prefetched(size) * size <= 128 * MIB
        assert plan.blocks(size) + plan.prefetched(size) <= plan.keys(size) - 256 * MIB // size


def test_pings_are_related_to_the_quiet_ones_and_to_the_server_without_a_disk() -> None:
    disk, memory = summarize_pings(
        "tcp",
        {
            "disk": [pinged(0, 1.0, 4.0, 1.0, dropped=1), pinged(1, 2.0, 2.0, 1.5), pinged(2, 1.0, 3.0, 0.5)],
            "memory": [pinged(0, 1.0, 2.0, 2.0), pinged(1, 1.0, 2.0, 2.0), pinged(2, 1.0, 2.0, 1.0)],
        },
    )
    assert (disk["ratio_p99"], disk["ratio_busy_p99"], disk["ratio_set"]) == (3.0, 1.5, 0.5)
    assert (memory["ratio_p99"], memory["ratio_busy_p99"], memory["ratio_set"]) == (2.0, 1.0, 1.0)
    assert disk["counters"]["spilled"] == 30
    assert (disk["counters"]["spill_dropped"], disk["missing"]) == (1, 1)
