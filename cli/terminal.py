"""How the inspecting subcommands look: the same tables, bars and numbers, plain in a pipe, and safe.

A key is whatever some client called it. Printed to a terminal as it is, it could move the cursor or rename the window,
so what a terminal sees is escaped; what a pipe sees are the bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIER_STYLES: Final = {"gpu": "cyan", "memory": "green", "disk": "yellow"}
PLAIN: Final = str.maketrans("━─│├└╸╺…←→↑↓", "#-|+`##~<>^v")
"""What is drawn, column for column, where a terminal has no such characters."""
PLAIN_ERRORS: Final = "kvredis-plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Stand in for characters that an encoding lacks; an error handler of codecs."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(PLAIN)
    return "".join(each if each.isascii() else "?" for each in text), error.end


codecs.register_error(PLAIN_ERRORS, _plain)

PIPE_WIDTH: Final = 200
"""Columns of a table that no terminal bounds."""


def console(*, stderr: bool = False) -> Console:
    """A console on what stdout (stderr) is now. Colours only where a terminal has them and NO_COLOR is not set."""
    from rich.console import Console

    file = (sys.stderr if stderr else sys.stdout) or io.StringIO()  # None: our caller has closed it
    if isinstance(file, io.TextIOWrapper):
        # A locale such as ISO-8859-1 has no bars, nor every model's name; Python makes C UTF-8 (PEP 540).
        asked = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
        file.reconfigure(encoding="ascii" if asked in ("C", "POSIX") else None, errors=PLAIN_ERRORS)
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, width=width, highlight=False, emoji=False, markup=False)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; one that our caller has closed is None, and is none."""
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def progress(what: str, total: int | None, unit: str = "keys", *, is_shown: bool = True) -> Iterator[Moving]:
    """A bar on stderr while the block runs; nothing at all where stderr is no terminal, or where the block itself
    prints. `total` None: not known."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
    ]
    # whatever FORCE_COLOR makes of a pipe: a log is no place for a bar that moves
    is_drawn = is_shown and screen.file.isatty() and not screen.is_dumb_terminal
    shown = Progress(*columns, console=screen, transient=True, disable=not is_drawn)
    with shown if is_drawn else contextlib.nullcontext():  # before 14.3 rich ends one that is disabled by an empty line
        yield Moving(shown, what, total, unit)


class Moving:
    """A bar that is moved by counts."""

    def __init__(self, shown: Progress, what: str, total: int | None, unit: str) -> None:
        self._shown, self._total, self._unit, self._done = shown, total, unit, 0
        self._task: Any = shown.add_task(what, total=total, counted="")

    def to(self, done: int, note: str = "") -> None:
        """Say how many are done."""
        self._done = done
        of = "" if self._total is None else f"/{self._total:,}"
        self._shown.update(self._task, completed=done, counted=f"{done:,}{of} {self._unit}{note}")

    def forward(self, count: int) -> None:
        """Say that so many more are done."""
        self.to(self._done + count)


def printable(word: bytes) -> str:
    """A key as a terminal may see it: UTF-8 as it is, control characters and what is no UTF-8 as \\x escapes."""
    text = word.decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def json_text(word: bytes) -> str:
    """A key as JSON text that os.fsencode makes the same bytes of again, whatever they are."""
    return word.decode("utf-8", "surrogateescape")


def shortened(text: str, width: int) -> str:
    """The text in at most `width` columns, its middle left out: keys differ at both ends."""
    if len(text) <= width:
        return text
    before = (width - 1) // 2
    return f"{text[:before]}…{text[len(text) - (width - 1 - before) :]}"


def key_bytes(word: str) -> bytes:
    """A key as it was typed, any bytes included."""
    return os.fsencode(word)


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1024, three digits or so."""
    value, step = float(nbytes), 0
    while abs(value) >= 1024 and step < len(UNITS) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.3g} {UNITS[step]}" if step and value < 100 else f"{value:.0f} {UNITS[step]}"


def duration(seconds: float) -> str:
    """A time span for people: its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
