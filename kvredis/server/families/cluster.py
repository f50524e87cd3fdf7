"""CLUSTER and its kin: commands that exist, with the facts that COMMAND tells of them, and that are always refused.

Clients ask CLUSTER INFO or SLOTS to find out what they talk to, and take the error for the answer that they want: a
server that stands alone. An unknown command would tell them something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.commands import command, container, subcommand
from kvredis.server.replies import Reply, error

if TYPE_CHECKING:
    from kvredis.server.session import Session

DISABLED = error("ERR This instance has cluster support disabled")

_CHANGES = ("admin stale no_async_loading", "admin slow dangerous")
_REPLICAS = ("admin stale", "admin slow dangerous")
_LOOKS = ("stale", "slow")
_ALWAYS = ("loading stale", "slow")

_PARTS: dict[str, tuple[int, tuple[str, str]]] = {
    "addslots": (-3, _CHANGES),
    "addslotsrange": (-4, _CHANGES),
    "bumpepoch": (2, _CHANGES),
    "count-failure-reports": (3, _REPLICAS),
    "countkeysinslot": (3, _LOOKS),
    "delslots": (-3, _CHANGES),
    "delslotsrange": (-4, _CHANGES),
    "failover": (-2, _CHANGES),
    "flushslots": (2, _CHANGES),
    "forget": (3, _CHANGES),
    "getkeysinslot": (4, _LOOKS),
    "help": (2, _ALWAYS),
    "info": (2, _LOOKS),
    "keyslot": (3, _LOOKS),
    "links": (2, _LOOKS),
    "meet": (-4, _CHANGES),
    "myid": (2, _LOOKS),
    "myshardid": (2, _LOOKS),
    "nodes": (2, _LOOKS),
    "replicas": (3, _REPLICAS),
    "replicate": (3, _CHANGES),
    "reset": (-2, ("admin noscript stale", "admin slow dangerous")),
    "saveconfig": (2, _CHANGES),
    "set-config-epoch": (3, _CHANGES),
    "setslot": (-4, _CHANGES),
    "shards": (2, _ALWAYS),
    "slaves": (3, _REPLICAS),
    "slots": (2, _ALWAYS),
}
"""Arity, flags and ACL categories of each subcommand."""

container("cluster", group="cluster", since="3.0.0", summary="Refused: this server is no part of a cluster.")


def _refuse(session: Session, args: list[bytes]) -> Reply:
    return DISABLED


for _name, (_arity, (_flags, _acl)) in _PARTS.items():
    subcommand(f"cluster|{_name}", arity=_arity, flags=_flags, acl=_acl, since="3.0.0", summary="Refused.")(_refuse)

for _name, _flags in (("asking", "fast"), ("readonly", "loading stale fast"), ("readwrite", "loading stale fast")):
    command(_name, arity=1, flags=_flags, acl="fast connection", group="cluster", since="3.0.0", summary="Refused.")(
        _refuse
    )
