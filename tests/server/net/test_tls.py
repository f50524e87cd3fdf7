"""The TLS side of the door: who gets in, what a stranger gets, and that a payload lent to a TLS client stays whole."""

import asyncio
import contextlib
import gc
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.net import listeners
from kvredis.server.net.tls import make_context
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError
from tests.server.certificates import PASSWORD, Papers
from tests.server.feed import request
from tests.server.live import MIB, LiveServer, pattern, run_on, until
from tests.server.tls_client import TlsClient, connect, connect_plain, read_to_end

# ---- work over TLS ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_values_of_every_size_come_back_whole(
    loop: str, tmp_path: Path, papers: Papers, version: ssl.TLSVersion
) -> None:
    async with LiveServer(tmp_path, arena_bytes=32 * MIB, **papers.options()) as live:
        context = papers.client_context()
        context.minimum_version = context.maximum_version = version
        client = await connect(live, context)
        for length in (0, 1, 100, 16_384, 70_000, MIB, 9 * MIB + 3):
            value = pattern(length)
            assert await client.ask("SET", "k", value) == b"+OK\r\n"
            assert await client.get("k") == value
        assert await client.ask("PING") == b"+PONG\r\n"
        await client.close()


async def test_a_long_pipeline_is_answered_in_order(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        client = await connect(live, papers.client_context())
        value = pattern(40_000)
        assert await client.ask("SET", "k", value) == b"+OK\r\n"
        for _ in range(200):
            await client.send("GET", "k")
            await client.send("PING")
        expected = b"$40000\r\n" + value + b"\r\n+PONG\r\n"
        for _ in range(200):
            assert await client.read(len(expected)) == expected
        await client.close()


async def test_a_slow_reader_gets_the_old_bytes_though_the_value_is_overwritten(
    loop: str, tmp_path: Path, papers: Papers
) -> None:
    async with LiveServer(tmp_path, arena_bytes=48 * MIB, **papers.options()) as live:
        old, new = pattern(16 * MIB), pattern(16 * MIB, seed=1)
        writer = await connect(live, papers.client_context())
        reader = await connect(live, papers.client_context(), receive_bytes=4096)
        assert await writer.ask("SET", "k", old) == b"+OK\r\n"
        await reader.send("GET", "k")
        assert await reader.read(11) == b"$16777216\r\n"
        assert await writer.ask("SET", "k", new) == b"+OK\r\n"
        assert live.store.leases == 1, "what is not yet encrypted is still lent"
        session = live.sessions()[1]
        assert session.unsent_bytes >= 14 * MIB
        assert await reader.read(16 * MIB) == old
        assert await reader.read(2) == b"\r\n"
        await until(lambda: live.store.leases == 0)
        assert await reader.get("k") == new
        for client in (writer, reader):
            await client.close()


async def test_a_payload_is_encrypted_in_slices_and_never_whole(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, arena_bytes=40 * MIB, **papers.options()) as live:
        client = await connect(live, papers.client_context(), receive_bytes=4096)
        assert await client.ask("SET", "k", pattern(32 * MIB)) == b"+OK\r\n"
        session = live.sessions()[0]
        await client.send("GET", "k")
        await until(lambda: live.store.leases)
        assert session._transport is not None
        assert session._transport.get_write_buffer_size() < 2 * MIB
        assert await client.ask("PING") == b"$33554432\r\n"
        client.sock.close()


async def test_client_list_and_ids_work_and_a_vanished_client_leaves_nothing(
    loop: str, tmp_path: Path, papers: Papers
) -> None:
    async with LiveServer(tmp_path, arena_bytes=40 * MIB, **papers.options()) as live:
        client = await connect(live, papers.client_context())
        port = client.sock.getsockname()[1]
        head = await client.ask("CLIENT", "LIST")
        line = await client.read(int(head[1:]) + 2)
        assert f"addr=127.0.0.1:{port} laddr=127.0.0.1:{live.server.listeners.tls_port} fd=".encode() in line
        assert await client.ask("SET", "k", pattern(32 * MIB)) == b"+OK\r\n"
        await client.send("GET", "k")
        await client.read(100)
        half = await connect(live, papers.client_context())
        half.tls.write(request("SET", "half", pattern(MIB))[:500_000])
        await half.send_out()
        await until(lambda: live.store.leases and live.store.reserved_bytes)
        client.sock.close()
        half.sock.close()
        await until(lambda: not live.server.sessions)
        gc.collect()


async def test_quit_ends_the_connection_with_a_goodbye(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        client = await connect(live, papers.client_context())
        assert await client.ask("QUIT") == b"+OK\r\n"
        assert await client.until_done(lambda: client.tls.read(1)) == b""
        await client.close()
        await until(lambda: not live.server.sessions)


async def test_a_goodbye_in_the_middle_of_a_reply_is_taken_quietly(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, arena_bytes=40 * MIB, **papers.options()) as live:
        client = await connect(live, papers.client_context(), receive_bytes=4096)
        assert await client.ask("SET", "k", pattern(32 * MIB)) == b"+OK\r\n"
        await client.send("GET", "k")
        await until(lambda: live.store.leases)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.tls.unwrap()
        await client.send_out()
        await read_to_end(client.sock)
        await until(lambda: not live.server.sessions)


async def test_what_was_asked_before_a_goodbye_is_answered(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        client = await connect(live, papers.client_context())
        client.tls.write(request("PING"))
        with contextlib.suppress(ssl.SSLWantReadError):
            client.tls.unwrap()
        await client.send_out()
        received = await read_to_end(client.sock)
        assert len(received) > 20, "an encrypted answer"
        assert live.server.stats.commands_processed == 1


# ---- who gets in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "show", "let_in"),
    [
        ("yes", "client", True),
        ("yes", None, False),
        ("yes", "stranger", False),
        ("optional", "client", True),
        ("optional", None, True),
        ("optional", "stranger", False),
        ("no", None, True),
        ("no", "stranger", True),
    ],
)
async def test_client_certificates_are_asked_for_and_verified(
    loop: str, tmp_path: Path, papers: Papers, auth: str, show: str | None, let_in: bool
) -> None:
    async with LiveServer(tmp_path, **papers.options(tls_auth_clients=auth)) as live:
        client = TlsClient(await connect_plain(live), papers.client_context(show))
        answer = b""
        try:
            await client.shake_hands()  # a client of TLS 1.3 is done before the server has looked at it
            answer = await client.ask("PING")
        except (ssl.SSLError, ConnectionError):
            pass
        assert answer == (b"+PONG\r\n" if let_in else b"")
        assert len(live.server.sessions) == let_in
        assert live.server.listeners.handshakes_failed == (not let_in)
        client.sock.close()


def test_versions_that_are_broken_or_switched_off_are_refused(loop: str, tmp_path: Path, papers: Papers) -> None:
    async def story() -> None:
        async with LiveServer(tmp_path, **papers.options(tls_protocols=("TLSv1.3",))) as live:
            context = papers.client_context()
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            client = TlsClient(await connect_plain(live), context)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await client.shake_hands()
            client.sock.close()
            await until(lambda: live.server.listeners.handshakes_failed == 1)

    run_on(loop, story())
    context = make_context(ServerOptions(**papers.options()))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    "words", [b"PING\r\n", b"*1\r\n$4\r\nPING\r\n" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"]
)
async def test_plain_bytes_on_the_tls_port_get_nothing_useful(
    loop: str, tmp_path: Path, papers: Papers, words: bytes
) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        sock = await connect_plain(live)
        await asyncio.get_running_loop().sock_sendall(sock, words)
        if words.startswith(b"\x16"):
            sock.shutdown(socket.SHUT_WR)
        assert b"PONG" not in await read_to_end(sock)
        assert live.server.stats.commands_processed == 0
        assert live.server.sessions == {}
        client = await connect(live, papers.client_context())
        assert await client.ask("PING") == b"+PONG\r\n"
        await client.close()


async def test_a_stalled_handshake_delays_no_client_and_is_given_up(
    loop: str, tmp_path: Path, papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0.5)

    async with LiveServer(tmp_path, **papers.options()) as live:
        silent = [await connect_plain(live) for _ in range(20)]
        client = await connect(live, papers.client_context())
        assert await client.ask("PING") == b"+PONG\r\n"
        assert live.server.listeners.handshakes == 20
        assert [await read_to_end(sock) for sock in silent] == [b""] * 20
        assert live.server.listeners.handshakes == 0
        assert await client.ask("PING") == b"+PONG\r\n"
        await client.close()


async def test_handshakes_count_as_clients(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, **papers.options(maxclients=3)) as live:
        client = await connect(live, papers.client_context())
        silent = [await connect_plain(live) for _ in range(2)]
        await until(lambda: live.server.listeners.handshakes == 2)
        assert await read_to_end(await connect_plain(live)) == b""
        assert await client.ask("PING") == b"+PONG\r\n"
        for sock in silent:
            sock.close()
        await until(lambda: live.server.listeners.handshakes == 0)
        await (await connect(live, papers.client_context())).close()
        await client.close()


async def test_a_client_that_is_turned_away_runs_nothing_of_what_it_has_sent_already(
    loop: str, tmp_path: Path, papers: Papers
) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        live.server.admit = lambda session: b"-DENIED\r\n"  # type: ignore[method-assign]
        client = TlsClient(await connect_plain(live), papers.client_context())
        await client.shake_hands(and_send=request("SET", "k", "v"))
        assert await client.read(100) == b"-DENIED\r\n"
        assert live.store.count() == 0
        assert live.server.stats.commands_processed == 0
        await client.close()


async def test_stopping_gives_handshakes_up_and_lets_clients_go(loop: str, tmp_path: Path, papers: Papers) -> None:
    async with LiveServer(tmp_path, **papers.options()) as live:
        silent = await connect_plain(live)
        client = await connect(live, papers.client_context())
        await until(lambda: live.server.listeners.handshakes == 1)
        stopping = asyncio.ensure_future(live.server.stop())
        assert await read_to_end(silent) == b""
        assert await client.read(1) == b""
        await client.close()
        await stopping


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_key_with_a_password_and_a_key_beside_its_certificate_are_read(papers: Papers) -> None:
    locked = papers.options(tls_key_file=papers.path("locked_key"), tls_key_file_pass=PASSWORD)
    beside = papers.options(tls_cert_file=papers.path("server_and_key"), tls_key_file=None)
    for options in (locked, beside):
        assert make_context(ServerOptions(**options)).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("changed", "key", "reason"),
    [
        ({"tls_cert_file": None}, "tls_cert_file", "needs a certificate"),
        ({"tls_cert_file": "/nowhere.pem"}, "tls_cert_file", "cannot be read: No such file"),
        ({"tls_cert_file": "server_key"}, "tls_cert_file", "no certificate in PEM format"),
        ({"tls_key_file": "/nowhere.pem"}, "tls_key_file", "cannot be read: No such file"),
        ({"tls_key_file": "server"}, "tls_key_file", "no key in PEM format"),
        ({"tls_key_file": "client_key"}, "tls_key_file", "the key does not fit the certificate"),
        ({"tls_key_file": None}, "tls_cert_file", "no key in PEM format"),
        ({"tls_key_file": "locked_key"}, "tls_key_file_pass", "the key is encrypted"),
        ({"tls_key_file": "locked_key", "tls_key_file_pass": "no"}, "tls_key_file_pass", "does not open the key"),
        ({"tls_ca_cert_file": None}, "tls_ca_cert_file", "set tls_auth_clients to no"),
        ({"tls_ca_cert_file": "client_key"}, "tls_ca_cert_file", "no certificate in PEM format"),
        ({"tls_ca_cert_file": "/"}, "tls_ca_cert_file", "cannot be read"),
        ({"tls_ciphers": "NO-SUCH"}, "tls_ciphers", "OpenSSL: No cipher can be selected"),
        ({"tls_protocols": ()}, "tls_protocols", "want one of TLSv1.2, TLSv1.3"),
    ],
)
def test_what_is_wrong_with_the_files_names_the_option(
    papers: Papers, changed: dict[str, Any], key: str, reason: str
) -> None:
    files = {
        name: papers.path(value) if name.endswith("_file") and value and "/" not in value else value
        for name, value in changed.items()
    }
    with pytest.raises(ConfigError, match=reason) as caught:
        make_context(ServerOptions(**papers.options(**files)))
    assert caught.value.key == key
    assert PASSWORD not in str(caught.value)
    assert "locked_key" not in str(caught.value.value)
