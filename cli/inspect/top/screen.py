"""The screen of `kvredis top`, made of figures alone: what is drawn in how many columns and lines.

A small terminal shows one list at a time, a large one all four. Nothing here asks a server or reads a key.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvredis.cli.terminal import TIER_STYLES, duration, shortened, size

from .figures import Figures, Rates, hit_rate, number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LISTS: Final = ("prefixes", "commands", "slowest", "clients")
SORTS: Final = {
    "prefixes": ("bytes", "hits", "tokens", "idle"),
    "commands": ("calls/s", "calls", "us/call"),
    "slowest": ("time", "latest"),
    "clients": ("age", "idle", "leases"),
}
BAR_MIN: Final = 5
LAST_COLUMNS_MIN: Final = 18
"""What a list's last column, the name, has at least."""
WIDE_COLUMNS: Final = 140
WIDE_LINES: Final = 34
KEYS: Final = ("q quit", "p pause", "s sort", "←→ list", "↑↓ scroll")


@dataclass(slots=True)
class View:
    """What is shown and how: the latest figures, and what the keys have chosen. `lost` says why there are none now."""

    where: str
    figures: Figures | None = None
    rates: Rates | None = None
    prompts: list[dict[str, Any]] = field(default_factory=list)
    lost: str = ""
    is_paused: bool = False
    list_at: int = 0
    sort_at: dict[str, int] = field(default_factory=dict)
    scroll: dict[str, int] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The list that the keys work on."""
        return LISTS[self.list_at]

    def sort_of(self, name: str) -> str:
        """What a list is sorted by."""
        return SORTS[name][self.sort_at.get(name, 0) % len(SORTS[name])]

    def press(self, key: str) -> None:
        """Do what a key stands for, but for q."""
        if key == "p":
            self.is_paused = not self.is_paused
        elif key == "s":
            self.sort_at[self.shown] = self.sort_at.get(self.shown, 0) + 1
        elif key in ("left", "right"):
            self.list_at = (self.list_at + (1 if key == "right" else -1)) % len(LISTS)
        elif key in ("up", "down"):
            at = self.scroll.get(self.shown, 0) + (1 if key == "down" else -1)
            self.scroll[self.shown] = min(max(at, 0), max(len(rows(self, self.shown)[1]) - 1, 0))


def screen(view: View, columns: int, lines: int, *, has_keys: bool = True) -> RenderableType:
    """Everything, in at most so many columns and lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [_head(view, columns)]
    if view.lost:
        told = textwrap.wrap(f"lost: {view.lost}", columns - 1, max_lines=max(lines // 5, 1), placeholder=" …")
        parts += [Text(line, "bold white on red", no_wrap=True) for line in told]
    found = view.figures
    if found is not None:
        is_ours = not found.version.startswith("Redis ")
        parts += [_tier(name, tier, columns, is_ours) for name, tier in found.tiers.items()]
        parts += _rates(view, found, columns)[: max(lines - len(parts) - 4, 1)]  # a list has two lines at least
    left = max(lines - len(parts) - (2 if has_keys else 1), 1)
    if columns >= WIDE_COLUMNS and lines >= WIDE_LINES:
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        half = (columns - 4) // 2
        grid.add_column(width=half)
        grid.add_column(width=half)
        height = left // 2
        for two in (LISTS[:2], LISTS[2:]):
            grid.add_row(*(_list(view, name, half, height) for name in two))
        parts.append(grid)
    elif has_keys:
        parts.append(_list(view, view.shown, columns, left))
    else:
        parts += [_list(view, name, columns, max(left // len(LISTS), 3), is_padded=False) for name in LISTS]
    if has_keys:
        mark = "  PAUSED" if view.is_paused else ""
        parts.append(Text(_fitted(KEYS, columns - 1 - len(mark))[0] + mark, "reverse", no_wrap=True))
    return Group(*parts)


def rows(view: View, name: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A list's column titles and its lines, sorted; the last column takes what room is left."""
    found = view.figures or Figures(0)
    sort = view.sort_of(name)
    if name == "prefixes":
        return _prefixes(view.prompts, sort)
    if name == "commands":
        return _commands(found, view.rates, sort)
    if name == "slowest":
        slow = sorted(found.slow, key=lambda one: -one["unix_s" if sort == "latest" else "microseconds"])
        now_s = time.time()
        return ("time", "ago", "command"), [
            (f"{one['microseconds'] / 1000:,.1f} ms", duration(max(now_s - one["unix_s"], 0)), one["command"])
            for one in slow
        ]
    clients = sorted(found.clients, key=lambda one: -number(one.get(sort)))
    names = ("addr", "user", "age", "idle", "leases", "cmd")
    return names, [
        (
            _plain(one.get("addr", "")),
            _plain(one.get("user", "")),
            _span(one.get("age")),
            _span(one.get("idle")),
            _plain(one.get("leases", "-")),
            _plain(one.get("cmd", "")),
        )
        for one in clients
    ]


def sorted_prompts(found: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Prompts in an order of SORTS, the first first."""
    marks: dict[str, Any] = {
        "hits": lambda one: -one["hits"],
        "tokens": lambda one: -one["tokens"],
        "idle": lambda one: float("inf") if one["idle_s"] is None else one["idle_s"],
    }
    mark = marks.get(sort, lambda one: -one["bytes"])
    return sorted(found, key=lambda one: (mark(one), one["root"]))


# ---- inside ------------------------------------------------------------------------------------------------------


def _span(seconds: str | None) -> str:
    return duration(int(seconds)) if seconds and seconds.isdecimal() else "-"


def _prefixes(found: list[dict[str, Any]], sort: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return ("bytes", "tokens", "hits", "keys", "idle", "prompt"), [
        (
            size(one["bytes"]),
            f"{one['tokens']:,}" if one["tokens"] else "-",
            f"{one['hits']:,}",
            f"{one['keys']:,}",
            "-" if one["idle_s"] is None else duration(one["idle_s"]),
            _plain(" ".join(filter(None, (one["root"], one["model"], one["rank"])))),
        )
        for one in sorted_prompts(found, sort)
    ]


def _commands(found: Figures, rate: Rates | None, sort: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    calls_per_s = rate.calls_per_s if rate is not None else {}
    told = [
        (name, calls_per_s.get(name, 0.0), calls, microseconds / calls if calls else 0.0)
        for name, (calls, microseconds) in found.commands.items()
    ]
    at = {"calls/s": 1, "calls": 2, "us/call": 3}[sort]
    told.sort(key=lambda one: (-one[at], -one[2], one[0]))  # type: ignore[operator]
    return ("calls/s", "calls", "us/call", "command"), [
        (f"{per_s:,.1f}", f"{calls:,}", f"{each:,.1f}", _plain(name)) for name, per_s, calls, each in told
    ]


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _head(view: View, columns: int) -> Text:
    from rich.text import Text

    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("kvredis top", "bold")
    head.append(f"  {view.where}")
    if view.figures is not None:
        found = view.figures
        head.append(f"  {_plain(found.version)}  up {duration(found.uptime_s)}  {found.clients_count:,} clients")
    head.truncate(columns - 1, overflow="ellipsis")
    return head


def _fitted(parts: Sequence[str], columns: int) -> list[str]:
    """Parts in as few lines as they fit into, none of them broken unless it alone is longer than a line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= columns:
            lines[-1] += f"  {part}"
        else:
            lines.append(shortened(part, columns))
    return lines


def _tier(name: str, tier: dict[str, int], columns: int, has_leases: bool = True) -> Text:
    from rich.text import Text

    used, capacity = tier["used"], tier["capacity"]
    # without a limit, as a plain Redis is without maxmemory
    parts = [f" {size(used)} of {size(capacity)}" if capacity else f" {size(used)}, no limit"]
    parts += [f"{tier['entries']:,} entries"] + ([f"{tier['leases']:,} leases"] if has_leases else [])
    told = _fitted(parts, columns - 10 - BAR_MIN)[0]
    width = max(min(columns - len(told) - 10, 60), BAR_MIN)
    filled = min(round(width * used / capacity), width) if capacity else 0
    text = Text(f"{_plain(name[:7]):7} ", "bold", no_wrap=True, overflow="ellipsis")
    text.append("━" * filled, TIER_STYLES.get(name, "blue"))
    text.append("─" * (width - filled), "dim")
    text.append(told, "not bold")
    return text


def _rates(view: View, found: Figures, columns: int) -> list[Text]:
    from rich.text import Text

    total = hit_rate(found)
    now = view.rates.hit_rate if view.rates is not None else None
    per_s = view.rates.per_s if view.rates is not None else {}

    def gigabytes(name: str) -> str:
        return f"{per_s.get(name, 0.0) / 1e9:.3f} GB/s"

    hits = "-" if total is None else f"{100 * total:.1f}%"
    parts = [f"hit rate {hits}" + ("" if now is None else f" (now {100 * now:.1f}%)")]
    parts += [
        f"{per_s.get('commands', 0.0):,.0f} ops/s",
        f"in {gigabytes('in_bytes')}",
        f"out {gigabytes('out_bytes')}",
    ]
    if "disk" in found.tiers:
        parts += [f"disk read {gigabytes('disk_read_bytes')}", f"written {gigabytes('disk_written_bytes')}"]
    parts.append(f"{per_s.get('evicted', 0.0):,.0f} evicted/s")
    return [Text(line, no_wrap=True) for line in _fitted(parts, columns - 1)]


def _list(view: View, name: str, columns: int, lines: int, is_padded: bool = True) -> RenderableType:
    """A list with its title and column titles, in at most `lines` lines; padded, in just so many."""
    from rich.console import Group
    from rich.text import Text

    titles, every = rows(view, name)
    at = min(view.scroll.get(name, 0), max(len(every) - 1, 0))
    shown = every[at : at + max(lines - 2, 0)]
    is_chosen = name == view.shown
    title = Text(no_wrap=True)
    title.append(f" {name} ", "bold reverse" if is_chosen else "bold")
    title.append(f" by {view.sort_of(name)}  {len(every):,}" + (f", from {at + 1:,} on" if at else ""), "dim")
    widths = [max([len(titles[place]), *(len(row[place]) for row in shown)]) for place in range(len(titles) - 1)]
    while len(widths) > 1 and sum(widths) + 2 * len(widths) + LAST_COLUMNS_MIN > columns:
        widths.pop()  # a narrow terminal shows the columns that it has room for, and always the last
        titles, shown = (*titles[:-2], titles[-1]), [(*row[:-2], row[-1]) for row in shown]
    drawn: list[Any] = [title, Text(_row(titles, widths, columns), "dim", no_wrap=True)]
    drawn += [Text(_row(row, widths, columns), no_wrap=True) for row in shown]
    if is_padded:
        drawn += [Text("")] * (max(lines, 2) - len(drawn))
    return Group(*drawn[: max(lines, 1)])


def _row(cells: tuple[str, ...], widths: list[int], columns: int) -> str:
    front = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
    return f"{front}  {shortened(cells[-1], max(columns - len(front) - 3, 8))}"[: columns - 1]
