"""A process that was forked from one with a backend: it is given nothing, and takes nothing from the other."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvredis.backends.base import Backend
from kvredis.backends.local import LocalBackend
from kvredis.backends.resp.connection import Connection
from kvredis.backends.shm.connection import AttachedConnection
from kvredis.storage.errors import BackendError

from .conftest import EXIT_S, ROOT, Connect, ServerProcess, small_store
from .fake_server import FakeServer, Shelf
from .nodes import wait_until
from .tiered.layered_pair import open_layered
from .verbs import content, keys_of, loaded, put, put_through

LENGTH = 20_000


@pytest.fixture(params=["local", "remote", "layered"])
def backend(request: pytest.FixtureRequest, fake: FakeServer, connect: Connect) -> Iterator[Backend]:
    """A backend; its server, if it has one, is a shelf."""
    fake.answer = Shelf()
    kinds: dict[str, Callable[[], Backend]] = {
        "local": lambda: LocalBackend(small_store()),
        "remote": lambda: connect(fake.url),
        "layered": lambda: open_layered(fake.url),
    }
    with closing(kinds[request.param]()) as backend:
        yield backend


def test_a_forked_process_finds_loads_and_stores_nothing_and_the_other_goes_on(
    backend: Backend, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(3)
    assert all(put_through(backend, key, content(key, LENGTH)) for key in keys)
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    said = len(fake.commands)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert loaded(backend, keys) == [None] * 3
        assert backend.reserve(b"another", LENGTH) is None
        assert backend.match([b"another"]) == 0
        assert not any(backend.present(keys))
        assert backend.touch(keys) == backend.delete(keys) == 0
        prefetch = backend.prefetch(keys)
        assert prefetch.wait(10)
        assert prefetch.resident == 0
        backend.close()
    assert len(fake.commands) == said
    assert {record.getMessage().partition(":")[0] for record in caplog.records} == {
        "this process was forked from the one that opened its cache"
    }
    assert loaded(backend, keys) == [content(key, LENGTH) for key in keys]
    assert put_through(backend, b"another", content(b"another", LENGTH))


@pytest.mark.parametrize("backend", ["remote", "layered"], indirect=True)
def test_a_forked_process_waits_for_nothing_that_was_on_its_way_and_does_not_see_it(
    backend: Backend, fake: FakeServer, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, length = b"late", LENGTH
    assert put(backend, late, content(late, length))
    wait_until(lambda: len(fake.named(b"SET")) == 1, "the value is with a server that does not take it")
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert backend.match([late]) == 0
        assert backend.present([late]) == [False]
        assert backend.tiers_of([b"another", late])[0] == "remote"
        assert backend.room(length) == 0 or backend.reserve(b"another", length) is None
        assert (backend.touch([late]), backend.delete([late]), backend.flush()) == (0, 0, 0)
        assert loaded(backend, [late]) == [None]
    assert not shelf.open.is_set()
    shelf.open.set()
    assert backend.flush() == 0
    assert shelf.values[late] == content(late, length)


def test_a_forked_process_neither_ends_the_leases_nor_the_connection_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, peer = socket.socketpair()
    with peer, AttachedConnection(ours) as connection:
        peer.setblocking(False)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            connection.end_lease(4096, LENGTH)
            connection.tell_ended()
            connection.interrupt()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        connection.end_lease(8192, LENGTH)
        connection.tell_ended()
        assert b"KV.RELEASE" in peer.recv(1000)


def test_a_connection_ends_when_it_is_closed_although_a_forked_process_has_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, peer = socket.socketpair()
    with peer, Connection(ours) as parents, Connection(ours.dup()) as childs, Connection(ours.dup()) as another:
        peer.setblocking(False)
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            childs.close()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        parents.close()
        assert peer.recv(1) == b""
        assert another.usable


def test_a_forked_process_reads_and_sends_nothing_on_the_other_s_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, peer = socket.socketpair()
    with peer, Connection(ours) as parents, Connection(ours.dup()) as childs, Connection(ours.dup()) as another:
        peer.setblocking(False)
        peer.sendall(b"+first\r\n+second\r\n")
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(BackendError, match="forked"):
                childs.read()
            with pytest.raises(BackendError, match="forked"):
                another.send([b"PING"])
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        assert [parents.read(), parents.read()] == ["first", "second"]


PARENT = """
import gc, os, sys
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from tests.backends.conftest import small_store
from tests.backends.verbs import content, keys_of, put_through

LENGTH = 100_000
backend = RemoteBackend(parse_url(sys.argv[1]), small_store(), timeout_s=20)
keys = keys_of(12)
assert all(put_through(backend, key, content(key, LENGTH)) for key in keys)
leases = backend.load(keys)
came = [next(leases)]
child = os.fork()
if not child:
    del leases
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for lease in leases:
    came.append(lease)
print(sum(lease is not None and lease.view == content(key, LENGTH) for key, lease in zip(keys, came, strict=True)))
for lease in came:
    if lease is not None:
        lease.release()
backend.close()
"""


def test_a_load_under_way_brings_each_key_its_own_bytes_though_a_forked_process_has_dropped_it(
    kvredis_server: ServerProcess,
) -> None:
    for url in (kvredis_server.tcp_url, kvredis_server.url, kvredis_server.url.replace("unix:", "kvredis:")):
        told = subprocess.run(
            [sys.executable, "-c", PARENT, url], cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S
        )
        assert (told.returncode, told.stdout) == (0, "12\n"), told.stderr
