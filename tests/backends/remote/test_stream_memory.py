"""What a client needs to read many blocks one after the other: memory for fewer than two of them."""

import hashlib
import json
import subprocess
import sys

import pytest

from kvredis.backends.resp.connection import Connection
from tests.backends.conftest import EXIT_S, ROOT, ServerProcess
from tests.backends.verbs import content

BLOCKS = 16
BLOCK_BYTES = 4 << 20


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_stream_of_blocks_takes_less_memory_than_two_of_them(way: str, kvredis_server: ServerProcess) -> None:
    url = kvredis_server.url if way == "unix" else kvredis_server.tcp_url
    values = [content(b"stream:%d" % n, BLOCK_BYTES) for n in range(BLOCKS)]
    with Connection.open(kvredis_server.url) as writer:
        for n, value in enumerate(values):
            writer.send_set(b"stream:%d" % n, value)
            assert writer.read() == "OK"
    command = [sys.executable, "-m", "tests.backends.remote.stream_client", url, str(BLOCKS), str(BLOCK_BYTES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["digests"] == [hashlib.sha256(value).hexdigest() for value in values]
    assert BLOCK_BYTES <= told["arena_bytes"] <= 2 * BLOCK_BYTES
    assert BLOCK_BYTES // 2 < told["grown_bytes"] < 2 * BLOCK_BYTES
