"""The settings that tools ask a Redis for, each with its true value here, and what happens when one is changed.

SETTINGS is the one table. A setting has one of four effects: LIVE is read by the code that it steers the moment it
changes; FIXED was decided at start, and CONFIG SET says so in Redis' words, as for PROTECTED ones; IGNORED is checked,
kept and reported so that tools and test suites which set it go on, and steers nothing, because what it is for does not
exist here. Where the server keeps a value in a form of its own, `read` takes it from there, and it is kept once.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvredis.server.client.tracking import KEYS_MAX_DEFAULT
from kvredis.server.commands import keyspace_events
from kvredis.server.context import Context
from kvredis.server.net.tls import OPTION
from kvredis.server.protocol.arguments import INT64_MAX, parse_integer
from kvredis.server.shm.attach import LEASE_MS_MAX
from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction.base import REDIS_POLICIES, make_policy, redis_name
from kvredis.storage.index import SPACES

# ---- checks ----------------------------------------------------------------------------------------------------------
#
# How a setting's value may be written: from what CONFIG SET was given to how CONFIG GET reports it.
#
# A check raises ValueError with the words that Redis uses for what is wrong; clients and test suites match on them.


Check = Callable[[str], str]
"""From what the user wrote to how Redis would report it; ValueError with Redis' words for what is wrong."""

Limits = tuple[int, int, int]
"""Hard limit and soft limit of an output buffer in bytes, 0 being none, and the seconds that the soft one may last."""

LIMIT_CLASSES = {"normal": "normal", "slave": "replica", "replica": "replica", "pubsub": "pubsub"}
"""The kinds of client that have limits of their own, by the names that the setting takes."""


def anything(text: str) -> str:
    """Any text."""
    return text


def yes_no(text: str) -> str:
    """A switch."""
    if text.lower() not in ("yes", "no"):
        raise ValueError("argument must be 'yes' or 'no'")
    return text.lower()


def number(low: int, high: int = INT64_MAX) -> Check:
    """A whole number within bounds."""

    def check(text: str) -> str:
        return _between(_integer(text), low, high)

    return check


def clamped(low: int, high: int) -> Check:
    """A whole number that is brought within bounds instead of being refused: `hz`."""

    def check(text: str) -> str:
        return str(min(max(_integer(text), low), high))

    return check


def memory(low: int = 0, high: int = INT64_MAX) -> Check:
    """Bytes with redis.conf's units: k is 1000, kb 1024, and so on."""

    def check(text: str) -> str:
        nbytes = parse_memory(text)
        if nbytes is None:
            raise ValueError("argument must be a memory value")
        return _between(nbytes, low, high)

    return check


def memory_or_share(text: str) -> str:
    """Bytes, or a percentage: maxmemory-clients."""
    if not text.endswith("%"):
        return memory()(text)
    share = parse_integer(text[:-1].encode())
    if share is None or share < 0:
        raise ValueError("argument must be a memory or percent value")
    if share > 100:
        raise ValueError("percentage argument must be less or equal to 100")
    return text


def parse_memory(text: str) -> int | None:
    """A number of bytes as redis.conf writes it."""
    found = re.fullmatch(r"(\d{1,19})(b|kb?|mb?|gb?|)", text.lower(), re.ASCII)
    if found is None:
        return None
    nbytes = int(found[1])
    power = " kmg".index(found[2].strip("b") or " ")
    unit: int = 1024 if found[2].endswith("b") else 1000
    for _ in range(power):
        nbytes *= unit
    return nbytes


def one_of(*names: str) -> Check:
    """One of several words."""

    def check(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"argument(s) must be one of the following: {', '.join(names)}")
        return text.lower()

    return check


def seconds(text: str) -> str:
    """A time in seconds, with or without a fraction, at most a day: the configuration file takes no more, and CONFIG
    REWRITE may write it there."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) is None or not 0 < float(text) <= 86_400:
        raise ValueError("argument must be a number of seconds above 0, at most 86400")
    return f"{float(text):g}"


def save_points(text: str) -> str:
    """Pairs of seconds and changes."""
    numbers = text.split()
    if len(numbers) % 2 or not all(re.fullmatch(r"[0-9]{1,18}", each) for each in numbers):
        raise ValueError("Invalid save parameters")
    return " ".join(numbers)


def buffer_limits(text: str) -> str:
    """`class hard soft seconds` for one class of clients or more."""
    parse_limits(text)
    return text


def parse_limits(text: str) -> dict[str, Limits]:
    """The limits that a value of client-output-buffer-limit names, by class."""
    words = text.split()
    if len(words) % 4:
        raise ValueError("Wrong number of arguments in buffer limit configuration.")
    limits: dict[str, Limits] = {}
    for name, hard, soft, lasting in zip(*[iter(words)] * 4, strict=True):
        if name.lower() not in LIMIT_CLASSES:
            raise ValueError("Invalid client class specified in buffer limit configuration.")
        sizes = [parse_memory(hard), parse_memory(soft), parse_integer(lasting.encode())]
        known = [size for size in sizes if size is not None and 0 <= size <= INT64_MAX]
        if len(known) != len(sizes):
            raise ValueError("Error in hard, soft or soft_seconds setting in buffer limit configuration.")
        limits[LIMIT_CLASSES[name.lower()]] = (known[0], known[1], known[2])
    return limits


def limits_text(limits: dict[str, Limits]) -> str:
    """The limits as CONFIG GET shows them, with Redis' older word for replicas."""
    shown = (("normal", "normal"), ("slave", "replica"), ("pubsub", "pubsub"))
    return " ".join(" ".join(map(str, (name, *limits[kind]))) for name, kind in shown)


def percentiles(text: str) -> str:
    """Percentages, each between 0 and 100."""
    numbers = text.split()
    if not all(re.fullmatch(r"-?\d{1,9}(\.\d{1,15})?", each, re.ASCII) for each in numbers):
        raise ValueError("Invalid latency-tracking-info-percentiles parameters")
    if not all(0 <= float(each) <= 100 for each in numbers):
        raise ValueError("latency-tracking-info-percentiles parameters should sit between [0.0,100.0]")
    return " ".join(repr(float(each)).removesuffix(".0") for each in numbers)


def _integer(text: str) -> int:
    found = parse_integer(text.encode("utf-8", "surrogateescape"))
    if found is None:
        raise ValueError("argument couldn't be parsed into an integer")
    return found


def _between(found: int, low: int, high: int) -> str:
    if not low <= found <= high:
        raise ValueError(f"argument must be between {low} and {high} inclusive")
    return str(found)


# ---- effects ---------------------------------------------------------------------------------------------------------
#
# What a changed setting does: each function brings one value, checked before, into effect on a running server.
#
# ValueError with Redis' words when that cannot be done, and then nothing has changed.


FILES_BESIDE_CLIENTS = 32
"""Descriptors that the server needs for itself: Redis' number."""

LOG_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


def set_log_level(server: Context, level: str) -> None:
    """loglevel, for this program's own loggers."""
    logging.getLogger("kvredis").setLevel(LOG_LEVELS[level])


def set_password(server: Context, password: str) -> None:
    """requirepass: the default user's one password, or none."""
    server.acl.set_requirepass(password.encode("utf-8", "surrogateescape"))
    server.reconsider()


def set_clients_max(server: Context, clients: str) -> None:
    """As many as asked for, if the process may have that many files open."""
    needed = int(clients) + FILES_BESIDE_CLIENTS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed > soft:
        if hard != resource.RLIM_INFINITY and needed > hard:
            raise ValueError(
                "The operating system is not able to handle the specified number of clients, "
                f"try with {hard - FILES_BESIDE_CLIENTS}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    server.maxclients = int(clients)


def set_clients_bytes(server: Context, limit: str) -> None:
    """maxmemory-clients."""
    server.client_memory.limit = limit


def set_protected_mode(server: Context, switch: str) -> None:
    """protected-mode."""
    server.protected_mode = switch == "yes"


def set_bulk_bytes_max(server: Context, nbytes: str) -> None:
    """proto-max-bulk-len, for those who are connected as well."""
    server.bulk_bytes_max = int(nbytes)
    server.reconsider()


def set_query_bytes_max(server: Context, nbytes: str) -> None:
    """client-query-buffer-limit, for those who are connected as well."""
    server.query_bytes_max = int(nbytes)
    server.reconsider()


def set_output_limits(server: Context, text: str) -> None:
    """Classes that are not named keep what they have."""
    server.output_limits = {**server.output_limits, **parse_limits(text)}
    server.reconsider()


def set_idle_timeout(server: Context, seconds: str) -> None:
    """timeout."""
    server.idle_timeout_s = int(seconds)


def set_keepalive(server: Context, seconds: str) -> None:
    """For those who connect from now on, as in Redis."""
    server.listeners.keepalive_s = int(seconds)


def set_body_timeout(server: Context, seconds: str) -> None:
    """body-timeout."""
    server.body_timeout_s = float(seconds)


def set_lane_limit(server: Context, milliseconds: str) -> None:
    """lane-lease-ms, for those who attach from now on: the others count by what they were told."""
    server.shm.lease_ms = int(milliseconds)


def set_policy(server: Context, policy: str) -> None:
    """maxmemory-policy: which entries leave for what is new, if any may."""
    server.store.set_eviction(None if policy == "noeviction" else make_policy(policy))


def set_maxmemory(server: Context, nbytes: str) -> None:
    """maxmemory: up to the arena, which was made at the start; 0 means all of it, since Redis' "no limit" is more than
    there is. What is held beyond it leaves in the loop's next turns."""
    arena_bytes = server.store.arena.nbytes
    if int(nbytes) > arena_bytes:
        raise ValueError(f"argument must be at most {arena_bytes}, the memory that was set aside at the start")
    server.store.set_bound(int(nbytes))
    server.shrink()


def set_slow_threshold(server: Context, microseconds: str) -> None:
    """slowlog-log-slower-than."""
    server.slowlog.set_threshold(int(microseconds))
    server.reconsider()


def set_tracking_keys(server: Context, keys: str) -> None:
    """tracking-table-max-keys; those beyond it leave now."""
    server.tracking.keys_max = int(keys)
    server.tracking.limit()


def set_slow_entries(server: Context, entries: str) -> None:
    """slowlog-max-len."""
    server.slowlog.entries_max = int(entries)
    server.slowlog.trim()


def set_latency_threshold(server: Context, milliseconds: str) -> None:
    """latency-monitor-threshold."""
    server.latency.threshold_ms = int(milliseconds)
    server.reconsider()


def set_latency_tracking(server: Context, switch: str) -> None:
    """Times are always counted, which costs less than asking; what is shown begins anew."""
    server.stats.forget_times()


def set_acl_log(server: Context, entries: str) -> None:
    """acllog-max-len."""
    log = server.acl.log.entries
    while len(log) > int(entries):
        log.pop()


MIB = 1024 * 1024
INT32_MAX = 2**31 - 1

IMMUTABLE = "can't set immutable config"
PROTECTED = "can't set protected config"

Read = Callable[[Context], str]
Apply = Callable[[Context, str], None]
"""Bring a value into effect; ValueError with Redis' words when that cannot be done, and then nothing has changed."""


class Effect(Enum):
    """What CONFIG SET does to a setting."""

    LIVE = "live"
    FIXED = "fixed"
    PROTECTED = "protected"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `default` is what it is until an operator sets it; `read` takes it from the server instead."""

    default: str = ""
    check: Check = anything
    effect: Effect = Effect.IGNORED
    read: Read | None = None
    apply: Apply | None = None


class SettingError(ValueError):
    """A setting that cannot be what was asked for; the text is Redis'."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


def value_of(server: Context, name: str) -> str:
    """What a setting is now."""
    setting = SETTINGS[name]
    return setting.read(server) if setting.read is not None else server.settings.get(name, setting.default)


def checked(name: str, text: str) -> str:
    """`text` as the setting would report it. SettingError for an unknown or fixed one and for what it does not take."""
    setting = SETTINGS.get(name)
    if setting is None:
        raise SettingError(name, "there is no setting of this name")
    if setting.effect in (Effect.FIXED, Effect.PROTECTED):
        raise SettingError(name, IMMUTABLE if setting.effect is Effect.FIXED else PROTECTED)
    try:
        return setting.check(text)
    except ValueError as wrong:
        raise SettingError(name, str(wrong)) from wrong


def change(server: Context, wanted: Mapping[str, str]) -> None:
    """Set all of `wanted`, or nothing: SettingError names the one that was in the way. Names are those of SETTINGS.

    `server.settings` then holds what was asked for, which is also what CONFIG REWRITE writes.
    """
    texts = {name: checked(name, text) for name, text in wanted.items()}
    done: list[tuple[str, str | None, str]] = []
    for name, text in texts.items():
        before = value_of(server, name)
        done.append((name, server.settings.get(name), before))
        server.settings[name] = text
        try:
            _apply(server, name, text)
        except ValueError as wrong:
            for changed, kept, value in reversed(done):
                if kept is None:
                    del server.settings[changed]
                else:
                    server.settings[changed] = kept
                if changed != name:  # the one that failed has changed nothing
                    _apply(server, changed, value)
            raise SettingError(name, str(wrong)) from wrong


def begin(server: Context) -> None:
    """Bring into effect what the server was started with and does not read by itself. ConfigError names what is bad."""
    options = server.options
    own = {
        "client-output-buffer-limit": options.client_output_buffer_limit,
        "maxmemory-policy": "noeviction"
        if options.maxmemory_policy == "noeviction"
        else redis_name(server.store.policy),
        "notify-keyspace-events": options.notify_keyspace_events,
    }
    further = {name.lower(): str(text) for name, text in options.settings.items()}
    try:
        change(server, own)
        for name in own:
            del server.settings[name]  # no client has set it since the start
        change(server, further)
    except SettingError as wrong:
        shown = "***" if "pass" in wrong.name else (own | further)[wrong.name]
        key = f"settings.{wrong.name}" if wrong.name in further else wrong.name
        raise ConfigError(key, shown, OPTION, wrong.reason) from wrong


def _apply(server: Context, name: str, text: str) -> None:
    apply = SETTINGS[name].apply
    if apply is not None:
        apply(server, text)


def _working_folder() -> str:
    """Where the process stands, "" if another process has removed that folder: no reason to fail CONFIG GET *."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _policy(text: str) -> str:
    """A policy of Redis or of ours; the error of another names Redis' alone, in its words."""
    if text.lower() in REDIS_POLICIES:
        return text.lower()
    return one_of(
        "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl",
        "allkeys-lru", "allkeys-lfu", "allkeys-random", "noeviction",
    )(text)  # fmt: skip


def _live(check: Check, apply: Apply | None, read: Read | None = None, default: str = "") -> Setting:
    return Setting(default, check, Effect.LIVE, read, apply)


def _fixed(default: str = "", read: Read | None = None) -> Setting:
    return Setting(default, effect=Effect.FIXED, read=read)


def _ignored(check: Check, **defaults: str) -> dict[str, Setting]:
    """Settings without an effect, by their names with underscores."""
    return {name.replace("_", "-"): Setting(default, check) for name, default in defaults.items()}


def _made_of() -> dict[str, Setting]:
    """What the server is made of."""
    return {
        "databases": _fixed(str(SPACES)),
        "port": _fixed(read=lambda server: str(server.tcp_port)),
        "bind": _fixed(read=lambda server: " ".join(server.options.bind)),
        "unixsocket": _fixed(read=lambda server: server.unixsocket or ""),
        "unixsocketperm": _fixed(read=lambda server: server.options.unixsocketperm or "0"),
        "tls-port": _fixed(read=lambda server: str(server.listeners.tls_port)),
        "metrics-port": _fixed(read=lambda server: "0" if server.http is None else str(server.http.port)),
        "tls-cert-file": _fixed(read=lambda server: server.options.tls_cert_file or ""),
        "tls-key-file": _fixed(read=lambda server: server.options.tls_key_file or ""),
        "tls-ca-cert-file": _fixed(read=lambda server: server.options.tls_ca_cert_file or ""),
        "tls-auth-clients": _fixed(read=lambda server: server.options.tls_auth_clients),
        "tls-protocols": _fixed(read=lambda server: " ".join(server.options.tls_protocols)),
        "tls-ciphers": _fixed(read=lambda server: server.options.tls_ciphers or ""),
        "io-threads": _fixed(read=lambda server: str(server.io_pool.threads)),
        "io-threads-do-reads": _fixed(read=lambda server: "yes" if server.io_pool.threads > 1 else "no"),
        "lane": _fixed(read=lambda server: server.options.lane),
        "aclfile": _fixed(read=lambda server: server.options.aclfile or ""),
        "cluster-enabled": _fixed(read=lambda server: "no" if server.cluster is None else "yes"),
        "enable-debug-command": _fixed(read=lambda server: server.options.enable_debug_command),
        "dir": Setting(effect=Effect.PROTECTED, read=lambda server: _working_folder()),
        "dbfilename": Setting(effect=Effect.PROTECTED),
        **{
            name: _fixed(default)
            for name, default in {
                "acl-pubsub-default": "resetchannels", "always-show-logo": "no", "appenddirname": "",
                "appendfilename": "", "appendonly": "no", "cluster-require-full-coverage": "no", "daemonize": "no",
                "enable-module-command": "no", "enable-protected-configs": "no",
                "logfile": "", "pidfile": "", "replicaof": "", "shutdown-timeout": "10",
                "slaveof": "", "supervised": "no", "syslog-enabled": "no", "tcp-backlog": "511",
            }.items()
        },
    }  # fmt: skip


def _changeable() -> dict[str, Setting]:
    """What can be changed while it runs."""
    return {
        "loglevel": _live(
            one_of(*LOG_LEVELS),
            set_log_level,
            lambda server: server.settings.get("loglevel", server.options.loglevel),
        ),
        "requirepass": _live(
            anything,
            set_password,
            lambda server: server.settings.get("requirepass", server.options.requirepass),
        ),
        "maxclients": _live(number(1, 2**32 - 1), set_clients_max, lambda server: str(server.maxclients)),
        "protected-mode": _live(yes_no, set_protected_mode, lambda server: "yes" if server.protected_mode else "no"),
        "maxmemory": _live(memory(), set_maxmemory, lambda server: str(server.store.limit_bytes)),
        "maxmemory-clients": _live(memory_or_share, set_clients_bytes, lambda server: server.client_memory.limit),
        "maxmemory-policy": _live(
            _policy,
            set_policy,
            lambda server: redis_name(server.store.policy) if server.store.evicts else "noeviction",
        ),
        "timeout": _live(number(0, INT32_MAX), set_idle_timeout, lambda server: str(server.idle_timeout_s)),
        "tcp-keepalive": _live(number(0, INT32_MAX), set_keepalive, lambda server: str(server.listeners.keepalive_s)),
        "body-timeout": _live(seconds, set_body_timeout, lambda server: f"{server.body_timeout_s:g}"),
        "lane-lease-ms": _live(number(1, LEASE_MS_MAX), set_lane_limit, lambda server: str(server.shm.lease_ms)),
        "proto-max-bulk-len": _live(memory(MIB), set_bulk_bytes_max, lambda server: str(server.bulk_bytes_max)),
        "client-query-buffer-limit": _live(
            memory(MIB), set_query_bytes_max, lambda server: str(server.query_bytes_max)
        ),
        "client-output-buffer-limit": _live(
            buffer_limits, set_output_limits, lambda server: limits_text(server.output_limits)
        ),
        "slowlog-log-slower-than": _live(
            number(-1), set_slow_threshold, lambda server: str(server.slowlog.threshold_us)
        ),
        "slowlog-max-len": _live(number(0), set_slow_entries, lambda server: str(server.slowlog.entries_max)),
        "latency-monitor-threshold": _live(
            number(0), set_latency_threshold, lambda server: str(server.latency.threshold_ms)
        ),
        "latency-tracking": _live(yes_no, set_latency_tracking, default="yes"),
        "latency-tracking-info-percentiles": _live(percentiles, None, default="50 99 99.9"),
        "notify-keyspace-events": _live(
            keyspace_events.normalize,
            keyspace_events.listen_for,
            lambda server: server.settings.get(
                "notify-keyspace-events", keyspace_events.normalize(server.options.notify_keyspace_events)
            ),
        ),
        "unix-splice": _live(
            one_of("asked", "yes", "no"),
            lambda server, mode: server.splicing.set_mode(mode),
            lambda server: server.splicing.mode,
        ),
        "tracking-table-max-keys": _live(number(0), set_tracking_keys, default=str(KEYS_MAX_DEFAULT)),
        "acllog-max-len": _live(number(0), set_acl_log, default="128"),
    }


def _without_effect() -> dict[str, Setting]:
    """What is taken and steers nothing."""
    return {
        "save": Setting("", save_points),
        "hz": Setting("10", clamped(1, 500)),
        "appendfsync": Setting("everysec", one_of("everysec", "always", "no")),
        "oom-score-adj": Setting("no", one_of("no", "yes", "relative", "absolute")),
        **_ignored(number(1, INT32_MAX), maxmemory_samples="5", active_defrag_cycle_max="25"),
        **_ignored(
            number(0, INT32_MAX), lfu_log_factor="10", lfu_decay_time="1", min_replicas_to_write="0",
            min_replicas_max_lag="10", repl_diskless_sync_delay="5", repl_timeout="60", repl_ping_replica_period="10",
            replica_priority="100", auto_aof_rewrite_percentage="100", repl_backlog_ttl="3600",
        ),
        **_ignored(number(0), busy_reply_threshold="5000", lua_time_limit="5000"),
        **_ignored(number(0, 100), maxmemory_eviction_tenacity="10"),
        **_ignored(number(1, 10), active_expire_effort="1"),
        **_ignored(memory(1), repl_backlog_size="1048576"),
        **_ignored(memory(), auto_aof_rewrite_min_size="67108864", hll_sparse_max_bytes="3000"),
        **_ignored(
            yes_no, lazyfree_lazy_eviction="no", lazyfree_lazy_expire="no", lazyfree_lazy_server_del="no",
            lazyfree_lazy_user_del="no", lazyfree_lazy_user_flush="no", activedefrag="no", activerehashing="yes",
            dynamic_hz="yes", stop_writes_on_bgsave_error="yes", rdbcompression="yes", rdbchecksum="yes",
            no_appendfsync_on_rewrite="no", repl_diskless_sync="yes", repl_disable_tcp_nodelay="no",
            replica_read_only="yes", replica_serve_stale_data="yes", aof_use_rdb_preamble="yes",
        ),
        **_ignored(  # encodings of types that a block store does not have; test suites set them
            number(-(2**63)), hash_max_listpack_entries="128", hash_max_listpack_value="64", list_compress_depth="0",
            list_max_listpack_size="-2", set_max_intset_entries="512", set_max_listpack_entries="128",
            set_max_listpack_value="64", stream_node_max_entries="100", zset_max_listpack_entries="128",
            zset_max_listpack_value="64",
        ),
    }  # fmt: skip


SETTINGS: dict[str, Setting] = {**_made_of(), **_changeable(), **_without_effect()}
