"""`kvredis bench vllm`: the first token of a prompt seen before, or many requests at once, in a real vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvredis.bench.vllm.concurrency import ConcurrencyPlan
from kvredis.bench.vllm.concurrency import run as run_concurrency
from kvredis.bench.vllm.concurrency import table_lines as concurrency_lines
from kvredis.bench.vllm.engine import Where
from kvredis.bench.vllm.run import ARMS, DEFAULT_ARMS, VLLMPlan, run, table_lines
from kvredis.cli.numbers import Number

from .options import Telling, json_option, measuring, numbers_of, one_shape, picture_option, words_of


@click.command(
    "vllm",
    epilog="""\b
Example: kvredis bench vllm --json h200.json --gate
Example: kvredis bench vllm --arms none,lane,lane+layers --prompt-tokens 8192 --limit-s 300
Example: kvredis bench vllm --arms none,lane,tcp,lmcache,lmcache+redis,lmcache+kvredis --gate
Example: kvredis bench vllm --concurrency 8 --json qps.json --gate""",
)
@click.option("--quick", is_flag=True, help="One repeat, of the longest prompt alone.")
@click.option(
    "--concurrency",
    type=click.IntRange(2, 256),
    help="Measure so many requests at once, instead of the first token of one alone.",
)
@click.option(
    "--tensor-parallel",
    "ranks",
    type=click.IntRange(1, 8),
    help="With --concurrency: ranks of each engine, each with a GPU of its own; default 1.",
)
@click.option(
    "--arms",
    callback=words_of(ARMS),
    metavar="LIST",
    help=f"Any of {', '.join(ARMS)}; default the first {len(DEFAULT_ARMS)}, with --concurrency none, offloading, lane,"
    " lane+layers and tcp.",
)
@click.option(
    "--shape", callback=one_shape, metavar="NAME", help="32b, 7b, 3b, glm or 8b; default 8b, tiny without a GPU."
)
@click.option(
    "--prompt-tokens",
    callback=numbers_of,
    metavar="LIST",
    help="Default 1024,8192,15400, with --concurrency one, 4096; less without a GPU.",
)
@click.option("--chunk-tokens", type=click.IntRange(1, 65536), help="Tokens of a stored chunk; default 256, CPU: 64.")
@click.option("--repeats", type=click.IntRange(1, 1000), help="Prompts of each length; default 5.")
@click.option(
    "--together", type=click.IntRange(1, 16), help="Engines open at a time; default what the GPU has room for."
)
@click.option("--limit-s", type=Number(1), help="Begin nothing more after so many seconds, and tell the result.")
@click.option("--eager", is_flag=True, help="Launch kernels one by one, as enforce_eager does; default CUDA graphs.")
@click.option("--python", type=click.Path(exists=True, dir_okay=False), help="The interpreter that has vLLM.")
@click.option("--site", type=click.Path(exists=True, file_okay=False), help="A folder of packages that has vLLM.")
@click.option("--attention-backend", "backend", default="FLASH_ATTN", show_default=True, help="vLLM's, on a GPU.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="Keep what the engines print here.")
@json_option
@picture_option
@click.option("--gate", "judge", is_flag=True, help="Exit with 1 when a line of the gate does not hold.")
def vllm(
    quick: bool,
    concurrency: int | None,
    ranks: int | None,
    python: str | None,
    site: str | None,
    backend: str,
    logs: Path | None,
    json_path: str | None,
    picture: Path | None,
    judge: bool,
    **given: Any,
) -> None:
    """Serve prompts in real vLLM engines: computed, from vLLM's own cache, and from what a connector has kept.

    One engine for each way of keeping KV, beside vLLM's own OffloadingConnector; TTFT by the prompt's length. Generated
    tokens and hits are compared. vLLM is looked for in this environment unless --python or --site names another.

    lmcache, lmcache+redis and lmcache+kvredis serve by LMCache's own connector, from its memory or from a server alone
    by its native client; LMCache must be where vLLM is, lmcache+redis needs redis-server, too. Beside them stay lane
    and tcp open, which must be ahead of each.

    With --concurrency N: requests a second, N at once. Cold: new prompts. All stored: the same again. Half shared and
    stored: the first half of each prompt is a prefix that all N share and that is stored, the second half is its own
    and new. vLLM's own cache is emptied before each of these rounds, in every arm, so that within a round it works as
    always. A step that moves nothing: N short requests decode, tokens a second beside those of an engine without a
    connector that is launched in the same way. Ratios are to `none` and to `offloading`.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    kept = logs.resolve() if logs else None
    where = Where(python or sys.executable, str(Path(site).resolve()) if site else "", kept, backend)
    if concurrency is not None:
        lengths = settings.pop("prompt_tokens", (None,))
        if len(lengths) > 1:
            raise click.UsageError("--concurrency measures prompts of one length")
        settings |= {"prompt_tokens": lengths[0], "ranks": ranks or 1} | ({"repeats": 1} if quick else {})
        many = ConcurrencyPlan(concurrency, **settings)
        with measuring(many.steps(), "engines begin") as step:
            served = run_concurrency(many, where, step)
        Telling("vllm-concurrency", json_path, picture, judge).tell(served, concurrency_lines(served))
        return
    if ranks is not None:
        raise click.UsageError("--tensor-parallel goes with --concurrency")
    plan = VLLMPlan(**settings)
    if quick:
        plan = replace(plan, repeats=1, prompt_tokens=plan.prompt_tokens[-1:])
    with measuring(plan.steps(), "engines begin") as step:
        result = run(plan, where, step)
    Telling("vllm", json_path, picture, judge).tell(result, table_lines(result))
