"""`kvredis bench alpha`: how much of the KV may lie on another GPU while a model decodes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import click

from kvredis.bench.alpha import PROMPTS_MAX, QUICK, AlphaPlan, run, table_lines
from kvredis.bench.core.shapes import SHAPES

from .options import Telling, json_option, measuring, one_shape


def _shares(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        shares = tuple(dict.fromkeys(float(word) for word in value.split(",")))
    except ValueError:
        raise click.BadParameter("want shares from 0 to 1, as in 0,0.25,0.5") from None
    if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares):
        raise click.BadParameter("a share is 0 to 1")
    return shares


@click.command(
    epilog="""\b
Example: kvredis bench alpha --json alpha.json --gate
Example: kvredis bench alpha --link host --prompts 1 --shares 0,0.05,0.1,0.2,0.3"""
)
@click.option("--quick", is_flag=True, help="Six shares, three repeats.")
@click.option(
    "--shape", callback=one_shape, metavar="NAME", help=f"{','.join(SHAPES)}; default 8b, tiny without a GPU."
)
@click.option("--tokens", type=click.IntRange(16, 1 << 20), help="Of each prompt; default 15400, without a GPU 192.")
@click.option(
    "--prompts",
    type=click.IntRange(1, 256),
    help=f"Decoded at once; default: as many as put a_max between 0 and 0.5, {PROMPTS_MAX} at most.",
)
@click.option("--shares", callback=_shares, metavar="LIST", help="Default 0 to 0.5 in steps of 0.05; a_max joins them.")
@click.option("--link", type=click.Choice(("peer", "host")), help="Where shares lie; default another GPU if there is.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 3.")
@click.option("--steps", type=click.IntRange(1, 10000), help="Steps of one sample; default 20, without a GPU 2.")
@click.option("--no-graphs", is_flag=True, help="Launch kernels one by one, as engines without CUDA graphs do.")
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def alpha(quick: bool, link: str | None, no_graphs: bool, json_path: str | None, judge: bool, **given: Any) -> None:
    """Decode with a share of the prompts' KV on another GPU, streamed in layer by layer, and without.

    Measures GPU memory and link first, and from these and a step without a share the largest one that costs nothing:
    a_max, as kvredis plan does. Then steps with shares from 0 to 0.5, in turns; each as a multiple of none, beside what
    is predicted. The model has random weights. Without a GPU it says that the logits are right, and no more.
    """
    plan = replace(
        QUICK if quick else AlphaPlan(),
        through_host=link == "host",
        graphs=not no_graphs,
        **{name: value for name, value in given.items() if value is not None},
    )
    with measuring(plan.count(), "memory and link") as step:
        result = run(plan, step)
    Telling("alpha", json_path, judge=judge).tell(result, table_lines(result))
