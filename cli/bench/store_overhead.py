"""`kvredis bench store-overhead`: storing must not be what an engine waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.store_overhead import QUICK, TIERS, StoreOverheadPlan, run, table_lines

from .options import Telling, json_option, measuring, numbers_of, one_shape, picture_option, words_of


def _compute(_context: click.Context, _parameter: click.Parameter, value: str | None) -> dict[str, float | None]:
    """Read `model` or `sleep:20480` as a change of the plan."""
    if value is None:
        return {}
    if value == "model":
        return {"tokens_per_s": None}
    word, _, rate = value.partition(":")
    try:
        tokens_per_s = float(rate)
    except ValueError:
        tokens_per_s = 0.0
    if word != "sleep" or not 0 < tokens_per_s < 1e12:
        raise click.BadParameter(f"want model, or sleep:20480 (tokens per second), not {value!r}")
    return {"tokens_per_s": tokens_per_s}


@click.command(
    "store-overhead",
    epilog="""\b
Example: kvredis bench store-overhead --quick
Example: kvredis bench store-overhead --shape 7b --tier cpu,lane --compute model --budgets 1024,256 --json h200.json""",
)
@click.option("--quick", is_flag=True, help="Under two minutes: short prompts, two budgets, two repeats.")
@click.option("--shape", callback=one_shape, metavar="NAME", help="32b,7b,3b,glm,8b or a config.json; default 3b.")
@click.option("--tier", "tiers", callback=words_of(TIERS), metavar="LIST", help=f"Any of {','.join(TIERS)}.")
@click.option("--budgets", callback=numbers_of, metavar="LIST", help="Tokens a step; default 1024,768,... to 32.")
@click.option("--prompts", type=click.IntRange(1, 1000), help="Prompts of one sample; default 4.")
@click.option("--tokens", "prompt_tokens", type=click.IntRange(1, 1 << 20), help="Tokens of each; default 8192.")
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Tokens of a stored chunk; default 256.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5.")
@click.option("--compute", callback=_compute, metavar="WHAT", help="sleep:TOKENS_PER_S (20480) or model.")
@json_option
@picture_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def store_overhead(
    quick: bool,
    compute: dict[str, float | None],
    json_path: str | None,
    picture: Path | None,
    judge: bool,
    **shape: Any,
) -> None:
    """Prefill prompts step by step with no cache, and while each tier stores what was computed.

    Prints prompts per second, paired ratios to no cache with and without the drain, and how long steps take. Starts a
    server itself, on the loopback. Every chunk is read back and compared; the JSON file holds every sample.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    plan = replace(QUICK if quick else StoreOverheadPlan(), **given, **compute)  # type: ignore[arg-type]
    with measuring(plan.steps(), "laying out memory") as step:
        result = run(plan, step)
    Telling("store-overhead", json_path, picture, judge).tell(result, table_lines(result))
