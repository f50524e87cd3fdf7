"""A master behind Sentinels: found, lost in the middle of stores and loads, demoted, and found again elsewhere."""

import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvredis.backends.config.url import SentinelAddress, parse_remote
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.health import RETRY_S_MAX, Link
from kvredis.backends.resp.sentinel import SentinelResolver
from kvredis.storage.errors import BackendError
from tests.backends.conftest import Clock, small_store
from tests.backends.fake_server import FakeServer, Leave, Said, polite
from tests.backends.nodes import HOST, wait_until
from tests.backends.topologies import SERVICE, Sentinels
from tests.server.certificates import make_papers

BLOCK_BYTES = 200_000
ROUND = 20
"""Blocks that are stored and loaded together."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Sentinels]:
    """A set whose members no test kills; who is master may change."""
    with Sentinels() as sentinels:
        yield sentinels


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    """A set of a test's own; one Sentinel, as three may need several elections until one has the votes."""
    with Sentinels(sentinels=1) as own:
        yield own


def parse_sentinels(url: str) -> SentinelAddress:
    address = parse_remote(url)
    assert isinstance(address, SentinelAddress)
    return address


def address_of(sentinels: Sentinels) -> SentinelAddress:
    return parse_sentinels(sentinels.url)


def master_port(sentinels: Sentinels) -> int:
    master = sentinels.master()
    assert master is not None
    return master.port


# ---- asking ------------------------------------------------------------------------------------------------------


def test_the_sentinels_name_the_master_with_our_credentials_for_it(shared: Sentinels) -> None:
    address = replace(address_of(shared), username="me", password="secret", db=2)
    assert SentinelResolver(address).master(20.0) == address.server(HOST, master_port(shared))


def test_a_sentinel_that_does_not_answer_is_passed_over_and_asked_last_from_then_on(shared: Sentinels) -> None:
    address = address_of(shared)
    with socket.create_server((HOST, 0)) as deaf, socket.socket() as closed:
        closed.bind((HOST, 0))
        hung: list[tuple[str, int]] = [deaf.getsockname()[:2], closed.getsockname()[:2]]
        resolver = SentinelResolver(replace(address, sentinels=(*hung, address.sentinels[0])))
        assert resolver.master(9.0).port == master_port(shared)
        deaf.settimeout(0.0)
        deaf.accept()[0].close()
        assert resolver.master(9.0).port == master_port(shared)
        with pytest.raises(BlockingIOError):
            deaf.accept()


def test_when_no_sentinel_knows_a_master_each_answer_is_said(shared: Sentinels) -> None:
    address = address_of(shared)
    with socket.create_server((HOST, 0)) as deaf, socket.socket() as closed:
        closed.bind((HOST, 0))
        hung: list[tuple[str, int]] = [deaf.getsockname()[:2], closed.getsockname()[:2]]
        unknown = replace(address, sentinels=(*hung, address.sentinels[0]), service="team's")
        began_s = time.monotonic()
        with pytest.raises(BackendError) as caught:
            SentinelResolver(unknown).master(1.0)
        assert time.monotonic() - began_s < 10
    said = str(caught.value)
    assert said.startswith('no Sentinel knows a master for "team\'s"')
    for (host, port), answer in zip(
        unknown.sentinels, ("timed out|Timeout", "refused", "does not watch it"), strict=True
    ):
        (part,) = [part for part in said.split("; ") if f"{host}:{port}: " in part]
        assert any(word.lower() in part.lower() for word in answer.split("|"))


def test_a_sentinel_that_wants_a_password_gets_the_one_for_sentinels(shared: Sentinels) -> None:
    address = replace(address_of(shared), sentinels=address_of(shared).sentinels[:1])
    guarded = shared.sentinels[0]
    with guarded.client() as admin:  # which is in already
        admin.execute_command("ACL", "SETUSER", "asker", "on", ">watchword", "+@all")
        admin.execute_command("ACL", "SETUSER", "default", "resetpass", "-@all", "+auth", "+hello")
        try:
            with pytest.raises(BackendError, match="no Sentinel knows a master"):
                SentinelResolver(address).master(20.0)
            wrong = replace(address, sentinel_username="asker", sentinel_password="hush")
            with pytest.raises(BackendError, match="no Sentinel knows a master") as caught:
                SentinelResolver(wrong).master(20.0)
            assert "hush" not in str(caught.value)
            right = replace(address, sentinel_username="asker", sentinel_password="watchword")
            assert SentinelResolver(right).master(20.0).port == next(
                node.port for node in shared.nodes if node.ask("ROLE")[0] == "master"
            )
        finally:
            admin.execute_command("AUTH", "asker", "watchword")
            admin.execute_command("ACL", "SETUSER", "default", "nopass", "+@all")


def test_sentinels_servers_and_passwords_over_tls(tmp_path: Path) -> None:
    with Sentinels(sentinels=1, password="secret", papers=make_papers(tmp_path)) as secured:
        link = Link(parse_sentinels(secured.url), 20.0)
        connection = link.open()
        assert connection is not None
        with connection:
            assert connection.set(b"k", b"over TLS") == "OK"
        assert secured.nodes[0].ask("GET", "k") == "over TLS"
        assert "secret" not in str(link.address)


# ---- opening -----------------------------------------------------------------------------------------------------


def test_a_server_that_the_sentinels_name_but_is_no_master_is_not_used(
    shared: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    replica = next(node for node in shared.nodes if node.port != master_port(shared))
    shared.sentinels[0].ask("SENTINEL", "MONITOR", "mistaken", HOST, replica.port, 2)
    try:
        link = Link(replace(address_of(shared), sentinels=address_of(shared).sentinels[:1], service="mistaken"), 20.0)
        assert link.open() is None
        assert "the master that the Sentinels name is none any more" in caplog.text
    finally:
        shared.sentinels[0].ask("SENTINEL", "REMOVE", "mistaken")


def test_without_sentinels_there_is_one_warning_and_none_of_it_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        where = f"{HOST}:{closed.getsockname()[1]}/cache"
        with closing(
            RemoteBackend(parse_sentinels(f"redis-sentinel://:hush@{where}"), small_store(), timeout_s=5.0)
        ) as backend:
            assert backend.match([b"k"]) == 0
            assert list(backend.load([b"k"])) == [None]
            assert backend.match([b"k"]) == 0
    (said,) = caplog.messages
    assert said.startswith(f"redis-sentinel://:***@{where} is lost (no Sentinel knows a master for 'cache'")


@pytest.mark.parametrize(
    "lie",
    [
        b"+OK\r\n",
        b"$-1\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n*2\r\n$4\r\nname\r\n$8\r\nmymaster\r\n",
        b"*1\r\n*6\r\n$4\r\nname\r\n$8\r\nmymaster\r\n$5\r\nflags\r\n$6\r\nmaster\r\n$2\r\nip\r\n$0\r\n\r\n",
        Leave(b"*1\r\n*40\r\n"),
        b"\0" * 20_000,
    ],
)
def test_a_sentinel_that_answers_nonsense_is_misses_and_one_warning(
    lie: Said, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(FakeServer(None, lambda args: lie if args[0] == b"SENTINEL" else polite(args))) as liar:
        address = parse_sentinels(f"redis-sentinel://{HOST}:{liar.port}")
        with closing(RemoteBackend(address, small_store(), timeout_s=5.0, clock=clock)) as backend:
            for _ in range(3):
                assert backend.match([b"k"]) == 0
                assert list(backend.load([b"k"])) == [None]
                clock.now_s += RETRY_S_MAX
            assert len(liar.named(b"SENTINEL")) == 3
            assert backend.stats()["losses"] == len(caplog.messages) == 1


# ---- failing over ------------------------------------------------------------------------------------------------


class Engine:
    """Stores blocks and loads them, as an engine does, and never believes a byte."""

    def __init__(self, backend: RemoteBackend) -> None:
        self.backend = backend
        self.rounds = self.whole = 0

    def round(self) -> int:
        """Store new blocks and load them; how many came back. All that does is right."""
        self.rounds += 1
        keys = [b"%d:%d" % (self.rounds, number) for number in range(ROUND)]
        for key in keys:
            reservation = self.backend.reserve(key, BLOCK_BYTES)
            if reservation is not None:
                with reservation:
                    reservation.view[:] = body_of(key)
                    reservation.commit()
        self.backend.flush()
        found = self.backend.match(keys)
        hits = 0
        for key, lease in zip(keys[:found], self.backend.load(keys[:found]), strict=True):
            if lease is not None:
                with lease:
                    assert lease.view == body_of(key)
                hits += 1
        self.whole += hits == ROUND
        return hits


def body_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(BLOCK_BYTES)


def rounds_in_background(engine: Engine, stop: threading.Event) -> threading.Thread:
    """Go round and round until told to stop; what goes wrong fails the test, as an unhandled exception of a thread."""

    def work() -> None:
        while not stop.wait(0.01):
            engine.round()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def more_whole_rounds(engine: Engine, count: int) -> None:
    wanted = engine.whole + count
    wait_until(lambda: engine.whole >= wanted, f"{count} rounds without a miss")


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_master_lost_in_the_middle_of_stores_and_loads_is_misses_until_its_replica_serves(
    sentinels: Sentinels, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    with closing(RemoteBackend(address_of(sentinels), small_store(), timeout_s=2.0)) as backend:
        engine = Engine(backend)
        thread = rounds_in_background(engine, stop)
        try:
            more_whole_rounds(engine, 2)
            old = sentinels.master()
            assert old is not None
            rounds = engine.rounds
            old.kill() if how == "killed" else old.signal(signal.SIGSTOP)
            new = sentinels.wait_for_failover(old)
            wait_until(lambda: engine.rounds > rounds + 1, "the engine goes on")
            more_whole_rounds(engine, 2)
        finally:
            stop.set()
            thread.join()
        # On a starved machine Sentinels may give up the new master as well, and find it again: one more pair of lines.
        lost, back = caplog.messages[::2], caplog.messages[1::2]
        url = sentinels.url
        assert all(text.startswith(f"{url} is lost (") for text in lost)
        assert back == [f"{url} is back"] * len(lost)
        assert backend.stats()["reconnects"] == len(lost) > 0
        assert new.ask("EXISTS", f"{engine.rounds}:0") == 1


def test_a_master_demoted_under_us_is_given_up_for_its_successor(
    sentinels: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sentinels.nodes
    with closing(RemoteBackend(address_of(sentinels), small_store(), timeout_s=5.0)) as backend:
        engine = Engine(backend)
        assert engine.round() == ROUND
        for one in sentinels.sentinels:  # which would hang up on us
            one.ask("SENTINEL", "REMOVE", SERVICE)
        second.ask("REPLICAOF", "NO", "ONE")
        first.ask("REPLICAOF", HOST, second.port)
        assert engine.round() == 0
        assert "READONLY" in caplog.messages[0]
        for one in sentinels.sentinels:
            one.ask("SENTINEL", "MONITOR", SERVICE, HOST, second.port, 1)
        wait_until(lambda: engine.round() == ROUND, "the new master serves")
        assert [message.split()[2] for message in caplog.messages] == ["lost", "back"]


def test_a_failover_that_an_operator_asks_for_costs_misses_and_no_more(
    shared: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    with closing(RemoteBackend(address_of(shared), small_store(), timeout_s=5.0)) as backend:
        engine = Engine(backend)
        thread = rounds_in_background(engine, stop)
        try:
            more_whole_rounds(engine, 1)
            shared.demote_master()
            more_whole_rounds(engine, 2)
        finally:
            stop.set()
            thread.join()
        spells = [message.split()[2] for message in caplog.messages]
        assert spells == ["lost", "back"] * (len(spells) // 2)
