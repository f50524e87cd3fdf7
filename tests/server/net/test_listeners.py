"""Where clients arrive: the addresses of `bind` as Redis reads them, the socket file's mode, and running out of
descriptors, after which everything goes on."""

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.net.listeners import Listeners, bind_tcp, bind_unix
from kvredis.server.options import ServerOptions
from tests.server.live import LiveServer, run_on, until


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


# ---- bind --------------------------------------------------------------------------------------------------------


@needs_ipv6
@pytest.mark.parametrize(
    ("bind", "shown", "ipv4", "other", "ipv6"),
    [
        (("127.0.0.1",), ["127.0.0.1"], True, False, False),
        (("127.0.0.1", "::1"), ["127.0.0.1", "[::1]"], True, False, True),
        (("127.0.0.1", "-::1"), ["127.0.0.1", "[::1]"], True, False, True),
        (("::1",), ["[::1]"], False, False, True),
        (("*",), ["0.0.0.0"], True, True, False),
        (("*", "-::*"), ["0.0.0.0", "[::]"], True, True, True),
        (("::*",), ["[::]"], False, False, True),
        (("localhost",), ["127.0.0.1"], True, False, False),
        (("127.0.0.2", "-192.0.2.77"), ["127.0.0.2"], False, True, False),
    ],
)
async def test_addresses_are_read_as_redis_reads_them(
    loop: str, tmp_path: Path, bind: tuple[str, ...], shown: list[str], ipv4: bool, other: bool, ipv6: bool
) -> None:
    async with LiveServer(tmp_path, bind=bind, unixsocket=None) as live:
        port = live.server.tcp_port
        assert live.server.addresses == [f"{host}:{port}" for host in shown]
        assert [reachable(host, port) for host in ("127.0.0.1", "127.0.0.2", "::1")] == [ipv4, other, ipv6]
        await until(lambda: live.server.stats.connections_received == ipv4 + other + ipv6)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("192.0.2.77", "192.0.2.77:6379: Cannot assign requested address"),
        ("2001:db8::77", "[2001:db8::77]:6379: "),
        ("a" * 300, "a:6379: "),
    ],
)
def test_an_address_that_cannot_be_had_is_named(host: str, shown: str) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        bind_tcp(host, 6379)
    assert shown in str(caught.value)


@pytest.mark.parametrize("host", ["nohost", "-nohost"])
def test_a_name_that_does_not_resolve_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="nohost:6379: Name or service not known"):
        bind_tcp(host, 6379)


def test_an_optional_address_may_be_missing_but_not_taken() -> None:
    assert bind_tcp("-192.0.2.77", 6379) is None
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="Address already in use"):
        bind_tcp("-127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("bind", [("-192.0.2.77",), ("127.0.0.1", "192.0.2.77")])
async def test_a_server_that_cannot_have_its_addresses_keeps_none(loop: str, bind: tuple[str, ...]) -> None:
    listeners = Listeners(ServerOptions(bind=bind, port=0), asyncio.Protocol, lambda: 1)
    with pytest.raises(OSError, match=r"192\.0\.2\.77"):
        listeners.open()
    assert listeners.addresses == []
    if listeners.tcp_port:
        assert not reachable("127.0.0.1", listeners.tcp_port)
    listeners.close()


def test_listening_nowhere_is_an_error() -> None:
    async def story() -> None:
        with pytest.raises(OSError, match="nothing to listen on"):
            Listeners(ServerOptions(port=-1), asyncio.Protocol, lambda: 1).open()

    run_on("asyncio", story())


def own_address(family: socket.AddressFamily, some: str) -> str:
    """This machine's address that others see; nothing is sent to find it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((some, 9))
        except OSError:
            return ""
        own = str(probe.getsockname()[0])
        return "" if own.startswith(("127.", "::1")) else own


FAMILIES = {"ipv4": (socket.AF_INET, "192.0.2.1", "*"), "ipv6": (socket.AF_INET6, "2001:db8::1", "::*")}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("options", "answer"),
    [({}, b"-DENIED"), ({"requirepass": "x"}, b"-NOAUTH"), ({"protected_mode": False}, b"+PONG\r\n")],
)
def test_distant_clients_need_a_password_whatever_is_bound(
    loop: str, tmp_path: Path, family: str, options: dict[str, Any], answer: bytes
) -> None:
    kind, some, every = FAMILIES[family]
    own = own_address(kind, some)
    if not own:
        pytest.skip(f"this machine has no {family} address but loopback")

    async def story() -> None:
        for bind in (every, own):
            async with LiveServer(tmp_path, bind=(bind,), **options) as live:
                with socket.socket(kind) as client:
                    client.setblocking(False)
                    loop = asyncio.get_running_loop()
                    await loop.sock_connect(client, (own, live.server.tcp_port))
                    with contextlib.suppress(ConnectionError):  # turned away already
                        await loop.sock_sendall(client, b"PING\r\n")
                    assert (await loop.sock_recv(client, 500)).startswith(answer)

    run_on(loop, story())


async def test_silent_clients_are_asked_by_the_kernel(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, tcp_keepalive=60) as live:
        for seconds, shown in ((60, (1, 60, 20)), (0, (0,)), (90_000, (1, 32_767, 10_922))):
            live.server.listeners.keepalive_s = seconds
            await live.connect("tcp")
            await until(lambda: live.sessions())
            session = live.sessions()[0]
            assert session._transport is not None
            sock = session._transport.get_extra_info("socket")
            names = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                     (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                     (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL))  # fmt: skip
            assert tuple(sock.getsockopt(*name) for name in names)[: len(shown)] == shown
            session.close()
            await until(lambda: not live.sessions())


# ---- the socket file ---------------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[int]:
    """A umask that lets no other user in, for the time of a test."""
    before = os.umask(0o077)
    yield 0o077
    os.umask(before)


@pytest.mark.parametrize(("perm", "mode"), [(None, 0o700), ("600", 0o600), ("770", 0o770), ("777", 0o777)])
def test_the_socket_file_has_the_mode_asked_for_else_the_umask_decides(
    tmp_path: Path, umask: int, perm: str | None, mode: int
) -> None:
    with bind_unix(str(tmp_path / "s"), perm):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
    assert os.umask(umask) == umask, "the process's own is as it was"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, umask: int) -> None:
    with pytest.raises(OSError, match=r"unix:.*nowhere/s: No such file or directory"):
        bind_unix(str(tmp_path / "nowhere" / "s"), "770")
    assert os.umask(umask) == umask


# ---- out of descriptors ------------------------------------------------------------------------------------------


class Crowd:
    """A `kvredis serve` with few descriptors, and blocking clients of it."""

    def __init__(self, folder: Path, loop: str) -> None:
        self.path = str(folder / "s")
        flags = ["--port", "none", "--unixsocket", self.path, "--max-local-cpu-size", "16MB", "--hugepages", "off"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvredis", "serve", "--no-prefault", "--no-page-lock", *flags],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "KVREDIS_EVENT_LOOP": loop},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert any("Ready to accept" in line for line in self.process.stdout)
        self.clients: list[socket.socket] = []

    def limit(self, files: int) -> None:
        """So many more may it open. To be called once it has served a client: at its start the server would lower
        maxclients to what the limit allows, and what it opens once is open by then."""
        limit = self.open_files() + files
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (limit, limit))

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(20)
        client.connect(self.path)
        self.clients.append(client)
        return client

    def end(self) -> tuple[int, str]:
        for client in self.clients:
            client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            _, log = self.process.communicate(timeout=20)
        finally:
            self.process.kill()
        return self.process.returncode, log


def ask(client: socket.socket, words: bytes) -> bytes:
    client.sendall(words)
    return client.recv(100)


def test_without_descriptors_clients_wait_and_others_are_served(loop: str, tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, loop)
    try:
        inside = [crowd.connect()]
        assert ask(inside[0], b"PING\r\n") == b"+PONG\r\n"
        crowd.limit(files=4)
        inside += [crowd.connect() for _ in range(4)]
        assert [ask(client, b"PING\r\n") for client in inside] == [b"+PONG\r\n"] * 5
        waiting = [crowd.connect() for _ in range(3)]
        for client in waiting:
            client.sendall(b"ECHO waited\r\n")
            client.settimeout(1)
        cpu_s = crowd.cpu_s()
        with pytest.raises(TimeoutError):
            waiting[0].recv(1)
        assert crowd.cpu_s() - cpu_s < 0.5, "it does not spin"
        assert ask(inside[0], b"SET k v\r\nGET k\r\n")
        for client in waiting:
            client.settimeout(20)
        for gone, client in zip(inside, waiting, strict=False):
            gone.close()
            assert client.recv(100) == b"$6\r\nwaited\r\n"
        assert ask(inside[4], b"PING\r\n") == b"+PONG\r\n"
        inside[3].close()
        assert ask(crowd.connect(), b"PING\r\n") == b"+PONG\r\n"
    finally:
        status, log = crowd.end()
    assert status == 0, log
    assert log.count(os.strerror(errno.EMFILE)) in (1, 2), "said once each time, not with every attempt"
    assert "Traceback" not in log
