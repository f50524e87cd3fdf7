"""kvredis:// on the same host: blocks are read in a real server's memory, and it takes blocks out of ours."""

import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.base import Lease
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.resp.wire import Buffer
from kvredis.backends.shm import connection as attached
from kvredis.backends.shm import discovery, reader
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import ArenaError
from kvredis.storage.memory.arena import Arena
from kvredis.storage.store import Store
from tests.backends.conftest import ServerProcess, small_store, start_server
from tests.backends.nodes import HOST, Node, wait_until, with_free_ports
from tests.backends.tiered.layered_pair import open_layered
from tests.backends.verbs import BLOCK, content, keys_of, loaded, put, put_through

from .lane_server import ask, attached_ids, lane_figures, lane_path, lane_url, mapped, pass_time, store_blocks

Open = Callable[..., RemoteBackend]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The kvredis of this file, with a unix path and a TCP port."""
    with tempfile.TemporaryDirectory() as folder:
        server = start_server("kvredis", Path(folder))
        yield server
        server.kill()


@pytest.fixture
def lane(server: ServerProcess) -> Iterator[Open]:
    """Makes backends of the server, by kvredis:// and its port unless a URL is given; it has nothing of other tests."""
    made: list[RemoteBackend] = []
    ask(server, "FLUSHALL")

    def make(url: str = "", staging: Store | None = None, timeout_s: float = 5.0) -> RemoteBackend:
        made.append(RemoteBackend(parse_url(url or lane_url(server)), staging or small_store(), timeout_s=timeout_s))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    wait_until(lambda: lane_figures(server) == (0, 0), "the end of the test's connections")


def test_a_lease_ends_while_another_thread_waits_for_what_is_stored(lane: Open, server: ServerProcess) -> None:
    """Its connection is idle by then, but an answer that takes its time would hold up the news of the lease's end."""
    backend, other = lane(timeout_s=60.0), lane()
    store_blocks(backend, [b"k"])
    (lease,) = backend.load([b"k"])
    assert lease is not None
    assert lane_figures(server)[1] == 1
    assert other.expect([b"coming"], 60.0) == 1
    waiting = threading.Thread(target=backend.wait_for, args=([b"coming"], 30.0))
    waiting.start()
    try:
        wait_until(lambda: ask(server, "INFO", "clients")["blocked_clients"] == 1, "the question")
        assert lease.held
        lease.release()
        wait_until(lambda: lane_figures(server)[1] == 0, "the end of the lease")
        assert waiting.is_alive()
    finally:
        assert put_through(other, b"coming", b"x")
        waiting.join()


def test_a_wait_lasts_as_long_as_its_caller_says_though_each_answer_must_come_sooner(
    lane: Open, server: ServerProcess
) -> None:
    def questions() -> int:
        return int(ask(server, "INFO", "commandstats").get("cmdstat_kv.match", {"calls": 0})["calls"])

    backend, other, found = lane(timeout_s=0.2), lane(), list[int]()
    assert other.expect([b"coming"], 60.0) == 1
    before = questions()
    waiting = threading.Thread(target=lambda: found.append(backend.wait_for([b"coming"], 30.0)))
    waiting.start()
    try:
        wait_until(lambda: questions() > before + 2, "a question behind those that took their time")
        assert found == []
    finally:
        assert put_through(other, b"coming", b"x")
        waiting.join()
    assert found == [1]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of which way values go."""
    return [record.getMessage() for record in caplog.records if record.name == discovery.__name__]


def all_of(backend: RemoteBackend, keys: list[bytes]) -> list[Lease]:
    """Leases of blocks that are there."""
    leases = [lease for lease in backend.load(keys) if lease is not None]
    assert len(leases) == len(keys)
    return leases


# ---- which way is taken ------------------------------------------------------------------------------------------


def test_a_block_is_read_where_the_server_keeps_it_and_staging_stays_empty(lane: Open) -> None:
    staging = small_store()
    backend, keys = lane(staging=staging), keys_of(8)
    store_blocks(backend, keys)
    received = int(backend.stats()["bytes_in"])
    leases = all_of(backend, keys)
    assert mapped() == 1, "one mapping, however many connections"
    assert staging.reserved_bytes == staging.used_bytes == 0
    for key, lease in zip(keys, leases, strict=True):
        assert lease.view == content(key)
        assert lease.view.readonly
        assert lease.held
        lease.release()
        assert not lease.held
    assert int(backend.stats()["bytes_in"]) - received < 4096, "offsets came, and no bodies"
    assert int(backend.stats()["bytes_out"]) < 8192, "nor did any go"


@pytest.mark.parametrize("url_of", [lane_url, lane_path])
def test_a_port_and_a_path_both_lead_to_the_lane_and_the_log_says_so_once(
    lane: Open, server: ServerProcess, caplog: pytest.LogCaptureFixture, url_of: Callable[[ServerProcess], str]
) -> None:
    with caplog.at_level(logging.INFO, "kvredis"):
        backend = lane(url_of(server))
        store_blocks(backend, keys_of(2))
        assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
    assert said(caplog) == [f"{url_of(server)} is on this host: values are read in its memory, and by it in ours"]
    assert backend.stats()["attached"] == backend.stats()["connections"] == len(attached_ids(server))


def test_a_server_without_a_unix_path_is_reached_by_an_abstract_socket(tmp_path: Path) -> None:
    def make(ports: list[int]) -> list[Node]:
        command = [sys.executable, "-m", "kvredis", "serve", "--bind", HOST, "--port", str(ports[0])]
        command += ["--max-local-cpu-size", "32MB", "--hugepages", "off", "--no-prefault"]
        return [Node(command, ports[0], tmp_path)]

    with with_free_ports(make, 1) as (node,):
        url = node.url.replace("redis://", "kvredis://")
        with closing(RemoteBackend(parse_url(url), small_store())) as backend:
            store_blocks(backend, keys_of(2))
            assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
            assert int(backend.stats()["attached"]) > 0


def test_a_password_opens_the_lane_too(tmp_path: Path) -> None:
    server = start_server("kvredis", tmp_path, "--requirepass", "sesame")
    try:
        url = lane_url(server).replace("kvredis://", "kvredis://:sesame@")
        with closing(RemoteBackend(parse_url(url), small_store())) as backend:
            store_blocks(backend, keys_of(2))
            assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
            assert backend.stats()["attached"] == backend.stats()["connections"]
    finally:
        server.kill()


@pytest.mark.parametrize("scheme", ["redis", "unix"])
def test_other_schemes_stay_on_the_socket(lane: Open, server: ServerProcess, scheme: str) -> None:
    backend = lane(server.tcp_url if scheme == "redis" else server.url)
    store_blocks(backend, keys_of(2))
    assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
    assert backend.stats()["attached"] == 0
    assert attached_ids(server) == []


def test_a_server_on_another_host_is_reached_over_tcp_and_no_warning_says_so(
    lane: Open, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(discovery, "BOOT_ID", tmp_path / "boot_id")
    with caplog.at_level(logging.INFO, "kvredis"):
        backend = lane()
        store_blocks(backend, keys_of(2))
        assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
    assert backend.stats()["attached"] == 0
    assert [line.split(": ", 1)[1] for line in said(caplog)] == ["values go over the socket: it is on another host"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_server_that_has_no_lane_is_reached_over_its_socket_and_a_warning_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("kvredis", tmp_path, "--lane", "off")
    try:
        for url in (lane_url(server), lane_path(server)):
            with closing(RemoteBackend(parse_url(url), small_store())) as backend:
                store_blocks(backend, keys_of(2))
                assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
                assert backend.stats()["attached"] == 0
        assert len(said(caplog)) == 2
        assert all("not through shared memory: it offers no shared memory" in line for line in said(caplog))
    finally:
        server.kill()


def test_redis_by_the_name_of_kvredis_is_redis(redis_server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with closing(RemoteBackend(parse_url(lane_path(redis_server)), small_store())) as backend:
        store_blocks(backend, keys_of(2))
        assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
    assert len(said(caplog)) == 1
    assert "it answers KV.LANE with ERR unknown command" in said(caplog)[0]


def test_a_user_who_may_not_read_every_key_reads_his_own_over_the_socket(
    lane: Open, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    ask(server, "ACL", "SETUSER", "narrow", "on", ">word", "~block:*", "+@all")
    backend = lane(lane_url(server).replace("kvredis://", "kvredis://narrow:word@"))
    store_blocks(backend, keys_of(2))
    assert loaded(backend, keys_of(2)) == [content(key) for key in keys_of(2)]
    assert backend.stats()["attached"] == 0
    assert len(said(caplog)) == 1
    assert "NOPERM" in said(caplog)[0]


# ---- reading -------------------------------------------------------------------------------------------------------


def test_values_of_all_lengths_come_and_short_ones_come_as_they_are(lane: Open) -> None:
    backend, keys = lane(), keys_of(60)
    lengths = {key: (number * 1237) % 40_000 for number, key in enumerate(keys)}
    for key in keys:
        assert put_through(backend, key, content(key, lengths[key]))
    assert loaded(backend, [*keys, b"absent"]) == [*(content(key, lengths[key]) for key in keys), None]


def test_a_near_tier_gets_a_copy_and_the_server_its_room_back(lane: Open, server: ServerProcess) -> None:
    keys = keys_of(12)
    store_blocks(lane(), keys, 60_000)
    layered = open_layered(lane_url(server))
    with closing(layered):
        assert loaded(layered, keys) == [content(key, 60_000) for key in keys]
        wait_until(lambda: lane_figures(server)[1] == 0, "the end of all leases")
        assert ask(server, "FLUSHALL")
        assert loaded(layered, keys) == [content(key, 60_000) for key in keys], "they are near"
        assert layered.stats()["memory_hits"] == 12


def test_a_value_that_near_has_is_lent_when_it_is_sent_again(lane: Open, server: ServerProcess) -> None:
    layered = open_layered(lane_path(server))
    with closing(layered):
        assert put_through(layered, b"block:0", content(b"block:0", 60_000))
        ask(server, "FLUSHALL")
        layered._staging.note_unsent(b"block:0", failed=False)
        before = int(layered.stats()["far_bytes_out"])
        layered.match([b"block:0"])
        assert layered.flush() == 0
        assert layered.stats()["sent_again"] == 1
        assert int(layered.stats()["far_bytes_out"]) - before < 1000
    assert loaded(lane(), [b"block:0"]) == [content(b"block:0", 60_000)]


def test_released_leases_reach_the_server_though_nothing_else_is_asked(lane: Open, server: ServerProcess) -> None:
    backend, keys = lane(), keys_of(5)
    store_blocks(backend, keys, 100_000)
    leases = all_of(backend, keys)
    assert lane_figures(server)[1] == 5
    for lease in leases:
        lease.release()
        lease.release()
    wait_until(lambda: lane_figures(server)[1] == 0, "the server hears of it")
    assert loaded(backend, keys) == [content(key, 100_000) for key in keys], "the connection is as good as before"


def test_leases_outlive_the_load_and_a_full_pool_of_connections(lane: Open) -> None:
    backend, keys = lane(), keys_of(4)
    store_blocks(backend, keys)
    under_way = [backend.load(keys) for _ in range(5)]
    held = [next(load) for load in under_way]
    for load in under_way:
        load.close()
    for lease in held:
        assert lease is not None
        assert lease.held, "its connection was one too many, and stays for its sake"
        assert lease.view == content(keys[0])
        lease.release()


def test_what_is_leased_ahead_and_not_taken_is_given_back(lane: Open, server: ServerProcess) -> None:
    backend, keys = lane(), keys_of(30)
    store_blocks(backend, keys, 100_000)
    with closing(backend.load(keys)) as leases:
        taken = [next(leases), next(leases)]
        assert lane_figures(server)[1] > 2
    wait_until(lambda: lane_figures(server)[1] == 2, "all but those that were taken")
    for lease in taken:
        assert lease is not None
        lease.release()


def test_blocks_that_together_are_more_than_a_client_may_lease_come_one_after_the_other(lane: Open) -> None:
    backend, keys = lane(), keys_of(12)
    store_blocks(backend, keys, 10 << 20)  # of an arena of 128 MiB, half of which may be leased
    assert loaded(backend, keys) == [content(key, 10 << 20) for key in keys]


def test_a_block_too_large_to_be_leased_comes_over_the_socket(lane: Open) -> None:
    backend = lane(staging=small_store(160 << 20))
    store_blocks(backend, [b"half"], 70 << 20)
    assert loaded(backend, [b"half", b"half"]) == [content(b"half", 70 << 20)] * 2
    assert int(backend.stats()["bytes_in"]) > 140 << 20


def test_a_load_asks_by_one_command_as_the_last_one_has_learnt_to_on_whichever_connection(
    lane: Open, server: ServerProcess
) -> None:
    def calls() -> int:
        return int(ask(server, "INFO", "commandstats")["cmdstat_kv.lease"]["calls"])

    backend, keys = lane(), keys_of(3)
    store_blocks(backend, keys, 100_000)
    assert None not in loaded(backend, keys)
    with closing(backend.load(keys)) as elsewhere:
        lease = next(elsewhere)
        assert lease is not None
        before = calls()
        assert None not in loaded(backend, keys)
        assert calls() == before + 1
        lease.release()


def test_what_waited_too_long_for_its_reader_is_leased_again(
    lane: Open, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, keys = lane(), keys_of(8)
    store_blocks(backend, keys)
    with closing(backend.load(keys)) as load:
        early = [next(load), next(load)]  # and more are leased ahead
        asked = int(ask(server, "INFO", "commandstats")["cmdstat_kv.lease"]["calls"])
        pass_time(monkeypatch, 40.0)
        for lease in early:
            assert lease is not None
            assert not lease.held
            lease.release()
        for key, late in zip(keys[2:], load, strict=True):
            assert late is not None
            with late:
                assert late.held
                assert late.view == content(key)
    assert int(ask(server, "INFO", "commandstats")["cmdstat_kv.lease"]["calls"]) >= asked + 6


def test_readers_in_many_threads_get_whole_blocks_and_hold_nothing_in_the_end(
    lane: Open, server: ServerProcess
) -> None:
    backend, keys = lane(), keys_of(40)
    store_blocks(backend, keys, 40_000)
    wrong: list[bytes] = []
    handed_over: list[Lease] = []

    def read() -> None:
        for _ in range(15):
            for key, lease in zip(keys, backend.load(keys), strict=True):
                if lease is None or lease.view != content(key, 40_000) or not lease.held:
                    wrong.append(key)
                if lease is not None:
                    handed_over.append(lease)  # released by whichever thread comes by
                while len(handed_over) > 8:
                    handed_over.pop(0).release()

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lease in handed_over:
        lease.release()
    assert wrong == []
    wait_until(lambda: lane_figures(server)[1] == 0, "the end of all leases")
    assert loaded(backend, keys) == [content(key, 40_000) for key in keys]


def test_blocks_on_the_servers_disk_are_brought_and_leased(tmp_path: Path) -> None:
    disk = ["--local-disk", str(tmp_path / "disk"), "--max-local-disk-size", "256MB", "--max-local-cpu-size", "16MB"]
    server = start_server("kvredis", tmp_path, *disk)
    try:
        with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as backend:
            keys = keys_of(24)  # three times as much as its arena
            store_blocks(backend, keys)
            assert loaded(backend, keys) == [content(key) for key in keys]
            assert loaded(backend, keys[::-1]) == [content(key) for key in keys[::-1]]
            assert int(backend.stats()["attached"]) > 0
            wait_until(lambda: lane_figures(server)[1] == 0, "the end of all leases")
    finally:
        server.kill()


# ---- storing -------------------------------------------------------------------------------------------------------


def test_memory_is_lent_once_for_each_connection_that_stores(lane: Open, server: ServerProcess) -> None:
    staging = small_store()
    backend = lane(staging=staging)
    ask(server, "CONFIG", "RESETSTAT")
    store_blocks(backend, keys_of(20))
    calls = {name: int(row["calls"]) for name, row in ask(server, "INFO", "commandstats").items()}
    assert calls["cmdstat_kv.put"] == 20
    assert 1 <= calls["cmdstat_kv.lend"] <= 2
    assert staging.used_bytes == staging.reserved_bytes == 0
    assert loaded(backend, keys_of(20)) == [content(key) for key in keys_of(20)]


@pytest.mark.parametrize(
    ("threads", "asked", "lent"), [(1, None, 2), (3, None, 3), (4, None, 4), (8, None, 4), (4, 1, 1), (1, 5, 5)]
)
def test_as_many_connections_store_as_the_server_has_threads_that_copy(
    threads: int, asked: int | None, lent: int, tmp_path: Path
) -> None:
    server = start_server("kvredis", tmp_path, "--io-threads", str(threads))
    try:
        address = parse_url(lane_url(server))
        with closing(RemoteBackend(address, small_store(64 << 20), connections=asked, timeout_s=20.0)) as backend:
            store_blocks(backend, keys_of(20))
            store_blocks(backend, [b"long:%d" % number for number in range(5)], 9 << 20)
            calls = {name: int(row["calls"]) for name, row in ask(server, "INFO", "commandstats").items()}
            assert calls["cmdstat_kv.put"] == 25
            assert calls["cmdstat_kv.lend"] == lent
            assert loaded(backend, [b"long:4"]) == [content(b"long:4", 9 << 20)]
    finally:
        server.kill()


def test_memory_that_cannot_be_lent_is_sent_instead_and_that_is_said_once(
    lane: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arena: Arena) -> int:
        raise ArenaError("this kernel cannot seal the arena")

    monkeypatch.setattr(Arena, "share", refuse)
    backend = lane()
    store_blocks(backend, keys_of(6))
    assert int(backend.stats()["bytes_out"]) > 6 * BLOCK
    assert loaded(backend, keys_of(6)) == [content(key) for key in keys_of(6)]
    assert len([record for record in caplog.records if "cannot be lent" in record.getMessage()]) == 1


def test_an_offset_beyond_what_was_lent_is_refused_and_counted(lane: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    send_put = attached.AttachedConnection.send_put

    def send_far(connection: attached.AttachedConnection, key: bytes, offset: int, length: int) -> None:
        send_put(connection, key, offset + (1 << 40), length)

    monkeypatch.setattr(attached.AttachedConnection, "send_put", send_far)
    backend = lane()
    assert put(backend, b"far", content(b"far"))
    assert backend.flush() == 1
    assert backend.match([b"far"]) == 0
    monkeypatch.undo()
    assert put_through(backend, b"near", content(b"near"))


# How often a load through shared memory speaks with its server, as beside a busy engine a word costs more than a
# copy, and what many loads that each ask ahead do to each other.

MIB = 1 << 20


def test_a_load_that_knows_the_length_of_blocks_asks_once_and_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TOGETHER_MAX", 5)
    calls: list[str] = []
    send, receive = AttachedConnection.send_buffers, AttachedConnection._receive

    def sending(connection: AttachedConnection, buffers: list[Buffer]) -> None:
        calls.append(f"send {len(buffers)}")
        send(connection, buffers)

    def receiving(connection: AttachedConnection, buffers: list[memoryview], flags: int = 0) -> int:
        calls.append("receive")
        return receive(connection, buffers, flags)

    server, keys = start_server("kvredis", tmp_path), keys_of(12)
    try:
        with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as backend:
            store_blocks(backend, keys)
            assert loaded(backend, keys) == [content(key) for key in keys]
            monkeypatch.setattr(AttachedConnection, "send_buffers", sending)
            monkeypatch.setattr(AttachedConnection, "_receive", receiving)
            assert loaded(backend, keys) == [content(key) for key in keys]
    finally:
        server.kill()
    assert calls[0] == "send 3", "12 keys in commands of 5"
    assert set(calls[1:]) == {"receive"}
    assert len(calls) <= 4, "the answers come together, or one by one"


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_server_says_whether_leases_may_wait_for_its_disk(
    has_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, attach = [], AttachedConnection.attach

    def noted(connection: AttachedConnection, run_id: str, **options: Any) -> str:
        why_no_gpu = attach(connection, run_id, **options)
        found.append(connection.waits_for_disk)
        return why_no_gpu

    monkeypatch.setattr(AttachedConnection, "attach", noted)
    disk = ["--local-disk", f"{tmp_path}/disk", "--max-local-disk-size", "64MB"] if has_disk else []
    server = start_server("kvredis", tmp_path, *disk)
    try:
        with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as backend:
            assert backend.match([b"k"]) == 0
    finally:
        server.kill()
    assert set(found) == {has_disk}


def test_many_loads_from_disk_at_once_do_not_wait_for_each_others_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TOGETHER_BYTES", MIB)
    loads = [[b"load %d block %d" % (load, number) for number in range(24)] for load in range(14)]
    disk = ["--local-disk", f"{tmp_path}/disk", "--max-local-disk-size", "1GB", "--max-local-cpu-size", "64MB"]
    server = start_server("kvredis", tmp_path, *disk)
    try:
        with ExitStack() as open_, ThreadPoolExecutor(len(loads)) as threads:
            url = parse_url(lane_url(server))
            backends = [open_.enter_context(closing(RemoteBackend(url, small_store(), timeout_s=60.0))) for _ in loads]
            for backend, keys in zip(backends, loads, strict=True):
                store_blocks(backend, keys, MIB)
                loaded(backend, keys[:1])  # the length is known from now on
            ask(server, "SAVE")
            found = list(threads.map(loaded, backends, loads))
            assert [values.count(None) for values in found] == [0] * len(loads)
    finally:
        server.kill()
