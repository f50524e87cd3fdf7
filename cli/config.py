"""`kvredis config`: what is configured and who said so, and all that is wrong or odd about a file."""

import json
import os
from pathlib import Path
from typing import Any

import click

from kvredis.backends.config.parsers import shown
from kvredis.backends.config.schema import Config, read
from kvredis.backends.config.sources import Found

from .config_options import config_file_option, load_config, of_file

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
"""Not configuration but the interpreter's state, which one of the hash algorithms depends on."""


@click.group(epilog="Example: kvredis config show --origin")
def config() -> None:
    """Show the configuration and where each value is from, or check a file."""


@config.command(epilog="Example: LMCACHE_CHUNK_SIZE=512 kvredis config show --origin")
@click.option("--origin", is_flag=True, help="Say for each value where it is from, of mappings for each entry.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_file_option
def show(origin: bool, as_json: bool, config_file: Path | None) -> None:
    """Print every key with its value after defaults, file and environment. Passwords are shown as stars."""
    loaded = load_config(config_file)
    values = loaded.shown()
    if as_json:
        facts = {key: _facts(loaded, key, value) for key, value in values.items()}
        click.echo(json.dumps(facts if origin else values, indent=2))
        return
    width = max(map(len, values))
    for key, value in values.items():
        line = f"{key:{width}}  {json.dumps(value)}"
        click.echo(f"{line}  ({loaded.origin[key]})" if origin else line)
        if origin:
            for entry, place in _entries(loaded, key).items():
                click.echo(f"  {f'{key}.{entry}':{width - 2}}  {json.dumps(value[entry])}  ({place})")


@config.command(epilog="Example: kvredis config check cpu-offload.yaml")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Read FILE alone, without the environment, and say all that is wrong with it (exit 2) or odd (exit 0)."""
    seed = os.environ.get(HASH_SEED_VARIABLE)
    found, _ = read(file, {} if seed is None else {HASH_SEED_VARIABLE: seed})
    found.errors = [of_file(error, "FILE") for error in found.errors]
    if as_json:
        click.echo(json.dumps(_judgement(found, file), indent=2))
    else:
        for error in found.errors:
            click.echo(f"error: {error}")
        for remark in found.remarks:
            click.echo(f"warning: {remark}")
        verdict = f"{len(found.errors)} errors" if found.errors else "ok"
        click.echo(f"{file}: {verdict}, {len(found.origin)} keys set, {len(found.remarks)} warnings")
    ctx.exit(2 if found.errors else 0)


def _facts(loaded: Config, key: str, value: Any) -> dict[str, Any]:
    """Give a value with its origin, and the origins of its entries if it has any."""
    entries = _entries(loaded, key)
    return {"value": value, "origin": loaded.origin[key]} | ({"entries": entries} if entries else {})


def _entries(loaded: Config, key: str) -> dict[str, str]:
    prefix = f"{key}."
    return {name[len(prefix) :]: place for name, place in loaded.entry_origin.items() if name.startswith(prefix)}


def _judgement(found: Found, file: Path) -> dict[str, Any]:
    """Give what `check` prints, in fields; `line` is null for what the file says nowhere in particular."""

    def line(source: str) -> int | None:
        number = source.removeprefix(f"{file}:").partition(" ")[0]
        return int(number) if number.isdecimal() and source.startswith(f"{file}:") else None

    return {
        "file": str(file),
        "ok": not found.errors,
        "keys_set": len(found.origin),
        "errors": [
            {
                "key": error.key,
                "value": shown(error.value),
                "source": error.source,
                "line": line(error.source),
                "reason": error.reason,
            }
            for error in found.errors
        ],
        "warnings": [
            {
                "key": remark.key,
                "source": remark.source,
                "line": line(remark.source),
                "text": remark.text,
                "nearest": remark.nearest,
            }
            for remark in found.remarks
        ],
    }
