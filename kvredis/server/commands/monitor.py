"""MONITOR: every command that has run, told to the clients that asked for it.

A line is made once and given to each monitor, whose output limits bound what a slow one costs. Lines are bounded
themselves: a block store's arguments are megabytes, and no user reads them, so an argument is cut at ARG_BYTES_MAX and
says how many bytes more there are, and a command at ARGS_MAX arguments. Redis shows both in full.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvredis.server.client.client import Client
from kvredis.server.context import Caller, Context
from kvredis.server.protocol.replies import OK, Reply, error

from .registry import command
from .slowlog import excerpt, redacted

ARG_BYTES_MAX: Final = 512
ARGS_MAX: Final = 1024

NOT_IN_TRANSACTION = error("ERR MONITOR isn't allowed for DENY BLOCKING client")

_ESCAPES: Final = {ord("\\"): "\\\\", ord('"'): '\\"', 10: "\\n", 13: "\\r", 9: "\\t", 7: "\\a", 8: "\\b"}
_SHOWN: Final = tuple(
    _ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}") for byte in range(256)
)
"""How each byte is written: as C's isprint() in the C locale has it."""


@command(
    "monitor",
    arity=1,
    flags="admin noscript loading stale",
    acl="admin slow dangerous",
    group="server",
    summary="Show every command that the server runs.",
)
def monitor(session: Caller, args: list[bytes]) -> Reply:
    """MONITOR; said twice it is not even answered, as in Redis."""
    if session.transaction is not None:
        return NOT_IN_TRANSACTION
    if session.id in session.server.monitors:
        return b""
    session.server.monitors[session.id] = session
    session.server.reconsider()
    return OK


def feed(server: Context, session: Client, args: Sequence[object]) -> None:
    """Tell every monitor that `session` has run `args`: right after the handler, as Redis does it (SELECT is told with
    the new database, EXEC behind what it ran). Which commands are not told (flags `admin` and `skip_monitor`, and what
    was rejected before it ran) is the caller's business."""
    if server.monitors:
        line = monitor_line(session, args, time.time_ns() / 1e9)
        for each in list(server.monitors.values()):
            each.push(line)


def monitor_line(session: Client, args: Sequence[object], unix_time: float) -> bytes:
    """`+1700000000.123456 [9 127.0.0.1:5] "SET" "k" "a\\"b\\r\\n\\x00"`, secrets redacted, with its line break."""
    unix_socket = not session.addr.startswith("[") and session.addr.endswith(":0")
    source = f"unix:{session.addr[:-2]}" if unix_socket else session.addr
    words = redacted(args[:ARGS_MAX])
    line = f"+{unix_time:.6f} [{session.space} {source}] {' '.join(map(_shown, words))}"
    if len(args) > ARGS_MAX:
        line += f" ... ({len(args) - ARGS_MAX} more arguments)"
    return line.encode("utf-8", "surrogateescape") + b"\r\n"


def _shown(arg: object) -> str:
    """An argument in quotes, escaped; what is cut off is counted behind the closing quote."""
    head, length = excerpt(arg, ARG_BYTES_MAX)
    text = '"' + "".join(map(_SHOWN.__getitem__, head)) + '"'
    return text if length <= ARG_BYTES_MAX else f"{text}... ({length - ARG_BYTES_MAX} more bytes)"
