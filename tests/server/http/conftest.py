"""The server of these tests."""

from pathlib import Path

import pytest

from tests.server.http.http_client import WebServer


@pytest.fixture
def live(tmp_path: Path) -> WebServer:
    """A server with a metrics port, which has started when a test that is a coroutine begins."""
    return WebServer(tmp_path)
