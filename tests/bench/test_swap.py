"""`kvredis bench swap` and `bench profile`: they run without a GPU, see a wrong byte, and judge by the bars."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.bench import swap as arms
from kvredis.bench.core.compute import TINY
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import new_result
from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.profile import ProfilePlan, ProfileResult, gaps, joined, phase_row, profile_gate, shared, table_lines
from kvredis.bench.profile import run as profile_run
from kvredis.bench.swap import (
    ARMS,
    COPY_BYTES,
    DIRECTIONS,
    OURS,
    PER_PAGE,
    SCHEMA,
    WAITERS,
    Arm,
    Direction,
    HostMemory,
    Link,
    PrefillSample,
    Swap,
    SwapPlan,
    SwapSample,
    arm_of,
    copies_beside,
    prefill_beside,
    prefill_row,
    run,
    swap_gate,
    swap_row,
)
from kvredis.cli.main import main

SHAPE = ModelShape("small", layers=3, kv_heads=2, head_dim=8)
PLAN = SwapPlan((SHAPE,), chunk_tokens=(16, 32), tokens=64, repeats=2)


def test_every_arm_is_measured_each_way_and_every_byte_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps: list[str] = []
    result = run(PLAN, steps.append)
    assert result["schema"] == SCHEMA
    assert len(steps) == PLAN.steps()
    rows = {(row["chunk_tokens"], row["arm"], row["direction"]): row for row in result["rows"]}
    assert set(rows) == {(chunk, arm, way) for chunk in (16, 32) for arm in ARMS for way in ("out", "in")}
    assert all(len(row["samples"]) == 2 and row["nbytes"] == SHAPE.block_bytes(64) for row in rows.values())
    assert result["verified_bytes"] == 2 * 3 * len(ARMS) * 2 * SHAPE.block_bytes(64)
    assert result["gate"] == []
    assert "no GPU" in result["notes"][0]


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_wrong_byte_ends_the_run(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    real = arms._per_page_cpu

    def wrong(paged: Any) -> arms.Arm:
        move = real(paged)

        def moved(parts: Any, way: Any) -> None:
            move(parts, way)
            if way == direction == "out":
                parts[1].memory[7] ^= 1
            elif way == direction:
                paged.layers[1].view(torch.int16)[parts[0].pages[0], 1, 3, 1, 2] ^= 1

        return moved

    monkeypatch.setattr(arms, "_per_page_cpu", wrong)
    with pytest.raises(VerificationError, match="small: "):
        run(PLAN, lambda step: None)


def test_tokens_that_are_not_whole_chunks_are_refused() -> None:
    with pytest.raises(BenchError, match="64 tokens are not whole chunks of 48"):
        run(SwapPlan((SHAPE,), chunk_tokens=(48,), tokens=64), lambda step: None)


def test_blocks_are_overwritten_before_each_store_so_that_what_was_there_before_proves_nothing() -> None:
    swap = Swap(SHAPE, 64, torch.device("cpu"))
    host = HostMemory(swap.host_bytes(16), lock=False)
    parts = swap.parts(host.view, 16)
    move, close = arm_of(OURS, swap.paged)
    move(parts, "out")
    assert swap.check_out(parts) == SHAPE.block_bytes(64)
    swap.blank(parts)
    with pytest.raises(VerificationError, match="a block that was stored"):
        swap.check_out(parts)
    move(parts, "out")
    parts[3].memory[-1] ^= 1
    with pytest.raises(VerificationError, match="a block that was stored"):
        swap.check_out(parts)
    close()
    host.close()


def test_a_trace_that_could_not_be_written_is_an_error_of_the_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = ProfilePlan(step_tokens=32, chunk_tokens=16, steps=1)
    with pytest.raises(BenchError, match=r"gone/trace\.json: cannot write the trace: "):
        profile_run(plan, tmp_path / "gone" / "trace.json", lambda step: None)


def test_what_fails_behind_a_traced_model_is_an_error_of_the_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loading = threading.Event()

    def failed(self: HostTransfer, parts: Any, **_: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        loading.set()
        raise RuntimeError("fallen off the bus")

    monkeypatch.setattr(HostTransfer, "load", failed)
    plan = ProfilePlan(step_tokens=32, chunk_tokens=16, steps=2)
    with pytest.raises(BenchError, match="load: nothing was moved: fallen off the bus"):
        profile_run(plan, tmp_path / "trace.json", lambda step: None)
    assert loading.is_set()


def sample(percent: float) -> SwapSample:
    return SwapSample(repeat=0, seconds=1.0, gb_per_s=percent, percent=percent, verified_bytes=1)


def test_the_gate_holds_ours_to_its_shape_s_bar_and_no_other_arm() -> None:
    rows = [
        swap_row("8b", 16, 1, (OURS, "out"), [sample(96.0), sample(97.0), sample(99.0)]),
        swap_row("8b", 16, 1, (OURS, "in"), [sample(96.9)]),
        swap_row("7b", 16, 1, (PER_PAGE, "in"), [sample(10.0)]),
        swap_row("glm", 16, 1, (OURS, "in"), [sample(10.0)]),
    ]
    slowed = [PrefillSample(repeat=0, alone_ms=100, beside_ms=102, slowed_percent=2.0, gb_per_s=50)]
    found = swap_gate(rows, [prefill_row(("8b", "out", "graph"), 8192, slowed)])
    assert [(line["name"], line["passed"]) for line in found] == [
        ("8b out, chunks of 16", True),
        ("8b in, chunks of 16", False),
        ("8b prefill by graph beside out", True),
    ]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Swap, Any, Arm]]:
    """A swap without a GPU, the parts that its blocks have been stored in, and our arm."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    swap = Swap(TINY, 64, torch.device("cpu"))
    host = HostMemory(swap.host_bytes(16), lock=False)
    parts = swap.parts(host.view, 16)
    move, close = arm_of(OURS, swap.paged)
    move(parts, "out")
    yield swap, parts, move
    close()
    host.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_prefill_is_measured_by_graph_and_by_kernels_beside_what_moves(
    stored: tuple[Swap, Any, Arm], direction: Direction
) -> None:
    swap, parts, move = stored
    moved: list[Direction] = []

    def counted(parts: Any, way: Direction) -> None:
        moved.append(way)
        move(parts, way)

    rows, verified = prefill_beside(swap, counted, parts, direction, 3)
    assert verified >= swap.nbytes
    assert [(row["launch"], row["direction"], len(row["samples"])) for row in rows] == [
        ("graph", direction, 3),
        ("kernels", direction, 3),
    ]
    assert all(sample["gb_per_s"] > 0 and sample["beside_ms"] > 0 for row in rows for sample in row["samples"])
    assert set(moved) == {direction}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_moves_nothing_beside_a_prefill_is_found_out(stored: tuple[Swap, Any, Arm], direction: Direction) -> None:
    swap, parts, _ = stored  # what lies where it should is no proof
    with pytest.raises(VerificationError):
        prefill_beside(swap, lambda parts, way: None, parts, direction, 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_engine_s_copies_are_timed_alone_beside_copies_in_a_row_and_beside_ours(
    stored: tuple[Swap, Any, Arm], direction: Direction
) -> None:
    swap, parts, move = stored
    memory = HostMemory(1 << 16, lock=False)
    link = Link(memory, torch.device("cpu"), 1 << 16)
    rows, verified = copies_beside(swap, (move, link), parts, direction, 2)
    assert [row["beside"] for row in rows] == list(WAITERS)
    assert verified == 2 * swap.nbytes
    for row in rows:
        assert (row["shape"], row["direction"], row["nbytes"]) == ("tiny", direction, COPY_BYTES[direction])
        assert len(row["samples"]) == 2
        assert 0 < row["us"] <= row["most_us"]
        assert (row["gb_per_s"] > 0) == (row["beside"] != "alone")
    with pytest.raises(VerificationError):
        copies_beside(swap, (lambda parts, way: None, link), parts, direction, 1)


def test_the_commands_run_and_write_what_they_print(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, trace = tmp_path / "profile.json", tmp_path / "trace.json"
    sizes = ("--step-tokens", "32", "--chunk-tokens", "16", "--steps", "2")
    done = CliRunner().invoke(main, ("bench", "profile", "--out", str(trace), *sizes, "--json", str(path)))
    assert done.exit_code == 0, done.output
    assert "no overlap to measure" in done.output
    assert json.loads(path.read_text())["rows"] == []
    assert any(event.get("cat") == "cpu_op" for event in json.loads(trace.read_text())["traceEvents"])
    path = tmp_path / "swap.json"
    words = ("--tokens", "32", "--chunk-tokens", "32", "--shape", "3b", "--repeats", "1", "--beside-copies")
    done = CliRunner().invoke(main, ("bench", "swap", *words, "--json", str(path)))
    assert done.exit_code == 0, done.output
    assert "3b, an engine's copy of 64 bytes out, beside" in done.output
    assert len(json.loads(path.read_text())["waits"]) == len(DIRECTIONS) * len(WAITERS)
    done = CliRunner().invoke(main, ("bench", "swap", "--tokens", "48", "--chunk-tokens", "32", "--shape", "3b"))
    assert done.exit_code == 1
    assert "not whole chunks" in done.output


def kernel(stream: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": "k", "ts": ts, "dur": dur, "args": {"stream": stream}}


def memcpy(stream: int, ts: float, dur: float, name: str = "Memcpy DtoH", nbytes: int = 1 << 20) -> dict[str, Any]:
    return {"cat": "gpu_memcpy", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream, "bytes": nbytes}}


def test_a_trace_is_read_by_streams_ours_are_those_that_the_model_does_not_use() -> None:
    events = [
        kernel(7, 0, 400), kernel(7, 500, 500), kernel(20, 100, 10), memcpy(7, 5, 50),  # the model, a gather, its copy
        memcpy(21, 350, 100), memcpy(21, 950, 100), memcpy(20, 90, 1, "Memcpy HtoD", 512),
    ]  # fmt: skip
    row = phase_row("store", events, 1024)
    assert (row["copies"], row["copies_per_1024"]) == (3, 3.0)
    assert row["copy_ms"] == pytest.approx(0.2)
    assert row["beside_forward_percent"] == pytest.approx(75.0)  # 50 us of the second come behind the last kernel
    assert row["beside_kernels_percent"] == pytest.approx(50.0)
    assert [line["passed"] for line in profile_gate([row])] == [True, False]
    assert row["gap_beside_us"] is None  # no copy of ours has a whole one
    nothing = phase_row("load", [], 1024)
    assert [line["passed"] for line in profile_gate([nothing])] == [False, False]


def test_gaps_between_a_model_s_kernels_are_told_alone_and_within_copies() -> None:
    events = [kernel(7, at, 98 - 3 * (4 <= at // 100 < 8)) for at in range(0, 1200, 100)]
    events += [memcpy(21, 390, 400, "Memcpy HtoD"), kernel(20, 796, 5)]
    row = phase_row("load", events, 1024)
    assert (row["gap_alone_us"], row["gap_beside_us"]) == (2, 5)
    assert row["copies"] == 1
    head = new_result("", {"shape": "tiny", "step_tokens": 32})
    result = ProfileResult(**head, torch="2", device="a GPU", trace="t", rows=[row])
    assert any(line.split()[-2:] == ["2.0", "5.0"] for line in table_lines(result))
    told = [(0.0, 4.0), (3.0, 6.0), (8.0, 9.0), (11.0, 12.0)]  # the first two overlap; then a gap of 2, and another
    assert gaps(told, [], []) == ([0.0, 2.0, 2.0], [])
    assert gaps(told, [(5.0, 8.0)], [(5.0, 8.0), (10.0, 20.0)]) == ([0.0], [2.0])
    assert gaps(told, [(7.0, 20.0)], [(7.0, 20.0)]) == ([0.0], [2.0])


def test_spans_are_joined_over_gaps_and_shared_by_their_overlap() -> None:
    assert joined([(5, 6), (0, 2), (1, 3)], 0) == [(0, 3), (5, 6)]
    assert joined([(5, 6), (0, 2), (1, 3)], 2) == [(0, 6)]
    assert shared([(2, 7)], [(0, 3), (5, 6)]) == 2
