"""`kvredis bench lmcache`: LMCache's own native client against kvredis and Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from kvredis.bench.core.statistics import MIB
from kvredis.bench.lmcache import QUICK, SERVERS, LMCachePlan, run, table_lines

from .options import Telling, json_option, measuring, words_of


@click.command(epilog="Example: kvredis bench lmcache --json lmcache.json")
@click.option("--quick", is_flag=True, help="Seconds: prompts of four chunks, two repeats.")
@click.option("--servers", callback=words_of(SERVERS), metavar="LIST", help="Any of kvredis,redis; default both.")
@click.option("--chunk-mib", type=click.IntRange(1, 512), help="MiB of a chunk; default 32.")
@click.option("--chunks", type=click.IntRange(2, 1024), help="Chunks of a prompt; default 16.")
@click.option("--workers", type=click.IntRange(1, 64), help="The client's threads; default 8, as LMCache has them.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@json_option
def lmcache(quick: bool, json_path: str | None, chunk_mib: int | None, **given: Any) -> None:
    """Store and load LMCache's chunks with its own resp:// client, unchanged, through kvredis and through Redis.

    LMCache must be installed (pip install --no-deps lmcache==0.5.6 is enough). Every byte that comes back is compared.
    """
    plan = QUICK if quick else LMCachePlan()
    if chunk_mib:
        given["chunk_bytes"] = chunk_mib * MIB
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    with measuring(plan.steps(), "starting servers") as step:
        result = run(plan, step)
    Telling("lmcache", json_path).tell(result, table_lines(result))
