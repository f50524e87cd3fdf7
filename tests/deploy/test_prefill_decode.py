"""The script that runs prefill and decode apart: what it starts with what, and that all of it ends together.

kvredis' server and proxy are the real ones. `vllm` is a stand-in, which needs no GPU: it keeps how it was started, and
answers as an engine of its role does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvredis.backends.config.schema import Config
from tests.backends.nodes import free_ports, wait_until

ROOT = Path(__file__).parents[2]
RUN = ROOT / "deploy/examples/pd/run"
WAIT_S = 60
VLLM = """
import http.server, json, os, pathlib, sys
words = sys.argv[1:]
role = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_role"]
folder = pathlib.Path(__file__).parent
(folder / role).write_text(json.dumps({"pid": os.getpid(), "words": words, "env": dict(os.environ)}))

class Engine(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = {"do_remote_prefill": True, "kvredis_chunk": "c"} if role == "kv_producer" else None
        answer = json.dumps({"asked": asked, "by": role, "kv_transfer_params": told}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

http.server.ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Engine).serve_forever()
"""


class Running:
    """The script's process, and what it has started."""

    def __init__(self, process: "subprocess.Popen[bytes]", ports: list[int], folder: Path) -> None:
        self.process, self.ports, self._folder = process, ports, folder

    def engine(self, role: str) -> dict[str, Any]:
        """How an engine was started."""
        told: dict[str, Any] = json.loads((self._folder / role).read_text())
        return told

    def ask(self) -> dict[str, Any] | None:
        """A completion; None as long as there is none."""
        url = f"http://127.0.0.1:{self.ports[0]}/v1/completions"
        body = json.dumps({"prompt": "Once", "max_tokens": 32}).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=WAIT_S) as answer:
                told: dict[str, Any] = json.loads(answer.read())
                return told
        except OSError:
            return None

    def wait_ended(self) -> int:
        """The script's exit status, when nothing of all listens any more."""
        status = self.process.wait(WAIT_S)
        for port in self.ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        return status


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    ports = free_ports(4)
    programs = {"vllm": VLLM, "kvredis": "from kvredis.cli.main import main\nmain()\n"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    names = ("PORT", "PREFILL_PORT", "DECODE_PORT", "SERVER_PORT")
    env = dict(zip(names, map(str, ports), strict=True)) | {"MEMORY": "64MB", "PYTHONPATH": str(ROOT)}
    env |= {name: value for name, value in os.environ.items() if "COVERAGE_" in name}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen([RUN, "MODEL", "--max-model-len", "64"], env=env, start_new_session=True) as process:
        try:
            yield Running(process, ports, folder)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_it_starts_an_engine_of_each_kind_and_its_requests_go_to_both(tmp_path: Path) -> None:
    with running(tmp_path) as script:
        wait_until(lambda: (script.ask() or {}).get("asked", {}).get("kv_transfer_params") is not None, "an answer")
        answer = script.ask()
        assert answer is not None
        assert answer["by"] == "kv_consumer"
        told = {"do_remote_prefill": True, "kvredis_chunk": "c"}
        assert answer["asked"] == {"prompt": "Once", "max_tokens": 32, "kv_transfer_params": told}
        for role, gpu, port in (("kv_producer", "0", script.ports[1]), ("kv_consumer", "1", script.ports[2])):
            engine = script.engine(role)
            assert engine["words"][:4] == ["serve", "MODEL", "--port", str(port)]
            assert engine["words"][-2:] == ["--max-model-len", "64"]
            assert engine["env"]["CUDA_VISIBLE_DEVICES"] == gpu
            config = Config.load(env=engine["env"])
            assert config.remote_url == f"kvredis://127.0.0.1:{script.ports[3]}"
            assert config.warnings == ()
        script.process.terminate()
        assert script.wait_ended() == 128 + signal.SIGTERM


def test_all_of_it_ends_with_the_first_that_ends(tmp_path: Path) -> None:
    with running(tmp_path) as script:
        wait_until(lambda: script.ask() is not None, "an answer")
        os.kill(script.engine("kv_producer")["pid"], signal.SIGKILL)
        assert script.wait_ended() == 128 + signal.SIGKILL


def test_without_a_model_it_says_how_it_is_called() -> None:
    done = subprocess.run([RUN], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert "run MODEL [arguments of vllm serve ...]" in done.stderr
