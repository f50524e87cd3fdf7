"""The Containerfile, as far as it can be tried without a container engine: its shape, and its own commands in a folder.

What installs Debian packages and makes the user is not run here.
"""

import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvredis.backends.config.schema import Config
from kvredis.cli.doctor.system import EXTENSIONS
from tests.compat.side_packages import UNREACHABLE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/container/Containerfile"
PINNED = re.compile(r"[a-z./-]+:\d+\.\d+(\.\d+)?-[a-z0-9-]+(@sha256:[0-9a-f]{64})?")
BUILD_S = 400
WAIT_S = 60


@dataclass(frozen=True)
class Step:
    """One instruction and what follows it, on one line."""

    word: str
    rest: str

    def json(self) -> list[str]:
        """The words of an exec form."""
        words: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return words


def stages() -> list[list[Step]]:
    """The instructions of each stage; those before the first are in front of it."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Step]] = [[]]
    for line in filter(None, text.splitlines()):
        step = Step(*line.split(maxsplit=1))
        if step.word == "FROM" and any(each.word == "FROM" for each in found[-1]):
            found.append([])
        found[-1].append(step)
    return found


def image_variables() -> dict[str, str]:
    """What the image's environment is."""
    words = (word for step in stages()[-1] if step.word == "ENV" for word in shlex.split(step.rest))
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file out: the last line that matches it or a folder above it decides."""
    out = False
    parents = ["/".join(path.split("/")[: count + 1]) for count in range(path.count("/") + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            anywhere = line.startswith("**/")
            if any(fnmatch.fnmatchcase(each.rpartition("/")[2] if anywhere else each, pattern) for each in parents):
                out = not line.startswith("!")
    return out


def test_it_is_two_stages_of_one_pinned_image() -> None:
    build, final = stages()
    assert build[0].word == "ARG"
    name, _, image = build[0].rest.partition("=")
    assert PINNED.fullmatch(image), image
    assert [step.rest.split()[0] for stage in (build, final) for step in stage if step.word == "FROM"] == [
        f"${{{name}}}"
    ] * 2


def test_it_fetches_nothing_but_packages_and_runs_without_rights() -> None:
    build, final = stages()
    words = [step.word for step in (*build, *final)]
    assert "ADD" not in words
    assert not any(tool in step.rest for step in (*build, *final) for tool in ("curl", "wget", "git clone"))
    users = [step.rest for step in final if step.word == "USER"]
    assert users == ["10001:10001"], "a number, so that Kubernetes can see that it is not root"
    after = final[[step.word for step in final].index("USER") :]
    assert not any(step.word in ("RUN", "COPY") for step in after)
    assert not any(name in step.rest for step in final for name in ("gcc", "PASSWORD", "requirepass="))


def test_what_is_not_needed_for_the_image_is_not_sent() -> None:
    for path in (
        "tests/test_layout.py",
        ".git/config",
        ".venv/bin/python",
        "bench/results/x.json",
        "cli/__pycache__/x",
    ):
        assert ignored(path), path
    for path in ("cli/main.py", "bench/core/plot.py", "kvredis/server/protocol/_hot.pyx", "pyproject.toml"):
        assert not ignored(path), path
    assert ignored("storage/_native.cpython-311-x86_64-linux-gnu.so")


def copied(stage: list[Step], context: Path) -> None:
    """Do the COPY steps of a stage from the source tree, links as they are, less what is ignored."""
    for step in stage:
        if step.word == "COPY":
            *sources, target = step.rest.split()
            for source in sources:
                assert (ROOT / source).exists(), step.rest
                assert not ignored(source), step.rest
                if (ROOT / source).is_file():
                    shutil.copy(ROOT / source, context / target)
                else:
                    shutil.copytree(ROOT / source, context / target, symlinks=True, ignore=_left_out)


def _left_out(folder: str, names: list[str]) -> set[str]:
    where = Path(folder).relative_to(ROOT)
    return {name for name in names if ignored(str(where / name))}


@pytest.mark.nightly
def test_its_own_commands_make_a_server_that_is_healthy(tmp_path: Path) -> None:
    build, final = stages()
    source, installed = tmp_path / "src", tmp_path / "opt/kvredis"
    source.mkdir()
    copied(build, source)
    commands = [step.rest for step in build if step.word == "RUN" and "apt-get" not in step.rest]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("/opt/kvredis", str(installed)))
        words[0] = sys.executable if words[0] == "python" else words[0]
        done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=BUILD_S)
        if any(sign in done.stderr for sign in UNREACHABLE) and not os.environ.get("CI"):
            pytest.skip("PyPI cannot be reached")
        assert done.returncode == 0, done.stderr
    packages = {path.name.partition("-")[0] for path in installed.glob("lib/python*/site-packages/*.dist-info")}
    assert {"kvredis", "uvloop"} <= packages
    assert "torch" not in packages
    built = {path.name.partition(".")[0] for path in installed.glob("lib/python*/site-packages/kvredis/**/_*.so")}
    assert built == {name.rpartition(".")[2] for name in EXTENSIONS}

    env = image_variables()
    assert Config.load(env=env).bind == ("*", "-::*"), "every address of either family, the second where there is one"
    env["PATH"] = f"{installed}/bin:{os.environ['PATH']}"
    env |= {"KVREDIS_BIND": "127.0.0.1", "KVREDIS_PORT": "0", "LMCACHE_MAX_LOCAL_CPU_SIZE": "16MB"}
    env |= {"KVREDIS_REQUIREPASS": "word", "KVREDIS_METRICS_PORT": free_port()}
    start = [word for step in final if step.word in ("ENTRYPOINT", "CMD") for word in step.json()]
    check = next(step.json() for step in final if step.word == "HEALTHCHECK")

    def healthy() -> bool:
        words = [str(installed / "bin" / check[0]), *check[1:]]
        return subprocess.run(words, env=env, capture_output=True, timeout=WAIT_S).returncode == 0

    assert not healthy(), "no server is there yet"
    process = subprocess.Popen(
        [str(installed / "bin" / start[0]), *start[1:]],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Ready to accept"):
                break
        assert process.poll() is None, said
        assert healthy(), said
        stop = next(step.rest for step in final if step.word == "STOPSIGNAL")
        process.send_signal(getattr(signal, stop))
        assert process.wait(WAIT_S) == 0
        assert not healthy()
    finally:
        process.kill()
        process.communicate()


def test_the_first_process_of_a_container_ends_when_it_is_told_to_while_it_starts(tmp_path: Path) -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("the kernel lets us have no process numbers of our own (unshare --pid)")
    config = tmp_path / "kvredis.yaml"
    os.mkfifo(config)  # so that it starts for as long as this test writes nothing
    env = {"PATH": os.environ["PATH"], "LMCACHE_CONFIG_FILE": str(config)}
    process = subprocess.Popen([*alone, sys.executable, "-m", "kvredis", "serve"], cwd=ROOT, env=env)
    try:
        writer = opened_when_read(config, process)
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert process.wait(WAIT_S) == 1
        os.close(writer)
    finally:
        process.kill()
        process.wait()


def opened_when_read(fifo: Path, process: subprocess.Popen[bytes]) -> int:
    """The writing end, as soon as there is a reader."""
    while process.poll() is None:
        with contextlib.suppress(OSError):  # ENXIO
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    raise AssertionError("it has ended before it read its configuration")


def free_port() -> str:
    """A port that was free a moment ago: /health has no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return str(door.getsockname()[1])
