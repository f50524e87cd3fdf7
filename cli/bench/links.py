"""`kvredis bench links`: what goes between this host and its GPUs, before the cache is blamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from kvredis.bench.cuda import open_cuda
from kvredis.bench.links import GPUS_MAX, NBYTES_MIN, QUICK, LinksPlan, run, table_lines
from kvredis.storage.errors import ConfigError
from kvredis.storage.options import parse_size

from .options import Telling, json_option, measuring, picture_option


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        nbytes = parse_size(value, key="--size", source="command line")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
    if nbytes < NBYTES_MIN:
        raise click.BadParameter(f"a copy has at least {NBYTES_MIN} bytes")
    return nbytes


@click.command(
    epilog="""\b
Example: kvredis bench links --quick
Example: kvredis bench links --json gpus.json --plot gpus.png"""
)
@click.option("--quick", is_flag=True, help="A quarter of the time: 64 MiB a copy, three repeats.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 3.")
@click.option("--size", "nbytes", callback=_size, help="Bytes a copy (64MiB); default 256 MiB, with --quick 64 MiB.")
@json_option
@picture_option
def links(
    quick: bool,
    repeats: int | None,
    nbytes: int | None,
    json_path: str | None,
    picture: Path | None,
) -> None:
    """Measure what copies between memory and GPUs, and between GPUs; one way and both ways.

    Between GPUs with peer access and without, as CUDA's p2pBandwidthLatencyTest. Bandwidths in GB/s, latencies in us,
    as matrices of medians with their least and most. Every byte is compared. Ctrl-C keeps what was measured until then.
    """
    plan = QUICK if quick else LinksPlan()
    plan = replace(plan, repeats=repeats or plan.repeats, nbytes=nbytes or plan.nbytes)
    cuda = open_cuda(GPUS_MAX)
    with measuring(plan.steps(cuda), "laying out memory") as step:
        result = run(plan, step, cuda)
    Telling("links", json_path, picture).tell(result, table_lines(result))
    sys.exit(result["exit_status"])
