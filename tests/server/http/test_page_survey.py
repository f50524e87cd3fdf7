"""What the page is told of the arena as a whole and of the prompts in it: true, bounded, and gathered in slices."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvredis.server.http.page import facts, slices, survey
from kvredis.server.http.page.facts import blocks_between, search
from kvredis.server.http.page.survey import CELLS_MAX, KINDS, NO_KIND, Survey, Surveys, kind_of, prefix_of
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.server.commands.test_kv import KV, METADATA, block
from tests.server.http.surveyed import CHUNK, MIB, entry_of, store, surveyed
from tests.server.live import run_on
from tests.server.tiered_server import TieredServer

__all__ = ["store"]


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


def test_all_who_ask_share_a_walk_and_one_who_leaves_does_not_end_it(
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
