"""A remote backend and servers that lie, memory that runs out and callers that are interrupted: no wrong byte ever."""

import threading

import pytest

from kvredis.backends import base
from kvredis.backends.remote import write_queue
from kvredis.backends.remote.health import RETRY_S_MAX
from kvredis.backends.remote.pipeline import DRAIN_BYTES_MAX
from kvredis.backends.resp.wire import Wire
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, Connect, ServerProcess
from tests.backends.fake_server import FakeServer, Leave, Shelf, polite
from tests.backends.verbs import BLOCK, content, keys_of, loaded, put, put_through

# ---- a server that lies ------------------------------------------------------------------------------------------

LIES: list[bytes | Leave] = [
    Leave(),
    Leave(b"$20000\r\nabc"),
    Leave(b"$20000"),
    b"$abc\r\n",
    b"$-5\r\n",
    b"$999999999999\r\n",
    b"$3\r\nabcdefgh\r\n",
    b"+OK\r\n",
    b":1\r\n",
    b"*1\r\n$1\r\nx\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\x00" * 20_000,
]


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_a_body_are_misses(
    fake: FakeServer, connect: Connect, clock: Clock, store: Store, lie: bytes
) -> None:
    fake.answer = lambda args: lie if args[0] == b"GET" else polite(args)
    backend = connect(fake.url)
    for _ in range(2):
        values = loaded(backend, keys_of(7))
        assert len(values) == 7
        assert set(values) <= {None, b"abc", b"abcdefgh"[:3]}
        clock.now_s += RETRY_S_MAX
    assert store.used_bytes == 0
    fake.answer = lambda args: b"$2\r\nhi\r\n" if args[0] == b"GET" else polite(args)
    assert loaded(backend, keys_of(3)) == [b"hi"] * 3


@pytest.mark.parametrize("lie", [Leave(), Leave(b":"), b"+OK\r\n", b"$-1\r\n", b":-7\r\n", b":99\r\n", b"what\r\n"])
def test_lies_about_counts_are_never_more_than_was_asked(
    fake: FakeServer, connect: Connect, clock: Clock, lie: bytes
) -> None:
    fake.answer = lambda args: polite(args) if args[0] == b"PING" else lie
    backend = connect(fake.url)
    assert 0 <= backend.match(keys_of(3)) <= 3
    backend.touch(keys_of(3))
    backend.delete(keys_of(3))
    put(backend, b"k", b"x")
    assert backend.flush() in (0, 1)
    clock.now_s += RETRY_S_MAX
    fake.answer = lambda args: b":2\r\n" if args[0] == b"KV.MATCH" else polite(args)
    assert backend.match(keys_of(3)) == 2


# ---- room, interruptions, threads --------------------------------------------------------------------------------


def test_leases_that_fill_the_staging_memory_make_later_blocks_misses_until_released(
    redis_server: ServerProcess, connect: Connect, store: Store
) -> None:
    backend = connect(redis_server.url)
    keys = keys_of(20)  # 40 MiB, and the staging memory has 32
    for key in keys:
        assert put_through(backend, key, content(key))
    leases = list(backend.load(keys))
    held = [lease for lease in leases if lease is not None]
    assert leases[len(held)] is None
    assert 8 <= len(held) < 16
    assert [bytes(lease.view) for lease in held] == [content(key) for key in keys[: len(held)]]
    assert backend.reserve(b"more", BLOCK) is None
    assert (backend.stats()["dropped"], backend.stats()["queued_bytes"]) == (1, 0)
    for lease in held:
        lease.release()
    assert loaded(backend, keys) == [content(key) for key in keys]
    assert store.used_bytes == 0
    backend.delete(keys)


def test_an_exception_out_of_the_staging_memory_does_not_mix_up_blocks(
    redis_server: ServerProcess, connect: Connect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect(redis_server.url)
    keys = keys_of(8)
    for key in keys:
        assert put_through(backend, key, content(key, 300_000))
    backend.flush()
    reserve, calls = store.reserve, iter(range(100))

    def interrupted(key: bytes, length: int) -> base.Reservation | None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return reserve(key, length)

    monkeypatch.setattr(store, "reserve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loaded(backend, keys)
    assert loaded(backend, keys) == [content(key, 300_000) for key in keys]
    assert backend.stats()["losses"] == 0
    assert store.used_bytes == 0


def test_threads_share_a_backend(redis_server: ServerProcess, connect: Connect, store: Store) -> None:
    backend = connect(redis_server.url)
    wrong: list[object] = []

    def work(name: int) -> None:
        keys = [b"thread:%d:%d" % (name, number) for number in range(12)]
        for _ in range(3):
            for key in keys:
                if not put_through(backend, key, content(key, 100_000)):
                    wrong.append(key)
            if backend.match(keys) != len(keys):
                wrong.append("match")
            if loaded(backend, keys) != [content(key, 100_000) for key in keys]:
                wrong.append("load")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend.flush() == 0
    assert store.used_bytes == 0
    assert backend.stats()["hits"] == 4 * 3 * 12


def test_an_interrupt_within_a_body_does_not_take_its_rest_for_answers(
    redis_server: ServerProcess, connect: Connect, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = connect(redis_server.url)
    keys = keys_of(6)
    value = b"$-1\r\n" * 20_000  # as answers these would be misses, all of them well formed
    for key in keys:
        assert put_through(backend, key, value)
    assert backend.flush() == 0
    assert loaded(backend, keys) == [value] * 6  # and its connections are there

    def interrupted(wire: Wire, view: memoryview) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Wire, "body", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loaded(backend, keys)
    assert loaded(backend, keys) == [value] * 6
    assert store.used_bytes == 0
    backend.delete(keys)


def test_a_load_given_up_reads_little_of_what_it_asked_for(redis_server: ServerProcess, connect: Connect) -> None:
    backend = connect(redis_server.url)
    keys = keys_of(4)
    length = DRAIN_BYTES_MAX + 1
    for key in keys:
        assert put_through(backend, key, content(key, length))
    assert backend.flush() == 0
    before = int(backend.stats()["bytes_in"])
    leases = backend.load(keys)
    first = next(leases)
    assert first is not None
    first.release()
    leases.close()
    assert int(backend.stats()["bytes_in"]) - before < length + 100_000
    assert loaded(backend, keys) == [content(key, length) for key in keys]
    backend.delete(keys)


def test_bytes_in_and_out_are_counted(redis_server: ServerProcess, connect: Connect) -> None:
    backend = connect(redis_server.url)
    assert put_through(backend, b"counted", content(b"counted"))
    assert loaded(backend, [b"counted"]) == [content(b"counted")]
    stats = backend.stats()
    assert BLOCK < int(stats["bytes_in"]) < BLOCK + 1000
    assert BLOCK < int(stats["bytes_out"]) < BLOCK + 1000
    backend.delete([b"counted"])


def test_a_server_that_takes_two_connections_is_asked_stored_to_and_loaded_from_by_these(
    fake: FakeServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_queue, "LINGER_S", 0.0)
    shelf = Shelf()

    def answer(args: list[bytes]) -> bytes | Leave:
        is_one_too_many = args[0] == b"HELLO" and len(fake.named(b"HELLO")) > 2
        return Leave(b"-ERR max number of clients reached\r\n") if is_one_too_many else shelf(args)

    fake.answer = answer
    backend = connect(fake.url)
    keys = keys_of(3)
    assert backend.match(keys) == 0
    for _ in range(3):
        assert all(put(backend, key, content(key)) for key in keys)
        assert backend.flush() == 0
        assert backend.match(keys) == 3
        assert loaded(backend, keys) == [content(key) for key in keys]
    stats = backend.stats()
    assert (stats["losses"], stats["dropped"], stats["misses"]) == (0, 0, 0)
