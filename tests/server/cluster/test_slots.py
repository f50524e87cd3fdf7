"""Hash slots are those that redis-py computes, and the plain way's checks agree with the careful way's."""

import random
from pathlib import Path

import pytest
from redis.crc import key_slot

from kvredis.server.cluster.node import NOT_SERVED, Cluster
from kvredis.server.cluster.topology import SLOTS, head_of, routing_keys, slot_of
from kvredis.server.commands.registry import COMMANDS, every_command
from kvredis.server.options import ServerOptions
from kvredis.server.server import Server
from tests.server.cluster_node import HALF, topology_file
from tests.server.fake_session import FakeSession, make_server

TRICKY = (
    b"", b"{", b"}", b"{}", b"{}a", b"a{}b{c}", b"{{a}}", b"{a}{b}", b"x{a}y{b}", b"}{a}", b"a}b{c", b"{a", b"a}",
    b"\x00{\x00}", b"{\xff}", b"foo{bar}{zap}", b"{user1000}.following",
)  # fmt: skip


@pytest.mark.parametrize("key", TRICKY)
def test_a_key_with_braces_is_in_the_slot_that_redis_py_computes(key: bytes) -> None:
    assert slot_of(key) == key_slot(key)


def test_any_key_is_in_the_slot_that_redis_py_computes() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        key = bytes(rng.choice(b"ab{}\x00\xff") for _ in range(rng.randrange(12)))
        assert slot_of(key) == key_slot(key), key


def test_keys_with_one_head_share_a_slot() -> None:
    assert head_of(b"a{tag}rest") == b"a{tag}"
    for key in TRICKY:
        head = head_of(key)
        assert key.startswith(head)
        if head:
            assert slot_of(head + b"{other}") == slot_of(key) == slot_of(head)


def test_a_client_over_tls_is_told_where_tls_is_spoken(tmp_path: Path) -> None:
    options = ServerOptions(cluster_topology=topology_file(tmp_path, HALF), cluster_node="us")
    session = FakeSession(Server(make_server().store, options))
    told = {}
    for encrypted in (False, True):
        session.encrypted = encrypted  # type: ignore[attr-defined]
        told[encrypted] = session.ask("CLUSTER SLOTS") + session.ask("CLUSTER NODES")
        assert b"$4\r\nport\r\n:7002\r\n$8\r\ntls-port\r\n:7003\r\n" in session.ask("CLUSTER SHARDS")
    assert b":7002\r\n" in told[False]
    assert b" h2:7002@0 master - 0 0 1 connected 8192-16383\n" in told[False]
    assert b"7003" not in told[False]
    assert told[True] == told[False].replace(b":7002", b":7003")  # the other node has no TLS port to tell
    session.store.close()


def test_what_routes_a_command_are_its_keys_and_its_shard_channels() -> None:
    session = FakeSession(make_server())

    def routed(line: str) -> list[bytes]:
        args = line.encode().split()
        found = COMMANDS[args[0]]
        return routing_keys(found.subcommands.get(args[1].decode().lower(), found) if len(args) > 1 else found, args)

    assert routed("GET a") == [b"a"]
    assert routed("MSET a 1 b 2") == [b"a", b"b"]
    assert routed("RENAME a b") == [b"a", b"b"]
    assert routed("COPY a b DB 0 REPLACE") == [b"a", b"b"]
    assert routed("OBJECT ENCODING a") == [b"a"]
    assert routed("KV.PREFETCH a b PRIORITY 1 JOB") == [b"a", b"b"]
    assert routed("SSUBSCRIBE a b") == [b"a", b"b"]
    assert routed("SPUBLISH a b") == [b"a"]
    assert routed("SUNSUBSCRIBE") == routed("PUBLISH a b") == routed("PING a") == routed("SCAN 0") == []
    session.store.close()


def test_the_plain_way_lets_through_what_the_careful_way_would_and_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster(ServerOptions(cluster_topology=topology_file(tmp_path, HALF), cluster_node="us"))
    rng = random.Random(11)
    tags = [b"{a}", b"{b}", b"{c}", b"x{a}", b"", b"{}", b"{a"]
    session = FakeSession(make_server())
    session.encrypted = False  # type: ignore[attr-defined]
    plain = [each for each in every_command() if each.name.encode() in cluster.checks]
    assert {"get", "set", "mget", "kv.match", "kv.prefetch", "unlink", "touch"} <= {each.name for each in plain}
    outcomes = set()
    for _ in range(3000):
        command = rng.choice(plain)
        argc = abs(command.arity) + (rng.randrange(3) if command.arity < 0 else 0)
        tag = rng.choice(tags)
        args = [command.name.encode()]
        args += [(tag if rng.random() < 0.9 else rng.choice(tags)) + b"%d" % rng.randrange(9) for _ in range(argc - 1)]
        if command.behind_keys and rng.random() < 0.5:
            args += [b"PRIORITY", b"1"]
        allowed = cluster.redirection(session, command, args) is None  # type: ignore[arg-type]
        assert bool(cluster.checks[args[0]](args)) == allowed, args
        outcomes.add(allowed)
    assert outcomes == {True, False}
    session.store.close()


def test_every_slot_of_a_file_has_the_answer_of_its_owner(tmp_path: Path) -> None:
    nodes = (
        "{name: us, host: h, port: 1, slots: [0-9, 100]}, {name: other, host: o, port: 2, tls_port: 3, slots: 10-20}"
    )
    cluster = Cluster(ServerOptions(cluster_topology=topology_file(tmp_path, nodes), cluster_node="us"))
    session = FakeSession(make_server())
    keys = {slot_of(b"%d" % n): b"%d" % n for n in range(SLOTS * 12)}
    get = COMMANDS[b"GET"]

    def told(slot: int, *, encrypted: bool = False) -> bytes | None:
        session.encrypted = encrypted  # type: ignore[attr-defined]
        return cluster.redirection(session, get, [b"GET", keys[slot]])  # type: ignore[arg-type]

    assert {told(slot) for slot in (*range(10), 100)} == {None}
    assert told(15) == b"-MOVED 15 o:2\r\n"
    assert told(15, encrypted=True) == b"-MOVED 15 o:3\r\n"
    assert told(21) == told(99) == told(101) == told(16383) == NOT_SERVED
    session.store.close()
