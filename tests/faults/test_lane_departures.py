"""Clients of the lane that are killed in whatever state, and a server that is: nothing stays held, nobody is hurt."""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.faults.lane_process import LENT_BYTES, STATES
from tests.server.lane_client import open_descriptors
from tests.server.live import LOOPS, MIB, LiveServer, pattern, run_on, until

KEPT, BIG = pattern(2 * MIB, 1), pattern(9 * MIB, 2)
ROOT: Final = Path(__file__).parents[2]
WAIT_S: Final = 30


def client_words(unixsocket: str, state: str) -> list[str]:
    """How a client process is started."""
    return [sys.executable, "-m", "tests.faults.lane_process", unixsocket, state]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_killed_in_any_state_frees_all(loop: str, state: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, 64 * MIB) as live:
            keeper = await live.connect()
            await keeper.ask("SET", "kept", KEPT)
            await keeper.ask("SET", "big", BIG)
            before = open_descriptors()
            process = await asyncio.create_subprocess_exec(
                *client_words(str(live.server.unixsocket), state), stdout=asyncio.subprocess.PIPE, cwd=ROOT
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"there\n"
            if state == "leased":
                assert live.store.leases == live.server.shm.leases == 3
                assert await keeper.ask("DEL", "kept") == b":1\r\n"
                assert live.store.retired_bytes >= len(KEPT)
                assert await keeper.ask("SET", "kept", KEPT) == b"+OK\r\n"
            if state == "reserved":
                assert live.store.reserved_bytes >= 4 * MIB
            process.kill()
            await process.wait()
            await until(lambda: len(live.sessions()) == 1)
            store = live.store
            await until(lambda: not store.reserved_bytes)  # a thread may have been copying
            assert (store.leases, store.retired_bytes, len(live.server.shm.clients)) == (0, 0, 0)
            store.check_integrity()
            await until(lambda: open_descriptors() <= before)
            assert await keeper.ask("EXISTS", "new") == b":0\r\n"
            for name, value in (("kept", KEPT), ("big", BIG)):
                assert await keeper.get(name) in (value, None), "it may have been evicted, and is never another"
            for n in range(50):
                assert await keeper.get(f"put{n}") in (None, b"lent" * 1000 + bytes(LENT_BYTES - 4000))

    run_on(loop, story())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvredis serve` with a small arena, and its unix socket."""
    path = str(tmp_path / "served.sock")
    words = ["serve", "--port", "none", "--unixsocket", path, "--max-local-cpu-size", "64MiB", "--hugepages", "off"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvredis", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any("Ready to accept connections" in line for line in process.stdout)
            yield process, path
        finally:
            process.kill()


def start_reader(path: str) -> subprocess.Popen[str]:
    """A process that has leased "kept" and waits to be told to read it."""
    reader = subprocess.Popen(
        client_words(path, "reading on"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "leased\n"
    return reader


async def store(path: str) -> None:
    """SET kept."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"*3\r\n$3\r\nSET\r\n$4\r\nkept\r\n$%d\r\n%b\r\n" % (len(KEPT), KEPT))
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_reader_goes_on_with_the_old_bytes_when_the_server_is_killed(
    number: signal.Signals, served: tuple[subprocess.Popen[str], str]
) -> None:
    server, path = served
    asyncio.run(store(path))
    with start_reader(path) as reader:
        try:
            server.send_signal(number)
            server.wait(WAIT_S)
            out, _ = reader.communicate("read\n", timeout=WAIT_S)
        finally:
            reader.kill()
    assert out == f"{hashlib.sha256(KEPT).hexdigest()} gone\n"
    assert reader.returncode == 0, "no signal has ended it"


def test_clients_that_are_killed_leave_no_descriptor_in_the_server(served: tuple[subprocess.Popen[str], str]) -> None:
    server, path = served
    asyncio.run(store(path))
    before = open_descriptors(server.pid)
    for _ in range(5):
        readers = [start_reader(path) for _ in range(4)]
        assert open_descriptors(server.pid) > before + 4 * 2, "three each"
        for reader in readers:
            os.kill(reader.pid, signal.SIGKILL)
            reader.communicate()

    async def settled() -> None:
        await asyncio.wait_for(until(lambda: open_descriptors(server.pid) <= before), WAIT_S)

    asyncio.run(settled())
