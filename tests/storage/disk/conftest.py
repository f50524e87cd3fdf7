"""The disk tier of these tests."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskTier

from .small_disk import small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier of a few segments, which has nothing."""
    with closing(small_disk(tmp_path)) as disk:
        yield disk
