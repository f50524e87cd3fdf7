"""A Python without the global interpreter lock is refused: the store counts on it."""

import importlib
import sys

import pytest

import kvredis.storage


def test_a_python_without_its_lock_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ImportError, match="PYTHON_GIL=1"):
        importlib.reload(kvredis.storage)


def test_a_free_threaded_python_that_has_its_lock_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    importlib.reload(kvredis.storage)
