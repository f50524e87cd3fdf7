"""What the commands of `kvredis bench` share: how they read lists, show progress, end early and tell the result."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvredis.bench.core.plot import require
from kvredis.bench.core.result import default_path, save
from kvredis.bench.core.shapes import ModelShape, shape_of
from kvredis.bench.pictures import draw
from kvredis.cli.terminal import is_terminal
from kvredis.storage.errors import KVRedisError


def words_of(
    allowed: tuple[str, ...],
) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...] | None]:
    """Make a click callback that reads `a,b` and refuses what is not in `allowed`."""

    def read(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",") if word.strip()))
        for word in words:
            if word not in allowed:
                raise click.BadParameter(f"{word!r} is not one of {', '.join(allowed)}")
        if not words:
            raise click.BadParameter("names nothing")
        return words

    return read


def counts_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read `1,4` for click."""
    if value is None:
        return None
    words = value.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= 64 for word in words):
        raise click.BadParameter("want numbers from 1 to 64, as in 1,4")
    return tuple(int(word) for word in words)


def shapes_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[ModelShape, ...] | None:
    """Read `7b,path/config.json` for click."""
    if value is None:
        return None
    try:
        shapes = tuple(shape_of(word.strip()) for word in dict.fromkeys(value.split(",")))
    except KVRedisError as error:
        raise click.BadParameter(str(error)) from None
    if len({shape.name for shape in shapes}) < len(shapes):
        raise click.BadParameter("two of these have the same name")
    return shapes


def one_shape(context: click.Context, parameter: click.Parameter, value: str | None) -> ModelShape | None:
    """Read one shape for click."""
    shapes = shapes_of(context, parameter, value)
    if shapes is not None and len(shapes) > 1:
        raise click.BadParameter("one shape at a time")
    return shapes[0] if shapes else None


def numbers_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read `16,128` for click."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= 1 << 20 for word in words):
        raise click.BadParameter("want whole numbers of at least 1, as in 16,128")
    return tuple(dict.fromkeys(map(int, words)))


def _drawable(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse before a long run what could not be drawn after it."""
    if value is not None:
        try:
            require(value)
        except KVRedisError as error:
            raise click.BadParameter(str(error)) from None
    return value


picture_option = click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_drawable,
    metavar="FILE.png",
    help="Draw the result as a picture as well; kvredis bench plot does so later.",
)
"""What every bench that has a picture takes."""


def writable(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Refuse before a long run a file that could not be written after it; - and nothing are left as they are."""
    path = Path(value or "-")
    if path != Path("-"):
        if not path.parent.is_dir():
            raise click.BadParameter(f"there is no folder {path.parent}")
        if path.is_dir():
            raise click.BadParameter(f"{path} is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{path} may not be written")
    return value


def _result_path(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse the same of where a result goes, which without a name is where default_path says."""
    writable(context, parameter, value or default_path(Path.cwd(), "result"))
    return value


json_option = click.option(
    "--json",
    "json_path",
    callback=_result_path,
    metavar="FILE",
    help="Where the result goes; - is standard output.",
)
"""What every bench that has a result takes."""


@dataclass(frozen=True)
class Telling:
    """Where a result goes, as --json, --plot and --gate say; `name` begins the file's when --json does not say it."""

    name: str
    json_path: str | None
    picture: Path | None = None
    judge: bool = False

    def tell(self, result: Mapping[str, Any], lines: Iterable[str], *, held: bool = True) -> None:
        """Save the result and print `lines`, or the result alone when it goes to standard output; draw it where that
        was asked for. Exits with 1 where the gate was and a line of it does not hold, or `held` says no; and behind
        all lines, which may be of an hour's work, when the result could not be saved."""
        if self.json_path == "-":
            click.echo(json.dumps(result, indent=1))
        else:
            path = Path(self.json_path) if self.json_path else default_path(Path.cwd(), self.name)
            unsaved = ""
            try:
                save(result, path)  # before anything is printed: its reader may have hung up
            except OSError as error:
                unsaved = f"{path}: cannot write the result: {error.strerror or error}"
            for line in [*lines, "", *([] if unsaved else [f"Result: {path}"])]:
                click.echo(line)
            if unsaved:
                raise click.ClickException(unsaved)
        if self.picture is not None:
            draw(result, self.picture)
        if self.judge and not (held and all(row["passed"] for row in result["gate"])):
            sys.exit(1)


@contextmanager
def measuring(steps: int, first: str) -> Iterator[Callable[[str], None]]:
    """What a bench runs in: a bar, an end by a signal that leaves nothing behind, and our errors in one line."""
    try:
        with ended_as_exit(), progress_bar(steps, first) as step:
            yield step
    except KVRedisError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def progress_bar(steps: int, first: str) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal (standard error, so that a pipe gets the report alone), with `first` beside it until the
    first step; quiet otherwise."""
    if not is_terminal(sys.stderr):
        yield lambda _step: None
        return

    def shown(step: str | None) -> str:
        return step or first

    with click.progressbar(length=steps, file=sys.stderr, width=24, item_show_func=shown) as bar:
        yield lambda step: bar.update(1, step)


@contextmanager
def ended_as_exit() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that is closed, unwind the stack as Ctrl-C does, so that no server is left
    behind. Under nohup, which has SIGHUP ignored, it stays so."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
