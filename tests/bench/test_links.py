"""Links to and between GPUs: every pair is measured and compared, told as matrices, and drawn. GPUs are those of
cuda_double.c, which is called as a driver is."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvredis.bench import links
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import new_result
from kvredis.bench.cuda import Cuda, Place, Stream, open_cuda
from kvredis.bench.disk.rates import timed_threads
from kvredis.bench.links import (
    CPU,
    GPUS_MAX,
    CopySample,
    LatencySample,
    LinksPlan,
    LinksResult,
    run,
    table_lines,
    timed_together,
)
from kvredis.bench.pictures import draw
from tests.bench import cuda_double

needs_compiler = pytest.mark.skipif(cuda_double.MISSING, reason="no C compiler")
REAL = open_cuda(GPUS_MAX)
SMALL = LinksPlan(repeats=2, nbytes=10_000, rounds=3)


def ignore(_step: str) -> None:
    return None


def some_links() -> LinksResult:
    """A result as of one GPU."""
    made = LinksResult(
        **new_result(links.SCHEMA, {}), gpus=["H"], peers=[[True]], copies=[], latencies=[], exit_status=0
    )
    for source, target, direction, rate in (
        ("CPU", "GPU 0", "uni", 55.0),
        ("GPU 0", "CPU", "uni", 50.0),
        ("CPU", "GPU 0", "bi", 90.0),
    ):
        link = links._link("pinned", source, target, direction)  # type: ignore[arg-type]
        samples = [
            CopySample(repeat=at, passes=8, seconds=1.0, gb_per_s=rate + at - 1, verified_bytes=1) for at in range(3)
        ]
        made["copies"].append(links._copy_row(link, 1, samples))
    token = [LatencySample(repeat=0, rounds=1, p50_us=9.0, p99_us=12.0, gpu_us=2.0)]
    made["latencies"].append(links._latency_row(links._link("pinned", "CPU", "GPU 0", "uni"), token))
    return made


def gpus(folder: Path, count: int, **defines: int) -> tuple[Any, Cuda]:
    """The driver of so many GPUs, and what a bench has of it."""
    library = ctypes.CDLL(str(cuda_double.build(folder, GPUS=count, **defines)))
    cuda = open_cuda(GPUS_MAX, library)
    assert isinstance(cuda, Cuda)
    return library, cuda


def nothing_is_left(library: Any) -> bool:
    return [cuda_double.counted(library, name) for name in ("held", "streams", "events")] == [0, 0, 0]


def test_the_whole_result_is_a_table_of_matrices() -> None:
    text = "\n".join(table_lines(some_links()))
    assert "pinned, one way, GB/s (least to most)" in text
    assert "55.00 (54.00 to 56.00)" in text
    assert "pinned, 16 bytes, there and back, us (least to most)" in text
    assert "pinned, 16 bytes, one of many in a row, us (least to most)" in text
    assert "which GPU reaches which one's memory" in text


def test_a_machine_without_a_gpu_says_so() -> None:
    result = run(LinksPlan(), ignore, "no GPU: there is no CUDA driver")
    assert result["notes"] == ["no GPU: there is no CUDA driver"]
    assert result["copies"] == []
    assert "no GPU: there is no CUDA driver" in list(table_lines(result))


@needs_compiler
def test_a_driver_that_sees_no_gpu_says_so(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(cuda_double.build(tmp_path, GPUS=0)))
    assert open_cuda(GPUS_MAX, library) == "no GPU: the driver sees none"


@needs_compiler
def test_every_ordered_pair_of_gpus_is_measured_with_peer_access_and_without(tmp_path: Path) -> None:
    library, cuda = gpus(tmp_path, 3)
    steps: list[str] = []
    result = run(SMALL, steps.append, cuda)
    pairs = {(f"GPU {at}", f"GPU {to}") for at in range(3) for to in range(3) if at != to}
    for way in ("peer", "staged"):
        for direction in ("uni", "bi"):
            rows = [row for row in result["copies"] if (row["way"], row["direction"]) == (way, direction)]
            assert {(row["source"], row["target"]) for row in rows} == pairs
            assert all(len(row["samples"]) == SMALL.repeats for row in rows)
        told = [row for row in result["latencies"] if row["way"] == way]
        assert {(row["source"], row["target"]) for row in told} == pairs
        assert all(row["gpu_us"] > 0 and row["p50_us"] > 0 for row in told)
    # Of each repeat: copies one way and two both ways, tokens and those in a row; and once all of them to warm up.
    tokens = SMALL.rounds + links._TOKENS_IN_A_ROW
    each = SMALL.repeats * len(pairs)
    assert cuda_double.counted(library, "direct") == each * (3 * links.PASSES + tokens) + 3 * len(pairs)
    assert cuda_double.counted(library, "staged") == each * (3 * links.SLOW_PASSES + tokens) + 3 * len(pairs)
    assert len(steps) == SMALL.steps(cuda)
    assert result["verified_bytes"] == SMALL.repeats * SMALL.nbytes * (3 * 9 + len(pairs) * 6)
    assert (result["exit_status"], result["notes"]) == (0, [])
    assert nothing_is_left(library)
    text = "\n".join(table_lines(result))
    assert "between GPUs, peer access on, one way, GB/s (least to most)" in text
    assert "between GPUs, peer access off, 16 bytes, one of many in a row, us (least to most)" in text


@needs_compiler
def test_gpus_that_reach_no_other_are_copied_between_through_the_cpu_alone(tmp_path: Path) -> None:
    library, cuda = gpus(tmp_path, 2, LONELY=1)
    result = run(SMALL, ignore, cuda)
    assert {row["way"] for row in result["copies"]} == {"pinned", "pageable", "device", "staged"}
    assert cuda_double.counted(library, "direct") == 0


@needs_compiler
@pytest.mark.parametrize("spoilt", [1, 2, 40, 60])
def test_a_wrong_byte_ends_the_bench_and_leaves_nothing(tmp_path: Path, spoilt: int) -> None:
    library, cuda = gpus(tmp_path, 2, SPOIL=spoilt)
    with pytest.raises(VerificationError, match="has a wrong byte"):
        run(SMALL, ignore, cuda)
    assert nothing_is_left(library)


@needs_compiler
@pytest.mark.parametrize(("end", "status"), [(KeyboardInterrupt(), 130), (SystemExit(128 + signal.SIGTERM), 143)])
def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing(
    tmp_path: Path, end: BaseException, status: int
) -> None:
    library, cuda = gpus(tmp_path, 2)
    steps: list[str] = []

    def until_the_fifth(step: str) -> None:
        steps.append(step)
        if len(steps) == 5:
            raise end

    result = run(SMALL, until_the_fifth, cuda)
    assert result["exit_status"] == status
    assert result["notes"] == [f"interrupted: 4 of {SMALL.steps(cuda)} samples were taken"]
    assert [(row["way"], row["source"], row["direction"]) for row in result["copies"]] == [
        ("pinned", CPU, "uni"), ("pinned", "GPU 0", "uni"), ("pinned", CPU, "bi"), ("pageable", CPU, "uni"),
    ]  # fmt: skip
    assert list(table_lines(result))
    assert nothing_is_left(library)


@needs_compiler
def test_an_interrupt_before_anything_is_measured_is_none_of_a_result(tmp_path: Path) -> None:
    library, cuda = gpus(tmp_path, 1)

    def at_once(_step: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(SMALL, at_once, cuda)
    assert nothing_is_left(library)


@needs_compiler
def test_what_the_driver_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    _, cuda = gpus(tmp_path, 2)
    cuda.allow_peer(0, 1, True)
    with pytest.raises(BenchError, match="cuCtxEnablePeerAccess: error 704, peer access is already enabled"):
        cuda.allow_peer(0, 1, True)
    cuda.close()


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


def test_an_interrupt_of_a_job_is_raised_when_no_job_runs_on() -> None:
    ended: list[int] = []
    begun = threading.Barrier(2)

    def job() -> None:
        begun.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        begun.wait(60)
        ended.append(1)

    def other() -> None:
        begun.wait(60)
        begun.wait(60)
        ended.append(2)

    with pytest.raises(KeyboardInterrupt):
        timed_together([job, other])
    assert sorted(ended) == [1, 2]


@needs_compiler
def test_pageable_memory_goes_both_ways_at_once_although_the_driver_copies_it_before_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, cuda = gpus(tmp_path, 1)
    both = threading.Barrier(2)
    bench = links._Bench(cuda, SMALL.nbytes)
    link = links._link("pageable", CPU, "GPU 0", "bi")
    copy = cuda.copy

    def blocking(target: Place, source: Place, nbytes: int, stream: Stream) -> None:
        both.wait(60)
        copy(target, source, nbytes, stream)

    monkeypatch.setattr(cuda, "copy", blocking)
    assert bench._timed(link, bench._copies(link), 1) > 0
    cuda.close()
    assert nothing_is_left(library)


@pytest.mark.skipif(isinstance(REAL, str), reason=str(REAL))
def test_gpus_are_copied_to_and_from_and_compared() -> None:
    cuda = REAL
    assert isinstance(cuda, Cuda)
    result = run(SMALL, ignore, cuda)
    assert len(result["copies"]) == len(links.links_of(cuda.peers))
    assert all(sample["verified_bytes"] for row in result["copies"] for sample in row["samples"])
