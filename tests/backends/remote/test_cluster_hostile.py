"""A cluster backend and nodes that lie, send it in circles or say nothing: bounded, clean, and never a wrong byte."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvredis.backends.config.url import ClusterAddress
from kvredis.backends.remote import routing
from kvredis.backends.remote.backend import ClusterBackend
from kvredis.backends.remote.health import RETRY_S_MAX
from kvredis.backends.remote.pool import Node
from kvredis.backends.remote.routing import HOPS_MAX
from kvredis.backends.resp import cluster
from kvredis.backends.resp.cluster import SLOTS, slot_of
from kvredis.backends.resp.connection import Connection
from kvredis.storage.store import Store
from tests.backends.conftest import Clock
from tests.backends.fake_server import Answer, Leave, Said, polite
from tests.backends.nodes import free_ports, wait_until
from tests.backends.verbs import BLOCK, content, loaded, put, put_through

from .fake_cluster import HOST, KEYS, SLOT, Pair, member, moved, slots

LENGTH = 20_000
PATIENT_S = 20.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two nodes, ended with the test."""
    with Pair() as pair:
        yield pair


Connect = Callable[..., ClusterBackend]


@pytest.fixture
def connect(pair: Pair, store: Store, clock: Clock) -> Iterator[Connect]:
    """Makes the backend under test, which knows the first node only unless it is told others."""
    made: list[ClusterBackend] = []

    def make(*ports: int, timeout_s: float = 5.0) -> ClusterBackend:
        address = ClusterAddress(tuple((HOST.decode(), port) for port in ports or pair.ports[:1]))
        made.append(ClusterBackend(address, store, timeout_s=timeout_s, clock=clock))
        return made[-1]

    yield make
    pair.open()
    for backend in made:
        backend.close()


def all_verbs(backend: ClusterBackend) -> list[bytes | None]:
    """Do everything once; what was loaded."""
    assert 0 <= backend.match(KEYS) <= len(KEYS)
    backend.touch(KEYS)
    values = loaded(backend, KEYS)
    for key in KEYS:
        put(backend, key, content(key, LENGTH))
    backend.flush()
    backend.delete(KEYS)
    assert backend.prefetch(KEYS).wait(PATIENT_S)
    backend.touch_later(KEYS)
    backend.flush()
    return values


# ---- redirections that lead nowhere ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [b"MOVED", b"ASK"])
def test_nodes_that_send_each_key_to_the_other_end_in_misses(
    pair: Pair, connect: Connect, store: Store, kind: bytes
) -> None:
    for node, other in zip(pair.nodes, pair.ports[::-1], strict=True):
        pair.answers(node, lambda args, other=other: polite(args) if args[0] == b"PING" else moved(other, kind))  # type: ignore[misc]
    backend = connect()
    assert all_verbs(backend) == [None] * len(KEYS)
    stats = backend.stats()
    assert (stats["stored"], stats["refused"], stats["queued"]) == (0, len(KEYS), 0)
    gets = sum(len(node.named(b"GET")) for node in pair.nodes)
    sets = sum(len(node.named(b"SET")) for node in pair.nodes)
    assert gets == sets == len(KEYS) * (HOPS_MAX + 1)
    assert store.used_bytes == 0


@pytest.mark.parametrize("hops", [HOPS_MAX - 1, HOPS_MAX, HOPS_MAX + 1])
def test_a_block_at_the_end_of_a_long_way_is_a_hit_or_a_miss_and_keeps_no_room(
    pair: Pair, connect: Connect, store: Store, hops: int
) -> None:
    value, gets = content(KEYS[0], LENGTH), iter(range(100))

    def wandering(args: list[bytes]) -> Said:
        if args[0] != b"GET":
            return polite(args)
        return moved(pair.ports[0], b"ASK") if next(gets) < hops else b"$%d\r\n%b\r\n" % (len(value), value)

    pair.answers(pair.nodes[0], wandering)
    assert loaded(connect(), KEYS[:1]) == [value if hops <= HOPS_MAX else None]
    assert store.used_bytes == 0


def test_a_node_that_sends_everything_to_itself_is_left_alone_before_long(pair: Pair, connect: Connect) -> None:
    port = pair.ports[0]
    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else moved(port, host=b""))
    assert all_verbs(connect()) == [None] * len(KEYS)


@pytest.mark.parametrize(
    "lie",
    [
        b"-MOVED\r\n",
        b"-MOVED 99999 127.0.0.1:7000\r\n",
        b"-MOVED 1 127.0.0.1:0\r\n",
        b"-MOVED 1 127.0.0.1:700000\r\n",
        b"-MOVED 1 a\x00b:7000\r\n",
        b"-MOVED 1 no-such-host.invalid:7000\r\n",
        b"-ASK 1 a..b:7000\r\n",
        b"-MOVED 1 " + b"x" * 4000 + b":7000\r\n",
        b"-CLUSTERDOWN Hash slot not served\r\n",
        b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-CROSSSLOT Keys in request don't hash to the same slot\r\n",
        Leave(b"-MOVED 1 127.0."),
        b"\x00" * 9000,
    ],
)
def test_errors_and_lies_are_misses_and_what_comes_later_is_served(
    pair: Pair, connect: Connect, clock: Clock, store: Store, lie: Said
) -> None:
    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else lie)
    backend = connect()
    assert all_verbs(backend) == [None] * len(KEYS)
    assert store.used_bytes == 0
    pair.answers(pair.nodes[0], pair.shelves[0])

    def mended() -> bool:
        clock.now_s += RETRY_S_MAX
        return put_through(backend, KEYS[0], content(KEYS[0], LENGTH)) and backend.match(KEYS[:1]) == 1

    wait_until(mended, "served again")
    assert loaded(backend, KEYS[:1]) == [content(KEYS[0], LENGTH)]


def test_addresses_that_a_server_makes_up_are_bounded_and_forgotten(
    pair: Pair, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "NODES_MAX", 5)
    monkeypatch.setattr(cluster, "REFRESH_S_MIN", 3600.0)
    ports = free_ports(20)
    turn = iter(range(10**9))
    wandering: Answer = lambda args: (  # noqa: E731
        polite(args) if args[0] == b"PING" else b"-ASK 1 127.0.0.1:%d\r\n" % ports[next(turn) % 20]
    )
    pair.answers(pair.nodes[0], wandering)
    backend = connect()
    for _ in range(5):
        assert all_verbs(backend) == [None] * len(KEYS)
    assert len(backend._routes.nodes()) == 5
    monkeypatch.setattr(cluster, "REFRESH_S_MIN", 0.0)


# ---- values under way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [b"MOVED", b"ASK"])
def test_values_under_way_go_to_the_other_node_out_of_the_room_they_have(
    pair: Pair, connect: Connect, store: Store, kind: bytes
) -> None:
    other = pair.shelves[1]
    other.open.clear()
    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else moved(pair.ports[1], kind))
    backend = connect(timeout_s=PATIENT_S)
    for key in KEYS:
        assert put(backend, key, content(key))
    sent_on = len(KEYS) if kind == b"ASK" else 1  # after which the others go there by themselves
    wait_until(lambda: int(backend.stats()["redirects"]) >= sent_on, "values sent on")
    stats = backend.stats()
    assert (stats["queued"], stats["queued_bytes"]) == (len(KEYS), len(KEYS) * BLOCK)
    assert store.used_bytes <= len(KEYS) * (BLOCK + 4096)
    assert loaded(backend, KEYS) == [content(key) for key in KEYS], "from here, meanwhile"
    assert backend.match(KEYS) == len(KEYS)
    other.open.set()
    assert backend.flush() == 0
    assert dict(other.values) == {key: content(key) for key in KEYS}
    assert (backend.stats()["stored"], store.used_bytes) == (len(KEYS), 0)
    asked = len(pair.nodes[1].named(b"ASKING"))
    assert asked == (len(KEYS) if kind == b"ASK" else 0)


def test_a_value_sent_on_to_a_node_that_is_not_there_is_dropped(pair: Pair, connect: Connect, store: Store) -> None:
    (free,) = free_ports(1)
    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else moved(free, b"ASK"))
    backend = connect()
    assert put(backend, KEYS[0], content(KEYS[0]))
    assert backend.flush() == 1
    assert (backend.stats()["dropped"], store.used_bytes) == (1, 0)


def test_a_value_on_its_way_to_a_node_that_is_let_go_goes_there_still(
    pair: Pair, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect()
    let_go, borrow = threading.Event(), Node.borrow

    def late(node: Node, count: int, **options: bool) -> list[Connection]:
        if str(node.link.address).endswith(f":{pair.ports[1]}"):
            assert let_go.wait(PATIENT_S)
        return borrow(node, count, **options)

    monkeypatch.setattr(Node, "borrow", late)
    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else moved(pair.ports[1]))
    assert put(backend, KEYS[0], content(KEYS[0]))
    wait_until(lambda: backend.stats()["refreshes"] == 1, "the table says that the other node has no slots")
    assert len(backend._routes.nodes()) == 1
    let_go.set()
    assert backend.flush() == 0
    assert pair.shelves[1].values[KEYS[0]] == content(KEYS[0])


def test_a_newer_value_is_not_overtaken_by_the_older_one_that_was_sent_on(pair: Pair, connect: Connect) -> None:
    backend = connect()
    first, second = pair.shelves
    first.open.clear()
    second.open.clear()
    seen = threading.Event()

    def moving(args: list[bytes]) -> Said:
        if args[0] == b"SET":
            seen.set()
            first.open.wait(PATIENT_S)
        return polite(args) if args[0] == b"PING" else moved(pair.ports[1])

    pair.table = slots(pair.ports[1])  # as the redirection says: a node that is let go and named anew has two senders
    pair.answers(pair.nodes[0], moving)
    assert put(backend, KEYS[0], b"old" * 10_000)
    assert seen.wait(PATIENT_S)
    assert put(backend, KEYS[0], b"new" * 10_000)
    first.open.set()
    second.open.set()
    assert backend.flush() == 0
    assert second.values[KEYS[0]] == b"new" * 10_000
    assert loaded(backend, KEYS[:1]) == [b"new" * 10_000]


def test_a_newer_value_is_not_overtaken_where_a_node_was_let_go_and_named_anew(pair: Pair, connect: Connect) -> None:
    backend = connect()
    old_is_there, newer = threading.Event(), threading.Event()
    shelf = pair.shelves[1]

    def slow(args: list[bytes]) -> Said:
        if args[0] == b"SET" and args[2].startswith(b"old"):
            old_is_there.set()
            newer.wait(0.5)  # the newer one would come meanwhile
        elif args[0] == b"SET":
            newer.set()
        return shelf(args)

    pair.answers(pair.nodes[0], lambda args: polite(args) if args[0] == b"PING" else moved(pair.ports[1]))
    pair.answers(pair.nodes[1], slow)
    assert put(backend, KEYS[0], b"old" * 10_000)
    assert old_is_there.wait(PATIENT_S)
    wait_until(lambda: len(backend._routes.nodes()) == 1, "the table says that the other node has no slots")
    assert put(backend, KEYS[0], b"new" * 10_000)
    assert backend.flush() == 0
    assert shelf.values[KEYS[0]] == b"new" * 10_000


def test_an_older_value_that_is_sent_on_behind_a_newer_ones_answer_is_dropped(pair: Pair, connect: Connect) -> None:
    pair.table = slots(*pair.ports)
    backend = connect()
    was = SLOT * 2 // SLOTS
    seen, answered = threading.Event(), threading.Event()

    def moving(args: list[bytes]) -> Said:
        if args[0] == b"SET":
            seen.set()
            answered.wait(PATIENT_S)
        return polite(args) if args[0] == b"PING" else moved(pair.ports[1 - was])

    assert backend.match(KEYS[:1]) == 0
    refreshes = int(backend.stats()["refreshes"])
    pair.answers(pair.nodes[was], moving)
    assert put(backend, KEYS[0], b"old" * 10_000)
    assert seen.wait(PATIENT_S)
    pair.table = slots(*pair.ports[::-1])
    wait_until(
        lambda: backend.match(KEYS[1:2]) == 0 and int(backend.stats()["refreshes"]) > refreshes,
        "the slot is the other's",
    )
    assert put(backend, KEYS[0], b"new" * 10_000)
    wait_until(lambda: backend.stats()["queued"] == 1, "the newer one is answered")
    answered.set()
    assert backend.flush() == 0
    assert pair.shelves[1 - was].values[KEYS[0]] == b"new" * 10_000


# ---- prefetches --------------------------------------------------------------------------------------------------


def test_a_prefetch_adds_up_what_the_nodes_say_and_is_over_when_all_are(pair: Pair, connect: Connect) -> None:
    pair.table = slots(*pair.ports)
    running = {b"1", b"2"}

    def node(job: bytes) -> Answer:
        def say(args: list[bytes]) -> Said:
            if args[0] == b"KV.PREFETCH":
                return b"*6\r\n$6\r\nqueued\r\n:2\r\n$8\r\nresident\r\n:1\r\n$3\r\njob\r\n:%b\r\n" % job
            if args[0] == b"KV.JOB":
                status = b"running" if args[1] in running else b"done"
                return b"*2\r\n$6\r\nstatus\r\n$%d\r\n%b\r\n" % (len(status), status)
            return polite(args)

        return say

    for fake, job in zip(pair.nodes, (b"1", b"2"), strict=True):
        pair.answers(fake, node(job))
    keys = [b"k%d" % number for number in range(20)]
    prefetch = connect().prefetch(keys)
    asked = [args for fake in pair.nodes for args in fake.named(b"KV.PREFETCH")]
    assert sorted(key for args in asked for key in args[:-1]) == sorted(keys)
    assert all(args[-1] == b"JOB" and len({slot_of(key) for key in args[:-1]}) == 1 for args in asked)
    assert (prefetch.queued, prefetch.resident) == (2 * len(asked), len(asked))
    running.discard(b"1")
    assert not prefetch.is_finished
    running.clear()
    assert prefetch.wait(PATIENT_S)


# ---- the topology ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table",
    [
        b"+OK\r\n",
        b"*0\r\n",
        b"$-1\r\n",
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\nh\r\n:1\r\n",
        b"-ERR This instance has cluster support disabled\r\n",
        b"*1\r\n" * 5000,
        b"\x00\x01\x02\r\n",
    ],
)
def test_a_node_that_tells_nonsense_of_its_cluster_is_asked_as_it_is(
    pair: Pair, connect: Connect, caplog: pytest.LogCaptureFixture, table: bytes
) -> None:
    pair.table = table
    backend = connect(timeout_s=1.0)
    for key in KEYS:
        assert put_through(backend, key, content(key, LENGTH))
    assert backend.match(KEYS) == len(KEYS)
    assert loaded(backend, KEYS) == [content(key, LENGTH) for key in KEYS]
    assert backend.stats()["refreshes"] == 0
    assert len(caplog.messages) == 1
    assert "no node tells its slots" in caplog.text


def test_a_node_that_never_ends_what_it_tells_of_its_cluster_is_tried_again_for_all_else(
    pair: Pair, connect: Connect, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    pair.table = b"$999999999999\r\n"
    backend = connect(timeout_s=1.0)
    assert backend.match(KEYS) == 0
    wait_until(lambda: len(caplog.messages) == 1, "the log says that the server is lost")  # by who still asks it
    clock.now_s += RETRY_S_MAX
    for key in KEYS:
        assert put_through(backend, key, content(key, LENGTH))
    assert loaded(backend, KEYS) == [content(key, LENGTH) for key in KEYS]
    assert [line.endswith("is back") for line in caplog.messages] == [False, True]


def test_the_next_node_is_asked_when_one_does_not_know(pair: Pair, connect: Connect) -> None:
    pair.nodes[0].answer = lambda args: b"-ERR what\r\n" if args[0] == b"CLUSTER" else polite(args)
    pair.table = slots(*pair.ports)
    backend = connect(*pair.ports)
    backend.match(KEYS)
    assert (backend.stats()["nodes"], backend.stats()["refreshes"]) == (2, 1)


def test_a_lookup_does_not_wait_for_a_topology_that_does_not_come(
    pair: Pair, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REFRESH_S_MIN", 0.0)
    backend = connect(timeout_s=PATIENT_S)
    assert backend.match(KEYS) == 0
    asked, answer = threading.Event(), threading.Event()

    def hanging() -> bytes:
        asked.set()
        answer.wait(PATIENT_S)
        return pair.table

    pair.nodes[0].answer = member(hanging, lambda args: polite(args) if args[0] == b"PING" else moved(pair.ports[1]))
    pair.nodes[1].answer = member(hanging, pair.shelves[1])
    try:
        assert backend.match(KEYS) == 0
        assert asked.wait(PATIENT_S)
        began_s = time.monotonic()
        assert put_through(backend, KEYS[0], content(KEYS[0], LENGTH))
        assert backend.match(KEYS) == 1
        assert loaded(backend, KEYS[:1]) == [content(KEYS[0], LENGTH)]
        assert time.monotonic() - began_s < PATIENT_S / 2
        assert backend.stats()["refreshes"] == 1
    finally:
        answer.set()


def test_a_node_without_slots_is_let_go_and_its_connections_closed(
    pair: Pair, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "REFRESH_S_MIN", 0.0)
    pair.table = slots(*pair.ports)
    backend = connect()
    low = next(key for number in range(100) if slot_of(key := b"k%d" % number) < SLOTS // 2)
    high = next(key for number in range(100) if slot_of(key := b"k%d" % number) >= SLOTS // 2)
    backend.match([low, high])
    for key in (low, high):
        assert put_through(backend, key, content(key, LENGTH))
    assert loaded(backend, [low, high]) == [content(key, LENGTH) for key in (low, high)]
    assert set(pair.shelves[1].values) == {high}
    pair.table = slots(pair.ports[0])
    before = backend.stats()
    pair.answers(
        pair.nodes[1],
        lambda args: (
            polite(args) if args[0] == b"PING" else b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(high), pair.ports[0])
        ),
    )
    assert backend.match([high]) == 0
    # A refresh that was asked for too early is made with the next call.
    wait_until(lambda: backend.match([high]) == 0 and backend.stats()["nodes"] == 1, "one master")
    wait_until(lambda: backend.stats()["connections"] == len(backend._routes.nodes()[0]._open), "the rest is closed")
    wait_until(lambda: int(backend.stats()["bytes_out"]) >= int(before["bytes_out"]), "what was counted stays counted")
    assert put_through(backend, high, content(high, LENGTH))
    assert set(pair.shelves[0].values) == {low, high}


def test_closing_ends_while_a_node_hangs_and_leaves_no_thread(pair: Pair, connect: Connect) -> None:
    answer = threading.Event()

    def hanging(args: list[bytes]) -> Said:
        answer.wait(PATIENT_S)
        return polite(args)

    pair.nodes[0].answer = hanging
    backend = connect(timeout_s=0.4)
    began_s = time.monotonic()
    put(backend, KEYS[0], content(KEYS[0], LENGTH))
    assert backend.match(KEYS[1:]) == 0
    backend.close()
    assert time.monotonic() - began_s < PATIENT_S / 2
    answer.set()
    ours = ("kvredis stores", "kvredis learns")
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith(ours)], "no thread is left")
    assert backend.match(KEYS) == 0
    assert loaded(backend, KEYS) == [None] * len(KEYS)
    assert not put(backend, KEYS[0], b"x")
