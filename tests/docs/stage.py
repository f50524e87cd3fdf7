"""Where the blocks of a page are run: a scratch folder, a network of its own, and servers that end with the page.

The blocks of a page are one shell script in their order, so that what one block starts or exports is there for the
next. `kvredis serve`, which a reader starts in another terminal, returns when the server is ready, and takes the place
of an earlier one at the same address. Where the kernel lets us have no network of our own, free ports are put in the
place of those that the page names.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.blocks import ROOT, Block, exchanges
from tests.fork_server import PR_SET_CHILD_SUBREAPER

PAGE_S = 300
"""A bound on one page. Most take a few seconds, those that load torch eight on an idle core."""
END_S = 10
"""What servers have to end by themselves, which takes them a moment."""
POLL_S = 0.02
ALONE = Path(__file__).with_name("alone.py")
PORTS = ("6379", "6380", "7001", "7002", "7003", "9121")
"""The ports that pages name."""
SERVER_DEFAULTS = {
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "96MB",  # a page's reader has 5 GiB for it
    "KVREDIS_PREFAULT": "0",
    "KVREDIS_PAGE_LOCK": "false",
}

# What stands in for `kvredis`: itself, but that a server is started in the background and waited for.
_KVREDIS = """#!/usr/bin/env bash
real=({python} -m kvredis)
if [ -n "{port}" ] && [[ "${{1:-}}" =~ ^(ls|meta|get|put|rm|prefetch|top)$ ]]; then
    export LMCACHE_REMOTE_URL=redis://127.0.0.1:{port}
fi
if [ "${{1:-}}" = doctor ]; then  # 1 is its verdict on this machine, and not the page's fault
    "${{real[@]}}" "$@"
    status=$?
    exit $((status == 1 ? 0 : status))
fi
if [ "${{1:-}}" != serve ] || [[ " $* " == *" --help "* ]]; then exec "${{real[@]}}" "$@"; fi
bind=127.0.0.1 port=6379 last=
for word in "$@"; do
    case "$last" in --bind) bind=$word ;; --port) port=$word ;; esac
    last=$word
done
place={servers}/$bind:$port
if [ -s "$place.pid" ]; then
    kill "$(cat "$place.pid")" 2>/dev/null
    while kill -0 "$(cat "$place.pid")" 2>/dev/null; do sleep 0.05; done
fi
: >"$place.log"
env {defaults} "${{real[@]}}" "$@" >"$place.log" 2>&1 </dev/null &
echo $! | tee "$place.pid" >{servers}/last
until grep -q '^Ready to accept connections' "$place.log"; do
    if ! kill -0 $! 2>/dev/null; then
        wait $!
        status=$?
        cat "$place.log"
        exit $status
    fi
    sleep 0.05
done
cat "$place.log"
"""
# Its words are those that a terminal shows, though there is none.
_REDIS_CLI = """#!/usr/bin/env bash
exec {program} --no-raw {port} "$@"
"""


@dataclass(frozen=True)
class Outcome:
    """How a page's script ended, what it printed, what each command of a console block did (status, output), and what
    was put in the place of what the page names."""

    status: int
    output: str
    answers: Mapping[tuple[int, int], tuple[int, str]]
    rewrites: Mapping[str, str]


@cache
def own_network() -> tuple[str, ...]:
    """The words that run a command in a network of its own, () where the kernel does not let us."""
    if os.environ.get("KVREDIS_DOCS_NETWORK") == "shared":  # to try the other way on a machine that could
        return ()
    for words in (("unshare", "--net"), ("unshare", "--net", "--map-root-user")):
        whole = (*words, "--", sys.executable, str(ALONE))
        if (
            shutil.which("unshare")
            and subprocess.run([*whole, "true"], capture_output=True, check=False).returncode == 0
        ):
            return whole
    return ()


def play(blocks: list[Block], folder: Path) -> Outcome:
    """Run the blocks of one page, in their order, in `folder`, and end all that they have started."""
    rewrites = _rewrites(folder)
    script, answers = _script(blocks, folder, rewrites)
    process = subprocess.Popen(
        [*own_network(), "bash", str(script)],
        cwd=folder,
        env=_environment(folder, rewrites),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, which is ended as a whole
    )
    with _adopted(process.pid):
        try:
            output, _ = process.communicate(timeout=PAGE_S)
        except subprocess.TimeoutExpired:
            output = f"not done after {PAGE_S} s"
        finally:
            _end(process)
    told = {}
    for place, path in answers.items():
        if path.exists():  # else the script has ended before it
            text, _, status = path.read_text(encoding="utf-8", errors="replace").rpartition("\n::status ")
            told[place] = (int(status or -1), text)
    return Outcome(process.returncode, output, told, rewrites)


@contextmanager
def _adopted(group: int) -> Iterator[None]:
    """Be the parent of servers that a page's script leaves, so that one that ends is gone at once: a machine's first
    process may look for such once in two seconds, and a page waits for each server that it ends."""
    kernel, over = ctypes.CDLL(None, use_errno=True), threading.Event()

    def bury() -> None:
        while not over.wait(POLL_S):
            with suppress(ChildProcessError):
                while ended := os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    if ended.si_pid == group:  # the script itself, for which another thread waits
                        break
                    os.waitpid(ended.si_pid, 0)

    burying = threading.Thread(target=bury)
    assert kernel.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    burying.start()
    try:
        yield
    finally:
        over.set()
        burying.join()
        kernel.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end(process: subprocess.Popen[str]) -> None:
    """End a page's script and all the servers in its group: asked first, and then not asked."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline_s = time.monotonic() + END_S
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < deadline_s:
                process.poll()  # a script that has ended is in its group until then
                os.killpg(process.pid, 0)
                time.sleep(POLL_S)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _script(blocks: list[Block], folder: Path, rewrites: Mapping[str, str]) -> tuple[Path, dict[tuple[int, int], Path]]:
    """Write the page's script and its parts; says where each console command's answer will be."""
    parts = folder / ".blocks"
    parts.mkdir()
    lines = ["set -euo pipefail", """trap 'echo "::failed at $place"' ERR""", "place=start"]
    answers: dict[tuple[int, int], Path] = {}

    def part(name: str, text: str) -> str:
        (parts / name).write_text(rewritten(text, rewrites), encoding="utf-8")
        return f"{parts}/{name}"

    for at, block in enumerate(blocks):
        if block.title:
            lines.append(
                f"mkdir -p \"$(dirname '{block.title}')\" && cp {part(f'{at}.file', block.text)} '{block.title}'"
            )
        if not block.runs:
            continue
        lines.append(f"place={block.place}")
        if block.language == "sh":
            lines.append(f". {part(f'{at}.sh', block.text)}")
        elif block.language == "python":
            lines.append("python " + part(f"{at}.py", f"{block.given}\n{block.text}"))
        else:
            for turn, (command, _) in enumerate(exchanges(block)):
                answer = answers[at, turn] = parts / f"{at}.{turn}.out"
                typed = part(f"{at}.{turn}.sh", command)
                lines.append(
                    f"status=0; . {typed} >{answer} 2>&1 || status=$?; printf '\\n::status %s' $status >>{answer}"
                )
    script = parts / "page.sh"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script, answers


def _rewrites(folder: Path) -> dict[str, str]:
    """What is put in the place of what a page names: folders that are not ours, and ports where they may be others'."""
    found = {"/nvme/": f"{folder}/nvme/", "/run/kvredis/": f"{folder}/run/", "PID": f"$(cat {folder}/.servers/last)"}
    (folder / "run").mkdir()
    if not own_network():
        found |= {"10.0.0.": "127.0.0."}
        found |= {port: str(_free_port()) for port in PORTS}
    return found


def rewritten(text: str, rewrites: Mapping[str, str]) -> str:
    """`text` with every key of `rewrites` replaced; a number or a word only where it is whole."""
    pattern = "|".join(rf"\b{each}\b" if each.isalnum() else re.escape(each) for each in rewrites)
    return re.sub(pattern, lambda found: rewrites[found[0]], text)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(folder: Path, rewrites: Mapping[str, str]) -> dict[str, str]:
    """A bare environment with `kvredis`, `redis-cli` and `python` in its PATH; the repository's files are in reach."""
    programs, servers = folder / ".bin", folder / ".servers"
    programs.mkdir()
    servers.mkdir()
    port = rewrites.get("6379", "")  # what those who name no port must be told, where it is not the usual one
    told = SERVER_DEFAULTS | ({"KVREDIS_PORT": port} if port else {})
    defaults = " ".join(f"{name}=${{{name}:-{value}}}" for name, value in told.items())
    texts = {"kvredis": _KVREDIS.format(python=sys.executable, servers=servers, defaults=defaults, port=port)}
    texts["python"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'  # no link: a venv's python looks beside itself
    if (redis_cli := shutil.which("redis-cli")) is not None:
        texts["redis-cli"] = _REDIS_CLI.format(program=redis_cli, port=f"-p {port}" if port else "")
    for name, text in texts.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("bench", "deploy", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return {
        "PATH": f"{programs}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
