"""What several files of these tests want of their machine."""

from collections.abc import Iterator

import pytest
import torch

from kvredis.backends.local import LocalBackend
from tests.storage.small_store import small_store


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only lose by threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def local() -> Iterator[LocalBackend]:
    """A store in this process."""
    backend = LocalBackend(small_store())
    yield backend
    backend.close()
