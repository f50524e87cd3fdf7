"""What a changed setting does: each function brings one value, checked before, into effect on a running server.

ValueError with Redis' words when that cannot be done, and then nothing has changed.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING

from kvredis.storage.eviction.base import make_policy

from .checks import parse_limits

if TYPE_CHECKING:
    from kvredis.server.server import Server

FILES_BESIDE_CLIENTS = 32
"""Descriptors that the server needs for itself: Redis' number."""

LOG_LEVELS = {"debug": logging.DEBUG, "verbose": logging.INFO, "notice": logging.INFO, "warning": logging.WARNING}


def set_log_level(server: Server, level: str) -> None:
    """loglevel, for this program's own loggers."""
    logging.getLogger("kvredis").setLevel(LOG_LEVELS[level])


def set_password(server: Server, password: str) -> None:
    """requirepass: the default user's one password, or none."""
    server.acl.set_requirepass(password.encode("utf-8", "surrogateescape"))
    server.reconsider()


def set_clients_max(server: Server, clients: str) -> None:
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


def set_clients_bytes(server: Server, limit: str) -> None:
    """maxmemory-clients."""
    server.client_memory.limit = limit


def set_protected_mode(server: Server, switch: str) -> None:
    """protected-mode."""
    server.protected_mode = switch == "yes"


def set_bulk_bytes_max(server: Server, nbytes: str) -> None:
    """proto-max-bulk-len, for those who are connected as well."""
    server.bulk_bytes_max = int(nbytes)
    server.reconsider()


def set_query_bytes_max(server: Server, nbytes: str) -> None:
    """client-query-buffer-limit, for those who are connected as well."""
    server.query_bytes_max = int(nbytes)
    server.reconsider()


def set_output_limits(server: Server, text: str) -> None:
    """Classes that are not named keep what they have."""
    server.output_limits = {**server.output_limits, **parse_limits(text)}
    server.reconsider()


def set_idle_timeout(server: Server, seconds: str) -> None:
    """timeout."""
    server.idle_timeout_s = int(seconds)


def set_keepalive(server: Server, seconds: str) -> None:
    """For those who connect from now on, as in Redis."""
    server.listeners.keepalive_s = int(seconds)


def set_body_timeout(server: Server, seconds: str) -> None:
    """body-timeout."""
    server.body_timeout_s = float(seconds)


def set_lane_limit(server: Server, milliseconds: str) -> None:
    """lane-lease-ms, for those who attach from now on: the others count by what they were told."""
    server.lane.lease_ms = int(milliseconds)


def set_policy(server: Server, policy: str) -> None:
    """maxmemory-policy: who leaves for what is new, if anyone."""
    server.store.set_eviction(None if policy == "noeviction" else make_policy(policy))


def set_maxmemory(server: Server, nbytes: str) -> None:
    """maxmemory: up to the arena, which was made at the start; 0 means all of it, since Redis' "no limit" is more than
    there is. What is held beyond it leaves in the loop's next turns."""
    arena_bytes = server.store.arena.nbytes
    if int(nbytes) > arena_bytes:
        raise ValueError(f"argument must be at most {arena_bytes}, the memory that was set aside at the start")
    server.store.set_bound(int(nbytes))
    server.shrink()


def set_slow_threshold(server: Server, microseconds: str) -> None:
    """slowlog-log-slower-than."""
    server.slowlog.set_threshold(int(microseconds))
    server.reconsider()


def set_slow_entries(server: Server, entries: str) -> None:
    """slowlog-max-len."""
    server.slowlog.entries_max = int(entries)
    server.slowlog.trim()


def set_latency_threshold(server: Server, milliseconds: str) -> None:
    """latency-monitor-threshold."""
    server.latency.threshold_ms = int(milliseconds)
    server.reconsider()


def set_latency_tracking(server: Server, switch: str) -> None:
    """Times are always counted, which costs less than asking; what is shown begins anew."""
    server.stats.forget_times()


def set_acl_log(server: Server, entries: str) -> None:
    """acllog-max-len."""
    log = server.acl.log.entries
    while len(log) > int(entries):
        log.pop()
