"""CLUSTER, ASKING, READONLY: which node serves which slots, and how many keys a slot has here.

All answers are made from the topology file (topology.py), which is all that this cluster is: every node is a master and
taken for well, since no node here finds out that one has failed. Commands that would change who belongs to the cluster
are refused. A server without a topology refuses all of them with Redis' words for one that stands alone: clients ask in
order to find that out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from kvredis.server.client.blocked import Answer, Blocked
from kvredis.server.commands.command import help_reply
from kvredis.server.commands.registry import command, container, subcommand
from kvredis.server.context import Caller
from kvredis.server.protocol.arguments import parse_integer
from kvredis.server.protocol.replies import (
    EMPTY_ARRAY,
    NOT_AN_INTEGER,
    OK,
    ZERO,
    Reply,
    array,
    bulk,
    bulks,
    error,
    integer,
    map_reply,
    verbatim,
)

from .node import Cluster
from .topology import SLOTS, Node, slot_of

Handler: TypeAlias = Callable[[Caller, Cluster, list[bytes]], Answer]


DISABLED: Final = error("ERR This instance has cluster support disabled")
INVALID_SLOT: Final = error("ERR Invalid slot")
INVALID_SLOT_OR_COUNT: Final = error("ERR Invalid slot or number of keys")
MEMBERSHIP: Final = "ERR {} is not for this cluster: its nodes and their slots are what the file cluster_topology says"

KEYS_A_STEP: Final = 2000
"""How many keys are looked at before other clients have their turn."""

_VARIES: Final = "nondeterministic_output"
_REPLICAS = {"flags": "admin stale", "acl": "admin slow dangerous", "tips": _VARIES}
_LOOKS = {"flags": "stale", "acl": "slow"}
_ALWAYS = {"flags": "loading stale", "acl": "slow"}

container("cluster", group="cluster", since="3.0.0", summary="Which node of a cluster serves which slots.")


def _part(name: str, *, arity: int, **facts: object) -> Callable[[Handler], Handler]:
    """Register what CLUSTER `name` answers on a node of a cluster."""

    def register(handler: Handler) -> Handler:
        def answer(session: Caller, args: list[bytes]) -> Answer:
            cluster = session.server.cluster
            return DISABLED if cluster is None else handler(session, cluster, args)

        subcommand(f"cluster|{name}", arity=arity, **{"since": "3.0.0", **facts})(answer)
        return handler

    return register


# ---- the topology ----------------------------------------------------------------------------------------------------


@_part("slots", arity=2, tips=_VARIES, summary="Who serves which slots: first, last and node of each range.", **_ALWAYS)
def slots(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER SLOTS, in the order of the slots."""
    runs = sorted((span.start, span.stop - 1, node) for node in cluster.topology.nodes for span in node.ranges)
    return array([array([integer(first), integer(last), _endpoint(session, node)]) for first, last, node in runs])


@_part(
    "shards", arity=2, tips=_VARIES, since="7.0.0", summary="Each node with its slots, as a shard of one.", **_ALWAYS
)
def shards(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER SHARDS, in the order of the file."""
    return array([_shard(session, node) for node in cluster.topology.nodes])


@_part("nodes", arity=2, tips=_VARIES, summary="A line for each node: id, address, flags, epoch, slots.", **_LOOKS)
def nodes(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER NODES, in the order of the file. There is no cluster bus, so its port is 0."""
    return verbatim(session, "".join(_line(session, cluster, node) for node in cluster.topology.nodes))


@_part("myid", arity=2, summary="The id of this node.", **_LOOKS)
def myid(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER MYID."""
    return bulk(cluster.myself.id)


@_part("myshardid", arity=2, since="7.2.0", summary="The id of this node's shard, which is the node's.", **_LOOKS)
def myshardid(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER MYSHARDID: a shard is one node here."""
    return bulk(cluster.myself.id)


@_part("info", arity=2, tips=_VARIES, summary="How many nodes there are and how many slots are served.", **_LOOKS)
def info(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER INFO. The state is ok also when no node serves some of the slots, as in a Redis Cluster that does without
    full coverage."""
    assigned = sum(node.slots for node in cluster.topology.nodes)
    fields = {
        "cluster_state": "ok",
        "cluster_slots_assigned": assigned,
        "cluster_slots_ok": assigned,
        "cluster_slots_pfail": 0,
        "cluster_slots_fail": 0,
        "cluster_known_nodes": len(cluster.topology.nodes),
        "cluster_size": sum(bool(node.ranges) for node in cluster.topology.nodes),
        "cluster_current_epoch": cluster.epoch,
        "cluster_my_epoch": cluster.epoch,
        "cluster_stats_messages_sent": 0,
        "cluster_stats_messages_received": 0,
        "total_cluster_links_buffer_limit_exceeded": 0,
    }
    return verbatim(session, "".join(f"{name}:{value}\r\n" for name, value in fields.items()))


@_part(
    "links",
    arity=2,
    tips=_VARIES,
    since="7.0.0",
    summary="The connections between nodes, of which there are none.",
    **_LOOKS,
)
def links(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER LINKS."""
    return EMPTY_ARRAY


def replicas(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER REPLICAS id, and SLAVES: no node has any."""
    return EMPTY_ARRAY if _known(cluster, args[2]) else _unknown_node(args[2])


for _name, _since in (("replicas", "5.0.0"), ("slaves", "3.0.0")):
    _facts: dict[str, object] = {"since": _since, "syntax": "node-id", **_REPLICAS}
    _part(_name, arity=3, summary="The replicas of a node: none.", **_facts)(replicas)


@_part("count-failure-reports", arity=3, syntax="node-id", summary="How many nodes say that one fails: 0.", **_REPLICAS)
def count_failure_reports(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER COUNT-FAILURE-REPORTS id."""
    return ZERO if _known(cluster, args[2]) else _unknown_node(args[2])


# ---- keys and slots --------------------------------------------------------------------------------------------------


@_part(
    "keyslot", arity=3, syntax="string", complexity="O(N) in the length of the key", summary="A key's slot.", **_LOOKS
)
def keyslot(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER KEYSLOT key."""
    return integer(slot_of(args[2]))


@_part(
    "countkeysinslot",
    arity=3,
    syntax="slot",
    complexity="O(N) in the number of keys of this node; others are served meanwhile",
    summary="How many keys of a slot this node has.",
    **_LOOKS,
)
def countkeysinslot(session: Caller, cluster: Cluster, args: list[bytes]) -> Answer:
    """CLUSTER COUNTKEYSINSLOT slot."""
    slot = parse_integer(args[2])
    if slot is None:
        return NOT_AN_INTEGER
    if not 0 <= slot < SLOTS:
        return INVALID_SLOT
    return _counted(session, slot)


@_part(
    "getkeysinslot",
    arity=4,
    syntax="slot count",
    tips=_VARIES,
    complexity="O(N) in the number of keys of this node; others are served meanwhile",
    summary="Some of the keys of a slot that this node has.",
    **_LOOKS,
)
def getkeysinslot(session: Caller, cluster: Cluster, args: list[bytes]) -> Answer:
    """CLUSTER GETKEYSINSLOT slot count."""
    slot, count = parse_integer(args[2]), parse_integer(args[3])
    if slot is None or count is None:
        return NOT_AN_INTEGER
    if not 0 <= slot < SLOTS or count < 0:
        return INVALID_SLOT_OR_COUNT
    return _listed(session, slot, count)


def _counted(session: Caller, slot: int) -> Iterator[Reply | Blocked]:
    count = 0
    for found in _found_in(session, slot):
        if isinstance(found, Blocked):
            yield found
        else:
            count += len(found)
    yield integer(count)


def _listed(session: Caller, slot: int, count: int) -> Iterator[Reply | Blocked]:
    keys: dict[bytes, None] = {}  # a walk beside which keys come and go may meet one twice
    for found in _found_in(session, slot):
        if isinstance(found, Blocked):
            yield found
        else:
            keys.update(dict.fromkeys(found))
        if len(keys) >= count:
            break
    yield bulks(list(keys)[:count])


def _found_in(session: Caller, slot: int) -> Iterator[list[bytes] | Blocked]:
    """The keys of a slot as they are met, with a wait after each step so that others have their turn; without one in a
    transaction, where no command waits."""
    cursor = 0
    while True:
        cursor, keys = session.store.scan(cursor, KEYS_A_STEP, 0)
        yield [key for key in keys if slot_of(key) == slot]
        if not cursor:
            return
        yield from session.turns_for_others()


# ---- what is taken, refused or told ----------------------------------------------------------------------------------


@_part("help", arity=2, since="5.0.0", summary="Print this help.", **_ALWAYS)
def cluster_help(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    """CLUSTER HELP."""
    return help_reply("cluster")


def _changes_membership(session: Caller, cluster: Cluster, args: list[bytes]) -> Reply:
    return error(MEMBERSHIP.format(f"CLUSTER {args[1].upper().decode('latin-1')}"))


for _name, _arity, _flags in (
    ("addslots", -3, "admin stale no_async_loading"),
    ("addslotsrange", -4, "admin stale no_async_loading"),
    ("bumpepoch", 2, "admin stale no_async_loading"),
    ("delslots", -3, "admin stale no_async_loading"),
    ("delslotsrange", -4, "admin stale no_async_loading"),
    ("failover", -2, "admin stale no_async_loading"),
    ("flushslots", 2, "admin stale no_async_loading"),
    ("forget", 3, "admin stale no_async_loading"),
    ("meet", -4, "admin stale no_async_loading"),
    ("replicate", 3, "admin stale no_async_loading"),
    ("reset", -2, "admin noscript stale"),
    ("saveconfig", 2, "admin stale no_async_loading"),
    ("set-config-epoch", 3, "admin stale no_async_loading"),
    ("setslot", -4, "admin stale no_async_loading"),
):
    _tips = _VARIES if _name == "bumpepoch" else ""
    _part(_name, arity=_arity, flags=_flags, acl="admin slow dangerous", tips=_tips, summary="Refused.")(
        _changes_membership
    )


def _agree(session: Caller, args: list[bytes]) -> Reply:
    """ASKING, READONLY, READWRITE: nothing is on its way between nodes, and no node has replicas."""
    return DISABLED if session.server.cluster is None else OK


for _name, _flags in (("asking", "fast"), ("readonly", "loading stale fast"), ("readwrite", "loading stale fast")):
    _summary = "Taken by the node of a cluster, where it changes nothing."
    command(_name, arity=1, flags=_flags, acl="fast connection", group="cluster", since="3.0.0", summary=_summary)(
        _agree
    )


def _known(cluster: Cluster, node_id: bytes) -> bool:
    return any(node.id.encode() == node_id for node in cluster.topology.nodes)


def _unknown_node(node_id: bytes) -> bytes:
    return error(b"ERR Unknown node " + node_id.split(b"\0")[0])


def _endpoint(session: Caller, node: Node) -> Reply:
    """A node in CLUSTER SLOTS: where to connect, its id, and what else is known, which is nothing."""
    port = node.port_for(encrypted=session.encrypted)
    return array([bulk(node.host), integer(port), bulk(node.id), map_reply(session, [])])


def _shard(session: Caller, node: Node) -> Reply:
    bounds = [integer(bound) for span in node.ranges for bound in (span.start, span.stop - 1)]
    facts: list[tuple[str, Reply]] = [("id", bulk(node.id))]
    facts += [(name, integer(port)) for name, port in (("port", node.port), ("tls-port", node.tls_port)) if port]
    facts += [("ip", bulk(node.host)), ("endpoint", bulk(node.host))]
    facts += [("role", bulk("master")), ("replication-offset", ZERO), ("health", bulk("online"))]
    told = map_reply(session, [(bulk(name), value) for name, value in facts])
    return map_reply(session, [(bulk("slots"), array(bounds)), (bulk("nodes"), array([told]))])


def _line(session: Caller, cluster: Cluster, node: Node) -> str:
    """A line of CLUSTER NODES."""
    flags = "myself,master" if node is cluster.myself else "master"
    place = f"{node.host}:{node.port_for(encrypted=session.encrypted)}@0"
    spans = "".join(f" {_span(span)}" for span in node.ranges)
    return f"{node.id} {place} {flags} - 0 0 {cluster.epoch} connected{spans}\n"


def _span(span: range) -> str:
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
