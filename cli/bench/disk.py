"""`kvredis bench disk`: what the disk tier makes of a disk, and what clients feel of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.disk.rates import MODES
from kvredis.bench.disk.run import PARTS, QUICK, DiskPlan, own_directory, run, table_lines

from .options import Telling, counts_of, json_option, measuring, picture_option, words_of


@click.command(
    epilog="""\b
Example: kvredis bench disk --quick
Example: kvredis bench disk --dir /mnt/nvme/bench --threads 1,4 --parts rates --json disk.json"""
)
@click.option("--quick", is_flag=True, help="Under a minute: small files, one size, two repeats, 1 and 2 threads.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to measure; empty or not there yet, before and after. Default: a new one in the current directory.",
)
@click.option("--parts", callback=words_of(PARTS), metavar="LIST", help="Any of rates,gets,pings; default all.")
@click.option("--threads", callback=counts_of, metavar="LIST", help="Threads of the rates; default 1,2,4,8.")
@click.option(
    "--modes",
    callback=words_of(MODES),
    metavar="LIST",
    help="Of the rates: direct (O_DIRECT) and buffered, which is read cold and warm; default direct.",
)
@click.option("--transport", callback=words_of(("tcp", "unix")), metavar="LIST", help="tcp,unix.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@json_option
@picture_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def disk(
    quick: bool, directory: Path | None, json_path: str | None, picture: Path | None, judge: bool, **shape: Any
) -> None:
    """Measure the disk tier: GB/s against fio on the same directory, GETs from disk, PINGs while it spills.

    The device, a plain pread and pwrite loop and the tier take turns within each repeat; what is read was dropped from
    the page cache before, but for warm reads. A file system without O_DIRECT is measured buffered. Every byte that
    comes back is compared. Prints medians and paired ratios; the JSON file holds every sample.
    """
    plan = _plan(QUICK if quick else DiskPlan(), shape)
    with measuring(plan.steps(), "laying out files") as step, own_directory(directory, Path.cwd()) as place:
        result = run(plan, place, step)
    Telling("disk", json_path, picture, judge).tell(result, table_lines(result))


def _plan(plan: DiskPlan, shape: dict[str, Any]) -> DiskPlan:
    """Narrow `plan` by each of parts, threads, modes, transport and repeats that was given."""
    if shape["parts"]:
        plan = replace(plan, parts=shape["parts"])
    if shape["transport"]:
        plan = replace(plan, transports=shape["transport"])
    if shape["threads"]:
        plan = replace(plan, rates=replace(plan.rates, threads=shape["threads"]))
    if shape["modes"]:
        plan = replace(plan, rates=replace(plan.rates, modes=shape["modes"]))
    if shape["repeats"]:
        every: Any = {"repeats": shape["repeats"]}
        plan = replace(
            plan,
            rates=replace(plan.rates, **every),
            gets=replace(plan.gets, **every),
            pings=replace(plan.pings, **every),
        )
    return plan
