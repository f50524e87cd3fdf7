"""Three kvredis behind Redis Cluster's protocol: a lookup is one question to one node, and slots are dealt out anew."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvredis.backends.config.url import ClusterAddress, parse_remote
from kvredis.backends.remote.backend import ClusterBackend
from kvredis.backends.resp.cluster import slot_of
from tests.backends.conftest import small_store
from tests.backends.nodes import wait_until
from tests.backends.topologies import KvredisCluster
from tests.backends.verbs import content, keys_of, loaded, put, put_through

LENGTH = 20_000
THIRDS = (["0-5460"], ["5461-10921"], ["10922-16383"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[KvredisCluster]:
    """Three nodes that the tests of this file share."""
    with KvredisCluster() as cluster:
        yield cluster


@pytest.fixture
def backend(cluster: KvredisCluster) -> Iterator[ClusterBackend]:
    """The backend under test; the nodes are empty, and each has a third of the slots."""
    cluster.divide(*THIRDS)
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    with closing(backend_of(cluster)) as backend:
        yield backend


def backend_of(cluster: KvredisCluster) -> ClusterBackend:
    address = parse_remote(cluster.url)
    assert isinstance(address, ClusterAddress)
    return ClusterBackend(address, small_store(), timeout_s=5.0)


def calls(cluster: KvredisCluster) -> dict[str, int]:
    """How often the nodes have run each command since CONFIG RESETSTAT, without what this asks itself and without what
    is learnt of the cluster, at times of its own."""
    total: dict[str, int] = {}
    for node in cluster.nodes:
        for name, row in node.ask("INFO", "commandstats").items():
            total[name.removeprefix("cmdstat_")] = total.get(name.removeprefix("cmdstat_"), 0) + row["calls"]
    beside = ("info", "config", "client", "hello", "cluster|slots")
    return {name: count for name, count in total.items() if not name.startswith(beside)}


def forget_calls(cluster: KvredisCluster) -> None:
    for node in cluster.nodes:
        node.ask("CONFIG", "RESETSTAT")


def test_chunks_of_one_prompt_are_looked_up_and_touched_in_one_round_trip(
    cluster: KvredisCluster, backend: ClusterBackend
) -> None:
    keys = [b"model@{0@0123456789abcdef}%d" % number for number in range(300)]
    for key in keys[:200]:
        assert put(backend, key, b"x" * 100)
    assert backend.flush() == 0
    assert backend.match(keys) == 200
    forget_calls(cluster)
    assert backend.match(keys) == 200
    assert calls(cluster) == {"kv.match": 1}
    forget_calls(cluster)
    assert backend.touch(keys) == 200
    assert calls(cluster) == {"touch": 1}


def test_scattered_keys_are_a_question_for_each_slot_and_a_gap_ends_the_run(
    cluster: KvredisCluster, backend: ClusterBackend
) -> None:
    keys = keys_of(50)
    for key in [*keys[:20], *keys[21:]]:
        assert put_through(backend, key, content(key, 100))
    assert backend.match(keys) == 20
    assert backend.match(keys[21:]) == 29
    assert backend.match([keys[0], keys[0], keys[1], keys[20]]) == 3
    assert backend.match([keys[20], keys[0]]) == 0


def test_slots_dealt_out_anew_are_found_by_a_backend_that_was_there_before(
    cluster: KvredisCluster, backend: ClusterBackend, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(60)
    for key in keys:
        assert put_through(backend, key, content(key, LENGTH))
    stay = [key for key in keys if not 5461 <= slot_of(key) <= 10921]
    cluster.divide(["0-8191"], [], ["8192-16383"])
    values = loaded(backend, keys)
    assert values == [content(key, LENGTH) if key in stay else None for key in keys], "values do not move with slots"
    assert int(backend.stats()["redirects"]) > 0
    for key in keys:
        assert put(backend, key, content(key, LENGTH))
    assert backend.flush() == 0
    wait_until(lambda: backend.match(keys) == 60 and backend.stats()["nodes"] == 2, "the new division")
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    assert caplog.messages == []
