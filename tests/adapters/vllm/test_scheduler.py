"""What an engine's scheduler is told and asks for, step by step, without an engine: which pages move, and when."""

import pickle
import random
from unittest import mock

import pytest

from kvredis.adapters.engine.keys import chunk_keys, key_of_shard
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.paged.jobs import ChunkMove, StoreJob
from kvredis.adapters.vllm.kv_layout import LayerGroup, layer_groups
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions, Step
from kvredis.adapters.vllm.scheduler import NO_PAGE, PLACES, PaysToStore, Scheduling
from kvredis.backends.base import Tier
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.vllm.paged_specs import FullAttentionSpec, KVCacheGroup, MambaSpec, SlidingWindowSpec, names

CHUNK, PAGE = 64, 16
PER_CHUNK = CHUNK // PAGE
TOKENS = list(range(1000))


STATE = -1
"""In the place of a window: recurrent layers."""


def groups_of(windows: tuple[int | None, ...] = (None,), world_size: int = 1) -> list[LayerGroup]:
    base = ChunkLayout(1, 1, 1, "u8", chunk_tokens=CHUNK, model="m", world_size=world_size)
    specs = [
        MambaSpec(PAGE)
        if window == STATE
        else SlidingWindowSpec(PAGE, sliding_window=window)
        if window
        else FullAttentionSpec(PAGE)
        for window in windows
    ]
    groups = [KVCacheGroup(names(2, 2 * number), spec) for number, spec in enumerate(specs)]
    return layer_groups(groups, base, "auto")


class Engine:
    """A scheduler, what it stores into, and the least of an engine: every group's pages are numbered from 1 on."""

    def __init__(
        self,
        windows: tuple[int | None, ...] = (None,),
        world_size: int = 1,
        pays_to_store: PaysToStore | None = None,
        **options: object,
    ) -> None:
        self.groups = groups_of(windows, world_size)
        self.backend = FakeBackend(100_000)
        chosen = SchedulingOptions(**options)  # type: ignore[arg-type]
        self.scheduling = Scheduling(self.groups, self.backend, chosen, pays_to_store=pays_to_store)

    def match(self, tokens: list[int], computed: int = 0, name: str = "r", attempt: int = 0) -> int | None:
        return self.scheduling.match(Prompt(name, tokens, attempt=attempt), computed)

    def tables(self, tokens: int, start: int = 1, skipped: int = 0) -> list[list[int]]:
        """Pages for so many tokens, of which those of windowed groups lack the first `skipped`."""
        count = -(-tokens // PAGE)
        return [
            [NO_PAGE if group.window and at < skipped else start + at for at in range(count)] for group in self.groups
        ]

    def put(self, moves: list[ChunkMove], rank: int = 0) -> None:
        for move in moves:
            self.backend.put(key_of_shard(move.key, self.groups[move.group].shards()[rank]), b"")

    def compute(self, tokens: list[int], *, name: str = "r", step: int = 10_000) -> list[Step]:
        """Run a prompt that is not found through the engine, `step` tokens at a time."""
        assert self.match(tokens, name=name) == 0
        steps = []
        for done in range(0, len(tokens), step):
            tables = self.tables(len(tokens)) if not done else None
            self.scheduling.scheduled(name, tables, done, min(step, len(tokens) - done), anew=not done)
            steps.append(self.scheduling.step())
        return steps


def test_a_prompt_is_stored_once_as_it_is_computed_in_whole_chunks() -> None:
    engine = Engine()
    steps = engine.compute(TOKENS, step=100)
    moves = [move for step in steps for job in step.moves.stores for move in job.moves]
    keys = chunk_keys(TOKENS, engine.groups[0].layout)
    assert [move.key for move in moves] == [chunk.key for chunk in keys]
    assert [move.pages for move in moves] == [
        tuple(range(1 + at * PER_CHUNK, 1 + (at + 1) * PER_CHUNK)) for at in range(len(keys))
    ]
    assert [job.total for step in steps for job in step.moves.stores] == [
        100,
        200,
        300,
        400,
        500,
        600,
        700,
        800,
        900,
        1000,
    ]
    assert [len(job.moves) for step in steps for job in step.moves.stores] == [1, 2, 1, 2, 1, 2, 1, 2, 2, 1]


def test_what_is_found_is_loaded_behind_what_the_engine_has_and_not_stored_again() -> None:
    engine = Engine()
    (step,) = engine.compute(TOKENS)
    engine.put(step.moves.stores[0].moves[:10])
    assert engine.match(TOKENS, 128, name="s") == 10 * CHUNK - 128
    engine.scheduling.allocated("s", engine.tables(640, start=101), 512)
    step = engine.scheduling.step()
    (load,) = step.moves.loads
    assert [move.pages[0] for move in load.moves] == list(range(109, 141, PER_CHUNK))
    assert step.taken == set(range(109, 141))
    engine.scheduling.loaded("s")
    engine.scheduling.scheduled("s", engine.tables(1000, start=101), 640, 360, anew=True)
    step = engine.scheduling.step()
    assert step.taken == set(range(141, 164))
    assert [len(job.moves) for job in step.moves.stores] == [5]


def test_pages_that_the_engine_has_of_a_chunk_are_not_written() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    assert engine.match(TOKENS, 160, name="s") == 960 - 160
    engine.scheduling.allocated("s", engine.tables(960), 800)
    moves = engine.scheduling.step().moves.loads[0].moves
    assert moves[0].pages == (11, 12)  # of 9, 10, 11, 12
    assert sum(len(move.pages) for move in moves) == 800 // PAGE


def test_the_backend_is_asked_once_for_each_attempt_and_a_failed_load_is_not_tried_again() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    asked: list[int] = []
    match = engine.backend.match
    engine.backend.match = lambda keys: asked.append(len(keys)) or match(keys)  # type: ignore[func-returns-value,method-assign]
    for _ in range(3):
        assert engine.match(TOKENS, name="s") == 960
    assert asked == [15]
    assert engine.match(TOKENS, 64, name="s") == 896  # its own cache has grown meanwhile
    assert asked == [15]
    engine.scheduling.allocated("s", engine.tables(960), 896)
    engine.scheduling.loaded("s", failed=True)
    assert engine.match(TOKENS, name="s") == 0
    engine.scheduling.step()
    engine.scheduling.scheduled("s", engine.tables(1000), 0, 1000, anew=True)
    assert len(engine.scheduling.step().moves.stores[0].moves) == 15  # whatever was damaged is mended
    assert engine.match(TOKENS, name="s", attempt=1) == 960
    assert asked == [15, 15]


def test_a_prompt_is_found_to_its_last_token() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS[:640])[0].moves.stores[0].moves)
    assert engine.match(TOKENS[:640], name="s") == 640
    assert engine.match(TOKENS[:641], name="t") == 640


def test_an_unfull_chunk_is_made_of_whole_pages() -> None:
    engine = Engine(unfull=True)
    moves = engine.compute(TOKENS)[0].moves.stores[0].moves
    assert [len(move.pages) for move in moves] == [4] * 15 + [2]
    engine.put(moves)
    assert engine.match(TOKENS, name="s") == 992
    assert engine.match(TOKENS[:999], name="t") == 992
    assert engine.match(TOKENS[:980], name="u") == 960


def test_generated_tokens_are_stored_with_the_chunk_that_they_complete() -> None:
    engine = Engine()
    assert engine.match(TOKENS[:100]) == 0
    engine.scheduling.scheduled("r", engine.tables(112), 0, 100, anew=True)
    assert [len(job.moves) for job in engine.scheduling.step().moves.stores] == [1]
    stored, asked = [], []
    for done in range(100, 200):  # the step that computes token `done`, which was generated before
        if engine.scheduling.has_grown("r", done + 1):
            asked.append(done + 1)
            engine.scheduling.follow(Prompt("r", TOKENS[: done + 1]))
        pages = [[1 + done // PAGE]] if done % PAGE == 0 and done >= 112 else None
        engine.scheduling.scheduled("r", pages, done, 1)
        stored += [(done, move.pages) for job in engine.scheduling.step().moves.stores for move in job.moves]
    assert asked == [128, 192], "hashed once a chunk, not once a token"
    assert stored == [(127, (5, 6, 7, 8)), (191, (9, 10, 11, 12))]
    assert not engine.scheduling.has_grown("another", 1000)


def test_roles_and_bounds_are_kept() -> None:
    producer = Engine(loads=False)
    producer.put(producer.compute(TOKENS)[0].moves.stores[0].moves)
    assert producer.match(TOKENS, name="s") == 0
    consumer = Engine(stores=False)
    assert not consumer.compute(TOKENS)[0].moves.stores
    bounded = Engine(max_load_chunks=10, min_load_tokens=200)
    bounded.put(bounded.compute(TOKENS)[0].moves.stores[0].moves)
    assert bounded.match(TOKENS, 800, name="s") == 0  # less than 200
    assert bounded.match(TOKENS, name="t") == 640  # ten chunks
    assert bounded.scheduling.counters["skipped_tokens"] == 160 + 320


def test_behind_a_prefix_of_the_engine_s_own_less_than_a_chunk_is_computed_and_alone_it_is_loaded() -> None:
    engine = Engine(unfull=True)
    moves = engine.compute(TOKENS[:640])[0].moves.stores[0].moves
    engine.put([*moves, *engine.compute(TOKENS[:40], name="short")[0].moves.stores[0].moves])
    assert engine.match(TOKENS[:640], 624, name="a") == 0
    assert engine.match(TOKENS[:640], 592, name="b") == 0  # 48 tokens, of which it has 16 of the chunk
    assert engine.match(TOKENS[:640], 576, name="c") == CHUNK
    assert engine.match(TOKENS[:40], name="d") == 32  # half a chunk, and nothing of the engine's own
    assert engine.scheduling.counters["skipped_tokens"] == 16 + 48
    engine.scheduling.scheduled("a", engine.tables(640), 624, 16, anew=True)
    assert not engine.scheduling.step().moves.stores, "it is stored already"


def test_a_number_that_is_given_replaces_the_chunk_behind_a_prefix_of_the_engine_s_own() -> None:
    engine = Engine(min_load_tokens=1, min_rest_tokens=1)
    engine.put(engine.compute(TOKENS[:640])[0].moves.stores[0].moves)
    assert engine.match(TOKENS[:640], 624, name="a") == 16


def test_a_long_chunk_is_loaded_from_256_tokens_on() -> None:
    engine = Engine()
    engine.groups = engine.scheduling.groups = layer_groups(
        [KVCacheGroup(names(2, 0), FullAttentionSpec(PAGE))],
        ChunkLayout(1, 1, 1, "u8", chunk_tokens=512, model="m"),
        "auto",
    )
    engine.put(engine.compute(TOKENS[:512])[0].moves.stores[0].moves)
    assert engine.match(TOKENS[:512], 272, name="a") == 0
    assert engine.match(TOKENS[:512], 256, name="b") == 256


def test_loads_beyond_the_bound_wait_for_those_under_way() -> None:
    engine = Engine(max_load_chunks=20)
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    for name in "ab":
        assert engine.match(TOKENS, name=name) == (960 if name == "a" else None)
        if name == "a":
            engine.scheduling.allocated(name, engine.tables(960), 960)
    engine.scheduling.loaded("a")
    assert engine.match(TOKENS, name="b") == 960


def test_requests_that_share_a_prefix_load_it_once_where_the_engine_shares_its_pages() -> None:
    engine = Engine(waits_for_shared=True)
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    assert engine.match(TOKENS, name="first") == 960
    engine.scheduling.allocated("first", engine.tables(960), 960)
    others = {f"r{number}": [*TOKENS[:640], *range(5000, 5000 + 100 * number)] for number in range(1, 32)}
    assert {engine.match(tokens, name=name) for name, tokens in others.items()} == {None}
    engine.scheduling.loaded("first")
    assert {engine.match(tokens, 640, name=name) for name, tokens in others.items()} == {0}
    assert sum(len(job.moves) for job in engine.scheduling.step().moves.loads) == 15


def test_a_request_whose_first_half_is_loaded_by_another_loads_the_rest_behind_it() -> None:
    engine = Engine(waits_for_shared=True)
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    assert engine.match(TOKENS[:512], name="first") == 512
    engine.scheduling.allocated("first", engine.tables(512), 512)
    assert engine.match(TOKENS, name="longer") is None
    engine.scheduling.loaded("first")
    assert engine.match(TOKENS, 512, name="longer") == 960 - 512


def test_a_request_that_shares_little_of_what_another_loads_does_not_wait_for_it() -> None:
    engine = Engine(waits_for_shared=True)
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    assert engine.match(TOKENS[:256], name="short") == 256
    engine.scheduling.allocated("short", engine.tables(256), 256)
    assert engine.match(TOKENS, name="long") == 960


def test_a_shared_load_that_fails_or_is_given_up_leaves_the_others_to_load_for_themselves() -> None:
    for end in ("failed", "given up"):
        engine = Engine(waits_for_shared=True)
        engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
        assert engine.match(TOKENS, name="first") == 960
        engine.scheduling.allocated("first", engine.tables(960), 960)
        assert engine.match(TOKENS, name="second") is None
        if end == "given up":
            engine.scheduling.finished("first")
            assert engine.match(TOKENS, name="second") is None, "its pages are being written still"
        engine.scheduling.loaded("first", failed=end == "failed")
        assert engine.match(TOKENS, name="second") == 960


def test_a_load_of_a_request_that_ends_is_cancelled_and_one_that_is_over_is_not() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    for name in "ab":
        engine.match(TOKENS, name=name)
        engine.scheduling.allocated(name, engine.tables(960), 960)
    engine.scheduling.loaded("a")
    for name in "ab":
        engine.scheduling.finished(name)
    assert engine.scheduling.step().moves.cancelled == ["b"]
    assert engine.scheduling.chunks_loading == 15
    engine.scheduling.loaded("b")
    assert engine.scheduling.chunks_loading == 0


def test_a_prefix_needs_of_a_window_what_the_next_token_sees_and_of_the_rest_everything() -> None:
    engine = Engine((150, None))
    moves = engine.compute(TOKENS)[0].moves.stores[0].moves
    assert [move.group for move in moves] == [0] * 15 + [1] * 15
    window, whole = moves[:15], moves[15:]
    engine.put([*window[12:], *whole])
    assert engine.match(TOKENS, name="a") == 960
    skipped = (960 - 150 + 1) // PAGE
    engine.scheduling.allocated("a", engine.tables(960, skipped=skipped), 960)
    loads = engine.scheduling.step().moves.loads[0].moves
    assert [move.key for move in loads] == [move.key for move in [*window[12:], *whole]]
    assert loads[0].pages == (51, 52)  # the window begins in this chunk
    assert sum(len(move.pages) for move in loads if move.group == 0) == 60 - skipped
    engine.backend.delete([window[12].key])
    assert engine.match(TOKENS, name="b") == 0  # 12 chunks, of which the window has none
    engine.put(window[9:12])
    assert engine.match(TOKENS, name="c") == 12 * CHUNK
    engine.backend.delete([whole[3].key])
    engine.put(window)
    assert engine.match(TOKENS, name="d") == 3 * CHUNK


def test_a_chunk_that_a_window_has_let_go_of_is_not_stored() -> None:
    engine = Engine((20, None))
    steps = engine.compute(TOKENS[:256], step=50)
    moves = [move for step in steps for job in step.moves.stores for move in job.moves]
    layout = engine.groups[0].layout
    keys = [chunk.key for chunk in chunk_keys(TOKENS[:256], layout)]
    # When a chunk is complete the window begins at 31, 81, 131 and 181: of these only 131 is in its chunk's first page.
    assert [keys.index(move.key) for move in moves if move.group == 0] == [2]
    assert len([move for move in moves if move.group == 1]) == 4
    whole = Engine((20, None)).compute(TOKENS[:256], step=128)
    assert [len(job.moves) for step in whole for job in step.moves.stores] == [4, 4]


def test_ranks_are_asked_for_together() -> None:
    engine = Engine(world_size=2)
    moves = engine.compute(TOKENS)[0].moves.stores[0].moves
    engine.put(moves)
    assert engine.match(TOKENS, name="a") == 0
    engine.put(moves[:7], rank=1)
    assert engine.match(TOKENS, name="b") == 7 * CHUNK
    for splits, shards in ((False, [b"0", b"1"]), (True, [b"0/2", b"1/2"])):
        layouts = [ChunkLayout(2, 2, 64, "bf16", CHUNK, "m", rank, 2, splits_heads=splits) for rank in (0, 1)]
        here, there = (chunk_keys(TOKENS, layout)[3].key for layout in layouts)
        assert key_of_shard(here, shards[1]) == there
        assert key_of_shard(there, shards[0]) == here


def test_what_else_the_kv_depends_on_is_in_the_keys_from_its_place_on() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    match = engine.scheduling.match
    assert match(Prompt("a", TOKENS, ((0, b"tenant"),)), 0) == 0
    assert match(Prompt("b", TOKENS, ((130, b"image"),)), 0) == 128
    assert match(Prompt("c", TOKENS, ((130, b"image"), (131, b"other"))), 0) == 128


def test_tokens_looked_up_are_counted_where_they_were() -> None:
    engine = Engine()
    engine.put(engine.compute(TOKENS)[0].moves.stores[0].moves)
    engine.match(TOKENS, 160, name="s")
    counters = engine.scheduling.counters
    assert {place: counters[f"{place}_tokens"] for place in PLACES} == {
        "engine": 160, "memory": 800, "disk": 0, "remote": 0, "miss": 1040
    }  # fmt: skip
    assert sum(counters[f"{place}_tokens"] for place in PLACES) == counters["lookup_tokens"]


def test_tokens_of_a_load_are_told_apart_by_where_they_come_from() -> None:
    engine = Engine()
    engine.put([move for step in engine.compute(TOKENS) for job in step.moves.stores for move in job.moves])
    assert engine.match(TOKENS, 160, name="s") == 800
    where: list[Tier] = ["memory", "disk", "remote"]
    engine.backend.tiers_of = lambda keys: [where[min(at // 2, 2)] for at in range(len(keys))]  # type: ignore[method-assign]
    assert engine.scheduling.sources("s", 800) == {"memory": 96, "disk": 128, "remote": 576}
    assert engine.scheduling.sources("s", 40) == {"memory": 40}
    assert engine.scheduling.sources("unheard of", 40) == {}


def test_what_was_offered_asked_for_and_came_whole_is_counted_in_tokens() -> None:
    engine = Engine((150, None))
    moves = engine.compute(TOKENS)[0].moves.stores[0].moves
    counters = engine.scheduling.counters
    assert (counters["store_tokens"], counters["lookups_without_hit"]) == (960, 1), "once, of however many groups"
    engine.put(moves)
    for name in ("come", "failed", "lost", "gone"):
        engine.match(TOKENS, name=name)
        start = 1 if name == "lost" else 201
        engine.scheduling.allocated(name, engine.tables(960, start=start), 960)
    engine.scheduling.loaded("come")
    engine.scheduling.loaded("failed", failed=True)
    engine.scheduling.lost({5})
    engine.scheduling.loaded("lost")
    engine.scheduling.finished("gone")
    assert (counters["load_tokens"], counters["loaded_tokens"]) == (4 * 960, 960)
    assert list(engine.scheduling.hit_rates) == [0.96] * 4


def test_what_a_match_has_found_is_logged_once_when_its_step_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = Engine()
    line = "Reqid: {}, Total tokens 1000, LMCache hit tokens: 0, need to load: 0"
    engine.compute(TOKENS, name="first")
    assert not caplog.messages, "loads of the step wait for no line"
    engine.scheduling.step()
    assert caplog.messages == [line.format("first")]
    assert engine.match(TOKENS, name="second") == 0
    engine.scheduling.tell_hits()
    engine.scheduling.step()
    assert caplog.messages == [line.format("first"), line.format("second")]


def test_a_broken_backend_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.backend.broken = True
    assert engine.match(TOKENS, name="a") == engine.match(TOKENS, name="b") == 0
    assert len([record for record in caplog.records if "lookup failed" in record.message]) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_an_engine_does_no_page_is_stored_that_another_request_writes(seed: int) -> None:
    """A model of an engine with few pages: stores last some steps, and a page that is taken meanwhile is told of."""
    rng = random.Random(seed)
    engine = Engine((rng.choice([20, 100]), None))
    free = list(range(1, 81))
    running: dict[str, tuple[list[int], list[list[int]], int]] = {}
    reading: dict[int, int] = {}  # the groups share one pool
    for number in range(120):
        for name in list(running):
            tokens, tables, done = running[name]
            if done >= len(tokens) or rng.random() < 0.1:
                free += sorted({page for table in tables for page in table} - {NO_PAGE})
                engine.scheduling.finished(name)
                del running[name]
        name = f"r{number}"
        tokens = list(range(rng.choice([100, 200, 300])))
        need = -(-len(tokens) // PAGE)
        if len(free) >= 2 * need:
            found = engine.match(tokens, name=name)
            assert found is not None
            rng.shuffle(free)
            tables = [[free.pop() for _ in range(need)] for _ in engine.groups]
            running[name] = (tokens, tables, 0)
        for name, (tokens, tables, done) in running.items():
            count = min(rng.choice([32, 64, 128]), len(tokens) - done)
            engine.scheduling.scheduled(name, tables if not done else None, done, count, anew=not done)
            running[name] = (tokens, tables, done + count)
        step: Step = pickle.loads(pickle.dumps(engine.scheduling.step()))
        taken = {page for page in reading if page in step.taken}
        for page in taken:
            del reading[page]  # a worker ends these stores before anything is written
        written = {
            (number, page)
            for tokens, tables, done in running.values()
            for number, table in enumerate(tables)
            for page in table[: done // PAGE]
        }
        for job in step.moves.stores:
            for move in job.moves:
                assert {(move.group, page) for page in move.pages} <= written
                assert NO_PAGE not in move.pages
                reading |= dict.fromkeys(move.pages, 3)
        reading = {page: left - 1 for page, left in reading.items() if left > 1}


def hybrid(state_bytes: int | None = None, pays_to_store: PaysToStore | None = None) -> tuple[Engine, list[StoreJob]]:
    """An engine of one group with KV and two recurrent ones, and what it stores of TOKENS, whose states are handed over
    in pages 500 and up behind every second chunk."""
    engine, jobs = Engine((STATE, None, STATE), 1, pays_to_store, state_bytes=state_bytes), list[StoreJob]()
    assert engine.match(TOKENS) == 0
    for done in range(0, len(TOKENS), 2 * CHUNK):
        count = min(2 * CHUNK, len(TOKENS) - done)
        engine.scheduling.scheduled("r", engine.tables(len(TOKENS)) if not done else None, done, count, anew=not done)
        end = done + count
        engine.scheduling.snapshots(
            {"r": [(group, 500 + end // CHUNK, end) for group in (0, 2)], "other": [(0, 9, 64)]}
        )
        jobs += engine.scheduling.step().moves.stores
    return engine, jobs


def test_states_are_stored_with_the_chunks_before_them_and_the_last_one_that_all_have_is_loaded() -> None:
    engine, jobs = hybrid()
    kv, *states = range(3)
    assert [engine.groups[place].is_state for place in range(3)] == [False, True, True]
    assert [[(move.group, move.pages) for move in job.moves if move.group] for job in jobs] == [
        [(place, (500 + end,)) for place in states] for end in (2, 4, 6, 8, 10, 12, 14)
    ] + [[]]
    engine.put([move for job in jobs for move in job.moves])
    engine.scheduling.finished("r")
    with mock.patch.object(FakeBackend, "match", side_effect=AssertionError("a second question")):
        assert engine.match(TOKENS, name="s") == 14 * CHUNK
    table = [NO_PAGE] * (14 * PER_CHUNK - 1)
    engine.scheduling.allocated("s", [[*table, 7], engine.tables(14 * CHUNK)[1], [*table, 8]], 14 * CHUNK)
    (load,) = engine.scheduling.step().moves.loads
    assert [(move.key, move.pages) for move in load.moves if move.group in states] == [
        (move.key, (page,)) for move, page in zip(jobs[6].moves[-2:], (7, 8), strict=True)
    ]
    assert len(load.moves) == 14 + 2
    # Where a single group lacks a state, the one before is the end; where the KV has a gap, the one before that.
    engine.backend.delete([jobs[6].moves[-1].key])
    assert engine.match(TOKENS, name="t") == 12 * CHUNK
    engine.backend.delete([next(move.key for move in jobs[4].moves if move.group == kv)])
    assert engine.match(TOKENS, name="u") == 8 * CHUNK
    assert engine.match(TOKENS, 10 * CHUNK, name="v") == 0, "the engine has more itself"


def test_a_state_for_which_the_engine_has_no_page_makes_the_load_fail() -> None:
    engine, jobs = hybrid()
    engine.put([move for job in jobs for move in job.moves])
    assert engine.match(TOKENS, name="s") == 14 * CHUNK
    tables = engine.tables(14 * CHUNK)
    engine.scheduling.allocated("s", [[NO_PAGE] * 14 * PER_CHUNK, tables[1], tables[2]], 14 * CHUNK)
    (load,) = engine.scheduling.step().moves.loads
    (lost,) = [move for move in load.moves if move.pages == (NO_PAGE,)]
    assert engine.backend.present([key_of_shard(lost.key, b"%d" % rank) for rank in (0, 1)]) == [False, False]


def test_all_of_a_prompt_is_never_loaded_where_layers_are_recurrent() -> None:
    engine = Engine((STATE, None))
    tokens = TOKENS[: 4 * CHUNK]
    engine.match(tokens)
    engine.scheduling.scheduled("r", engine.tables(len(tokens)), 0, len(tokens), anew=True)
    engine.scheduling.snapshots({"r": [(0, 50 + at, at * CHUNK) for at in (3, 4)]})
    engine.put([move for job in engine.scheduling.step().moves.stores for move in job.moves])
    assert engine.match(tokens, name="s") == 3 * CHUNK, "the last token is computed from the state before it"


def test_states_of_a_prompt_are_bounded_and_the_last_ones_always_stored() -> None:
    each = Engine((STATE, None, STATE)).groups[1].layout.chunk_bytes(1) * 2
    for bound, ends in ((1, [14]), (3 * each, [6, 12, 14]), (10**9, [2, 4, 6, 8, 10, 12, 14])):
        _, jobs = hybrid(state_bytes=bound)
        assert [job.moves[-1].pages[0] - 500 for job in jobs if job.moves[-1].group] == ends


def test_a_state_is_stored_where_that_takes_less_than_computing_from_the_one_before_it() -> None:
    each = Engine((STATE, None, STATE)).groups[1].layout.chunk_bytes(1) * 2

    def pays(nbytes: int, tokens: int) -> bool:
        assert nbytes == each
        return tokens >= 4 * CHUNK

    _, jobs = hybrid(pays_to_store=pays)
    assert [job.moves[-1].pages[0] - 500 for job in jobs if job.moves[-1].group] == [4, 8, 12, 14]
    _, bounded = hybrid(pays_to_store=pays, state_bytes=1)
    assert [job.moves[-1].pages[0] - 500 for job in bounded if job.moves[-1].group] == [14], (
        "a bound is the user's word"
    )
    unknown, counted = hybrid(pays_to_store=lambda nbytes, tokens: None), hybrid()
    assert unknown[1] == counted[1], "while it is unknown they take as much as the KV does"


def test_a_page_that_another_group_of_layers_takes_is_told_of() -> None:
    engine = Engine((None, 128))
    engine.compute(TOKENS[:200])
    engine.scheduling.scheduled("s", [[101], [3]], 0, 16, anew=True)
    assert engine.scheduling.step().taken == {101, 3}
