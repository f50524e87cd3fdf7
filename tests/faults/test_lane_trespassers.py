"""Who has no right to the lane gets nothing of it, and what is sent over it harms nobody."""

import asyncio
import fcntl
import mmap
import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.server.lane_client import LaneClient, attached, connected, memory, open_descriptors
from tests.server.live import LOOPS, MIB, LiveServer, pattern, run_on, until

NOBODY: Final = 65534
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
        sys.executable, "-ISc", _STRANGER, address, str(NOBODY), *lines, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().splitlines()


@asynccontextmanager
async def open_to_all() -> AsyncIterator[LiveServer]:
    """A server whose unix socket anybody may connect to: pytest's own folders are for its user alone."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        async with LiveServer(Path(folder), unixsocketperm="777") as live:
            yield live


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user: needs root")
NOT_FOR_YOU: Final = "-NOPERM the lane is for the server's own user, and for users that have logged in 0"


@needs_root
@pytest.mark.parametrize("loop", LOOPS)
def test_another_user_is_given_the_arena_only_after_a_login(loop: str) -> None:
    async def story() -> None:
        async with open_to_all() as live, connected(live) as admin:
            path = str(live.server.unixsocket)
            assert await as_another(path, "KV.ATTACH", "PING") == [NOT_FOR_YOU, "+PONG 0"]
            await admin.ask("ACL", "SETUSER", "open", "on", "nopass", "+@all", "~*")
            assert await as_another(path, "AUTH open x", "KV.ATTACH") == ["+OK 0", NOT_FOR_YOU], "anybody can be him"
            await admin.ask("ACL", "SETUSER", "engine", "on", ">secret", "+@all", "~*")
            assert await as_another(path, "AUTH engine secret", "KV.ATTACH") == ["+OK 0", "*12 1"]
            await admin.ask("CONFIG", "SET", "requirepass", "secret")
            assert await as_another(path, "AUTH secret", "KV.ATTACH") == ["+OK 0", "*12 1"]

    run_on(loop, story())


@needs_root
@pytest.mark.parametrize("loop", LOOPS)
def test_the_abstract_socket_turns_every_other_user_away(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, unixsocket=None) as live:
            name = live.server.listeners.abstract_name
            assert name is not None
            assert await as_another(name, "PING") == ["hung up"]
            assert live.server.stats.connections_received == 0
            async with connected(live, name) as own:
                assert await own.ask("PING") == b"PONG"

    run_on(loop, story())


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
@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_no_lendable_memory_is_refused_and_closed_and_what_was_lent_stays(
    loop: str, what: str, tmp_path: Path
) -> None:
    make, refusal = WRONG[what]

    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            with memory(pattern(MIB)) as good, make(tmp_path) as fd:  # type: ignore[attr-defined]
                await client.lend(good)
                held = open_descriptors()
                assert str(await client.lend(fd)) == refusal
                await until(lambda: open_descriptors() <= held)
                assert await client.ask("KV.PUT", "k", 0, MIB) == b"OK"
                assert await client.ask("GET", "k") == pattern(MIB)

    run_on(loop, story())


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
@pytest.mark.parametrize("loop", LOOPS)
def test_anything_but_one_descriptor_with_one_byte_is_refused_and_closed(
    loop: str, send: Callable[[LaneClient, int], object], tmp_path: Path
) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            with memory(pattern(MIB)) as fd:
                held = open_descriptors()
                await send(client, fd)  # type: ignore[misc]
                assert str(await client.ask("KV.LEND")) == ALONE
                await until(lambda: open_descriptors() <= held)
                assert await client.lend(fd) == MIB, "the channel goes on"

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_flood_of_descriptors_closes_the_channel_and_nothing_leaks(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live:
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

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_closes_its_side_channel_can_still_read(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            assert client.side is not None
            client.side.shutdown(socket.SHUT_RDWR)
            assert str(await client.ask("KV.LEND")) == ALONE
            await client.ask("SET", "k", pattern(MIB))
            (place,) = await client.ask("KV.LEASE", 0, "k")
            assert client.bytes_at(place) == pattern(MIB)

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_memory_far_larger_than_the_machine_costs_nothing_to_lend(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            with memory(pattern(MIB), nbytes=1 << 50) as fd:
                assert await client.lend(fd) == 1 << 50
                assert await client.ask("KV.PUT", "k", 0, MIB) == b"OK"
                assert await client.ask("GET", "k") == pattern(MIB)
                assert await client.ask("KV.PUT", "k", (1 << 50) - MIB, MIB) == b"OK"
                assert await client.ask("GET", "k") == bytes(MIB), "nobody has ever written there"

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_memory_that_grows_is_lent_as_it_was(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
            with memory(pattern(MIB)) as fd:
                await client.lend(fd)
                os.ftruncate(fd, 2 * MIB)
                assert str(await client.ask("KV.PUT", "k", MIB, 1)).startswith("ERR bytes 1048576 to 1048577 are not")
                assert await client.lend(fd) == 2 * MIB
                assert await client.ask("KV.PUT", "k", MIB, 1) == b"OK"

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_cannot_write_to_what_it_was_given(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, attached(live) as client:
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

    run_on(loop, story())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_without_descriptors_says_so_and_serves_on(loop: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path) as live, connected(live) as client, attached(live) as lender:
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

    run_on(loop, story())
