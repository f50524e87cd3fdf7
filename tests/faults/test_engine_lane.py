"""An engine that reads in the memory of a server on its host: whatever becomes of that server, of the connection or of
time, it generates the same tokens, and nothing that was not sure to the last byte counts as loaded.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvredis.adapters.engine.load import TensorLoad
from kvredis.backends.base import Lease
from tests.backends.nodes import Node, wait_until
from tests.backends.shm.lane_server import pass_time
from tests.faults.engine_process import EngineProcess
from tests.faults.engine_runs import (
    CHUNK,
    STORED,
    Mode,
    Subject,
    assert_recovers,
    expected,
    quick_retries,
    seed,
    served,
)

__all__ = ["quick_retries"]


@pytest.fixture
def server() -> Iterator[Node]:
    """A server that listens on a TCP port and no unix path."""
    with served("kvredis") as node:
        yield node


def shared(server: Node) -> str:
    """The URL that means memory."""
    return server.url.replace("redis://", "kvredis://")


def held_by_clients(server: Node) -> tuple[int, int]:
    """Attached clients, and their leases."""
    tiers = server.ask("KV.TIERS")
    memory = tiers["memory"] if isinstance(tiers, dict) else dict(zip(tiers[::2], tiers[1::2], strict=True))["memory"]
    memory = memory if isinstance(memory, dict) else dict(zip(memory[::2], memory[1::2], strict=True))
    return int(memory["lane_clients"]), int(memory["lane_leases"])


AfterCopy = Callable[[int, Lease], None]


@pytest.fixture
def after_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[[AfterCopy], None]:
    """Has something happen when a chunk's bytes have been copied, and before they were checked: it is given the number
    of the chunk, and the lease."""

    def install(then: AfterCopy) -> None:
        take, copy = TensorLoad._take, TensorLoad._copy
        leases: list[Lease] = []

        def noted(loading: TensorLoad, chunk: Any, lease: Lease) -> bool:
            leases.append(lease)
            return take(loading, chunk, lease)

        def copied(loading: TensorLoad, chunk: Any, view: memoryview) -> int:
            stop = copy(loading, chunk, view)
            then(len(leases), leases[-1])
            return stop

        monkeypatch.setattr(TensorLoad, "_take", noted)
        monkeypatch.setattr(TensorLoad, "_copy", copied)

    return install


def test_tokens_are_the_same_over_shared_memory(server: Node, mode: Mode) -> None:
    with Subject(shared(server), mode) as subject:
        assert subject.ask(1) == 0
        assert subject.engine.flush() == 0
        with Subject(shared(server), mode) as other:
            assert other.ask(1) == STORED
            assert other.remote("attached") == other.remote("connections") > 0
        assert subject.ask(1) == STORED
    wait_until(lambda: held_by_clients(server) == (0, 0), "all is given back")


def test_a_server_that_is_killed_and_comes_back_is_read_again(server: Node, mode: Mode) -> None:
    with Subject(shared(server), mode) as subject:
        assert subject.ask(1) == 0
        assert subject.engine.flush() == 0
        server.kill()
        subject.ask(2)
        server.start()
        assert_recovers(subject, shared(server))
        assert subject.remote("attached") > 0


def test_a_server_that_is_killed_while_a_chunk_is_copied_costs_that_chunk_and_no_more(
    server: Node, after_copy: Callable[[AfterCopy], None]
) -> None:
    seed(server.url, 1)
    with Subject(shared(server)) as subject:
        after_copy(lambda number, lease: server.kill() if number == 2 else None)
        assert subject.ask(1) == CHUNK
        server.start()
        assert_recovers(subject, shared(server))


def test_a_connection_that_is_killed_while_a_chunk_is_copied_costs_that_chunk_and_no_more(
    server: Node, after_copy: Callable[[AfterCopy], None]
) -> None:
    seed(server.url, 1)

    def kill(number: int, lease: Lease) -> None:
        if number == 2:
            server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "YES")
            server.ask("FLUSHALL")  # and the room is free for any value
            wait_until(lambda: not lease.held, "the end of the lease")

    with Subject(shared(server)) as subject:
        after_copy(kill)
        assert subject.ask(1) == CHUNK
        assert_recovers(subject, shared(server))


def test_a_lease_that_ends_while_its_chunk_is_copied_costs_that_chunk_and_no_more(
    server: Node, after_copy: Callable[[AfterCopy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(server.url, 1)
    with Subject(shared(server)) as subject:
        after_copy(lambda number, lease: pass_time(monkeypatch, 40.0) if number == 2 else None)
        assert subject.ask(1) == CHUNK
        assert subject.ask(1) == STORED
        assert subject.engine.stats.errors == 0


def test_bytes_that_are_no_block_any_more_are_a_miss_and_no_error(
    server: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(server.url, 1)
    copy, copied = TensorLoad._copy, []

    def late(loading: TensorLoad, chunk: Any, view: memoryview) -> int:
        copied.append(chunk)
        if len(copied) == 2:
            server.kill()
            return copy(loading, chunk, memoryview(bytes(len(view))))  # what another client has written there
        return copy(loading, chunk, view)

    monkeypatch.setattr(TensorLoad, "_copy", late)
    with Subject(shared(server)) as subject:
        assert subject.ask(1) == CHUNK
        assert subject.engine.stats.refused_blocks == subject.engine.stats.errors == 0


def test_an_engine_that_is_killed_leaves_nothing_held_and_the_next_finds_what_it_stored(
    server: Node, mode: Mode
) -> None:
    with EngineProcess(shared(server), [1, 2], mode) as first:
        first.wait_done()
        assert held_by_clients(server)[0] > 0
        first.kill()
    wait_until(lambda: held_by_clients(server) == (0, 0), "the end of what it held")
    with EngineProcess(shared(server), [1, 2], mode) as second:
        second.wait_done()
        assert second.answers == {number: expected(number) for number in (1, 2)}
        assert second.loaded == {1: STORED, 2: STORED}
