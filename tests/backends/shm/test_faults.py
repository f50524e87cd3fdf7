"""The same-host lane when something goes: the server, the client, the connection, time, or what is said."""

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote import health
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.shm import connection as attached
from kvredis.backends.shm import reader
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.backends.shm.leases import SharedLease
from kvredis.storage.errors import BackendError
from kvredis.storage.memory.arena import Arena, HugepageMode
from tests.backends.conftest import EXIT_S, ROOT, ServerProcess, small_store, start_server
from tests.backends.nodes import wait_until
from tests.backends.tiered.layered_pair import open_layered
from tests.backends.verbs import BLOCK, content, keys_of, loaded, put, put_through

from .lane_server import ask, attached_ids, lane_figures, lane_path, lane_url, mapped, store_blocks


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A kvredis of the test's own."""
    server = start_server("kvredis", tmp_path)
    yield server
    server.kill()


@pytest.fixture
def backend(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteBackend]:
    """A backend that shares memory with the server, and soon looks whether a lost one is back."""
    monkeypatch.setattr(health, "RETRY_S_MAX", 0.2)
    with closing(RemoteBackend(parse_url(lane_path(server)), small_store(), timeout_s=2.0)) as backend:
        yield backend


# ---- a server that goes --------------------------------------------------------------------------------------------


def test_a_killed_server_leaves_readable_bytes_that_no_reader_relies_on_and_the_next_one_is_mapped_anew(
    server: ServerProcess, backend: RemoteBackend
) -> None:
    keys = keys_of(6)
    store_blocks(backend, keys)
    load = backend.load(keys)
    first = next(load)
    assert first is not None
    assert first.held
    server.kill()
    assert not first.held
    assert first.view == content(keys[0]), "read to the last byte, and no signal"
    assert [lease for lease in load if lease is not None and lease.held] == []
    server.start()
    wait_until(lambda: put_through(backend, b"new", content(b"new")), "the next server")
    assert loaded(backend, [b"new", *keys]) == [content(b"new"), *[None] * 6]
    gc.collect()
    assert mapped() == 2, "what is leased is there still"
    assert first.view == content(keys[0])
    first.release()
    del first, load
    gc.collect()
    wait_until(lambda: mapped() == 1, "the end of the old mapping")


def test_a_server_that_dies_while_a_block_is_copied_to_near_memory_leaves_a_miss_and_no_hole(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    layered = open_layered(lane_path(server), timeout_s=2.0)
    with closing(layered):
        with closing(RemoteBackend(parse_url(server.url), small_store())) as other:
            store_blocks(other, keys_of(4), 60_000)
        copies: list[int] = []

        def copy(into: memoryview, out_of: memoryview) -> None:
            copies.append(len(into))
            into[:] = out_of
            if len(copies) == 2:
                server.kill()

        monkeypatch.setattr(reader, "copy", copy)
        assert loaded(layered, keys_of(4)) == [content(b"block:0", 60_000), None, None, None]
        assert len(copies) == 2
        store = layered.near.store
        store.check_integrity()
        assert store.reserved_bytes == store.leases == 0
        assert store.count() == 1, "what was torn is not near"


@pytest.mark.parametrize("how", ["CLIENT KILL", "KV.REVOKE"])
def test_an_operator_who_ends_a_connection_ends_what_is_read_through_it(
    server: ServerProcess, backend: RemoteBackend, how: str
) -> None:
    keys = keys_of(20)
    store_blocks(backend, keys)
    with closing(backend.load(keys)) as load:
        leases = [next(load) for _ in range(3)]
        assert all(lease is not None and lease.held for lease in leases)
        for number in attached_ids(server):
            ask(server, *(("CLIENT", "KILL", "ID", number) if how == "CLIENT KILL" else ("KV.REVOKE", number)))
        wait_until(lambda: not any(lease is None or lease.held for lease in leases), "the server has hung up")
        assert [lease for lease in load if lease is not None and lease.held] == []
    for lease in leases:
        assert lease is not None
        lease.release()
    wait_until(lambda: loaded(backend, keys) == [content(key) for key in keys], "all as before")


# ---- a client that goes --------------------------------------------------------------------------------------------

CLIENT = """
import sys
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from tests.backends.conftest import small_store
from tests.backends.shm.lane_server import store_blocks
from tests.backends.verbs import keys_of, put

backend = RemoteBackend(parse_url(sys.argv[1]), small_store())
store_blocks(backend, keys_of(12))
load = backend.load(keys_of(12))
held = [next(load) for _ in range(2)]
if sys.argv[2] == "storing":
    room = backend.reserve(b"unfinished", 1 << 20)
    while True:
        put(backend, b"again", bytes(2 << 20))
        print("here", flush=True)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["reading", "storing"])
def test_a_killed_client_leaves_nothing_held_on_the_server(server: ServerProcess, state: str) -> None:
    command = [sys.executable, "-c", CLIENT, lane_url(server), state]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"here\n"
        assert lane_figures(server)[1] >= 2
        client.kill()
        client.wait(EXIT_S)
    wait_until(lambda: lane_figures(server) == (0, 0), "the end of what it held")
    with closing(RemoteBackend(parse_url(lane_url(server)), small_store())) as other:
        assert loaded(other, keys_of(12)) == [content(key) for key in keys_of(12)]
        assert loaded(other, [b"unfinished"]) == [None]
        assert loaded(other, [b"again"]) in ([None], [bytes(2 << 20)]), "whole or not at all"


@pytest.mark.parametrize("length", [BLOCK, 5 << 20])
def test_a_server_stores_nothing_out_of_memory_that_a_client_has_given_to_another_value_since(
    server: ServerProcess, length: int
) -> None:
    staging = small_store(16 << 20)
    with closing(RemoteBackend(parse_url(lane_path(server)), staging, timeout_s=0.5)) as backend:
        store_blocks(backend, [b"first"], length)
        server.signal(signal.SIGSTOP)
        assert put(backend, b"late", content(b"late", length))
        assert backend.flush() == 1, "it has taken too long"
        room = staging.reserve(b"other", 15 << 20)  # the memory is another value's now
        assert room is not None
        room.view[:] = bytes(15 << 20)
        server.signal(signal.SIGCONT)
        wait_until(lambda: attached_ids(server) == [], "the server sees who has gone")
        with closing(redis.Redis.from_url(server.tcp_url)) as other:
            assert other.get("late") is None
            assert other.get("first") == content(b"first", length)
        room.abort()


def test_a_connection_that_is_closed_is_over_though_another_process_has_its_socket_too(server: ServerProcess) -> None:
    with attached_to(server) as connection:
        copy = os.dup(connection._sock.fileno())  # type: ignore[union-attr]  # as a child has it that was forked
        try:
            assert lane_figures(server)[0] == 1
            connection.close()
            wait_until(lambda: lane_figures(server) == (0, 0), "the end of the client")
        finally:
            os.close(copy)


@contextlib.contextmanager
def attached_to(server: ServerProcess) -> Iterator[AttachedConnection]:
    """A connection to the server's memory."""
    run_id = ask(server, "INFO", "server")["run_id"]
    connection = AttachedConnection.open(parse_url(server.url))
    with connection:
        assert isinstance(connection, AttachedConnection)
        connection.attach(run_id)
        yield connection


def test_releases_that_the_server_does_not_take_wait_for_it_and_no_caller_waits_for_them(server: ServerProcess) -> None:
    with attached_to(server) as connection:
        connection.set(b"k", content(b"k", 50_000))
        server.signal(signal.SIGSTOP)
        filler = b"*2\r\n$4\r\nPING\r\n$4000\r\n" + bytes(4000) + b"\r\n"
        sock = connection._sock
        assert sock is not None
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += sock.send(filler, socket.MSG_DONTWAIT)
        connection._out = 2
        for offset in (1, 2):
            connection.end_lease(offset, 4096)
        assert list(connection._ended) == [1, 2]
        server.signal(signal.SIGCONT)


# ---- what is said makes no sense -----------------------------------------------------------------------------------

Serve = Callable[[socket.socket, bytes], bool]


def memfd(nbytes: int = 1 << 16, *, seal: bool = True) -> int:
    """Memory to lend."""
    if seal:
        with Arena.create(nbytes, HugepageMode.OFF) as arena:
            return arena.share()
    descriptor = os.memfd_create("kvredis-test", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def writable() -> int:
    """Sealed memory, opened for writing."""
    descriptor = os.memfd_create("kvredis-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def other_file() -> int:
    """No memory at all."""
    return os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)


def open_descriptors() -> int:
    """How many this process has, without those of unreachable objects."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def answer(nbytes: int = 1 << 16) -> bytes:
    return b"*4\r\n$11\r\narena-bytes\r\n:%d\r\n$8\r\nlease-ms\r\n:30000\r\n" % nbytes


@contextlib.contextmanager
def told(reply: bytes, *descriptors: int, then: bytes = b"+PONG\r\n") -> Iterator[AttachedConnection]:
    """A connection whose server has answered KV.ATTACH so, with these descriptors, and says `then` behind it."""
    ours, theirs = socket.socketpair()
    side, far_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, side, far_side, closing(AttachedConnection(ours, 2.0)) as connection:
        rights = [*descriptors, *([far_side.fileno()] if descriptors else [])]
        theirs.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else [])
        for descriptor in descriptors:
            os.close(descriptor)
        theirs.sendall(then)
        yield connection


@pytest.mark.parametrize(
    ("descriptor", "reply", "problem"),
    [
        (None, answer(), "0 descriptors"),
        (None, b"-NOPERM no\r\n", "NOPERM no"),
        (memfd, b"+OK\r\n", "not an answer"),
        (memfd, answer(0), "not a file of 0 bytes"),
        (memfd, answer(1 << 17), "not a file of 131072 bytes"),
        (lambda: memfd(seal=False), answer(), "not sealed against shrinking"),
        (writable, answer(), "for reading alone"),
        (other_file, answer(), "not a file of"),
        (memfd, answer().replace(b":30000", b":0"), "not an answer"),
    ],
)
def test_memory_that_is_not_sound_is_not_mapped_and_no_descriptor_stays_open(
    descriptor: Callable[[], int] | None, reply: bytes, problem: str
) -> None:
    before = open_descriptors()
    with told(reply, *(() if descriptor is None else (descriptor(),))) as connection:
        with pytest.raises(BackendError, match=problem):
            connection.attach("run")
        assert not connection.usable
    assert open_descriptors() == before
    assert mapped() == 0


def test_too_many_descriptors_are_closed_again() -> None:
    before = open_descriptors()
    with told(answer(), *(memfd() for _ in range(12))) as connection, pytest.raises(BackendError, match="descriptors"):
        connection.attach("run")
    assert open_descriptors() == before


def test_a_user_who_may_not_leave_replies_out_gets_no_lane() -> None:
    with (
        told(answer(), memfd(), then=b"-NOPERM CLIENT\r\n+PONG\r\n+PONG\r\n") as connection,
        pytest.raises(BackendError, match="CLIENT REPLY SKIP: NOPERM"),
    ):
        connection.attach("run")


@pytest.mark.parametrize(
    "said",
    [
        b"*1\r\n*2\r\n:0\r\n:65537\r\n",
        b"*1\r\n*2\r\n:-1\r\n:5\r\n",
        b"*1\r\n*2\r\n:5\r\n:-1\r\n",
        b"*1\r\n*2\r\n:9223372036854775807\r\n:9223372036854775807\r\n",
        b"*1\r\n*3\r\n:0\r\n:1\r\n:1\r\n",
        b"*1\r\n:5\r\n",
        b"*2\r\n$-1\r\n$-1\r\n",
        b"+OK\r\n",
    ],
)
def test_a_lease_on_what_is_not_there_breaks_the_connection(said: bytes) -> None:
    with told(answer(), memfd(), then=b"+PONG\r\n" + said) as connection:
        connection.attach("run")
        until_s = connection.ask_leases([b"k"])
        with pytest.raises(BackendError):
            connection.read_leases(until_s, 1)
        assert not connection.usable


def test_a_server_whose_default_limit_becomes_shorter_is_told_the_one_that_is_reckoned_with() -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(AttachedConnection(ours, 2.0)) as connection:
        connection._limit_ms = 12_345
        connection.ask_leases([b"k"])
        assert theirs.recv(4096) == b"*3\r\n$8\r\nKV.LEASE\r\n$5\r\n12345\r\n$1\r\nk\r\n"


def test_a_lease_is_held_until_its_limit_its_release_or_the_end_of_either_side() -> None:
    leases = b"*3\r\n" + b"*2\r\n:0\r\n:4096\r\n" * 3
    with told(answer(), memfd(), then=b"+PONG\r\n" + leases) as connection:
        connection.attach("run")
        until_s = connection.ask_leases([b"a", b"b", b"c"])
        one, two, three = (lease for lease in connection.read_leases(until_s, 3) if isinstance(lease, SharedLease))
        assert one.held
        assert two.held
        assert three.held
        assert not SharedLease(connection, connection.arena, 0, 4096, until_s - 40.0).held
        one.release()
        assert not one.held
        connection.interrupt()
        assert not two.held
        connection.close()
        assert not three.held
        assert three.view == bytes(4096), "there to be read, for who is in the middle of it"


def test_a_signal_that_comes_while_it_is_looked_ends_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    look, numbers = attached._poll, [errno.EINTR, errno.EINTR, 0]

    def poll(*asked: Any) -> int:
        ctypes.set_errno(numbers.pop(0))
        return -1 if numbers else int(look(*asked))

    with told(answer(), memfd()) as connection:
        connection.attach("run")
        monkeypatch.setattr(attached, "_poll", poll)
        assert connection.is_open
        numbers += [errno.ENOMEM, 0]
        assert not connection.is_open, "it is not known"


def test_a_lease_is_not_held_when_the_sockets_number_is_anothers_by_the_time_of_the_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread closes the connection, and has a new one at once, between the question and the answer."""
    other, far_other = socket.socketpair()
    with told(answer(), memfd()) as connection, other, far_other:
        connection.attach("run")
        lease, look = SharedLease(connection, connection.arena, 0, 4096, time.monotonic() + 40.0), attached._poll
        assert connection._sock is not None
        number = connection._sock.fileno()

        def poll(*asked: Any) -> int:
            connection.close()
            os.dup2(other.fileno(), number)
            return int(look(*asked))

        monkeypatch.setattr(attached, "_poll", poll)
        assert not lease.held
        os.close(number)
