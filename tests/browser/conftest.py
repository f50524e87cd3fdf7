"""One browser and one filled server for all tests of a module: each takes seconds to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.browser.served import Served


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def served(window: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    try:
        server.fill()
        yield server
    finally:
        server.end()


@pytest.fixture
def browser(window: Browser, served: Served, tmp_path: Path) -> Iterator[Browser]:
    """The page, freshly opened; at the end the console has had nothing to say."""
    window.folder = tmp_path
    window.resize(1280, 900)
    window.prefer(color_scheme="light")
    window.open(served.url)
    yield window
    complaints = window.complaints()
    window.driver.get("about:blank")
    assert complaints == []
