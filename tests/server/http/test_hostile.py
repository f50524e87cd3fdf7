"""What strangers can make of the HTTP port: the server hangs up on them, and serves all others."""

import asyncio
import random
import socket
from contextlib import suppress

import pytest

from kvredis.server.http import server
from kvredis.server.http.server import HttpRequest, HttpResponse, HttpServer
from kvredis.server.options import ServerOptions
from tests.server.http.http_client import HttpClient, WebServer, ask, connect
from tests.server.live import LiveServer, until


async def test_a_head_that_never_ends_is_hung_up_on(
    loop: str, monkeypatch: pytest.MonkeyPatch, live: WebServer
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.05)

    silent, slow = await connect(live), await connect(live)
    with suppress(ConnectionError):  # a busy machine has hung up on it already
        await slow.send(b"GET /health HTTP/1.1\r\nHos")
    assert await silent.read_all() == b""
    assert await slow.read_all() == b""
    for each in (silent, slow):
        each.close()


async def test_a_head_that_comes_byte_by_byte_has_no_longer_for_that(
    loop: str, monkeypatch: pytest.MonkeyPatch, live: WebServer
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.2)

    client = await connect(live)
    ended = asyncio.ensure_future(client.read_all())
    sent = 0
    while not ended.done():
        try:
            await client.send(b"GET /health HTTP/1.1\r\nX-" + b"a" if not sent else b"a")
        except ConnectionError:
            break
        sent += 1
        await asyncio.wait([ended], timeout=0.02)
    assert await ended == b""


async def test_the_client_that_was_silent_for_longest_makes_room_for_a_new_one(loop: str, live: WebServer) -> None:
    assert live.server.http is not None
    crowd = [await connect(live) for _ in range(server.CONNECTIONS_MAX)]
    await until(lambda: live.server.http.connections == len(crowd))  # type: ignore[union-attr]
    assert (await ask(live, "/health")).status == 200
    assert await crowd[0].read_all() == b""
    assert (await crowd[-1].ask("/health")).status == 200
    client = await live.connect()
    assert await client.ask("PING") == b"+PONG\r\n"
    for each in crowd:
        each.close()


async def test_a_client_that_asks_now_and_then_is_not_the_first_to_make_room(loop: str, live: WebServer) -> None:
    assert live.server.http is not None
    crowd = [await connect(live) for _ in range(server.CONNECTIONS_MAX)]
    await until(lambda: live.server.http.connections == len(crowd))  # type: ignore[union-attr]
    assert (await crowd[0].ask("/health")).status == 200
    assert (await ask(live, "/health")).status == 200
    assert await crowd[1].read_all() == b""
    assert (await crowd[0].ask("/health")).status == 200
    for each in crowd:
        each.close()


async def test_a_client_that_does_not_take_its_answer_is_hung_up_on_and_read_no_further(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    monkeypatch.setattr(server, "SEND_S", 0.05)
    body = bytes(32 * 1024 * 1024)
    asked: list[str] = []

    def large(request: HttpRequest) -> HttpResponse:
        asked.append(request.path)
        return HttpResponse(200, body, "application/octet-stream")

    door = HttpServer(ServerOptions(metrics_port=-1), {"/": (large, False)}, lambda *_: None)
    door.open()
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", door.port))
    client = HttpClient(sock)
    await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    await until(lambda: asked)
    await until(lambda: not door.connections)
    assert asked == ["/"]
    client.close()
    await door.close()


async def test_thousands_of_broken_requests_leave_the_server_as_it_was(loop: str, live: WebServer) -> None:
    chance = random.Random(8)
    whole = [
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n",
        b"GET /api/keys?prefix=a%20b&cursor=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic OnNlY3JldA==\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: [::1]:9121\r\nContent-Length: 0\r\n\r\n",
        b"POST /api/state HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
    ]

    def broken() -> bytes:
        data = bytearray(chance.choice(whole) * chance.choice((1, 1, 3)))
        for _ in range(chance.randint(0, 6)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    del data[at : at + chance.randint(1, 8)]
                case 1:
                    data[at:at] = chance.randbytes(chance.randint(1, 8))
                case 2:
                    data[at:at] = chance.choice((b"\r\n", b"\n", b" ", b"\0", b": ", b"HTTP/1.1", b"%", b"9" * 30))
                case _:
                    data[at : at + 1] = b""
        return bytes(data)

    async def one(live: LiveServer, data: bytes) -> int:
        client = await connect(live)
        try:
            cut = chance.randrange(len(data) + 1)
            await client.send(data[:cut])
            await asyncio.sleep(0)
            await client.send(data[cut:])
            client.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has been hung up on already
        answer = await client.read_all()
        client.close()
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:200]
        assert b" 500 " not in answer.split(b"\r\n")[0], data
        return len(answer)

    resp = await live.connect()
    await resp.ask("SET", "k", "v")
    answered = 0
    for _ in range(125):
        answered += sum(map(bool, await asyncio.gather(*[one(live, broken()) for _ in range(8)])))
        assert await resp.get("k") == b"v"
    assert answered > 600
    assert (await ask(live, "/health")).status == 200
