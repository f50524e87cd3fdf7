"""The same words to a node of a Redis Cluster and to one of ours: the replies are equal byte for byte.

Both clusters have three nodes with the same slots. Ids and ports differ by nature and are exchanged for the node's
number before anything is compared.
"""

import re
import socket
from collections.abc import Iterator

import pytest

from tests.backends.nodes import HOST
from tests.backends.topologies import KvredisCluster, RedisCluster, Topology
from tests.compat.wire import CommandLine, Wire

BIG = b"x" * 100_000

# On the first node are `b` and `f` (slots 3300 and 3168), on the others `c` (7365) and `a` (15495).
SCRIPTS: dict[str, list[CommandLine]] = {
    "topology": [
        "CLUSTER SLOTS", "CLUSTER COUNT-FAILURE-REPORTS nope", "CLUSTER REPLICAS nope", "CLUSTER SLAVES nope",
        "INFO cluster", "CONFIG GET cluster-enabled", "CLUSTER", "CLUSTER FOO", "CLUSTER SLOTS x", "ASKING", "READONLY",
        "READWRITE", "ASKING x", "ROLE",
    ],
    "slots": [
        "CLUSTER KEYSLOT foo", "CLUSTER KEYSLOT {}a", "CLUSTER KEYSLOT a{b}{c}", "CLUSTER KEYSLOT {{b}}",
        "CLUSTER KEYSLOT }{", "CLUSTER KEYSLOT", "CLUSTER COUNTKEYSINSLOT 3300", "SET b 1", "SET {b}c 2",
        "CLUSTER COUNTKEYSINSLOT 3300", "CLUSTER GETKEYSINSLOT 3300 0", "CLUSTER GETKEYSINSLOT 3300 1 x", "DEL b",
        "CLUSTER GETKEYSINSLOT 3300 10", "CLUSTER COUNTKEYSINSLOT 16384", "CLUSTER COUNTKEYSINSLOT -1",
        "CLUSTER COUNTKEYSINSLOT x", "CLUSTER GETKEYSINSLOT 16384 1", "CLUSTER GETKEYSINSLOT 1 -1",
        "CLUSTER GETKEYSINSLOT x 1", "CLUSTER GETKEYSINSLOT 1 x",
    ],
    "redirections": [
        "GET a", "GET b", "SET a 1", ["SET", "a", BIG], ["SET", "b", BIG], "STRLEN b", "GETRANGE c 0 1", "MGET a b",
        "MGET b a", "MGET b f", "MGET {b}1 {b}2 b", "MSET b 1 {b}x 2", "MSET b 1 c", "MSET b 1 f 2", "DEL b a",
        "DEL c b", "EXISTS b {b}c a", "RENAME b c", "RENAME a c", "RENAME b {b}x", "COPY b f", "COPY {b}x b",
        "OBJECT ENCODING a", "OBJECT ENCODING b", "MEMORY USAGE a", "TOUCH a c", "SET a", "GET", "DUMP a",
        "EXPIRE a 10", "SCAN x", "DBSIZE", "INCR a", "INCR f", "GETEX c", "LCS b a", "LCS b f", "UNLINK f", "GETDEL a",
        "SETNX a 1", "MSETNX a 1 b 2",
    ],
    "databases": [
        "SELECT 0", "SELECT 1", "SELECT 99", "SELECT x", "SELECT -1", "SELECT 99999999999", "SWAPDB 0 1", "SWAPDB a b",
        "SWAPDB 0 0", "MOVE a 1", "MOVE b 1", "MOVE b x", "MOVE b 0", "COPY {b}a {b}b DB 1", "COPY {b}a {b}b DB 0",
        "COPY {b}a {b}b DB x", "COPY {b}a {b}b DB 99", "COPY {b}a {b}b FOO", "FLUSHALL", "FLUSHDB",
    ],
    "transactions": [
        "EXEC", "MULTI", "GET a", "GET b", "EXEC", "MULTI", "GET b", "GET f", "EXEC", "EXEC", "MULTI", "SET b 1",
        "SET {b}c 2", "GET {b}c", "PING", "EXEC", "WATCH a", "WATCH b f", "WATCH b", "MULTI", "WATCH a", "EXEC",
        "MULTI", "EXEC", "MULTI", "SELECT 1", "EXEC", "MULTI", "FOO", "GET b", "GET f", "EXEC", "MULTI", "GET a",
        "DISCARD", "MULTI", ["SET", "a", BIG], ["SET", "b", BIG], "EXEC", "MULTI", ["SET", "b", BIG], ["SET", "f", BIG],
        "EXEC", "EXISTS b",
    ],
    "shard channels": [
        "SPUBLISH a x", "SPUBLISH b x", "SUNSUBSCRIBE a", "PUBLISH a x", "PUBSUB SHARDNUMSUB a", "SSUBSCRIBE a",
        "SSUBSCRIBE b f", "MULTI", "SPUBLISH a x", "EXEC",
    ],
    "errors are counted": ["CONFIG RESETSTAT", "GET a", "GET a", "MGET a b", "INFO errorstats"],
}  # fmt: skip


class TcpWire(Wire):
    """A connection to a port of loopback."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=10)
        self._buffer = bytearray()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Topology]:
    """A Redis Cluster."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ours() -> Iterator[Topology]:
    """Three of our servers with one topology file."""
    with KvredisCluster() as cluster:
        yield cluster


def ids_of(cluster: Topology) -> list[str]:
    return [node.ask("CLUSTER", "MYID") for node in cluster.nodes]


def exchanged(cluster: Topology, ids: list[str], reply: bytes) -> bytes:
    """The reply with the numbers of nodes in place of what is theirs alone."""
    for number, (node, id_) in enumerate(zip(cluster.nodes, ids, strict=True)):
        reply = reply.replace(id_.encode(), b"<id %d>" % number)
        reply = re.sub(rb"(:|%b:)%d\b" % (HOST.encode(), node.port), rb"\1<port %d>" % number, reply)
    return reply


def told(cluster: Topology, resp: int, line: CommandLine) -> bytes:
    """What the first node answers to one command."""
    with TcpWire(cluster.nodes[0].port) as wire:
        if resp == 3:
            wire.ask("HELLO 3")
        return exchanged(cluster, ids_of(cluster), wire.ask(line))


@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_node_answers_a_script_with_the_bytes_of_redis(
    name: str, resp: int, theirs: Topology, ours: Topology
) -> None:
    replies = []
    for cluster in (theirs, ours):
        for node in cluster.nodes:
            node.ask("FLUSHALL")
        ids = ids_of(cluster)
        with TcpWire(cluster.nodes[0].port) as wire:
            if resp == 3:
                wire.ask("HELLO 3")
            replies.append([exchanged(cluster, ids, wire.ask(line)) for line in SCRIPTS[name]])
    for line, their, our in zip(SCRIPTS[name], *replies, strict=True):
        assert our == their, line


@pytest.mark.parametrize("resp", [2, 3])
def test_shards_are_those_of_redis_in_the_order_of_the_file(resp: int, theirs: Topology, ours: Topology) -> None:
    their, our = (told(cluster, resp, "CLUSTER SHARDS").split(b"\r\n") for cluster in (theirs, ours))
    assert sorted(our) == sorted(their)  # Redis has its nodes in no order
    assert [line for line in our if line.startswith(b"<id ")] == [b"<id 0>", b"<id 1>", b"<id 2>"]


@pytest.mark.parametrize("resp", [2, 3])
def test_nodes_has_the_lines_of_redis_but_for_what_only_a_bus_knows(
    resp: int, theirs: Topology, ours: Topology
) -> None:
    lines = []
    for cluster in (theirs, ours):
        head, _, text = told(cluster, resp, "CLUSTER NODES").partition(b"\r\n")
        assert head[:1] == (b"$" if resp == 2 else b"=")
        # bus port, when it was last heard of, and its epoch
        known = re.sub(rb"@\d+", b"@", re.sub(rb"- 0 \d+ \d+ ", b"- ", text.removeprefix(b"txt:")))
        lines.append(sorted(known.split(b"\n")))
    assert lines[0] == lines[1]


def test_cluster_info_has_the_fields_of_redis_and_nothing_is_wrong(theirs: Topology, ours: Topology) -> None:
    fields = []
    for cluster in (theirs, ours):
        text = str(cluster.nodes[0].ask("CLUSTER", "INFO"))
        fields.append(dict(line.split(":") for line in text.splitlines() if line))
    kinds = re.compile("stats_messages_[a-z]+_")  # of the messages on the bus
    assert [name for name in fields[0] if not kinds.search(name)] == list(fields[1])
    same = [name for name in fields[1] if "epoch" not in name and "messages" not in name]
    assert {name: fields[1][name] for name in same} == {name: fields[0][name] for name in same}
