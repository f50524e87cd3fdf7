"""The HTTP server on metrics_port: small answers for monitoring systems, probes and the page, on the server's own loop.

h11 knows the protocol; here are the bounds on what a client may take of the server. A request's head has a bound in
bytes and in time, a body is refused, an answer that the client does not take is given up, and when all places are taken
the client that has been silent for longest loses its own. Requests of one connection are answered one after the other,
and while one is being answered nothing more is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import Final, cast
from urllib.parse import parse_qsl, urlsplit

import h11

from kvredis.server.net.listeners import Listeners, address_of
from kvredis.server.options import ServerOptions

log = logging.getLogger(__name__)

HEAD_BYTES_MAX: Final = 16 * 1024
HEAD_S: Final = 10.0
"""From a request's first byte, or from connecting, to the end of its head."""

IDLE_S: Final = 75.0
"""A connection is kept so long for the next request: longer than any usual scrape interval."""

ANSWER_S: Final = 20.0
"""What a route may take."""

SEND_S: Final = 30.0
"""A client that has not taken its answer by then is hung up on."""

LINGER_S: Final = 2.0
"""How long what a refused client still sends is read and dropped, or it would see a reset instead of the answer."""

CONNECTIONS_MAX: Final = 64
QUERY_FIELDS_MAX: Final = 32
METHODS: Final = ("GET", "HEAD")
TEXT: Final = "text/plain; charset=utf-8"

_REASONS: Final = {
    200: b"OK", 400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 413: b"Content Too Large", 431: b"Request Header Fields Too Large",
    500: b"Internal Server Error", 501: b"Not Implemented", 503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without a body. Names of headers are in lower case; of a query's equal names the last one counts."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What is answered; length, date and connection headers are added on the way out, and HEAD gets no body."""

    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


class HttpError(Exception):
    """A request that is not answered as it wished; `text` is for the person or log at the other end."""

    def __init__(self, status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Peer:
    """Both ends of a connection, as CLIENT LIST shows addresses."""

    addr: str
    laddr: str


Route = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]
"""Answers one path. May raise HttpError; whatever else it raises is a mistake of ours, logged, and 500."""

Routes = Mapping[str, tuple[Route, bool]]
"""By path: the function that answers, and whether auth.py is asked first (for a password, if the server has one)."""

Gate = Callable[[HttpRequest, Peer], None]
"""Raises HttpError for a client that may not see this path."""


def parsed(request: h11.Request) -> HttpRequest:
    """A request as routes see it. HttpError for what has no meaning here."""
    if request.http_version not in (b"1.1", b"1.0"):
        raise HttpError(505, "HTTP/1.1 is spoken here")
    if len(request.target) + sum(len(name) + len(value) for name, value in request.headers) > HEAD_BYTES_MAX:
        raise HttpError(431, "the head of the request is too long")  # h11 bounds only what comes in pieces
    method = request.method.decode("ascii")
    headers: dict[str, str] = {}
    for name, value in request.headers:
        known = headers.get(name.decode("ascii"))
        text = value.decode("latin-1")
        headers[name.decode("ascii")] = text if known is None else f"{known}, {text}"
    if method not in METHODS:
        raise HttpError(405, f"only {' and '.join(METHODS)} are answered", (("Allow", ", ".join(METHODS)),))
    if headers.get("transfer-encoding") or headers.get("content-length", "0").strip("0"):
        raise HttpError(413, "requests with a body are not taken")
    try:
        target = urlsplit(request.target.decode("ascii"))
        query = dict(parse_qsl(target.query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX))
    except ValueError as wrong:
        raise HttpError(400, f"the address of the request cannot be read: {wrong}") from None
    if not target.path.startswith("/") or target.scheme not in ("", "http", "https"):
        raise HttpError(400, "the address of the request has no path")
    return HttpRequest(method, target.path, query, headers)


class HttpServer:
    """Listens on options.metrics_port, on every address of `bind`; https where clients are served over TLS alone."""

    def __init__(self, options: ServerOptions, routes: Routes, gate: Gate) -> None:
        port = options.metrics_port
        self.encrypted = options.tls_port != 0 and options.port < 0
        self._routes = routes
        self._gate = gate
        self._connections: dict[Connection, None] = {}
        """In the order in which they have last been heard."""
        own = replace(
            options,
            port=-1 if self.encrypted else max(port, 0),
            tls_port=port if self.encrypted else 0,
            unixsocket=None,
        )
        self._listeners = Listeners(own, lambda: Connection(self), lambda: CONNECTIONS_MAX)

    def open(self) -> None:
        """Bind, on the running loop; OSError and ConfigError as of Listeners.open."""
        self._listeners.open()

    async def close(self) -> None:
        """Listen no more, let answers under way be sent for a moment, and hang up; may be called twice."""
        self._listeners.close()
        tasks = [each.task for each in self._connections if each.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LINGER_S)
        for each in list(self._connections):
            each.hang_up()

    @property
    def port(self) -> int:
        """The port, once it is open."""
        return self._listeners.tls_port if self.encrypted else self._listeners.tcp_port

    @property
    def urls(self) -> list[str]:
        """Where it is found, once it is open: http://127.0.0.1:9121/."""
        scheme = "https" if self.encrypted else "http"
        return [f"{scheme}://{address.removeprefix('tls:')}/" for address in self._listeners.addresses]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    def admit(self, connection: Connection) -> None:
        """Take a client in; when there is no place, the client that has been silent for longest loses its own."""
        if len(self._connections) >= CONNECTIONS_MAX:
            silent = next((each for each in self._connections if each.task is None), None)
            (silent or connection).hang_up()
        self._connections[connection] = None

    def heard(self, connection: Connection) -> None:
        """Note that a client has asked for something: it is the last to lose its place."""
        self._connections.pop(connection, None)
        self._connections[connection] = None

    def dismiss(self, connection: Connection) -> None:
        """Forget a client that has gone."""
        self._connections.pop(connection, None)

    async def answer(self, request: HttpRequest, peer: Peer) -> HttpResponse:
        """Find the route and have it answer; never raises but for being cancelled."""
        try:
            found = self._routes.get(request.path)
            if found is None:
                raise HttpError(404, "there is nothing of this name; try /, /metrics or /health")
            route, guarded = found
            if guarded:
                self._gate(request, peer)
            async with asyncio.timeout(ANSWER_S):
                made = route(request)
                return made if isinstance(made, HttpResponse) else await made
        except HttpError as refused:
            return told(refused)
        except TimeoutError:
            return told(HttpError(503, "this took too long"))
        except Exception:
            log.exception("GET %s failed", request.path)
            return told(HttpError(500, "internal error; the server's log says more"))


def told(refused: HttpError) -> HttpResponse:
    """The answer that an error is."""
    return HttpResponse(refused.status, f"{refused}\n".encode(), TEXT, refused.headers)


class Connection(asyncio.Protocol):
    """One HTTP client. `task` is the answer that is being made, None while the client has its turn."""

    def __init__(self, server: HttpServer) -> None:
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._peer = Peer("?", "?")
        self._request: HttpRequest | None = None
        self._bodiless = False  # HEAD is asked: whatever is answered, an error too, has no body
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._sending = False  # the transport holds a rest of an answer
        self._ended = False  # refused: what still comes is dropped

    # ---- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in a client that has connected."""
        self._transport = cast(asyncio.Transport, transport)
        # TLS transports pause at a buffer of `high` bytes, the others above it: with 0 they would never rest.
        self._transport.set_write_buffer_limits(high=int(self._server.encrypted))
        self._peer = Peer(
            address_of(transport.get_extra_info("peername")), address_of(transport.get_extra_info("sockname"))
        )
        self._limit(HEAD_S)
        self._server.admit(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of the one after it."""
        if self._ended:
            return
        if not self._in_head and self.task is None and not self._sending:
            self._in_head = True
            self._limit(HEAD_S)
            if not data[:1].isalpha():  # a client of another protocol would wait for an answer until it is hung up on
                self._refuse(HttpError(400, "this is not HTTP/1.1"))
                return
        self._http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        """The client sends no more; what it has asked is still answered."""
        if not self._ended:
            self._http.receive_data(b"")
            self._advance()
        half_open = self._transport is not None and self._transport.can_write_eof()
        return half_open and (self.task is not None or self._sending)

    def pause_writing(self) -> None:
        """Note that the client is slow to take its answer."""
        self._sending = True

    def resume_writing(self) -> None:
        """Go on, since the answer has left the process."""
        if self._sending:
            self._sending = False
            if self._ended:
                self._limit(LINGER_S)
            else:
                self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was being made for a client that has gone."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()
        self._server.dismiss(self)

    def hang_up(self) -> None:
        """Close without another word."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()

    # ---- requests in, answers out --------------------------------------------------------------------------------

    def _limit(self, seconds: float) -> None:
        """What comes next must have come in so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.hang_up)

    def _advance(self) -> None:
        """Take up events until a request is whole, bytes are missing or the connection has ended."""
        while self.task is None and not self._sending and not self._ended and self._transport is not None:
            try:
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._bodiless = event.method == b"HEAD"
                    self._request = parsed(event)
                elif isinstance(event, h11.Data):
                    raise HttpError(413, "requests with a body are not taken")
                elif isinstance(event, h11.EndOfMessage):
                    self._begin()
                elif isinstance(event, h11.ConnectionClosed):
                    self._end()
                else:
                    return  # NEED_DATA; or PAUSED, which `_next` ends
            except h11.RemoteProtocolError as broken:
                self._refuse(HttpError(broken.error_status_hint, f"this is not HTTP/1.1: {broken}"))
            except HttpError as refused:
                self._refuse(refused)

    def _begin(self) -> None:
        assert self._transport is not None
        assert self._request is not None
        self._transport.pause_reading()
        self._limit(ANSWER_S + SEND_S)
        self._in_head = False
        self._server.heard(self)
        request, self._request = self._request, None
        self.task = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: HttpRequest) -> None:
        response = await self._server.answer(request, self._peer)
        self.task = None
        if self._transport is None:
            return
        self._write(response)
        if not self._sending:
            self._next()

    def _next(self) -> None:
        """Go on behind an answer: to the next request, or to the end."""
        if self._transport is None:
            return
        if self._http.our_state is h11.IDLE:  # TLS has been busy with something else
            self._advance()
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._end()
            return
        self._http.start_next_cycle()
        self._bodiless = False
        self._limit(IDLE_S)
        if self._http.trailing_data[0]:
            self._in_head = True
            self._limit(HEAD_S)
        self._transport.resume_reading()
        self._advance()

    def _refuse(self, refused: HttpError) -> None:
        """Answer what was wrong and hang up."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write(told(refused), closing=True)
        self._end()

    def _end(self) -> None:
        """Say no more. What the client may still be sending is read for a moment."""
        self._ended = True
        if self._transport is None:
            return
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._limit(SEND_S if self._sending else LINGER_S)
        self._transport.resume_reading()

    def _write(self, response: HttpResponse, *, closing: bool = False) -> None:
        assert self._transport is not None
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
            *([("Connection", "close")] if closing else []),
        ]
        head = h11.Response(status_code=response.status, headers=headers, reason=_REASONS.get(response.status, b""))
        parts = [self._http.send(head)]
        if response.body and not self._bodiless:
            parts.append(self._http.send(h11.Data(data=response.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
