"""The rates of one directory: every arm takes part in every cell, and a byte that comes back wrong stops the bench."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.disk.rates import (
    Blocks,
    Loop,
    Mode,
    RatePlan,
    RateSample,
    TierArm,
    Timing,
    cached_share,
    run_rates,
    summarize,
)
from kvredis.storage.disk.segment import HEADER_BYTES, Record
from kvredis.storage.disk.tier import DiskTier

TINY = RatePlan(repeats=1, threads=(1, 2), block_bytes=256 * 1024, cell_bytes=2 * 1024**2)


@pytest.mark.parametrize("modes", [("direct",), ("buffered",), ("direct", "buffered")])
def test_a_tiny_run_measures_every_arm_in_every_cell_and_compares_all_bytes(
    tmp_path: Path, modes: tuple[Mode, ...]
) -> None:
    steps: list[str] = []
    rates = run_rates(replace(TINY, modes=modes), tmp_path, steps.append)
    skipped = any(note.startswith("direct: skipped") for note in rates.notes)
    modes = ("buffered",) if skipped else modes
    arms = {row["arm"] for row in rates.rows}
    assert {"loop", "checked", "tier"} <= arms
    wanted = [
        (mode, op, threads)
        for mode in modes
        for op in ("write", "read", *(("read warm",) if mode == "buffered" else ()))
        for threads in (1, 2)
    ]
    for arm in arms:
        assert [(row["mode"], row["op"], row["threads"]) for row in rates.rows if row["arm"] == arm] == wanted
    for row in rates.rows:
        (sample,) = row["samples"]
        assert row["gb_per_s"] > 0
        assert sample["payload_bytes"] == 2 * 1024**2
        if row["op"] != "write" and row["arm"] == "tier":
            assert sample["verified_bytes"] == 2 * 1024**2
        assert row["ratio_to_loop"] is not None
        if row["arm"] in ("loop", "checked", "tier"):
            assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert len(steps) == 2 * len(modes)


def test_a_cold_read_finds_nothing_in_the_page_cache_and_a_warm_one_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[float] = []
    honest = Loop.read

    def read(loop: Loop, mode: Mode, threads: int) -> Timing:
        before.append(cached_share(tmp_path / "loop.data"))
        return honest(loop, mode, threads)

    monkeypatch.setattr(Loop, "read", read)
    rates = run_rates(replace(TINY, modes=("buffered",), threads=(1,)), tmp_path, lambda _: None)
    for cold, warm in (before[:2], before[2:]):  # of the loop, and of the one that checks
        assert warm == 1.0
        assert cold < 0.01 or any("cold reads are not cold" in note for note in rates.notes)


def test_a_tier_that_returns_another_byte_stops_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DiskTier.read

    def read(tier: DiskTier, record: Record, into: memoryview) -> bool:
        found = honest(tier, record, into)
        if record.key.endswith(b":00003"):
            into[HEADER_BYTES] ^= 1
        return found

    monkeypatch.setattr(DiskTier, "read", read)
    with pytest.raises(VerificationError, match="the tier returned a wrong byte in block 3"):
        run_rates(TINY, tmp_path, lambda _: None)


def test_a_tier_that_has_lost_a_block_stops_the_bench(tmp_path: Path) -> None:
    arm = TierArm(tmp_path, Blocks(64 * 1024, 4, seed=1))
    arm.write("buffered", 1, 0)
    (segment,) = (tmp_path / "buffered").glob("segment-*.kv")
    segment.write_bytes(bytes(segment.stat().st_size))
    with pytest.raises(BenchError, match="has lost a block"):
        arm.read("buffered", 2)
    arm.close()


def test_a_full_tier_holds_the_whole_of_the_last_pass(tmp_path: Path) -> None:
    blocks = Blocks(64 * 1024, 16, seed=1)
    arm = TierArm(tmp_path, blocks)
    for shift in range(5):
        arm.write("buffered", 1, shift)
    blocks.wipe()
    arm.read("buffered", 4)
    assert arm.verify("buffered") == blocks.nbytes
    arm.close()


def test_blocks_are_the_same_number_for_each_thread() -> None:
    plan = RatePlan(threads=(1, 3, 4), block_bytes=1024, cell_bytes=100 * 1024)
    assert plan.count == 96
    assert RatePlan(threads=(8,), block_bytes=1024, cell_bytes=1024).count == 8


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="the bench needs"):
        run_rates(RatePlan(threads=(1,), cell_bytes=1 << 60), tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_ratio_pairs_what_ran_in_the_same_repeat() -> None:
    def sample(repeat: int, rate: float) -> RateSample:
        return RateSample(
            repeat=repeat, seconds=1.0, payload_bytes=1, gb_per_s=rate, cpu_s_per_gb=rate, verified_bytes=0
        )

    samples = {
        "device": [sample(0, 1.0), sample(1, 4.0), sample(2, 2.0)],
        "tier": [sample(0, 1.0), sample(1, 2.0), sample(2, 1.6)],
    }
    device, tier = summarize(2 * 1024**2, ("direct", "read", 2), samples)
    assert tier["ratio_to_device"] == pytest.approx(0.8)
    assert tier["gb_per_s"] == 1.6
    assert device["ratio_to_device"] == 1.0
    assert tier["ratio_to_loop"] is None
