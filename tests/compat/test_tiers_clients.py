"""redis-py and redis-cli at a `kvredis serve` with a disk tier: five times what memory holds, as if it were one memory,
and there again after a restart."""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
import redis.asyncio

from tests.compat.conftest import RunningServer, start_kvredis, stop

MIB: Final = 1024 * 1024
BLOCKS: Final = 80
TIMEOUT_S: Final = 30
FLAGS: Final = ("--max-local-cpu-size", "16MB", "--max-local-disk-size", "256MB", "--no-prefault", "--no-page-lock")


def block(number: int) -> bytes:
    """A MiB of its own."""
    return random.Random(number).randbytes(MIB)


def names() -> list[str]:
    """Every key, in the order in which `tiered` stores them."""
    return [f"block:{number}" for number in range(BLOCKS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def tiered(folder: Path) -> Iterator[RunningServer]:
    """A server of 16 MiB over a disk, with 80 MiB of blocks."""
    process, server = start_kvredis(folder, *FLAGS, "--local-disk", str(folder / "disk"))
    with redis.Redis(port=server.port) as client:
        for number in range(BLOCKS):
            client.set(f"block:{number}", block(number))
        assert client.execute_command("WAITAOF", 1, 0, 0) == [1, 0]
    yield server
    stop(process)


@pytest.fixture(params=[2, 3])
def client(request: pytest.FixtureRequest, tiered: RunningServer) -> Iterator[Any]:
    """A client of it, untyped as redis-py's own types are."""
    with redis.Redis(port=tiered.port, protocol=request.param, socket_timeout=TIMEOUT_S) as connected:
        yield connected


def test_every_block_comes_back_as_it_went(client: Any) -> None:
    dropped = int(client.info("kv")["tier_spill_dropped"])
    assert dropped == int(client.info("stats")["evicted_keys"]) == 0
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    for number in order:
        assert client.get(f"block:{number}") == block(number), number
    assert client.dbsize() >= BLOCKS
    assert int(client.info("kv")["tier_promoted"]) > BLOCKS // 2


def test_mget_and_pipelines_hold_more_than_memory(client: Any) -> None:
    assert client.mget(*names(), "nope") == [*map(block, range(BLOCKS)), None]
    with client.pipeline(transaction=False) as pipe:
        for name in names():
            pipe.get(name)
            pipe.strlen(name)
        replies = pipe.execute()
    assert replies[::2] == list(map(block, range(BLOCKS)))
    assert replies[1::2] == [MIB] * BLOCKS


def test_a_transaction_reads_and_writes_blocks_on_disk(client: Any) -> None:
    client.mget(*names()[10:40])
    with client.pipeline(transaction=True) as pipe:
        pipe.watch("block:1")
        pipe.multi()
        pipe.get("block:1")
        pipe.copy("block:2", "copy", replace=True)
        pipe.getrange("copy", 5, 9)
        pipe.incr("counter")
        pipe.decr("counter")
        assert pipe.execute() == [block(1), True, block(2)[5:10], 1, 0]
    assert client.delete("copy", "counter") == 2


def test_a_prefetch_is_waited_for_and_then_found_in_memory(client: Any) -> None:
    client.mget(*names()[30:])
    wanted = names()[:8]
    told = client.execute_command("KV.PREFETCH", *wanted, "PRIORITY", 0, "JOB")
    told = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
    done = client.execute_command("KV.JOB", told[b"job"], "WAIT", 20_000)
    done = done if isinstance(done, dict) else dict(zip(done[::2], done[1::2], strict=True))
    assert done[b"status"] == b"done"
    assert done[b"done"] + done[b"resident"] == len(wanted)
    promoted = client.info("kv")["tier_promoted"]
    assert client.mget(*wanted) == list(map(block, range(8)))
    assert client.info("kv")["tier_promoted"] == promoted


def test_eight_asynchronous_clients_read_at_once(tiered: RunningServer) -> None:
    async def read(seed: int) -> None:
        order = list(range(BLOCKS))
        random.Random(seed).shuffle(order)
        async with redis.asyncio.Redis(port=tiered.port, socket_timeout=TIMEOUT_S) as client:
            for number in order[:30]:
                assert await client.get(f"block:{number}") == block(number), number

    async def story() -> None:
        await asyncio.gather(*(read(seed) for seed in range(8)))

    asyncio.run(story())


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_redis_cli_writes_a_block_from_disk_into_a_file(tiered: RunningServer, tmp_path: Path) -> None:
    def cli(*words: str, stdin: bytes = b"") -> bytes:
        command = ["redis-cli", "-s", tiered.unixsocket, *words]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=True)
        return done.stdout

    for number in (0, BLOCKS // 2, BLOCKS - 1):
        assert cli("--raw", "GET", f"block:{number}") == block(number) + b"\n"
    assert {f"block:{number}".encode() for number in range(BLOCKS)} <= set(cli("--scan").split())
    assert cli("-x", "SET", "from stdin", stdin=block(7)) == b"OK\n"
    assert cli("SAVE") == b"OK\n"
    assert cli("WAITAOF", "1", "0", "0").split() == [b"1", b"0"]
    assert b"# Kv" in cli("INFO", "kv")
    lines = (tmp_path / "lines").with_suffix(".txt")
    lines.write_bytes(b"".join(b"STRLEN block:%d\r\n" % number for number in range(BLOCKS)))
    assert cli("--pipe", stdin=lines.read_bytes()).endswith(b"errors: 0, replies: %d\n" % BLOCKS)
    assert cli("DEL", "from stdin") == b"1\n"


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    process, server = start_kvredis(tmp_path, *FLAGS, "--local-disk", str(tmp_path / "disk"))
    try:
        with redis.Redis(port=server.port) as client:
            for number in range(24):
                client.set(f"block:{number}", block(number))
            client.set("small", "value", ex=1000)
            client.delete("block:3")
    finally:
        stop(process)
    assert process.returncode == 0
    process, server = start_kvredis(tmp_path, *FLAGS, "--local-disk", str(tmp_path / "disk"))
    try:
        with redis.Redis(port=server.port) as client:
            assert client.get("small") == b"value"
            assert 900 < client.ttl("small") <= 1000
            assert [client.get(f"block:{number}") for number in range(24)] == [
                None if number == 3 else block(number) for number in range(24)
            ]
            assert client.info("persistence")["rdb_last_load_keys_loaded"] == 24
    finally:
        stop(process)
