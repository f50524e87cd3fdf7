"""Whom the HTTP door lets in: passwords, rights, protected mode, TLS, and names that are not ours."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.http import server
from tests.server.certificates import make_papers
from tests.server.http.http_client import WebServer, ask, basic


async def test_with_a_password_only_health_is_open_and_wrong_ones_are_in_the_acl_log(loop: str, tmp_path: Path) -> None:
    async with WebServer(tmp_path, requirepass="secret") as live:
        assert (await ask(live, "/health")).status == 200
        for path in ("/", "/metrics", "/api/state", "/api/arena", "/api/keys"):
            answer = await ask(live, path)
            assert (answer.status, answer.headers["www-authenticate"][:5]) == (401, "Basic")
            for user in ("default", ""):
                assert (await ask(live, path, basic(user, "secret"))).status == 200
        refused = live.server.acl.log.denials["auth"]
        assert (await ask(live, "/metrics", basic("default", "wrong"))).status == 401
        assert (await ask(live, "/metrics", basic("nobody", "secret"))).status == 401
        assert live.server.acl.log.denials["auth"] == refused + 2
        newest = live.server.acl.log.entries[0]
        assert (newest.reason, newest.username, newest.object) == ("auth", b"nobody", b"http")
        assert b"127.0.0.1:" in newest.client_info


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer x", 401), ("Basic ???", 400), ("Basic " + "YQ==", 400), ("Basic", 400), ("basic OnNlY3JldA==", 200)],
)
async def test_what_is_no_password_is_none(loop: str, tmp_path: Path, header: str, status: int) -> None:
    async with WebServer(tmp_path, requirepass="secret") as live:
        assert (await ask(live, "/metrics", f"Authorization: {header}")).status == status


async def test_a_user_sees_what_it_may_ask_by_commands(loop: str, live: WebServer) -> None:
    client = await live.connect()
    await client.ask("ACL", "SETUSER", "watcher", "on", ">w", "+info")
    await client.ask("ACL", "SETUSER", "looker", "on", ">l", "+info", "+scan", "+slowlog|get", "+kv.meta", "~*")
    await client.ask("ACL", "SETUSER", "narrow", "on", ">n", "+info", "+scan", "+slowlog|get", "+kv.meta", "~a*")
    await client.ask("ACL", "SETUSER", "off", "off", ">o", "+@all", "~*")
    statuses = {
        user: [(await ask(live, path, basic(user, user[0]))).status for path in ("/metrics", "/", "/api/keys")]
        for user in ("watcher", "looker", "narrow", "off")
    }
    assert statuses == {
        "watcher": [200, 403, 403],
        "looker": [200, 200, 200],
        "narrow": [200, 403, 403],
        "off": [401, 401, 401],
    }
    assert live.server.acl.log.denials["command"] == 4
    await client.ask("ACL", "SETUSER", "default", "off")
    assert (await ask(live, "/metrics")).status == 401


async def test_a_default_user_without_the_right_is_asked_to_log_in(loop: str, live: WebServer) -> None:
    client = await live.connect()
    await client.ask("ACL", "SETUSER", "watcher", "on", ">w", "+info")
    await client.ask("ACL", "SETUSER", "default", "-info")
    assert (await ask(live, "/metrics")).status == 401
    assert (await ask(live, "/metrics", basic("watcher", "w"))).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:9121", "127.0.0.1.evil.example"])
async def test_without_a_password_a_name_that_is_pointed_at_loopback_shows_nothing(
    loop: str, host: str, live: WebServer
) -> None:
    for path in ("/", "/metrics", "/api/keys"):
        assert (await ask(live, path, f"Host: {host}")).status == 403
        forged = await ask(live, path, f"Host: {host}", basic("default", "any password is right"))
        assert forged.status == 403, "a page can send a password along"
    client = await live.connect()
    await client.ask("ACL", "SETUSER", "watcher", "on", ">w", "+info")
    assert (await ask(live, "/metrics", f"Host: {host}", basic("watcher", "w"))).status == 200
    for own in ("localhost:9121", "127.0.0.1:9121", "[::1]:9121", socket.gethostname()):
        assert (await ask(live, "/metrics", f"Host: {own}")).status == 200


async def test_protected_mode_holds_for_strangers_from_elsewhere_but_for_health(
    loop: str, monkeypatch: pytest.MonkeyPatch, live: WebServer
) -> None:
    monkeypatch.setattr(server, "address_of", lambda _name: "192.0.2.1:5")

    assert (await ask(live, "/metrics")).status == 403
    assert (await ask(live, "/health")).status == 200
    live.server.protected_mode = False
    assert (await ask(live, "/metrics", "Host: kvredis.cluster.local")).status == 200


async def test_where_clients_have_tls_alone_the_door_speaks_it_too(loop: str, tmp_path: Path) -> None:
    papers = make_papers(tmp_path)
    options: dict[str, Any] = {
        "tls_cert_file": str(papers.path("server")),
        "tls_key_file": str(papers.path("server_key")),
    }
    options |= {"port": -1, "tls_port": -1, "tls_auth_clients": "no"}
    async with WebServer(tmp_path, **options) as live:
        assert live.server.http is not None
        assert live.server.http.urls == [f"https://127.0.0.1:{live.server.http.port}/"]
        context = ssl.create_default_context(cafile=str(papers.path("ca")))
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", live.server.http.port, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b'"status": "ok"' in await reader.read()
        writer.close()
        await writer.wait_closed()
