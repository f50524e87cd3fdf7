"""vLLM's OpenAI server with KVRedisConnector, started as README shows it: what clients get, what /metrics tells."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compat.conftest import start_kvredis, stop
from tests.compat.vllm_process import CONNECTOR, VLLMProcess, environment, site

pytestmark = pytest.mark.nightly

READY_S = 240
LMCACHE_METRICS = {  # of one prompt of 1,000 tokens computed and stored, and then found: 15 chunks of 64
    "num_lookup_requests_total": 2, "num_lookup_tokens_total": 2000, "num_lookup_hits_total": 960,
    "lookup_0_hit_requests_total": 1, "num_vllm_hit_tokens_total": 0, "num_prompt_tokens_total": 2000,
    "num_retrieve_requests_total": 1, "num_requested_tokens_total": 960, "num_hit_tokens_total": 960,
    "num_store_requests_total": 1, "num_stored_tokens_total": 960, "lookup_hit_rate": 0.96,
    "request_cache_hit_rate_count": 1, "request_cache_hit_rate_sum": 0.96, "time_to_retrieve_count": 1,
    "retrieve_speed_count": 1,
}  # fmt: skip
STORED_S = 30


def free_port() -> int:
    """vLLM takes no port 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def ask(port: int, path: str, **body: Any) -> str:
    """A request to the server; with a body it is a POST."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
        return text


def lmcache_metrics(metrics: str) -> dict[str, float]:
    """What is told under LMCache's names, but for when it was made and for what depends on time."""
    found = re.findall(r"^lmcache:(\w+)\{.*\} (\S+)$", metrics, re.MULTILINE)
    left_out = ("_created", "_bucket", "time_to_retrieve_sum", "retrieve_speed_sum")
    return {name: float(value) for name, value in found if not name.endswith(left_out)}


def until(is_so: Callable[[], bool], log: Path) -> None:
    """Wait for it; the log says why it did not come."""
    deadline = time.monotonic() + STORED_S
    while not is_so():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def saved_model(folder: Path, tmp_path: Path) -> str:
    """The path of the small Llama."""
    process = VLLMProcess(folder, tmp_path / "model.log")
    try:
        return str(process.ask("save", model="llama")["folder"])
    finally:
        process.stop()


@contextmanager
def serving(folder: Path, model: str, config: Path, log: Path) -> Iterator[int]:
    """The server, ready, on a port; ended with all of its processes."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16",
               "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048",
               "--block-size", "32", "--no-enable-prefix-caching", "--served-model-name", "tiny",
               "--kv-transfer-config", json.dumps(CONNECTOR)]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(folder, LMCACHE_CONFIG_FILE=str(config)),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                ask(port, "/health")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session is of its own
            process.wait()


def test_the_openai_server_finds_what_it_has_stored_and_tells_it(tmp_path: Path) -> None:
    folder = site()
    model = saved_model(folder, tmp_path)
    process, server = start_kvredis(tmp_path)
    config, log = tmp_path / "lmcache.yaml", tmp_path / "vllm.log"
    config.write_text(
        yaml.safe_dump(
            {
                "chunk_size": 64,
                "local_cpu": False,
                "max_local_cpu_size": 0.125,
                "remote_url": f"kvredis://127.0.0.1:{server.port}",
            }
        )
    )
    tokens = [3 + at * 7919 % 1000 for at in range(1000)]
    try:
        with server.connect() as chunks, serving(folder, model, config, log) as port:
            answers, metrics = [], ""
            for _ in range(2):
                answers.append(
                    json.loads(ask(port, "/v1/completions", model="tiny", prompt=tokens, max_tokens=8, temperature=0))
                )
                until(lambda: "Stored 960 tokens" in log.read_text(), log)
                until(lambda: chunks.ask("DBSIZE") == b":15\r\n", log)  # what is stored leaves in the background
            texts = [answer["choices"][0]["text"] for answer in answers]
            assert texts[0] == texts[1]
            metrics = ask(port, "/metrics")
            text = log.read_text()  # before its end, at which vLLM may say that its engine has died
        told = "\n".join(line for line in text.splitlines() if "kvredis" in line or "Reqid" in line)
        assert "Total tokens 1000, LMCache hit tokens: 960, need to load: 960" in text, told
        assert re.search(r"Retrieved 960 tokens for request \S+: [\d.]+ GB in [\d.]+ ms, [\d.]+ GB/s", text)
        assert "is on this host: values are read in its memory" in text
        assert re.search(r"vllm:kvredis_hit_tokens_total\{.*\} 960\.0", metrics)
        assert re.search(r"vllm:kvredis_loaded_chunks_total\{.*\} 15\.0", metrics)
        assert re.search(r"vllm:kvredis_remote_tokens_total\{.*\} 960\.0", metrics), "hits by the tier they came from"
        assert lmcache_metrics(metrics) == LMCACHE_METRICS
        assert re.search(r"vllm:external_prefix_cache_hits_total\{.*\} 960\.0", metrics)
        assert "Traceback" not in text
    finally:
        stop(process)
