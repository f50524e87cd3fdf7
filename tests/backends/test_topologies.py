"""The sets of servers that other tests kill pieces of: they are what they say, for clients that are not ours.

The deaths are left to the night: of these sets, by backends that are ours, the gate has them in remote/test_cluster.py
and resp/test_sentinel.py.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.cluster import ClusterNode
from redis.cluster import RedisCluster as ClusterClient
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError
from redis.sentinel import Sentinel

from tests.server.certificates import Papers

from .nodes import HOST, Node, PortTakenError, free_ports, wait_until, with_free_ports
from .topologies import SERVICE, KvredisCluster, RedisCluster, Sentinels, needs_redis, redis_command

PASSWORD = "open-sesame"


def client_of(cluster: RedisCluster | KvredisCluster) -> "ClusterClient":
    tls = {"ssl": True, "ssl_ca_certs": cluster.papers.path("ca")} if cluster.papers else {}
    startup = [ClusterNode(HOST, node.port) for node in cluster.nodes]  # type: ignore[no-untyped-call]
    return ClusterClient(startup_nodes=startup, password=cluster.password or None, **tls)  # type: ignore[arg-type]


def key_in(slots: range) -> bytes:
    """A key whose slot is one of these."""
    return next(key for number in itertools.count() if key_slot(key := b"key-%d" % number) in slots)


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as made:
        yield made


@pytest.fixture(scope="module")
def kvredis_cluster() -> Iterator[KvredisCluster]:
    with KvredisCluster() as cluster:
        yield cluster


def test_a_cluster_of_redis_serves_a_cluster_client(redis_cluster: RedisCluster) -> None:
    with client_of(redis_cluster) as client:
        for number in range(30):
            assert client.set(f"key-{number}", b"value" * number)
            assert client.get(f"key-{number}") == b"value" * number
    held = [node.ask("DBSIZE") for node in redis_cluster.nodes]
    assert sum(held) == 30
    assert all(held)


def test_a_slot_on_its_way_answers_ask_and_then_moved(redis_cluster: RedisCluster) -> None:
    key, (source, target) = key_in(range(5461)), redis_cluster.nodes[:2]
    slot = key_slot(key)
    source.ask("SET", key, "value")
    redis_cluster.begin_migration(slot, 0, 1)
    assert source.ask("GET", key) == "value"
    assert redis_cluster.move_keys(slot, 0, 1) == 1
    with pytest.raises(AskError, match=f"{slot} {target.address}"):
        source.ask("GET", key)
    redis_cluster.end_migration(slot, 1)
    with pytest.raises(MovedError, match=f"{slot} {target.address}"):
        source.ask("GET", key)
    assert target.ask("GET", key) == "value"
    redis_cluster.migrate(slot, 1, 0)
    assert source.ask("GET", key) == "value"
    assert redis_cluster.owner_of(slot, as_seen_by=redis_cluster.nodes[2]) is source


@pytest.mark.nightly
def test_a_killed_node_takes_its_slots_with_it_until_it_is_started_again(redis_cluster: RedisCluster) -> None:
    with client_of(redis_cluster) as client:
        mine, other = key_in(range(5461)), key_in(range(6000, 10000))
        client.set(mine, b"1")
        redis_cluster.kill(0)
        assert not redis_cluster.nodes[0].is_running
        assert client.set(other, b"2")
        seen = redis_cluster.nodes[1]
        wait_until(lambda: "fail" in str(seen.ask("CLUSTER", "NODES")), "the others see that it is gone")
        redis_cluster.restart(0)
        assert client.get(mine) is None, "it has come back without values"
        assert client.get(other) == b"2"


@pytest.mark.nightly
def test_a_replica_takes_over_for_a_killed_master() -> None:
    with RedisCluster(replicas=1, password=PASSWORD) as cluster, client_of(cluster) as client:
        key = key_in(range(5461))
        client.set(key, b"kept")
        wait_until(lambda: cluster.nodes[3].ask("DBSIZE") == 1, "the value at the replica")
        cluster.kill(0)
        assert cluster.wait_for_promotion(0) is cluster.nodes[3]
        assert client.get(key) == b"kept"
        cluster.restart(0)
        assert cluster.owner_of(key_slot(key), as_seen_by=cluster.nodes[0]) is cluster.nodes[3]


@pytest.mark.nightly
def test_clusters_speak_tls_among_themselves_and_with_clients(papers: Papers) -> None:
    with RedisCluster(papers=papers) as cluster, client_of(cluster) as client:
        assert client.set("key", b"value")
        assert client.get("key") == b"value"
        assert cluster.url.startswith("rediss-cluster://127.0.0.1:")


def named_by(sentinels: Sentinels) -> "redis.Redis":
    found = Sentinel([(HOST, one.port) for one in sentinels.sentinels], socket_timeout=5)  # type: ignore[no-untyped-call]
    master = found.master_for(SERVICE, password=sentinels.password or None)  # type: ignore[no-untyped-call]
    assert isinstance(master, redis.Redis)
    return master


@pytest.mark.nightly
def test_sentinels_name_the_master_and_after_its_death_the_replica(sentinels: Sentinels) -> None:
    with named_by(sentinels) as client:
        assert client.set("key", b"value")
        assert client.wait(1, 5000) == 1
        old = sentinels.kill_master()
        new = sentinels.wait_for_failover(old)
        assert new is not old
        assert client.get("key") == b"value"
        old.start()
        sentinels.wait_for_replica()
        assert sentinels.master() is new


def test_a_demoted_master_lives_on_and_refuses_writes(sentinels: Sentinels) -> None:
    old = sentinels.demote_master()
    with pytest.raises(redis.ReadOnlyError):
        old.ask("SET", "key", "value")
    with named_by(sentinels) as client:
        assert client.set("key", b"value")


@pytest.mark.nightly
def test_one_sentinel_is_enough_for_servers_with_a_password() -> None:
    with Sentinels(sentinels=1, password=PASSWORD) as sentinels:
        new = sentinels.wait_for_failover(sentinels.kill_master())
        with named_by(sentinels) as client:
            assert client.set("key", b"value")
        assert new.ask("GET", "key") == "value"


def test_kvredis_nodes_serve_a_cluster_client_and_follow_their_file(kvredis_cluster: KvredisCluster) -> None:
    key = key_in(range(5461))
    slot = key_slot(key)
    with client_of(kvredis_cluster) as client:
        for number in range(30):
            assert client.set(f"key-{number}", b"value" * number)
            assert client.get(f"key-{number}") == b"value" * number
        assert client.set(key, b"value")
        kvredis_cluster.divide([], ["0-10922"], ["10923-16383"])
        assert client.get(key) is None, "what left with its slot is gone"
        assert client.set(key, b"again")
        assert kvredis_cluster.owner_of(slot, as_seen_by=kvredis_cluster.nodes[0]) is kvredis_cluster.nodes[1]
        kvredis_cluster.divide(["0-5460"], ["5461-10922"], ["10923-16383"])
        kvredis_cluster.kill(0)
        kvredis_cluster.restart(0)
        assert client.set(key, b"more")


def a_redis(folder: Path, port: int) -> Node:
    return Node(redis_command(folder, port, "", None), port, folder)


def test_kvredis_nodes_speak_tls_and_want_a_password(papers: Papers) -> None:
    with KvredisCluster(password=PASSWORD, papers=papers) as cluster, client_of(cluster) as client:
        assert client.set("key", b"value")
        assert client.get("key") == b"value"
        assert cluster.url.startswith(f"rediss-cluster://:{PASSWORD}@127.0.0.1:")


def test_a_port_that_another_process_has_is_tried_again_with_another(tmp_path: Path) -> None:
    needs_redis()
    tries: list[int] = []

    def make(ports: list[int]) -> list[Node]:
        tries.append(ports[0])
        port = taken.port if len(tries) == 1 else ports[0]
        return [a_redis(tmp_path / "a", port)]

    with with_free_ports(lambda ports: [a_redis(tmp_path / "b", ports[0])], 1) as (taken,):
        with with_free_ports(make, 1) as (node,):
            assert len(tries) == 2
            assert node.port == tries[1]
            assert node.ask("PING")
        assert not node.is_running


def test_a_server_that_never_starts_says_why(tmp_path: Path) -> None:
    needs_redis()
    (port,) = free_ports(1)
    node = Node([*redis_command(tmp_path, port, "", None), "--no-such-option", "1"], port, tmp_path)
    with pytest.raises(PortTakenError, match="no-such-option"):
        node.start()
    assert not node.is_running
