"""Fixtures of the door's tests."""

from typing import cast

import pytest

from tests.server.live import LOOPS


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    """Each event loop by its name: one lends what is written to it, the other copies."""
    return cast(str, request.param)
