"""`kvredis bench links`: what goes between this host and its GPUs, before the cache is blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from kvredis.bench.links import QUICK, LinksPlan, run, table_lines

from .options import Telling, json_option, measuring, picture_option


@click.command(
    epilog="""\b
Example: kvredis bench links --quick
Example: kvredis bench links --json gpus.json --plot gpus.png"""
)
@click.option("--quick", is_flag=True, help="Half a minute: 64 MiB a copy, three repeats.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 3.")
@json_option
@picture_option
def links(
    quick: bool,
    repeats: int | None,
    json_path: str | None,
    picture: Path | None,
) -> None:
    """Measure what copies between memory and GPUs, and between GPUs; one way and both ways.

    Bandwidths in GB/s, round trips in us, as matrices of medians with their least and most. Every byte is compared.
    """
    plan = QUICK if quick else LinksPlan()
    plan = replace(plan, repeats=repeats or plan.repeats)
    with measuring(plan.steps(), "laying out memory") as step:
        result = run(plan, step)
    Telling("links", json_path, picture).tell(result, table_lines(result))
