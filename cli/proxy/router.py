"""The router between clients and engines: which engine a request goes to, and what becomes of it when that fails.

A prefill engine makes a request faster, and a request is never lost with one: what it does not do the decode engine
does. A decode engine is needed, and what a client has begun to get from one ends with it.

Each request has connections of its own. An engine that hangs up has then ended, and is not one that has closed a
connection it took for idle; and to close them is how vLLM is told that a client has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import resource
import signal
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

import aiohttp
import click
from aiohttp import web
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from kvredis.cli.config import EVENT_LOOP_VARIABLE
from kvredis.cli.serve import event_loop_factory
from kvredis.storage.errors import KVRedisError

log = logging.getLogger(__name__)

COMPLETIONS: Final = ("/v1/completions", "/v1/chat/completions")
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of a request: pictures come within it."""
CONNECT_S_MAX: Final = 2.0
LATE: Final = 1.05
"""Of that. When it is noticed so late that it is over, this process did something else: it has read a prompt of tens of
megabytes, during which nothing else runs, or has not run at all. That says nothing of an engine."""
TRIES_MAX: Final = 3
REST_S: Final = 1.0
"""So long an engine that has failed is not asked; each time that it fails again twice as long."""
REST_S_MAX: Final = 30.0
DRAIN_S_MAX: Final = 30.0
"""So long requests under way have when the router ends."""
FOR_OTHERS: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's connectors are told of a request whose KV is for another engine."""
COMING: Final = {"do_remote_prefill": True, "do_remote_decode": False}
"""What a decode engine is told of a prompt that a prefill engine computes meanwhile: it waits for its KV."""
BEGINS_S: Final = 0.02
"""Within this a prefill engine that cannot be reached, or that refuses a request, has said so; one that works has told
the server what it computes."""
LEFT_OUT: Final = ("stream_options", "min_tokens", "min_completion_tokens")
"""Of what a prefill engine is asked: they do not go with one token that is not streamed."""
OF_A_CONNECTION: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "expect"}
)
"""Headers that are not passed on."""
OF_OUR_OWN: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add where a client has sent none: an engine would compress for one that did not ask."""
UNREACHABLE: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class Engine:
    """A vLLM server, and whether it is to be asked now."""

    def __init__(self, kind: str, url: str, without_it: str) -> None:
        self.kind, self.url = kind, url
        self._without_it = without_it
        self._rest_s = 0.0  # 0: the last request was answered
        self._rests_until_s = 0.0

    def may_be_asked(self) -> bool:
        """Whether its last request was answered, or it has rested. Then this request tries it, and others do not wait
        with this one: they come when it has answered, or after another rest."""
        if not self._rest_s:
            return True
        now_s = time.monotonic()
        if now_s < self._rests_until_s:
            return False
        self._rest_s = min(2 * self._rest_s, REST_S_MAX)
        self._rests_until_s = now_s + self._rest_s
        return True

    def failed(self, why: object) -> None:
        """Note that a request has failed by its fault."""
        if not self._rest_s:
            log.warning("%s engine %s fails: %s; until it answers again %s", self.kind, self.url, why, self._without_it)
            self._rest_s = REST_S
            self._rests_until_s = time.monotonic() + REST_S

    def answered(self) -> None:
        """Note that it works."""
        if self._rest_s:
            log.info("%s engine %s answers again", self.kind, self.url)
            self._rest_s = 0.0


class Pool:
    """Engines that take turns."""

    def __init__(self, kind: str, urls: Iterable[str], without_it: str) -> None:
        self._engines = [Engine(kind, url, without_it) for url in urls]

    def in_turn(self, *, also_resting: bool = False) -> Iterator[Engine]:
        """Those to ask for one request until one does it; at the end those that would rest, where they are the last
        hope."""
        resting = list(self._engines)
        for engine in self._engines[:]:
            if engine.may_be_asked():
                resting.remove(engine)
                self._engines.remove(engine)
                self._engines.append(engine)
                yield engine
        if also_resting:
            yield from resting


class Refused(Exception):
    """Holds the answer to a request that no engine gets, or that an engine has refused."""

    def __init__(self, answer: web.Response) -> None:
        super().__init__(answer.status)
        self.answer = answer


def failure(status: int, kind: str, text: str) -> web.Response:
    """An answer of the router's own, as OpenAI's and vLLM's errors look."""
    error = {"message": text, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


class Router:
    """The application. `start` and `close` run in the event loop that serves it."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], prefill_s_max: float, *, at_once: bool = False
    ) -> None:
        """With `at_once` a decode engine is asked while a prefill engine computes."""
        self._at_once = at_once
        self._prefill = Pool("prefill", prefill, "others compute its prompts")
        self._decode = Pool("decode", decode, "others generate in its place, if there are any")
        self._prefill_timeout = aiohttp.ClientTimeout(total=prefill_s_max, connect=CONNECT_S_MAX)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """What aiohttp serves."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.cleanup_ctx.append(self._connected)
        app.router.add_route("*", "/{path:.*}", self.answer, expect_handler=_expected)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request. A client that hangs up cancels this, which closes the connection to the engine."""
        try:
            if (request.content_length or 0) > BODY_BYTES_MAX:
                raise _too_large()
            try:
                data = await request.read()
            except web.HTTPRequestEntityTooLarge:
                raise _too_large() from None
            if request.method == "POST" and request.path in COMPLETIONS:
                return await self._complete(request, data)
            return await self._pass_on(request, _passed_on(request.headers), data)
        except Refused as refused:
            return refused.answer

    async def _connected(self, _app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S_MAX)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=OF_OUR_OWN,
            cookie_jar=aiohttp.DummyCookieJar(),  # what an engine tells one client to keep is not the next one's
        ) as self._session:
            yield

    @contextlib.asynccontextmanager
    async def _ask(
        self, engine: Engine, request: web.Request, data: bytes, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        # The target as the client wrote it, behind the engine's own address whatever host that target names.
        url = URL(engine.url + request.rel_url.raw_path_qs, encoded=True)
        for left in reversed(range(TRIES_MAX)):
            body = io.BytesIO(data) if data else None  # so it leaves in pieces, between which others have their turn
            began_s = time.monotonic()
            try:
                answer = await self._session.request(request.method, url, data=body, allow_redirects=False, **options)
                break
            except aiohttp.ConnectionTimeoutError:
                if not left or time.monotonic() - began_s < LATE * CONNECT_S_MAX:
                    raise
        async with answer:
            yield answer

    # -- a completion --------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request, data: bytes) -> web.StreamResponse:
        body = _object(data)
        body.pop("kv_transfer_params", None)  # they are a router's to say
        headers = _passed_on(request.headers)
        headers["Content-Type"] = "application/json"
        headers.setdefault("X-Request-Id", str(uuid.uuid4()))
        is_one = _is_one_prompt(body)
        prefilling = asyncio.create_task(self._prefilled(request, headers, body))
        try:
            await asyncio.wait({prefilling}, timeout=BEGINS_S if self._at_once and is_one else None)
            params = prefilling.result() if prefilling.done() else COMING
            if params is not None and is_one:
                body["kv_transfer_params"] = params
            return await self._pass_on(request, headers, json.dumps(body).encode())
        finally:  # a decode engine that has answered, or refused, needs no KV any more
            prefilling.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):
                await prefilling

    async def _prefilled(
        self, request: web.Request, headers: CIMultiDict[str], body: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Have a prompt computed, and return what a decode engine is told of it; None where no prefill engine has done
        that. Raises Refused with the answer of an engine that refuses the request."""
        asked = {name: value for name, value in body.items() if name not in LEFT_OUT}
        asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": FOR_OTHERS}
        asked |= {name: 1 for name in ("max_completion_tokens", "n") if name in body}
        data = json.dumps(asked).encode()
        plain = CIMultiDict(headers)
        plain["Accept-Encoding"] = "identity"
        for engine in self._prefill.in_turn():
            try:
                sent = self._ask(engine, request, data, headers=plain, timeout=self._prefill_timeout)
                async with sent as answer:
                    told = await answer.read()
                    if 400 <= answer.status < 500:
                        engine.answered()
                        raise Refused(web.Response(status=answer.status, body=told, headers=_passed_on(answer.headers)))
                    if answer.status != 200:
                        raise ValueError(f"it has answered {answer.status}")
                    params = json.loads(told).get("kv_transfer_params")
                    engine.answered()
                    return params if isinstance(params, dict) else None
            except UNREACHABLE as error:
                engine.failed(_why(error))
            except TimeoutError:
                engine.failed(f"it has not answered in {self._prefill_timeout.total:g} s")
                return None
            except (aiohttp.ClientError, AttributeError, ValueError, RecursionError) as error:
                engine.failed(_why(error))  # it has begun: another one may not fare better with this prompt
                return None
        return None

    # -- what a decode engine answers ----------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request, headers: CIMultiDict[str], data: bytes) -> web.StreamResponse:
        why = []
        for engine in self._decode.in_turn(also_resting=True):
            try:
                async with self._ask(engine, request, data, headers=headers) as answer:
                    return await self._stream(request, engine, answer)
            except UNREACHABLE as error:
                engine.failed(_why(error))
                why.append(f"{engine.url}: {_why(error)}")
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientResponseError) as error:
                engine.failed(_why(error))
                text = f"decode engine {engine.url} has not answered: {_why(error)}"
                raise Refused(failure(502, "BadGatewayError", text)) from error
        raise Refused(failure(502, "BadGatewayError", f"no decode engine can be reached: {'; '.join(why)}"))

    @staticmethod
    async def _stream(request: web.Request, engine: Engine, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on as it comes. Where the engine hangs up in its middle, so does the router."""
        engine.answered()
        passed = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed_on(answer.headers))
        location = passed.headers.get("Location", "")
        if location.startswith(f"{engine.url}/"):  # its own address, which a client may not reach, or have of its own
            passed.headers["Location"] = location.removeprefix(engine.url)
        if answer.content_length is not None:
            passed.content_length = answer.content_length
        elif request.version < aiohttp.HttpVersion11:
            passed.force_close()  # that alone tells this client where the answer ends
        await passed.prepare(request)
        while True:
            try:
                chunk = await answer.content.readany()
            except aiohttp.ClientError as error:
                engine.failed(f"it has hung up in the middle of an answer ({error})")
                raise ConnectionResetError("the engine has hung up") from error
            if not chunk:
                break
            await passed.write(chunk)
        await passed.write_eof()
        return passed


# ---- inside ------------------------------------------------------------------------------------------------------


async def _expected(request: web.Request) -> web.StreamResponse | None:
    """Tell a client that waits for it to send its body. aiohttp's own handler quotes what else a client expects, and
    fails where that is not UTF-8."""
    if request.version >= aiohttp.HttpVersion11:
        if request.headers["Expect"].lower() != "100-continue":
            return failure(417, "ExpectationFailedError", "nothing can be expected but 100-continue")
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    return None


def _too_large() -> Refused:
    text = f"a request has {BODY_BYTES_MAX} bytes at most"
    return Refused(failure(413, "RequestEntityTooLargeError", text))


def _why(error: Exception) -> str:
    """What has happened, in the system's words where it is the system that says so."""
    cause = getattr(error, "os_error", None)
    if cause is not None and (cause.errno or 0) > 0 and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno)
    return str(cause or error) or type(error).__name__


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises Refused."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(failure(400, "BadRequestError", f"the request is no JSON: {error}")) from None
    if not isinstance(body, dict):
        raise Refused(failure(400, "BadRequestError", "the request is JSON, but not an object"))
    return body


def _is_one_prompt(body: dict[str, Any]) -> bool:
    """Whether a request has no list of prompts: what an engine answers of such a list is of its first prompt."""
    prompt = body.get("prompt")
    return not (isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list))


def _passed_on(headers: Any) -> CIMultiDict[str]:
    """A copy of headers without those of one connection; how long a body is, and of whom, is said anew."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    left_out = OF_A_CONNECTION | named | {"host", "content-length"}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


# ---- a process -----------------------------------------------------------------------------------------------------


def run(
    prefill: Iterable[str], decode: Iterable[str], *, host: str, port: int, prefill_s_max: float, at_once: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT. Raises KVRedisError where the address cannot be had."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_is_not_the_clients)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each request has two connections
    router = Router(prefill, decode, prefill_s_max, at_once=at_once)
    with asyncio.Runner(loop_factory=event_loop_factory(os.environ.get(EVENT_LOOP_VARIABLE, ""))) as runner:
        runner.run(_serve(router, host, port))


def _is_not_the_clients(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs something else than that a client has gone, or does not speak HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError)


async def _serve(router: Router, host: str, port: int) -> None:
    """Serve until a signal. Then no request is taken, and those under way have DRAIN_S_MAX; a second one ends all."""
    wanted = asyncio.Event()
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        router.application(),
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=DRAIN_S_MAX,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise KVRedisError(f"cannot listen: {error}") from error
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, wanted.set)
        where = ", ".join(str(URL.build(scheme="http", host=each[0], port=each[1])) for each in runner.addresses)
        click.echo(f"Ready to accept connections on {where}")
        await wanted.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda *_: os._exit(1))
    finally:
        await runner.cleanup()
