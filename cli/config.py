"""`kvredis config`: what is configured and who said so, and whether a file would do."""

import json
from pathlib import Path

import click

from kvredis.backends.config import Config

from .configuring import config_file_option, load_config


@click.group(epilog="Example: kvredis config show --origin")
def config() -> None:
    """Show the configuration and where each value is from, or check a file."""


@config.command(epilog="Example: LMCACHE_CHUNK_SIZE=512 kvredis config show --origin")
@click.option("--origin", is_flag=True, help="Say for each value where it is from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@config_file_option
def show(origin: bool, as_json: bool, config_file: Path | None) -> None:
    """Print every key with its value after defaults, file and environment. Passwords are shown as stars."""
    loaded = load_config(config_file)
    values = loaded.shown()
    if as_json:
        facts = {key: {"value": value, "origin": loaded.origin[key]} for key, value in values.items()}
        click.echo(json.dumps(facts if origin else values, indent=2))
        return
    width = max(map(len, values))
    for key, value in values.items():
        line = f"{key:{width}}  {json.dumps(value)}"
        click.echo(f"{line}  ({loaded.origin[key]})" if origin else line)


@config.command(epilog="Example: kvredis config check cpu-offload.yaml")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Read FILE alone, without the environment, and say what is wrong with it (exit 2) or odd (exit 0)."""
    loaded = Config.load(file, env={})
    set_keys = sum(source != "default" for source in loaded.origin.values())
    click.echo(f"{file}: ok, {set_keys} keys set, {len(loaded.warnings)} warnings")
