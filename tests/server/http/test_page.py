"""The page's paths over HTTP: what they answer and refuse, what the browser is told to keep it to, and that they only
read. How the page looks and works is tried in a browser: tests/browser."""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.commands.kv import tensor_facts
from kvredis.server.http.page import facts, page, slices, survey
from kvredis.server.http.page import facts as page_facts
from kvredis.server.http.page.facts import KEYS_WANTED, blocks_between, meant, search, shown, state, told_block
from kvredis.server.http.page.page import PREFIX_CHARS_MAX, load_page
from kvredis.server.http.page.survey import CELLS_MAX, KINDS, NO_KIND, Survey, Surveys, kind_of, prefix_of
from kvredis.server.server import Server
from kvredis.storage.expiry import Clock
from kvredis.storage.index import BUCKETS
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.commands.test_kv import KV, METADATA, block
from tests.server.fake_session import FakeSession
from tests.server.http.http_client import HttpClient, WebServer, ask, basic, connect
from tests.server.http.surveyed import CHUNK, MIB, entry_of, store, surveyed
from tests.server.live import LiveServer, run_on
from tests.server.tiered_server import TieredServer

PATHS = ("/", "/api/state", "/api/arena", "/api/arena?from=0&to=4096", "/api/keys?prefix=k")


async def told(client: HttpClient, path: str) -> Any:
    """A JSON answer."""
    answer = await client.ask(path)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), answer
    return json.loads(answer.body)


async def test_every_path_answers(loop: str, live: WebServer) -> None:
    client = await connect(live)
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
async def test_a_question_that_makes_no_sense_is_answered_with_what_is_wrong(
    query: str, named: str, live: WebServer
) -> None:
    client = await connect(live)
    answer = await client.ask("/api/" + query)
    assert answer.status == 400
    assert answer.body.decode().startswith(named)


async def test_a_piece_that_ends_before_it_begins_holds_nothing(live: WebServer) -> None:
    client = await connect(live)
    live.store.put(b"k", bytes(40_000))
    assert (await told(client, "/api/arena?from=8192&to=4096"))["count"] == 0
    assert (await told(client, "/api/arena?from=0"))["count"] == 0


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_is_behind_the_password(tmp_path: Path, path: str) -> None:
    async with WebServer(tmp_path, requirepass="secret") as live:
        client = await connect(live)
        refused = await client.ask(path)
        assert refused.status == 401
        assert "basic" in refused.headers["www-authenticate"].lower()
        assert (await client.ask(path, basic("", "wrong"))).status == 401
        assert (await client.ask(path, basic("", "secret"))).status == 200


@pytest.mark.parametrize("lacks", ["-scan", "-slowlog", "-kv.meta", "-info", "resetkeys ~mine:*"])
async def test_a_user_sees_it_who_may_do_by_command_what_it_shows(lacks: str, live: WebServer) -> None:
    client = await connect(live)
    redis = await live.connect()
    assert await redis.ask("ACL", "SETUSER", "watcher", "on", ">pw", "~*", "+@all") == b"+OK\r\n"
    assert (await client.ask("/api/keys", basic("watcher", "pw"))).status == 200
    assert await redis.ask("ACL", "SETUSER", "watcher", *lacks.split()) == b"+OK\r\n"
    assert (await client.ask("/api/keys", basic("watcher", "pw"))).status == 403


async def test_no_path_uses_what_it_shows(live: WebServer) -> None:
    client = await connect(live)
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


def test_clients_are_served_while_the_page_is_made(tmp_path: Path) -> None:
    async def story() -> None:
        async with WebServer(tmp_path) as live:
            client = await connect(live)
            for number in range(3000):
                live.store.put(b"k%d" % number, b"x")
            redis = await live.connect()
            arena, reply = await asyncio.gather(client.ask("/api/arena"), redis.ask("GET", "nothing"))
            assert (arena.status, reply) == (200, b"$-1\r\n")

    run_on("asyncio", story())


async def test_however_many_ask_one_walk_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch, live: WebServer) -> None:
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

    paths = ["/api/keys", "/api/arena?from=0&to=4096"] * 3
    answers = await asyncio.gather(*(ask(live, path) for path in paths))
    assert [answer.status for answer in answers] == [200] * 6
    assert most == 1


# ---- what the browser is told ----------------------------------------------------------------------------------------


async def test_the_browser_runs_what_the_file_holds_and_nothing_else(live: WebServer) -> None:
    client = await connect(live)
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


async def test_a_server_without_a_metrics_port_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "load_page", lambda: pytest.fail("no user can see it"))

    async with LiveServer(tmp_path) as live:
        assert live.server.http is None


# What the page is told of keys, blocks and the arena: true, bounded, escaped, in slices, and without being used.

__all__ = ["store"]


HOSTILE = [b"<script>alert(1)</script>", b"\x00\x1b[31m\r\n", bytes(range(256)), b"\\x41", b"\xe2\x80\xaeevil", b""]


# ---- bytes as text ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("raw", HOSTILE)
def test_bytes_are_shown_as_printable_ascii_that_means_the_same_bytes(raw: bytes) -> None:
    text = shown(raw)
    assert text.isascii()
    assert text.isprintable()
    assert meant(text) == raw


def test_what_was_never_shown_stands_for_itself() -> None:
    assert meant("Grüße \\q \\x4 \\") == "Grüße \\q \\x4 \\".encode()


def test_a_long_key_is_cut_and_says_how_long_it_is() -> None:
    assert shown(b"k" * 10_000) == "k" * 256 + "… (10,000 bytes)"
    assert shown(b"k" * 256) == "k" * 256


# ---- one block -------------------------------------------------------------------------------------------------------
def test_a_block_is_told_with_its_tensor_and_its_place(store: Store) -> None:
    value = block(KV, METADATA, 20_000)
    store.put(b"small", b"x")
    store.put(b"chunk", value, 3)
    told = told_block(store, entry_of(store, b"chunk", 3))
    assert {name: told[name] for name in ("key", "db", "dtype", "tokens", "nbytes", "tier", "saved")} == {
        "key": "chunk", "db": 3, "dtype": "BF16", "tokens": 256, "nbytes": len(value), "tier": "memory", "saved": False,
    }  # fmt: skip
    assert told["offset"] == entry_of(store, b"chunk", 3).extent.offset
    assert told["ends_in"] is None
    assert told_block(store, entry_of(store, b"small"))["offset"] is None
    assert store.expire(b"small", store.now_ms() + 5_500)
    assert told_block(store, entry_of(store, b"small"))["ends_in"] == 5


def test_blocks_of_our_own_tell_their_axes_and_their_checksum() -> None:
    facts = tensor_facts(memoryview(block(KV, {"axes": "layers,2,tokens,kv_heads,head_dim", "xxh3": "ab" * 8})))
    assert (facts["layout"], facts["checksum"]) == ("layers,2,tokens,kv_heads,head_dim", "ab" * 8)
    assert tensor_facts(memoryview(block(KV, {"axes": "a", **METADATA})))["layout"] == METADATA["layout"]


def test_a_header_that_tells_too_much_is_cut(store: Store) -> None:
    shape = [1] * 5000
    store.put(b"k", block({"kv": {"dtype": "B" * 9000, "shape": shape}}, {"model": "<b>" * 5000}, 20_000))
    told = told_block(store, entry_of(store, b"k"))
    assert len(json.dumps(told)) < 2000
    assert told["shape"] == shape[: page_facts.AXES_SHOWN]


def test_half_a_character_in_a_header_is_still_json(store: Store) -> None:
    store.put(b"k", block(KV, {"model": "\ud800"}, 20_000))
    assert json.loads(json.dumps(told_block(store, entry_of(store, b"k"))))["model"] == "\ud800"


def test_looking_does_not_make_a_block_leave_that_has_come_for_its_reader(tmp_path: Path) -> None:
    async def story() -> None:
        async with TieredServer(tmp_path) as live:
            client = await live.connect()
            live.put_away("a")
            await client.ask("PREFETCH", "a")
            await live.quiet()
            live.store.keep = False  # as between its arrival and the hold of who has sent for it
            assert live.tier("a") == "memory"
            assert told_block(live.store, entry_of(live.store, b"a"))["tier"] == "memory"
            await client.send("KV.META", "a")
            await client.read_line()
            assert live.tier("a") == "memory"
            live.store.keep = True

    run_on("asyncio", story())


# ---- search ----------------------------------------------------------------------------------------------------------
def test_a_search_finds_every_key_of_a_prefix_once_and_no_other(store: Store) -> None:
    wanted = {f"page:{number}" for number in range(700)}
    for key in wanted | {f"other:{number}" for number in range(700)}:
        store.put(key.encode(), b"x", 2)
    store.put(b"page:elsewhere", b"x", 0)

    async def story() -> tuple[list[str], int]:
        found: list[str] = []
        cursor = answers = 0
        while cursor or not answers:
            told: dict[str, Any] = await search(store, b"page:", cursor, 2)
            cursor, answers = told["cursor"], answers + 1
            found += [each["key"] for each in told["keys"]]
        return found, answers

    found, answers = asyncio.run(story())
    assert len(found) == len(wanted)
    assert set(found) == wanted
    assert 1 < answers <= 700 // KEYS_WANTED + 1


def test_a_search_by_what_was_shown_finds_the_key(store: Store) -> None:
    for key in HOSTILE[:-1]:
        store.put(key, b"x")
    for key in HOSTILE[:-1]:
        told: dict[str, Any] = asyncio.run(search(store, meant(shown(key))))
        assert [each["key"] for each in told["keys"]] == [shown(key)]


def test_a_search_gives_up_after_some_keys_and_says_where_to_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_facts, "KEYS_WALKED_MAX", 100)
    for number in range(1000):
        store.put(b"k%d" % number, b"x")
    told: dict[str, Any] = asyncio.run(search(store, b"nothing"))
    assert told["keys"] == []
    assert 100 <= told["walked"] < 200
    assert told["cursor"] > 0
    assert told["in_database"] == 1000


def test_an_expired_key_is_not_told_of_and_not_removed_by_looking(store: Store) -> None:
    store.put(b"gone", b"x" * 20_000)
    clock = store.now_ms
    store.expire(b"gone", clock() + 1000)
    store.now_ms = Clock(lambda: clock() + 1000)
    told: dict[str, Any] = asyncio.run(search(store, b""))
    assert told["keys"] == []
    assert surveyed(store)["blocks"]["arena"] == 0
    assert store.index.get(b"gone", 0) is not None
    assert store.stats.expired == 0


# ---- looking costs no client anything --------------------------------------------------------------------------------
def test_looking_is_not_using(server: Server) -> None:
    store = server.store
    for number in range(20):
        store.put(b"k%d" % number, bytes(20_000))
        store.put(b"small%d" % number, b"x")

    def traces() -> list[object]:
        entries = sorted(store.index, key=lambda entry: entry.key)
        used = [(each.hits, each.accessed_s, each.affirmed_turn, each.leases) for each in entries]
        order = [[each.key for each in policy.victims()] for policy in (store.policy, store.inline_policy)]
        return [used, order, store.stats.as_dict(), store.tiers(), server.stats.commands_processed]

    before = traces()

    async def story() -> None:
        await Surveys(store).latest()
        assert len((await search(store, b""))["keys"]) == 40  # type: ignore[arg-type]
        assert (await blocks_between(store, 0, store.arena.nbytes))["count"] == 20
        assert state(server)["misses"] == 0

    asyncio.run(story())
    assert traces() == before


# ---- commands --------------------------------------------------------------------------------------------------------
def test_slow_commands_come_slowest_first_and_as_text(server: Server) -> None:
    session = FakeSession(server)
    session.name = b"<img>"
    server.slowlog.set_threshold(0)
    for microseconds, word in ((5, b"GET"), (9, b"\x00<script>"), (7, b"SET")):
        server.slowlog.note(session, [word, *[b"a"] * 20], microseconds * 1000)  # type: ignore[arg-type]
    slow: Any = state(server)["slow"]
    assert [(each["us"], each["command"][0]) for each in slow["entries"]] == [
        (9, "\\x00<script>"), (7, "SET"), (5, "GET"),
    ]  # fmt: skip
    assert {(each["client"], each["more_args"]) for each in slow["entries"]} == {("<img>", 13)}


def test_commands_come_by_the_time_they_took_in_all(server: Server) -> None:
    for name, calls, nanoseconds in (("get", 1000, 5_000_000), ("kv.match", 10, 9_000_000), ("set", 1, 1_000_000)):
        server.stats.command(name).observe(calls, nanoseconds)
    told: Any = state(server)["commands"]
    assert [(each["name"], each["calls"], each["total_us"]) for each in told] == [
        ("KV.MATCH", 10, 9000), ("GET", 1000, 5000), ("SET", 1, 1000),
    ]  # fmt: skip
    assert all(0 < each["p50_us"] <= each["p99_us"] <= each["p999_us"] for each in told)
    server.settings["latency-tracking"] = "no"
    assert state(server)["commands"] == []


def test_looking_at_the_page_does_not_change_the_order_of_eviction() -> None:
    def leavers(looks: bool) -> list[bytes]:
        store = Store(Arena.create(MIB, HugepageMode.OFF))
        for number in range(8):
            store.put(b"k%d" % number, bytes(60 * 1024))
        if looks:
            asyncio.run(search(store, b"k0"))
            asyncio.run(blocks_between(store, 0, MIB))
        order = [entry.key for entry in islice(store.policy.victims(), 8)]
        store.close()
        return order

    assert leavers(looks=True) == leavers(looks=False) == [b"k%d" % number for number in range(8)]


# What the page is told of the arena as a whole and of the prompts in it: true, bounded, and gathered in slices.


# ---- the arena -------------------------------------------------------------------------------------------------------
def test_the_map_says_of_each_cell_what_lies_there(store: Store) -> None:
    cell = 64 * MIB // CELLS_MAX
    half = 32 * cell - 1024
    store.put(CHUNK % (b"00" * 8, b"a"), bytes(half))
    store.put(b"other", bytes(half))
    store.put(b"deleted", bytes(half))
    lease = store.lease(b"deleted")
    held = store.lease(b"other")
    store.delete([b"deleted"])
    reservation = store.reserve(b"coming", half)
    assert lease is not None
    assert held is not None
    assert reservation is not None
    arena = surveyed(store)["arena"]
    assert (arena["bytes"], arena["cell_bytes"]) == (64 * MIB, cell)
    kinds = [KINDS[kind] if kind != NO_KIND else "" for kind in arena["kind"]]
    assert kinds == ["prompt chunk"] * 32 + ["other value"] * 32 + [KINDS[4]] * 64 + [""] * (CELLS_MAX - 128)
    assert arena["used"] == [100] * 128 + [0] * (CELLS_MAX - 128)
    assert arena["leased"] == [0] * 32 + [100] * 32 + [0] * (CELLS_MAX - 64)
    assert arena["idle"] == [0] * 64 + [-1] * (CELLS_MAX - 64)
    assert [at for at, starts in enumerate(arena["starts"]) if starts] == [0, 32]
    for hold in (lease, held):
        hold.release()
    reservation.abort()


def test_a_cell_that_is_hardly_used_is_not_shown_as_free() -> None:
    store = Store(Arena.create(2048 * MIB, HugepageMode.OFF))
    store.put(b"k", bytes(16 * 1024))
    arena = surveyed(store)["arena"]
    assert arena["cell_bytes"] == 512 * 1024
    assert arena["used"][:2] == [3, 0]
    store.close()


def test_more_blocks_than_cells_still_add_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "CELLS_MAX", 64)
    for number in range(2000):
        store.put(b"k%d" % number, bytes(16 * 1024 + number))
    told = surveyed(store)
    arena = told["arena"]
    assert len(arena["used"]) == 64
    assert sum(arena["starts"]) == told["blocks"]["arena"] == 2000
    used = sum(arena["used"]) / 64
    assert abs(used - 100 * store.live_bytes / (64 * MIB)) < 1


def test_what_is_on_disk_too_is_told_apart(tmp_path: Path) -> None:
    async def story() -> None:
        async with TieredServer(tmp_path) as live:
            live.put("saved", "both", "away")
            live.saved()
            live.put("unsaved")
            live.send_away("away")
            live.put("later")
            told: dict[str, Any] = await Survey(live.store).told()
            saved = {
                percent for percent, used in zip(told["arena"]["saved"], told["arena"]["used"], strict=True) if used
            }
            assert saved == {0, 100}
            assert told["blocks"] == {"arena": 4, "beside": 0, "disk": 1}

    run_on("asyncio", story())


def test_blocks_of_a_piece_come_in_the_order_of_their_places(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        store.put(b"k%d" % number, bytes(60 * 1024))
    step = 64 * 1024  # with PAYLOAD_OFFSET_BYTES and the grain
    starts = [entry_of(store, b"k%d" % number).extent.offset for number in range(8)]
    told: dict[str, Any] = asyncio.run(blocks_between(store, starts[2] + 1, starts[5]))
    assert [each["key"] for each in told["blocks"]] == ["k2", "k3", "k4"]
    monkeypatch.setattr(facts, "BLOCKS_SHOWN", 2)
    told = asyncio.run(blocks_between(store, 0, 8 * step))
    assert ([each["key"] for each in told["blocks"]], told["count"]) == (["k0", "k1"], 8)


# ---- prompts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "prefix", "kind"),
    [
        (CHUNK % (b"r", b"digest"), CHUNK % (b"r", b""), "prompt chunk"),
        (b"kvredis:llama@0123456789abcdef:layer:7", b"kvredis:llama@0123456789abcdef:layer:", "engine page"),
        (b"vllm@meta/Llama@1@0@-5e4a@bfloat16", b"vllm@meta/Llama@1@0@", "LMCache chunk"),
        (b"session:12", b"session:", "other value"),
        (b"{user}:1", b"{user}", "other value"),
        (b"{}:1", b"{}:", "other value"),
        (b"plain", b"", "other value"),
    ],
)
def test_a_key_belongs_to_its_prefix(key: bytes, prefix: bytes, kind: str) -> None:
    assert prefix_of(key) == prefix
    assert KINDS[kind_of(key)] == kind


def test_prompts_are_told_with_tokens_bytes_and_hits(store: Store) -> None:
    chunk = block(KV, METADATA, 20_000)
    for digest in (b"a", b"b", b"c"):
        store.put(CHUNK % (b"root", digest), chunk)
    store.put(CHUNK % (b"other", b"a"), chunk)
    for _ in range(5):
        lease = store.lease(CHUNK % (b"root", b"a"))
        assert lease is not None
        lease.release()
    told = surveyed(store)
    assert [(each["prefix"], each["blocks"], each["tokens"], each["hits"]) for each in told["prefixes"]] == [
        ("kvredis:llama@0123456789abcdef@{0@root}", 3, 768, 5),
        ("kvredis:llama@0123456789abcdef@{0@other}", 1, 256, 0),
    ]
    assert told["prefixes"][0]["bytes"] == 3 * len(chunk)
    assert told["prefixes"][0]["untold"] == 0


def test_prefixes_are_bounded_and_what_is_beyond_is_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "GROUPS_MAX", 40)
    for number in range(100):
        store.put(b"p%d:x" % number, bytes(100 + number))
    told = surveyed(store)
    assert told["prefixes_in_all"] == 40
    assert told["ungrouped"] == 60
    assert len(told["prefixes"]) <= 2 * survey.GROUPS_SHOWN


# ---- the walk --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("walk", ["survey", "search", "between"])
def test_others_run_in_between_while_a_long_walk_is_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, walk: str
) -> None:
    for module in (slices, facts):
        monkeypatch.setattr(module, "SLICE_S", 0.0)  # a slice ends with each batch
    for number in range(4000):
        store.put(b"k%d" % number, b"x")
    walks: dict[str, Callable[[], Any]] = {
        "survey": lambda: Survey(store).told(),
        "search": lambda: search(store, b"nothing"),
        "between": lambda: blocks_between(store, 0, MIB),
    }

    async def story() -> int:
        turns = 0
        walking = asyncio.create_task(walks[walk]())
        while not walking.done():
            turns += 1
            await asyncio.sleep(0)
        await walking
        return turns

    assert asyncio.run(story()) >= 4000 // slices.BATCH


def test_blocks_that_leave_during_a_walk_are_not_drawn_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    for number in range(1000):
        store.put(b"k%d" % number, bytes(20_000))

    async def story() -> dict[str, Any]:
        walking = asyncio.create_task(Survey(store).told())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        store.delete([b"k%d" % number for number in range(1000)])
        for number in range(300):
            store.put(b"new%d" % number, bytes(60_000))
        return await walking

    told = asyncio.run(story())
    arena = told["arena"]
    assert slices.BATCH <= told["blocks"]["arena"] < 1000
    assert max(arena["used"]) <= 100
    taken = sum(used > 0 for used in arena["used"]) * arena["cell_bytes"]
    assert taken >= store.live_bytes  # what came meanwhile is room that is taken


def test_all_readers_that_ask_share_a_walk_and_one_that_leaves_does_not_end_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = 0
    told = Survey.told

    def counted(self: Survey) -> Any:
        nonlocal walks
        walks += 1
        return told(self)

    monkeypatch.setattr(Survey, "told", counted)
    store.put(b"k", b"x")

    async def story() -> None:
        surveys = Surveys(store, fresh_s=1000.0)
        first, second = (asyncio.create_task(surveys.latest()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        body = await second
        assert first.cancelled()
        assert await surveys.latest() is body

    asyncio.run(story())
    assert walks == 1
