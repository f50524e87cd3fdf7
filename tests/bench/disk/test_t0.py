"""T0 beside the disk's rates: the same bytes in the same repeat; and a cold read is cold, a warm one is another run."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.bench.core.errors import VerificationError
from kvredis.bench.disk import rates as disk_rates
from kvredis.bench.disk import rates as disk_t0
from kvredis.bench.disk.rates import (
    Blocks,
    Loop,
    Mode,
    PlainCopy,
    RatePlan,
    RateSample,
    Timing,
    cached_share,
    fio_timing,
    forget_pages,
    run_rates,
    summarize,
)
from kvredis.bench.disk.run import table_lines

TINY = RatePlan(repeats=1, threads=(1,), block_bytes=256 * 1024, cell_bytes=1024 * 1024)
RESULTS = Path(__file__).parents[3] / "bench" / "results"


def without_torch(name: str) -> None:
    assert name == "torch"


@pytest.mark.parametrize("torch", [True, False])
def test_t0_copies_every_block_and_says_what_copied(monkeypatch: pytest.MonkeyPatch, torch: bool) -> None:
    if not torch:
        monkeypatch.setattr(disk_t0, "find_spec", without_torch)
    with closing(Blocks(64 * 1024, 4, seed=1)) as blocks:
        copy = PlainCopy(blocks)
        assert ("torch.get_num_threads()" in copy.name) == torch
        assert ("memmove" in copy.name) != torch
        assert copy.seconds(3) > 0
        assert blocks.verify(3, "T0", blocks.size_bytes) == blocks.nbytes
        with pytest.raises(VerificationError):
            blocks.verify(2, "T0", blocks.size_bytes)


def test_a_t0_that_leaves_a_block_out_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Blocks(64 * 1024, 4, seed=1)) as blocks:
        copy = PlainCopy(blocks)
        honest = copy._copy
        monkeypatch.setattr(copy, "_copy", lambda source, target: target == 2 or honest(source, target))
        with pytest.raises(VerificationError, match="block 2"):
            copy.seconds(0)


def test_every_row_has_its_ratio_to_t0_and_every_arm_of_ours_the_times_of_single_blocks(tmp_path: Path) -> None:
    rates = run_rates(TINY, tmp_path, lambda _: None)
    assert rates.t0
    for row in rates.rows:
        (sample,) = row["samples"]
        assert row.get("ratio_to_t0") == pytest.approx(sample["seconds"] / sample.get("t0_seconds", 0.0))
        if row["arm"] in ("loop", "tier"):
            p50_ms, p99_ms = row.get("p50_ms"), row.get("p99_ms")
            assert p50_ms is not None
            assert p99_ms is not None
            assert 0 < p50_ms <= p99_ms


def test_t0_is_paired_within_a_repeat() -> None:
    samples = [
        RateSample(
            repeat=repeat,
            seconds=seconds,
            payload_bytes=1,
            gb_per_s=1.0,
            cpu_s_per_gb=1.0,
            verified_bytes=0,
            t0_seconds=t0,
        )
        for repeat, (seconds, t0) in enumerate([(4.0, 1.0), (30.0, 10.0), (2.0, 1.0)])
    ]
    (row,) = summarize(1024, ("direct", "read", 1), {"loop": samples})
    assert row.get("ratio_to_t0") == 3.0
    assert row.get("p50_ms", 0.0) is None


def test_pages_are_dropped_right_before_a_cold_read_and_never_before_a_warm_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    read, write, forget = Loop.read, Loop.write, Loop.forget_pages

    def seen_read(self: Loop, mode: Mode, threads: int) -> Timing:
        seen.append(f"read {mode}")
        return read(self, mode, threads)

    def seen_write(self: Loop, mode: Mode, threads: int, shift: int) -> Timing:
        seen.append(f"write {mode}")
        return write(self, mode, threads, shift)

    def seen_forget(self: Loop) -> None:
        seen.append("forget")
        forget(self)

    monkeypatch.setattr(Loop, "read", seen_read)
    monkeypatch.setattr(Loop, "write", seen_write)
    monkeypatch.setattr(Loop, "forget_pages", seen_forget)
    rates = run_rates(TINY, tmp_path, lambda _: None)
    at = seen.index("forget") + 1  # what is before it is the warm-up, and the look whether pages can be dropped
    cells: dict[Mode, list[str]] = {
        "direct": ["forget", "write direct", "forget", "read direct"],
        "buffered": ["forget", "write buffered", "forget", "read buffered", "read buffered"],
    }
    modes: list[Mode] = list(dict.fromkeys(row["mode"] for row in rates.rows))
    assert seen[at:] == [step for mode in modes for step in cells[mode]]


def test_what_is_in_the_page_cache_is_seen_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert cached_share(path) == 0.0
    path.write_bytes(bytes(1 << 20))
    assert cached_share(path) == 1.0
    forget_pages(path)
    assert cached_share(path) in (0.0, 1.0)  # 1.0: a file system in memory, which the bench tells


def test_a_file_system_that_keeps_its_pages_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_rates, "cached_share", lambda _: 0.5)
    notes = run_rates(TINY, tmp_path, lambda _: None).notes
    assert "cold reads are not cold: 50% of a file stays in the page cache after POSIX_FADV_DONTNEED" in notes


def test_fios_percentiles_are_read_when_it_tells_them() -> None:
    read = {"io_bytes": 8, "bw_bytes": 8, "clat_ns": {"percentile": {"50.000000": 1500000, "99.000000": 4000000}}}
    job = {"error": 0, "usr_cpu": 0, "sys_cpu": 0, "job_runtime": 1, "read": read}
    timing = fio_timing(json.dumps({"jobs": [job]}), "read")
    assert (timing.p50_ms, timing.p99_ms) == (1.5, 4.0)


@pytest.mark.parametrize("name", ["disk-2026-11-22.json", "disk-2026-11-22-16-cores.json"])
def test_a_result_from_before_there_was_t0_is_still_a_table(name: str) -> None:
    old = json.loads((RESULTS / name).read_text())
    lines = list(table_lines(old))
    assert not any(line.startswith("T0:") for line in lines)
    assert sum(line.split()[1:2] == ["tier"] for line in lines) == sum(row["arm"] == "tier" for row in old["rates"])
