"""`kvredis bench profile`: a trace to look at, and what it says of copies and overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.profile import ProfilePlan, run, table_lines

from .options import Telling, json_option, measuring, shapes_of, writable


def _shape(context: click.Context, parameter: click.Parameter, value: str | None) -> ModelShape | None:
    shapes = shapes_of(context, parameter, value)
    if shapes is not None and len(shapes) > 1:
        raise click.BadParameter("one shape at a time")
    return shapes[0] if shapes else None


@click.command(epilog="Example: kvredis bench profile --shape 8b --out trace.json")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=writable,
    required=True,
    help="The Chrome trace to write.",
)
@click.option(
    "--shape", callback=_shape, metavar="NAME", help="8b, 7b, 3b ...; default 8b. Without a GPU a tiny model."
)
@click.option("--step-tokens", type=click.IntRange(16, 1 << 16), help="Tokens of a step; default 2048.")
@click.option("--chunk-tokens", type=click.IntRange(16, 1 << 16), help="Tokens of a stored block; default 256.")
@click.option("--steps", type=click.IntRange(1, 64), help="Steps that are stored and loaded; default 4.")
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a bar is missed.")
def profile(out: Path, json_path: str | None, judge: bool, **given: Any) -> None:
    """Trace a model that prefills while KV is stored, and again while KV is loaded.

    Counts copies for each 1,024 tokens and how much of their time passes beside the model's own work.
    """
    plan = replace(ProfilePlan(), **{name: value for name, value in given.items() if value is not None})
    if plan.step_tokens % plan.chunk_tokens or plan.chunk_tokens % 16:
        raise click.BadParameter("a step is made of whole chunks, and a chunk of pages of 16 tokens")
    with measuring(4, "laying out memory") as step:
        result = run(plan, out, step)
    Telling("profile", json_path, judge=judge).tell(result, table_lines(result))
