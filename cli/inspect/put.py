"""`kvredis put`: a file into a server as a block, when it is one."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path

import click

from kvredis.cli.terminal import json_text, key_bytes, printable, progress, size
from kvredis.storage.errors import BackendError, LayoutError

from .block_file import checked
from .client import Place, Word, on_server
from .key_options import KeyName


@click.command(
    epilog="""\b
Example: kvredis put block.safetensors
Example: kvredis put block.safetensors my-block --ttl 3600 --if-absent
Example: kvredis put --raw notes.txt notes
Example: kvredis put - my-block
Exit 1: the file is no block (without --raw), the server has no room, or --if-absent and the key is there"""
)
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True))
@click.argument("key", metavar="[KEY]", type=KeyName(), required=False)
@click.option("--raw", is_flag=True, help="Store any bytes: do not ask that they are a safetensors file.")
@click.option("--ttl", type=click.IntRange(1), metavar="SECONDS", help="Forget it after so long.")
@click.option("--if-absent", is_flag=True, help="Leave a key that is there alone, and exit with 1.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@on_server
def put(file: str, key: str | None, raw: bool, ttl: int | None, if_absent: bool, is_json: bool, place: Place) -> None:
    """Store FILE (- is standard input) under KEY, by default the file's name without its last suffix.

    The file must be a safetensors file: its header must account for every byte, and match its checksum if it has one.
    A block that was written by `kvredis get` comes back as it was, byte for byte.
    """
    if key is None and file == "-":
        raise click.UsageError("standard input has no name: give a KEY")
    if file == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed: name a FILE")
    name = key_bytes(key if key is not None else Path(file).stem)
    with _opened(file) as value:
        if not raw:
            try:
                checked(value)
            except LayoutError as error:
                raise BackendError(f"{file}: {error} (--raw stores it as it is)") from None
        options: list[Word] = [] if ttl is None else ["EX", ttl]
        options += ["NX"] if if_absent else []
        with place.open() as servers:
            server = servers.of(name)
            with progress(f"sending {size(len(value))}", None, ""):
                reply = server.store(name, value, *options)
        nbytes = len(value)
    is_stored = reply is not None
    if is_json:
        click.echo(json.dumps({"key": json_text(name), "bytes": nbytes, "stored": is_stored, "ttl_s": ttl}, indent=2))
    elif is_stored:
        click.echo(f"{printable(name)}: {nbytes:,} bytes ({size(nbytes)})")
    if not is_stored:
        if not is_json:
            click.echo(f"kvredis: {server} has {printable(name)} already: it is left alone (--if-absent)", err=True)
        click.get_current_context().exit(1)


# ---- inside ------------------------------------------------------------------------------------------------------


class _opened:  # noqa: N801  a context manager in lower case, as contextlib's
    """The bytes of a file, mapped and not read, so that a block of gigabytes is never here twice."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._view = memoryview(b"")
        self._map: mmap.mmap | None = None

    def __enter__(self) -> memoryview:
        try:
            if self._file == "-":
                self._view = memoryview(sys.stdin.buffer.read())
                return self._view
            with open(self._file, "rb") as opened:
                if opened.seek(0, 2):
                    self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
                    self._view = memoryview(self._map)
        except OSError as error:
            raise BackendError(f"{self._file} cannot be read: {error.strerror or error}") from error
        return self._view

    def __exit__(self, *_: object) -> None:
        try:
            self._view.release()
            if self._map is not None:
                self._map.close()
        except BufferError:  # a traceback still shows it: it goes with the process
            pass
