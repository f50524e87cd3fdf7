"""Configuration as the subcommands read it: the same sources for all, and flags made from the keys' declarations; and
`kvredis config`: what is configured, which source said so, and all that is wrong or odd about a file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kvredis.backends.config.parsers import shown
from kvredis.backends.config.schema import KEYS, Config, read
from kvredis.backends.config.sources import FILE_VARIABLE, Found, Key
from kvredis.server.config.reload import check_settings
from kvredis.server.net.io_threads import threads_for
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError

EVENT_LOOP_VARIABLE = "KVREDIS_EVENT_LOOP"
"""Names the event loop for tests; not a configuration key, so Config must not see it."""

FILES_BESIDE_CLIENTS = 32
"""Open files that the server needs besides its connections, as Redis counts them."""

# Keys of the engine's part that shape the server's store as well.
_STORE_KEYS = (
    "local_cpu",
    "max_local_cpu_size",
    "local_cpu_use_hugepages",
    "local_disk",
    "max_local_disk_size",
    "cache_policy",
)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def load_config(file: Path | None, overrides: Mapping[str, Any] | None = None, *, server: bool = True) -> Config:
    """Read defaults, file, environment and flags, as a server or as a client. Raises ConfigError; warnings go to the
    log."""
    env = {name: value for name, value in os.environ.items() if name != EVENT_LOOP_VARIABLE}
    try:
        return Config.load(file, env=env, overrides=overrides, server=server)
    except ConfigError as error:
        raise error if file is None else of_file(error, "--config-file") from None


def of_file(error: ConfigError, given_as: str) -> ConfigError:
    """The error, of a file as a whole by what names that file here: Config knows only the variable for it."""
    return ConfigError(given_as, error.value, error.source, error.reason) if error.key == FILE_VARIABLE else error


def server_options_of(config: Config) -> ServerOptions:
    """Pick the server's part of the configuration: every option of a server is a key of the same name."""
    chosen = {field.name: getattr(config, field.name) for field in fields(ServerOptions) if field.name in KEYS}
    chosen["io_threads"] = threads_for(config.io_threads)
    return ServerOptions(**chosen, config_file=config.file)


def check_store(config: Config) -> None:
    """Raise ConfigError for a server that would keep nothing. An engine may be so: its blocks can be on a server."""
    if not config.local_cpu and config.disk is None:
        reason = "a server without a disk tier keeps nothing then: set local_disk and max_local_disk_size too"
        raise ConfigError("local_cpu", config.local_cpu, config.origin.get("local_cpu", "default"), reason)


@contextlib.contextmanager
def told_where(config: Config) -> Iterator[None]:
    """Let a ConfigError about an option name the file and line, variable or flag that the option is from."""
    try:
        yield
    except ConfigError as error:
        source = config.entry_origin.get(error.key) or config.origin.get(error.key.replace("-", "_"), error.source)
        raise ConfigError(error.key, error.value, source, error.reason) from None


def config_file_option(command: Decorated) -> Decorated:
    """Add --config-file, which wins over LMCACHE_CONFIG_FILE."""
    return click.option(
        "--config-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="YAML file instead of LMCACHE_CONFIG_FILE.",
    )(command)


def server_options(command: Decorated) -> Decorated:
    """Add a flag for each configuration key that the server reads; one that is not given is None."""
    for key in reversed([key for key in KEYS.values() if key.server or key.name in _STORE_KEYS]):
        command = option_of(key)(command)
    return command


def option_of(key: Key) -> Callable[[Decorated], Decorated]:
    """Make one flag; the value is checked by Config, which knows what the flag's key allows."""
    text = key.help[0].upper() + key.help[1:]
    if key.name == "prefault":  # a number of threads everywhere else; here the machine's processors decide it
        text = "Touch the arena's pages before the server is ready, or never; by default while it serves"
    if key.is_flag or key.name == "prefault":
        return click.option(f"{key.flag}/--no-{key.flag[2:]}", key.name, default=None, help=f"{text}.")
    if isinstance(key.default, tuple):
        return click.option(key.flag, key.name, multiple=True, metavar=key.metavar, help=f"{text} (repeatable).")
    shown = f"  [default: {key.default}]" if key.default else ""
    return click.option(key.flag, key.name, metavar=key.metavar, help=f"{text}.{shown}")


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
    found.errors = [of_file(error, "FILE") for error in found.errors] + _settings_errors(found)
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


def _settings_errors(found: Found) -> list[ConfigError]:
    """Find which of the server's further settings would stop its start: their names are the server's to know."""
    errors = []
    for name, text in found.get("settings").items():
        try:
            check_settings({name: text})
        except ConfigError as error:
            errors.append(ConfigError(error.key, error.value, found.entry_origin[error.key], error.reason))
    return errors


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
