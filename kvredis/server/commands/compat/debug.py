"""DEBUG: the few subcommands with which test suites put a server into a state; none that crashes or corrupts one.

Off unless `enable-debug-command` was `yes` or `local` at the start, because SLEEP halts every client.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

from kvredis.server.commands.keys import object_encoding
from kvredis.server.commands.memory import double
from kvredis.server.commands.registry import command
from kvredis.server.context import Caller
from kvredis.server.protocol.replies import (
    OK,
    Reply,
    array,
    bulk,
    error,
    integer,
    map_reply,
    set_reply,
    simple,
    statuses,
    verbatim,
)

log = logging.getLogger(__name__)

NOT_ALLOWED = error(
    'ERR DEBUG command not allowed. If the enable-debug-command option is set to "local", you can run it from a local '
    "connection, otherwise you need to set this option in the configuration file, and then restart the server."
)

SLEEP_S_MAX = 60.0
"""The server serves no client meanwhile, so what is longer is a mistake."""

_HELP = (
    "DEBUG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "CHANGE-REPL-ID",
    "    Nothing: there is no replication.",
    "ERROR <string>",
    "    Answer with an error of this text.",
    "LOG <message>",
    "    Write a line into the server's log.",
    "OBJECT <key>",
    "    How a value is kept.",
    "PROTOCOL <type>",
    "    Answer with a value of this type: string, integer, double, bignum, null, array, set, map, attrib, push,",
    "    verbatim, true or false.",
    "SET-ACTIVE-EXPIRE <0|1>",
    "    Whether the server collects expired keys before a client reads them.",
    "SLEEP <seconds>",
    "    Serve no client for so long, a minute at most.",
    "HELP",
    "    Print this help.",
)


@command(
    "debug",
    arity=-2,
    flags="admin noscript loading stale",
    acl="admin slow dangerous",
    group="server",
    reads=(2, 2, 1),
    syntax="subcommand [argument ...]",
    summary="Means for tests; off by default.",
)
def debug(session: Caller, args: list[bytes]) -> Reply:
    """DEBUG subcommand [argument ...]."""
    allowed = session.server.options.enable_debug_command
    if allowed == "no" or (allowed == "local" and not is_local(session.addr)):
        return NOT_ALLOWED
    found = _PARTS.get(args[1].upper())
    if found is None or len(args) != found[0]:
        return error(
            b"ERR unknown subcommand or wrong number of arguments for '%b'. Try DEBUG HELP."
            % args[1].split(b"\0")[0][:128]
        )
    return found[1](session, args)


def is_local(addr: str) -> bool:
    """Whether a client speaks from this machine: over loopback or a unix socket, whose address ends in port 0."""
    return addr.startswith(("127.", "[::1]", "[::ffff:127.")) or addr.endswith(":0")


def _help(session: Caller, args: list[bytes]) -> Reply:
    return statuses(_HELP)


def _ok(session: Caller, args: list[bytes]) -> Reply:
    return OK


def _error(session: Caller, args: list[bytes]) -> Reply:
    return error(args[2])


def _log(session: Caller, args: list[bytes]) -> Reply:
    log.warning("DEBUG LOG: %s", args[2].decode("utf-8", "backslashreplace"))
    return OK


def _sleep(session: Caller, args: list[bytes]) -> Reply:
    """Halts the whole server, which is what it is for: a client that waits alone would test nothing."""
    written = re.match(rb"\s*\+?[0-9]*\.?[0-9]*", args[2])
    seconds = 0.0
    if written is not None and any(byte in b"0123456789" for byte in written[0]):
        seconds = float(written[0])
    time.sleep(min(seconds, SLEEP_S_MAX))
    return OK


def _object(session: Caller, args: list[bytes]) -> Reply:
    """The address is where in the arena the value lies, 0 for a small one, which lies beside it."""
    entry = session.store.find(args[2], session.space)
    if entry is None:
        return error("ERR no such key")
    encoding = object_encoding(session, [b"OBJECT", b"ENCODING", args[2]])
    assert isinstance(encoding, bytes)
    idle_s = max(0, int(session.store.now_s() - entry.accessed_s))
    length_bytes = 1 if entry.length < 64 else 2 if entry.length < 16384 else 5
    return simple(
        f"Value at:{entry.extent.offset:#x} refcount:1 encoding:{encoding.split()[1].decode()} "
        f"serializedlength:{length_bytes + entry.length} lru:{int(time.time() - idle_s) & 0xFFFFFF} "
        f"lru_seconds_idle:{idle_s}"
    )


def _set_active_expire(session: Caller, args: list[bytes]) -> Reply:
    session.server.expires_actively = not re.match(rb"\s*[-+]?0*(\D|$)", args[2])  # as C's atoi reads it
    return OK


def _protocol(session: Caller, args: list[bytes]) -> Reply:
    sample = _SAMPLES.get(args[2].lower())
    if sample is None:
        names = b"|".join(_SAMPLES).decode()
        return error(f"ERR Wrong protocol type name. Please use one of the following: {names}")
    return sample(session)


def _bool(session: Caller, value: bool) -> bytes:
    return (b"#t\r\n" if value else b"#f\r\n") if session.resp == 3 else integer(int(value))


def _numbers() -> list[Reply]:
    return [integer(number) for number in range(3)]


def _bignum(session: Caller) -> Reply:
    digits = "1234567999999999999999999999999999999"
    return f"({digits}\r\n".encode() if session.resp == 3 else bulk(digits)


def _map(session: Caller) -> Reply:
    return map_reply(session, [(integer(number), _bool(session, number == 1)) for number in range(3)])


def _attribute(session: Caller) -> Reply:
    said = array([bulk("key:123"), integer(90)])
    assert isinstance(said, bytes)
    attribute = b"|1\r\n" + bulk("key-popularity") + said if session.resp == 3 else b""
    return attribute + bulk("Some real reply following the attribute")


def _push(session: Caller) -> Reply:
    if session.resp == 2:
        return error("ERR RESP2 is not supported by this command")
    return b">2\r\n" + bulk("server-cpu-usage") + integer(42) + bulk("Some real reply following the push reply")


_SAMPLES: dict[bytes, Callable[[Caller], Reply]] = {
    b"string": lambda session: bulk("Hello World"),
    b"integer": lambda session: integer(12345),
    b"double": lambda session: double(session, 3.141),
    b"bignum": _bignum,
    b"null": lambda session: session.nil,
    b"array": lambda session: array(_numbers()),
    b"set": lambda session: set_reply(session, _numbers()),
    b"map": _map,
    b"attrib": _attribute,
    b"push": _push,
    b"verbatim": lambda session: verbatim(session, "This is a verbatim\nstring"),
    b"true": lambda session: _bool(session, True),
    b"false": lambda session: _bool(session, False),
}
"""Redis' own samples, value for value: client libraries test their parsers with them."""

_PARTS: dict[bytes, tuple[int, Callable[[Caller, list[bytes]], Reply]]] = {
    b"CHANGE-REPL-ID": (2, _ok),
    b"ERROR": (3, _error),
    b"HELP": (2, _help),
    b"LOG": (3, _log),
    b"OBJECT": (3, _object),
    b"PROTOCOL": (3, _protocol),
    b"SET-ACTIVE-EXPIRE": (3, _set_active_expire),
    b"SLEEP": (3, _sleep),
}
"""Number of arguments and handler of each. Refused by not being here: SEGFAULT, PANIC, ASSERT, OOM, RESTART,
CRASH-AND-RECOVER, LEAK, RELOAD, LOADAOF, JMAP, MALLCTL, POPULATE and the rest."""
