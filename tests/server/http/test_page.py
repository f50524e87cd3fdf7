"""The page's paths over HTTP: what they answer and refuse, what the browser is told to keep it to, and that they only
read. How the page looks and works is tried in a browser: tests/browser."""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Callable, Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.http.page import page
from kvredis.server.http.page.page import PREFIX_CHARS_MAX, load_page
from kvredis.storage.index import BUCKETS
from tests.server.http.http_client import HttpClient, ask, basic, connect
from tests.server.live import LiveServer, run_on

PATHS = ("/", "/api/state", "/api/arena", "/api/arena?from=0&to=4096", "/api/keys?prefix=k")
Story = Callable[[LiveServer, HttpClient], Coroutine[Any, Any, None]]


def serving(folder: Path, story: Story, loop: str = "uvloop", **options: Any) -> None:
    """Run a story against a server with a metrics port, and one HTTP connection to it."""

    async def whole() -> None:
        async with LiveServer(folder, metrics_port=-1, **options) as live:
            client = await connect(live)
            try:
                await story(live, client)
            finally:
                client.close()

    run_on(loop, whole())


async def told(client: HttpClient, path: str) -> Any:
    """A JSON answer."""
    answer = await client.ask(path)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), answer
    return json.loads(answer.body)


def test_every_path_answers(loop: str, tmp_path: Path) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        redis = await live.connect()
        assert await redis.ask("SET", "k<1>", bytes(40_000)) == b"+OK\r\n"
        assert await redis.ask("SET", "small", "x") == b"+OK\r\n"
        assert b"<title>kvredis</title>" in (await client.ask("/")).body
        state = await told(client, "/api/state")
        assert state["server"]["run_id"] == live.server.run_id
        assert [lane["lane"] for lane in state["lanes"]] == ["TCP", "unix socket"]
        assert state["lanes"][1]["in"] > 40_000
        assert state["clients"] == 1
        assert state["trouble"] is None
        assert state["tiers"]["memory"]["entries"] == 2
        arena = await told(client, "/api/arena")
        assert arena["blocks"] == {"arena": 1, "beside": 1, "disk": 0}
        here = await told(client, "/api/arena?from=0&to=4096")
        assert [block["key"] for block in here["blocks"]] == ["k<1>"]
        keys = await told(client, "/api/keys?prefix=k%3C")
        assert [block["key"] for block in keys["keys"]] == ["k<1>"]
        assert keys["cursor"] == 0

    serving(tmp_path, story, loop)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("keys?cursor=x", "cursor"),
        ("keys?cursor=-1", "cursor"),
        (f"keys?cursor={BUCKETS}", "cursor"),
        ("keys?db=16", "db"),
        ("keys?db=%D9%A3", "db"),
        ("keys?cursor=" + "9" * 30, "cursor"),
        ("keys?prefix=" + "k" * (PREFIX_CHARS_MAX + 1), "prefix"),
        ("arena?from=0&to=99999999999999", "to"),
        ("arena?from=1.5", "from"),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_what_is_wrong(tmp_path: Path, query: str, named: str) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        answer = await client.ask("/api/" + query)
        assert answer.status == 400
        assert answer.body.decode().startswith(named)

    serving(tmp_path, story)


def test_a_piece_that_ends_before_it_begins_holds_nothing(tmp_path: Path) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        live.store.put(b"k", bytes(40_000))
        assert (await told(client, "/api/arena?from=8192&to=4096"))["count"] == 0
        assert (await told(client, "/api/arena?from=0"))["count"] == 0

    serving(tmp_path, story)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_behind_the_password(tmp_path: Path, path: str) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        refused = await client.ask(path)
        assert refused.status == 401
        assert "basic" in refused.headers["www-authenticate"].lower()
        assert (await client.ask(path, basic("", "wrong"))).status == 401
        assert (await client.ask(path, basic("", "secret"))).status == 200

    serving(tmp_path, story, requirepass="secret")


@pytest.mark.parametrize("lacks", ["-scan", "-slowlog", "-kv.meta", "-info", "resetkeys ~mine:*"])
def test_a_user_sees_it_who_may_do_by_command_what_it_shows(tmp_path: Path, lacks: str) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        redis = await live.connect()
        assert await redis.ask("ACL", "SETUSER", "watcher", "on", ">pw", "~*", "+@all") == b"+OK\r\n"
        assert (await client.ask("/api/keys", basic("watcher", "pw"))).status == 200
        assert await redis.ask("ACL", "SETUSER", "watcher", *lacks.split()) == b"+OK\r\n"
        assert (await client.ask("/api/keys", basic("watcher", "pw"))).status == 403

    serving(tmp_path, story)


def test_no_path_uses_what_it_shows(tmp_path: Path) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        for number in range(30):
            live.store.put(b"k%d" % number, bytes(20_000))

        def traces() -> list[object]:
            used = [(entry.key, entry.hits, entry.accessed_s, entry.affirmed_turn) for entry in live.store.index]
            order = [entry.key for entry in live.store.policy.victims()]
            return [used, order, live.store.stats.as_dict(), live.server.stats.commands_processed]

        before = traces()
        for path in PATHS:
            assert (await client.ask(path)).status == 200
        assert traces() == before
        assert live.store.leases == 0

    serving(tmp_path, story)


def test_clients_are_served_while_the_page_is_made(tmp_path: Path) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        for number in range(3000):
            live.store.put(b"k%d" % number, b"x")
        redis = await live.connect()
        answers = asyncio.gather(client.ask("/api/arena"), redis.ask("GET", "nothing"))
        arena, reply = await answers
        assert (arena.status, reply) == (200, b"$-1\r\n")

    serving(tmp_path, story, "asyncio")


def test_however_many_ask_one_walk_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walking, most = 0, 0

    async def walk(*_asked: object) -> dict[str, object]:
        nonlocal walking, most
        walking += 1
        most = max(most, walking)
        for _ in range(100):
            await asyncio.sleep(0)
        walking -= 1
        return {}

    monkeypatch.setattr(page, "search", walk)
    monkeypatch.setattr(page, "blocks_between", walk)

    async def story(live: LiveServer, client: HttpClient) -> None:
        paths = ["/api/keys", "/api/arena?from=0&to=4096"] * 3
        answers = await asyncio.gather(*(ask(live, path) for path in paths))
        assert [answer.status for answer in answers] == [200] * 6
        assert most == 1

    serving(tmp_path, story)


# ---- what the browser is told ----------------------------------------------------------------------------------------


def test_the_browser_runs_what_the_file_holds_and_nothing_else(tmp_path: Path) -> None:
    async def story(live: LiveServer, client: HttpClient) -> None:
        answer = await client.ask("/")
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["connect-src"] == "'self'"
        for kind in ("script", "style"):
            (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.body.decode(), re.DOTALL)
            assert policy[f"{kind}-src"] == f"'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"

    serving(tmp_path, story)


def test_the_page_is_one_file_that_fetches_nothing_from_elsewhere() -> None:
    text = load_page()[0].decode()
    assert re.findall(r"""https?://[^\s'"]+""", text) == ["http://www.w3.org/2000/svg"] * text.count("w3.org")
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=[\"'](?!data:)", text)
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_puts_what_it_is_told_into_text_alone() -> None:
    text = load_page()[0].decode()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in text
    assert not re.search(r"<[^>]+\son[a-z]+=", text), "an event handler in an attribute"
    assert not re.search(r"<[^>]+\sstyle=", text), "a style that the policy does not allow"


def test_a_server_without_a_metrics_port_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "load_page", lambda: pytest.fail("nobody can see it"))

    async def story() -> None:
        async with LiveServer(tmp_path) as live:
            assert live.server.http is None

    run_on("uvloop", story())
