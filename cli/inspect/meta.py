"""`kvredis meta`: what is known of a block, and with --stats what its numbers are like: range, mean, spread, NaN and
infinities, and how they are distributed.

Statistics need numpy alone, and look at a piece at a time, so that a block of a gigabyte needs no second one. numpy has
no bf16 and no fp8: bf16 is the upper half of a float32, and the 256 values of an fp8 are worked out from their bits
(OCP 8-bit Floating Point Specification 1.0: E4M3 has no infinities, and NaN where all bits but the sign are set; E5M2
is as IEEE).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from kvredis import install_line
from kvredis.cli.terminal import TIER_STYLES, console, duration, json_text, key_bytes, printable, size
from kvredis.storage.errors import BackendError, LayoutError

from .block_file import Tensor, checksum_fault, read_block
from .client import Connection, Place, on_server
from .key_options import KeyName

if TYPE_CHECKING:
    from rich.console import Console

ROWS: Final = 8
"""Lines of text that the histogram takes."""
PIECE_ELEMENTS: Final = 1 << 20
BINS: Final = 40
_PLAIN: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "<u1",
    "BOOL": "<u1",
}
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
        why = {
            "disk": "on disk alone; GET or kvredis prefetch brings it",
            "gpu": "on the GPU alone; GET brings a copy to memory",
        }.get(str(facts.get("tier")), "no safetensors file")
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


# ---- the numbers of a block ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueStats:
    """The numbers of one tensor. `minimum` to `std` are of the finite ones, NaN where there are none; `bins` count
    them from `minimum` to `maximum`, all of one width."""

    count: int
    nan: int
    inf: int
    zeros: int
    minimum: float
    maximum: float
    mean: float
    std: float
    bins: tuple[int, ...]


def stats_of(data: memoryview, tensor: Tensor, bins: int = BINS) -> ValueStats:
    """Look at every element. Raises ClickException where numpy is not installed or does not know the dtype."""
    np = numpy()
    if tensor.dtype not in _PLAIN and tensor.dtype not in ("BF16", "F8_E4M3", "F8_E5M2"):
        raise click.ClickException(f"tensor {tensor.name!r}: no statistics of dtype {tensor.dtype!r}")
    with np.errstate(over="ignore", invalid="ignore"):  # the largest numbers' squares are beyond a float64
        return _looked_at(np, data, tensor, bins)


def numpy() -> Any:
    """The module numpy, or ClickException with the line that installs it."""
    try:
        import numpy as found
    except ModuleNotFoundError as error:
        raise click.ClickException(f"--stats needs numpy, which is not installed: {install_line('engine')}") from error
    return found


# ---- counting them ---------------------------------------------------------------------------------------------------


def _looked_at(np: Any, data: memoryview, tensor: Tensor, bins: int) -> ValueStats:
    count = nan = inf = zeros = finite = 0
    low, high, total = math.inf, -math.inf, 0.0
    for values in _pieces(np, data, tensor):
        count += values.size
        nan += int(np.isnan(values).sum())
        inf += int(np.isinf(values).sum())
        values = values[np.isfinite(values)]
        if values.size:
            finite += values.size
            zeros += int((values == 0).sum())
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            total += float(values.sum())
    if not finite:
        return ValueStats(count, nan, inf, zeros, math.nan, math.nan, math.nan, math.nan, (0,) * bins)
    mean, squares = total / finite, 0.0
    histogram = np.zeros(bins, np.int64)
    for values in _pieces(np, data, tensor):  # again: the range must be known before it can be divided
        values = values[np.isfinite(values)]
        squares += float(((values - mean) ** 2).sum())
        places = _places(np, values, low, high, bins)
        histogram += np.bincount(places, minlength=bins)
    return ValueStats(count, nan, inf, zeros, low, high, mean, math.sqrt(squares / finite), tuple(map(int, histogram)))


def _places(np: Any, values: Any, low: float, high: float, bins: int) -> Any:
    """The bin of each value, of equal values the middle one."""
    if not high / 2 > low / 2:  # the half of the smallest number is none
        return np.full(values.shape, bins // 2, np.int64)
    # halves first: the span of the largest numbers is no number
    part = (values / 2 - low / 2) / (high / 2 - low / 2)
    return np.minimum((part * bins).astype(np.int64), bins - 1)


def _pieces(np: Any, data: memoryview, tensor: Tensor) -> Iterator[Any]:
    """The elements as float64, PIECE_ELEMENTS at a time."""
    raw = data[tensor.start : tensor.stop]
    whole = np.frombuffer(raw, "<u2" if tensor.dtype == "BF16" else _PLAIN.get(tensor.dtype, "<u1"))
    table = None if tensor.dtype in (*_PLAIN, "BF16") else np.array(fp8_values(tensor.dtype))
    for at in range(0, whole.size, PIECE_ELEMENTS):
        piece = whole[at : at + PIECE_ELEMENTS]
        if table is not None:
            yield table[piece]
        elif tensor.dtype == "BF16":
            yield (piece.astype("<u4") << 16).view("<f4").astype(np.float64)
        else:
            yield piece.astype(np.float64)


def fp8_values(dtype: str) -> list[float]:
    """The 256 numbers that the bytes 0 to 255 stand for in F8_E4M3 or F8_E5M2."""
    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    exponent_max = (1 << (7 - mantissa_bits)) - 1
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if dtype == "F8_E4M3" and byte & 0x7F == 0x7F:
            values.append(math.nan)
        elif dtype == "F8_E5M2" and exponent == exponent_max:
            values.append(math.nan if mantissa else sign * math.inf)
        elif exponent:
            values.append(sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))
        else:
            values.append(sign * mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias))
    return values
