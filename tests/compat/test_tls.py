"""TLS as clients use it: redis-py and redis-cli do real work over it, and are refused where they must be."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.compat.conftest import start_kvredis, stop
from tests.server.certificates import Papers, make_papers

MIB = 1024 * 1024


@dataclass(frozen=True)
class TlsServer:
    """A server's TLS port, and what its clients show."""

    port: int
    papers: Papers

    def client_options(self, show: str = "client") -> dict[str, Any]:
        """What redis-py is called with."""
        return {
            "host": "localhost",
            "port": self.port,
            "ssl": True,
            "ssl_ca_certs": self.papers.path("ca"),
            "ssl_certfile": self.papers.path(show),
            "ssl_keyfile": self.papers.path(f"{show}_key"),
        }

    def redis_cli(self, *words: str, show: str | None = "client", said: str | None = None) -> str:
        """What redis-cli prints."""
        program = shutil.which("redis-cli")
        if program is None or b"--tls" not in subprocess.run([program, "--help"], capture_output=True).stdout:
            pytest.skip("there is no redis-cli with TLS (apt install redis-tools)")
        keys = [] if show is None else ["--cert", self.papers.path(show), "--key", self.papers.path(f"{show}_key")]
        where = ["-h", "localhost", "-p", str(self.port), "--tls", "--cacert", self.papers.path("ca")]
        ran = subprocess.run([program, *where, *keys, *words], input=said, capture_output=True, text=True, timeout=60)
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    papers = make_papers(tmp_path_factory.mktemp("papers"))
    files = ["--tls-cert-file", papers.path("server"), "--tls-key-file", papers.path("server_key")]
    process, running = start_kvredis(
        tmp_path_factory.mktemp("tls"), "--tls-port", "free", *files, "--tls-ca-cert-file", papers.path("ca")
    )
    with redis.Redis(unix_socket_path=running.unixsocket, decode_responses=True) as client:
        port = int(client.config_get("tls-port")["tls-port"] or 0)
    yield TlsServer(port, papers)
    stop(process)


def test_redis_py_stores_reads_pipelines_and_listens(server: TlsServer) -> None:
    value = bytes(range(256)) * 32768
    with redis.Redis(**server.client_options()) as client:
        assert client.set("large", value)
        assert client.get("large") == value
        with client.pipeline(transaction=False) as batch:
            for number in range(1000):
                batch.set(f"k{number}", str(number))
            assert all(batch.execute())
        assert client.mget([f"k{number}" for number in range(1000)]) == [b"%d" % number for number in range(1000)]
        with client.pubsub() as listener:
            listener.subscribe("news")
            assert (listener.get_message(timeout=10) or {}).get("type") == "subscribe"
            assert client.publish("news", "over TLS") == 1
            assert (listener.get_message(timeout=10) or {}).get("data") == b"over TLS"
        me = client.client_info()
        assert me["laddr"] == f"127.0.0.1:{server.port}"


def test_redis_py_asyncio_shares_a_pool(server: TlsServer) -> None:
    async def work() -> list[object]:
        async with redis.asyncio.Redis(protocol=3, max_connections=32, **server.client_options()) as client:
            await asyncio.gather(*(client.set(f"a{number}", b"x" * MIB) for number in range(16)))
            return [await client.get(f"a{number}") for number in range(16)]

    assert asyncio.run(work()) == [b"x" * MIB] * 16


def test_redis_py_with_a_stranger_s_certificate_gets_nothing(server: TlsServer) -> None:
    for options in (server.client_options("stranger"), {"host": "localhost", "port": server.port}):
        client = redis.Redis(socket_timeout=20, retry=Retry(NoBackoff(), 0), **options)
        with client, pytest.raises(redis.ConnectionError):
            client.get("large")


def test_redis_cli_does_its_work(server: TlsServer) -> None:
    assert server.redis_cli("SET", "cli", "over TLS") == "OK\n"
    assert server.redis_cli("-3", "GET", "cli") == '"over TLS"\n' or server.redis_cli("GET", "cli") == "over TLS\n"
    mass = "".join(f"SET mass{number} {number}\r\n" for number in range(10_000))
    assert "errors: 0, replies: 10000" in server.redis_cli("--pipe", said=mass)
    assert "redis_version:" in server.redis_cli("INFO", "server")
    assert len(server.redis_cli("--scan", "--pattern", "mass*").split()) == 10_000


def test_redis_cli_without_a_certificate_is_refused(server: TlsServer) -> None:
    assert "over TLS" not in server.redis_cli("GET", "cli", show=None)
