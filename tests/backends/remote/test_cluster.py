"""A real Redis Cluster of three: slots that move under load, nodes that die in the middle, and never a wrong byte."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

import pytest

from kvredis.backends.config.url import ClusterAddress, parse_remote
from kvredis.backends.remote.backend import ClusterBackend
from kvredis.backends.remote.health import RETRY_S_MAX
from kvredis.backends.resp.cluster import slot_of
from kvredis.backends.resp.connection import Connection
from kvredis.backends.resp.wire import Buffer
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, small_store
from tests.backends.nodes import wait_until
from tests.backends.topologies import RedisCluster
from tests.backends.verbs import content, loaded, put, put_through
from tests.server.certificates import Papers

LENGTH = 20_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters that the tests of this file share; who kills one starts it again."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _empty(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        node.ask("FLUSHALL")


Connect = Callable[..., ClusterBackend]


@pytest.fixture
def connect(cluster: RedisCluster, store: Store, clock: Clock) -> Iterator[Connect]:
    """Makes the backend under test."""
    made: list[ClusterBackend] = []

    def make(url: str = "", timeout_s: float = 5.0) -> ClusterBackend:
        address = parse_remote(url or cluster.url)
        assert isinstance(address, ClusterAddress)
        made.append(ClusterBackend(address, store, timeout_s=timeout_s, clock=clock))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def scattered(count: int) -> list[bytes]:
    """Keys all over the cluster."""
    return [b"block:%d" % number for number in range(count)]


def prompt(count: int, tag: bytes = b"0@root") -> list[bytes]:
    """Keys of one slot."""
    return [b"model@{%b}%d" % (tag, number) for number in range(count)]


def owner_of(cluster: RedisCluster, slot: int) -> int:
    """Which master serves a slot."""
    node = cluster.owner_of(slot, as_seen_by=cluster.nodes[0])
    assert node is not None
    return cluster.nodes.index(node)


def contents(keys: list[bytes], length: int = LENGTH) -> list[bytes | None]:
    return [content(key, length) for key in keys]


def figures(backend: ClusterBackend, *names: str) -> tuple[int | float | str, ...]:
    stats = backend.stats()
    return tuple(stats[name] for name in names)


# ---- where keys go -----------------------------------------------------------------------------------------------


def test_keys_go_to_their_masters_at_once_when_the_topology_is_known(
    cluster: RedisCluster, connect: Connect, store: Store
) -> None:
    backend = connect()
    keys = [*scattered(60), *prompt(20)]
    assert backend.match(keys) == 0
    for key in keys:
        assert put(backend, key, content(key, LENGTH))
    assert backend.flush() == 0
    assert [node.ask("DBSIZE") > 0 for node in cluster.nodes] == [True] * 3
    assert backend.match(keys) == 80
    assert loaded(backend, keys) == contents(keys)
    assert backend.touch(keys) == 80
    assert backend.delete(keys[:70]) == 70
    assert backend.match(keys[70:]) == 10
    assert figures(backend, "kind", "nodes", "redirects", "refreshes") == ("cluster", 3, 0, 1)
    assert store.used_bytes == 0


def test_a_store_before_anything_is_known_is_sent_on_to_its_master(connect: Connect) -> None:
    backend = connect()
    keys = scattered(30)
    for key in keys:
        assert put(backend, key, content(key, LENGTH))
    assert backend.flush() == 0
    assert loaded(backend, keys) == contents(keys)
    assert backend.stats()["refused"] == 0


def test_scattered_keys_are_asked_for_together_and_not_one_by_one(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect()
    keys = scattered(600)
    for key in keys[:500]:
        assert put(backend, key, b"x")
    assert backend.flush() == 0
    sends, send_many = [], Connection.send_many

    def counted(connection: Connection, requests: Iterable[Sequence[Buffer]]) -> None:
        sends.append(connection)
        send_many(connection, requests)

    monkeypatch.setattr(Connection, "send_many", counted)
    assert backend.match(keys) == 500
    assert backend.delete(keys) == 500
    assert len(sends) < 60


# ---- slots that move ---------------------------------------------------------------------------------------------


def test_blocks_of_a_slot_that_is_moving_are_found_where_they_are(
    cluster: RedisCluster, connect: Connect, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect()
    keys = prompt(20)
    for key in keys:
        assert put_through(backend, key, content(key, LENGTH))
    slot = slot_of(keys[0])
    source = owner_of(cluster, slot)
    target = (source + 1) % 3
    cluster.begin_migration(slot, source, target)
    assert cluster.move_keys(slot, source, target, 7) == 7
    before = backend.stats()["redirects"]
    assert backend.match(keys) == 20
    assert loaded(backend, keys) == contents(keys)
    assert backend.touch(keys) == 20, "those that are apart are touched one by one"
    newer = [key + b":new" for key in keys[:5]]
    for key in newer:
        assert put_through(backend, key, content(key, LENGTH))
    assert [cluster.nodes[target].ask("CLUSTER", "COUNTKEYSINSLOT", slot)] == [7 + 5]
    assert loaded(backend, newer) == contents(newer)
    assert backend.delete([*newer, *keys[:10]]) == 15
    assert int(backend.stats()["redirects"]) > int(before)
    assert backend.stats()["refreshes"] == 1, "ASK changes no node's slots"
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_migration(slot, target)
    before = backend.stats()["redirects"]
    assert loaded(backend, keys) == [None] * 10 + contents(keys[10:])
    assert int(backend.stats()["redirects"]) > int(before), "MOVED"
    before = backend.stats()["redirects"]
    assert loaded(backend, keys) == [None] * 10 + contents(keys[10:])
    assert backend.match(keys[10:]) == 10
    assert put_through(backend, keys[0], content(keys[0], LENGTH))
    assert backend.stats()["redirects"] == before, "it is known now"
    wait_until(lambda: backend.match(keys) == 1 and backend.stats()["refreshes"] == 2, "the topology learnt anew")
    assert store.used_bytes == 0
    assert caplog.messages == []


def test_a_slot_moves_to_and_fro_under_load_without_a_miss_or_a_wrong_byte(
    cluster: RedisCluster, connect: Connect, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect()
    keys = prompt(30, b"moving")
    for key in keys:
        assert put_through(backend, key, content(key, LENGTH))
    slot = slot_of(keys[0])
    wrong: list[object] = []
    over = threading.Event()
    stored: list[bytes] = []

    def read() -> None:
        while not over.is_set():
            if backend.match(keys) != len(keys):
                wrong.append("match")
            if loaded(backend, keys) != contents(keys):
                wrong.append("load")

    def write() -> None:
        while not over.is_set():
            key = b"{moving}new:%d" % len(stored)
            if not put_through(backend, key, content(key, LENGTH)):
                wrong.append(key)
            stored.append(key)

    threads = [threading.Thread(target=work) for work in (read, write)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            source, done = owner_of(cluster, slot), len(stored)
            target = (source + 1) % 3
            cluster.begin_migration(slot, source, target)
            while cluster.move_keys(slot, source, target, 5):
                pass
            wait_until(lambda done=done: len(stored) > done + 3 or bool(wrong), "stores while it moves")  # type: ignore[misc]
            while cluster.move_keys(slot, source, target):
                pass
            cluster.end_migration(slot, target)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    for first in range(0, len(stored), 500):  # a load has so long for all of its blocks, and they are as many as came
        part = stored[first : first + 500]
        assert loaded(backend, part) == contents(part)
    assert int(backend.stats()["redirects"]) > 0
    assert figures(backend, "refused", "dropped", "losses", "misses") == (0, 0, 0, 0)
    assert store.used_bytes == 0
    assert caplog.messages == []


# ---- nodes that die, hang and come back --------------------------------------------------------------------------


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "is lost" in message]


def test_a_node_killed_within_a_load_and_stores_takes_its_own_blocks_with_it_and_no_others(
    cluster: RedisCluster, connect: Connect, clock: Clock, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect()
    keys = scattered(90)
    for key in keys:
        assert put_through(backend, key, content(key, 100_000))
    dead = 1
    gone = {key for key in keys if owner_of(cluster, slot_of(key)) == dead}
    values: list[bytes | None] = []
    newer = [key + b":new" for key in keys]
    for number, lease in enumerate(backend.load(keys)):
        values.append(None if lease is None else bytes(lease.view))
        if lease is not None:
            lease.release()
        put(backend, newer[number], content(newer[number], LENGTH))
        if number == 20:
            cluster.kill(dead)
    assert all(value in (None, content(key, 100_000)) for key, value in zip(keys, values, strict=True))
    assert [value for key, value in zip(keys, values, strict=True) if key not in gone] == [
        content(key, 100_000) for key in keys if key not in gone
    ]
    backend.flush()
    there = [key for key in newer if owner_of(cluster, slot_of(key)) != dead]
    assert loaded(backend, there) == contents(there)
    backend.match(keys)
    assert backend.match([key for key in keys if key not in gone]) == len(keys) - len(gone)
    assert loaded(backend, sorted(gone)) == [None] * len(gone)
    assert len(lost_lines(caplog)) == len(caplog.messages) == 1
    assert store.used_bytes == 0
    cluster.restart(dead)
    clock.now_s += RETRY_S_MAX
    assert loaded(backend, sorted(gone)) == [None] * len(gone)
    for key in gone:
        assert put_through(backend, key, content(key, LENGTH))
    assert loaded(backend, sorted(gone)) == contents(sorted(gone))
    assert figures(backend, "losses", "reconnects") == (1, 1)


def test_a_node_that_hangs_costs_one_timeout_and_the_others_go_on(
    cluster: RedisCluster, connect: Connect, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(timeout_s=0.4)
    keys = scattered(60)
    for key in keys:
        assert put_through(backend, key, content(key, LENGTH))
    hung = 2
    gone = [key for key in keys if owner_of(cluster, slot_of(key)) == hung]
    well = [key for key in keys if key not in gone]
    cluster.nodes[hung].signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert backend.match(gone) == 0
        assert loaded(backend, gone) == [None] * len(gone)
        assert loaded(backend, well) == contents(well)
        assert backend.match(well) == len(well)
        for key in well:
            assert put_through(backend, b"{%b}new" % key, content(key, LENGTH))
        assert not put(backend, gone[0], b"x")
        assert time.monotonic() - began_s < 20
    finally:
        cluster.nodes[hung].signal(signal.SIGCONT)

    def is_back() -> bool:
        clock.now_s += RETRY_S_MAX
        return backend.match(gone) == len(gone)

    wait_until(is_back, "the node serves again")
    assert loaded(backend, keys) == contents(keys)
    assert len(lost_lines(caplog)) == 1


def test_nodes_that_come_after_the_backend_are_found(
    cluster: RedisCluster, connect: Connect, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        cluster.kill(number)
    backend = connect()
    keys = scattered(10)
    assert backend.match(keys) == backend.touch(keys) == backend.delete(keys) == 0
    assert loaded(backend, keys) == [None] * 10
    for key in keys:
        put(backend, key, content(key, LENGTH))
    backend.flush()
    assert figures(backend, "stored", "nodes") == (0, 0)
    assert len(caplog.messages) == 1, "of the cluster, and not of each node as well"
    assert "no node tells its slots" in caplog.text
    for node in cluster.nodes:
        node.start()

    def works() -> bool:
        clock.now_s += RETRY_S_MAX
        return all(put_through(backend, key, content(key, LENGTH)) for key in keys)

    wait_until(works, "all three serve")
    wait_until(lambda: backend.match(keys) == 10, "all are known")
    assert loaded(backend, keys) == contents(keys)
    assert backend.stats()["nodes"] == 3


def test_a_replica_that_takes_a_dead_masters_place_is_found(clock: Clock) -> None:
    with RedisCluster(replicas=1, password="open sesame") as cluster:
        address = parse_remote(cluster.url.replace(" ", "%20"))
        assert isinstance(address, ClusterAddress)
        with closing(ClusterBackend(address, small_store(), timeout_s=2.0, clock=clock)) as backend:
            keys = scattered(30)
            for key in keys:
                assert put_through(backend, key, content(key, LENGTH))
            moved = [key for key in keys if owner_of(cluster, slot_of(key)) == 0]
            for node in cluster.nodes[:3]:
                node.ask("WAIT", 1, 10_000)
            cluster.kill(0)
            assert loaded(backend, moved) == [None] * len(moved)
            cluster.wait_for_promotion(0)
            wait_until(lambda: backend.match(moved) == len(moved), "the replica is asked")
            assert loaded(backend, keys) == contents(keys)
            assert put_through(backend, moved[0], b"new")
            assert loaded(backend, moved[:1]) == [b"new"]
            assert backend.stats()["nodes"] == 3


def test_a_cluster_over_tls_wants_its_own_authority(papers: Papers, caplog: pytest.LogCaptureFixture) -> None:
    with RedisCluster(papers=papers) as cluster:
        keys = scattered(12)
        for url, served in ((cluster.url, True), (cluster.url.partition("?")[0], False)):
            address = parse_remote(url)
            assert isinstance(address, ClusterAddress)
            with closing(ClusterBackend(address, small_store(), timeout_s=5.0)) as backend:
                for key in keys:
                    put(backend, key, content(key, LENGTH))
                backend.flush()
                assert loaded(backend, keys) == (contents(keys) if served else [None] * 12)
            assert bool(caplog.messages) != served
