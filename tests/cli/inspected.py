"""A real server with blocks of models that do not exist, and the command line as a script calls it.

The blocks are what an engine stores, header and key to the letter, but for their few and random numbers.
"""

import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from kvredis.adapters.engine.block import checksum_of, encode_header
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.cli.main import main
from tests.fork_server import Forked

ROOT = Path(__file__).parents[2]
SMALL = ("--max-local-cpu-size", "32MB", "--hugepages", "off", "--no-prefault", "--no-page-lock")
STOP_S = 60
CHUNK_TOKENS = 16
QWEN = ChunkLayout(layers=2, kv_heads=2, head_dim=8, dtype="bf16", chunk_tokens=CHUNK_TOKENS, model="Qwen2.5-7B")
LLAMA = tuple(
    ChunkLayout(
        layers=2,
        kv_heads=1,
        head_dim=8,
        dtype="fp16",
        chunk_tokens=CHUNK_TOKENS,
        model="Llama-3.1-8B",
        rank=rank,
        world_size=2,
    )
    for rank in range(2)
)
LMCACHE_KEYS = tuple(f"Mistral-7B@2@{worker}@{'-' * worker}6c4f18f9b2e02e8{worker}@bfloat16" for worker in range(2))


@contextmanager
def serving(*flags: str, port: bool = True) -> Iterator[str]:
    """`kvredis serve` on a free port; gives its first address, HOST:PORT or the socket's path."""
    process = Forked(
        [sys.executable, "-m", "kvredis", "serve", *(("--port", "0") if port else ()), *SMALL, *flags],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("Ready"))
        yield line.split(" on ")[1].split()[0].strip(",").removeprefix("tls:")
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


@contextmanager
def plain_redis(folder: Path) -> Iterator[str]:
    """Debian's redis-server on a socket; gives its URL."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt install redis-server)")
    path = folder / "redis.sock"
    words = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert any("ready to accept connections" in line for line in process.stdout), "redis-server ended at its start"
        yield f"unix://{path}"
    finally:
        process.terminate()
        process.wait(STOP_S)
        process.stdout.close()


def connected(address: str, password: str | None = None) -> redis.Redis:
    """A client of HOST:PORT, to be closed."""
    host, _, port = address.rpartition(":")
    return redis.Redis(host, int(port), password=password, protocol=2)


def wait_until_on_disk(client: Any) -> None:
    """Wait until all that this client has stored is on the disk tier."""
    assert client.execute_command("WAITAOF", 1, 0, 60_000)[0] == 1


def block(layout: ChunkLayout, seed: int = 0) -> bytes:
    """A whole block with a checksum."""
    data = random.Random(seed).randbytes(layout.chunk_bytes())
    return encode_header(layout, layout.chunk_tokens, checksum_of(memoryview(data))) + data


def store_prompt(client: redis.Redis, layout: ChunkLayout, start: int, chunks: int) -> list[bytes]:
    """Store a prompt whose tokens count from `start` on; its keys in order."""
    tokens = list(range(start, start + chunks * layout.chunk_tokens))
    keys = [each.key for each in chunk_keys(tokens, layout)]
    for seed, key in enumerate(keys):
        client.set(key, block(layout, seed))
    return keys


def fill(address: str) -> dict[str, list[bytes]]:
    """Two prompts of one model, one of another in two ranks, LMCache's and others' keys; gives the keys by name."""
    with connected(address) as client:
        client.flushall()
        keys = {
            "long": store_prompt(client, QWEN, 0, 5),
            "short": store_prompt(client, QWEN, 10_000, 2),
            "rank 0": store_prompt(client, LLAMA[0], 0, 3),
            "rank 1": store_prompt(client, LLAMA[1], 0, 3),
        }
        for key in LMCACHE_KEYS:
            client.set(f"{key}kv_bytes", b"k" * 1000)
            client.set(f"{key}metadata", b"m" * 28)
        client.set("session:1", "one")
        client.set("session:2", "two")
        client.set("plain", "alone")
    return keys


def run(*words: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
    """The command line in this process, without a terminal and without this environment's configuration."""
    clean = {"LMCACHE_CONFIG_FILE": None, "LMCACHE_REMOTE_URL": None, "REDISCLI_AUTH": None}
    return CliRunner().invoke(main, list(words), input=stdin, env={**clean, **(env or {})}, prog_name="kvredis")


def run_process(words: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """The command line in a process of its own, in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "kvredis", *words],
        cwd=folder or ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
