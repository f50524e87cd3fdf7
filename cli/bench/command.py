"""`kvredis bench`, its table of subcommands, and of these `server` and `plot`: measurements through public interfaces
only, so that a reader can repeat each figure in the docs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.servers import BEFORE, RECIPES, SUBJECT, Recipe, before_recipe, redis_like_recipe
from kvredis.bench.pictures import draw_file
from kvredis.bench.server.run import (
    BEFORE_PARTS,
    DEFAULT_PARTS,
    PARTS,
    QUICK_DEFERRED,
    QUICK_HEAD_OF_LINE,
    QUICK_LOOKUP,
    QUICK_SMALL,
    QUICK_TRANSFERS,
    ServerPlan,
    available,
    run,
    table_lines,
)
from kvredis.storage.errors import ConfigError, KVRedisError
from kvredis.storage.options import parse_size

from .alpha import alpha
from .disk import disk
from .engine_tables import hit_sweep, long_prefill, prefill
from .links import links
from .lmcache import lmcache
from .memory import memory
from .options import Telling, counts_of, json_option, measuring, picture_option, words_of
from .pd import pd
from .profile import profile
from .slow_remote import slow_remote
from .store_overhead import store_overhead
from .swap import swap
from .transport import transport
from .vllm import vllm
from .workload import prompts


def _sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(parse_size(word, key="--sizes", source="command line") for word in value.split(","))
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _peers(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    pairs = tuple((name, program) for name, _, program in (word.partition("=") for word in value))
    names = [name for name, _ in pairs]
    if not all(name and program for name, program in pairs):
        raise click.BadParameter("it is NAME=PROGRAM")
    if len({*names, *RECIPES, BEFORE}) < len(names) + len(RECIPES) + 1:
        raise click.BadParameter("each server needs a name of its own")
    return pairs


@click.group(epilog="Example: kvredis bench server --quick")
def bench() -> None:
    """Measure kvredis against what else there is, on this machine."""


bench.add_command(alpha)
bench.add_command(disk)
bench.add_command(hit_sweep)
bench.add_command(links)
bench.add_command(lmcache)
bench.add_command(long_prefill)
bench.add_command(memory)
bench.add_command(pd)
bench.add_command(profile)
bench.add_command(prefill)
bench.add_command(prompts)
bench.add_command(slow_remote)
bench.add_command(store_overhead)
bench.add_command(swap)
bench.add_command(transport)
bench.add_command(vllm)


@bench.command(epilog="Example: kvredis bench plot bench/results/server-2026-11-30.json server.png")
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def plot(result: Path, picture: Path) -> None:
    """Draw RESULT, a JSON file of bench memory, transport, server, disk or links, into PICTURE, a PNG."""
    try:
        draw_file(result, picture)
    except KVRedisError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Picture: {picture}")


@bench.command(
    epilog="""\b
Example: kvredis bench server --quick --arms kvredis,redis --json quick.json
Example: kvredis bench server --peer redis8=../shared/peers/redis8 --peer valkey81=../shared/peers/valkey81
Example: git worktree add ../before HEAD~1; kvredis bench server --before ../before"""
)
@click.option("--quick", is_flag=True, help="About a minute: three sizes, two repeats, one connection.")
@click.option("--arms", callback=words_of(tuple(RECIPES)), metavar="LIST", help="Servers: kvredis,redis,memcached.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    callback=_peers,
    metavar="NAME=PROGRAM",
    help="One more server: a build of Redis or Valkey. May be given several times.",
)
@click.option(
    "--peer-threads", type=click.IntRange(1, 128), default=2, show_default=True, help="The --io-threads of each --peer."
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A git worktree of another commit: its kvredis joins as one more server, and ours must not be worse.",
)
@click.option(
    "--parts",
    callback=words_of(PARTS),
    metavar="LIST",
    help="Any of transfers,small,head-of-line,lookup,deferred; default the first three, with --before lookup as well.",
)
@click.option("--sizes", callback=_sizes, metavar="LIST", help="Value sizes, as 64KiB,2MiB (powers of 1024).")
@click.option("--connections", callback=counts_of, metavar="LIST", help="Client connections (threads); default 1,4.")
@click.option("--transport", callback=words_of(("tcp", "unix")), metavar="LIST", help="tcp,unix.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@click.option(
    "--pin/--no-pin", default=None, help="Transfers with client and server on one CPU, or without; else both."
)
@json_option
@picture_option
@click.option(
    "--gate",
    "judge",
    is_flag=True,
    help="Exit with 1 when a line of the gate does not hold, or a row is worse than before.",
)
def server(
    quick: bool,
    arms: tuple[str, ...] | None,
    peers: tuple[tuple[str, str], ...],
    peer_threads: int,
    before: Path | None,
    parts: tuple[str, ...] | None,
    pin: bool | None,
    json_path: str | None,
    picture: Path | None,
    judge: bool,
    **shape: Any,
) -> None:
    """Compare kvredis with redis-server and memcached: GB/s, latency and server CPU per GB, every byte verified.

    Starts each server itself on the loopback, lets them take turns within each repeat, and prints medians and paired
    ratios to redis, and with --before to that commit. The JSON file holds every sample.
    """
    recipes, skipped = available(arms or tuple(RECIPES))
    if arms and skipped:
        raise click.ClickException("; ".join(skipped.values()))
    for name, program in peers:
        recipes.append(redis_like_recipe(name, program, peer_threads))
        if (missing := recipes[-1].missing()) is not None:
            raise click.UsageError(missing)
    parts = parts or (BEFORE_PARTS if before else DEFAULT_PARTS)
    plan = _plan(ServerPlan(_joined(recipes, before), parts=parts), quick, pin, shape)
    with measuring(plan.steps(), "starting servers") as progress:
        result = run(plan, progress, skipped)
    Telling("server", json_path, picture, judge).tell(
        result, table_lines(result), held=all(row["passed"] for row in result["held"])
    )


def _joined(recipes: list[Recipe], before: Path | None) -> list[Recipe]:
    """Put the kvredis of the checkout `before` next to ours, so that the two run right after one another."""
    if before is None:
        return recipes
    at = next((at for at, recipe in enumerate(recipes) if recipe.name == SUBJECT), None)
    if at is None:
        raise click.UsageError("--before is held against kvredis, which --arms leaves out")
    try:
        return [*recipes[: at + 1], before_recipe(before), *recipes[at + 1 :]]
    except KVRedisError as error:
        raise click.UsageError(str(error)) from error


def _plan(plan: ServerPlan, quick: bool, pin: bool | None, shape: dict[str, Any]) -> ServerPlan:
    """Narrow `plan` by --quick and then by each of sizes, connections, transport and repeats that was given."""
    if quick:
        plan = replace(
            plan,
            transfers=QUICK_TRANSFERS,
            small=QUICK_SMALL,
            head_of_line=QUICK_HEAD_OF_LINE,
            lookup=QUICK_LOOKUP,
            deferred=QUICK_DEFERRED,
            connections=(1,),
        )
    if pin is not None:
        plan = replace(plan, pinned=(pin,))
    if shape["connections"]:
        plan = replace(plan, connections=shape["connections"])
    if shape["transport"]:
        plan = replace(plan, transports=shape["transport"])
    if shape["sizes"]:
        plan = replace(plan, transfers=replace(plan.transfers, sizes=shape["sizes"]))
    if shape["repeats"]:
        every: Any = {"repeats": shape["repeats"]}
        plan = replace(
            plan,
            transfers=replace(plan.transfers, **every),
            small=replace(plan.small, **every),
            head_of_line=replace(plan.head_of_line, **every),
            lookup=replace(plan.lookup, **every),
            deferred=replace(plan.deferred, **every),
        )
    return plan
