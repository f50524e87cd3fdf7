"""One browser and one filled server for all tests of a module: each takes seconds to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Browser
from tests.browser.served import Served


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def served(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    try:
        server.fill()
        yield server
    finally:
        server.end()


@pytest.fixture
def window(chromium: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The window, as every test finds it."""
    chromium.folder = tmp_path
    try:
        chromium.resize(1280, 900)
        chromium.prefer(color_scheme="light")
        yield chromium
    finally:
        chromium.leave()


@pytest.fixture
def browser(window: Browser, served: Served) -> Iterator[Browser]:
    """The page, freshly opened; at the end the console has had nothing to say."""
    window.open(served.url)
    yield window
    assert window.complaints() == []
