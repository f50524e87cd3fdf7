"""ER1 and ER2: an engine whose remote is absent, dies under it, hangs or answers garbage generates on with the same
tokens, says so once, and uses the remote again when that is well, without a restart.
"""

import signal
import threading
from collections.abc import Iterator

import pytest

from tests.backends.nodes import HOST, Node, wait_until
from tests.faults.engine_runs import (
    BLOCK_BYTES,
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
from tests.gate import nightly
from tests.proxy import Proxy

__all__ = ["quick_retries"]

KINDS: list[Kind] = ["kvredis", "redis"]


@pytest.fixture(scope="module", params=KINDS)
def shared_server(request: pytest.FixtureRequest) -> Iterator[Node]:
    with served(request.param) as node:
        yield node


@pytest.fixture
def server(shared_server: Node) -> Node:
    """An empty server, which a test may kill."""
    if not shared_server.is_running:
        shared_server.start()
    shared_server.ask("FLUSHALL")
    return shared_server


@pytest.fixture
def proxy(server: Node) -> Iterator[Proxy]:
    """The network in front of it."""
    with Proxy((HOST, server.port)) as made:
        yield made
        made.heal()


def through(proxy: Proxy) -> str:
    """The URL of an engine whose bytes pass the proxy."""
    return f"redis://{proxy.address}"


def assert_goes_on(subject: Subject, numbers: range) -> None:
    """Prompts that the remote may have and the engine has not: generated without it."""
    for number in numbers:
        assert subject.ask(number) == 0


def test_the_first_token_comes_without_the_remote_that_is_absent_at_the_start(
    server: Node, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    with Subject(server.url, mode) as subject:
        assert_goes_on(subject, range(3))
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        assert subject.remote("losses") == 1
        assert subject.engine.stats.hit_tokens == 0
        server.start()
        caplog.clear()
        assert_recovers(subject, server.url)
        assert subject.remote("reconnects") == 1
    assert len(warnings_of(caplog)) == 1, "it is back"


def test_a_request_whose_server_is_killed_in_the_middle_of_its_load_recomputes_what_is_missing(
    server: Node, proxy: Proxy, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    seed(server.url, 0, 1, 2)
    with Subject(through(proxy), mode) as subject:
        assert subject.ask(0) == STORED
        caplog.clear()
        proxy.cut(after_bytes=BLOCK_BYTES * 3 // 2)
        limit = proxy.passed_bytes["down"] + BLOCK_BYTES * 3 // 2

        def kill() -> None:
            wait_until(lambda: proxy.passed_bytes["down"] >= limit, "the middle of the second block")
            server.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert subject.ask(1) < STORED
        killer.join()
        assert not server.is_running
        assert_goes_on(subject, range(2, 5))
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        assert subject.remote("losses") == 1
        server.start()
        proxy.heal()
        caplog.clear()
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 1, "it is back"


def test_a_server_that_stops_answering_is_a_miss_within_the_timeout_and_used_again_when_it_goes_on(
    server: Node, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    seed(server.url, 0, 1)
    with Subject(server.url, mode) as subject:
        assert subject.ask(0) == STORED
        caplog.clear()
        server.signal(signal.SIGSTOP)
        try:
            assert_goes_on(subject, range(1, 4))
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert subject.remote("losses") == 1
        finally:
            server.signal(signal.SIGCONT)
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 2, "lost, and back"


@pytest.mark.parametrize("after_blocks", [nightly(0.0), 1.5])
@pytest.mark.parametrize("trouble", ["hang", "corrupt"])
def test_a_network_that_hangs_or_brings_garbage_is_a_lost_server_and_never_a_wrong_token(
    server: Node, proxy: Proxy, mode: Mode, trouble: str, after_blocks: float, caplog: pytest.LogCaptureFixture
) -> None:
    seed(server.url, 0, 1, 2)
    with Subject(through(proxy), mode) as subject:
        assert subject.ask(0) == STORED
        caplog.clear()
        after_bytes = int(BLOCK_BYTES * after_blocks)
        if trouble == "hang":
            proxy.hang(after_bytes=after_bytes)
            assert subject.ask(1) <= STORED * after_blocks // 3, "in time, with what had come"
        else:
            proxy.corrupt(after_bytes=after_bytes)
            subject.ask(1)
        assert_goes_on(subject, range(2, 5))
        assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
        assert subject.remote("losses") == 1
        proxy.heal()
        assert_recovers(subject, server.url)
    assert len(warnings_of(caplog)) == 2, "lost, and back"


def test_every_spell_of_trouble_is_told_once(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    with served("redis") as server, Subject(server.url, mode) as subject:
        for spell in range(3):
            assert_recovers(subject, server.url)
            caplog.clear()
            server.kill()
            assert_goes_on(subject, range(10 * spell, 10 * spell + 3))
            assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
            assert subject.remote("losses") == spell + 1
            server.start()
