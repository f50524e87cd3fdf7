"""`kvredis rm`: blocks are deleted, by name or by pattern, and a pattern is counted before it is obeyed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

from kvredis.cli.terminal import is_terminal, json_text, key_bytes, printable, progress
from kvredis.storage.errors import BackendError

from .client import Connection, Place, Servers, on_server
from .key_options import KeyName

BATCH = 500


@click.command(
    epilog="""\b
Example: kvredis rm my-block other-block
Example: kvredis rm --match 'kvredis:old-model@*'
Example: kvredis rm --match '*@{0@9c1f*' --yes --json
Exit 1: a KEY was not there, or the question was answered with no"""
)
@click.argument("keys", metavar="[KEY...]", type=KeyName(), nargs=-1)
@click.option("--match", metavar="PATTERN", help="Delete what matches, as in Redis: * ? [a-z] \\.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON; does not ask, so it wants --yes with --match.")
@on_server
def rm(keys: tuple[str, ...], match: str | None, yes: bool, is_json: bool, place: Place) -> None:
    """Delete KEYs, or all keys that match a pattern.

    With --match the keys are counted first and the number is shown; nothing is deleted before you say yes. A client
    that is reading a block meanwhile reads it to its end.
    """
    if bool(keys) == (match is not None):
        raise click.UsageError("want KEYs or --match PATTERN, one of them")
    with place.open() as servers:
        if match is None:
            _named(servers, [key_bytes(key) for key in keys], is_json)
        else:
            _matching(servers, match, yes, is_json)


# ---- inside ------------------------------------------------------------------------------------------------------


def _named(servers: Servers, keys: list[bytes], is_json: bool) -> None:
    missing: list[bytes] = []
    for key in dict.fromkeys(keys):
        if not _deleted(servers.of(key), [key]):
            missing.append(key)
    gone = len(dict.fromkeys(keys)) - len(missing)
    if is_json:
        click.echo(json.dumps({"deleted": gone, "missing": [json_text(key) for key in missing]}, indent=2))
    else:
        click.echo(f"deleted {_keys(gone)}")
        for key in missing:
            click.echo(f"kvredis: no key {printable(key)}", err=True)
    click.get_current_context().exit(1 if missing else 0)


def _matching(servers: Servers, match: str, yes: bool, is_json: bool) -> None:
    pattern, count = key_bytes(match), 0
    with progress("counting", None) as bar:
        for server in servers.each:
            for keys in server.scan(pattern):
                count += len(keys)
                bar.to(count)
    if count and not yes:
        if is_json or not is_terminal(sys.stdin):
            raise click.UsageError(f"{_keys(count)} match {match}: --yes deletes them without a question")
        if not click.confirm(f"Delete {_keys(count)} that match {match}?", err=True):
            click.echo("nothing was deleted", err=True)
            click.get_current_context().exit(1)
    gone = 0
    with progress("deleting", count) as bar:
        for server in servers.each if count else ():
            for keys in server.scan(pattern):
                for at in range(0, len(keys), BATCH):
                    gone += _deleted(server, keys[at : at + BATCH])
                    bar.to(gone)
    if is_json:
        click.echo(json.dumps({"deleted": gone, "missing": []}, indent=2))
    else:
        click.echo(f"deleted {_keys(gone)}")


def _keys(count: int) -> str:
    return f"{count:,} {'key' if count == 1 else 'keys'}"


def _deleted(server: Connection, keys: Sequence[bytes]) -> int:
    """Delete one by one in one exchange, since keys of several slots may not stand in one command."""
    gone = 0
    for key, reply in zip(keys, server.ask_each([("UNLINK", key) for key in keys]), strict=True):
        if isinstance(reply, Exception):
            raise BackendError(f"{server}: {printable(key)} is not deleted: {reply}")
        gone += int(reply)
    return gone
