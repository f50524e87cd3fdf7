"""`kvredis demo ttft`: the main job on real text, to see it work: KV computed once, stored, loaded.

The figures count only when they are the store's: every run is a fresh process, with a server or a disk between them,
and the demo fails unless the store served SERVED_MIN of the prompt and all runs gave the same tokens. Each loading
process asks twice: an engine's KV cache is memory that was touched long ago, which the second time has, too.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvredis import install_line
from kvredis.backends.config.url import parse_remote
from kvredis.cli.bench.options import ended_as_exit
from kvredis.cli.inspect.client import PASSWORD_VARIABLE, NotAllowed, mapped, place_of, whole_url
from kvredis.cli.terminal import size

from .processes import child, free_port, megabytes, server
from .spec import Shape, Spec

SERVED_MIN = 0.9
ANSWER_S = 1.0
"""A server that is to be demonstrated answers PING in that."""
REDIS = "plain Redis, as LMCache uses it"
BAR_CELLS = 40
ROOM_BYTES = 64 * 1024 * 1024
"""What server and engine get beyond the KV that they must hold: headers, alignment, the tokens that follow."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for, beside the model's shape."""

    prompt_file: Path | None
    prompt_tokens: int
    max_new_tokens: int
    salt: str
    tier: str
    url: str | None
    chunk_size: int
    seed: int
    quiet: bool


@click.command(epilog="Example: kvredis demo ttft --prompt-file README.md --salt tuesday")
@click.option("--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text to ask with.")
@click.option("--prompt-tokens", default=4096, show_default=True, type=click.IntRange(32), help="Tokens of it at most.")
@click.option("--max-new-tokens", default=32, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--salt", default="", help="Put in front of the prompt: another salt, another prefix, cold again.")
@click.option(
    "--tier", type=click.Choice(["remote", "cpu", "disk"]), default="remote", show_default=True, help="Where KV goes."
)
@click.option("--url", "-u", help="A running server instead of one of the demo's own.")
@click.option("--chunk-size", default=256, show_default=True, type=click.IntRange(1), help="Tokens per chunk.")
@click.option("--layers", default=12, show_default=True, type=click.IntRange(1), help="Layers of the model.")
@click.option("--hidden", default=768, show_default=True, type=click.IntRange(8), help="Its hidden size.")
@click.option("--intermediate", default=2048, show_default=True, type=click.IntRange(8), help="Its MLP's size.")
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1), help="Its query heads.")
@click.option("--kv-heads", default=4, show_default=True, type=click.IntRange(1), help="Its KV heads.")
@click.option("--head-dim", default=128, show_default=True, type=click.IntRange(2), help="Size of one head.")
@click.option("--seed", default=0, show_default=True, help="Seed of its random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def ttft(as_json: bool, **options: Any) -> None:
    """Time to first token, computed and loaded, of a Llama-shaped model with random weights on a real text.

    Beside it the same KV from a plain Redis (two keys a chunk and redis-py, as LMCache has it), where redis-server is
    installed, and one copy in memory. TTFT is counted from token ids in hand to the first new token, with hashing,
    lookup and load. Exits with 1 unless the store served 90 % of the prompt in a fresh process and the tokens are
    equal.
    """
    missing = [name for name in ("torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        raise click.ClickException(f"the demo needs {', '.join(missing)}: {install_line('demo')}")
    shape = Shape(**{field.name: options.pop(field.name) for field in fields(Shape)})
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise click.UsageError("--heads must be a multiple of --kv-heads, and --head-dim even")
    wish = Wish(**options, quiet=as_json)
    if wish.url and wish.tier != "remote":
        raise click.UsageError("--url goes with --tier remote")
    if wish.url:
        wish = replace(wish, url=_answering(wish.url))
    with ended_as_exit():
        report = _compare(wish, shape)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    if report["failures"]:
        for failure in report["failures"]:
            click.echo(f"kvredis: {failure}", err=True)
        sys.exit(1)


def _answering(url: str) -> str:
    """The URL, with the password of REDISCLI_AUTH where it has none, of a server that has answered PING. Raises
    BackendError as `ls` does: an engine would take a server that is away for misses, and the demo for a slow one."""
    place = place_of(url, ANSWER_S)
    with place.open() as servers:
        for server in servers.each:
            server.ask("PING")
    whole = whole_url(url)
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password or parse_remote(whole).password:
        return whole
    return f"{whole}{'&' if '?' in whole else '?'}password={quote(password, safe='')}"


def _check_room(url: str, kv_bytes: int) -> None:
    """Raise ClickException where a kvredis holds less than the prompt's KV: an engine would take that for misses, and
    the demo would say so a minute later. A server that may not be asked is believed to have room."""
    with contextlib.suppress(NotAllowed), place_of(url, ANSWER_S).open() as servers:
        if not all(server.is_kvredis for server in servers.each):
            return
        tiers = [mapped(tier) for one in servers.each for tier in mapped(one.ask("KV.TIERS")).values()]
        room = sum(int(tier["capacity"]) for tier in tiers)
        if room < kv_bytes:
            raise click.ClickException(
                f"{', '.join(map(str, servers.each))} holds {size(room)} and the prompt's KV is {size(kv_bytes)}: "
                "give it more (max_local_cpu_size), or the demo a smaller --prompt-tokens"
            )


def _compare(wish: Wish, shape: Shape) -> dict[str, Any]:
    """Run the requests and say what came of them; end every process that was started, however this is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvredis-demo-")))
        spec = _spec(wish, shape)
        kv_bytes = shape.bytes_per_token * len(spec.ids)
        _say(wish, f"{len(spec.ids)} tokens of text; their KV is {kv_bytes / 1e6:.0f} MB in float32")
        if wish.url:
            _check_room(wish.url, kv_bytes)
        if wish.tier == "cpu":
            room = f"{megabytes(kv_bytes + ROOM_BYTES)}mb"
            made = _run(wish, replace(_over(spec, max_local_cpu_size=room), runs=3), folder, "computing, then loading")
            cold, arms = made["runs"][0], {"kvredis, in the engine's memory": made["runs"][1:]}
        else:
            ways = _ways(wish, kv_bytes, folder, stack)
            cold = _run(wish, _over(spec, **next(iter(ways.values()))), folder, "computing, in a fresh process")[
                "runs"
            ][0]
            if cold["hit_tokens"]:
                raise click.ClickException(
                    f"not cold: {cold['hit_tokens']} tokens were stored already; another --salt makes it cold"
                )
            redis_port = None if wish.url or wish.tier == "disk" else stack.enter_context(_redis(folder))
            arms = {}
            for name, config in ways.items():
                told = replace(_over(spec, **config), runs=2, redis_port=None if arms else redis_port)
                one = _run(wish, told, folder, f"loading, in another fresh process: {name}")
                made = made if arms else one
                arms[name] = one["runs"]
    name, (first, warm) = next(iter(arms.items()))
    others = made["beside"] or {"memcpy_s": None, "redis_s": None}
    redis_s = others["redis_s"]
    return {
        "model": {**asdict(shape), "dtype": "float32", "seed": wish.seed},
        "tier": wish.tier,
        "kv_bytes": kv_bytes,
        "cold": cold,
        "first": first,
        "warm": warm,
        "way": name,
        "ttft_s": {
            "computed": cold["ttft_s"],
            **({} if redis_s is None else {REDIS: warm["ttft_s"] - warm["load_s"] + redis_s}),
            **{each: runs[-1]["ttft_s"] for each, runs in reversed(arms.items())},
        },
        "memcpy_s": others["memcpy_s"],
        "improvement_s": cold["ttft_s"] - warm["ttft_s"],
        "factor": cold["ttft_s"] / warm["ttft_s"],
        "failures": [failure for runs in arms.values() for failure in _failures(cold, runs[-1])],
    }


def _ways(wish: Wish, kv_bytes: int, folder: Path, stack: ExitStack) -> dict[str, dict[str, Any]]:
    """How engines reach what is stored: the configuration of each, the best first."""
    if wish.tier == "disk":
        room = f"{megabytes(kv_bytes + ROOM_BYTES)}mb"
        kept = {"local_disk": str(folder / "disk"), "max_local_disk_size": room, "max_local_cpu_size": room}
        return {"kvredis, a local disk": {"local_cpu": False, **kept}}
    room = f"{megabytes(2 * kv_bytes + ROOM_BYTES)}mb"
    near = {"local_cpu": False, "max_local_cpu_size": room}  # what is measured is the server
    if wish.url:
        return {f"kvredis at {wish.url.partition('?')[0].rpartition('@')[2]}": {"remote_url": wish.url, **near}}
    place = stack.enter_context(server(kv_bytes + ROOM_BYTES, folder))
    return {
        "kvredis, shared memory": {"remote_url": f"kvredis://{place}", **near},
        "kvredis, TCP": {"remote_url": f"redis://{place}", **near},
    }


def _over(spec: Spec, **config: Any) -> Spec:
    return replace(spec, config=spec.config | config)


def _spec(wish: Wish, shape: Shape) -> Spec:
    from . import text

    if wish.prompt_file is None:
        texts = text.own_texts()
    else:
        texts = [(wish.prompt_file.name, wish.prompt_file.read_text(encoding="utf-8", errors="replace"))]
    tokenizer = text.train(texts)
    return Spec(
        shape=shape,
        seed=wish.seed,
        ids=text.prompt_ids(tokenizer, texts, tokens_max=wish.prompt_tokens, salt=wish.salt),
        max_new_tokens=wish.max_new_tokens,
        vocabulary=tokenizer.get_vocab_size(),
        config={"chunk_size": wish.chunk_size, "save_unfull_chunk": True},
        runs=1,
    )


def _run(wish: Wish, spec: Spec, folder: Path, title: str) -> dict[str, Any]:
    """One process of the demo, to its end; its log is shown when it fails."""
    began_s = time.monotonic()
    _say(wish, f"{title} ...", is_open=True)
    (folder / "spec.json").write_text(json.dumps(asdict(spec)))
    command = [sys.executable, "-m", "kvredis.cli.demo.run", str(folder / "spec.json"), str(folder / "result.json")]
    with (
        (folder / "run.log").open("w+") as log,
        child(command, stdout=subprocess.DEVNULL, stderr=log) as process,
    ):
        if process.wait():
            log.seek(0)
            raise click.ClickException(f"the demo's process failed:\n{log.read()}")
    _say(wish, f" {time.monotonic() - began_s:.0f} s")
    made: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return made


@contextmanager
def _redis(folder: Path) -> Iterator[int | None]:
    """A plain redis-server on a free port, to be compared with; None where none is installed or it does not start."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("w+") as log, child(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        is_up = any(b"eady to accept connections" in line for line in process.stdout)
        yield port if is_up else None


def _failures(cold: dict[str, Any], warm: dict[str, Any]) -> list[str]:
    """Why the figures do not count, if they do not."""
    failures = []
    served = warm["loaded_tokens"] / warm["prompt_tokens"]
    if served < SERVED_MIN:
        failures.append(f"the store served {served:.0%} of the prompt, less than {SERVED_MIN:.0%}")
    if cold["tokens"] != warm["tokens"]:
        failures.append("the tokens of the cold and the warm run differ")
    return failures


def _print(report: dict[str, Any]) -> None:
    warm, first = report["warm"], report["first"]
    click.echo("\nTime to first token")
    bars = report["ttft_s"]
    for name, seconds in bars.items():
        click.echo(f"  {name:<32} {seconds:8.3f} s  {_bar(seconds / max(bars.values()))}")
    if report["memcpy_s"] is not None:
        click.echo(f"  {'(one copy of the KV in memory':<32} {report['memcpy_s']:8.3f} s)")
    parts = {
        "lookup": warm["lookup_s"],
        "transfer": warm["load_s"] - warm["copy_s"],
        "copy into the model's cache": warm["copy_s"],
        "weights compared, last token computed": warm["ttft_s"] - warm["lookup_s"] - warm["load_s"],
    }
    speed = warm["loaded_bytes"] / max(warm["load_s"], 1e-9) / 1e9
    equal = "equal" if not any("tokens" in failure for failure in report["failures"]) else "DIFFERENT"
    said = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in parts.items())
    click.echo(
        f"\n{report['way']}: {report['factor']:.1f}x faster than computing, {report['improvement_s']:.3f} s less\n"
        f"Where its time went: {said}\n"
        f"Load: {warm['loaded_bytes'] / 1e6:.0f} MB in {warm['load_s'] * 1e3:.0f} ms, {speed:.2f} GB/s;"
        f" the first time, into memory that was never touched, {first['load_s'] * 1e3:.0f} ms\n"
        f"Hit tokens: {warm['hit_tokens']} of {warm['prompt_tokens']}, need to load: {warm['need_to_load']}\n"
        f"Tokens: {len(warm['tokens'])} generated, {equal} in all runs"
    )


def _bar(share: float) -> str:
    """A bar of BAR_CELLS for 1."""
    return "#" * max(round(share * BAR_CELLS), 1)


def _say(wish: Wish, line: str, *, is_open: bool = False) -> None:
    """Say how far it is, on standard error: what was found goes to standard output."""
    if not wish.quiet:
        click.echo(line, nl=not is_open, err=True)
