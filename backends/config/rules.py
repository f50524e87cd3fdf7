"""What must fit together across keys, once every source has been read: each rule is a function over what was found.

A rule adds an error for what cannot be, and a line of warning for what can and will surprise.

The first rules are about the entries of LMCache's extra_config: each has an effect, is refused, or is said to have none
here. An entry that means what a key of ours means stands for it while the key is not given: its value, checked, becomes
the key's, with an origin that names the entry. The others shape the connection to a server (url.py). What LMCache reads
past its configuration, from variables of its connectors, joins as entries of the lowest precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction.base import POLICIES

from . import parsers
from .lmcache import FOREIGN_ENTRIES, FOREIGN_ENTRY_PREFIXES
from .parsers import Parser
from .sources import NO_MEANING, Found, nearest
from .url import CONNECTION_ENTRIES, SERVICE_DEFAULT, connections_entry, merged_url, parse_remote, shape_of

NAME: Final = "extra_config"
CONNECTIONS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """How an entry is read, and the key that it stands for; if none, it is about the connection to a server."""

    parse: Parser
    stands_for: str = ""


ENTRIES: Final[Mapping[str, Entry]] = {
    "use_odirect": Entry(parsers.flag, "disk_direct"),
    "disk_io_threads": Entry(parsers.whole(1, 64), "disk_io_threads"),
    "remote_storage_plugin.redis.redis_url": Entry(parsers.optional(parsers.server_url, "a URL"), "remote_url"),
    "redis_url": Entry(parsers.optional(parsers.server_url, "a URL"), "remote_url"),
    "max_load_chunks": Entry(parsers.whole(1), "max_load_chunks"),
    "verify_blocks": Entry(parsers.flag, "verify_blocks"),
    "kvredis_bandwidth_gb_s": Entry(parsers.gb_per_s_or_none, "bandwidth_gb_s"),
    "request_timeout": Entry(parsers.seconds, "blocking_timeout_secs"),
    "connection_timeout": Entry(parsers.seconds),
    "username": Entry(parsers.text),
    "password": Entry(parsers.text),
    "valkey_username": Entry(parsers.text),
    "valkey_password": Entry(parsers.text),
    "valkey_database": Entry(parsers.whole(0)),
    "valkey_mode": Entry(parsers.choice("standalone", "cluster")),
    "tls_enable": Entry(parsers.flag),
    "redis_service_name": Entry(parsers.text),
    "redis_timeout": Entry(parsers.seconds),
    **dict.fromkeys(CONNECTION_ENTRIES, Entry(parsers.whole(1, CONNECTIONS_MAX))),
}

# Variable -> entry; the connectors of these schemes read them.
_RESP_VARIABLES: Final = {"LMCACHE_RESP_USERNAME": "username", "LMCACHE_RESP_PASSWORD": "password"}
_SENTINEL_VARIABLES: Final = {"REDIS_SERVICE_NAME": "redis_service_name", "REDIS_TIMEOUT": "redis_timeout"}
_CLUSTER_VARIABLES: Final = {"REDIS_TIMEOUT": "redis_timeout"}


def apply_entries(found: Found, env: Mapping[str, str]) -> None:
    """Check all entries, let them stand for keys, and say of each that has no effect why."""
    for name in [name for name, value in found.get(NAME).items() if value is not None]:
        _check(found, name)
    for name, entry in ENTRIES.items():
        if entry.stands_for and found.get(NAME).get(name) is not None:
            _stand(found, name, entry.stands_for)
    _take_variables(found, env)
    _merge(found)


def _source(found: Found, name: str) -> str:
    return found.entry_origin[f"{NAME}.{name}"]


def _remark(found: Found, name: str, text: str, near: str | None = None) -> None:
    found.remark(_source(found, name), f"{NAME}.{name}", f"{NAME}.{name}: {text}", near)


def _check(found: Found, name: str) -> None:
    value, key = found.values[NAME][name], f"{NAME}.{name}"
    if name in ENTRIES:
        try:
            found.values[NAME][name] = ENTRIES[name].parse(value, key, _source(found, name))
        except ConfigError as error:
            found.values[NAME][name] = None
            found.errors.append(ConfigError(key, parsers.shown(error.value, name), error.source, error.reason))
    elif name in FOREIGN_ENTRIES or name.startswith(FOREIGN_ENTRY_PREFIXES):
        _remark(found, name, NO_MEANING)
    elif name in found.keys:
        _remark(found, name, f"is a key of its own and has no effect under {NAME}")
    else:
        _remark(found, name, "unknown entry", nearest(name, ENTRIES))


def _stand(found: Found, name: str, stands_for: str) -> None:
    """Let an entry be the key's value, unless that is given or an earlier entry is."""
    value = found.values[NAME][name]
    if stands_for not in found.values:
        found.take(found.keys[stands_for], value, f"{_source(found, name)} {NAME}.{name}")
    elif found.values[stands_for] != value:
        _remark(found, name, f"{stands_for} is given ({found.origin[stands_for]}) and wins")


def _take_variables(found: Found, env: Mapping[str, str]) -> None:
    """Take the variables that the connector of remote_url's scheme would read."""
    url = found.get("remote_url") or ""
    variables = {"sentinel": _SENTINEL_VARIABLES, "cluster": _CLUSTER_VARIABLES}.get(shape_of(url), {})
    if url.lower().startswith("resp://"):
        variables = _RESP_VARIABLES
    for variable in sorted(_RESP_VARIABLES.keys() & env.keys() - variables.keys()):
        found.remark(f"env {variable}", variable, "read for a remote_url of resp:// alone")
    for variable, name in variables.items():
        text = parsers.unquote(env.get(variable, ""))
        if text and found.get(NAME).get(name) is None:
            found.values[NAME] = {**found.get(NAME), name: text}
            found.entry_origin[f"{NAME}.{name}"] = f"env {variable}"
            found.origin.setdefault(NAME, f"env {variable}")
            _check(found, name)
        elif text:
            found.remark(f"env {variable}", variable, f"{NAME}.{name} is given ({_source(found, name)}) and wins")


def _merge(found: Found) -> None:
    """Check the URL that all of it makes, and say which entries have added nothing."""
    url, entries = found.get("remote_url"), found.get(NAME)
    given = {name for name in ENTRIES if entries.get(name) is not None}
    if url is None:
        if not any(error.key == "remote_url" for error in found.errors):
            for name in sorted(given):
                if ENTRIES[name].stands_for in ("", "blocking_timeout_secs"):
                    _remark(found, name, "has no effect without remote_url")
        return
    merged, unused = merged_url(url, entries)
    for name, reason in unused.items():
        _remark(found, name, reason)
    first = connections_entry(url, entries)
    for name in CONNECTION_ENTRIES:
        if first is not None and name in given and entries[name] != entries[first]:
            _remark(found, name, f"{first} is given and wins")
    if {"connection_timeout", "redis_timeout"} <= given:
        _remark(found, "redis_timeout", "connection_timeout is given and wins")
    source = found.origin["remote_url"]
    try:
        parse_remote(merged, key="remote_url", source=source)
    except ConfigError as error:
        found.errors.append(error)
    if shape_of(merged) == "sentinel" and not merged.partition("://")[2].partition("/")[2]:
        text = f"remote_url: names no service: {SERVICE_DEFAULT} is asked for, where LMCache asks for redismaster"
        found.remark(source, "remote_url", text)


ALLKEYS = {f"allkeys-{name.lower()}": name for name in POLICIES}
"""What redis.conf calls a cache_policy, ours included."""


def check_all(found: Found, env: Mapping[str, str]) -> None:
    """Apply every rule; those about single entries of extra_config first, for they may stand for keys."""
    apply_entries(found, env)
    _disk(found)
    _policies(found)
    _hash_algorithm(found, env)
    _cluster(found)


def _disk(found: Found) -> None:
    """Half a disk tier: a directory without a size, or a size without a directory."""
    names = ("local_disk", "max_local_disk_size")
    if any(error.key in names for error in found.errors):
        return  # the half that is missing may be the one that could not be read
    given = [name for name in names if found.get(name)]
    if len(given) == 1:
        missing = names[names.index(given[0]) - 1]
        found.remark(found.origin[given[0]], given[0], f"{given[0]}: there is no disk tier without {missing}")


def _policies(found: Found) -> None:
    """cache_policy and maxmemory_policy may both be given, and must not name different ones."""
    given = found.values.get("cache_policy")
    policy = found.values.get("maxmemory_policy", "")
    if given is not None and policy not in ("", "noeviction") and ALLKEYS.get(policy) != given:
        reason = f"{found.origin['cache_policy']} says cache_policy: {given}"
        found.errors.append(ConfigError("maxmemory_policy", policy, found.origin["maxmemory_policy"], reason))


def _hash_algorithm(found: Found, env: Mapping[str, str]) -> None:
    """Python's own hash() gives the same keys in two processes only if both were started with one seed."""
    name = "pre_caching_hash_algorithm"
    seed = env.get("PYTHONHASHSEED", "")
    if found.get(name) == "builtin" and not (seed.isascii() and seed.isdigit()):
        reason = "differs from process to process unless PYTHONHASHSEED is set to a number; sha256_cbor never does"
        found.errors.append(ConfigError(name, "builtin", found.origin[name], reason))


def _cluster(found: Found) -> None:
    if found.get("cluster_node") and not found.get("cluster_topology"):
        text = "cluster_node: names a node of no file without cluster_topology"
        found.remark(found.origin["cluster_node"], "cluster_node", text)
