"""Servers that benches start, and peers that they take for such."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvredis.bench.core import servers
from tests.bench.fake_server import FakePeer
from tests.fork_server import Lean


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this kvredis are forked, and touch none of their gigabyte before it is used."""
    monkeypatch.setattr(servers, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Lean}))


@pytest.fixture
def peers() -> Iterator[list[FakePeer]]:
    """The test's own, to be filled; at the end no connection to any of them is open."""
    peers: list[FakePeer] = []
    yield peers
    for peer in peers:
        peer.join()
