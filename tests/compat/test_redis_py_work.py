"""redis-py at work, in both protocols, with hiredis and with its own parser.

Transactions, messages, pools, retries, logins, and what a client meets that counts on Lua, Cluster or Sentinel.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import redis.exceptions
from redis._parsers import _HiredisParser, _RESP2Parser, _RESP3Parser
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from tests.compat.conftest import RunningServer

BLOCK = bytes(range(256)) * 4096
WAIT_S = 10
KINDS = ["hiredis-2", "hiredis-3", "python-2", "python-3"]


def pool_of(kind: str, server: RunningServer, **options: Any) -> redis.ConnectionPool:
    """A pool of connections with one of redis-py's parsers in one protocol."""
    name, protocol = kind.split("-")
    own = {"2": _RESP2Parser, "3": _RESP3Parser}[protocol]
    parser = _HiredisParser if name == "hiredis" else own
    options = {"socket_timeout": WAIT_S, **options}
    return redis.ConnectionPool(
        host="127.0.0.1", port=server.port, protocol=int(protocol), parser_class=parser, **options
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A parser and a protocol."""
    return str(request.param)


@pytest.fixture
def client(kind: str, kvredis: RunningServer) -> Iterator[Any]:
    """A client of our server; untyped, since redis-py's own types make every reply an Awaitable or not."""
    pool = pool_of(kind, kvredis)
    with redis.Redis(connection_pool=pool) as connected:
        yield connected
    pool.disconnect()


@pytest.fixture
def other(kvredis: RunningServer) -> Iterator[Any]:
    """Another client."""
    with redis.Redis(port=kvredis.port, socket_timeout=WAIT_S) as connected:
        yield connected


def test_strings_are_counted_with_and_changed_in_place(client: Any) -> None:
    assert [client.incr("n"), client.incrby("n", 41), client.decr("n"), client.decrby("n", 40)] == [1, 42, 41, 1]
    assert client.incrbyfloat("f", 10.5) == 10.5
    assert client.incrbyfloat("f", -0.25) == 10.25
    assert client.append("s", "hello") == 5
    assert client.setrange("s", 5, " world") == 11
    assert client.execute_command("SUBSTR", "s", 6, -1) == b"world"
    assert client.execute_command("GETSET", "s", "new") == b"hello world"
    assert client.getex("s", ex=100) == b"new"
    assert client.ttl("s") == 100
    assert client.getex("s", persist=True) == b"new"
    assert client.ttl("s") == -1
    assert client.getdel("s") == b"new"
    assert client.msetnx({"a": "1", "n": "2"}) in (False, 0)
    assert client.execute_command("SETEX", "a", 100, "x") is True
    assert client.execute_command("PSETEX", "b", 100_000, "y") is True
    assert client.mset({"p": "ohmytext", "q": "mynewtext"}) is True
    assert client.lcs("p", "q") == b"mytext"
    assert client.lcs("p", "q", len=True) == 6


def test_keys_are_renamed_copied_moved_and_carried_away(client: Any) -> None:
    client.set("a", BLOCK, ex=1000)
    assert client.rename("a", "b") is True
    assert client.renamenx("b", "c") is True
    assert client.copy("c", "d") is True
    assert client.copy("c", "d") is False
    image = client.dump("d")
    assert client.restore("e", 0, image) in (b"OK", "OK")
    assert client.get("e") == BLOCK
    with pytest.raises(redis.ResponseError, match="BUSYKEY"):
        client.restore("e", 0, image)
    assert client.move("e", 9) is True
    assert sorted(client.keys()) == [b"c", b"d"]
    assert all(900 < client.ttl(key) <= 1000 for key in "cd")
    assert client.expireat("c", client.expiretime("c") + 50, gt=True) is True
    assert client.object("idletime", "c") == 0
    assert client.swapdb(0, 9) is True
    assert client.keys() == [b"e"]
    assert client.flushall() is True


def test_a_transaction_returns_every_reply_and_runs_whole(client: Any) -> None:
    with client.pipeline() as pipe:
        assert pipe.set("a", BLOCK).incr("n").get("a").mget("a", "nope").config_get("databases").execute() == [
            True, 1, BLOCK, [BLOCK, None], {"databases": "16"},
        ]  # fmt: skip
        replies = pipe.set("s", "x").incr("s").set("t", "y").execute(raise_on_error=False)
        assert [replies[0], replies[2]] == [True, True]
        assert isinstance(replies[1], redis.ResponseError)
        with pytest.raises(redis.ResponseError, match=r"Command # 1 \(INCRBY s 1\) of pipeline caused error: value"):
            pipe.incr("s").set("t", "z").execute()
        assert client.get("t") == b"z"
        with pytest.raises(redis.ResponseError, match="unknown command 'NOPE'"):
            pipe.set("t", "not").execute_command("NOPE").execute()
        assert client.get("t") == b"z"


def test_a_watched_key_that_changes_stops_the_transaction(client: Any, other: Any) -> None:
    with client.pipeline() as pipe:
        pipe.watch("k")
        other.set("k", "theirs")
        pipe.multi()
        with pytest.raises(redis.WatchError):
            pipe.set("k", "ours").execute()
    assert client.get("k") == b"theirs"
    client.set("n", 1)
    barged = iter([True])

    def double(pipe: Any) -> None:
        value = int(pipe.get("n"))
        if next(barged, False):
            other.set("n", 10)
        pipe.multi()
        pipe.set("n", value * 2)

    assert client.transaction(double, "n") == [True]
    assert client.get("n") == b"20"


def test_messages_reach_channels_patterns_and_shards(client: Any, other: Any) -> None:
    with client.pubsub() as listener:
        listener.subscribe("news")
        listener.psubscribe("n*")
        listener.ssubscribe("shard")
        assert [listener.get_message(timeout=WAIT_S)["type"] for _ in range(3)] == [
            "subscribe",
            "psubscribe",
            "ssubscribe",
        ]
        assert other.publish("news", BLOCK) == 2
        assert other.spublish("shard", "x") == 1
        messages = [listener.get_message(timeout=WAIT_S) for _ in range(2)]
        assert [(m["type"], m["channel"], m["data"] == BLOCK) for m in messages] == [
            ("message", b"news", True), ("pmessage", b"news", True),
        ]  # fmt: skip
        assert listener.get_sharded_message(timeout=WAIT_S)["data"] == b"x"
        listener.ping("hey")
        assert listener.get_message(timeout=WAIT_S)["data"] == b"hey"
        assert other.pubsub_numsub("news") == [(b"news", 1)]
        listener.unsubscribe()
        listener.punsubscribe()
        assert [listener.get_message(timeout=WAIT_S)["type"] for _ in range(2)] == ["unsubscribe", "punsubscribe"]
        assert other.publish("news", "nobody") == 0


def test_a_monitor_shows_what_others_do(client: Any, other: Any) -> None:
    with client.monitor() as watched:
        other.set('a"b', b"\r\n")
        commands = (watched.next_command() for _ in range(20))
        seen = next(each for each in commands if each["command"].startswith("SET"))
    assert seen["command"] == 'SET a"b \\r\\n'
    assert (seen["db"], seen["client_type"]) == (0, "tcp")


def test_operators_commands_parse(client: Any) -> None:
    assert client.time()[0] > 1_600_000_000
    assert client.role()[0] in (b"master", "master")
    assert client.wait(0, 10) == 0
    assert client.acl_whoami() in (b"default", "default")
    assert client.acl_getuser("default")["enabled"] is True
    assert client.acl_users() in ([b"default"], ["default"])
    assert client.config_set("slowlog-log-slower-than", 0) is True
    client.get("k")
    assert client.slowlog_len() > 0
    assert client.slowlog_get(1)[0]["command"]
    assert client.slowlog_reset() is True
    assert client.config_set("slowlog-log-slower-than", 10000) is True
    assert isinstance(client.memory_stats()["total.allocated"], int)
    assert client.memory_purge() in (True, b"OK")
    assert client.latency_latest() == []
    assert client.client_pause(1) is True
    assert client.client_unpause() in (True, b"OK", "OK")
    assert client.module_list() == []
    assert client.lastsave() is not None
    assert client.client_trackinginfo()
    with pytest.raises(redis.ResponseError, match="enable-debug-command"):
        client.execute_command("DEBUG", "SLEEP", "0")


def test_a_killed_connection_is_made_again_and_the_command_sent_again(
    kind: str, kvredis: RunningServer, other: Any
) -> None:
    retry = Retry(NoBackoff(), 3)
    pool = pool_of(kind, kvredis, retry=retry, retry_on_error=[redis.ConnectionError], db=2)
    with redis.Redis(connection_pool=pool) as connected:
        connected.set("k", "v")
        assert other.client_kill_filter(_id=connected.client_id()) == 1
        assert connected.get("k") == b"v"
        assert connected.client_info()["db"] in (2, "2")
    pool.disconnect()


@pytest.mark.parametrize("kind", ["hiredis-2", "hiredis-3"])
def test_a_bounded_pool_serves_many_threads(kind: str, kvredis: RunningServer) -> None:
    protocol = int(kind[-1])
    pool: Any = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        host="127.0.0.1", port=kvredis.port, protocol=protocol, max_connections=4, timeout=WAIT_S
    )
    with redis.Redis(connection_pool=pool) as connected, ThreadPoolExecutor(16) as threads:

        def work(n: int) -> bool:
            connected.set(f"k{n}", BLOCK[: n * 1000])
            return bool(connected.get(f"k{n}") == BLOCK[: n * 1000])

        assert all(threads.map(work, range(200)))
    pool.disconnect()


def test_a_user_logs_in_and_is_kept_within_bounds(kind: str, kvredis: RunningServer, other: Any) -> None:
    assert other.acl_setuser(
        "app", enabled=True, passwords=["+secret"], keys=["app:*"], commands=["+get", "+set", "+ping"]
    )
    try:
        good = pool_of(kind, kvredis, username="app", password="secret")
        with redis.Redis(connection_pool=good) as app:
            assert app.set("app:k", "v") is True
            with pytest.raises(redis.exceptions.NoPermissionError, match="access a key"):
                app.get("other")
            with pytest.raises(redis.exceptions.NoPermissionError, match="has no permissions to run the 'del' command"):
                app.delete("app:k")
        good.disconnect()
        bad = pool_of(kind, kvredis, username="app", password="wrong")
        with redis.Redis(connection_pool=bad) as refused, pytest.raises(redis.AuthenticationError):
            refused.ping()
        bad.disconnect()
    finally:
        other.acl_deluser("app")


def test_locks_and_scripts_find_no_lua_and_leave_the_connection_well(client: Any) -> None:
    lock = client.lock("lock", timeout=100)
    assert lock.acquire(blocking=False) is True
    with pytest.raises(redis.ResponseError, match="unknown command 'EVALSHA'"):
        lock.release()
    with pytest.raises(redis.ResponseError, match="unknown command 'EVAL'"):
        client.eval("return 1", 0)
    with pytest.raises(redis.ResponseError, match="unknown command 'SCRIPT'"):
        client.script_load("return 1")
    with pytest.raises(redis.ResponseError, match="unknown command 'HSET'"):
        client.hset("h", "f", "v")
    assert client.ping() is True


def test_cluster_and_sentinel_clients_are_told_that_there_is_none(kvredis: RunningServer) -> None:
    with pytest.raises(redis.exceptions.RedisClusterException, match="Cluster mode is not enabled"):
        redis.RedisCluster(host="127.0.0.1", port=kvredis.port)
    sentinel: Any = Sentinel([("127.0.0.1", kvredis.port)])  # type: ignore[no-untyped-call]
    with pytest.raises(redis.ResponseError, match="unknown command 'SENTINEL'"):
        sentinel.discover_master("mymaster")
    for each in sentinel.sentinels:
        each.close()


def test_a_unix_socket_serves_as_well(kvredis: RunningServer) -> None:
    with redis.Redis(unix_socket_path=kvredis.unixsocket, db=3) as connected:
        assert connected.set("k", BLOCK) is True
        assert connected.get("k") == BLOCK
        assert connected.info("keyspace")["db3"]["keys"] == 1
