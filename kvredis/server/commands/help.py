"""`X HELP`, made from the command table in the shape that Redis gives it."""

from kvredis.server.protocol.replies import statuses

from .registry import COMMANDS

INDENT = "    "


def help_reply(container: str, alone: str = "") -> bytes:
    """A line for each subcommand and an indented one on what it does; `alone` says what the bare command does."""
    found = COMMANDS[container.upper().encode()]
    lines = [f"{container.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
    if alone:
        lines += ["(no subcommand)", INDENT + alone]
    parts = sorted(found.subcommands.items(), key=lambda item: (item[0] == "help", item[0]))
    for name, part in parts:
        lines += [f"{name.upper()} {part.syntax}".rstrip(), INDENT + part.summary]
    return statuses(lines)
