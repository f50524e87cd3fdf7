"""A real `kvredis serve` with a password, both tiers and the page, filled by our engine and by a Redis client."""

import json
import os
import subprocess
import sys
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import redis
import torch

from kvredis import CacheEngine, ChunkLayout, Config

ROOT = Path(__file__).parents[2]
PASSWORD = "secret"
LAYOUT = ChunkLayout(8, 4, 64, "bf16", model="Qwen/Qwen2.5-7B")
CHUNK_TOKENS = 64  # 512 KiB a block
PROMPTS = 6
LIMIT_S = 60
HOSTILE_KEYS = (
    b"<script>window.hit = 1</script>",
    b"<img src=x onerror='window.hit = 1'>",
    b"\x00\x1b[31m\r\n\xff\xe2\x80\xaeevil",
    b"long/" + b"k" * 10_000,
)
HOSTILE_NAME = b"<img/src=x/onerror=window.hit=1>"


class Served:
    """One server process and what a test asks it beside the browser. `metrics_port` 0 takes a free one."""

    def __init__(self, folder: Path, metrics_port: int = 0) -> None:
        self.folder = folder
        flags = ["--port", "0", "--metrics-port", str(metrics_port or "free"), "--requirepass", PASSWORD]
        flags += ["--max-local-cpu-size", "24MB", "--hugepages", "off", "--no-prefault"]
        flags += ["--unixsocket", str(folder / "kvredis.sock")]
        flags += ["--local-disk", str(folder / "disk"), "--max-local-disk-size", "256MB"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvredis", "serve", *flags],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        patience = threading.Timer(LIMIT_S, self.process.kill)
        patience.start()
        try:
            self._read_ports()
        except BaseException:
            self.end()
            raise
        finally:
            patience.cancel()

    def _read_ports(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Metrics on "):
                self.metrics_port = int(line.split()[2].strip(",/").rpartition(":")[2])
            if line.startswith("Ready to accept"):
                self.port = int(line.split(" on ")[1].split(",")[0].rpartition(":")[2])
                return
        raise AssertionError(f"ended with {self.process.wait(LIMIT_S)} before it was ready")

    @property
    def url(self) -> str:
        """The page's address, with the password in it."""
        return f"http://default:{PASSWORD}@localhost:{self.metrics_port}/"

    @property
    def bare_url(self) -> str:
        """The same without."""
        return f"http://localhost:{self.metrics_port}/"

    def client(self) -> "redis.Redis":
        """A Redis client; the caller closes it."""
        return redis.Redis(port=self.port, password=PASSWORD, socket_timeout=LIMIT_S)

    def told(self, path: str) -> Any:
        """What the server answers the page."""
        login = b64encode(f":{PASSWORD}".encode()).decode()
        request = Request(f"{self.bare_url}{path}", headers={"Authorization": f"Basic {login}"})
        with urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)

    def fill(self) -> None:
        """Prompts of our engine, some of them read back, and values of others."""
        overrides = {"remote_url": f"redis://:{PASSWORD}@127.0.0.1:{self.port}", "chunk_size": CHUNK_TOKENS}
        config = Config.load(env={}, overrides={**overrides, "local_cpu": False, "max_local_cpu_size": "16MB"})
        engine = CacheEngine(config, LAYOUT)
        try:
            for prompt in range(PROMPTS):
                tokens = [prompt * 1000 + at for at in range(CHUNK_TOKENS * (prompt + 2))]
                kv = torch.zeros(LAYOUT.shape(len(tokens)), dtype=torch.bfloat16)
                engine.store(tokens, kv)
                engine.flush()
                for _ in range(prompt):
                    assert engine.retrieve(tokens, kv) == len(tokens)
        finally:
            engine.close()
        with self.client() as client:
            for number in range(20):
                client.set(f"session:{number}", b"x" * (100 + 3000 * number))
            client.set("vllm@meta-llama/Llama-3.1-8B@1@0@-5e4a7c9b1d2f3a60@bfloat16", b"y" * 300_000)
            client.get("nothing")

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
