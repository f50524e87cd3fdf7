"""Fixtures of the door's tests."""

from collections.abc import Iterator
from typing import cast

import pytest

from tests.server.fake_session import FakeSession, make_server
from tests.server.live import LOOPS


@pytest.fixture
def session() -> Iterator[FakeSession]:
    """A session of a server whose store must be whole in the end, and nothing in it held."""
    server = make_server()
    yield FakeSession(server)
    assert server.store.reserved_bytes == server.store.retired_bytes == server.store.leases == 0
    server.store.check_integrity()
    server.store.close()


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    """Each event loop by its name: one lends what is written to it, the other copies."""
    return cast(str, request.param)
