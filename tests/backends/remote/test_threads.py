"""A server that sends by several threads is loaded from over several connections, and one that does not is not."""

from contextlib import closing

import pytest

from kvredis.backends.config.url import Address, parse_url
from kvredis.backends.remote import load as remote_load
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.resp.connection import Connection
from tests.backends.conftest import ServerProcess, StartServer, small_store
from tests.backends.fake_server import FakeServer, Leave, polite
from tests.backends.verbs import content, keys_of, loaded, put_through

KEYS = keys_of(12)
CONTENT = {key: content(key) for key in KEYS}


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies may take their time, as the machine does that runs the tests."""
    monkeypatch.setattr(remote_load, "TOGETHER_S", 60.0)


def filled(server: ServerProcess) -> Address:
    """Where it is, now that another engine has stored all keys there."""
    address = parse_url(server.tcp_url)
    with closing(RemoteBackend(address, small_store(), timeout_s=20.0)) as writer:
        for key in KEYS:
            assert put_through(writer, key, CONTENT[key])
    return address


@pytest.mark.parametrize(
    ("threads", "connections", "lanes"),
    [(1, None, 1), (2, None, 2), (3, None, 3), (4, None, 4), (8, None, 8), (4, 2, 2), (4, 6, 6), (1, 6, 1)],
)
def test_a_load_uses_as_many_connections_as_the_server_has_threads(
    threads: int, connections: int | None, lanes: int, server_of: StartServer
) -> None:
    address = filled(server_of("kvredis", "--io-threads", str(threads)))
    with closing(RemoteBackend(address, small_store(128 << 20), connections=connections, timeout_s=20.0)) as backend:
        for _ in range(3):  # over the same connections each time
            assert loaded(backend, KEYS) == [*CONTENT.values()]
            assert backend.stats()["connections"] == lanes
        assert loaded(backend, [*KEYS[:2], b"nowhere", KEYS[5]]) == [
            CONTENT[KEYS[0]],
            CONTENT[KEYS[1]],
            None,
            CONTENT[KEYS[5]],
        ]


def test_loads_at_once_get_their_own_bytes_from_threads_that_both_need(server_of: StartServer) -> None:
    address = filled(server_of("kvredis", "--io-threads", "4"))
    with closing(RemoteBackend(address, small_store(128 << 20), timeout_s=20.0)) as backend:
        loads = [backend.load(KEYS), backend.load(KEYS[::-1])]
        for wanted in zip(KEYS, KEYS[::-1], strict=True):
            for key, load in zip(wanted, loads, strict=True):
                lease = next(load)
                assert lease is not None
                with lease:
                    assert lease.view == CONTENT[key]
        assert [list(load) for load in loads] == [[], []]
        assert backend.stats()["connections"] == 6, "those of one load and of what is stored stay open"


def test_a_server_that_is_killed_while_threads_send_is_a_miss(server_of: StartServer) -> None:
    server = server_of("kvredis", "--io-threads", "4")
    with closing(RemoteBackend(filled(server), small_store(128 << 20), timeout_s=5.0)) as backend:
        leases = backend.load(KEYS)
        first = next(leases)
        assert first is not None
        first.release()
        server.kill()
        for key, lease in zip(KEYS[1:], leases, strict=True):
            if lease is not None:  # it had come before
                with lease:
                    assert lease.view == CONTENT[key]
        assert loaded(backend, KEYS) == [None] * len(KEYS)


def test_over_tls_a_server_sends_by_one_thread(tls_url: str) -> None:
    with closing(Connection.open(tls_url)) as connection:
        assert connection.io_threads == 1


@pytest.mark.parametrize("told", [b"$4\r\nmany\r\n", b":-3\r\n", b":0\r\n", b"*0\r\n", b"$-1\r\n"])
def test_what_is_no_number_of_threads_counts_as_one(told: bytes) -> None:
    def answer(args: list[bytes]) -> bytes | Leave:
        return b"*2\r\n$10\r\nio-threads\r\n" + told if args[0] == b"HELLO" else polite(args)

    with (
        closing(FakeServer(None, answer)) as fake,
        closing(RemoteBackend(parse_url(fake.url), small_store())) as backend,
    ):
        assert loaded(backend, KEYS) == [None] * len(KEYS)
        assert backend.stats()["connections"] == 1
