"""What the page is told of keys, blocks and the arena: true, bounded, escaped, in slices, and without being used."""

import asyncio
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.commands.kv import tensor_facts
from kvredis.server.http.page import facts as page_facts
from kvredis.server.http.page.facts import KEYS_WANTED, blocks_between, meant, search, shown, state, told_block
from kvredis.server.http.page.survey import Surveys
from kvredis.server.server import Server
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.commands.test_kv import KV, METADATA, block
from tests.server.fake_session import FakeSession, make_server
from tests.server.http.surveyed import MIB, entry_of, store, surveyed
from tests.server.live import run_on
from tests.server.tiered_server import TieredServer

__all__ = ["store"]

HOSTILE = [b"<script>alert(1)</script>", b"\x00\x1b[31m\r\n", bytes(range(256)), b"\\x41", b"\xe2\x80\xaeevil", b""]


@pytest.fixture
def server() -> Iterator[Server]:
    server = make_server()
    yield server
    assert server.store.leases == 0
    server.store.check_integrity()
    server.store.close()


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
    entry_of(store, b"gone").expire_at_ms = store.now_ms() - 1
    told: dict[str, Any] = asyncio.run(search(store, b""))
    assert told["keys"] == []
    assert surveyed(store)["blocks"]["arena"] == 0
    assert store.index.get(b"gone", 0) is not None
    assert store.stats.expired == 0


# ---- looking costs nobody anything -----------------------------------------------------------------------------------


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


def test_the_order_of_eviction_is_the_same_whether_or_not_somebody_looks() -> None:
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
