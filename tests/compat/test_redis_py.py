"""redis-py in both protocols, with hiredis and with its own parser: the client that most people have."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.compat.conftest import RunningServer
from tests.compat.test_redis_py_work import KINDS, pool_of

BLOCK = bytes(range(256)) * 4096


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, kvredis: RunningServer) -> Iterator[Any]:
    """A client of our server; untyped, since redis-py's own types make every reply an Awaitable or not."""
    pool = pool_of(request.param, kvredis, client_name="compat")
    with redis.Redis(connection_pool=pool) as connected:
        yield connected
    pool.disconnect()


def test_values_come_back_as_they_went(client: Any) -> None:
    assert client.ping() is True
    assert client.set("block", BLOCK) is True
    assert client.get("block") == BLOCK
    assert client.get("nope") is None
    assert client.mset({"a": b"1", "b": BLOCK}) is True
    assert client.mget("a", "nope", "b") == [b"1", None, BLOCK]
    assert client.getrange("block", 256, 511) == BLOCK[256:512]
    assert client.strlen("block") == len(BLOCK)
    assert client.set("a", b"2", nx=True) is None
    assert client.set("a", b"2", get=True) == b"1"
    assert client.setnx("c", b"3") is True


def test_keys_are_listed_counted_and_deleted(client: Any) -> None:
    client.mset({f"k{n}": "x" for n in range(100)})
    assert client.dbsize() == 100
    assert sorted(client.scan_iter(match="k1?", count=7)) == [b"k1%d" % n for n in range(10)]
    assert sorted(client.keys("k9*")) == [b"k9", *(b"k9%d" % n for n in range(10))]
    assert client.exists("k1", "k2", "nope") == 2
    assert client.delete("k1", "nope") == 1
    assert client.unlink("k2") == 1
    assert client.touch("k3", "nope") == 1
    assert client.type("k3") == b"string"
    assert client.randomkey().startswith(b"k")
    assert client.flushdb() is True
    assert client.dbsize() == 0


def test_expiry_is_set_shown_and_taken_away(client: Any) -> None:
    client.set("k", "v", ex=100)
    assert 98 <= client.ttl("k") <= 100
    assert client.persist("k") is True
    assert client.ttl("k") == -1
    assert client.pexpire("k", 50_000, nx=True) is True
    assert 49_000 <= client.pttl("k") <= 50_000
    assert client.expire("k", -1) is True
    assert client.ttl("k") == -2


def test_facts_about_the_server_parse(client: Any) -> None:
    client.set("k", "v")
    info = client.info("everything")
    assert info["redis_version"] == "7.4.0"
    assert info["server_name"] == "kvredis"
    assert info["maxmemory"] == 64 * 1024 * 1024
    assert 0 < info["used_memory"] < info["maxmemory"]
    assert info["db0"] == {"keys": 1, "expires": 0, "avg_ttl": 0}
    assert info["cmdstat_set"]["calls"] >= 1
    assert client.info("kv")["memory_page_size"] == 4096
    assert client.config_get("maxmemory*")["maxmemory-policy"] == "allkeys-lru"
    assert client.memory_usage("k") > 0
    assert client.object("encoding", "k") == b"embstr"
    assert client.config_resetstat() is True


def test_the_connection_knows_itself(client: Any) -> None:
    number = client.client_id()
    assert client.client_getname() in ("compat", b"compat")
    (mine,) = [each for each in client.client_list() if each["id"] == str(number)]
    assert mine["name"] == "compat"
    assert mine["lib-name"] == "redis-py"
    assert mine["cmd"] == "client|list"
    assert client.client_info()["id"] == number
    assert client.client_no_evict("ON") in (True, b"OK", "OK")
    assert client.client_no_touch("OFF") in (True, b"OK", "OK")


def test_commands_describe_themselves(client: Any) -> None:
    commands = client.command()
    assert client.command_count() == len(commands)
    assert commands["get"]["arity"] == 2
    assert set(commands["get"]["flags"]) == {"readonly", "fast"}
    assert client.command_getkeys("MSET", "a", 1, "b", 2) in ([b"a", b"b"], ["a", "b"])
    assert b"client|list" in client.command_list()
    assert set(client.command_list(category="connection")) > {b"ping", b"hello", b"client|id"}


def test_errors_are_of_the_class_that_redis_py_gives_them(client: Any) -> None:
    with pytest.raises(redis.ResponseError, match="unknown command 'LPUSH', with args beginning with: 'l' 'x' "):
        client.lpush("l", "x")
    with pytest.raises(redis.OutOfMemoryError):
        client.set("k", bytes(65 * 1024 * 1024))
    client.connection_pool.disconnect()  # in RESP2 redis-py says no HELLO, and such a client is hung up on
    with pytest.raises(redis.ResponseError, match="DB index is out of range"):
        client.execute_command("SELECT", 99)
    assert client.ping() is True


def test_a_pipeline_keeps_its_order_and_its_errors(client: Any) -> None:
    pipeline = client.pipeline(transaction=False)
    for n in range(100):
        pipeline.set(f"k{n}", BLOCK[: n * 1000])
    pipeline.execute_command("NOPE")
    for n in range(100):
        pipeline.get(f"k{n}")
    replies = pipeline.execute(raise_on_error=False)
    assert replies[:100] == [True] * 100
    assert isinstance(replies[100], redis.ResponseError)
    assert replies[101:] == [BLOCK[: n * 1000] for n in range(100)]
