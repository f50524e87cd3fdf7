"""An engine whose remote is there and says no: it has no room, wants a password, takes no writes, is still loading,
cannot write to its disk. What can be loaded is loaded, the rest is computed, it is said once, and it ends by itself.
"""

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from tests.backends.nodes import Node, free_ports, wait_until
from tests.faults.engine_runs import (
    STORED,
    Kind,
    Mode,
    Subject,
    assert_recovers,
    quick_retries,
    seed,
    served,
    warnings_of,
)
from tests.faults.small_disk import full_disk, grow
from tests.gate import nightly
from tests.server.feed import request

__all__ = ["full_disk", "quick_retries"]

PASSWORD = "open-sesame"
ARENA_BYTES = 16 << 20


@pytest.fixture(params=["kvredis", "redis"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """What the remote is."""
    kind: Kind = request.param
    return kind


def test_a_redis_that_is_out_of_memory_takes_nothing_and_still_serves_what_it_has(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    with served("redis", "--maxmemory-policy", "noeviction") as server, Subject(server.url, mode) as subject:
        seed(server.url, 0, 1)
        server.ask("CONFIG", "SET", "maxmemory", "1")
        for number in range(2, 5):
            assert subject.ask(number) == 0
            assert subject.engine.flush() > 0
        assert subject.ask(0) == STORED
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        assert "OOM" in warnings_of(caplog)[0]
        assert subject.remote("refused") == 9
        assert subject.remote("stored") == 0
        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 1


@contextlib.contextmanager
def full_of_leases(server: Node, path: str) -> Iterator[None]:
    """While this lasts all of the server's arena is lent to clients who do not read on."""
    with contextlib.ExitStack() as readers, server.client() as client:
        for number in range(8):
            client.set(f"lent-{number}", bytes(ARENA_BYTES // 8 - 4096))
            deaf = readers.enter_context(socket.socket(socket.AF_UNIX))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(path)
            deaf.sendall(request("GET", f"lent-{number}"))
            wait_until(lambda lent=number: leases(client) > lent, "the value is lent")  # type: ignore[misc]
        yield


def leases(client: "redis.Redis") -> int:
    return int(client.info("kv")["memory_leases"])


def test_a_kvredis_whose_arena_is_lent_out_takes_nothing_until_its_readers_have_read(
    mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "socket")
    flags = ("--unixsocket", path, "--max-local-cpu-size", f"{ARENA_BYTES >> 20}MB")
    with served("kvredis", *flags) as server, Subject(server.url, mode) as subject:
        with full_of_leases(server, path):
            for number in range(3):
                assert subject.ask(number) == 0
                assert subject.engine.flush() > 0
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert "OOM" in warnings_of(caplog)[0]
            assert subject.remote("refused") + subject.remote("dropped") == 9
            assert subject.remote("stored") == 0
        assert_recovers(subject, server.url)


@pytest.mark.parametrize(("shown", "complaint"), [nightly("", "NOAUTH"), ("wrong", "WRONGPASS")])
def test_a_server_that_wants_another_password_is_a_miss_until_it_wants_ours(
    kind: Kind, mode: Mode, shown: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with served(kind, password=PASSWORD) as server:
        url = server.url.replace(f":{PASSWORD}@", f":{shown}@" if shown else "")
        with Subject(url, mode) as subject:
            for number in range(3):
                assert subject.ask(number) == 0
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert complaint in warnings_of(caplog)[0]
            assert PASSWORD not in caplog.text
            assert "wrong" not in caplog.text
            assert subject.remote("losses") == 1
            with server.client() as admin:
                admin.config_set("requirepass", shown)
            assert_recovers(subject, url)
        assert len(warnings_of(caplog)) == 2, "lost, and back"


def test_a_server_that_becomes_a_replica_is_read_from_or_given_up_and_written_to_once_it_is_none(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    with served("redis") as server, Subject(server.url, mode) as subject:
        seed(server.url, 0, 1)
        assert subject.ask(0) == STORED
        (free,) = free_ports(1)
        server.ask("REPLICAOF", "127.0.0.1", free)
        caplog.clear()
        for number in range(2, 5):
            assert subject.ask(number) == 0
            assert subject.engine.flush() >= 0
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        assert "READONLY" in warnings_of(caplog)[0]
        assert subject.remote("stored") == 0
        assert subject.remote("refused") + subject.remote("dropped") == 9
        server.ask("REPLICAOF", "NO", "ONE")
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) <= 2


def test_a_server_that_is_still_loading_is_a_miss_until_it_has_loaded(
    mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    slow = ("--key-load-delay", "0", "--loading-process-events-interval-bytes", "1024")
    with served("redis", *slow) as server:
        seed(server.url, 0, 1)
        server.ask("DEBUG", "POPULATE", 10_000, "key", 100)
        server.ask("SAVE")
        server.kill()
        server.command[server.command.index("--key-load-delay") + 1] = "3000"  # us: it answers every 30 ms
        server.start()
        with Subject(server.url, mode) as subject:
            for number in range(3):
                assert subject.ask(number) == 0
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert "LOADING" in warnings_of(caplog)[0]
            server.ask("CONFIG", "SET", "key-load-delay", "0")
            wait_until(lambda: subject.knows(1), "what it has loaded")
            assert subject.ask(1) == STORED
            assert_recovers(subject, server.url)
        assert len(warnings_of(caplog)) == 2, "lost, and back"


@pytest.mark.nightly  # a server's disk: test_disk_faults.py; an engine's: test_engine_broken_disk.py
def test_a_server_whose_disk_is_full_serves_from_memory_and_keeps_the_engine_out_of_it(
    mode: Mode, full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--max-local-cpu-size", "1MB", "--local-disk", str(full_disk), "--max-local-disk-size", "32MB")
    with served("kvredis", *flags) as server, Subject(server.url, mode) as subject:
        for number in range(40):  # 3 MiB
            subject.ask(number)
            subject.engine.flush()
        with Subject(server.url) as other:
            assert other.ask(39) == STORED
            assert not other.knows(0), "it left memory and could not be written"
        assert warnings_of(caplog) == [], "the server's own trouble"
        grow(full_disk)
        assert_recovers(subject, server.url)
        with server.client() as client:
            client.set("saved", bytes(1 << 14))
            saved = partial(client.execute_command, "WAITAOF", 1, 0, 1000)
            wait_until(lambda: (saved() or [0])[0] == 1, "the disk is trusted again")
        for number in range(60, 80):
            subject.ask(number)
            subject.engine.flush()
        with Subject(server.url) as other:
            assert other.ask(60) == STORED, "it is on disk"
