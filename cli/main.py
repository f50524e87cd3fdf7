"""The `kvredis` command: a table of subcommands, each loaded when it is called.

Loading late keeps `kvredis serve` free of torch and quick to start; that is why the table holds each one's help line
too. The exit status is told here once: 0 done, 1 failed, 2 bad usage or configuration.
"""

import errno
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from kvredis import __version__, install_line
from kvredis.storage.errors import ConfigError, KVRedisError

from .manual import HELP_NAMES, Manual, dress, helpful, resolved


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Where a subcommand lives, what it does in a line, and the extra that installs what it imports."""

    module: str
    help: str
    extra: str = ""


OTHER_EXTRAS = {"transformers": "demo"}
"""What a part of a subcommand imports that its own extra does not install."""

COMPLETE_VARIABLE = "_KVREDIS_COMPLETE"
"""What click looks for when `kvredis` is asked to complete; it is made of the command's name."""

SUBCOMMANDS = {
    "serve": Subcommand("kvredis.cli.serve", "Run the server."),
    "config": Subcommand("kvredis.cli.config", "Show the configuration and where each value is from, or check a file."),
    "doctor": Subcommand(
        "kvredis.cli.doctor.command", "Say what this machine has, what is needed, and the line that mends it."
    ),
    "ls": Subcommand("kvredis.cli.inspect.ls", "List what a server holds: prompts as a tree of prefixes, or keys."),
    "meta": Subcommand("kvredis.cli.inspect.meta", "Tell a block's tensor facts."),
    "get": Subcommand("kvredis.cli.inspect.get", "Write a block to a safetensors file."),
    "put": Subcommand("kvredis.cli.inspect.put", "Store a file as a block."),
    "rm": Subcommand("kvredis.cli.inspect.rm", "Delete blocks."),
    "prefetch": Subcommand("kvredis.cli.inspect.prefetch", "Bring blocks from disk into memory."),
    "top": Subcommand("kvredis.cli.inspect.top.command", "Watch a server live."),
    "completion": Subcommand("kvredis.cli.completion", "Print the lines that complete commands in your shell."),
    "proxy": Subcommand("kvredis.cli.proxy.command", "Route prompts to engines that prefill and that decode.", "proxy"),
    "demo": Subcommand(
        "kvredis.cli.demo.command", "See what stored KV is worth, and prefill and decode apart.", "demo"
    ),
    "plan": Subcommand("kvredis.cli.plan", "Work out whether a cache is worth its while, and what it needs."),
    "bench": Subcommand("kvredis.cli.bench.command", "Measure against Redis, memcached and plain copies.", "bench"),
}


class LateGroup(click.Group):
    """A click group over SUBCOMMANDS that imports only the one that is called, and turns our errors into exits."""

    context_class = Manual

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the subcommands that this installation has."""
        return [name for name, command in SUBCOMMANDS.items() if find_spec(command.module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one subcommand's module; its command has the module's own last name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        place = SUBCOMMANDS[cmd_name]
        try:
            command = getattr(import_module(place.module), cmd_name)
        except ModuleNotFoundError as error:
            raise _lacking(cmd_name, error) from error
        assert isinstance(command, click.Command)
        return dress(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand that is called; a mistyped one is answered with the nearest."""
        return resolved(super().resolve_command, self.list_commands(ctx), ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in self.list_commands(ctx)])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the whole command line; a full disk, which also its own --help may meet, becomes a line and a status."""
        if COMPLETE_VARIABLE in os.environ:
            import_module("kvredis.cli.completion")  # click asks its table for what speaks to the shell
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            click.echo(f"kvredis: cannot write: {error.strerror}", err=True)  # mostly where standard output goes
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; an error that kvredis raises on purpose becomes a line and a status."""
        try:
            return super().invoke(ctx)
        except KVRedisError as error:
            click.echo(f"kvredis: {error}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except click.UsageError as error:
            raise helpful(error) from None
        except ModuleNotFoundError as error:
            raise _lacking(ctx.invoked_subcommand or "", error) from error


def _lacking(name: str, error: ModuleNotFoundError) -> Exception:
    """Make a subcommand's missing package a line that says what installs it; what is no extra's stays as it is."""
    extra = SUBCOMMANDS[name].extra if name in SUBCOMMANDS else ""
    if not extra or (error.name or "kvredis").startswith("kvredis"):
        return error
    line = install_line(OTHER_EXTRAS.get(error.name or "", extra))
    return click.ClickException(f"{name} needs {error.name}, which is not installed: {line}")


@click.group(
    cls=LateGroup,
    context_settings={"help_option_names": HELP_NAMES},
    epilog="Example: kvredis serve --port 6379 --max-local-cpu-size 5GB",
)
@click.version_option(__version__, prog_name="kvredis")
def main() -> None:
    """Store KV blocks in hugepages behind the Redis protocol."""
