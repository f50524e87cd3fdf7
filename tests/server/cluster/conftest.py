"""The server of these tests."""

from pathlib import Path

import pytest

from tests.server.cluster_node import node
from tests.server.live import LiveServer


@pytest.fixture
def live(tmp_path: Path) -> LiveServer:
    """A node of a cluster of two, which has started when a test that is a coroutine begins."""
    return node(tmp_path)
