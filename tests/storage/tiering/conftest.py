"""The store of these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.tiered_store import TieredStore


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    """A store over a disk, in which all must agree at the end."""
    with TieredStore(tmp_path) as tiers:
        yield tiers
