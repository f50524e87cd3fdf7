"""The HTTP door: what it answers, and in which words it refuses."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from kvredis.server.http import server
from kvredis.server.http.server import HttpError, HttpRequest, HttpResponse, HttpServer, Routes
from kvredis.server.options import ServerOptions
from tests.server.http.http_client import HttpClient, WebServer, ask, connect
from tests.server.live import LiveServer

# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_health_is_answered_again_and_again_on_one_connection(loop: str, live: WebServer) -> None:
    client = await connect(live)
    for path in ("/health", "/health/ready", "/health/live", "/health?verbose=1"):
        answer = await client.ask(path)
        assert answer.status == 200
        assert json.loads(answer.body)["status"] == "ok"


async def test_requests_that_come_together_are_answered_in_their_order(loop: str, live: WebServer) -> None:
    client = await connect(live)
    paths = ["/health", "/none", "/metrics", "/health"] * 5
    await client.send(b"".join(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode() for path in paths))
    statuses = [(await client.answer()).status for _ in paths]
    assert statuses == [200, 404, 403, 200] * 5, "x is no name of ours, which only health does not mind"


async def test_head_has_the_length_of_what_get_would_say_and_no_body(loop: str, live: WebServer) -> None:
    client = await connect(live)
    answer = await client.ask("/", method="HEAD")
    page = await client.ask("/")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) == len(page.body) > 100
    assert page.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_head_that_is_refused_has_the_length_of_the_error_and_no_body(
    loop: str, before: bytes, live: WebServer
) -> None:
    client = await connect(live)
    await client.send(before + b"HEAD http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    if before:
        assert (await client.answer()).status == 200
    answer = await client.answer(has_body=False)
    assert answer.status == 400
    assert int(answer.headers["content-length"]) > 0
    assert await client.read_all() == b"", "a body behind HEAD would be taken for the next answer"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd", 413),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"GET health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET ftp://h/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health?" + b"&".join(b"a%d=" % n for n in range(40)) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"*1\r\n$4\r\nPING\r\n", 400),
        (b"PING\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000, 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    ],
)
async def test_what_is_not_a_request_for_this_door_is_told_so_and_hung_up_on(
    loop: str, request_: bytes, status: int, live: WebServer
) -> None:
    client = await connect(live)
    await client.send(request_)
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert answer.body.endswith(b"\n")
    assert await client.read_all() == b""


async def test_a_client_of_http_1_0_is_answered_and_hung_up_on(loop: str, live: WebServer) -> None:
    client = await connect(live)
    await client.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await client.answer()).status == 200
    assert await client.read_all() == b""


async def test_a_client_that_says_that_it_sends_no_more_is_still_answered(loop: str, live: WebServer) -> None:
    client = await connect(live)
    await client.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.sock.shutdown(socket.SHUT_WR)
    assert b"kvredis_uptime_seconds" in await client.read_all()


async def test_an_absolute_address_is_taken_for_its_path(loop: str, live: WebServer) -> None:
    assert (await ask(live, "http://anything:80/health")).status == 200


# ---- routes of other modules -----------------------------------------------------------------------------------------


async def test_a_route_may_wait_refuse_and_fail_and_only_a_failure_is_logged(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def waits(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0)
        return HttpResponse(
            200, f"{request.query['a']} {request.headers['x-b']}".encode(), "text/plain", (("X-C", "d"),)
        )

    def refuses(_request: HttpRequest) -> HttpResponse:
        raise HttpError(403, "no", (("X-Why", "because"),))

    def fails(_request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    routes: Routes = {"/waits": (waits, False), "/refuses": (refuses, True), "/fails": (fails, False)}
    asked: list[str] = []
    door = HttpServer(ServerOptions(metrics_port=-1), routes, lambda request, peer: asked.append(request.path))
    door.open()
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", door.port))
    client = HttpClient(sock)
    answer = await client.ask("/waits?a=1&a=2", "X-B: 3", "X-b: 4")
    assert (answer.status, answer.body, answer.headers["x-c"]) == (200, b"2 3, 4", "d")
    answer = await client.ask("/refuses")
    assert (answer.status, answer.body, answer.headers["x-why"]) == (403, b"no\n", "because")
    assert not caplog.records
    assert (await client.ask("/fails")).status == 500
    assert "ZeroDivisionError" in caplog.text
    assert asked == ["/refuses"]
    client.close()
    await door.close()
    await door.close()


async def test_an_answer_that_takes_too_long_is_given_up(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.01)

    async def never(_request: HttpRequest) -> HttpResponse:
        await asyncio.Event().wait()
        raise AssertionError

    door = HttpServer(ServerOptions(metrics_port=-1), {"/": (never, False)}, lambda *_: None)
    answer = await door.answer(HttpRequest("GET", "/", {}, {}), server.Peer("", ""))
    assert answer.status == 503


async def test_stopping_hangs_up_on_idle_clients_and_says_that_it_stops(loop: str, tmp_path: Path) -> None:
    async with LiveServer(tmp_path, metrics_port=-1) as live:
        idle = await connect(live)
        live.clients.clear()  # which would hang up on the server
        assert (await idle.ask("/health")).status == 200
        live.server.request_shutdown()
        for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
            answer = await idle.ask(path)
            assert answer.status == status
            assert ("shutting down" in answer.body.decode()) == (status == 503)
    assert await idle.read_all() == b""
    idle.close()
