"""`kvredis demo`: the main job on real text, so that anyone can see it work: KV computed once, stored, loaded.

The figure counts only when it is the store's. The cold and the warm run are two fresh processes with a server between
them, and the demo fails unless the store served SERVED_MIN of the prompt and both runs gave the same tokens.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click

from kvredis import install_line
from kvredis.backends.config.url import parse_remote
from kvredis.cli.bench.options import ended_as_exit
from kvredis.cli.inspect.client import PASSWORD_VARIABLE, place_of

from .spec import Shape, Spec

SERVED_MIN = 0.9
STOP_TIMEOUT_S = 10
ANSWER_S = 1.0
"""A server that is to be demonstrated answers PING in that."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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


@click.group(epilog="Example: kvredis demo ttft --max-new-tokens 16")
def demo() -> None:
    """See what stored KV is worth on this machine."""


@demo.command(epilog="Example: kvredis demo ttft --prompt-file README.md --salt tuesday")
@click.option("--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Text to ask with.")
@click.option("--prompt-tokens", default=4096, show_default=True, type=click.IntRange(32), help="Tokens of it at most.")
@click.option("--max-new-tokens", default=32, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--salt", default="", help="Put in front of the prompt: another salt, another prefix, cold again.")
@click.option(
    "--tier", type=click.Choice(["remote", "cpu"]), default="remote", show_default=True, help="Where KV goes."
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
    """Time to first token, cold and warm, of a Llama-shaped model with random weights on a real text.

    TTFT is counted from token ids in hand to the first new token, with hashing, lookup and load. Exits with 1 unless
    the store served 90 % of the prompt in a fresh process and the tokens are equal.
    """
    missing = [name for name in ("torch", "transformers", "tokenizers") if find_spec(name) is None]
    if missing:
        raise click.ClickException(f"the demo needs {', '.join(missing)}: {install_line('demo')}")
    shape = Shape(**{field.name: options.pop(field.name) for field in fields(Shape)})
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise click.UsageError("--heads must be a multiple of --kv-heads, and --head-dim even")
    wish = Wish(**options, quiet=as_json or not sys.stdout.isatty())
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
    whole = url if "://" in url else f"redis://{url}"
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password or parse_remote(whole).password:
        return whole
    return f"{whole}{'&' if '?' in whole else '?'}password={quote(password, safe='')}"


def _compare(wish: Wish, shape: Shape) -> dict[str, Any]:
    """Runs both requests and says what came of it; ends every process that it started, however it is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvredis-demo-")))
        spec = _spec(wish, shape, folder)
        kv_bytes = shape.bytes_per_token * len(spec.ids)
        _say(wish, f"Prompt: {len(spec.ids)} tokens of text; its KV: {kv_bytes / 1e6:.0f} MB in float32")
        if wish.tier == "cpu":
            spec.config["max_local_cpu_size"] = f"{_megabytes(kv_bytes + ROOM_BYTES)}mb"
            cold, warm = _run(wish, replace(spec, runs=2), folder, "Cold and warm, in one process")
        else:
            spec.config["max_local_cpu_size"] = f"{_megabytes(2 * kv_bytes + ROOM_BYTES)}mb"
            spec.config["remote_url"] = wish.url or stack.enter_context(_server(kv_bytes + ROOM_BYTES, folder))
            (cold,) = _run(wish, spec, folder, "Cold, in a fresh process")
            if cold["hit_tokens"]:
                raise click.ClickException(
                    f"not cold: {cold['hit_tokens']} tokens were stored already; another --salt makes it cold"
                )
            (warm,) = _run(wish, spec, folder, "Warm, in another fresh process")
    return {
        "model": {**asdict(shape), "dtype": "float32", "seed": wish.seed},
        "tier": wish.tier,
        "kv_bytes": kv_bytes,
        "cold": cold,
        "warm": warm,
        "improvement_s": cold["ttft_s"] - warm["ttft_s"],
        "factor": cold["ttft_s"] / warm["ttft_s"],
        "failures": _failures(cold, warm),
    }


def _spec(wish: Wish, shape: Shape, folder: Path) -> Spec:
    from . import text

    if wish.prompt_file is None:
        texts = text.own_texts()
    else:
        texts = [(wish.prompt_file.name, wish.prompt_file.read_text(encoding="utf-8", errors="replace"))]
    tokenizer = text.train(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Spec(
        shape=shape,
        seed=wish.seed,
        ids=text.prompt_ids(tokenizer, texts, tokens_max=wish.prompt_tokens, salt=wish.salt),
        max_new_tokens=wish.max_new_tokens,
        vocabulary=tokenizer.get_vocab_size(),
        tokenizer=str(folder / "tokenizer.json"),
        config={"chunk_size": wish.chunk_size, "save_unfull_chunk": True},
        runs=1,
        stream=not wish.quiet,
    )


def _run(wish: Wish, spec: Spec, folder: Path, title: str) -> list[dict[str, Any]]:
    """One process of the demo, to its end; its log is shown when it fails."""
    _say(wish, f"\n{title}:")
    (folder / "spec.json").write_text(json.dumps(asdict(spec)))
    command = [sys.executable, "-m", "kvredis.cli.demo.run", str(folder / "spec.json"), str(folder / "result.json")]
    with (folder / "run.log").open("w+") as log:
        out = None if spec.stream else subprocess.DEVNULL
        with _process(command, stdout=out, stderr=log) as process:
            if process.wait():
                log.seek(0)
                raise click.ClickException(f"the demo's process failed:\n{log.read()}")
    runs = json.loads((folder / "result.json").read_text())
    assert isinstance(runs, list)
    return runs


@contextmanager
def _server(capacity_bytes: int, folder: Path) -> Iterator[str]:
    """A `kvredis serve` of the demo's own on a free port; yields its URL."""
    size = f"{_megabytes(capacity_bytes)}mb"
    command = [sys.executable, "-m", "kvredis", "serve", "--port", "0", "--max-local-cpu-size", size]
    with (folder / "server.log").open("w+") as log, _process(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ready := re.search(rb"Ready to accept connections on (\S+?:\d+)", line):
                yield f"redis://{ready[1].decode()}"
                return
        log.seek(0)
        raise click.ClickException(f"the server did not start:\n{log.read()}")


@contextmanager
def _process(command: list[str], *, stdout: int | None, stderr: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process without our configuration's variables, ended when the block is left."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "KVREDIS_"))}
    # A signal that comes while the child is made waits, or the child would be nobody's.
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env) as process:
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if came:
                signal.raise_signal(came[0])
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


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
    cold, warm = report["cold"], report["warm"]
    speed = warm["loaded_bytes"] / max(warm["load_s"], 1e-9) / 1e9
    equal = "equal" if cold["tokens"] == warm["tokens"] else "DIFFERENT"
    click.echo(
        f"\nCold TTFT: {cold['ttft_s']:.3f} s\n"
        f"Warm TTFT: {warm['ttft_s']:.3f} s\n"
        f"TTFT Improvement: {report['improvement_s']:.3f} s ({report['factor']:.1f}x faster)\n"
        f"Hit tokens: {warm['hit_tokens']} of {warm['prompt_tokens']}, need to load: {warm['need_to_load']}\n"
        f"Load: {warm['loaded_bytes'] / 1e6:.0f} MB in {warm['load_s'] * 1e3:.0f} ms, {speed:.2f} GB/s\n"
        f"Tokens: {len(warm['tokens'])} generated, {equal} in both runs"
    )


def _megabytes(nbytes: int) -> int:
    return -(-nbytes // (1024 * 1024))


def _say(wish: Wish, line: str) -> None:
    if not wish.quiet:
        click.echo(line)
