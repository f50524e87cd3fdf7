"""Servers that benches start."""

import subprocess
from types import SimpleNamespace

import pytest

from kvredis.bench.core import servers
from tests.fork_server import Forked


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this kvredis are forked."""
    monkeypatch.setattr(servers, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
