"""`kvredis get`: a block out of a server into a file, whole and undamaged or not at all."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from pathlib import Path

import click

from kvredis.cli.terminal import is_terminal, json_text, key_bytes, printable, progress, size
from kvredis.storage.errors import BackendError, LayoutError

from .block_file import checked
from .client import Place, on_server
from .key_options import KeyName


@click.command(
    epilog="""\b
Example: kvredis get my-block -o block.safetensors
Example: kvredis get my-block -o - | sha256sum
Example: kvredis get -u redis://kv-1:6379 --raw some-value -o value.bin
Exit 1: the key is not there, or its value is damaged or no block (without --raw); no file is written then"""
)
@click.argument("key", metavar="KEY", type=KeyName())
@click.option(
    "-o",
    "--output",
    default="-",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Where to; - or nothing is standard output, when that is no terminal.",
)
@click.option("--raw", is_flag=True, help="Take any value, and compare nothing.")
@click.option("--json", "is_json", is_flag=True, help="Print what was written as JSON; goes with -o FILE.")
@on_server
def get(key: str, output: str, raw: bool, is_json: bool, place: Place) -> None:
    """Write the block under KEY to a file that every safetensors reader opens.

    The header must account for every byte, and where it has a checksum (xxh3) the bytes must have it. The file is
    written beside its place and renamed, so no reader ever sees half of it; one of that name is replaced. A plain Redis
    that holds blocks will do.
    """
    if output == "-" and is_json:
        raise click.UsageError("--json goes with -o FILE: standard output is the block's")
    if output == "-" and is_terminal(sys.stdout):
        raise click.UsageError("a block is not for a terminal: name a file with -o FILE")
    if output == "-" and sys.stdout is None:
        raise click.UsageError("standard output is closed: name a file with -o FILE")
    name = key_bytes(key)
    with place.open() as servers:
        server = servers.of(name)
        with progress(f"reading {printable(name)[:40]}", None, ""):
            value = server.ask("GET", name)
        if value is None:
            raise BackendError(f"{server} has no key {printable(name)}")
    if not raw:
        try:
            checked(memoryview(value))
        except LayoutError as error:
            raise BackendError(f"{printable(name)}: {error} (--raw takes it as it is)") from None
    if output == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return
    write_whole(Path(output), value)
    if is_json:
        click.echo(json.dumps({"key": json_text(name), "file": output, "bytes": len(value)}, indent=2))
    else:
        click.echo(f"{printable(key_bytes(output))}: {len(value):,} bytes ({size(len(value))})")


def write_whole(path: Path, value: bytes) -> None:
    """Write a file that is there whole or not at all, with the rights that a new file has. What is there and no file
    (a pipe, /dev/null) is written into, and never replaced; nor is a link, but what it names. Raises BackendError."""
    path = Path(os.path.realpath(path))
    try:
        if path.is_symlink():  # still: it leads in a circle
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        is_other = path.exists() and not path.is_file() and not path.is_dir()
        if is_other:
            path.write_bytes(value)
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error.strerror}") from error
    if is_other:
        return
    umask = os.umask(0)
    os.umask(umask)
    unfinished = ""
    try:
        file, unfinished = tempfile.mkstemp(prefix=".kvredis-", dir=path.parent)  # and not longer than `path`
        with open(file, "wb") as opened:
            opened.write(value)
            os.fchmod(opened.fileno(), 0o666 & ~umask)
        os.replace(unfinished, path)
    except BaseException as error:
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BackendError(f"{path} cannot be written: {error.strerror}") from error
        raise
