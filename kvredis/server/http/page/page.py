"""The page at the metrics port's root, and the answers that it asks for: what one server holds and does, to look at.

The page is one file (page.html) that fetches nothing but these answers. Its policy (CSP) allows its own script and
style by their hashes and nothing else, so that a key that a client has named `<script>` could not run even if the page
ever took it for more than text. All of it only reads; who may see it is decided by auth.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final

from kvredis.server.context import Context
from kvredis.server.http.server import HttpError, HttpRequest, HttpResponse, Route
from kvredis.storage.index import BUCKETS, SPACES

from .facts import Told, blocks_between, meant, search, state
from .survey import Surveys

JSON: Final = "application/json"
HTML: Final = "text/html; charset=utf-8"
PREFIX_CHARS_MAX: Final = 4096
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def routes(server: Context) -> dict[str, tuple[Route, bool]]:
    """The page's paths, all behind the server's password. Reads the page's file."""
    surveys = Surveys(server.store)
    turn = asyncio.Lock()  # of one walk at a time: each takes a slice of every turn of the loop
    page = HttpResponse(200, *load_page())

    async def arena(request: HttpRequest) -> HttpResponse:
        if "from" not in request.query:
            return HttpResponse(200, await surveys.latest(), JSON)
        first = number(request.query, "from", server.store.arena.nbytes)
        past = number(request.query, "to", server.store.arena.nbytes)
        async with turn:
            return answer(await blocks_between(server.store, first, past))

    async def keys(request: HttpRequest) -> HttpResponse:
        prefix = request.query.get("prefix", "")
        if len(prefix) > PREFIX_CHARS_MAX:
            raise HttpError(400, f"prefix: at most {PREFIX_CHARS_MAX} characters")
        cursor = number(request.query, "cursor", BUCKETS - 1)
        space = number(request.query, "db", SPACES - 1)
        async with turn:
            return answer(await search(server.store, meant(prefix), cursor, space))

    answers: Mapping[str, Route] = {
        "/": lambda request: page,
        "/api/state": lambda request: answer(state(server)),
        "/api/arena": arena,
        "/api/keys": keys,
    }
    return {path: (route, True) for path, route in answers.items()}


def load_page() -> tuple[bytes, str, tuple[tuple[str, str], ...]]:
    """Body, type and headers of the page."""
    body = Path(__file__).with_name("page.html").read_bytes()
    allowed = {"script": "", "style": ""}
    for kind, text in _INLINE.findall(body.decode()):
        allowed[kind] += f" 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src{allowed['script']}; style-src{allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("X-Frame-Options", "DENY"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
    )
    return body, HTML, headers


def answer(told: Told) -> HttpResponse:
    """A JSON object, which no other site's page may load."""
    body = json.dumps(told, separators=(",", ":")).encode()
    return HttpResponse(200, body, JSON, (("Cross-Origin-Resource-Policy", "same-origin"),))


def number(query: Mapping[str, str], name: str, highest: int) -> int:
    """A number of the query, 0 where it is not named. HttpError 400 for what is none, or above `highest`."""
    text = query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= highest):
        raise HttpError(400, f"{name}: want a number from 0 to {highest}")
    return int(text)
