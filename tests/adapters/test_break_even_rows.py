"""The rule against what others have measured: in each row it must choose the side that was the faster one.

Figures of wde v0.3.1's documentation, an RTX 4090 with PCIe 4: its tables baseline.test_prefills (seconds of a prefill
of 8,192 tokens, and how many times as long it took as swapping the same KV in), test_long_prefill (queries per second
over prompts of 10,240 tokens), test_transfer_in (1,000 prompts of 1,000 tokens, the second pass from the server) and
its long-document example. Bandwidths are those that the times amount to.
"""

from dataclasses import dataclass

import pytest

from kvredis.adapters.deciding import BreakEven, Piece
from kvredis.adapters.layout import ChunkLayout
from kvredis.backends.base import Tier

SHAPES = {
    "32b": ChunkLayout(64, 8, 128, "fp16", model="Qwen2.5-32B"),
    "7b": ChunkLayout(28, 4, 128, "bf16", model="Qwen2.5-7B"),
    "3b": ChunkLayout(36, 2, 128, "bf16", model="Qwen2.5-3B"),
    "glm": ChunkLayout(40, 4, 128, "bf16", model="glm-4-9b-chat-1m"),
    "8b": ChunkLayout(32, 8, 128, "bf16", model="Llama-3.1-8B"),
}


@dataclass(frozen=True)
class Row:
    """One measured comparison: computing at a rate, loading at a bandwidth, and how much faster the hit was."""

    source: str
    shape: str
    prompt_tokens: int
    tokens_per_s: float
    tier: Tier
    gb_per_s: float
    speed_up: float


def swapped(shape: str, prefill_s: float, quotient: float) -> Row:
    nbytes = 8192 * SHAPES[shape].bytes_per_token
    gb_per_s = nbytes / (prefill_s / quotient) / 1e9
    return Row("test_prefills", shape, 8192, 8192 / prefill_s, "memory", gb_per_s, quotient)


def long_prefill(output: int, tier: Tier, none: float, hit: float) -> Row:
    bandwidth = {"memory": 6.7, "remote": 3.7}[tier]  # at output 2, where little else is in the time
    return Row(f"test_long_prefill, output {output}", "7b", 10_240, 9752, tier, bandwidth, hit / none)


def document(tier: Tier, seconds: float) -> Row:
    nbytes = 100_000 * SHAPES["glm"].bytes_per_token
    return Row("long document", "glm", 100_000, 100_000 / 33.9, tier, nbytes / seconds / 1e9, 33.9 / seconds)


ROWS = [
    swapped("32b", 3.69, 19.4),
    swapped("7b", 0.84, 14.0),
    swapped("7b", 0.53, 8.8),
    swapped("3b", 0.40, 5.0),
    swapped("glm", 1.08, 12.0),
    swapped("glm", 0.68, 7.6),
    swapped("8b", 0.89, 9.9),
    swapped("8b", 0.56, 6.2),
    long_prefill(2, "memory", 0.91, 9.26),
    long_prefill(2, "remote", 0.91, 5.55),
    long_prefill(16, "memory", 0.84, 4.69),
    long_prefill(16, "remote", 0.84, 4.04),
    long_prefill(128, "memory", 0.45, 0.78),
    long_prefill(128, "remote", 0.45, 0.755),
    Row("test_transfer_in, nothing shared", "3b", 1000, 20_480, "remote", 2.08, 57 / 19.5),
    document("memory", 1.2),
    document("remote", 2.5),
    document("remote", 3.5),
    document("disk", 5.2),
    document("disk", 6.4),
]

ELSEWHERE = [
    # The same tiers beside other models and faster accelerators, where loading loses: what the times above amount to,
    # divided by a prefill rate that is as many times as high.
    Row("remote 3.7 GB/s, 7b prefilled 8 times as fast", "7b", 10_240, 8 * 9752, "remote", 3.7, 3.7 / 4.47),
    Row("SSD 1.3 GB/s, 8b prefilled 2.5 times as fast", "8b", 8192, 2.5 * 9204, "disk", 1.3, 1.3 / 3.02),
    Row("50 MB/s, 7b", "7b", 10_240, 9752, "remote", 0.05, 0.05 / 0.56),
]


@pytest.mark.parametrize("row", [*ROWS, *ELSEWHERE], ids=lambda row: f"{row.source}, {row.shape}, {row.tier}")
def test_the_rule_chooses_the_side_that_was_faster(row: Row) -> None:
    layout = SHAPES[row.shape]
    even = BreakEven(layout)
    even.prefill_took(row.prompt_tokens, row.prompt_tokens / row.tokens_per_s)
    even.load_took(row.tier, layout.chunk_bytes(), layout.chunk_bytes() / (row.gb_per_s * 1e9))
    chunks = row.prompt_tokens // layout.chunk_tokens
    pieces = [Piece(row.tier, layout.chunk_bytes(), layout.chunk_tokens)] * chunks
    assert even.worth(pieces) == (chunks if row.speed_up > 1 else 0)


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
def test_break_even_is_what_test_prefills_says_that_a_prefill_makes(
    shape: str, tokens_per_s: float, gb_per_s: float
) -> None:
    even = BreakEven(SHAPES[shape])
    even.prefill_took(8192, 8192 / tokens_per_s)
    assert even.bytes_per_s is not None
    assert even.bytes_per_s / 1e9 == pytest.approx(gb_per_s, abs=0.006)


def test_the_rows_are_on_both_sides() -> None:
    assert {row.speed_up > 1 for row in ROWS} == {True}, "nobody publishes a hit that loses"
    assert {row.speed_up > 1 for row in ELSEWHERE} == {False}
