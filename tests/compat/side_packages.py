"""Packages that would change the versions that everything else is tested with, in folders outside the source tree.

A folder is made once for what its requirements file says, whole or not at all, and is put before this environment on a
process' path; what the file does not name, torch above all, is this environment's own. `python -m
tests.compat.side_packages` makes those of the gate, so that no test waits for them.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PIP_INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile",
               "--only-binary", ":all:", "--retries", "1")  # fmt: skip
COMPILED_ONCE = {"PYTHONDONTWRITEBYTECODE": ""}
"""For who imports them: pip compiles none of their thousands of modules, and a process that may not keep what it has
compiled takes 19 s instead of 13 to start vLLM."""
UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError")
INSTALL_S = 420


def packages(requirements: Path, name: str) -> Path:
    """The folder with the packages of a requirements file, made in the cache of `name` if it is not there.

    Without PyPI the tests are skipped, unless CI is set in the environment: there they fail.
    """
    kind = f"{sys.version_info[:2]} {platform.machine()}".encode()
    digest = hashlib.sha256(requirements.read_bytes() + kind).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"kvredis-{name}"
    folder = cache / digest
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side: one makes it, and the other waits
        if not folder.is_dir():
            _make(folder, requirements, name)
    return folder


def _make(folder: Path, requirements: Path, name: str) -> None:
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        command = [sys.executable, *PIP_INSTALL, "--target", str(scratch), "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if any(sign in done.stderr for sign in UNREACHABLE) and not os.environ.get("CI"):
            pytest.skip(f"{name} cannot be installed, PyPI cannot be reached: {done.stderr.strip()[-200:]}")
        assert done.returncode == 0, f"pip could not install {name}: {done.stderr}"
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    for engine, name in (("vllm", ""), ("sglang", ""), ("sglang", "-engine")):
        packages(Path(__file__).parent / engine / f"requirements{name}.txt", engine)
