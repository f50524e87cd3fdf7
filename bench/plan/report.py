"""A plan as text: sizes, break-even, a table of tiers with their verdicts, and what follows, in GB, ms and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvredis.bench.core.statistics import counted, size_text

from .planning import PipelineJson, PlanResult, TierJson

_COLUMNS = ("tier", "GB/s", "latency", "x even", "load", "faster", "verdict", "smallest hit", "stores", "90 % chunk")


def table_lines(result: PlanResult) -> Iterator[str]:
    """Give the report, line by line."""
    yield from _sizes(result)
    yield ""
    yield (
        f"Break-even: {result['break_even_gb_per_s']:.3f} GB/s. A slower tier makes a hit slower than no hit;"
        " a prefill makes KV at this rate."
    )
    if result["tiers"]:
        yield ""
        yield from _tiers(result)
    if result["pipeline"] is not None:
        yield ""
        yield from _pipeline(result["pipeline"])


def _sizes(result: PlanResult) -> Iterator[str]:
    shape, sizes, work = result["shape"], result["sizes"], result["workload"]
    chunk, prompt = int(work["chunk_tokens"] or 0), int(work["prompt_tokens"] or 0)
    kept = f"{shape['kv_heads']} KV heads x {shape['head_dim']} x {shape['dtype_bytes']} bytes, K and V"
    if shape["planes"] == 1:
        kept = f"a latent of {shape['head_dim']} x {shape['dtype_bytes']} bytes"
    rate = f"{work['prefill_tokens_per_s']:,.0f} tokens/s of prefill"
    yield f"{shape['name']}: {shape['layers']} layers x {kept}; {rate}"
    yield ""
    yield f"  a token                 {sizes['bytes_per_token']:>12,} bytes"
    yield f"  {f'a chunk ({chunk} tokens)':<23} {_size(sizes['chunk_bytes']):>12}"
    yield f"  a layer of a chunk      {_size(sizes['layer_chunk_bytes']):>12}"
    chunks = counted(prompt // chunk, "whole chunk")
    yield f"  {f'a prompt ({prompt} tokens)':<23} {_size(sizes['prompt_bytes']):>12}, {chunks}"
    held = f"arena for {counted(int(work['prompts'] or 0), 'prompt')}"
    yield f"  {held:<23} {_size(sizes['arena_bytes']):>12} = {counted(sizes['hugepages'], 'hugepage')} of 2 MiB"


def _tiers(result: PlanResult) -> Iterator[str]:
    rows = [_COLUMNS, *map(_cells, result["tiers"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = [
            cell.ljust(width) if _COLUMNS[at] in ("tier", "verdict", "stores") else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
    yield ""
    yield "  x even: bandwidth / break-even. load: a prompt's whole chunks. faster: computing it / loading it."
    yield from _remarks(result["tiers"], result["workload"]["queue"])
    for tier in result["tiers"]:
        if tier["request_speed_up"] is not None:
            tokens = int(result["workload"]["output_tokens"] or 0)
            yield f"  {tier['name']}: a request with {counted(tokens, 'output token')}: {tier['request_speed_up']:.2f}x"


def _remarks(tiers: Sequence[TierJson], queue: object) -> Iterator[str]:
    if any(tier["verdict"] == "prefetch only" for tier in tiers):
        yield f"  prefetch only: slower than computing, but here by the time that {queue} prompts ahead are computed."
    for tier in tiers:
        if tier["prefill_slowed"] > 1:
            slowed = f"storing makes a prefill {tier['prefill_slowed']:.2f}x as long"
            yield f"  {tier['name']}: takes {tier['store_gb_per_s']:.3g} GB/s, so {slowed}."
    for tier in tiers:
        if tier["source"] != "given":
            yield f"  {tier['name']}: {tier['source']}"


def _cells(tier: TierJson) -> tuple[str, ...]:
    smallest, chunk = tier["smallest_hit_tokens"], tier["chunk_bytes_90"]
    return (
        tier["name"],
        f"{tier['gb_per_s']:.2f}",
        f"{tier['latency_ms']:.3g} ms",
        f"{tier['quotient']:.2f}x",
        f"{tier['load_ms']:,.1f} ms",
        f"{tier['speed_up']:.2f}x",
        tier["verdict"],
        "none" if smallest is None else f"{smallest} tokens",
        "hidden" if tier["store_hides"] else "seen",
        "any" if chunk == 0 else f"{tier['chunk_tokens_90']} tokens",
    )


def _pipeline(pipeline: PipelineJson) -> Iterator[str]:
    yield (
        f"Layer pipeline: up to {pipeline['a_max'] * 100:.1f} % of a step's KV ({pipeline['kv_gb']:.3f} GB) may lie"
        f" behind a link of {pipeline['link_gb_per_s']:g} GB/s"
    )
    yield (
        f"  = {pipeline['link_gb_per_s']:g} x (1 / {pipeline['hbm_gb_per_s']:g} + ({pipeline['other_ms']:g} ms -"
        f" {pipeline['overhead_ms']:g} ms) / {pipeline['kv_gb']:.3f} GB), between 0 and 1"
    )


def _size(nbytes: int) -> str:
    """Write a size in the largest unit that leaves at least 1."""
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes >= scale:
            return size_text(nbytes) if nbytes % scale == 0 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
