"""The planner's arithmetic, its units, and its verdicts against what others and we have measured.

Sources of the rows. wde v0.3.1's documentation (an RTX 4090, PCIe 4): baseline.test_prefills (seconds of a prefill of
8,192 tokens; how many times as long as swapping the same KV in), test_long_prefill (queries per second, prompts of
10,240 tokens), test_swap_in and test_transfer_in (prompts of 1,000 tokens, 992 of them found; queries per second, read
off its charts), its long-document example. Ours on an H200: Llama-3.1-8B's prefill and load through pinned memory. Ours
against LMCache 0.5.6's redis:// connector (0.42 GB/s get, 4 MiB; 0.3 to 0.5 in the field) and its lm:// server (1.65
GB/s) beside the same prefill. Ours with `kvredis bench slow-remote`: bench/results/slow-remote-2026-11-22.json, which
the test reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvredis.adapters.engine.break_even import BreakEven, Piece
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.bench.core.shapes import SHAPES, ModelShape
from kvredis.bench.plan import Pipeline, TierSpeed, Workload, judge, landing_share, plan, remote_share, sizes_of

RESULTS = Path(__file__).parents[2] / "bench" / "results"
H200_8B = {1024: (0.031, 0.0025), 8192: (0.248, 0.0195), 15_400: (0.518, 0.0367)}  # tokens: prefill s, load s
H200_8B_TOKENS_PER_S = 8192 / 0.248


@dataclass(frozen=True)
class Row:
    """One measured comparison: computing at a rate, loading at a bandwidth, and how much faster the hit was."""

    source: str
    shape: str
    prompt_tokens: int
    tokens_per_s: float
    gb_per_s: float
    speed_up: float
    latency_ms: float = 0.0


def swapped(shape: str, prefill_s: float, quotient: float) -> Row:
    gb_per_s = SHAPES[shape].block_bytes(8192) * quotient / prefill_s / 1e9
    return Row("test_prefills", shape, 8192, 8192 / prefill_s, gb_per_s, quotient)


def long_prefill(output: int, gb_per_s: float, none: float, hit: float) -> Row:
    return Row(f"test_long_prefill, output {output}", "7b", 10_240, 9752, gb_per_s, hit / none)


def document(seconds: float) -> Row:
    gb_per_s = SHAPES["glm"].block_bytes(100_000) / seconds / 1e9
    return Row("long document", "glm", 100_000, 100_000 / 33.9, gb_per_s, 33.9 / seconds)


def swept(source: str, gb_per_s: float, none: float, hit: float) -> Row:
    return Row(source, "3b", 1000, 20_480, gb_per_s, hit / none)


def on_an_h200(tokens: int) -> Row:
    prefill_s, load_s = H200_8B[tokens]
    gb_per_s = SHAPES["8b"].block_bytes(tokens) / load_s / 1e9
    return Row("H200, pinned memory", "8b", tokens, tokens / prefill_s, gb_per_s, prefill_s / load_s)


def beside_an_h200(source: str, gb_per_s: float) -> Row:
    load_s = SHAPES["8b"].block_bytes(8192) / gb_per_s / 1e9
    return Row(source, "8b", 8192, H200_8B_TOKENS_PER_S, gb_per_s, 0.248 / load_s)


ROWS = [
    swapped("32b", 3.69, 19.4),
    swapped("7b", 0.84, 14.0),
    swapped("7b", 0.53, 8.8),
    swapped("3b", 0.40, 5.0),
    swapped("glm", 1.08, 12.0),
    swapped("glm", 0.68, 7.6),
    swapped("8b", 0.89, 9.9),
    swapped("8b", 0.56, 6.2),
    long_prefill(2, 6.7, 0.91, 9.26),  # CPU memory
    long_prefill(2, 3.7, 0.91, 5.55),  # remote
    long_prefill(16, 6.7, 0.84, 4.69),
    long_prefill(16, 3.7, 0.84, 4.04),
    long_prefill(128, 6.7, 0.45, 0.78),
    long_prefill(128, 3.7, 0.45, 0.755),
    # CPU memory: 36.57 MB a prompt in 1/67 - 1/95 s, what a hit of it takes longer than one of GPU memory.
    *(swept(f"test_swap_in, {hit} % found", 8.3, 20, qps) for hit, qps in ((50, 34), (80, 56), (90, 65), (100, 67))),
    *(swept(f"test_transfer_in, {hit} %", 2.08, 19.5, qps) for hit, qps in ((0, 56), (50, 79), (80, 89), (100, 95))),
    *(swept(f"test_transfer_in off, {hit} %", 2.08, 19.5, qps) for hit, qps in ((0, 57), (50, 60), (100, 65))),
    *map(document, (1.2, 2.5, 3.5, 5.2, 6.4)),
    *map(on_an_h200, H200_8B),
    *(beside_an_h200("LMCache redis://", gb_per_s) for gb_per_s in (0.3, 0.42, 0.5)),
    beside_an_h200("LMCache lm://", 1.65),
]
INVENTED = [
    # No result shows a hit that loses: tiers of the rows above beside accelerators so many times as fast, and a slow
    # link. The speed-up is the bandwidth over the one that breaks even.
    Row("remote 3.7 GB/s, prefilled 8 times as fast", "7b", 10_240, 8 * 9752, 3.7, 3.7 / 4.47),
    Row("SSD 1.3 GB/s, prefilled 2.5 times as fast", "8b", 8192, 2.5 * 9204, 1.3, 1.3 / 3.02),
    Row("50 MB/s", "7b", 10_240, 9752, 0.05, 0.05 / 0.56),
]


def work(tokens_per_s: float, prompt_tokens: int = 8192, **more: Any) -> Workload:
    return Workload(tokens_per_s, prompt_tokens=prompt_tokens, **more)


def engine_would_load(shape: ModelShape, row: Row) -> bool:
    """Whether an engine would load all of it; none else."""
    layout = ChunkLayout(shape.layers, shape.kv_heads, shape.head_dim, "bf16")
    even = BreakEven(layout)
    for tokens in (1, 1, row.prompt_tokens):  # the planner knows of no cost of a pass beyond its tokens'
        even.prefill_took(tokens, tokens / row.tokens_per_s)
    even.load_took("remote", layout.chunk_bytes(), layout.chunk_bytes() / (row.gb_per_s * 1e9))
    even.question_took(row.latency_ms / 1e3)
    chunks = row.prompt_tokens // layout.chunk_tokens
    worth = even.worth([Piece("remote", layout.chunk_bytes(), layout.chunk_tokens)] * chunks)
    assert worth in (0, chunks)
    return worth > 0


@pytest.mark.parametrize("row", [*ROWS, *INVENTED], ids=lambda row: f"{row.source}, {row.shape}")
def test_the_verdict_is_the_side_that_was_faster_and_the_engine_would_choose_it_too(row: Row) -> None:
    judged = judge(SHAPES[row.shape], work(row.tokens_per_s, row.prompt_tokens), TierSpeed("tier", row.gb_per_s))
    assert (judged["verdict"] == "load") == (row.speed_up > 1)
    assert (judged["quotient"] > 1) == (row.speed_up > 1)
    assert engine_would_load(SHAPES[row.shape], row) == (row.speed_up > 1)


def test_the_rows_are_on_both_sides() -> None:
    assert {row.speed_up > 1 for row in ROWS} == {True, False}


def test_the_measured_slow_remote_loses_while_throttled_and_wins_when_free() -> None:
    measured = json.loads((RESULTS / "slow-remote-2026-11-22.json").read_text())
    options = measured["options"]
    shape = ModelShape("slow-remote", layers=options["bytes_per_token"] // 1024, kv_heads=2, head_dim=128)
    assert shape.bytes_per_token() == options["bytes_per_token"]
    rows = {(row["link"], row["arm"]): row for row in measured["rows"]}
    nbytes = options["prompts"] * options["prompt_tokens"] * options["bytes_per_token"]
    speeds = {"throttled": options["link_bytes_per_s"] / 1e9, "free": nbytes / rows["free", "plain"]["seconds"] / 1e9}
    for link, gb_per_s in speeds.items():
        slower = rows[link, "plain"]["ratio_to_none"]
        judged = judge(
            shape, work(options["prefill_tokens_per_s"], options["prompt_tokens"]), TierSpeed(link, gb_per_s)
        )
        assert (judged["verdict"] == "load") == (slower < 1)
        assert 1 / judged["speed_up"] == pytest.approx(slower, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "tokens_per_s", "gb_per_s"),
    [
        ("32b", 2220, 0.58),
        ("7b", 9752, 0.56),
        ("7b", 15_457, 0.89),
        ("3b", 20_480, 0.75),
        ("glm", 7585, 0.62),
        ("glm", 12_047, 0.99),
        ("8b", 9204, 1.21),
        ("8b", 14_629, 1.92),
    ],
)
def test_break_even_is_the_rate_at_which_test_prefills_says_that_kv_is_made(
    shape: str, tokens_per_s: float, gb_per_s: float
) -> None:
    planned = plan(SHAPES[shape], work(tokens_per_s), [], None)
    assert planned["break_even_gb_per_s"] == pytest.approx(gb_per_s, abs=0.006)
    made = SHAPES[shape]
    engine = BreakEven(ChunkLayout(made.layers, made.kv_heads, made.head_dim, "bf16"))
    engine.prefill_took(8192, 8192 / tokens_per_s)
    assert engine.bytes_per_s == pytest.approx(planned["break_even_gb_per_s"] * 1e9)


@pytest.mark.parametrize(("link", "share"), [(600, 0.294), (274.5, 0.1346), (3000, 1.0)])
def test_the_remote_share_is_that_of_the_layer_pipeline_rule(link: float, share: float) -> None:
    assert remote_share(Pipeline(2040, link), kv_gb=0.5) == pytest.approx(share, abs=0.0005)


def test_the_remote_share_reckons_in_gb_per_s_ms_and_gb() -> None:
    # 0.5 GB: read in 0.5 ms at 1000 GB/s; 4.5 ms more of other work, 1 ms of overhead: 4 ms x 50 GB/s = 0.2 GB.
    assert remote_share(Pipeline(1000, 50, other_ms=4.5, overhead_ms=1.0), kv_gb=0.5) == pytest.approx(0.4)
    assert remote_share(Pipeline(1000, 50, overhead_ms=1.0), kv_gb=0.5) == 0.0


def test_writing_what_comes_costs_a_step_a_twentieth_from_some_share_on() -> None:
    assert landing_share(Pipeline(1000, 50), kv_gb=0.5) == pytest.approx(0.05), "a step that only reads KV"
    assert landing_share(Pipeline(1000, 50, other_ms=4.5), kv_gb=0.5) == pytest.approx(0.5)
    assert landing_share(Pipeline(1000, 50, other_ms=100), kv_gb=0.5) == 1.0


def test_the_pipeline_reads_one_prompt_unless_told_otherwise() -> None:
    planned = plan(SHAPES["8b"], work(10_000), [], Pipeline(1000, 50, other_ms=4.5))
    assert planned["pipeline"] is not None
    assert planned["pipeline"]["kv_gb"] == pytest.approx(8192 * 131_072 / 1e9)


@pytest.mark.parametrize(
    ("shape", "token", "chunk_mib", "prompt_mib"),
    [("32b", 262_144, 64, 2048), ("7b", 57_344, 14, 448), ("3b", 36_864, 9, 288), ("glm", 81_920, 20, 640)],
)
def test_sizes_are_those_of_the_known_models(shape: str, token: int, chunk_mib: int, prompt_mib: int) -> None:
    sizes = sizes_of(SHAPES[shape], work(10_000))
    assert sizes["bytes_per_token"] == token
    assert sizes["chunk_bytes"] == chunk_mib * 1024**2 == sizes["layer_chunk_bytes"] * SHAPES[shape].layers
    assert sizes["prompt_bytes"] == prompt_mib * 1024**2


def test_hugepages_hold_all_prompts_with_their_headers_and_no_more_than_that() -> None:
    one, ten = (sizes_of(SHAPES["7b"], work(10_000, prompts=prompts)) for prompts in (1, 10))
    assert ten["arena_bytes"] == 10 * one["arena_bytes"]
    assert 32 * 14 * 1024**2 < one["arena_bytes"] < 32 * 14.01 * 1024**2
    assert one["hugepages"] == 225
    assert one["hugepages"] * 2 * 1024**2 >= one["arena_bytes"] > (one["hugepages"] - 1) * 2 * 1024**2


def test_the_smallest_hit_is_the_first_chunk_that_is_faster_to_load() -> None:
    # 1,000 tokens/s; 57,344 B at 0.114688 GB/s: 0.5 ms a token are saved; 200 ms of latency are 400 tokens.
    tier = TierSpeed("far", 0.114688, latency_ms=200)
    assert judge(SHAPES["7b"], work(1000), tier)["smallest_hit_tokens"] == 512
    assert judge(SHAPES["7b"], work(1000, 256), tier)["verdict"] != "load"
    assert judge(SHAPES["7b"], work(1000, 512), tier)["verdict"] == "load"
    assert judge(SHAPES["7b"], work(1000), TierSpeed("slow", 0.05, 200))["smallest_hit_tokens"] is None
    assert judge(SHAPES["7b"], work(1000), TierSpeed("near", 5))["smallest_hit_tokens"] == 256


@pytest.mark.parametrize("latency_ms", [0.0, 10.0, 100.0, 250.0])
@pytest.mark.parametrize("tokens", [256, 512, 1024, 8192])
def test_planner_and_engine_agree_about_latency(latency_ms: float, tokens: int) -> None:
    row = Row("made up", "7b", tokens, 4000, 0.5, 1.0, latency_ms)
    workload = work(row.tokens_per_s, tokens)
    judged = judge(SHAPES["7b"], workload, TierSpeed("remote", row.gb_per_s, latency_ms))
    # What an engine measures of a load has the latency in it and is known without: tell it the bandwidth alone.
    assert engine_would_load(SHAPES["7b"], row) == (judged["verdict"] == "load")


@pytest.mark.parametrize(
    ("gb_per_s", "queue", "verdict"),
    [
        (0.57, 4, "load"),
        (0.5, 4, "prefetch only"),
        (0.5, 0, "recompute"),
        (0.1, 4, "recompute"),
        (0.1, 6, "prefetch only"),
    ],
)
def test_a_tier_slower_than_computing_is_for_prefetching_while_enough_prompts_wait(
    gb_per_s: float, queue: int, verdict: str
) -> None:
    judged = judge(SHAPES["7b"], work(9752, queue=queue), TierSpeed("disk", gb_per_s))
    assert judged["verdict"] == verdict


def test_stores_hide_behind_a_prefill_that_makes_less_than_the_tier_takes() -> None:
    even = plan(SHAPES["7b"], work(9752), [], None)["break_even_gb_per_s"]
    fast, slow = TierSpeed("fast", 2.0), TierSpeed("slow", 2.0, store_gb_per_s=even / 2)
    hidden, seen = judge(SHAPES["7b"], work(9752), fast), judge(SHAPES["7b"], work(9752), slow)
    behind = judge(SHAPES["7b"], work(9752, store_overlap=False), fast)
    assert [each["store_hides"] for each in (hidden, seen, behind)] == [True, False, False]
    assert [each["prefill_slowed"] for each in (hidden, seen, behind)] == pytest.approx([1, 2, 1 + even / 2])


def test_a_chunk_of_nine_latencies_reaches_nine_tenths_of_the_bandwidth() -> None:
    tier = TierSpeed("disk", 2.0, latency_ms=0.1)
    nbytes = judge(SHAPES["7b"], work(9752), tier)["chunk_bytes_90"]
    assert nbytes == 1_800_000
    assert nbytes / (0.1e-3 + nbytes / 2.0e9) == pytest.approx(0.9 * 2.0e9)
    assert judge(SHAPES["7b"], work(9752), tier)["chunk_tokens_90"] == 32
    assert judge(SHAPES["7b"], work(9752), TierSpeed("memory", 12))["chunk_bytes_90"] == 0


def test_decoding_dilutes_what_a_hit_saves() -> None:
    """test_long_prefill: 10.2x at 2 tokens, 1.73x at 128; its queries per second of hits in GPU memory are decoding."""
    speed_ups = []
    for output, gpu in ((2, 49.5), (16, 6.43), (128, 0.81)):
        workload = work(9752, 10_240, output_tokens=output, decode_tokens_per_s=output * gpu)
        speed_ups.append(judge(SHAPES["7b"], workload, TierSpeed("memory", 6.7))["request_speed_up"])
    assert speed_ups == [pytest.approx(10.2, rel=0.05), pytest.approx(5.6, rel=0.15), pytest.approx(1.73, rel=0.1)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_speeds_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TierSpeed("tier", bad)
    with pytest.raises(ValueError, match="positive"):
        Workload(bad)
    with pytest.raises(ValueError, match="positive"):
        Pipeline(bad, 1)
    with pytest.raises(ValueError, match="no whole chunk"):
        replace(work(1), prompt_tokens=255)
    with pytest.raises(ValueError, match="latency_ms"):
        TierSpeed("tier", 1, latency_ms=-0.1)


@pytest.mark.parametrize(
    ("source", "store_gb_per_s", "none", "stored"),
    [
        ("test_swap_out, sync", 3.8, 2.48, 2.45),  # its slowest way to CPU memory
        ("test_swap_out, two in flight", 3.8, 2.58, 2.59),
        ("test_transfer_out, sync", 1.7, 2.48, 2.37),  # its server's slowest, on a disk
        ("test_transfer_out, two in flight", 1.7, 2.58, 2.46),
    ],
)
def test_stores_hide_where_they_were_measured_to(
    source: str, store_gb_per_s: float, none: float, stored: float
) -> None:
    """3B, prompts of 8,192 tokens, queries per second without and with storing: within 5 %; 0.76 GB/s are made."""
    judged = judge(SHAPES["3b"], work(2.5 * 8192), TierSpeed(source, 3.8, store_gb_per_s=store_gb_per_s))
    assert judged["store_hides"]
    assert judged["prefill_slowed"] == pytest.approx(none / stored, abs=0.05)
