"""Prometheus' own checker, from the PATH or where scripts/system-packages has put it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def promtool(*args: str, given: bytes = b"") -> None:
    """Run it, with `given` on its standard input; it must find nothing wrong. Skips where there is none, but in CI."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvredis-promtool" / "promtool"
    found = shutil.which("promtool") or (str(cache) if cache.exists() else None)
    if found is None:
        assert not os.environ.get("CI"), "promtool is not here, and CI is set"
        pytest.skip("promtool (of Debian's prometheus package) is not here: scripts/system-packages")
    done = subprocess.run([found, *args], input=given, capture_output=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
