"""What Redis Cluster says about slots, read with suspicion: the slot of a key, a redirection, the table of owners.

Topology learns who owns which slot, beside everything else: by a thread that asks one node after the other and ends.
redis-py does the asking, with authentication and TLS; payloads then go over our own connections. Callers wait for it at
the very start alone. Later a node that has no slot any more says so itself (MOVED), and one that is lost gives misses.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from kvredis.backends.config.url import ClusterAddress
from kvredis.storage.background import start_thread
from kvredis.storage.errors import BackendError

from .sockets import client, within

logger = logging.getLogger(__name__)

SLOTS: Final = 16384
PORT_MAX: Final = 65535
HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{0,255}")
"""Names and addresses of both families; empty stands for the host that says so."""

Place = tuple[str, int]
"""Host and port."""

REFRESH_S_MIN: Final = 1.0
"""Between the end of one refresh and the next, or as long as the last one took if that was longer."""
ASK_S_MAX: Final = 2.0
"""For one node to answer; also how long the first callers may wait for the first refresh."""
WAIT_AGAIN_S: Final = 0.1
"""How long they wait for a later one when that first has found none."""


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


class Topology:
    """Refreshes on demand. Any thread may call anything; `adopt` is called in the refreshing thread, without a lock."""

    def __init__(
        self,
        address: ClusterAddress,
        timeout_s: float,
        places: Callable[[], Sequence[Place]],
        adopt: Callable[[list[SlotRange]], None],
        silent: Callable[[Sequence[Place]], None],
    ) -> None:
        """`places` are the nodes that may know, the likeliest first. Each is given `timeout_s`, and never more than
        ASK_S_MAX. `silent` is called as `adopt` is, once a spell in which none of them knows, with those who said
        nothing at all; the log has been told."""
        self.refreshes = 0
        self.is_wanted = False  # requested, but too early: to be requested again at the next question
        self._address = address
        self._timeout_s = min(timeout_s, ASK_S_MAX)
        self._places = places
        self._adopt = adopt
        self._silent = silent
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._next_s = self._began_s = 0.0
        self._is_down = False
        self._closed = False

    def request(self) -> None:
        """Have the topology learnt anew, unless that is under way, or was done just now."""
        with self._changed:
            now_s = time.monotonic()
            self.is_wanted = self._thread is None and now_s < self._next_s
            if self._thread is not None or self._closed or self.is_wanted:
                return
            self._began_s = now_s
            with suppress(RuntimeError):  # the interpreter ends, or has no threads left
                self._thread = start_thread(self._run, "kvredis learns a cluster")

    def await_first(self) -> None:
        """Request, unless it has been learnt before, and wait for the end of that; all who wait do so until the same
        moment, ASK_S_MAX after its beginning at the latest, and much sooner once none was found."""
        if self.refreshes:
            return
        self.request()
        with self._changed:
            left_s = self._began_s + (WAIT_AGAIN_S if self._is_down else self._timeout_s) - time.monotonic()
            self._changed.wait_for(lambda: self._thread is None, max(left_s, 0.0))

    def close(self) -> None:
        """Learn no more, and wait for the thread, which may be in the middle of a question."""
        with self._changed:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        began_s, ranges = time.monotonic(), []
        try:
            ranges = self._learn()
            if ranges:
                self._adopt(ranges)
        finally:
            with self._changed:
                self.refreshes += bool(ranges)
                self._thread = None
                now_s = time.monotonic()
                self._next_s = now_s + max(REFRESH_S_MIN, now_s - began_s)
                self._changed.notify_all()

    def _learn(self) -> list[SlotRange]:
        """Ask until one node knows; an empty list, and a line in the log once a spell, when none does."""
        import redis  # before the clock starts: the first time it may take as long as all the rest

        answers, silent = [], []
        for host, port in self._places():
            if self._closed:
                return []
            try:
                ask = partial(_ask, self._address, host, port, self._timeout_s)
                ranges = within(self._timeout_s, f"asking {host}:{port} for its cluster", ask)
            except Exception as error:  # what redis-py makes of an answer that is none may be anything
                answers.append(f"{host}:{port}: {str(error)[:200]}")
                if isinstance(error, redis.ConnectionError | redis.TimeoutError | TimeoutError):
                    silent.append((host, port))
                continue
            self._is_down = False
            return ranges
        if not self._is_down:
            logger.warning("%s: no node tells its slots (%s)", self._address, "; ".join(answers))
            self._silent(silent)
        self._is_down = True
        return []


def _ask(address: ClusterAddress, host: str, port: int, timeout_s: float) -> list[SlotRange]:
    with client(host, port, (address.username, address.password), address.tls, timeout_s) as asked:
        return ranges_of(asked.execute_command("CLUSTER", "SLOTS"), host)
