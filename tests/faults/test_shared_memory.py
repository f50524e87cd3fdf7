"""A client without the right to shared memory gets nothing of it, and what is sent over it harms no other client."""

import asyncio
import fcntl
import hashlib
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.faults.lane_process import LENT_BYTES, STATES
from tests.server.lane_client import LaneClient, attached, connected, memory, open_descriptors
from tests.server.live import MIB, LiveServer, pattern, until

OTHER_USER: Final = 65534
ALONE: Final = "ERR want one message of one byte with one descriptor in the side channel, and nothing else"

_STRANGER: Final = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
link = socket.socket(socket.AF_UNIX)
address = sys.argv[1]
link.connect(chr(0) + address[1:] if address[0] == "@" else address)
try:
    for line in sys.argv[3:]:
        link.sendall(line.encode() + b"\\r\\n")
        data, ancillary, _, _ = link.recvmsg(4096, 64)
        print(data.split(b"\\r\\n")[0].decode(), len(ancillary))
except OSError:
    print("hung up")
"""


async def as_another(address: str, *lines: str) -> list[str]:
    """What another user's client hears: the first line of each reply, and whether descriptors came with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-ISc", _STRANGER, address, str(OTHER_USER), *lines, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().splitlines()


@asynccontextmanager
async def open_to_all() -> AsyncIterator[LiveServer]:
    """A server whose unix socket any user may connect to: pytest's own folders are for its user alone."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        async with LiveServer(Path(folder), unixsocketperm="777") as live:
            yield live


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user: needs root")
NOT_FOR_YOU: Final = "-NOPERM the lane is for the server's own user, and for users that have logged in 0"


@needs_root
async def test_another_user_is_given_the_arena_only_after_a_login(loop: str) -> None:
    async with open_to_all() as live, connected(live) as admin:
        path = str(live.server.unixsocket)
        assert await as_another(path, "KV.ATTACH", "PING") == [NOT_FOR_YOU, "+PONG 0"]
        await admin.ask("ACL", "SETUSER", "open", "on", "nopass", "+@all", "~*")
        assert await as_another(path, "AUTH open x", "KV.ATTACH") == ["+OK 0", NOT_FOR_YOU], (
            "any client can log in as this user"
        )
        await admin.ask("ACL", "SETUSER", "engine", "on", ">secret", "+@all", "~*")
        assert await as_another(path, "AUTH engine secret", "KV.ATTACH") == ["+OK 0", "*12 1"]
        await admin.ask("CONFIG", "SET", "requirepass", "secret")
        assert await as_another(path, "AUTH secret", "KV.ATTACH") == ["+OK 0", "*12 1"]


@needs_root
async def test_the_abstract_socket_turns_every_other_user_away(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, unixsocket=None) as live:
        name = live.server.listeners.abstract_name
        assert name is not None
        assert await as_another(name, "PING") == ["hung up"]
        assert live.server.stats.connections_received == 0
        async with connected(live, name) as own:
            assert await own.ask("PING") == b"PONG"


# ---- what is sent instead of memory --------------------------------------------------------------------------------


@contextmanager
def _file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"x" * 4096)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _write_only() -> Iterator[int]:
    with memory(b"x") as fd, _opened(f"/proc/self/fd/{fd}", os.O_WRONLY) as opened:
        yield opened


@contextmanager
def _pipe() -> Iterator[int]:
    ends = os.pipe()
    try:
        yield ends[0]
    finally:
        os.close(ends[0])
        os.close(ends[1])


NOT_A_MEMFD: Final = "ERR what was sent is not a memfd"
NOT_SEALED: Final = "ERR the memfd must be sealed against shrinking (F_SEAL_SHRINK)"
WRONG: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "a file": (_file, NOT_A_MEMFD),
    "a tmpfs file": (lambda _: _opened("/dev/shm", os.O_TMPFILE | os.O_RDWR), NOT_SEALED),
    "a folder": (lambda path: _opened(str(path), os.O_RDONLY), NOT_A_MEMFD),
    "a path": (lambda path: _opened(str(path), os.O_PATH), NOT_A_MEMFD),
    "a device": (lambda _: _opened("/dev/zero", os.O_RDONLY), NOT_A_MEMFD),
    "a pipe": (lambda _: _pipe(), NOT_A_MEMFD),
    "unsealed memory": (lambda _: memory(b"x", 0), NOT_SEALED),
    "memory sealed against growing": (lambda _: memory(b"x", fcntl.F_SEAL_GROW), NOT_SEALED),
    "no memory": (lambda _: memory(b""), "ERR the memfd is empty"),
    "memory that cannot be read": (lambda _: _write_only(), "ERR the memfd cannot be read"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_is_no_lendable_memory_is_refused_and_closed_and_what_was_lent_stays(
    loop: str, what: str, tmp_path: Path, live: LiveServer
) -> None:
    make, refusal = WRONG[what]

    async with attached(live) as client:
        with memory(pattern(MIB)) as good, make(tmp_path) as fd:  # type: ignore[attr-defined]
            await client.lend(good)
            held = open_descriptors()
            assert str(await client.lend(fd)) == refusal
            await until(lambda: open_descriptors() <= held)
            assert await client.ask("KV.PUT", "k", 0, MIB) == b"OK"
            assert await client.ask("GET", "k") == pattern(MIB)


async def _nothing(client: LaneClient, fd: int) -> None:
    """KV.LEND with nothing in the channel."""


async def _resp(client: LaneClient, fd: int) -> None:
    assert client.side is not None
    client.side.send(b"*1\r\n$4\r\nPING\r\n")


async def _two_at_once(client: LaneClient, fd: int) -> None:
    assert client.side is not None
    socket.send_fds(client.side, [b"m"], [fd, fd])


async def _many_at_once(client: LaneClient, fd: int) -> None:
    assert client.side is not None
    socket.send_fds(client.side, [b"m"], [fd] * 253)


async def _two_messages(client: LaneClient, fd: int) -> None:
    assert client.side is not None
    for _ in range(2):
        socket.send_fds(client.side, [b"m"], [fd])


async def _more_bytes(client: LaneClient, fd: int) -> None:
    assert client.side is not None
    socket.send_fds(client.side, [b"mm"], [fd])


@pytest.mark.parametrize("send", [_nothing, _resp, _two_at_once, _many_at_once, _two_messages, _more_bytes])
async def test_anything_but_one_descriptor_with_one_byte_is_refused_and_closed(
    loop: str, send: Callable[[LaneClient, int], object], live: LiveServer
) -> None:
    async with attached(live) as client:
        with memory(pattern(MIB)) as fd:
            held = open_descriptors()
            await send(client, fd)  # type: ignore[misc]
            assert str(await client.ask("KV.LEND")) == ALONE
            await until(lambda: open_descriptors() <= held)
            assert await client.lend(fd) == MIB, "the channel goes on"


async def test_a_flood_of_descriptors_closes_the_channel_and_nothing_leaks(loop: str, live: LiveServer) -> None:
    before = open_descriptors()
    async with attached(live) as client:
        assert client.side is not None
        client.side.setblocking(False)
        with memory(b"x") as fd:
            sent = 0
            try:
                while sent < 1000:
                    socket.send_fds(client.side, [b"m"], [fd] * 100)
                    sent += 1
            except OSError:  # full, or too many on their way for this user
                pass
            assert sent > 16
            held = open_descriptors()
            reply = await client.ask("KV.LEND")
            assert "side channel, which is closed now" in str(reply)
            await until(lambda: open_descriptors() < held)
            assert str(await client.ask("KV.LEND")) == ALONE
            with pytest.raises(OSError, match=r"Broken pipe|reset|not connected"):
                socket.send_fds(client.side, [b"m"], [fd])
        assert await client.ask("PING") == b"PONG"
    await until(lambda: open_descriptors() <= before)


async def test_a_client_that_closes_its_side_channel_can_still_read(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        assert client.side is not None
        client.side.shutdown(socket.SHUT_RDWR)
        assert str(await client.ask("KV.LEND")) == ALONE
        await client.ask("SET", "k", pattern(MIB))
        (place,) = await client.ask("KV.LEASE", 0, "k")
        assert client.bytes_at(place) == pattern(MIB)


async def test_memory_far_larger_than_the_machine_costs_nothing_to_lend(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        with memory(pattern(MIB), nbytes=1 << 50) as fd:
            assert await client.lend(fd) == 1 << 50
            assert await client.ask("KV.PUT", "k", 0, MIB) == b"OK"
            assert await client.ask("GET", "k") == pattern(MIB)
            assert await client.ask("KV.PUT", "k", (1 << 50) - MIB, MIB) == b"OK"
            assert await client.ask("GET", "k") == bytes(MIB), "no client has ever written there"


async def test_memory_that_grows_is_lent_as_it_was(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        with memory(pattern(MIB)) as fd:
            await client.lend(fd)
            os.ftruncate(fd, 2 * MIB)
            assert str(await client.ask("KV.PUT", "k", MIB, 1)).startswith("ERR bytes 1048576 to 1048577 are not")
            assert await client.lend(fd) == 2 * MIB
            assert await client.ask("KV.PUT", "k", MIB, 1) == b"OK"


async def test_a_client_cannot_write_to_what_it_was_given(loop: str, live: LiveServer) -> None:
    async with attached(live) as client:
        await client.ask("SET", "k", pattern(MIB))
        stolen = os.open(f"/proc/self/fd/{client.arena_fd}", os.O_RDWR)
        try:
            for fd in (client.arena_fd, stolen):
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match="Errno"):
                    os.pwrite(fd, b"x", 0)
                with pytest.raises(OSError, match="Errno"):
                    os.ftruncate(fd, 0)
        finally:
            os.close(stolen)
        assert await client.ask("GET", "k") == pattern(MIB)


async def test_a_server_without_descriptors_says_so_and_serves_on(loop: str, live: LiveServer) -> None:
    async with connected(live) as client, attached(live) as lender:
        await client.ask("PING")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with memory(pattern(9 * MIB)) as fd:
            await lender.lend(fd)
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            plugs = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
            try:
                try:
                    while True:
                        plugs.append(os.dup(0))
                except OSError:
                    pass
                assert str(await client.attach()) == "ERR the arena cannot be lent: Too many open files"
                assert await lender.ask("KV.PUT", "k", 0, 9 * MIB) == b"OK", "without a thread of its own"
                assert str(await lender.lend(fd)) == ALONE, "the kernel could not hand it over"
                assert await lender.ask("KV.PUT", "k", 0, MIB) == b"OK"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for plug in plugs:
                    os.close(plug)
        assert isinstance(await client.attach(), list)


# Clients of shared memory that are killed in whatever state, and a server that is: nothing stays held.

KEPT, BIG = pattern(2 * MIB, 1), pattern(9 * MIB, 2)


ROOT: Final = Path(__file__).parents[2]


WAIT_S: Final = 30


def client_words(unixsocket: str, state: str) -> list[str]:
    """How a client process is started."""
    return [sys.executable, "-m", "tests.faults.lane_process", unixsocket, state]


@pytest.mark.parametrize("state", STATES)
async def test_a_client_killed_in_any_state_frees_all(loop: str, state: str, tmp_path: Path) -> None:
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
