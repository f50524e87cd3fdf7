"""The server of these tests."""

from pathlib import Path

import pytest

from tests.server.tiered_server import TieredServer


@pytest.fixture
def live(tmp_path: Path) -> TieredServer:
    """A server with a disk, which has started when a test that is a coroutine begins."""
    return TieredServer(tmp_path)
