"""Results as pictures: bars of ratios, and lines of bandwidth against size.

Drawn with matplotlib's Agg canvas into a PNG: no display, no window, no global state. matplotlib is loaded when
something is drawn, not before. What goes into a picture is made in pictures.py; here is only how it looks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from kvredis import install_line

from .errors import BenchError
from .statistics import size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by the colour-blind, and in grey.
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
_MARKS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI: Final = 120
_COLUMN_IN: Final = 5.6
_BAR_IN: Final = 0.21
_LINES_IN: Final = 3.6
COLUMNS: Final = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A median with the least and the most that was measured."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Captions:
    """What stands around the panels: a title, what the values are (with their unit), and small print below."""

    title: str
    values: str
    foot: str = ""


@dataclass(frozen=True, slots=True)
class BarPanel:
    """Categories down the side; for each, one bar of every series that has it. None: not measured.

    Bars longer than `cut` end there, with their value beside an arrow: one outlier must not squeeze the rest.
    """

    title: str
    categories: Sequence[str]
    series: Mapping[str, Sequence[Bar | None]]
    cut: float = math.inf


@dataclass(frozen=True, slots=True)
class LinePanel:
    """A line for each series: (x, y) in the order of x. `sizes`: x is in bytes and written so; else it is a count."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    across: str = "value size"
    sizes: bool = True


_WORDS: Final = ((re.compile(r"\blane\b"), "shared memory"), (re.compile(r"\boffloading\b"), "OffloadingConnector"))
"""What legends say for our words."""


def spelled(name: str) -> str:
    """Give an arm's name as a stranger reads it: "lane+layers" is "shared memory+layers"."""
    for word, said in _WORDS:
        name = word.sub(said, name)
    return name


def bar(row: Mapping[str, Any], figure: str) -> Bar | None:
    """Give the bar of a row's figure with its _min and _max, None when it was not measured."""
    value, low, high = (row.get(name) for name in (figure, f"{figure}_min", f"{figure}_max"))
    return None if value is None or low is None or high is None else Bar(value, low, high)


def series_of(
    rows: Iterable[Mapping[str, Any]], name: str | Callable[[Any], str], x: str, y: str
) -> dict[str, list[tuple[float, float]]]:
    """Give a line for each `name` of rows, in the order of `x`; rows without a figure `y` are left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            series.setdefault(name(row) if callable(name) else row[name], []).append((row[x], row[y]))
    return {each: sorted(points) for each, points in series.items()}


def foot(machine: Mapping[str, object], more: str) -> str:
    """Write the small print: the machine, and `more`."""
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, Linux {machine.get('kernel')}. {more}"


def require(path: Path) -> None:
    """Raise BenchError when no picture can be drawn into `path`: asked before a long run, not after it."""
    if find_spec("matplotlib") is None:
        raise BenchError(f"a picture needs matplotlib: {install_line('bench')}")
    if not path.parent.is_dir():
        raise BenchError(f"{path}: there is no folder {path.parent} for the picture")


def bars(panels: Sequence[BarPanel], captions: Captions, path: Path, columns: int = COLUMNS) -> None:
    """Draw horizontal bars with the line of 1.0 into the PNG `path`; raises BenchError if there is nothing to draw."""
    figure, axes = _canvas([_bars_height(panel) for panel in panels], columns, path)
    for panel, place in zip(panels, axes, strict=True):
        _draw_bars(panel, place, captions)
    _finish(figure, axes, captions, path)


def lines(panels: Sequence[LinePanel], captions: Captions, path: Path, columns: int = COLUMNS) -> None:
    """Draw lines over a logarithmic x axis into the PNG `path`; raises BenchError when there is nothing to draw.

    One series has one colour and mark in all panels.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    figure, axes = _canvas([_LINES_IN] * len(panels), columns, path)
    for panel, place in zip(panels, axes, strict=True):
        _draw_lines(panel, place, names, captions.values)
    _finish(figure, axes, captions, path)


def _canvas(heights_in: Sequence[float], columns: int, path: Path) -> tuple[Figure, list[Axes]]:
    """Make a figure of one panel for each height, each row as high as its highest panel."""
    if not heights_in:
        raise BenchError("there is nothing to draw in this result")
    require(path)
    from matplotlib.figure import Figure

    columns = min(columns, len(heights_in))
    rows = -(-len(heights_in) // columns)
    row_heights = [max(heights_in[row * columns : (row + 1) * columns]) for row in range(rows)]
    figure = Figure(figsize=(_COLUMN_IN * columns, sum(row_heights) + 1.3), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(rows, columns, height_ratios=row_heights)
    return figure, [figure.add_subplot(grid[at // columns, at % columns]) for at in range(len(heights_in))]


def _bars_height(panel: BarPanel) -> float:
    return 1.1 + len(panel.categories) * (len(panel.series) * _BAR_IN + 0.12)


def _draw_bars(panel: BarPanel, axes: Axes, captions: Captions) -> None:
    places = range(len(panel.categories))
    height = 0.84 / len(panel.series)
    most = 1.0
    for turn, (name, row) in enumerate(panel.series.items()):
        for at, bar in zip(places, row, strict=True):
            if bar is None:
                continue
            y = at - 0.42 + (turn + 0.5) * height
            value, high = min(bar.value, panel.cut), min(bar.high, panel.cut)
            axes.barh(y, value, height * 0.92, color=COLOURS[turn % len(COLOURS)], label=spelled(name))
            axes.hlines(y, min(bar.low, panel.cut), high, color="black", linewidth=1.2)
            _tell(axes, max(value, high), y, f"{bar.value:.2f}" + (" →" if bar.value > panel.cut else ""))
            most = max(most, high, value)
    axes.axvline(1.0, color="#606060", linewidth=1, linestyle="--")
    axes.set_yticks(list(places), [spelled(name) for name in panel.categories], fontsize=10)
    axes.set_ylim(len(panel.categories) - 0.5, -0.5)  # the first category on top
    axes.set_xlim(0, most * 1.22)  # room for the numbers at the bars' ends
    axes.set_xlabel(captions.values, fontsize=10)
    axes.set_title(panel.title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _tell(axes: Axes, x: float, y: float, text: str) -> None:
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # so that the line of 1.0 does not strike it out
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, bbox=behind)


def _draw_lines(panel: LinePanel, axes: Axes, names: Sequence[str], values: str) -> None:
    for name, points in panel.series.items():
        turn = names.index(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLOURS[turn % len(COLOURS)],
            marker=_MARKS[turn % len(_MARKS)],
            markersize=5,
            label=spelled(name),
        )
    at = sorted({x for points in panel.series.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [size_text(int(x)) if panel.sizes else f"{x:g}" for x in at])
    if panel.sizes:
        for text in axes.get_xticklabels():
            text.set(rotation=35, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.tick_params(labelsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.across, fontsize=10)
    axes.set_ylabel(values, fontsize=10)
    axes.set_title(panel.title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, axes: Sequence[Axes], captions: Captions, path: Path) -> None:
    """Put title, one legend for all panels and the small print around the panels, and write the file."""
    named: dict[str, Any] = {}
    for place in axes:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    # The title is the legend's: a figure's own title and a legend outside the panels would be laid over one another.
    columns = max(1, round(figure.get_figwidth() / _COLUMN_IN))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside upper center",
        ncols=min(1 + columns, len(named)),
        fontsize=10,
        title=fill(captions.title, 48 * columns),
        title_fontsize=13,
        frameon=False,
    )
    if captions.foot:
        figure.supxlabel(fill(captions.foot, 90 * columns), fontsize=8, color="#404040")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BenchError(f"{path}: cannot write the picture: {error.strerror or error}") from error
