"""Values that leave and enter the memory that a caller lends: over a socket none of them passes through staging."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends.base import Lease
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.resp.wire import VIEWS_MAX, Scattered
from kvredis.backends.shm.buffers import LentLease
from kvredis.storage.store import Store
from tests.backends.conftest import Connect, ServerProcess, small_store
from tests.backends.fake_server import FakeServer, Leave, Shelf, polite
from tests.backends.verbs import content, keys_of, loaded, put, put_through

LENGTH = 300_000
STAGED = 64 * 1024
"""All the staging memory that there is: no value fits."""


def scattered(value: bytes, views: int) -> Scattered:
    """Memory in `views` places, not next to each other, that holds a value together."""
    cuts = [len(value) * place // views for place in range(views + 1)]
    return Scattered(
        [memoryview(bytearray(b"?" + value[start:stop] + b"?"))[1:-1] for start, stop in itertools.pairwise(cuts)]
    )


def whole(memory: Scattered) -> bytes:
    return b"".join(memory.views)


@pytest.fixture(params=["tcp", "tls"])
def backend(request: pytest.FixtureRequest) -> Iterator[RemoteBackend]:
    """A backend whose server is behind TCP, with staging memory too small for anything."""
    if request.param == "tls":
        url = request.getfixturevalue("tls_url")
    else:
        url = request.getfixturevalue("kvredis_server").tcp_url
    made = RemoteBackend(parse_url(url), small_store(STAGED), timeout_s=5)
    with closing(made):
        made.delete(keys_of(20))
        yield made


@pytest.mark.parametrize("views", [1, 3, VIEWS_MAX - 1, VIEWS_MAX, 3 * VIEWS_MAX + 5])
def test_values_come_back_through_no_memory_but_the_callers(backend: RemoteBackend, views: int) -> None:
    keys = keys_of(6)
    assert not put(backend, keys[0], content(keys[0], LENGTH)), "it would pass through staging"
    for key in keys:
        value = backend.lend(key, scattered(content(key, LENGTH), views))
        assert value is not None
        value.commit()
    assert backend.flush() == 0
    into = {key: scattered(bytes(LENGTH), views) for key in [*keys, b"missing"]}
    leases = list(backend.load([*keys[:3], b"missing", *keys[3:]], into=into))
    assert [type(lease) for lease in leases] == [LentLease] * 3 + [type(None)] + [LentLease] * 3
    assert {key: whole(memory) for key, memory in into.items()} == {
        **{key: content(key, LENGTH) for key in keys}, b"missing": bytes(LENGTH)
    }  # fmt: skip


def test_a_value_of_another_length_is_a_lease_of_its_own_and_touches_nothing_that_is_lent(
    kvredis_server: ServerProcess,
) -> None:
    with closing(RemoteBackend(parse_url(kvredis_server.tcp_url), small_store(), timeout_s=5)) as backend:
        keys = keys_of(3)
        for key in keys:
            put_through(backend, key, content(key, LENGTH))
        into = {key: scattered(b"-" * (LENGTH + (key == keys[1])), 2) for key in keys}
        leases: list[Lease | None] = []
        for lease in backend.load(keys, into=into):
            assert lease is not None
            leases.append(lease)
        assert [isinstance(lease, LentLease) for lease in leases] == [True, False, True]
        assert leases[1] is not None
        assert bytes(leases[1].view) == content(keys[1], LENGTH)
        assert whole(into[keys[1]]) == b"-" * (LENGTH + 1)
        for lease in leases:
            assert lease is not None
            lease.release()


def test_a_server_that_takes_values_out_of_our_memory_is_lent_none(kvredis_server: ServerProcess, store: Store) -> None:
    url = kvredis_server.url.replace("unix://", "kvredis://")
    with closing(RemoteBackend(parse_url(url), store, timeout_s=5)) as backend:
        assert backend.match([b"none"]) == 0
        assert backend.lend(b"k", scattered(b"value", 1)) is None
        assert put_through(backend, b"k", content(b"k", LENGTH))
        into = {b"k": scattered(bytes(LENGTH), 2)}
        (lease,) = backend.load([b"k"], into=into)
        assert lease is not None
        with lease:
            assert not isinstance(lease, LentLease)
            assert bytes(lease.view) == content(b"k", LENGTH)


def test_nothing_is_lent_before_there_is_a_server(connect: Connect, tmp_path: Path) -> None:
    backend = connect(f"unix://{tmp_path}/none")
    assert backend.match([b"k"]) == 0
    assert backend.lend(b"k", scattered(b"value", 1)) is None


def test_what_is_lent_is_no_ones_to_read_and_is_over_when_the_flush_is(
    fake: FakeServer, shelf: Shelf, connect: Connect, store: Store
) -> None:
    backend = connect(fake.url, timeout_s=60)
    assert backend.match([b"k"]) == 0
    value = backend.lend(b"k", scattered(b"value" * 1000, 3))
    assert value is not None
    with value:
        value.commit()
    assert (backend.stats()["queued"], backend.stats()["queued_bytes"], store.used_bytes) == (1, 0, 0)
    assert backend.match([b"k"]) == 0, "the server does not have it, and no reader is served from what is lent"
    assert loaded(backend, [b"k"]) == [None]
    shelf.open.set()
    assert backend.flush() == 0
    assert shelf.values == {b"k": b"value" * 1000}
    assert backend.stats()["stored"] == 1


def test_a_lent_value_that_is_given_up_is_not_sent(fake: FakeServer, shelf: Shelf, connect: Connect) -> None:
    backend = connect(fake.url)
    backend.match([b"k"])
    value = backend.lend(b"k", scattered(b"value", 1))
    assert value is not None
    value.abort()
    shelf.open.set()
    assert backend.flush() == 0
    assert not shelf.values


def test_a_server_that_hangs_up_halfway_has_refused_what_was_lent(fake: FakeServer, connect: Connect) -> None:
    fake.answer = lambda args: Leave() if args[0] == b"SET" else polite(args)
    backend = connect(fake.url)
    backend.match([b"k"])
    value = backend.lend(b"k", scattered(bytes(LENGTH), 2))
    assert value is not None
    value.commit()
    assert backend.flush() == 1
