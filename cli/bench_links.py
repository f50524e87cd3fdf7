"""`kvredis bench links`: what each way between two places of this machine gives, before anybody blames the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from kvredis.bench.links import PARTS, QUICK, LinksPlan, run
from kvredis.bench.links_result import table_lines
from kvredis.bench.pictures import draw
from kvredis.bench.report import default_path, save
from kvredis.storage.errors import KVRedisError

from .bench_options import picture_option, progress_bar, terminated_as_exit, words_of


@click.command(
    epilog="""\b
Example: kvredis bench links --quick
Example: kvredis bench links --parts gpus --json gpus.json --plot gpus.png"""
)
@click.option("--quick", is_flag=True, help="Half a minute: 64 MiB a copy, three repeats.")
@click.option("--parts", callback=words_of(PARTS), metavar="LIST", help="Any of memory,processes,gpus; default all.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 3.")
@click.option("--json", "json_path", metavar="FILE", help="Where the result goes; - is standard output.")
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
    try:
        with terminated_as_exit(), progress_bar(plan.steps(), "laying out memory") as step:
            result = run(plan, step)
    except KVRedisError as error:
        raise click.ClickException(str(error)) from error
    if json_path == "-":
        click.echo(json.dumps(result, indent=1))
    else:
        path = Path(json_path) if json_path else default_path(Path.cwd(), "links")
        save(result, path)
        for line in [*table_lines(result), "", f"Result: {path}"]:
            click.echo(line)
    if picture is not None:
        draw(result, picture)
