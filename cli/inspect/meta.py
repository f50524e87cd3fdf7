"""`kvredis meta`: what is known of a block, and with --stats what its numbers are like."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from kvredis.cli.terminal import TIER_STYLES, console, duration, json_text, key_bytes, printable, size
from kvredis.storage.errors import BackendError, LayoutError

from .block_file import checksum_fault, read_block
from .block_values import ValueStats, numpy, stats_of
from .client import Connection, Place, on_server
from .key_options import KeyName

if TYPE_CHECKING:
    from rich.console import Console

ROWS: Final = 8
"""Lines of text that the histogram takes."""
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_FACTS: Final = (
    "model",
    "dtype",
    "shape",
    "layout",
    "tokens",
    "nbytes",
    "tier",
    "hits",
    "leases",
    "age",
    "idle",
    "checksum",
)


@click.command(
    epilog="""\b
Example: kvredis meta kvredis:Qwen2.5-7B@0f3c9a1e5b7d2468@{0@9c1f}9c1f
Example: kvredis meta --stats my-block
Example: kvredis meta --json block-1 block-2
Exit 1: a key is not there, or its block is damaged (--stats)"""
)
@click.argument("keys", metavar="KEY...", type=KeyName(), nargs=-1, required=True)
@click.option("--stats", "is_counted", is_flag=True, help="Read the block: range, mean, spread, NaN, a histogram.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON: an object for each key, null for one that is gone.")
@on_server
def meta(keys: tuple[str, ...], is_counted: bool, is_json: bool, place: Place) -> None:
    """Tell a block's tensor facts: dtype, shape, tokens, bytes, tier, hits, leases, age.

    They are KV.META's, and looking changes nothing: a block on disk alone stays there, and its tensor is not known.
    With --stats the block is read as GET reads it, its checksum is compared where it has one, and its numbers are
    looked at; bf16 and fp8 too, without torch, but with numpy (kvredis[engine]).
    """
    if is_counted:
        numpy()
    told: list[dict[str, Any] | None] = []
    is_well = True
    with place.open() as servers:
        for word in keys:
            key = key_bytes(word)
            server = servers.of(key)
            facts = server.meta_of([key])[0]
            if facts is None:
                is_well = False
                told.append(None)
                click.echo(f"kvredis: {server} has no key {printable(key)}", err=True)
                continue
            facts = {"key": json_text(key)} | facts
            if is_counted:
                facts |= _counted(server, key)
                is_well = is_well and "fault" not in facts
            told.append(facts)
            if not is_json:
                _show(console(), key, facts)
    if is_json:
        click.echo(json.dumps([_jsonable(facts) for facts in told], indent=2))
    click.get_current_context().exit(0 if is_well else 1)


# ---- inside ------------------------------------------------------------------------------------------------------


def _counted(server: Connection, key: bytes) -> dict[str, Any]:
    """The statistics of every tensor of a block, or why there are none."""
    value = server.ask("GET", key)
    if value is None:
        raise BackendError(f"{server} had the key {printable(key)} a moment ago, and has it no more")
    view = memoryview(value)
    try:
        block = read_block(view)
    except LayoutError as error:
        return {"fault": str(error)}
    data = view[block.data_start :]
    found: dict[str, Any] = {"tensors": {each.name: stats_of(data, each) for each in block.tensors}}
    if fault := checksum_fault(view, block):
        found["fault"] = fault
    return found


def _jsonable(facts: dict[str, Any] | None) -> dict[str, Any] | None:
    """The facts as JSON has them: no NaN and no infinity, which it does not know."""
    if facts is None:
        return None
    tensors = facts.get("tensors")
    if tensors is None:
        return facts
    shown = {
        name: {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(each).items()}
        for name, each in tensors.items()
    }
    return facts | {"tensors": shown}


def _show(screen: Console, key: bytes, facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    screen.print(Text(printable(key), "bold"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for name in _FACTS:
        value = facts.get(name)
        if value is not None:
            table.add_row(Text(name, "dim"), Text(_fact(name, value), TIER_STYLES.get(str(value), "")))
    screen.print(table)
    if facts.get("dtype") is None and "tensors" not in facts:
        why = (
            "on disk alone; GET or kvredis prefetch brings it" if facts.get("tier") == "disk" else "no safetensors file"
        )
        screen.print(Text(f"  no tensor facts: {why}", "dim"))
    for name, stats in facts.get("tensors", {}).items():
        _show_stats(screen, name, stats)
    if "fault" in facts:
        screen.print(Text(f"  {facts['fault']}", "bold red"), soft_wrap=True)


def _fact(name: str, value: Any) -> str:
    if name == "nbytes":
        return f"{value:,} ({size(value)})"
    if name == "shape":
        return "(" + ", ".join(map(str, value)) + ")"
    if name in ("age", "idle"):
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else "".join(c if c.isprintable() else "?" for c in str(value))


def _show_stats(screen: Console, name: str, stats: ValueStats) -> None:
    from rich.text import Text

    label = "".join(c if c.isprintable() else "?" for c in name)
    screen.print(Text(f"  tensor {label}: {stats.count:,} values", "bold"))
    numbers = (("min", stats.minimum), ("max", stats.maximum), ("mean", stats.mean), ("std", stats.std))
    screen.print(Text("  " + "  ".join(f"{name} {value:.6g}" for name, value in numbers)))
    odd = Text(f"  zeros {stats.zeros:,}  ")
    odd.append(f"NaN {stats.nan:,}", "bold red" if stats.nan else "")
    odd.append(f"  infinite {stats.inf:,}", "bold red" if stats.inf else "")
    screen.print(odd)
    if sum(stats.bins):
        for row in histogram(stats.bins):
            screen.print(Text(f"  │{row}", "cyan"))
        screen.print(Text(f"  └{'─' * len(stats.bins)}"))
        left, right = f"{stats.minimum:.4g}", f"{stats.maximum:.4g}"
        screen.print(Text(f"   {left}{right:>{len(stats.bins) - len(left)}}"))


def histogram(bins: tuple[int, ...], rows: int = ROWS) -> list[str]:
    """Bars of eighths of a line, the highest `rows` lines high; what is not empty shows at least one eighth."""
    highest = max(bins)
    eighths = [max(round(8 * rows * count / highest), 1) if count else 0 for count in bins]
    return [
        "".join(_BLOCKS[min(max(each - 8 * row, 0), 8)] for each in eighths).rstrip() for row in reversed(range(rows))
    ]
