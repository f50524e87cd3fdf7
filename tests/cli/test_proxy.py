"""`kvredis proxy` between clients and engines of the tests' own, which keep what they were asked."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner
from yarl import URL

from kvredis.cli.main import main
from kvredis.cli.proxy import router
from tests.fork_server import Forked

from .conftest import ROOT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "kvredis_chunk": "c@1"}
WAIT_S = 30
"""A bound on what takes no time, or the second that an engine rests."""
BODY_BYTES_MAX = 64 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Asked:
    """A request as an engine got it."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def prefilled(_request: web.Request) -> web.StreamResponse:
    """What a prefill engine answers."""
    return web.json_response({"id": "p", "choices": [{"text": "a"}], "kv_transfer_params": PARAMS})


async def generated(_request: web.Request) -> web.StreamResponse:
    """What a decode engine answers."""
    return web.Response(body=b'{"choices":[{"text":"abc"}]}', content_type="application/json")


async def broken(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="out of memory")


async def hanging_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def unreadable(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>a page</html>", content_type="text/html")


async def too_deep(_request: web.Request) -> web.StreamResponse:
    return web.Response(text='{"kv_transfer_params":' + "[" * 100_000, content_type="application/json")


async def silent(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class FakeEngine:
    """An HTTP server that answers as `answers` has it."""

    answers: Handler
    asked: list[Asked] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """A request has come."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has hung up on a request."""
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(Asked(request.method, request.raw_path, request.headers, await request.read()))
        self.came.set()
        try:
            return await self.answers(request)
        except (asyncio.CancelledError, ConnectionError):
            self.ended.set()
            raise

    @property
    def only(self) -> Asked:
        (asked,) = self.asked
        return asked


@asynccontextmanager
async def engine(answers: Handler, at: socket.socket | None = None) -> AsyncIterator[FakeEngine]:
    """An engine on a free port, or at a socket that is bound."""
    fake = FakeEngine(answers)
    app = web.Application(client_max_size=2 * BODY_BYTES_MAX)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
    await runner.setup()
    await (web.TCPSite(runner, "127.0.0.1", 0) if at is None else web.SockSite(runner, at)).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


@contextmanager
def unreachable() -> Iterator[str]:
    """The address of an engine that does not listen."""
    with bound() as held:
        yield url_of(held)


@contextmanager
def bound() -> Iterator[socket.socket]:
    """A socket that does not listen yet."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def url_of(held: socket.socket) -> str:
    return f"http://127.0.0.1:{held.getsockname()[1]}"


class Proxy:
    """A `kvredis proxy` process, and a client of it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path, client: aiohttp.ClientSession) -> None:
        self.process, self.url, self._log, self._client = process, url, log, client

    @property
    def lines(self) -> list[str]:
        """What it has logged."""
        return self._log.read_text().splitlines()

    def ask(self, path: str = COMPLETIONS, method: str = "POST", **options: Any) -> Any:
        if method == "POST" and not options.keys() & {"data", "json"}:
            options["json"] = {"model": "tiny", "prompt": "once", "max_tokens": 4}
        return self._client.request(method, self.url + path, **options)

    async def complete(self, path: str = COMPLETIONS, **options: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        async with self.ask(path, **options) as answer:
            return answer.status, json.loads(await answer.read())


@asynccontextmanager
async def proxying(prefill: list[str], decode: list[str], log: Path, *flags: str) -> AsyncIterator[Proxy]:
    addresses = [word for url in prefill for word in ("--prefill", url)]
    addresses += [word for url in decode for word in ("--decode", url)]
    env = {"PATH": os.environ["PATH"]} | {name: value for name, value in os.environ.items() if "COVERAGE_" in name}
    with log.open("w") as stderr, ExitStack() as stack:
        process: subprocess.Popen[str] = stack.enter_context(
            Forked(
                [sys.executable, "-m", "kvredis", "proxy", "--port", "0", *addresses, *flags],
                cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )
        )  # fmt: skip
        stack.callback(process.kill)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("Ready to accept connections on http://127.0.0.1:"), log.read_text()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(WAIT_S)) as client:
            yield Proxy(process, ready.split()[-1], log, client)
        process.terminate()
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
        assert "Traceback" not in log.read_text()


@dataclass
class Setup:
    """One engine of each kind, and the proxy before them."""

    prefill: FakeEngine
    decode: FakeEngine
    proxy: Proxy


@asynccontextmanager
async def apart(
    tmp_path: Path, prefill: Handler = prefilled, decode: Handler = generated, *flags: str
) -> AsyncIterator[Setup]:
    async with engine(prefill) as p, engine(decode) as d, proxying([p.url], [d.url], tmp_path / "log", *flags) as proxy:
        yield Setup(p, d, proxy)


# -- what goes where


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_prompt_is_prefilled_for_one_token_and_then_decoded_with_what_that_has_answered(
    path: str, tmp_path: Path
) -> None:
    body = {
        "model": "tiny", "prompt": "ünï", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 3,
        "stream_options": {"include_usage": True}, "min_tokens": 2, "max_tokens": 9, "max_completion_tokens": 8,
        "temperature": 0.25, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "elsewhere"},
    }  # fmt: skip
    async with apart(tmp_path) as setup:
        assert await setup.proxy.complete(path, json=body) == (200, {"choices": [{"text": "abc"}]})
    p, d = setup.prefill.only, setup.decode.only
    kept = {name: body[name] for name in ("model", "prompt", "messages", "temperature")}
    told = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    told |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
    one = {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "kv_transfer_params": told}
    assert (p.method, p.target, p.json) == ("POST", path, kept | one)
    assert (d.method, d.target, d.json) == ("POST", path, body | {"kv_transfer_params": PARAMS})


async def test_what_a_request_does_not_say_is_not_added_but_for_the_one_token(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        await setup.proxy.complete(CHAT, json={"messages": []})
    assert setup.prefill.only.json.keys() == {"messages", "stream", "max_tokens", "kv_transfer_params"}
    assert setup.decode.only.json == {"messages": [], "kv_transfer_params": PARAMS}


async def test_both_engines_get_the_same_request_id_and_the_clients_authorization(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        await setup.proxy.complete(headers={"Authorization": "Bearer key", "X-Request-Id": "mine", "Connection": "x"})
        await setup.proxy.complete()
        await setup.proxy.complete()
    seen = [[asked.headers["X-Request-Id"] for asked in each.asked] for each in (setup.prefill, setup.decode)]
    assert seen[0] == seen[1]
    assert seen[0][0] == "mine"
    assert len(set(seen[0])) == 3
    for each in (setup.prefill, setup.decode):
        assert each.asked[0].headers["Authorization"] == "Bearer key"
        assert "Authorization" not in each.asked[1].headers
        assert each.asked[0].headers["Content-Type"] == "application/json"
        assert each.asked[0].headers["Host"] == each.url.removeprefix("http://")


async def test_a_list_of_prompts_is_decoded_without_what_was_answered_of_its_first(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        for prompt in (["a", "b"], [[1, 2], [3]], ["a"], [1, 2]):
            await setup.proxy.complete(json={"prompt": prompt})
    assert ["kv_transfer_params" in asked.json for asked in setup.decode.asked] == [False, False, True, True]
    assert len(setup.prefill.asked) == 4


async def test_a_prompt_that_the_prefill_engine_has_nothing_of_is_decoded_without_params(tmp_path: Path) -> None:
    async def short(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"kv_transfer_params": None})

    async with apart(tmp_path, short) as setup:
        assert (await setup.proxy.complete())[0] == 200
    assert "kv_transfer_params" not in setup.decode.only.json
    assert setup.proxy.lines == []


async def test_at_once_a_decode_engine_is_asked_while_a_prefill_engine_computes(tmp_path: Path) -> None:
    decodes = asyncio.Event()

    async def computing(request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(decodes.wait(), WAIT_S)
        return await prefilled(request)

    async def waiting(request: web.Request) -> web.StreamResponse:
        decodes.set()
        return await generated(request)

    async with apart(tmp_path, computing, waiting, "--at-once") as setup:
        assert await setup.proxy.complete() == (200, {"choices": [{"text": "abc"}]})
        assert setup.proxy.lines == []
    assert setup.prefill.only.json["kv_transfer_params"]["do_remote_decode"]
    assert setup.decode.only.json["kv_transfer_params"] == {"do_remote_prefill": True, "do_remote_decode": False}
    assert setup.decode.only.headers["X-Request-Id"] == setup.prefill.only.headers["X-Request-Id"]


async def test_at_once_a_list_of_prompts_and_a_prompt_of_which_there_is_nothing_are_asked_one_after_the_other(
    tmp_path: Path,
) -> None:
    async with apart(tmp_path, prefilled, generated, "--at-once") as setup:
        assert (await setup.proxy.complete(json={"prompt": ["a", "b"]}))[0] == 200
        assert "kv_transfer_params" not in setup.decode.only.json
    with unreachable() as url:
        async with engine(generated) as d, proxying([url], [d.url], tmp_path / "log", "--at-once") as proxy:
            assert (await proxy.complete())[0] == 200
        assert "kv_transfer_params" not in d.only.json, "it would wait for what no engine computes"


async def test_at_once_a_prefill_engine_is_let_go_when_the_decode_engine_has_answered(tmp_path: Path) -> None:
    async with apart(tmp_path, silent, generated, "--at-once") as setup:
        assert (await setup.proxy.complete())[0] == 200
        await asyncio.wait_for(setup.prefill.ended.wait(), WAIT_S)
        assert setup.proxy.lines == []


async def test_engines_take_turns(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        p = [await stack.enter_async_context(engine(prefilled)) for _ in range(2)]
        d = [await stack.enter_async_context(engine(generated)) for _ in range(3)]
        addresses = [each.url for each in p], [each.url for each in d], tmp_path / "log"
        proxy = await stack.enter_async_context(proxying(*addresses))
        for _ in range(6):
            await proxy.complete()
        assert [len(each.asked) for each in p] == [3, 3]
        assert [len(each.asked) for each in d] == [2, 2, 2]


async def test_other_paths_go_to_a_decode_engine_as_they_are(tmp_path: Path) -> None:
    async def named(request: web.Request) -> web.StreamResponse:
        headers = {"X-Model": "tiny", "Connection": "X-Hop", "X-Hop": "here"}
        return web.Response(status=418, body=b"" if request.method == "HEAD" else b"\x00\xff", headers=headers)

    async with apart(tmp_path, decode=named) as setup:
        for method, target, data in [
            ("GET", "/v1/models?a=1&b=%2F%20", b""),
            ("POST", "/tokenize", b"not { json"),
            ("GET", COMPLETIONS, b""),
            ("DELETE", "//v1/files/a%2Fb", b""),
        ]:
            url = URL(setup.proxy.url + target, encoded=True)
            async with setup.proxy._client.request(method, url, data=data, headers={"X-Own": "1"}) as answer:
                assert (answer.status, await answer.read(), answer.headers["X-Model"]) == (418, b"\x00\xff", "tiny")
                assert "X-Hop" not in answer.headers
            asked = setup.decode.asked[-1]
            assert (asked.method, asked.target, asked.body) == (method, target, data)
            assert asked.headers["X-Own"] == "1"
        async with setup.proxy.ask("/health", "HEAD") as answer:
            assert (answer.status, await answer.read()) == (418, b"")
    assert setup.prefill.asked == []


async def test_an_engine_that_sends_a_client_to_another_of_its_paths_sends_it_to_the_proxy(tmp_path: Path) -> None:
    async def redirecting(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/"):  # as vLLM's does, by the Host that it was asked for
            raise web.HTTPTemporaryRedirect(f"http://{request.host}{request.path[:-1]}?a=1")
        if request.path == "/elsewhere":
            raise web.HTTPTemporaryRedirect("http://example.invalid/x")
        return await generated(request)

    async with apart(tmp_path, decode=redirecting) as setup:
        async with setup.proxy.ask("/v1/models/", "GET") as answer:
            assert (answer.status, str(answer.url)) == (200, f"{setup.proxy.url}/v1/models?a=1")
        async with setup.proxy.ask("/elsewhere", "GET", allow_redirects=False) as answer:
            assert answer.headers["Location"] == "http://example.invalid/x"
    assert [asked.target for asked in setup.decode.asked] == ["/v1/models/", "/v1/models?a=1", "/elsewhere"]


async def test_an_answer_that_is_compressed_is_passed_on_so(tmp_path: Path) -> None:
    async def compressed(request: web.Request) -> web.StreamResponse:
        answer = web.Response(body=b"abc" * 1000)
        answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async with apart(tmp_path, decode=compressed) as setup, setup.proxy.ask() as answer:
        assert await answer.read() == b"abc" * 1000
        assert answer.headers["Content-Encoding"] == "gzip"
    assert setup.prefill.only.headers["Accept-Encoding"] == "identity"


async def test_a_cookie_that_an_engine_sets_for_one_client_does_not_come_with_the_next_ones_request(
    tmp_path: Path,
) -> None:
    async def setting(_request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Set-Cookie": "session=first; Path=/"})

    async with engine(prefilled) as p, engine(setting) as d:
        by_name = d.url.replace("127.0.0.1", "localhost")  # of a mere address no cookie is kept anyway
        async with proxying([p.url], [by_name], tmp_path / "log") as proxy:
            get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n%b\r\n"
            assert b"Set-Cookie: session=first" in await exchanged(proxy.url, get % b"")
            await exchanged(proxy.url, get % b"")
            await exchanged(proxy.url, get % b"Cookie: session=mine\r\n")
    assert [asked.headers.get("Cookie") for asked in d.asked] == [None, None, "session=mine"]


async def test_no_header_is_made_up_that_a_client_has_not_sent(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        for path in (b"/tokenize", COMPLETIONS.encode()):
            sent = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}" % path
            assert b" 200 " in await exchanged(setup.proxy.url, sent)
    asked = [each.headers.keys() - {"Host", "Content-Length", "Connection"} for each in setup.decode.asked]
    assert asked == [set(), {"Content-Type", "X-Request-ID"}]
    assert "User-Agent" not in setup.prefill.only.headers


async def test_events_are_passed_on_one_by_one_as_they_come(tmp_path: Path) -> None:
    got = asyncio.Event()

    async def streaming(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for at in range(3):
            await answer.write(b"data: %d\n\n" % at)
            await asyncio.wait_for(got.wait(), WAIT_S)  # no event comes before the client has the one before
            got.clear()
        return answer

    async with apart(tmp_path, decode=streaming) as setup, setup.proxy.ask(json={"stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for at in range(3):
            assert await answer.content.readany() == b"data: %d\n\n" % at
            got.set()
        assert await answer.content.read() == b""


async def test_an_answer_of_unknown_length_ends_for_a_client_of_http_1_0_that_would_keep_the_connection(
    tmp_path: Path,
) -> None:
    async def streaming(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        return answer

    async with apart(tmp_path, decode=streaming) as setup:
        sent = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}" % COMPLETIONS.encode()
        answer = await exchanged(setup.proxy.url, sent, until_end=True)
        assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\ndata: 1\n\n")


# -- engines that fail


@pytest.mark.parametrize("fault", [broken, hanging_up, unreadable, too_deep])
async def test_a_prompt_that_a_prefill_engine_loses_is_computed_by_the_decode_engine(
    fault: Handler, tmp_path: Path
) -> None:
    async with apart(tmp_path, fault) as setup:
        for _ in range(3):
            assert await setup.proxy.complete() == (200, {"choices": [{"text": "abc"}]})
        (line,) = setup.proxy.lines
        assert f"WARNING prefill engine {setup.prefill.url} fails: " in line
        assert all("kv_transfer_params" not in asked.json for asked in setup.decode.asked)
        assert len(setup.prefill.asked) == 1, "an engine that has failed rests"


async def test_a_prefill_engine_that_says_nothing_is_waited_for_no_longer_than_is_told(tmp_path: Path) -> None:
    async with apart(tmp_path, silent, generated, "--prefill-timeout", "0.2") as setup:
        assert (await setup.proxy.complete())[0] == 200
        assert "it has not answered in 0.2 s" in setup.proxy.lines[0]
        await asyncio.wait_for(setup.prefill.ended.wait(), WAIT_S)


async def test_a_prefill_engine_that_comes_back_is_asked_again_and_said_to_answer(tmp_path: Path) -> None:
    with bound() as held:
        async with engine(generated) as d, proxying([url_of(held)], [d.url], tmp_path / "log") as proxy:
            assert (await proxy.complete())[0] == 200
            assert len(proxy.lines) == 1
            async with engine(prefilled, held) as p, asyncio.timeout(WAIT_S):
                while "kv_transfer_params" not in d.asked[-1].json:
                    assert (await proxy.complete())[0] == 200
                assert p.only.target == COMPLETIONS
            assert f"prefill engine {p.url} answers again" in proxy.lines[-1]
            assert len(proxy.lines) == 2


async def test_the_next_prefill_engine_is_taken_where_one_cannot_be_reached(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        url = stack.enter_context(unreachable())
        p, d = [await stack.enter_async_context(engine(answers)) for answers in (prefilled, generated)]
        proxy = await stack.enter_async_context(proxying([url, p.url], [d.url], tmp_path / "log"))
        for _ in range(4):
            assert (await proxy.complete())[0] == 200
        assert len(p.asked) == 4
        assert [asked.json["kv_transfer_params"] for asked in d.asked] == [PARAMS] * 4
        assert len(proxy.lines) == 1


async def test_a_prefill_engines_refusal_is_the_clients_answer(tmp_path: Path) -> None:
    refusal = {"error": {"message": "this model has 2048 tokens", "type": "BadRequestError", "code": 400}}

    async def refusing(_request: web.Request) -> web.StreamResponse:
        return web.json_response(refusal, status=400, headers={"Retry-After": "7", "Connection": "close"})

    async with apart(tmp_path, refusing) as setup:
        async with setup.proxy.ask() as answer:
            assert (answer.headers["Retry-After"], "Connection" in answer.headers) == ("7", False)
        assert await setup.proxy.complete() == (400, refusal)
        assert await setup.proxy.complete() == (400, refusal)
    assert setup.decode.asked == []
    assert len(setup.prefill.asked) == 3
    assert setup.proxy.lines == []


async def test_the_next_decode_engine_is_taken_where_one_cannot_be_reached(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        url = stack.enter_context(unreachable())
        p, d = [await stack.enter_async_context(engine(answers)) for answers in (prefilled, generated)]
        proxy = await stack.enter_async_context(proxying([p.url], [url, d.url], tmp_path / "log"))
        for _ in range(4):
            assert (await proxy.complete())[0] == 200
        assert len(d.asked) == 4
        assert len(p.asked) == 4, "what is prefilled is prefilled once"
        assert len(proxy.lines) == 1


async def test_without_any_decode_engine_the_answer_is_502_in_openais_form(tmp_path: Path) -> None:
    with unreachable() as url, unreachable() as other:
        async with engine(prefilled) as p, proxying([p.url], [url, other], tmp_path / "log") as proxy:
            for path, method in ((COMPLETIONS, "POST"), ("/v1/models", "GET"), (CHAT, "POST")):
                status, answer = await proxy.complete(path, method=method)
                assert (status, answer["error"]["code"], answer["error"]["type"]) == (502, 502, "BadGatewayError")
                assert url in answer["error"]["message"]
                assert f"{other}: Connection refused" in answer["error"]["message"]
            assert len(proxy.lines) == 2


async def test_a_long_prompt_that_holds_up_the_router_fails_no_other_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router, "CONNECT_S_MAX", 0.1)
    async with engine(prefilled) as p, engine(generated) as d:
        runner = web.AppRunner(router.Router([p.url], [d.url], WAIT_S).application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            tokens = io.BytesIO(b'{"prompt": [1' + b",1" * 5_000_000 + b"]}")
            long = asyncio.create_task(client.post(url + COMPLETIONS, data=tokens).__aenter__())
            others: list[int] = []

            async def ask() -> None:
                while not long.done():
                    async with client.get(url + "/health") as answer:
                        others.append(answer.status)

            await asyncio.gather(*(ask() for _ in range(20)))
            assert long.result().status == 200
            long.result().close()
        await runner.cleanup()
    assert set(others) == {200}
    assert "fails" not in caplog.text


async def test_a_decode_engines_own_error_is_the_clients_answer(tmp_path: Path) -> None:
    async with apart(tmp_path, decode=broken) as setup, setup.proxy.ask() as answer:
        assert (answer.status, await answer.text()) == (500, "out of memory")


async def test_a_decode_engine_that_hangs_up_before_its_answer_is_502(tmp_path: Path) -> None:
    async with apart(tmp_path, decode=hanging_up) as setup:
        status, answer = await setup.proxy.complete()
        assert (status, answer["error"]["code"]) == (502, 502)
        assert len(setup.decode.asked) == 1, "another engine may not live through this prompt either"


async def test_an_answer_that_breaks_off_breaks_off_for_the_client(tmp_path: Path) -> None:
    async def dying(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        return await hanging_up(request)

    async with apart(tmp_path, decode=dying) as setup, setup.proxy.ask() as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        assert "hung up in the middle of an answer" in setup.proxy.lines[0]


# -- clients that go, and clients that are hostile


@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_client_that_hangs_up_ends_what_is_under_way(at: str, tmp_path: Path) -> None:
    handlers = {"prefill": prefilled, "decode": generated} | {at: silent}
    async with apart(tmp_path, **handlers) as setup:
        waits = {"prefill": setup.prefill, "decode": setup.decode}[at]
        asking = asyncio.ensure_future(setup.proxy.complete())
        await asyncio.wait_for(waits.came.wait(), WAIT_S)
        asking.cancel()
        await asyncio.wait_for(waits.ended.wait(), WAIT_S)
        assert setup.proxy.lines == [], "the engine has not failed"
    assert len(setup.decode.asked) == (at == "decode")


async def test_a_client_that_hangs_up_amid_an_answer_ends_it(tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"data: 1\n\n" * 1000)

    async with apart(tmp_path, decode=endless) as setup:
        async with setup.proxy.ask() as answer:
            await answer.content.readany()
        await asyncio.wait_for(setup.decode.ended.wait(), WAIT_S)
        assert setup.proxy.lines == []


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 1_000_000, b'{"n":' + b"9" * 10_000 + b"}"]
)
async def test_a_completion_that_is_no_json_object_is_refused_and_no_engine_is_asked(
    data: bytes, tmp_path: Path
) -> None:
    async with apart(tmp_path) as setup:
        status, answer = await setup.proxy.complete(data=data)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
        assert (await setup.proxy.complete())[0] == 200
    assert len(setup.prefill.asked) == len(setup.decode.asked) == 1


async def exchanged(url: str, sent: bytes, *, until_end: bool = False) -> bytes:
    """What the proxy says to bytes, at once or until it hangs up."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(-1 if until_end else 65536), WAIT_S)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_request_has_a_size_that_it_may_not_exceed_whether_it_tells_it_or_not(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(BODY_BYTES_MAX // 2**20 + 1):
            yield bytes(2**20)

    async with apart(tmp_path) as setup:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n".encode()
        assert b" 413 " in (await exchanged(setup.proxy.url, head)).splitlines()[0]
        status, answer = await setup.proxy.complete(data=pieces())
        assert (status, answer["error"]["code"]) == (413, 413)
        assert (await setup.proxy.complete("/v1/other", data=io.BytesIO(bytes(BODY_BYTES_MAX - 1))))[0] == 200
    assert setup.prefill.asked == []
    assert len(setup.decode.only.body) == BODY_BYTES_MAX - 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nExpect: \xff\r\n\r\n",
    ],
)
async def test_what_is_no_request_for_an_engine_is_refused_and_the_next_client_is_served(
    sent: bytes, tmp_path: Path
) -> None:
    async with apart(tmp_path) as setup:
        answer = await exchanged(setup.proxy.url, sent)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        assert setup.decode.asked == []
        assert (await setup.proxy.complete())[0] == 200


async def test_a_client_that_waits_to_be_told_so_sends_its_body(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        host, _, port = setup.proxy.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), WAIT_S) == b"HTTP/1.1 100 Continue\r\n"
        assert await reader.readline() == b"\r\n"
        writer.write(b"{}")
        assert await asyncio.wait_for(reader.readline(), WAIT_S) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await writer.wait_closed()
    assert (setup.decode.only.body, "Expect" in setup.decode.only.headers) == (b"{}", False)


async def test_only_the_path_of_a_target_counts_whatever_host_it_names(tmp_path: Path) -> None:
    async with apart(tmp_path) as setup:
        sent = b"GET http://example.org:1/v1/models HTTP/1.1\r\nHost: example.org:1\r\nX-Odd: \xff\r\n\r\n"
        assert b" 200 " in (await exchanged(setup.proxy.url, sent)).splitlines()[0]
    assert setup.decode.only.target == "/v1/models"
    assert setup.decode.only.headers["Host"] == setup.decode.url.removeprefix("http://")


# -- its process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_a_request_under_way_come_to_its_end(number: signal.Signals, tmp_path: Path) -> None:
    may_end = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await may_end.wait()
        return await generated(request)

    async with apart(tmp_path, decode=slow) as setup:
        asking = asyncio.ensure_future(setup.proxy.complete())
        await asyncio.wait_for(setup.decode.came.wait(), WAIT_S)
        host, _, port = setup.proxy.url.removeprefix("http://").partition(":")
        setup.proxy.process.send_signal(number)
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionRefusedError, ConnectionResetError):  # one that waits when the listener closes
                while True:  # until the signal has come
                    socket.create_connection((host, int(port))).close()
                    await asyncio.sleep(0)
        may_end.set()
        assert (await asking)[0] == 200
        assert await asyncio.to_thread(setup.proxy.process.wait, WAIT_S) == 0


def test_an_address_that_is_taken_is_told_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [sys.executable, "-m", "kvredis", "proxy", "--prefill", "a:1", "--decode", "b:1",
             "--port", str(taken.getsockname()[1])],
            cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("kvredis: cannot listen: ")
    assert done.stdout == ""


NO_ADDRESSES = ("8100", "http://10.0.0:1", "d..x:1", "d" * 64 + ":1", "http://d\\x:1", "d x:1", "http://.:1")


@pytest.mark.parametrize(
    "words",
    [
        ("--prefill", "http://p:1"),
        ("--decode", "http://d:1"),
        ("--prefill", "ftp://p:1", "--decode", "d:1"),
        ("--prefill", "http://:1", "--decode", "d:1"),
        ("--prefill", "p:x", "--decode", "d:1"),
        ("--prefill", "p:1", "--decode", "http://me:secret@d:1"),
        ("--prefill", "p:1?x=1", "--decode", "d:1"),
        ("--prefill", "p:1", "--prefill", "http://p:1/", "--decode", "d:1"),
        ("--prefill", "p:1", "--decode", "d:1", "--port", "70000"),
        ("--prefill", "p:1", "--decode", "d:1", "--prefill-timeout", "0"),
        ("--prefill", "p:1", "--decode", "d:1", "--host", "192.0.2.1", "--prefill-timeout", "inf"),
        ("--prefill", "p:1", "--decode", "d:1", "--host", "192.0.2.1", "--prefill-timeout", "nan"),
        *(("--prefill", "p:1", "--decode", address, "--host", "192.0.2.1") for address in NO_ADDRESSES),
    ],
)
def test_what_is_no_address_or_no_time_is_bad_usage(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["proxy", *words])
    assert result.exit_code == 2
    assert "secret" not in result.output
