"""`kvredis bench slow-remote`: a cache behind a slow link must not cost what it saves."""

from __future__ import annotations

from dataclasses import replace

import click

from kvredis.bench.slow_remote.run import QUICK, SlowRemotePlan, run, table_lines
from kvredis.cli.numbers import Number

from .options import Telling, json_option, measuring


@click.command(
    "slow-remote",
    epilog="""\b
Example: kvredis bench slow-remote --quick
Example: kvredis bench slow-remote --link-mb-per-s 100 --prefill-tokens-per-s 50000 --json slow.json""",
)
@click.option("--quick", is_flag=True, help="Half a minute: few and shorter prompts, two repeats.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of everything; default 5, with --quick 2.")
@click.option("--prompts", type=click.IntRange(1, 1000), help="Requests of one arm in one repeat; default 8.")
@click.option("--prompt-tokens", type=click.IntRange(256, 131072), help="Tokens of each, 8 KiB of KV each.")
@click.option("--prefill-tokens-per-s", type=Number(1), help="How fast computing is, by sleeping.")
@click.option("--link-mb-per-s", type=Number(0.1), help="The throttled link, MB/s each way; default 50.")
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def slow_remote(
    quick: bool, link_mb_per_s: float | None, json_path: str | None, judge: bool, **shape: float | None
) -> None:
    """Compare no cache, one that loads all it finds, and one that decides, behind a throttled link and a free one.

    Starts a server and a throttling proxy itself, on the loopback. Computing is simulated by sleeping at a stated rate.
    Every byte that is loaded is compared. Prints medians and paired ratios; the JSON file holds every sample.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    if link_mb_per_s is not None:
        given["link_bytes_per_s"] = link_mb_per_s * 1e6
    plan = replace(QUICK if quick else SlowRemotePlan(), **given)  # type: ignore[arg-type]
    with measuring(plan.steps(), "storing prompts") as step:
        result = run(plan, step)
    Telling("slow-remote", json_path, judge=judge).tell(result, table_lines(result))
