"""A layered backend whose server is absent, dies, hangs or is cut off: near goes on, nothing raises, and it heals."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvredis.backends.tiered import staging
from kvredis.backends.tiered.backend import LayeredBackend
from tests.backends.conftest import ServerProcess, StartServer
from tests.backends.nodes import wait_until
from tests.backends.verbs import content, keys_of, loaded, put
from tests.gate import nightly
from tests.proxy import Proxy

from .layered_pair import LENGTH, figures, forget_near, near_keys, open_layered, store_prompt, store_through

TIMEOUT_S = 1.0
"""blocking_timeout_secs of the tests; what must not hang gets many times that, since the machine is shared."""
PATIENCE_S = 20


@pytest.fixture(params=["kvredis", nightly("redis")])
def server(request: pytest.FixtureRequest, server_of: StartServer) -> ServerProcess:
    """A server of the test's own, which it may kill, stop and start again."""
    return server_of(request.param)


@pytest.fixture
def backend(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayeredBackend]:
    """64 blocks of near memory, which sends again at once what was not taken."""
    monkeypatch.setattr(staging, "UNSENT_PAUSE_S", 0.0)
    with closing(open_layered(server.url, timeout_s=TIMEOUT_S)) as backend:
        yield backend
        backend.flush()
        backend.near.store.check_integrity()
        assert backend.near.store.leases == backend.near.store.reserved_bytes == 0


def values_of(keys: list[bytes]) -> list[bytes]:
    return [content(key, LENGTH) for key in keys]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """What is done in here does not hang."""
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PATIENCE_S


def on_server(server: ServerProcess, keys: list[bytes]) -> int:
    """How many of `keys` the server has, asked over another connection, from the first on."""
    with closing(open_layered(server.url, blocks=16)) as other:
        return other.far.match(keys)


def wait_until_far(backend: LayeredBackend, server: ServerProcess, keys: list[bytes]) -> None:
    """Look up as engines do, until the server has all of a prompt."""

    def is_far() -> bool:
        assert backend.match(keys) == len(keys)
        backend.flush()
        return on_server(server, keys) == len(keys)

    wait_until(is_far, "what was near alone has been sent")


def wait_until_more(backend: LayeredBackend, name: str, count: int) -> None:
    """Wait until a counter has grown by so much."""
    before = int(backend.stats()[name])
    wait_until(lambda: int(backend.stats()[name]) >= before + count, f"more {name}")


def test_a_server_that_is_absent_at_the_start_is_used_once_it_is_there(
    server: ServerProcess, backend: LayeredBackend, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(8)
    server.kill()
    with bounded():
        assert backend.match(keys) == 0
        assert store_prompt(backend, keys) == 8
        assert loaded(backend, [*keys, b"far"]) == [*values_of(keys), None]
        backend.flush()
    assert near_keys(backend, keys) == keys
    assert len(warnings(caplog)) == 1
    server.start()
    wait_until_far(backend, server, keys)
    assert store_prompt(backend, keys_of(12)) == 12
    wait_until_far(backend, server, keys_of(12))
    forget_near(backend, keys[:4])
    assert loaded(backend, keys) == values_of(keys)
    assert backend.stats()["remote_hits"] == 4


def test_a_server_that_dies_between_takes_nothing_from_near_and_gets_what_is_new_when_it_is_back(
    server: ServerProcess, backend: LayeredBackend, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(20)
    store_through(backend, keys[:8])
    server.signal(signal.SIGSTOP)
    assert store_prompt(backend, keys[:16]) == 16
    server.kill()
    with bounded():
        backend.flush()
        assert store_prompt(backend, keys) == 20
        assert loaded(backend, keys) == values_of(keys)
        assert backend.match(keys) == 20
    assert near_keys(backend, keys) == keys
    assert len([text for text in warnings(caplog) if "is lost" in text]) == 1
    server.start()
    wait_until_far(backend, server, keys[8:])
    assert figures(backend, "far_reconnects") == (1,)


def test_a_server_that_is_killed_under_load_costs_misses_and_never_a_wrong_byte(
    server: ServerProcess, backend: LayeredBackend
) -> None:
    keys = keys_of(100)
    wrong: list[bytes] = []
    over = threading.Event()

    def work(first: int) -> None:
        turn = first
        while not over.is_set():
            part = [keys[(turn * 7 + step) % 100] for step in range(10)]
            for key in part[::2]:
                put(backend, key, content(key, LENGTH))
            backend.match(part)
            for key, value in zip(part, loaded(backend, part), strict=True):
                if value not in (None, content(key, LENGTH)):
                    wrong.append(key)
            backend.touch(part)
            turn += 1

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 31, 62)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            wait_until_more(backend, "far_stored", 20)
            server.kill()
            wait_until_more(backend, "misses", 20)
            server.start()
        wait_until_more(backend, "remote_hits", 1)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    lookups, *by_tier = figures(backend, "lookups", "memory_hits", "disk_hits", "remote_hits", "misses")
    assert lookups == sum(int(figure) for figure in by_tier)


def test_a_server_that_hangs_costs_one_timeout_and_near_goes_on(
    server: ServerProcess, backend: LayeredBackend, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(12)
    store_through(backend, keys)
    forget_near(backend, keys[6:])
    server.signal(signal.SIGSTOP)
    with bounded():
        assert loaded(backend, keys) == [*values_of(keys[:6]), *[None] * 6]
        for _ in range(50):
            assert loaded(backend, keys[:6]) == values_of(keys[:6])
            assert backend.match(keys[:6]) == 6
        assert store_prompt(backend, [b"new:%b" % key for key in keys]) == 12
        backend.flush()
    assert len([text for text in warnings(caplog) if "is lost" in text]) == 1
    server.signal(signal.SIGCONT)
    wait_until(lambda: backend.match(keys) == 12, "it is asked again")
    assert loaded(backend, keys) == values_of(keys)


def test_a_lookup_on_a_server_that_hangs_is_bounded_too(server: ServerProcess, backend: LayeredBackend) -> None:
    keys = keys_of(6)
    store_through(backend, keys[:4])
    server.signal(signal.SIGSTOP)
    with bounded():
        for _ in range(20):
            assert backend.match(keys) == 4
    server.signal(signal.SIGCONT)


def test_closing_with_a_server_that_hangs_is_bounded(server: ServerProcess) -> None:
    backend = open_layered(server.url, timeout_s=TIMEOUT_S)
    store_through(backend, keys_of(4))
    server.signal(signal.SIGSTOP)
    with bounded():
        assert store_prompt(backend, keys_of(30)) == 30
        backend.prefetch([b"far"])
        backend.close()
    server.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("trouble", "after_bytes"),
    [(trouble, count) for trouble in ("hang", "cut") for count in (0, 1, 100_000, 300_007)] + [("corrupt", 0)],
)
def test_bodies_that_stop_or_break_off_and_garbage_are_misses_of_which_nothing_stays_near(
    kvredis_server: ServerProcess, trouble: str, after_bytes: int
) -> None:
    host, _, port = kvredis_server.tcp_url.removeprefix("redis://").rpartition(":")
    keys = [b"%b:%d:%b" % (trouble.encode(), after_bytes, key) for key in keys_of(8)]
    with closing(open_layered(kvredis_server.url)) as before:
        store_through(before, keys)
    with Proxy((host, int(port))) as proxy, closing(open_layered(f"redis://{proxy.address}", timeout_s=1.0)) as backend:
        assert backend.match(keys) == 8
        {"hang": proxy.hang, "cut": proxy.cut, "corrupt": proxy.corrupt}[trouble](after_bytes)
        with bounded():
            values = loaded(backend, keys)
        came = [key for key, value in zip(keys, values, strict=True) if value is not None]
        assert came != keys
        assert [value for value in values if value is not None] == values_of(came)
        assert near_keys(backend, keys) == came
        proxy.heal()
        wait_until(lambda: loaded(backend, keys) == values_of(keys), "it is asked again")


def test_what_the_server_has_lost_is_sent_again_where_others_look_for_it_there(
    server: ServerProcess, backend: LayeredBackend
) -> None:
    keys = keys_of(12)
    store_through(backend, keys)
    server.kill()
    server.start()
    wait_until(lambda: backend.far.match([b"-"]) == 0 and not on_server(server, keys), "an empty server")
    assert backend.match(keys) == 12
    assert backend.flush() == 0
    assert on_server(server, keys) == 0, "near has it, and no caller asked for more"
    backend.asks_far = True
    wait_until_far(backend, server, keys)
    sent = backend.stats()["sent_again"]
    server.signal(signal.SIGSTOP)
    assert backend.match(keys) == 12, "a server that does not answer has lost nothing"
    server.signal(signal.SIGCONT)
    wait_until(lambda: on_server(server, keys) == 12 and backend.far.match([*keys, b"-"]) == 12, "it answers again")
    assert backend.match(keys) == 12
    assert backend.stats()["sent_again"] == sent
