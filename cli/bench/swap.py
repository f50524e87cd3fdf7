"""`kvredis bench swap`: what an engine's pages are moved at, against what the link gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.swap import QUICK, SwapPlan, run, table_lines

from .options import Telling, json_option, measuring, numbers_of, shapes_of


@click.command(
    epilog="""\b
Example: kvredis bench swap --shape 8b,7b,3b
Example: kvredis bench swap --shape 8b --beside-prefill --json swap.json --gate"""
)
@click.option("--quick", is_flag=True, help="Two repeats.")
@click.option(
    "--shape",
    "shapes",
    callback=shapes_of,
    metavar="LIST",
    help=f"Models whose KV is moved: {','.join(SHAPES)}, or a config.json; default 8b,7b,3b.",
)
@click.option("--chunk-tokens", callback=numbers_of, metavar="LIST", help="Tokens of a stored block; default 16,256.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), help="Tokens of one task; default 8192, without a GPU 512.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@click.option("--beside-prefill", is_flag=True, help="Also let a model with random weights prefill meanwhile.")
@click.option(
    "--beside-copies", is_flag=True, help="Also time copies of a few bytes meanwhile, as an engine makes them."
)
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a bar is missed.")
def swap(quick: bool, json_path: str | None, judge: bool, **given: Any) -> None:
    """Move random pages of paged KV out of a GPU and in again, by three ways; in GB/s and percent of the link.

    The link is measured in the same repeat. Without a GPU everything is copied within the CPU's memory, which says that
    it works and no more. Every byte is compared; prints medians with their least and most.
    """
    plan = replace(
        QUICK if quick else SwapPlan(), **{name: value for name, value in given.items() if value is not None}
    )
    with measuring(plan.steps(), "laying out memory") as step:
        result = run(plan, step)
    Telling("swap", json_path, judge=judge).tell(result, table_lines(result))
