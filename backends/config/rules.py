"""What must fit together across keys, once every source has been read: each rule is a function over what was found.

A rule adds an error for what cannot be, and a line of warning for what can and will surprise.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvredis.storage.errors import ConfigError
from kvredis.storage.eviction.base import POLICIES

from .extra_config import apply_entries
from .sources import Found

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
