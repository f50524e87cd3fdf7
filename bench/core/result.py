"""A bench's result: what every JSON file has, how it is saved and read, and the one printer of its tables and its gate.

A bench adds its own parts to Result: rows with the samples that they sum up, under a schema name of its own. Everything
that is printed is in the file. Every bench imports this; it imports no bench.

To add a bench: a file or folder in bench/ with a plan, `run` and `table_lines` (lmcache.py is a short one), its
subcommand in cli/bench/ with a line in command.py there, and, if it has a picture, a row in bench/pictures.py.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypedDict

from kvredis.storage.memory.copy import KIND

from .errors import BenchError
from .statistics import middle, size_text

Machine = dict[str, str | int]

_PACKAGES: Final = ("uvloop",)
_BUSY_SHARE: Final = 0.5
"""Of the cores: with a larger load average before it begins, a bench shares them with other work."""

Progress = Callable[[str], None]
"""Called before or after each step, with what it is."""

Row = dict[str, Any]
"""What was measured of one arm: what it is about, `samples`, and what follows from these."""


class GateLine(TypedDict):
    """One judgement; `measured` is None, and the line not passed, when there is no figure."""

    name: str
    bound: str  # as gate_line reads it
    measured: float | None
    passed: bool


class Result(TypedDict):
    """What every file has; older ones may lack `notes`, `gate`, `verified_bytes` and `seconds`."""

    schema: str
    machine: Machine
    options: dict[str, Any]  # how the bench was called
    notes: list[str]  # what was left out or made smaller, and why
    gate: list[GateLine]
    verified_bytes: int  # compared in full; a wrong byte ends the bench
    seconds: float


def new_result(schema: str, options: Mapping[str, Any], notes: Iterable[str] = ()) -> Result:
    """Give the result of a bench that begins now."""
    return Result(
        schema=schema, machine=machine_facts(), options=dict(options), notes=list(notes), gate=[], verified_bytes=0,
        seconds=0.0,
    )  # fmt: skip


# Files


def default_path(folder: Path, name: str) -> Path:
    """Give where a result goes without --json: bench/results under `folder` when that exists, else `folder`."""
    results = folder / "bench" / "results"
    return (results if results.is_dir() else folder) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def save(result: Mapping[str, object], path: Path) -> None:
    """Write a result: a line for each row of it, numbers to six significant digits, which is more than noise leaves."""
    fields = []
    for name, value in _rounded(result).items():
        rows = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else ""
        fields.append(f"{json.dumps(name)}: " + (f"[\n{rows}\n]" if rows else json.dumps(value)))
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def load(path: Path, schema: str | None = None) -> dict[str, Any]:
    """Read a result; raises BenchError when the file has none, or none of `schema`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot read a result: {error}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{path}: not a result of any bench")
    if schema is not None and found.get("schema") != schema:
        raise BenchError(f"{path}: not a result of schema {schema}")
    return found


# Rows


def summed(samples: Sequence[Mapping[str, Any]], medians: Iterable[str] = (), spreads: Iterable[str] = ()) -> Row:
    """Give the median of each figure of the samples; of `spreads` also the least (NAME_min) and the most (NAME_max)."""
    row: Row = {name: middle([sample[name] for sample in samples]) for name in medians}
    for name in spreads:
        row |= spread(name, [sample[name] for sample in samples])
    return row


def spread(name: str, values: Sequence[float], none: float | None = 0.0) -> Row:
    """Give the median of `values` as `name`, with its least and most; `none` for each when there are none."""
    if not values:
        return dict.fromkeys((name, f"{name}_min", f"{name}_max"), none)
    return {name: middle(values), f"{name}_min": min(values), f"{name}_max": max(values)}


# The report

Column = tuple[str, str | tuple[str, str] | Callable[[Any], object], str]
"""Heading, the row's figure, and its format. The figure is a key, two keys (least and most) or a function of the row.
The format is "" for text, which stands to the left, "size" for bytes, or a format specification with a unit behind it
(".2f", ".2fx"); what is None or not there is left empty."""

_FORMAT: Final = re.compile(r"(.*?[a-z%])(x?)")


def table(columns: Sequence[Column], rows: Iterable[Any]) -> Iterator[str]:
    """Lay rows out under headings, each column as wide as what stands in it."""
    cells = [[head for head, _, _ in columns], *([_cell(row, *column[1:]) for column in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    for line in cells:
        padded = (
            cell.rjust(width) if form else cell.ljust(width)
            for cell, width, (_, _, form) in zip(line, widths, columns, strict=True)
        )
        yield "  " + "  ".join(padded).rstrip()


def tables(columns: Sequence[Column], rows: Iterable[Any], title: Callable[[Any], str]) -> Iterator[str]:
    """Lay rows out as a table for each run of rows that have the same title, an empty line before each."""
    for head, own in groupby(rows, title):
        yield ""
        yield head
        yield from table(columns, own)


def _cell(row: Any, figure: str | tuple[str, str] | Callable[[Any], object], form: str) -> str:
    if isinstance(figure, tuple):
        low, high = (_cell(row, key, form) for key in figure)
        return f"{low} to {high}" if low and high else ""
    value: Any = figure(row) if callable(figure) else row.get(figure)
    if value is None or value == "":
        return ""
    if form == "size":
        return size_text(value)
    specification = _FORMAT.fullmatch(form)
    return str(value) if specification is None else f"{value:{specification[1]}}{specification[2]}"


def machine_lines(machine: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Say what was measured on, behind `before`, and whether it had something else to do."""
    gib = f"{int(machine['memory_bytes']) / 1024**3:.0f} GiB, " if "memory_bytes" in machine else ""
    yield (
        f"{before}{machine['cpu']}, {machine['cores']} cores, {gib}Linux {machine['kernel']},"
        f" load {machine.get('load_1min', 'unknown')} before"
    )
    if warning := busy(machine):
        yield warning


def verified_line(result: Result, how: str = "compared in full") -> str:
    """Say how much was compared."""
    return f"Verified: {result['verified_bytes'] / 1e9:.2f} GB {how}, 0 wrong."


# The gate

_PASSES: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_BOUND: Final = re.compile(r"(>=|<=|>|<|=) ([\d.]+)( %|x|)|([\d.]+) to ([\d.]+)")


def gate_line(name: str, bound: str, measured: float | None) -> GateLine:
    """Judge a figure by its bound as it is written: ">= 1.15x", "< 3 %", "= 1", "0.90 to 1.10". None never passes."""
    passed = False
    if measured is not None:
        read = _BOUND.fullmatch(bound)
        if read is None:
            raise ValueError(f"{name}: no bound: {bound!r}")
        low, high = (read[2], "inf") if read[1] else (read[4], read[5])
        passed = _PASSES[read[1] or ">="](measured, float(low)) and measured <= float(high)
    return GateLine(name=name, bound=bound, measured=measured, passed=passed)


def gate_lines(lines: Sequence[GateLine], about: str = "medians of paired ratios") -> Iterator[str]:
    """Give the verdicts, line by line; nothing when there is nothing to judge."""
    if not lines:
        return
    yield ""
    yield f"Gate ({about})"
    width = max(len(line["name"]) for line in lines)
    for line in lines:
        unit = "x" if line["bound"].endswith("x") else " %" if line["bound"].endswith("%") else ""
        measured = "none" if line["measured"] is None else f"{line['measured']:.{1 if unit == ' %' else 3}f}{unit}"
        yield (
            f"  {'held' if line['passed'] else 'MISSED':<6}  {line['name']:<{width}} {line['bound']:>12} {measured:>9}"
        )
    yield f"  {sum(line['passed'] for line in lines)} of {len(lines)} lines hold."


# ---- what a figure was measured on: without these facts it cannot be compared with another ---------------------------


def machine_facts() -> Machine:
    """Give CPU model, usable cores, memory (bytes), kernel, page settings, the way of copying and what else matters."""
    facts: Machine = {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "native": KIND,
        "transparent_hugepages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "hugepages_2mib_reserved": _text(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")),
        "load_1min": f"{os.getloadavg()[0]:.2f}",
    }
    return facts | {package: _version(package) for package in _PACKAGES}


def busy(machine: Mapping[str, Any]) -> str:
    """Warn when the load average before a bench says that its machine had other work; empty when it had none."""
    load, cores = float(machine.get("load_1min", 0)), int(machine["cores"])
    if load <= cores * _BUSY_SHARE:
        return ""
    return f"Warning: the machine is busy: its load average is {load:.2f} on {cores} cores, so figures will vary"


def _cpu_model() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _chosen(path: Path) -> str:
    """Give the word in brackets of a sysfs choice such as `always [madvise] never`."""
    return _text(path).partition("[")[2].partition("]")[0] or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
