"""`kvredis bench memory`: copying inside one process, by every means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.memory import QUICK, MemoryPlan, run, table_lines

from .options import Telling, counts_of, json_option, measuring, picture_option, shapes_of


@click.command(
    epilog="""\b
Example: kvredis bench memory --quick
Example: kvredis bench memory --shape 7b,8b --threads 1,8 --json memory.json --plot memory.png"""
)
@click.option("--quick", is_flag=True, help="Half a minute: fewer blocks, two repeats.")
@click.option(
    "--shape",
    "shapes",
    callback=shapes_of,
    metavar="LIST",
    help=f"Models whose blocks are copied: {','.join(SHAPES)}, or a config.json; default 7b,3b,8b.",
)
@click.option("--threads", callback=counts_of, metavar="LIST", help="Threads; default 1 and all cores.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@json_option
@picture_option
def memory(quick: bool, json_path: str | None, picture: Path | None, **given: Any) -> None:
    """Copy blocks inside one process: by torch, by memmove, and as the store does.

    T0 is torch's plain copy block by block; every other figure is a ratio to T0 in the same repeat. Every byte is
    compared. Prints medians with their least and most; the JSON file holds every sample.
    """
    plan = QUICK if quick else MemoryPlan()
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    with measuring(plan.steps(), "filling memory") as step:
        result = run(plan, step)
    Telling("memory", json_path, picture).tell(result, table_lines(result))
