"""What several files of these tests are tried with."""

from typing import Literal, cast

import pytest

Mode = Literal["remote", "layered"]


@pytest.fixture(params=["remote", "layered"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """How the engine's memory and the remote are put together (engine_runs.py)."""
    return cast(Mode, request.param)
