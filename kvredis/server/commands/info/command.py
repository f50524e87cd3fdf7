"""INFO: Redis' sections under Redis' field names, with this server's own figures in them, and `# Kv`.

Tools drop a whole scrape over one missing field, so what cannot happen here (forks, replicas, scripts) is reported as
Redis reports it when it has not happened. Everything else is measured. The sections are in sections.py, those that
count events in counters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvredis.server.commands.registry import command
from kvredis.server.protocol.replies import Reply, verbatim

from . import counters as counted
from . import sections
from .sections import Fields

if TYPE_CHECKING:
    from kvredis.server.client.session import Session
    from kvredis.server.server import Server

SECTIONS: dict[str, tuple[str, Callable[[Server], Fields]]] = {
    "server": ("Server", sections.server_facts),
    "clients": ("Clients", sections.clients),
    "memory": ("Memory", sections.memory),
    "persistence": ("Persistence", sections.persistence),
    "stats": ("Stats", counted.stats),
    "replication": ("Replication", sections.replication),
    "cpu": ("CPU", sections.cpu),
    "modules": ("Modules", sections.nothing),
    "commandstats": ("Commandstats", counted.commandstats),
    "errorstats": ("Errorstats", counted.errorstats),
    "latencystats": ("Latencystats", counted.latencystats),
    "cluster": ("Cluster", sections.cluster),
    "keyspace": ("Keyspace", counted.keyspace),
    "kv": ("Kv", counted.kv),
}
"""Every section by the name that INFO takes, in the order in which they are printed."""

DEFAULT_SECTIONS = tuple(name for name in SECTIONS if name not in ("commandstats", "latencystats"))
"""What INFO says when it is not asked for something else; `all` and `everything` leave nothing out."""


@command(
    "info",
    arity=-1,
    flags="loading stale",
    acl="slow dangerous",
    group="server",
    tips="nondeterministic_output request_policy:all_shards response_policy:special",
    complexity="O(1), and O(N) in the number of keys for those that expire",
    syntax="[section [section ...]]",
    summary="What the server is, holds and has done.",
)
def info(session: Session, args: list[bytes]) -> Reply:
    """INFO [section ...]: in any case and order, `default`, `all`, `everything`; unknown ones are empty."""
    asked = {arg.lower().decode("latin-1") for arg in args[1:]} or {"default"}
    if asked & {"all", "everything"}:
        asked |= set(SECTIONS)
    if "default" in asked:
        asked |= set(DEFAULT_SECTIONS)
    return verbatim(session, report(session.server, asked))


def report(server: Server, sections: Iterable[str]) -> str:
    """The text of the named sections, in INFO's order; each begins with its title, a blank line between two."""
    texts = []
    for name, (title, fields) in SECTIONS.items():
        if name in sections:
            lines = "".join(f"{field}:{value}\r\n" for field, value in fields(server))
            texts.append(f"# {title}\r\n{lines}")
    return "\r\n".join(texts)
