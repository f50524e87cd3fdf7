"""`kvredis bench swap`: it runs without a GPU, sees a wrong byte, and judges by the bars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvredis.bench import swap as arms
from kvredis.bench.core.compute import TINY
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.shapes import ModelShape
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


def sample(percent: float) -> SwapSample:
    return SwapSample(repeat=0, seconds=1.0, gb_per_s=percent, percent=percent, verified_bytes=1)


def test_the_gate_holds_ours_to_its_shape_s_bar_and_nobody_else() -> None:
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


def test_the_command_runs_and_writes_what_it_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "swap.json"
    words = ("--tokens", "32", "--chunk-tokens", "32", "--shape", "3b", "--repeats", "1", "--beside-copies")
    done = CliRunner().invoke(main, ("bench", "swap", *words, "--json", str(path)))
    assert done.exit_code == 0, done.output
    assert "3b, an engine's copy of 64 bytes out, beside" in done.output
    assert len(json.loads(path.read_text())["waits"]) == len(DIRECTIONS) * len(WAITERS)
    done = CliRunner().invoke(main, ("bench", "swap", "--tokens", "48", "--chunk-tokens", "32", "--shape", "3b"))
    assert done.exit_code == 1
    assert "not whole chunks" in done.output
