"""Fixtures of the door's tests."""

from collections.abc import Iterator

import pytest

from kvredis.server.server import Server
from tests.server.fake_session import FakeSession, make_server


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that listens nowhere, whose store must be whole in the end, and nothing in it held."""
    server = make_server()
    yield server
    assert server.store.reserved_bytes == server.store.retired_bytes == server.store.leases == 0
    server.store.check_integrity()
    server.store.close()


@pytest.fixture
def session(server: Server) -> FakeSession:
    """A client of it."""
    return FakeSession(server)
