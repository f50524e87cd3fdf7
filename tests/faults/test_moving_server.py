"""Chunks between an engine's pages and a real server, over every way there is to it; and the server, the connection,
the lease or the bytes go in the middle of a copy. What has come is right, what has not is said, nothing is held.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest

from kvredis.adapters.paged.jobs import ChunkMove, LoadJob, StoreJob
from kvredis.adapters.paged.mover import ChunkMover
from kvredis.adapters.transfer.base import Moving
from kvredis.backends.base import Backend
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from tests.adapters.paged_engine import CHUNK, WAIT_S, PagedEngine, load_now, mover_on, moves_of, pages_in
from tests.backends.nodes import HOST, Node, wait_until
from tests.faults.engine_runs import TIMEOUT_S, quick_retries, served
from tests.gate import nightly
from tests.proxy import Proxy

__all__ = ["quick_retries"]

Way = Literal["tcp", "unix", "lane", "layered tcp", "layered lane"]
WAYS = ["lane", "layered tcp", *map(nightly, ("tcp", "unix", "layered lane"))]
COUNT = 8


class Server:
    """A server that listens on TCP and on a unix socket, and the backends that were opened over it."""

    def __init__(self, node: Node, path: Path) -> None:
        self.node = node
        self._path = path
        self._opened: list[Backend] = []

    def open(self, way: Way, address: str | None = None, timeout_s: float = TIMEOUT_S) -> Backend:
        """A backend of an engine's own; `address` is that of a proxy in between."""
        url = f"redis://{address or self.node.address}"
        url = f"unix://{self._path}" if way == "unix" else url
        url = url.replace("redis://", "kvredis://") if "lane" in way else url
        overrides = {"remote_url": url, "local_cpu": "layered" in way, "max_local_cpu_size": "8MB", "hugepages": "off"}
        config = Config.load(env={}, overrides=overrides | {"blocking_timeout_secs": timeout_s})
        self._opened.append(open_backend(config))
        return self._opened[-1]

    def lane_figures(self) -> tuple[int, int]:
        """Attached clients, and their leases."""
        tiers = self.node.ask("KV.TIERS")
        memory = tiers["memory"] if isinstance(tiers, dict) else _mapping(tiers)["memory"]
        memory = memory if isinstance(memory, dict) else _mapping(memory)
        return int(memory["lane_clients"]), int(memory["lane_leases"])

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


def _mapping(flat: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        with served("kvredis", "--unixsocket", str(path)) as node:
            yield Server(node, path)


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """It runs, and has no block."""
    if not running.node.is_running:
        running.node.start()
    running.node.ask("FLUSHALL")
    with closing(running):
        yield running


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """How the engine reaches it."""
    way: Way = request.param
    return way


def both(name: str, seed: int = 0) -> list[ChunkMove]:
    """Chunks of both groups of layers."""
    return moves_of(name, COUNT, seed) + moves_of(name, 3, seed, group=1)


def seed(server: Server, name: str = "a") -> PagedEngine:
    """Have an undisturbed engine store a prompt's chunks, and end it."""
    engine = PagedEngine(50)
    backend = server.open("tcp")
    with mover_on(backend, engine) as mover:
        mover.store(StoreJob("seed", both(name), COUNT * CHUNK))
        assert mover.settle(WAIT_S)
    assert backend.flush() == 0
    return engine


Between = Callable[[int], None]


def after_copy(engine: PagedEngine, then: Between) -> None:
    """Something happens when a chunk has been copied into the pages, and before it was checked; it is given the number
    of the copy."""
    transfer, count = engine.groups[0].transfer, iter(range(1, 10_000))
    load = transfer.load

    def copied(parts: Any, *, after: Any = None, is_last: bool = False) -> Moving:
        moving = load(parts)
        then(next(count))
        return moving

    transfer.load = copied  # type: ignore[method-assign]


def assert_loads(mover: ChunkMover, engine: PagedEngine, source: PagedEngine, name: str = "a") -> None:
    """All comes, and is right."""
    moves = both(name, seed=7)
    mover.finished()
    assert load_now(mover, LoadJob("again", moves)) == len(moves)
    assert mover.finished().failed_pages == {}
    for from_, to in zip(both(name), moves, strict=True):
        assert engine.bytes_of(to) == source.bytes_of(from_)


def test_what_one_engine_stores_whole_and_layer_by_layer_another_loads(server: Server, way: Way) -> None:
    source, backend = PagedEngine(50), server.open(way)
    with mover_on(backend, source, batch_bytes=70_000) as mover:
        mover.store(StoreJob("r", both("a"), COUNT * CHUNK))
        for place in range(6):
            mover.save_layer(place, [StoreJob("s", both("b"), COUNT * CHUNK)])
        mover.end_layers()
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"r", "s"}
    assert backend.flush() == 0
    backend.close()
    engine = PagedEngine(100)
    with mover_on(server.open(way), engine, batch_bytes=70_000) as mover:
        assert_loads(mover, engine, source)
        assert load_now(mover, LoadJob("t", both("b", seed=9))) == COUNT + 3
        assert mover.finished().failed_pages == {}
        assert mover.stats()["errors"] == 0
    for from_, to in zip(both("b"), both("b", seed=9), strict=True):
        assert engine.bytes_of(to) == source.bytes_of(from_)
    wait_until(lambda: server.lane_figures()[1] == 0, "no lease is held")


def test_a_server_that_is_killed_in_the_middle_of_a_load_costs_what_was_not_sure_and_is_used_again(
    server: Server, way: Way
) -> None:
    source, engine = seed(server), PagedEngine(100)
    after_copy(engine, lambda number: server.node.kill() if number == 3 else None)
    with mover_on(server.open(way), engine, batch_bytes=1) as mover:
        moves = both("a", seed=7)
        come = load_now(mover, LoadJob("r", moves))
        assert come < len(moves) if "lane" in way else come >= 3
        assert set(mover.finished().failed_pages.get("r", ())) == pages_in(moves[come:])
        for from_, to in zip(both("a")[:come], moves[:come], strict=True):
            assert engine.bytes_of(to) == source.bytes_of(from_)
        mover.store(StoreJob("s", both("b"), COUNT * CHUNK))
        assert mover.settle(WAIT_S)
        assert mover.finished().stored == {"s"}
        server.node.start()

        stored = seed(server, "c")
        wait_until(lambda: load_now(mover, LoadJob("u", both("c", seed=7))) == COUNT + 3, "a hit after the trouble")
        assert_loads(mover, engine, stored, "c")
        assert mover.stats()["errors"] == 0, "a backend keeps its trouble to itself"
        assert mover.stats()["corrupt_chunks"] == 0


@pytest.mark.parametrize("how", ["KV.REVOKE", "CLIENT KILL"])
def test_a_lease_that_is_revoked_in_the_middle_of_a_copy_costs_what_was_copied_then_and_no_more(
    server: Server, how: str
) -> None:
    source, engine = seed(server), PagedEngine(100)

    def revoke(number: int) -> None:
        if number == 3:
            if how == "KV.REVOKE":
                clients = server.node.ask("CLIENT", "LIST")
                rows = clients if isinstance(clients, list) else [_row(line) for line in clients.splitlines()]
                for client in (row["id"] for row in rows if row.get("lane") == "attached"):
                    server.node.ask("KV.REVOKE", client)
            else:
                server.node.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "YES")
            wait_until(lambda: server.lane_figures()[1] == 0, "the end of the leases")

    after_copy(engine, revoke)
    with mover_on(server.open("lane"), engine, batch_bytes=1, verify=False) as mover:
        moves = both("a", seed=7)
        assert load_now(mover, LoadJob("r", moves)) == 2
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves[2:])
        stats = mover.stats()
        assert (stats["expired_chunks"], stats["corrupt_chunks"], stats["errors"]) == (1, 0, 0)
        wait_until(lambda: load_now(mover, LoadJob("s", moves)) == len(moves), "the lane again")
        assert_loads(mover, engine, source)


def _row(line: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in line.split())}


def test_a_block_that_was_damaged_on_the_server_is_a_miss_and_is_deleted_there(server: Server, way: Way) -> None:
    seed(server)
    bad = both("a")[2].key
    length = int(server.node.ask("STRLEN", bad))
    with server.node.client() as client:
        client.setrange(bad, length - 100, b"?")
    engine, moves = PagedEngine(100), both("a", seed=7)
    with mover_on(server.open(way), engine) as mover:
        assert load_now(mover, LoadJob("r", moves)) == 2
        assert set(mover.finished().failed_pages["r"]) == pages_in(moves[2:])
        assert mover.stats()["corrupt_chunks"] == 1
        wait_until(lambda: server.node.ask("EXISTS", bad) == 0, "it is not found any more")


@pytest.mark.parametrize("good_bytes", [50_000, *map(nightly, (100, 51_000, 100_000))])
def test_bytes_that_a_network_has_spoilt_never_come(server: Server, good_bytes: int) -> None:
    source, engine, moves = seed(server), PagedEngine(100), both("a", seed=7)
    with Proxy((HOST, server.node.port)) as proxy:
        with mover_on(server.open("tcp", proxy.address), engine) as mover:
            proxy.corrupt(good_bytes)
            come = load_now(mover, LoadJob("r", moves))
            assert come < len(moves)
            assert set(mover.finished().failed_pages["r"]) == pages_in(moves[come:])
            for from_, to in zip(both("a")[:come], moves[:come], strict=True):
                assert engine.bytes_of(to) == source.bytes_of(from_)
            proxy.heal()
        server.close()


def test_stores_to_a_slow_server_are_dropped_and_counted_and_the_pages_are_free_at_once(server: Server) -> None:
    engine = PagedEngine(50)
    with Proxy((HOST, server.node.port)) as proxy:
        proxy.throttle(up=20_000)
        backend = server.open("tcp", proxy.address, timeout_s=30.0)
        with mover_on(backend, engine) as mover:
            for number in range(30):
                mover.store(StoreJob(f"r{number}", both(f"p{number}"), COUNT * CHUNK))
            assert mover.settle(WAIT_S), "330 chunks would take seven minutes"
            assert len(mover.finished().stored) == 30
            stats = mover.stats()
            assert stats["dropped_stores"] > 0
            assert stats["dropped_stores"] + stats["refused_stores"] + stats["stored_chunks"] == 30 * (COUNT + 3)
        proxy.heal()
        assert backend.flush() == 0
        assert server.node.ask("DBSIZE") == stats["stored_chunks"], "what was taken arrives"
        server.close()


def test_a_server_that_is_not_there_is_a_miss(server: Server, way: Way) -> None:
    server.node.kill()
    engine = PagedEngine(100)
    with mover_on(server.open(way), engine) as mover:
        assert load_now(mover, LoadJob("r", both("a"))) == 0
        mover.store(StoreJob("s", both("a"), COUNT * CHUNK))
        assert mover.settle(WAIT_S)
        finished = mover.finished()
        assert set(finished.failed_pages["r"]) == pages_in(both("a"))
        assert finished.stored == {"s"}
        assert mover.stats()["errors"] == 0
    assert engine.changed_pages() == set()
