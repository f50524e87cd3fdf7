"""`kvredis bench layerwise`: it compares every output and every byte, says what it measured, and judges by the bars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Moving, Part
from kvredis.adapters.transfer.cpu import HostTransfer
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.layerwise.model import SMALL, Marks, PagedModel
from kvredis.bench.layerwise.rig import (
    BOTH,
    CAPS,
    LAYERED,
    LOAD,
    NONE,
    PUSHES,
    CapSample,
    LoadSample,
    PushSample,
    remote_places,
)
from kvredis.bench.layerwise.run import (
    LANE,
    PARTS,
    REMOTE,
    SCHEMA,
    LayerwisePlan,
    LayerwiseResult,
    cap_point,
    layerwise_gate,
    load_point,
    push_points,
    run,
    table_lines,
)
from kvredis.bench.plan import Pipeline, remote_share
from kvredis.cli.main import main

CPU = torch.device("cpu")
TINY = LayerwisePlan(
    prefix_tokens=64,
    suffix_tokens=32,
    chunk_tokens=32,
    ratios=(1.0, 0.0),
    cap_bytes=1 << 21,
    shares=(0.0, 0.25, 1.0),
    decode_steps=2,
    repeats=2,
)
PREFIX = SMALL.block_bytes(64)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def of_parts(*parts: str, **other: Any) -> LayerwisePlan:
    """TINY with these parts alone."""
    names = ("prefix_tokens", "suffix_tokens", "chunk_tokens", "ratios", "cap_bytes", "shares", "decode_steps")
    return LayerwisePlan(**{name: getattr(TINY, name) for name in names}, repeats=1, parts=parts, **other)


def test_every_part_is_measured_and_every_byte_of_it_is_compared() -> None:
    steps: list[str] = []
    result = run(TINY, steps.append)
    assert result["schema"] == SCHEMA
    assert len(steps) == TINY.steps()
    assert [point["arm"] for point in result["push"]] == list(PUSHES)
    for point in result["push"]:
        assert [sample["steps"] for sample in point["samples"]] == [2 if point["arm"] == LAYERED else 0] * 2
    assert [point["ratio"] for point in result["load"]] == [1.0, 0.0]
    assert [(point["asked_gb_per_s"], point["way"]) for point in result["cap"]] == [
        (bound, way) for bound in (None, 1.0) for way in CAPS
    ]
    rounds = TINY.cap_bytes // PREFIX
    assert [point["samples"][0]["nbytes"] for point in result["cap"][:3]] == [
        PREFIX * rounds * times for times in (1, 1, 2)
    ]
    assert [(point["share"], point["layers"]) for point in result["share"]] == [(0, 0), (0.25, 2), (1, 8)]
    pushed, loaded, shared = 2 * 2, 2 * 2 * 4, 2 * (3 * 2 + 2)
    capped = 2 * 2 * (3 + 2 * rounds)
    assert result["verified_bytes"] == PREFIX * (pushed + 1 + loaded + capped + shared)
    assert json.loads(json.dumps(result)) == result
    assert len(list(table_lines(result))) > 25


@pytest.mark.parametrize("bound", [None, 0.05])
def test_the_prediction_is_the_plans_with_the_speeds_of_the_same_run(bound: float | None) -> None:
    result = run(of_parts("share", link_gb_per_s=bound), lambda step: None)
    assert result["options"]["link_gb_per_s"] == bound
    line = result["pipeline"]
    assert line is not None
    assert line["kv_gb"] == PREFIX / 1e9
    given = Pipeline(line["hbm_gb_per_s"], line["link_gb_per_s"], line["other_ms"], line["overhead_ms"], line["kv_gb"])
    assert line["a_max"] == remote_share(given, PREFIX / 1e9)
    base = result["share"][0]["step_ms"]
    for point in result["share"]:
        fetch_ms = point["share"] * PREFIX / 1e6 / line["link_gb_per_s"] + line["overhead_ms"]
        assert point["predicted_ms"] == pytest.approx(max(base, fetch_ms) if point["layers"] else base)


@pytest.mark.parametrize("tier", [LANE, REMOTE])
def test_a_servers_blocks_come_and_go_as_those_of_the_engines_own_memory(tier: str) -> None:
    result = run(of_parts("push", "load", tier=tier), lambda step: None)
    assert result["options"]["tier"] == tier
    assert result["verified_bytes"] == PREFIX * (2 + 1 + 2 * 4)


def test_a_layer_that_does_not_come_is_seen_by_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkMover, "begin_layers", lambda mover, jobs: None)
    with pytest.raises(VerificationError, match="decoding with 2 remote layers, step 0: the model's output"):
        run(of_parts("share"), lambda step: None)


@pytest.mark.parametrize("part", PARTS)
def test_a_wrong_byte_ends_the_run(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    real, calls = HostTransfer.load, []

    def wrong(
        transfer: HostTransfer, parts: Sequence[Part], *, after: torch.cuda.Event | None = None, is_last: bool = False
    ) -> Moving:
        moving = real(transfer, parts, after=after, is_last=is_last)
        calls.append(parts)
        if len(calls) > (part != "push"):  # the first is that of the prefix
            transfer.paged.layers[0].view(torch.uint8)[parts[0].pages[0], 1, 3, 1, 2] ^= 1
        return moving

    monkeypatch.setattr(HostTransfer, "load", wrong)
    with pytest.raises(VerificationError, match=r"other bytes|another one"):
        run(of_parts(part), lambda step: None)


def test_a_step_that_was_not_prepared_for_is_not_measured_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkMover, "lease_ahead", lambda mover, jobs: None)
    with pytest.raises(BenchError, match="prepared: 0 chunks were leased before"):
        run(of_parts("load"), lambda step: None)


def test_chunks_that_are_gone_end_the_run_with_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkMover, "store", lambda mover, job, after=None: None)
    with pytest.raises(BenchError, match="only 0 of 2 chunks could be stored"):
        run(of_parts("load"), lambda step: None)


def test_the_model_computes_the_same_by_steps_and_reads_what_is_in_its_pages() -> None:
    model = PagedModel(SMALL, 96, CPU)
    ids = model.tokens(96)
    whole = model.forward(ids, 0)
    kv = [layer.clone() for layer in model.memory]
    seen: list[tuple[str, int]] = []
    for start, stop in ((0, 40), (40, 95)):
        model.forward(ids[start:stop], start)
    stepped = model.forward(
        ids[95:], 95, lambda layer: seen.append(("before", layer)), lambda layer: seen.append(("after", layer))
    )
    assert torch.allclose(stepped, whole, atol=1e-3)
    assert all(torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in zip(model.memory, kv, strict=True))
    assert seen == [(when, layer) for layer in range(SMALL.layers) for when in ("before", "after")]
    assert sorted(model.table) == list(range(6)) != model.table
    model.memory[3][model.table[1], 1, 5] += 1
    assert not torch.allclose(model.forward(ids[95:], 95), whole, atol=1e-3)


def test_marks_are_told_in_their_order() -> None:
    marks = Marks(CPU)
    assert [marks.mark(), marks.mark()] == [0, 1]
    first, second = marks.seconds()
    assert first <= second


@pytest.mark.parametrize(
    ("share", "places"),
    [(0.0, ()), (0.01, (7,)), (0.25, (3, 7)), (0.5, (1, 3, 5, 7)), (0.75, (1, 2, 3, 5, 6, 7)), (1.0, tuple(range(8)))],
)
def test_remote_layers_are_spread_and_the_first_comes_late(share: float, places: tuple[int, ...]) -> None:
    assert remote_places(8, share) == places


@pytest.mark.parametrize("chunk_tokens", [24, 96])
def test_tokens_that_are_no_whole_chunks_of_whole_pages_are_refused(chunk_tokens: int) -> None:
    with pytest.raises(BenchError, match="is not made of chunks"):
        LayerwisePlan(prefix_tokens=128, chunk_tokens=chunk_tokens)
    sizes = ("--prefix-tokens", "128", "--chunk-tokens", str(chunk_tokens))
    done = CliRunner().invoke(main, ["bench", "layerwise", *sizes])
    assert done.exit_code == 2
    assert "is not made of chunks" in done.output


def test_a_shape_without_widths_is_refused() -> None:
    with pytest.raises(BenchError, match="no model of shape odd"):
        PagedModel(type(SMALL)("odd", 2, 2, 16), 32, CPU)


@pytest.mark.nightly
def test_the_command_saves_what_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sizes = ("--prefix-tokens", "64", "--suffix-tokens", "32", "--chunk-tokens", "32", "--repeats", "1")
    options = ("--quick", "--part", "push,share", *sizes, "--json", str(path))
    done = CliRunner().invoke(main, ["bench", "layerwise", *options])
    assert done.exit_code == 0, done.output
    result: LayerwiseResult = json.loads(path.read_text())
    assert (result["load"], result["cap"]) == ([], [])
    assert len(result["push"]) == 3
    assert [point["asked"] for point in result["share"]] == [0.0, 0.25, 0.5, 1.0]
    assert "layer 0 is out before the last is computed" in done.output
    assert "a_max" in done.output


def push_sample(repeat: int, seconds: float, ahead: int) -> PushSample:
    """Of four steps."""
    return PushSample(
        repeat=repeat, seconds=seconds, drain_seconds=0.1, steps=4, steps_ahead=ahead, lead_ms=3.0, tail_ms=2.0
    )


def load_samples(exposed_s: float, load_s: float) -> list[LoadSample]:
    """Beside 100 ms of computing; so much is exposed of a step that was prepared, and twice that of another."""
    return [
        LoadSample(
            repeat=repeat, alone_seconds=0.1, before_seconds=0.1 + load_s, load_seconds=load_s,
            layered_seconds=0.1 + 2 * exposed_s, layered_exposed_seconds=2 * exposed_s,
            prepared_seconds=0.1 + exposed_s, prepared_exposed_seconds=exposed_s,
        )
        for repeat in range(3)
    ]  # fmt: skip


def cap_samples(rate: float) -> list[CapSample]:
    """One."""
    return [CapSample(repeat=0, nbytes=1, seconds=1.0, gb_per_s=rate, load_gb_per_s=None)]


def judged(**points: Any) -> dict[str, bool]:
    """The gate of a result with these points alone."""
    empty: dict[str, Any] = {"push": [], "load": [], "cap": []}
    return {line["name"]: line["passed"] for line in layerwise_gate({**empty, **points})}  # type: ignore[typeddict-item]


def test_one_step_whose_first_layer_was_late_misses_the_bar() -> None:
    for late in (0, 1):
        samples = {arm: [push_sample(n, 1.0 + (arm == LAYERED), 4 - late * n) for n in range(2)] for arm in PUSHES}
        points = push_points(samples)
        assert [point["ratio"] for point in points] == [1.0, 1.0, 2.0]
        assert list(judged(push=points).values()) == [not late]
    assert points[PUSHES.index(NONE)]["ahead"] == 0.75


def test_what_is_exposed_is_judged_by_a_layers_share_where_loading_is_faster_than_computing() -> None:
    good, bad, slow = (
        load_point(ratio, 1e9, 8, load_samples(exposed_s, load_s))
        for ratio, exposed_s, load_s in ((0.5, 0.008, 0.05), (0.4, 0.0082, 0.05), (2.0, 0.15, 0.2))
    )
    assert good["prepared"]["quotient"] == pytest.approx(1.28)
    assert good["prepared"]["gained"] == pytest.approx(0.15 / 0.108)
    assert good["layered"]["quotient"] == pytest.approx(2.56)
    assert judged(load=[good, bad, slow]) == {
        "load: exposed, load/compute 0.5": True,
        "load: exposed, load/compute 0.4": False,
    }


def test_a_bound_is_judged_where_it_bounds() -> None:
    free = [cap_point(way, None, cap_samples(rate)) for way, rate in zip(CAPS, (1.0, 5.0, 5.0), strict=True)]
    bound = [cap_point(way, 1.0, cap_samples(rate)) for way, rate in zip(CAPS, (0.8, 0.95, 1.11), strict=True)]
    assert judged(cap=[*free, *bound]) == {f"cap: {LOAD}, GB/s": True, f"cap: {BOTH}, GB/s": False}
