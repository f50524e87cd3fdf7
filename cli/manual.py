"""Help that reads like a page of the manual: name, synopsis, what it does, options, examples, exit status.

A command says what it does in its docstring and the rest in its epilog, a line each: "Example: a line for a shell" and
"Exit 1: when". So the help of every subcommand looks alike, and the documentation and the test
that runs the parser over the examples take them from where they are shown.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import click

HELP_NAMES: Final = ["-h", "--help"]
Resolved = tuple[str | None, click.Command | None, list[str]]
"""What click makes of a line's first word: the subcommand's name, the subcommand, and the other words."""
EXAMPLE: Final = "Example: "
EXIT: Final = "Exit "
EXITS: Final = {"0": "done", "1": "failed; the line on standard error says why", "2": "bad usage or configuration"}
"""What the exit status means where a command's epilog says nothing else."""


class Manual(click.Context):
    """A context whose help is such a page."""

    def get_help(self) -> str:
        """The page."""
        formatter = self.make_formatter()
        _write(self, formatter)
        return formatter.getvalue().rstrip("\n")


def resolved(
    resolve: Callable[[click.Context, list[str]], Resolved], names: Sequence[str], ctx: click.Context, args: list[str]
) -> Resolved:
    """What `resolve` finds; its error for a name that is none of `names` says which is nearest."""
    try:
        return resolve(ctx, args)
    except click.UsageError as error:
        near = difflib.get_close_matches(args[0], names, n=1) if args else []
        if args[:1] == ["help"]:
            near = [" ".join((ctx.command_path, *args[1:2], "--help"))]
        if (
            near and "No such command" in error.message and "Did you mean" not in error.format_message()
        ):  # click 8.4 does
            raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", error.ctx) from None
        raise


def helpful(error: click.UsageError) -> click.UsageError:
    """The error of a command line with what was probably meant, where that can be told: the nearest option, by what
    other servers call it too, the subcommand that has it, or the option for a word that stands alone."""
    from kvredis.backends.config.sources import nearest  # late: help needs no YAML

    command = None if error.ctx is None else error.ctx.command
    if command is None or error.ctx is None:
        return error
    options = [name for each in command.params for name in (*each.opts, *each.secondary_opts) if name[:1] == "-"]
    if isinstance(error, click.NoSuchOption):
        by_name = {name.lstrip("-").replace("-", "_"): name for name in options if name.startswith("--")}
        near = nearest(error.option_name.lstrip("-").replace("-", "_"), by_name)
        below = command.commands if isinstance(command, click.Group) else {}
        having = [name for name, each in below.items() if any(error.option_name in param.opts for param in each.params)]
        meant = ""
        if near is not None:
            meant = f" Did you mean {by_name[near]!r}?"
        elif having:
            meant = f" It belongs behind: {', '.join(f'{error.ctx.command_path} {name}' for name in having)}"
        return click.UsageError(error.message + meant, error.ctx)
    extra = re.match(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if extra is not None:
        word = extra[1]
        if "--url" in options and ("://" in word or re.fullmatch(r"[\w.-]+:\d+", word)):
            return click.UsageError(f"{error.message}. -u names the server: -u {word}", error.ctx)
        if "--config-file" in options and ("/" in word or "." in word):
            return click.UsageError(f"{error.message}. A file is named by --config-file {word}", error.ctx)
    return error


class _Nearest(click.Group):
    """A group that answers a mistyped subcommand with the nearest."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Resolved:
        """Find the subcommand that is called."""
        return resolved(super().resolve_command, self.list_commands(ctx), ctx, args)


def dress(command: click.Command) -> click.Command:
    """Give a command, and all below it, help of this kind, -h for it, and an answer to what is mistyped."""
    command.context_class = Manual
    if "-h" not in {name for each in command.params for name in each.opts}:
        command.context_settings = {**command.context_settings, "help_option_names": HELP_NAMES}
    if isinstance(command, click.Group):
        if type(command) is click.Group:
            command.__class__ = _Nearest
        for below in command.commands.values():
            dress(below)
    return command


def examples(command: click.Command) -> list[str]:
    """The command's examples, each a line for a shell."""
    return [text.removeprefix(EXAMPLE) for text in _lines(command) if text.startswith(EXAMPLE)]


def exits(command: click.Command) -> dict[str, str]:
    """What each exit status of the command means."""
    found = dict(EXITS)
    for text in _lines(command):
        if text.startswith(EXIT):
            status, _, meaning = text.removeprefix(EXIT).partition(": ")
            found[status] = meaning
    return found


# ---- inside ------------------------------------------------------------------------------------------------------


def _lines(command: click.Command) -> Iterator[str]:
    """The epilog's lines; one that begins neither an example nor an exit goes on with the one before."""
    found: list[str] = []
    for line in inspect.cleandoc((command.epilog or "").replace("\b", "")).splitlines():
        if line.startswith((EXAMPLE, EXIT)) or not found:
            found.append(line.strip())
        else:
            found[-1] += f" {line.strip()}"
    return iter([line for line in found if line])


def _write(ctx: click.Context, formatter: click.HelpFormatter) -> None:
    command = ctx.command
    with formatter.section("Name"):
        formatter.write_text(f"{ctx.command_path} - {command.get_short_help_str(limit=200)}")
    with formatter.section("Synopsis"):
        formatter.write_usage(ctx.command_path, " ".join(command.collect_usage_pieces(ctx)), prefix="")
    if command.help:
        with formatter.section("Description"):
            formatter.write_text(inspect.cleandoc(command.help).partition("\f")[0])
    command.format_options(ctx, formatter)  # of a group its subcommands too
    shown = examples(command)
    if shown:
        with formatter.section("Examples"):
            # as they are: a line that is broken is another line to a shell
            formatter.write("".join(f"{'':{formatter.current_indent}}{EXAMPLE}{line}\n" for line in shown))
    with formatter.section("Exit status"):
        formatter.write_dl(list(exits(command).items()))
