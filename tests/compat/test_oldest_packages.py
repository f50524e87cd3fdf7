"""kvredis with the oldest packages that pyproject.toml lets in: an environment that has them keeps them."""

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

from tests.compat.other_versions import ROOT
from tests.compat.side_packages import COMPILED_ONCE, packages

pytestmark = pytest.mark.nightly

WITHIN_S = 60
BESIDE = "PyJWT==2.9.0\n"
"""What these themselves need (redis 5.3) that this environment may lack: no dependencies are installed with them."""


def oldest(folder: Path) -> Path:
    """The lower bounds of what the server and the command line need, as a requirements file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)(;.*)?", each) for each in project["dependencies"]]
    file = folder / "requirements.txt"
    pinned = [f"{bound[1]}=={bound[2]}\n" for bound in bounds if bound is not None]
    assert len(pinned) == len(project["dependencies"])
    file.write_text("".join(pinned) + BESIDE)
    return file


def test_a_server_and_the_command_line_run_with_the_oldest_packages_that_are_let_in(tmp_path: Path) -> None:
    site = packages(oldest(tmp_path), "oldest")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))} | COMPILED_ONCE
    kvredis = [sys.executable, "-m", "kvredis"]
    options = ["--port", "0", "--metrics-port", "free", "--max-local-cpu-size", "16MB"]
    with subprocess.Popen([*kvredis, "serve", *options], stdout=subprocess.PIPE, env=env, text=True) as server:
        try:
            assert server.stdout is not None
            metrics = next(line for line in server.stdout if line.startswith("Metrics on ")).split()[-1]
            address = next(server.stdout).split()[-1]

            def said(*words: str) -> str:
                """What a command that has worked prints, and nothing beside it."""
                command = [*kvredis, *words, "--url", f"redis://{address}"]
                done = subprocess.run(command, env=env, input="value", capture_output=True, text=True, timeout=WITHIN_S)
                assert (done.returncode, done.stderr) == (0, "")
                return done.stdout

            said("put", "--raw", "-", "key")
            assert said("get", "--raw", "key") == "value"
            assert json.loads(said("ls", "--json"))["keys"] == 1
            for accepted in ("text/plain", "application/openmetrics-text; version=1.0.0"):
                asked = urllib.request.Request(f"{metrics}metrics", headers={"Accept": accepted})
                with urllib.request.urlopen(asked, timeout=WITHIN_S) as reply:
                    assert b"kvredis_memory_blocks 1.0" in reply.read()
        finally:
            server.terminate()
    assert server.returncode == 0
