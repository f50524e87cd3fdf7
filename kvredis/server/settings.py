"""CONFIG: the settings that tools ask a Redis for, each with its true value here, and the few that can be changed.

SETTINGS is the one table. A setting has one of three effects: LIVE is read by the code that it steers the moment it
changes; FIXED was decided at start, and CONFIG SET says so in Redis' words; IGNORED is checked, kept and reported so
that tools and test suites which set it go on, and steers nothing, because what it is for does not exist here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from kvredis.storage.index import SPACES

from .arguments import INT64_MAX, parse_integer
from .commands import container, subcommand
from .help import help_reply
from .patterns import matcher
from .replies import OK, SYNTAX_ERROR, Reply, bulk, error, map_reply

if TYPE_CHECKING:
    from .server import Server
    from .session import Session

_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous"}

container(
    "config",
    group="server",
    since="2.0.0",
    complexity="Depends on subcommand.",
    summary="The server's settings.",
)


class Effect(Enum):
    """What CONFIG SET does to a setting."""

    LIVE = "live"
    FIXED = "fixed"
    IGNORED = "ignored"


Check = Callable[[str], str]
"""From what the user wrote to how Redis would report it; ValueError with Redis' words for what is wrong."""


def _any(text: str) -> str:
    return text


def _yes_no(text: str) -> str:
    if text.lower() not in ("yes", "no"):
        raise ValueError("argument must be 'yes' or 'no'")
    return text.lower()


def _number(low: int, high: int = INT64_MAX) -> Check:
    def check(text: str) -> str:
        number = parse_integer(text.encode())
        if number is None:
            raise ValueError("argument couldn't be parsed into an integer")
        return _between(number, low, high)

    return check


def _memory(low: int = 0, high: int = INT64_MAX) -> Check:
    """Bytes with redis.conf's units: k is 1000, kb 1024, and so on."""

    def check(text: str) -> str:
        found = re.fullmatch(r"(\d{1,19})(b|kb?|mb?|gb?|)", text.lower())
        if found is None:
            raise ValueError("argument must be a memory value")
        power = " kmg".index(found[2].strip("b") or " ")
        return _between(int(found[1]) * (1024 if found[2].endswith("b") else 1000) ** power, low, high)

    return check


def _between(number: int, low: int, high: int) -> str:
    if not low <= number <= high:
        raise ValueError(f"argument must be between {low} and {high} inclusive")
    return str(number)


def _one_of(*names: str) -> Check:
    def check(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"argument(s) must be one of the following: {', '.join(names)}")
        return text.lower()

    return check


def _save_points(text: str) -> str:
    numbers = text.split()
    if len(numbers) % 2 or not all(number.isdigit() for number in numbers):
        raise ValueError("Invalid save parameters")
    return " ".join(numbers)


def _buffer_limits(text: str) -> str:
    if len(text.split()) % 4:
        raise ValueError("Wrong number of arguments in buffer limit configuration.")
    return text


def _percentiles(text: str) -> str:
    numbers = text.split()
    if not all(re.fullmatch(r"\d{1,3}(\.\d+)?", number) and float(number) <= 100 for number in numbers):
        raise ValueError("Invalid latency-tracking-info-percentiles parameters")
    return " ".join(numbers)


EVENT_CLASSES = "g$lshzxetdmn"
"""The letters of notify-keyspace-events that say what; A stands for all of them but m and n, K and E say where."""


def _events(text: str) -> str:
    """As Redis reports them: A first, else the classes in its order, then K, E, m and n."""
    if set(text) - set(EVENT_CLASSES + "AKE"):
        raise ValueError("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
    every = EVENT_CLASSES[:-2]
    given = set(text) | (set(every) if "A" in text else set())
    shown = "A" if given >= set(every) else "".join(letter for letter in "g$lshzxetd" if letter in given)
    return shown + "".join(letter for letter in "KEmn" if letter in given)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `default` is what it is until somebody sets it; `read` takes it from the server instead."""

    default: str = ""
    check: Check = _any
    effect: Effect = Effect.IGNORED
    read: Callable[[Server], str] | None = None
    apply: Callable[[Server, str], None] | None = None


LOG_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


def _set_log_level(server: Server, level: str) -> None:
    logging.getLogger("kvredis").setLevel(LOG_LEVELS[level])


def _set_password(server: Server, password: str) -> None:
    server.requirepass = password.encode("utf-8", "surrogateescape")


def _set_clients_max(server: Server, clients: str) -> None:
    server.maxclients = int(clients)


def _fixed(default: str = "", read: Callable[[Server], str] | None = None) -> Setting:
    return Setting(default, effect=Effect.FIXED, read=read)


def _yes_or_no(default: str) -> Setting:
    return Setting(default, _yes_no)


_PACKED = {  # encodings of types that a block store does not have; test suites set them
    name: Setting(default, _number(-INT64_MAX))
    for name, default in {
        "hash-max-listpack-entries": "128",
        "hash-max-listpack-value": "64",
        "list-compress-depth": "0",
        "list-max-listpack-size": "-2",
        "set-max-intset-entries": "512",
        "set-max-listpack-entries": "128",
        "set-max-listpack-value": "64",
        "stream-node-max-entries": "100",
        "zset-max-listpack-entries": "128",
        "zset-max-listpack-value": "64",
    }.items()
}

SETTINGS: dict[str, Setting] = {
    # What the server is made of; maxmemory is the arena.
    "maxmemory": _fixed(read=lambda server: str(server.store.arena.nbytes)),
    "maxmemory-policy": _fixed("allkeys-lru"),
    "databases": _fixed(str(SPACES)),
    "port": _fixed(read=lambda server: str(server.tcp_port)),
    "bind": _fixed(read=lambda server: " ".join(server.options.bind)),
    "unixsocket": _fixed(read=lambda server: server.unixsocket or ""),
    "proto-max-bulk-len": _fixed(read=lambda server: str(server.bulk_bytes_max)),
    "cluster-enabled": _fixed("no"),
    "daemonize": _fixed("no"),
    "supervised": _fixed("no"),
    "io-threads": _fixed("1"),
    "tcp-backlog": _fixed("511"),
    "protected-mode": _fixed("yes"),
    "appendonly": _fixed("no"),
    "appendfilename": _fixed(""),
    "dbfilename": _fixed(""),
    "dir": _fixed(read=lambda server: str(Path.cwd())),
    "logfile": _fixed(""),
    "pidfile": _fixed(""),
    "aclfile": _fixed(""),
    "tls-port": _fixed("0"),
    "timeout": _fixed("0"),
    "replicaof": _fixed(""),
    "enable-debug-command": _fixed("no"),
    # What can be changed while it runs.
    "loglevel": Setting(
        check=_one_of(*LOG_LEVELS),
        effect=Effect.LIVE,
        read=lambda server: server.settings.get("loglevel", server.options.loglevel),
        apply=_set_log_level,
    ),
    "maxclients": Setting(
        check=_number(1, 2**32 - 1),
        effect=Effect.LIVE,
        read=lambda server: str(server.maxclients),
        apply=_set_clients_max,
    ),
    "requirepass": Setting(
        effect=Effect.LIVE,
        read=lambda server: server.requirepass.decode("utf-8", "surrogateescape"),
        apply=_set_password,
    ),
    # What is taken and steers nothing.
    "save": Setting("", _save_points),
    "maxmemory-samples": Setting("5", _number(1, 2**31 - 1)),
    "maxmemory-clients": Setting("0", _memory()),
    "maxmemory-eviction-tenacity": Setting("10", _number(0, 100)),
    "lfu-log-factor": Setting("10", _number(0, 2**31 - 1)),
    "lfu-decay-time": Setting("1", _number(0, 2**31 - 1)),
    "lazyfree-lazy-eviction": _yes_or_no("no"),
    "lazyfree-lazy-expire": _yes_or_no("no"),
    "lazyfree-lazy-server-del": _yes_or_no("no"),
    "lazyfree-lazy-user-del": _yes_or_no("no"),
    "lazyfree-lazy-user-flush": _yes_or_no("no"),
    "active-expire-effort": Setting("1", _number(1, 10)),
    "activedefrag": _yes_or_no("no"),
    "activerehashing": _yes_or_no("yes"),
    "hz": Setting("10", _number(1, 500)),
    "dynamic-hz": _yes_or_no("yes"),
    "appendfsync": Setting("everysec", _one_of("everysec", "always", "no")),
    "stop-writes-on-bgsave-error": _yes_or_no("yes"),
    "tcp-keepalive": Setting("300", _number(0, 2**31 - 1)),
    "slowlog-log-slower-than": Setting("10000", _number(-1)),
    "slowlog-max-len": Setting("128", _number(0)),
    "latency-monitor-threshold": Setting("0", _number(0)),
    "latency-tracking": _yes_or_no("yes"),
    "latency-tracking-info-percentiles": Setting("50 99 99.9", _percentiles),
    "notify-keyspace-events": Setting("", _events),
    "client-query-buffer-limit": Setting("1073741824", _memory(1024 * 1024)),
    "client-output-buffer-limit": Setting(
        "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60", _buffer_limits
    ),
    "acllog-max-len": Setting("128", _number(0)),
    "tracking-table-max-keys": Setting("1000000", _number(0)),
    "repl-backlog-size": Setting("1048576", _memory(1)),
    "min-replicas-to-write": Setting("0", _number(0, 2**31 - 1)),
    **_PACKED,
}


def value_of(server: Server, name: str) -> str:
    """What a setting is now."""
    setting = SETTINGS[name]
    return setting.read(server) if setting.read is not None else server.settings.get(name, setting.default)


@subcommand(
    "config|get",
    arity=-3,
    since="2.0.0",
    complexity="O(N) in the number of settings",
    syntax="parameter [parameter ...]",
    summary="The settings whose names match one of the glob patterns.",
    **_ADMIN,
)
def config_get(session: Session, args: list[bytes]) -> Reply:
    """CONFIG GET pattern [pattern ...]; each setting once, and under its name as it was asked for if that is exact."""
    shown: dict[str, bytes] = {}
    for arg in args[2:]:
        fits = matcher(arg.lower())
        exact = not set(arg) & set(b"*?[")
        for name in filter(lambda name: fits(name.encode()), SETTINGS):
            shown.setdefault(name, arg if exact else name.encode())
    values = {name: value_of(session.server, name).encode("utf-8", "surrogateescape") for name in shown}
    return map_reply(session, [(bulk(shown[name]), bulk(value)) for name, value in values.items()])


@subcommand(
    "config|set",
    arity=-4,
    since="2.0.0",
    tips="request_policy:all_nodes response_policy:all_succeeded",
    complexity="O(N) in the number of settings given",
    syntax="parameter value [parameter value ...]",
    summary="Change settings: all of those named, or none.",
    **_ADMIN,
)
def config_set(session: Session, args: list[bytes]) -> Reply:
    """CONFIG SET name value [name value ...]."""
    if len(args) % 2:
        return SYNTAX_ERROR
    pairs = [(arg, SETTINGS.get(arg.lower().decode("latin-1"))) for arg in args[2::2]]
    for written, setting in pairs:
        if setting is None:
            return error(b"ERR Unknown option or number of arguments for CONFIG SET - '%b'" % written.split(b"\0")[0])
    checked: dict[str, str] = {}
    for (written, setting), value in zip(pairs, args[3::2], strict=True):
        assert setting is not None
        name = written.lower().decode("latin-1")
        if setting.effect is Effect.FIXED:
            return _failed(written, "can't set immutable config")
        if name in checked:
            return _failed(written, "duplicate parameter")
        checked[name] = value.decode("utf-8", "surrogateescape")
    for name, text in checked.items():
        try:
            checked[name] = SETTINGS[name].check(text)
        except ValueError as wrong:
            return _failed(name.encode(), str(wrong))
    for name, text in checked.items():
        session.server.settings[name] = text
        apply = SETTINGS[name].apply
        if apply is not None:
            apply(session.server, text)
    return OK


@subcommand(
    "config|resetstat", arity=2, since="2.0.0", summary="Set the counters that INFO shows back to zero.", **_ADMIN
)
def config_resetstat(session: Session, args: list[bytes]) -> Reply:
    """CONFIG RESETSTAT."""
    session.server.stats.reset()
    session.store.stats.reset()
    return OK


@subcommand("config|rewrite", arity=2, since="2.8.0", summary="Write the settings to the configuration file.", **_ADMIN)
def config_rewrite(session: Session, args: list[bytes]) -> Reply:
    """CONFIG REWRITE: settings made at run time are not written anywhere, so there is never a file to rewrite."""
    return error("ERR The server is running without a config file")


@subcommand("config|help", arity=2, flags="loading stale", acl="slow", since="5.0.0", summary="Print this help.")
def config_help(session: Session, args: list[bytes]) -> Reply:
    """CONFIG HELP."""
    return help_reply("config")


def _failed(name: bytes, reason: str) -> bytes:
    return error(b"ERR CONFIG SET failed (possibly related to argument '%b') - %b" % (name, reason.encode()))
