"""`kvredis bench layerwise`: layers come and go while others compute, and a bound on the bandwidth is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.layerwise.run import PARTS, QUICK, TIERS, LayerwisePlan, run, table_lines
from kvredis.cli.numbers import Number
from kvredis.storage.errors import KVRedisError

from .options import Telling, json_option, measuring, shapes_of, words_of


def _shape(context: click.Context, parameter: click.Parameter, value: str | None) -> ModelShape | None:
    shapes = shapes_of(context, parameter, value)
    if shapes is not None and len(shapes) > 1:
        raise click.BadParameter("one shape at a time")
    return shapes[0] if shapes else None


@click.command(
    epilog="""\b
Example: kvredis bench layerwise --quick
Example: kvredis bench layerwise --shape 8b --prefix-tokens 8192 --suffix-tokens 512 --tier lane --json h200.json""",
)
@click.option("--quick", is_flag=True, help="Under a minute: a short prefix, three repeats.")
@click.option(
    "--shape", callback=_shape, metavar="NAME", help="32b, 7b, 3b, glm or 8b; default 7b, without a GPU a small one."
)
@click.option("--part", "parts", callback=words_of(PARTS), metavar="LIST", help=f"Any of {','.join(PARTS)}.")
@click.option("--tier", type=click.Choice(TIERS), help="Where the blocks are; default local.")
@click.option("--prefix-tokens", type=click.IntRange(1, 1 << 20), help="Tokens stored and loaded; default 2048.")
@click.option("--suffix-tokens", type=click.IntRange(1, 65536), help="Tokens computed in a step; default 256.")
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Tokens of a stored chunk; default 256.")
@click.option("--prepare-ms", type=Number(0, 1000), help="How long the engine prepares a step; default 3.")
@click.option("--cap-gb-s", "cap_gb_per_s", type=Number(0.001, 1000), help="Bound to measure; default 1.")
@click.option("--link-gb-s", "link_gb_per_s", type=Number(0.001, 1000), help="Bound on the link of decoding.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5.")
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def layerwise(quick: bool, json_path: str | None, judge: bool, **shape: Any) -> None:
    """Store and load a model's KV layer by layer, beside its computing, and decode with a share of it elsewhere.

    A transformer with random weights computes, on a GPU where there is one. Prints when layer 0 was out, how long the
    device waited for a prefix, what a bound on the bandwidth gave, and step times beside the plan's. Every output and
    every byte is compared; the JSON file holds every sample.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    try:
        plan = replace(QUICK if quick else LayerwisePlan(), **given)
    except KVRedisError as error:
        raise click.UsageError(str(error)) from None
    with measuring(plan.steps(), "making a model") as step:
        result = run(plan, step)
    Telling("layerwise", json_path, judge=judge).tell(result, table_lines(result))
