"""A remote backend and servers that go, come back or refuse: it answers as an empty cache, says so once, and mends."""

import signal
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.backends.remote.health import RETRY_S_MAX, RETRY_S_MIN
from kvredis.backends.remote.pipeline import SETS_UNANSWERED_MAX, SetPipeline, Touch
from kvredis.backends.shm.buffers import RemoteReservation
from kvredis.storage.store import Store
from tests.backends.conftest import Clock, Connect, StartServer, small_store
from tests.backends.fake_server import FakeServer, Leave, Shelf, polite
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put, put_through


def lost_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]


# ---- a server that is not there, goes, and comes back ------------------------------------------------------------


def test_an_absent_server_is_an_empty_cache_said_once(
    connect: Connect, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(f"unix://{tmp_path}/fake")
    keys = keys_of(3)
    assert backend.match(keys) == backend.touch(keys) == backend.delete(keys) == backend.prefetch(keys).queued == 0
    assert loaded(backend, keys) == [None] * 3
    assert not put(backend, b"k", b"x")
    assert backend.flush() == 0
    assert len(lost_lines(caplog)) == len(caplog.records) == 1
    assert store.used_bytes == 0


def test_a_value_that_was_reserved_before_the_loss_was_known_counts_as_refused(
    connect: Connect, tmp_path: Path, store: Store
) -> None:
    backend = connect(f"unix://{tmp_path}/fake")
    assert put(backend, b"k", b"x" * 20_000)
    assert backend.flush() == 1
    assert backend.flush() == 0
    assert store.used_bytes == 0


def test_attempts_are_spaced_out_and_the_server_is_used_when_it_comes(
    connect: Connect, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(f"unix://{tmp_path}/fake")
    assert backend.match([b"k"]) == 0
    server = FakeServer(tmp_path, lambda args: b":1\r\n" if args[0] == b"KV.MATCH" else polite(args))
    with closing(server):
        assert backend.match([b"k"]) == 0
        assert server.commands == []
        clock.now_s += RETRY_S_MIN
        assert backend.match([b"k"]) == 1
        assert backend.stats()["reconnects"] == 1
        assert [record.getMessage() for record in caplog.records][1:] == [f"unix://{tmp_path}/fake is back"]
        backend.close()


def test_the_wait_between_attempts_doubles_up_to_a_bound(connect: Connect, tmp_path: Path, clock: Clock) -> None:
    backend = connect(f"unix://{tmp_path}/fake")
    began_s = clock.now_s
    waits = []
    for _ in range(12):
        before_s = clock.now_s
        backend.match([b"k"])
        while not put(backend, b"k", b"") and clock.now_s < before_s + 100:
            clock.now_s += RETRY_S_MIN / 2
        backend.flush()
        waits.append(clock.now_s - before_s)
    assert waits[0] == pytest.approx(RETRY_S_MIN, abs=RETRY_S_MIN)
    assert max(waits) == pytest.approx(RETRY_S_MAX, abs=RETRY_S_MIN)
    assert clock.now_s - began_s < 12 * 2 * RETRY_S_MAX


@pytest.mark.parametrize("kind", ["kvredis", "redis"])
def test_a_server_killed_within_a_load_gives_misses_and_is_used_again_after_its_restart(
    server_of: StartServer, connect: Connect, clock: Clock, store: Store, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    server = server_of(kind)
    backend = connect(server.url)
    keys = keys_of(20)
    for key in keys:
        assert put_through(backend, key, content(key))
    values: list[bytes | None] = []
    for number, lease in enumerate(backend.load(keys)):
        values.append(None if lease is None else bytes(lease.view))
        if lease is not None:
            lease.release()
        if number == 1:
            server.kill()
    assert values[:2] == [content(key) for key in keys[:2]]
    assert all(value in (None, content(key)) for key, value in zip(keys, values, strict=True))
    assert values[-1] is None
    assert backend.match(keys) == 0
    assert len(lost_lines(caplog)) == 1
    assert store.used_bytes == 0
    server.start()
    clock.now_s += RETRY_S_MAX
    assert put(backend, keys[0], content(keys[0]))
    assert backend.flush() == 0
    assert backend.match(keys) == 1
    assert loaded(backend, keys[:2]) == [content(keys[0]), None]
    assert backend.stats()["reconnects"] == 1


def test_what_went_over_the_sockets_stays_counted_when_the_server_is_lost(
    server_of: StartServer, connect: Connect, clock: Clock
) -> None:
    server = server_of("redis")
    backend = connect(server.url)
    counts = list[tuple[int, int]]()

    def count() -> None:
        stats = backend.stats()
        counts.append((int(stats["bytes_in"]), int(stats["bytes_out"])))

    for key in keys_of(10):
        assert put_through(backend, key, content(key))
    assert loaded(backend, keys_of(10)) == [content(key) for key in keys_of(10)]
    count()
    server.kill()
    assert backend.match([b"k"]) == 0
    count()
    server.start()
    clock.now_s += RETRY_S_MAX
    assert backend.match([b"k"]) == 0
    count()
    assert put_through(backend, b"k", content(b"k"))
    count()
    backend.close()
    count()
    assert counts == sorted(counts)
    assert counts[0][1] > 10 * len(content(b"k"))


def test_a_server_restarted_while_nothing_was_asked_is_no_loss(
    server_of: StartServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of("redis")
    backend = connect(server.url)
    for _ in range(2):
        assert put(backend, b"k", b"value")
        assert backend.flush() == 0
        assert loaded(backend, [b"k"]) == [b"value"]
        assert backend.match([b"k"]) == 1
        server.kill()
        server.start()
        assert backend.match([b"k"]) == 0
    assert not caplog.records


def test_a_server_that_hangs_is_a_miss_within_the_timeout(
    server_of: StartServer, connect: Connect, clock: Clock
) -> None:
    server = server_of("redis")
    backend = connect(server.url, timeout_s=0.2)
    keys = keys_of(4)
    assert put_through(backend, keys[0], content(keys[0], 20_000))
    assert backend.match(keys) == 1
    server.signal(signal.SIGSTOP)
    assert loaded(backend, keys) == [None] * 4
    assert backend.match(keys) == 0
    clock.now_s += RETRY_S_MAX
    assert backend.match(keys) == 0  # the kernel still accepts for it, but it answers no PING
    assert backend.stats()["reconnects"] == 0
    server.signal(signal.SIGCONT)

    def is_back() -> bool:
        clock.now_s += RETRY_S_MAX
        return backend.match(keys) > 0

    wait_until(is_back, "the server answers again")
    assert backend.stats()["reconnects"] == 1
    assert loaded(backend, keys[:1]) == [content(keys[0], 20_000)]


# ---- a server that refuses ---------------------------------------------------------------------------------------


def test_a_password_opens_and_a_wrong_one_is_a_lost_server(
    server_of: StartServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    server = server_of("redis", "--requirepass", "open sesame")
    right = server.url.replace("unix://", "unix://:open%20sesame@") + "?db=3"
    with closing(RemoteBackend(parse_url(right), small_store())) as backend:
        assert put_through(backend, b"k", b"value")
        assert backend.match([b"k"]) == 1
    assert not caplog.records
    for url in (server.url, server.url.replace("unix://", "unix://:wrong@")):
        with closing(RemoteBackend(parse_url(url), small_store())) as backend:
            assert backend.match([b"k"]) == 0
    assert len(lost_lines(caplog)) == 2
    assert "NOAUTH" in caplog.text
    assert "WRONGPASS" in caplog.text
    assert "sesame" not in caplog.text


def test_sets_that_the_server_refuses_are_counted_by_flush(
    fake: FakeServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def full(args: list[bytes]) -> bytes | Leave:
        return b"-OOM command not allowed\r\n" if args[0] == b"SET" and args[1] != b"k0" else polite(args)

    fake.answer = full
    backend = connect(fake.url)
    for number in range(5):
        assert put(backend, b"k%d" % number, b"x")
    assert backend.flush() == 4
    assert backend.flush() == 0
    assert backend.stats()["stored"] == 1
    assert len([record for record in caplog.records if "OOM" in record.getMessage()]) == 1


def test_sets_that_were_under_way_to_a_lost_server_count_as_refused(fake: FakeServer, connect: Connect) -> None:
    fake.answer = lambda args: Leave() if args[0] == b"SET" else polite(args)
    backend = connect(fake.url)
    sent = sum(put(backend, b"k%d" % number, b"x") for number in range(4))
    assert backend.flush() == sent
    assert sent >= 1


def test_closing_waits_for_the_answers_to_what_was_sent(fake: FakeServer, connect: Connect) -> None:
    backend = connect(fake.url)
    for number in range(5):
        assert put(backend, b"k%d" % number, b"x")
    backend.close()
    assert backend.stats()["stored"] == 5


@pytest.mark.parametrize(
    ("length", "count", "most"), [(1, 5 * SETS_UNANSWERED_MAX, SETS_UNANSWERED_MAX), (1 << 20, 24, 9), (10 << 20, 3, 2)]
)
def test_answers_to_sets_do_not_pile_up(
    fake: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch, length: int, count: int, most: int
) -> None:
    unanswered = []
    send = SetPipeline.send

    def watched(lane: SetPipeline, item: RemoteReservation | Touch) -> None:
        send(lane, item)
        unanswered.append(len(lane.unanswered))

    monkeypatch.setattr(SetPipeline, "send", watched)
    fake.answer = shelf = Shelf()
    shelf.open.clear()
    staging = small_store(64 << 20)
    with closing(RemoteBackend(parse_url(fake.url), staging, connections=1, clock=clock)) as backend:
        for number in range(count):
            assert put(backend, b"k%d" % number, bytes(length))
        shelf.open.set()
        assert backend.flush() == 0
        assert backend.stats()["stored"] == count
    assert max(unanswered) == most


def test_an_error_in_place_of_a_body_is_a_miss_and_said_once(
    fake: FakeServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    fake.answer = lambda args: b"-LOADING wait\r\n" if args[0] == b"GET" else polite(args)
    backend = connect(fake.url)
    assert loaded(backend, keys_of(5)) == [None] * 5
    assert [record.getMessage() for record in caplog.records] == [f"{fake.url} answers: LOADING wait (said once)"]
    assert backend.stats()["losses"] == 0


def test_a_server_without_kv_match_is_asked_for_it_once_and_without_prefetch_too(
    fake: FakeServer, connect: Connect
) -> None:
    def stock(args: list[bytes]) -> bytes | Leave:
        return b":1\r\n" if args[0] == b"EXISTS" and args[1] != b"block:2" else polite(args)

    fake.answer = stock
    backend = connect(fake.url)
    for _ in range(3):
        assert backend.match(keys_of(5)) == 2
        assert backend.prefetch(keys_of(5)).queued == 0
    for name in (b"KV.MATCH", b"KV.PREFETCH", b"PREFETCH"):
        assert len(fake.named(name)) == 1
    assert fake.named(b"TOUCH") == [keys_of(2)] * 3
