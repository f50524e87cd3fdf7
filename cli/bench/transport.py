"""`kvredis bench transport`: moving a model's blocks between two processes, by every transport there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.shapes import SHAPES
from kvredis.bench.transport.run import PARTS, QUICK, TRANSPORTS, TransportPlan, run, table_lines

from .options import Telling, json_option, measuring, picture_option, shapes_of, words_of


@click.command(
    epilog="""\b
Example: kvredis bench transport --quick
Example: kvredis bench transport --shape 8b --transport lane,unix --json transport.json --plot transport.png"""
)
@click.option("--quick", is_flag=True, help="Under a minute: one shape, two repeats.")
@click.option(
    "--shape",
    "shapes",
    callback=shapes_of,
    metavar="LIST",
    help=f"Models whose blocks are moved: {','.join(SHAPES)}, or a config.json; default 3b,7b,8b.",
)
@click.option("--blocks", type=click.IntRange(8, 4096), help="Blocks of each; default 512.")
@click.option("--parts", callback=words_of(PARTS), metavar="LIST", help="Any of arms,one; default all.")
@click.option(
    "--transport", "transports", callback=words_of(TRANSPORTS), metavar="LIST", help="Any of tcp,unix,lane,pyzmq."
)
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@json_option
@picture_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def transport(quick: bool, json_path: str | None, picture: Path | None, judge: bool, **given: Any) -> None:
    """Move blocks between two processes: RESP over TCP and unix sockets, the same-host lane, and pyzmq beside them.

    T0 is torch's plain copy of the same blocks inside one process; every figure is a ratio to T0 in the same repeat.
    Starts a server and a pyzmq peer itself; every byte of every batch is compared. The JSON file holds every sample.
    """
    plan = QUICK if quick else TransportPlan()
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    with measuring(plan.steps(), "filling memory") as step:
        result = run(plan, step)
    Telling("transport", json_path, picture, judge).tell(result, table_lines(result))
