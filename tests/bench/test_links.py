"""Links to and between GPUs: every pair is measured and compared, told as matrices, and drawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvredis.bench import links
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.result import new_result
from kvredis.bench.disk.rates import timed_threads
from kvredis.bench.links import (
    CopySample,
    LatencySample,
    Link,
    LinksPlan,
    LinksResult,
    run,
    table_lines,
    timed_together,
)
from kvredis.bench.pictures import draw

MIB = 1024**2
NO_GPU = links.obstacle()


def ignore(_step: str) -> None:
    return None


def some_links() -> LinksResult:
    """A result as of one GPU."""
    made = LinksResult(**new_result(links.SCHEMA, {}), gpus=["H"], peers=[[True]], copies=[], latencies=[])
    for source, target, direction, rate in (
        ("CPU", "GPU 0", "uni", 55.0),
        ("GPU 0", "CPU", "uni", 50.0),
        ("CPU", "GPU 0", "bi", 90.0),
    ):
        link = Link(part="gpu", way="pinned", source=source, target=target, direction=direction)  # type: ignore[typeddict-item]
        samples = [CopySample(repeat=at, seconds=1.0, gb_per_s=rate + at - 1, verified_bytes=1) for at in range(3)]
        made["copies"].append(links._copy_row(link, 1, samples))
    token = [LatencySample(repeat=0, rounds=1, p50_us=9.0, p99_us=12.0)]
    made["latencies"].append(links._latency_row(("CPU", "GPU 0"), token))
    return made


def test_the_whole_result_is_a_table_of_matrices() -> None:
    text = "\n".join(table_lines(some_links()))
    assert "pinned, one way, GB/s (least to most)" in text
    assert "55.00 (54.00 to 56.00)" in text
    assert "pinned, there and back, us (least to most)" in text
    assert "which GPU reaches which one's memory" in text


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "obstacle", lambda: "no GPU")
    result = run(LinksPlan(), ignore)
    assert result["notes"] == ["no GPU"]
    assert result["copies"] == []
    assert "no GPU" in list(table_lines(result))


def test_the_result_can_be_drawn(tmp_path: Path) -> None:
    draw(some_links(), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match="nothing to draw"):
        draw(some_links() | {"copies": []}, tmp_path / "none.png")


@pytest.mark.parametrize(
    "timed",
    [lambda job: timed_together([job, job]), lambda job: timed_threads(2, 2, lambda _part: job()).seconds],
    ids=["links", "disk"],
)
def test_the_clock_starts_before_the_jobs_however_late_this_thread_runs_on(
    timed: Callable[[Callable[[], None]], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[float, float]] = []
    done = threading.Semaphore(0)

    class Late(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            place = super().wait(timeout)
            if threading.current_thread() is threading.main_thread():
                assert all(done.acquire(timeout=60) for _ in range(2))
            return place

    def job() -> None:
        start_s = time.perf_counter()
        sum(range(10_000))
        spans.append((start_s, time.perf_counter()))
        done.release()

    monkeypatch.setattr(threading, "Barrier", Late)
    seconds = timed(job)
    assert seconds >= max(end_s for _, end_s in spans) - min(start_s for start_s, _ in spans)


def test_a_job_that_fails_in_its_thread_fails_the_whole() -> None:
    def fail() -> None:
        raise BenchError("no")

    with pytest.raises(BenchError, match="no"):
        timed_together([lambda: None, fail])


def test_pageable_memory_goes_both_ways_at_once_although_the_driver_copies_it_before_it_answers() -> None:
    both = threading.Barrier(2)

    class Blocking:
        def begin(self) -> None:
            both.wait(60)

        def run(self) -> None:
            self.begin()

    link = links._link("pageable", "CPU", "GPU 0", "bi")
    assert links._timed(links._Arm(link, [Blocking(), Blocking()])) > 0  # type: ignore[list-item]


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
def test_gpus_are_copied_to_and_from_and_compared() -> None:
    found = links.run_gpus(MIB, 1, 5, ignore)
    count = len(found.names)
    assert len(found.copies) == 7 * count + 2 * count * (count - 1)
    assert all(sample["verified_bytes"] for row in found.copies for sample in row["samples"])
