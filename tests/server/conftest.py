"""Fixtures of the door's tests."""

from collections.abc import Iterator

import pytest

from tests.server.fake_session import FakeSession, make_server


@pytest.fixture
def session() -> Iterator[FakeSession]:
    """A session of a server whose store must be whole in the end, and nothing in it held."""
    server = make_server()
    yield FakeSession(server)
    assert server.store.reserved_bytes == server.store.retired_bytes == server.store.leases == 0
    server.store.check_integrity()
    server.store.close()
