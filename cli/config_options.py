"""Configuration as the subcommands read it: the same sources for all, and flags made from the keys' declarations."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kvredis.backends.config.schema import KEYS, Config
from kvredis.backends.config.sources import FILE_VARIABLE, Key
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
