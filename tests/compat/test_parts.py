"""A chunk stored layer by layer and read layer by layer, by clients that know nothing of kvredis."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.compat.conftest import RunningServer
from tests.server.live import pattern

LAYERS = 28
LAYER_BYTES = 131_072
TIMEOUT_S = 30


@pytest.fixture(params=[2, 3])
def client(request: pytest.FixtureRequest, kvredis: RunningServer) -> Iterator[Any]:
    """redis-py with one connection, pipelines included: a reservation belongs to it."""
    pool = redis.ConnectionPool(
        host="127.0.0.1", port=kvredis.port, protocol=request.param, max_connections=1, socket_timeout=10
    )
    with redis.Redis(connection_pool=pool) as connected:
        yield connected
    pool.disconnect()


def layer(number: int) -> bytes:
    """One layer of the chunk."""
    return pattern(LAYER_BYTES, number)


def test_redis_py_stores_a_chunk_layer_by_layer_and_reads_it_so(client: Any, kvredis: RunningServer) -> None:
    with redis.Redis(host="127.0.0.1", port=kvredis.port) as other:
        number = client.execute_command("KV.RESERVE", "chunk", LAYERS * LAYER_BYTES)
        assert isinstance(number, int)
        for at in reversed(range(LAYERS)):
            assert client.execute_command("KV.WRITE", number, at * LAYER_BYTES, layer(at)) in (b"OK", True)
            assert other.exists("chunk") == 0
            if at == LAYERS // 2:
                with pytest.raises(redis.ResponseError, match="holds 1835008 of 3670016 bytes"):
                    client.execute_command("KV.COMMIT", number)
        assert client.execute_command("KV.COMMIT", number, "NX") in (b"OK", True)
        assert other.strlen("chunk") == LAYERS * LAYER_BYTES
        for at in range(LAYERS):
            assert other.getrange("chunk", at * LAYER_BYTES, (at + 1) * LAYER_BYTES - 1) == layer(at)
        assert other.get("chunk") == b"".join(map(layer, range(LAYERS)))


def test_redis_py_sends_all_layers_in_one_pipeline(client: Any) -> None:
    number = client.execute_command("KV.RESERVE", "chunk", LAYERS * LAYER_BYTES)
    pipeline = client.pipeline(transaction=False)
    for at in range(LAYERS):
        pipeline.execute_command("KV.WRITE", number, at * LAYER_BYTES, layer(at))
    pipeline.execute_command("KV.COMMIT", number, "EX", 100)
    for at in range(LAYERS):
        pipeline.getrange("chunk", at * LAYER_BYTES, (at + 1) * LAYER_BYTES - 1)
    replies = pipeline.execute()
    assert all(reply in (b"OK", True) for reply in replies[: LAYERS + 1])
    assert replies[LAYERS + 1 :] == [layer(at) for at in range(LAYERS)]
    assert 90 <= client.ttl("chunk") <= 100


def test_redis_py_hears_of_a_reservation_that_it_lost_with_its_connection(client: Any) -> None:
    number = client.execute_command("KV.RESERVE", "chunk", 100_000)
    client.connection_pool.disconnect()
    with pytest.raises(redis.ResponseError, match="no such reservation"):
        client.execute_command("KV.WRITE", number, 0, bytes(100_000))
    assert client.ping() is True


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_redis_cli_stores_a_value_in_parts_that_are_typed(kvredis: RunningServer) -> None:
    ours, its = os.openpty()  # or it would keep its answers until it ends
    command = ["timeout", str(TIMEOUT_S), "redis-cli", "-s", kvredis.unixsocket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=its, stderr=its) as cli:
        os.close(its)
        assert cli.stdin is not None
        seen = b""

        def ask(line: str) -> bytes:
            nonlocal seen
            assert cli.stdin is not None
            cli.stdin.write(line.encode() + b"\n")
            cli.stdin.flush()
            while True:
                while b"\n" not in seen:
                    seen += os.read(ours, 4096)
                answer, _, seen = seen.partition(b"\n")
                if not re.fullmatch(rb"\(\d+\.\d+s\)", answer.strip()):  # of a slow answer before
                    return answer.strip()

        try:
            number = int(ask("KV.RESERVE typed 40010").split()[-1])
            assert ask(f'KV.WRITE {number} 10 "{"x" * 20_000}{"y" * 20_000}"') == b"OK"
            assert b"holds 40000 of 40010 bytes" in ask(f"KV.COMMIT {number}")
            assert ask(f"KV.WRITE {number} 0 0123456789") == b"OK"
            assert ask(f"KV.COMMIT {number} NX") == b"OK"
            assert ask("GETRANGE typed 5 14").strip(b'"') == b"56789xxxxx"
            assert ask("GETRANGE typed 20008 20011").strip(b'"') == b"xxyy"
            assert ask(f"KV.ABORT {number}").split()[-1] == b"0"
        finally:
            cli.stdin.close()
            cli.wait(TIMEOUT_S)
            os.close(ours)
