"""The words that name keys in a command line: KEY arguments that the shell can complete, and --match."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from kvredis.cli.terminal import key_bytes, printable
from kvredis.storage.errors import KVRedisError

from .client import Servers, place_of

COMPLETION_S: Final = 0.2
"""How long a shell may wait at the Tab key for a server; names that have not come by then are not offered."""
COMPLETIONS_MAX: Final = 50
_SCANS_MAX: Final = 50
_QUOTED: Final = frozenset(" \t\"'`$\\;&|<>()!#~,")
"""What a shell would obey in a word that it was offered: any client may name a key so. At a comma fish cuts it."""
_SPECIAL: Final = str.maketrans({each: f"\\{each}" for each in "*?[]\\^"})

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class KeyName(click.ParamType):  # type: ignore[type-arg]
    """A key. The Tab key offers those of the server that the command line names."""

    name = "KEY"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names that begin like `incomplete`, if the server tells them in time; nothing else, and no error."""
        import redis  # noqa: F401  takes as long as the server may, which is not the server's fault

        found: list[str] = []
        url = ctx.params.get("url")
        asker = threading.Thread(target=_ask, args=(url, incomplete, found), daemon=True)
        asker.start()
        asker.join(COMPLETION_S)
        return [CompletionItem(name) for name in sorted(found)[:COMPLETIONS_MAX]]


def match_option(command: Decorated) -> Decorated:
    """Add --match."""
    return click.option("--match", metavar="PATTERN", help="Only keys that match, as in Redis: * ? [a-z] \\.")(command)


# ---- inside ------------------------------------------------------------------------------------------------------


def _ask(url: str | None, incomplete: str, found: list[str]) -> None:
    try:
        with place_of(url, COMPLETION_S).open() as servers:
            _collect(servers, key_bytes(incomplete.translate(_SPECIAL) + "*"), found)
    except (KVRedisError, click.ClickException, click.Abort):
        return  # no user reads an error between two words of a command line


def _collect(servers: Servers, pattern: bytes, found: list[str]) -> None:
    for server in servers.each:
        for scans, keys in enumerate(server.scan(pattern)):
            found += [name for key in keys if _is_plain(name := printable(key))]
            if len(found) >= COMPLETIONS_MAX or scans >= _SCANS_MAX:
                return


def _is_plain(name: str) -> bool:
    """Whether a shell takes it for one word, and the command for no option."""
    return name.isascii() and not name.startswith("-") and _QUOTED.isdisjoint(name)
