"""`kvredis bench prefill`, `hit-sweep` and `long-prefill`: what a stored prompt saves an engine, from each tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvredis.bench.engine_tables.run import ARMS, PLANS, QUICK, run, table_lines
from kvredis.cli.numbers import Number

from .options import Telling, json_option, measuring, numbers_of, one_shape, picture_option, words_of


def _rates(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        rates = tuple(dict.fromkeys(float(word) for word in value.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise click.BadParameter("want shares from 0 to 1, as in 0,0.5,0.9")
    return rates


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that the three have in common, as they are listed here."""
    options = (
        click.option("--quick", is_flag=True, help="About a minute on a GPU: fewer points and prompts, one repeat."),
        click.option("--shape", callback=one_shape, metavar="NAME", help="32b, 7b, 3b, glm or 8b."),
        click.option("--arms", callback=words_of(ARMS), metavar="LIST", help=f"Any of {','.join(ARMS)}."),
        click.option("--prompts", type=click.IntRange(1, 10_000), help="Prompts of one pass."),
        click.option("--tokens", "prompt_tokens", type=click.IntRange(2, 1 << 20), help="Tokens of each."),
        click.option("--rows", type=click.IntRange(1, 256), help="Prompts that are served together."),
        click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Tokens of a stored chunk; default 256."),
        click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 3."),
        click.option("--limit-s", type=Number(1), help="Begin no repeat that would not be over by then."),
        click.option("--auto", is_flag=True, default=None, help="min_retrieve_tokens: auto, load only what pays."),
        json_option,
        picture_option,
        click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _measure(name: str, quick: bool, json_path: str | None, picture: Path | None, judge: bool, **shape: Any) -> None:
    given = {key: value for key, value in shape.items() if value is not None}
    plan = PLANS[name](**(QUICK[name] if quick else {}) | given)
    with measuring(plan.steps(), "two engines begin") as step:
        result = run(plan, step)
    Telling(name, json_path, picture, judge).tell(result, table_lines(result))


@click.command("prefill", epilog="Example: kvredis bench prefill --shape 8b --json h200.json --plot h200.png")
@click.option("--budgets", callback=numbers_of, metavar="LIST", help="Tokens of a forward pass; default 1024,8192.")
@_shared
def prefill(**given: Any) -> None:
    """Prefill prompts of 8,192 tokens: computed, and loaded from each tier.

    Each tier's pass 1 stores them, its pass 2 loads them, in another process where the tier outlives one. Hits and
    bytes are checked. Beside each ratio stands the tier's bandwidth over break-even.
    """
    _measure("prefill", **given)


@click.command("hit-sweep", epilog="Example: kvredis bench hit-sweep --rates 0,0.5,0.9 --prompts 100 --gate")
@click.option("--rates", callback=_rates, metavar="LIST", help="Shares in common; default 0,0.5,0.8,0.9,1.")
@click.option("--output", type=click.IntRange(1, 4096), help="Tokens generated for each prompt; default 24.")
@click.option("--budget", type=click.IntRange(1, 1 << 20), help="Tokens of a forward pass, all rows; default 8192.")
@_shared
def hit_sweep(**given: Any) -> None:
    """Serve 200 prompts of 1,000 tokens that share a head, 32 at once, twice: prompts per second against the share.

    In pass 1 what they share is a hit, in pass 2 everything is, for tiers that outlive a process in another process.
    """
    _measure("hit-sweep", **given)


@click.command("long-prefill", epilog="Example: kvredis bench long-prefill --outputs 2,16 --shape 7b")
@click.option("--outputs", callback=numbers_of, metavar="LIST", help="Tokens generated; default 2,16,128.")
@click.option("--budget", type=click.IntRange(1, 1 << 20), help="Tokens of a forward pass, all rows; default 1024.")
@_shared
def long_prefill(**given: Any) -> None:
    """Serve 10 prompts of 10,240 tokens, two at once, twice: prompts per second against the length of the answer."""
    _measure("long-prefill", **given)
