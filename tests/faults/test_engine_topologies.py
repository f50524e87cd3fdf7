"""An engine over several servers, of which one dies in the middle: what lies on the others is served as before, what
lay on that one is computed, and the one that takes its place is found without a restart.
"""

from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from kvredis.adapters.engine.keys import chunk_keys
from tests.backends.nodes import wait_until
from tests.backends.topologies import KvredisCluster, RedisCluster, Sentinels
from tests.faults.engine_runs import (
    FRESH,
    STORED,
    Mode,
    Subject,
    assert_recovers,
    prompt,
    quick_retries,
    seed,
    warnings_of,
)

__all__ = ["quick_retries"]

PROMPTS = range(12)
Cluster = RedisCluster | KvredisCluster


@pytest.fixture(scope="module", params=[RedisCluster, KvredisCluster])
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with request.param() as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """Three nodes without values, all of them running."""
    for number, node in enumerate(shared_cluster.nodes):
        if not node.is_running:
            shared_cluster.restart(number)
        node.ask("FLUSHALL")
    return shared_cluster


def slot_of(subject: Subject, number: int) -> int:
    """Where a prompt's chunks lie: all in one slot."""
    slots = {key_slot(chunk.key) for chunk in chunk_keys(prompt(number)[0].tolist(), subject.engine.layout)}
    assert len(slots) == 1
    return slots.pop()


def owner_of(cluster: Cluster, subject: Subject, number: int) -> int:
    """Which node a prompt lies on."""
    node = cluster.owner_of(slot_of(subject, number), as_seen_by=cluster.nodes[1])
    assert node is not None
    return cluster.nodes.index(node)


def test_a_killed_node_costs_its_own_prompts_only_and_is_used_again_when_it_is_back(
    cluster: Cluster, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    seed(cluster.url, *PROMPTS)
    with Subject(cluster.url, mode) as subject:
        owners = {number: owner_of(cluster, subject, number) for number in PROMPTS}
        assert set(owners.values()) == {0, 1, 2}
        cluster.kill(0)
        for number in PROMPTS:
            assert subject.ask(number) == (0 if owners[number] == 0 else STORED), number
        for number in range(20, 32):
            assert subject.ask(number) == 0
        subject.engine.flush()
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        cluster.restart(0)
        assert_recovers(subject, cluster.url, on_node(cluster, subject, 0))
        assert len(warnings_of(caplog)) <= 2, warnings_of(caplog)


def on_node(cluster: Cluster, subject: Subject, wanted: int) -> Iterator[int]:
    """Prompts whose blocks lie on one node."""
    return (number for number in FRESH if owner_of(cluster, subject, number) == wanted)


def test_prompts_of_a_slot_that_moves_are_found_where_they_are_now(
    cluster: Cluster, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    seed(cluster.url, 0, 1)
    with Subject(cluster.url, mode) as subject:
        assert subject.ask(0) == STORED
        source, slot = owner_of(cluster, subject, 1), slot_of(subject, 1)
        target = (source + 1) % 3
        if isinstance(cluster, RedisCluster):
            cluster.migrate(slot, source, target)
            assert subject.ask(1) == STORED, "with its values"
            cluster.migrate(slot, target, source)
        else:
            rest = [["0-5460"], ["5461-10922"], ["10923-16383"]]
            first, last = (int(edge) for edge in rest[source][0].split("-"))
            rest[source] = [f"{low}-{high}" for low, high in ((first, slot - 1), (slot + 1, last)) if low <= high]
            rest[target] = [*rest[target], str(slot)]
            cluster.divide(*rest)
            assert subject.ask(1) == 0, "a cache that moves a slot drops what is in it"
            subject.engine.flush()
            assert subject.knows(1)
            cluster.divide(["0-5460"], ["5461-10922"], ["10923-16383"])
        with Subject(cluster.url) as other:
            other.ask(1)
            other.engine.flush()
        wait_until(lambda: subject.knows(1), "the slot where it was")
        assert_recovers(subject, cluster.url)
    assert warnings_of(caplog) == []


@pytest.mark.nightly  # behind Sentinels: test_a_master_that_is_killed_costs_misses_until_its_replica_is_promoted
def test_a_replica_that_is_promoted_serves_what_the_killed_master_had(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisCluster(replicas=1) as cluster:
        seed(cluster.url, *PROMPTS)
        for number in range(3):
            master, replica = cluster.nodes[number], cluster.nodes[number + 3]
            wait_until(lambda m=master, r=replica: m.ask("DBSIZE") == r.ask("DBSIZE"), "replicas have all")  # type: ignore[misc]
        with Subject(cluster.url, mode) as subject:
            mine = next(number for number in PROMPTS if owner_of(cluster, subject, number) == 0)
            caplog.clear()
            cluster.kill(0)
            assert subject.ask(50) == 0
            cluster.wait_for_promotion(0)
            wait_until(lambda: subject.knows(mine), "its successor")
            assert subject.ask(mine) == STORED
            assert_recovers(subject, cluster.url)
            assert len(warnings_of(caplog)) <= 2, warnings_of(caplog)


@pytest.mark.nightly  # of one server: test_the_first_token_comes_without_the_remote_that_is_absent_at_the_start
def test_an_engine_starts_before_its_cluster_and_uses_it_once_it_is_there(
    cluster: Cluster, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        cluster.kill(number)
    with Subject(cluster.url, mode) as subject:
        for number in range(6):
            assert subject.ask(number) == 0
        assert len(warnings_of(caplog)) == 1, "of the cluster, and not of each node as well"
        for node in cluster.nodes:
            node.start()
        if isinstance(cluster, RedisCluster):
            cluster.wait_until_whole()
        assert_recovers(subject, cluster.url)


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels(sentinels=1, password="open-sesame") as made:
        yield made


def test_a_master_that_is_killed_costs_misses_until_its_replica_is_promoted(
    sentinels: Sentinels, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    sentinels.wait_for_replica()
    seed(sentinels.url, *PROMPTS)
    one, other = sentinels.nodes
    wait_until(lambda: one.ask("DBSIZE") == other.ask("DBSIZE"), "the replica has all")
    with Subject(sentinels.url, mode) as subject:
        assert subject.ask(0) == STORED
        caplog.clear()
        old = sentinels.kill_master()
        for number in range(50, 53):
            assert subject.ask(number) == 0
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        sentinels.wait_for_failover(old)
        wait_until(lambda: subject.knows(1), "the new master")
        assert subject.ask(1) == STORED
        assert_recovers(subject, sentinels.url)
        assert len(warnings_of(caplog)) == 2, warnings_of(caplog)
        old.start()
        sentinels.wait_for_replica()


@pytest.mark.nightly
def test_a_master_that_is_demoted_while_it_lives_is_left_for_the_new_one(
    sentinels: Sentinels, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    sentinels.wait_for_replica()
    seed(sentinels.url, *PROMPTS)
    with Subject(sentinels.url, mode) as subject:
        assert subject.ask(0) == STORED
        old = sentinels.demote_master()
        for number in range(70, 76):
            subject.ask(number)
            subject.engine.flush()
        assert_recovers(subject, sentinels.url)
        assert old.ask("ROLE")[0] == "slave"
        assert len(warnings_of(caplog)) <= 2, warnings_of(caplog)
