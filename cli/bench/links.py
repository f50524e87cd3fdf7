"""`kvredis bench links`: what each way between two places of this machine gives, before the cache is blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from kvredis.bench.links.run import PARTS, QUICK, LinksPlan, run, table_lines

from .options import Telling, json_option, measuring, picture_option, words_of


@click.command(
    epilog="""\b
Example: kvredis bench links --quick
Example: kvredis bench links --parts gpus --json gpus.json --plot gpus.png"""
)
@click.option("--quick", is_flag=True, help="Half a minute: 64 MiB a copy, three repeats.")
@click.option("--parts", callback=words_of(PARTS), metavar="LIST", help="Any of memory,processes,gpus; default all.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 3.")
@json_option
@picture_option
def links(
    quick: bool,
    parts: tuple[str, ...] | None,
    repeats: int | None,
    json_path: str | None,
    picture: Path | None,
) -> None:
    """Measure what copies between two places: memory of each kind, processes, cores, GPUs; one way and both ways.

    Bandwidths in GB/s, round trips in us, as matrices of medians with their least and most. Every byte is compared.
    Without a GPU the host's part is measured, and said so.
    """
    plan = QUICK if quick else LinksPlan()
    plan = replace(plan, parts=parts or plan.parts, repeats=repeats or plan.repeats)
    with measuring(plan.steps(), "laying out memory") as step:
        result = run(plan, step)
    Telling("links", json_path, picture).tell(result, table_lines(result))
