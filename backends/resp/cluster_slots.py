"""What Redis Cluster says about slots, read with suspicion: the slot of a key, a redirection, the table of owners."""

from __future__ import annotations

import re
from binascii import crc_hqx
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvredis.storage.errors import BackendError

SLOTS: Final = 16384
PORT_MAX: Final = 65535
HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{0,255}")
"""Names and addresses of both families; empty stands for the host that says so."""


class Redirect(NamedTuple):
    """MOVED: the slot is there from now on. ASK: this key may be, and this once."""

    slot: int
    host: str
    port: int
    is_ask: bool


class SlotRange(NamedTuple):
    """Slots from first to last, and the master that owns them."""

    first: int
    last: int
    host: str
    port: int


def slot_of(key: bytes) -> int:
    """The slot of a key: of what stands between its first braces if that is anything, else of all of it."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS


def redirect_of(reply: BackendError) -> Redirect | None:
    """Read `MOVED 3999 10.0.0.1:6379` and `ASK ...`; None for everything else, what only looks like one included."""
    kind, slot, where, *more = [*str(reply).split(" "), "", ""]
    host, _, port = where.rpartition(":")
    if kind not in ("MOVED", "ASK") or any(more):
        return None
    host = host.removeprefix("[").removesuffix("]")
    if not (is_number(slot, SLOTS - 1) and is_number(port, PORT_MAX) and int(port) and HOST.fullmatch(host)):
        return None
    return Redirect(int(slot), host, int(port), kind == "ASK")


def is_number(text: str, high: int) -> bool:
    """Say whether a text is a plain number from 0 to `high`."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= high


def ranges_of(rows: object, asked: str) -> list[SlotRange]:
    """Read the answer of host `asked` to CLUSTER SLOTS, as redis-py gives it: rows of first, last, master, replicas.

    Raises BackendError for what is no such table, or an empty one.
    """
    if not isinstance(rows, list) or not 0 < len(rows) <= SLOTS:
        raise BackendError("CLUSTER SLOTS gives no table of slots")
    return [_range_of(row, asked) for row in rows]


def _range_of(row: object, asked: str) -> SlotRange:
    match row:
        case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < SLOTS and 0 < port <= PORT_MAX:
            name = host.decode("ascii", "replace") if isinstance(host, bytes) else host or ""
            if isinstance(name, str) and HOST.fullmatch(name):
                return SlotRange(first, last, name or asked, port)
    raise BackendError(f"CLUSTER SLOTS gives a row that is none: {str(row)[:100]}")


def by_slot(keys: Sequence[bytes]) -> dict[int, list[bytes]]:
    """Group keys by slot, in the order of each slot's first key."""
    groups: dict[int, list[bytes]] = {}
    for key in keys:
        groups.setdefault(slot_of(key), []).append(key)
    return groups
