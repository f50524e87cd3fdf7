"""redis-py, redis-cli, redis-benchmark, ioredis and node-redis take three of our servers for one cluster."""

import asyncio
import itertools
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from typing import Final

import pytest
import redis
import redis.exceptions
from redis.asyncio.cluster import RedisCluster as AsyncClusterClient
from redis.cluster import ClusterNode
from redis.cluster import RedisCluster as ClusterClient

from kvredis.server.cluster.topology import SLOTS, slot_of
from tests.backends.nodes import HOST
from tests.backends.topologies import KvredisCluster, RedisCluster, Topology
from tests.compat import test_node_clients
from tests.compat.wire import CommandLine, Wire
from tests.gate import nightly

TIMEOUT_S: Final = 60
BLOCK: Final = bytes(range(256)) * 4096
EVEN: Final = (["0-5460"], ["5461-10921"], ["10922-16383"])
TURNED: Final = (["5461-10921"], ["10922-16383"], ["0-5460"])

node = test_node_clients.node


@pytest.fixture(scope="module")
def running() -> Iterator[KvredisCluster]:
    with KvredisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: KvredisCluster) -> KvredisCluster:
    """Three nodes, empty, with even slots."""
    running.divide(*EVEN)
    for one in running.nodes:
        one.ask("FLUSHALL")
    return running


@pytest.fixture(params=[nightly(2, id="resp2"), pytest.param(3, id="resp3")])
def client(request: pytest.FixtureRequest, cluster: KvredisCluster) -> Iterator[ClusterClient]:
    seeds = [ClusterNode(HOST, one.port) for one in cluster.nodes]  # type: ignore[no-untyped-call]
    with ClusterClient(startup_nodes=seeds, protocol=request.param, socket_timeout=20) as one:
        yield one


def held(cluster: KvredisCluster) -> list[int]:
    """How many keys each node has."""
    return [one.ask("DBSIZE") for one in cluster.nodes]


def test_redis_py_finds_every_key_where_it_belongs(cluster: KvredisCluster, client: ClusterClient) -> None:
    for n in range(300):
        assert client.set(f"k{n}", f"v{n}")
    assert [client.get(f"k{n}") for n in range(300)] == [f"v{n}".encode() for n in range(300)]
    assert client.mget_nonatomic([f"k{n}" for n in range(300)]) == [f"v{n}".encode() for n in range(300)]
    assert client.dbsize(target_nodes="all") == 300
    assert min(held(cluster)) > 50
    assert sorted(client.scan_iter(count=50)) == sorted(f"k{n}".encode() for n in range(300))
    assert client.delete(*[f"k{n}" for n in range(300)]) == 300
    assert held(cluster) == [0, 0, 0]


def test_redis_py_works_on_keys_with_one_tag_at_once(client: ClusterClient) -> None:
    assert client.mset({f"{{tag}}{n}": BLOCK for n in range(4)})
    assert client.mget([f"{{tag}}{n}" for n in range(4)]) == [BLOCK] * 4
    matched = client.execute_command("KV.MATCH", "{tag}0", "{tag}1", "{tag}9")  # type: ignore[no-untyped-call]
    assert matched == 2
    assert client.exists("{tag}0", "{tag}1", "other") == 2
    with pytest.raises(redis.exceptions.RedisClusterException, match="same key slot"):
        client.mget(["{tag}0", "{other}0", "x"])


def test_redis_py_pipelines_across_nodes_and_transacts_within_one(client: ClusterClient) -> None:
    pipeline = client.pipeline()  # type: ignore[no-untyped-call]
    for n in range(200):
        pipeline.set(f"p{n}", BLOCK if n % 50 == 0 else f"{n}")
    assert pipeline.execute() == [True] * 200
    for n in range(200):
        pipeline.get(f"p{n}")
    assert pipeline.execute() == [BLOCK if n % 50 == 0 else f"{n}".encode() for n in range(200)]
    with client.pipeline(transaction=True) as transaction:  # type: ignore[no-untyped-call]
        transaction.watch("{t}a")
        transaction.multi()
        transaction.set("{t}a", "1")
        transaction.incr("{t}a")
        assert transaction.execute() == [b"OK", 2]


def test_redis_py_follows_slots_that_move_while_it_works(cluster: KvredisCluster, client: ClusterClient) -> None:
    for turn, slots in enumerate((TURNED, ([], ["0-16383"], []), EVEN)):
        for n in range(100):
            client.set(f"k{n}", b"%d" % turn + BLOCK[:50_000])
        cluster.divide(*slots)
        found = [client.get(f"k{n}") for n in range(100)]
        assert set(found) <= {None, b"%d" % turn + BLOCK[:50_000]}
        for n in range(100):
            assert client.set(f"k{n}", f"{turn}.{n}")
        assert [client.get(f"k{n}") for n in range(100)] == [f"{turn}.{n}".encode() for n in range(100)]
        pipeline = client.pipeline()  # type: ignore[no-untyped-call]
        for n in range(100):
            pipeline.get(f"k{n}")
        assert pipeline.execute() == [f"{turn}.{n}".encode() for n in range(100)]


def test_redis_py_asyncio_drives_the_cluster(cluster: KvredisCluster) -> None:
    async def story() -> None:
        async with AsyncClusterClient(host=HOST, port=cluster.nodes[1].port) as client:
            await asyncio.gather(*(client.set(f"a{n}", BLOCK) for n in range(12)))
            cluster_of = {n: await client.get(f"a{n}") for n in range(12)}
            assert set(cluster_of.values()) == {BLOCK}
            await asyncio.to_thread(cluster.divide, *TURNED)
            assert await client.set("a0", "new")
            assert await client.get("a0") == b"new"

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_shard_channels_reach_their_listeners_until_their_slot_moves(cluster: KvredisCluster) -> None:
    with ClusterClient(host=HOST, port=cluster.nodes[0].port, socket_timeout=20) as client:
        listener = client.pubsub()
        listener.ssubscribe("news")
        assert client.spublish("news", "hello") == 1
        seen: list[object] = []
        while {"type": "smessage", "pattern": None, "channel": b"news", "data": b"hello"} not in seen:
            seen.append(listener.get_sharded_message(timeout=5))
            assert len(seen) < 10
        listener.close()


def test_redis_cli_follows_redirections(cluster: KvredisCluster) -> None:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    command = ["redis-cli", "-c", "-p", str(cluster.nodes[0].port)]
    lines = "".join(f"SET key{n} value{n}\nGET key{n}\n" for n in range(50))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if line.startswith("value")] == [f"value{n}" for n in range(50)]
    assert min(held(cluster)) > 5
    checked = subprocess.run(
        ["redis-cli", "--cluster", "check", f"{HOST}:{cluster.nodes[2].port}"],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "All 16384 slots covered" in checked.stdout
    assert "50 keys in 3 masters" in checked.stdout


def test_redis_benchmark_spreads_its_load(cluster: KvredisCluster) -> None:
    if shutil.which("redis-benchmark") is None:
        pytest.skip("redis-benchmark is not installed")
    for options, sure in ((["-P", "16"], 20), (["-d", "40000"], 0)):
        for one in cluster.nodes:
            one.ask("FLUSHALL")
        command = ["redis-benchmark", "--cluster", "-p", str(cluster.nodes[0].port), "-t", "set,get", "-n", "3000"]
        # One thread asks each node in its first turn. By default a node has a thread of its own, and on a busy
        # machine one of them may have done all 3,000 before another begins.
        command += ["-c", "12", "-r", "200", "--threads", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Cluster has 3 master nodes" in done.stdout
        assert "rror" not in done.stdout + done.stderr
        assert min(held(cluster)) > sure


@pytest.mark.parametrize(
    ("script", "module"), [("ioredis_cluster.mjs", "ioredis"), ("node_redis_cluster.mjs", "redis")]
)
def test_a_cluster_client_from_npm_does_its_work(
    script: str, module: str, node: test_node_clients.Node, cluster: KvredisCluster
) -> None:
    ports = [str(one.port) for one in cluster.nodes]
    command = [node.program, script, module, *ports]
    layouts = itertools.cycle((TURNED, EVEN))
    with subprocess.Popen(
        command, cwd=node.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        outcome = {}
        for line in process.stdout:  # the script ends by itself, and each of its checks has a time limit
            if line == "move\n":
                cluster.divide(*next(layouts))
                process.stdin.write("moved\n")
                process.stdin.flush()
            else:
                outcome = json.loads(line)
        told = process.stderr.read() if process.stderr is not None else ""
    assert process.returncode == 0, told
    assert len(outcome) >= 4
    assert {name: said for name, said in outcome.items() if said != "ok"} == {}


def test_keys_that_leave_with_their_slots_are_gone_from_the_old_node(cluster: KvredisCluster) -> None:
    for one, (slots,) in zip(cluster.nodes, EVEN, strict=True):
        first, _, last = slots.partition("-")
        here = [n for n in range(2000) if int(first) <= slot_of(b"%d" % n) <= int(last)]
        with one.client() as client:
            pipeline = client.pipeline(transaction=False)
            for n in here:
                pipeline.set(str(n), "v")
            pipeline.execute()
    assert sum(held(cluster)) == 2000
    cluster.divide(*TURNED)
    cluster.divide(*EVEN)
    assert held(cluster) == [0, 0, 0]
    for one in cluster.nodes:
        assert one.ask("CLUSTER", "COUNTKEYSINSLOT", SLOTS - 1) == 0


# The same words to a node of a Redis Cluster and to one of ours: the replies are equal byte for byte. Both clusters
# have three nodes with the same slots. Ids and ports differ by nature and are exchanged for the node's number
# before anything is compared.

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
