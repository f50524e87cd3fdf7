"""redis-py, redis-cli, redis-benchmark, ioredis and node-redis take three of our servers for one cluster."""

import asyncio
import itertools
import json
import shutil
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
from tests.backends.topologies import KvredisCluster
from tests.compat import test_node_clients

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


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
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
