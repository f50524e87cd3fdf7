"""`kvredis plan`: whether a cache is worth its while for a model and a machine, before there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.shapes import SHAPES, ModelShape, shape_from_config, shape_of
from kvredis.bench.plan import QUEUE_DEFAULT, Pipeline, TierSpeed, Workload, measured_tiers, table_lines
from kvredis.bench.plan import plan as planned
from kvredis.storage.errors import KVRedisError

_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?"
_SPEEDS = {"gb/s": 1.0, "mb/s": 1e-3, "gib/s": 1024**3 / 1e9, "mib/s": 1024**2 / 1e9, "gbit/s": 1 / 8, "": 1.0}
_TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}


class _Positive(click.ParamType):  # type: ignore[type-arg]
    """A number above 0; click's own range lets infinity and nan through."""

    name = "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1
        if not 0 < number < float("inf"):
            self.fail(f"{value!r} is not a number above 0", param, ctx)
        return number


class _Milliseconds(click.ParamType):  # type: ignore[type-arg]
    """A time that may be 0, and is finite."""

    name = "MS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = click.FLOAT.convert(value, param, ctx)
        if not 0 <= number < float("inf"):
            self.fail(f"{value!r} is not a number from 0 on", param, ctx)
        return float(number)


class _Bandwidth(_Positive):
    """GB/s, as a number or with a unit: 12, 12GB/s, 500MB/s, 100Gbit/s."""

    name = "GB/S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return super().convert(_measure(str(value), _SPEEDS), param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Tier(click.ParamType):  # type: ignore[type-arg]
    """NAME=BANDWIDTH, then any of latency=TIME and store=BANDWIDTH, with commas."""

    name = "NAME=GB/S[,latency=MS][,store=GB/S]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TierSpeed:
        try:
            (name, speed), *more = (part.split("=") for part in str(value).split(","))
            rest = {key.strip(): word for key, word in more}
            if len(rest) < len(more):
                raise ValueError("something is given twice")
            latency = _measure(rest.pop("latency", "0ms"), _TIMES)
            store = _measure(word, _SPEEDS) if (word := rest.pop("store", None)) is not None else None
            if rest or not name.strip():
                raise ValueError(f"unknown: {', '.join(rest) or 'a tier without a name'}")
            return TierSpeed(name.strip(), _measure(speed, _SPEEDS), latency, store)
        except ValueError as error:
            self.fail(
                f"{value!r}: want NAME=BANDWIDTH, as in disk=2GB/s,latency=0.1ms,store=1GB/s ({error})", param, ctx
            )


def _measure(word: str, units: dict[str, float]) -> float:
    """Read a number with a unit; ValueError when it is none."""
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z/]*)", word.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{word.strip()!r} is no number of {', '.join(unit for unit in units if unit)}")
    return float(match[1]) * units[match[2]]


def _shaped(read: Callable[[str], ModelShape]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(_context: click.Context, _parameter: click.Parameter, value: str | None) -> ModelShape | None:
        try:
            return None if value is None else read(value)
        except KVRedisError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _config_shape(path: str) -> ModelShape:
    return shape_of(path) if Path(path).is_dir() else shape_from_config(Path(path))


def _apart(_context: click.Context, _parameter: click.Parameter, tiers: tuple[TierSpeed, ...]) -> tuple[TierSpeed, ...]:
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given twice")
    return tiers


@click.command(
    epilog="""\b
Example: kvredis plan --shape 7b --prefill-tokens-per-s 9752 --tier memory=12GB/s --tier disk=2GB/s,latency=0.1ms
Example: kvredis plan --config model/config.json --prefill-tokens-per-s 33000 --measured bench/results/disk.json
Example: kvredis plan --shape 8b --prefill-tokens-per-s 33000 --hbm 4800 --link 55"""
)
@click.option("--shape", callback=_shaped(shape_of), metavar="NAME", help=f"A known model: {', '.join(SHAPES)}.")
@click.option("--config", callback=_shaped(_config_shape), metavar="FILE", help="A Hugging Face config.json.")
@click.option("--prefill-tokens-per-s", type=_Positive(), required=True, help="How fast the model computes a prompt.")
@click.option("--tier", "tiers", type=_Tier(), multiple=True, callback=_apart, help="A tier; may be repeated.")
@click.option(
    "--measured",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A result of kvredis bench server, transport, disk, memory or links: its tiers join.",
)
@click.option("--chunk", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a chunk.")
@click.option("--prompt", type=click.IntRange(1), default=8192, show_default=True, help="Tokens that are found.")
@click.option("--prompts", type=click.IntRange(1), default=1, show_default=True, help="How many the arena shall hold.")
@click.option("--output", type=click.IntRange(1), help="Tokens made behind the prompt.")
@click.option("--decode-tokens-per-s", type=_Positive(), help="How fast one request makes them.")
@click.option(
    "--queue", type=click.IntRange(0), default=QUEUE_DEFAULT, show_default=True, help="Prompts that wait ahead of one."
)
@click.option(
    "--store-overlap/--no-store-overlap", default=True, help="Stores beside the prefill, or behind it. Default: beside."
)
@click.option("--hbm", type=_Bandwidth(), help="GPU memory's bandwidth, for the layer pipeline rule.")
@click.option("--link", type=_Bandwidth(), help="The link's bandwidth, for the same.")
@click.option("--other-ms", type=_Milliseconds(), help="Of a step: time beside reading KV.")
@click.option("--overhead-ms", type=_Milliseconds(), help="Of a step: time that fetching costs by itself.")
@click.option("--kv-gb", type=_Positive(), help="KV that a step reads, GB; default: one prompt's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (kvredis.plan/1).")
def plan(
    shape: ModelShape | None,
    config: ModelShape | None,
    tiers: tuple[TierSpeed, ...],
    measured: tuple[Path, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Work out what a cache is worth: sizes, hugepages, break-even bandwidth, and a verdict for each tier.

    GB are 1e9 bytes. A tier's bandwidth is what an engine sees of it, copies into its own memory included.
    """
    model = shape or config
    if model is None or (shape is not None and config is not None):
        raise click.UsageError("want one of --shape and --config")
    workload = _workload(given)
    try:
        found = [each for path in measured for each in measured_tiers(path, model.block_bytes(workload.chunk_tokens))]
    except KVRedisError as error:
        raise click.BadParameter(str(error), param_hint="'--measured'") from error
    result = planned(model, workload, [*tiers, *found], _pipeline(given))
    for line in [json.dumps(result, indent=1)] if as_json else table_lines(result):
        click.echo(line)


def _workload(given: dict[str, Any]) -> Workload:
    if given["prompt"] < given["chunk"]:
        raise click.BadParameter(
            f"{given['prompt']} tokens are no whole chunk of {given['chunk']}", param_hint="'--prompt'"
        )
    if (given["output"] is None) != (given["decode_tokens_per_s"] is None):
        raise click.UsageError("--output and --decode-tokens-per-s need one another")
    return Workload(
        prefill_tokens_per_s=given["prefill_tokens_per_s"],
        chunk_tokens=given["chunk"],
        prompt_tokens=given["prompt"],
        prompts=given["prompts"],
        output_tokens=given["output"] or 1,
        decode_tokens_per_s=given["decode_tokens_per_s"],
        queue=given["queue"],
        store_overlap=given["store_overlap"],
    )


def _pipeline(given: dict[str, Any]) -> Pipeline | None:
    hbm, link = given["hbm"], given["link"]
    rest = {name: given[name] for name in ("other_ms", "overhead_ms", "kv_gb") if given[name] is not None}
    if hbm is not None and link is not None:
        return Pipeline(hbm, link, **rest)
    if hbm is not None or link is not None or rest:
        raise click.UsageError(
            "the layer pipeline rule (--other-ms, --overhead-ms, --kv-gb) needs both --hbm and --link"
        )
    return None
