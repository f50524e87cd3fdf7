"""A block that memory will never hold: it is refused as ever, and whoever wonders why there are no hits is told."""

from collections.abc import Callable
from contextlib import closing

import pytest

from kvredis.backends.base import Backend
from kvredis.backends.local import LocalBackend

from .conftest import Connect, small_store
from .fake_server import FakeServer
from .tiered.layered_pair import open_layered
from .verbs import put

MEMORY = 32 << 20


@pytest.mark.parametrize("kind", ["local", "remote", "layered"])
def test_blocks_longer_than_all_of_memory_are_refused_and_the_log_says_so_once(
    kind: str, fake: FakeServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: dict[str, Callable[[], Backend]] = {
        "local": lambda: LocalBackend(small_store(MEMORY)),
        "remote": lambda: connect(fake.url),
        "layered": lambda: open_layered(fake.url, blocks=MEMORY // (64 * 1024)),
    }
    with closing(kinds[kind]()) as backend:
        assert put(backend, b"fits", bytes(1 << 20))
        assert not caplog.records
        assert backend.reserve(b"one", MEMORY) is None
        assert backend.reserve(b"another", 2 * MEMORY) is None
    told = (
        f"a block of {MEMORY} bytes is longer than all of max_local_cpu_size ({MEMORY} bytes): none of them is stored"
    )
    assert [record.getMessage() for record in caplog.records] == [told]
