"""`kvredis bench pd`: the first token of a prompt that one engine computes and another one decodes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.vllm.apart import ARMS, GPU_ARMS, PEERS, PdPlan, run, table_lines
from kvredis.bench.vllm.engine import Where
from kvredis.cli.numbers import Number

from .options import Telling, json_option, measuring, one_shape, words_of


@click.command(
    "pd",
    epilog="""\b
Example: kvredis bench pd --json pd.json --gate
Example: kvredis bench pd --arms chunked --prompt-tokens 8192 --limit-s 200""",
)
@click.option("--quick", is_flag=True, help="One repeat.")
@click.option(
    "--arms",
    callback=words_of((*ARMS, *GPU_ARMS, *PEERS)),
    metavar="LIST",
    help=f"Any of {', '.join((*ARMS, *GPU_ARMS, *PEERS))}; default {', '.join(ARMS)}, with two GPUs gpu.",
)
@click.option("--shape", callback=one_shape, metavar="NAME", help="As of bench vllm; default 8b, tiny without a GPU.")
@click.option("--prompt-tokens", type=click.IntRange(2, 1 << 20), help="Default 15400; without a GPU 1000.")
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Tokens of a stored chunk; default 256, CPU: 64.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Prompts of each arm and way; default 5.")
@click.option("--tensor-parallel", "ranks", type=click.IntRange(1, 8), help="Ranks of each engine; default 1.")
@click.option("--limit-s", type=Number(1), help="Begin nothing more after so many seconds, and tell the result.")
@click.option("--python", type=click.Path(exists=True, dir_okay=False), help="The interpreter that has vLLM.")
@click.option("--site", type=click.Path(exists=True, file_okay=False), help="A folder of packages that has vLLM.")
@click.option("--attention-backend", "backend", default="FLASH_ATTN", show_default=True, help="vLLM's, on a GPU.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep what the engines print here.")
@json_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def pd(
    quick: bool,
    python: str | None,
    site: str | None,
    backend: str,
    logs: Path | None,
    json_path: str | None,
    judge: bool,
    **given: Any,
) -> None:
    """Compute prompts in one vLLM engine and decode them in another, with kvredis between.

    The engines that prefill have the first GPU, the one that decodes the second. The first token is timed from when the
    prefill engine is asked, and from when that has its own; beside it the decode engine computes the same prompts
    alone. Then the longest gap between two tokens of eight requests that decode while a long prompt comes. With
    --tensor-parallel each engine has as many GPUs; where there are too few, both share the first ones.

    The arms nixl and nixl+cross are vLLM's own NixlConnector, with two engines and without kvredis: to compare with.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    kept = logs.resolve() if logs else None
    where = Where(python or sys.executable, str(Path(site).resolve()) if site else "", kept, backend)
    plan = PdPlan(**settings)
    if quick:
        plan = replace(plan, repeats=1)
    with measuring(plan.steps(), "engines begin") as step:
        result = run(plan, where, step)
    Telling("pd", json_path, None, judge).tell(result, table_lines(result))
