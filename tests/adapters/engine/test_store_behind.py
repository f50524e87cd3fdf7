"""Stores leave behind the engine's back: it never waits for a server, and what was dropped is never claimed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import Config
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.backends.fake_server import FakeServer, Leave, Shelf

LAYOUT = ChunkLayout(4, 2, 64, "bf16", model="tiny/llama")
CHUNK = 128  # 256 KiB a block, and half a KiB of header
BLOCKS = 5
TOKENS = CHUNK * BLOCKS
"""Tokens of one prompt."""
FIT = 15
"""Blocks in the queue: half of 8 MiB."""

Open = Callable[..., CacheEngine]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A server that the test scripts."""
    server = FakeServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def open_engine(fake: FakeServer) -> Iterator[Open]:
    """Opens engines with 8 MiB of memory for transfers over that server, and closes them."""
    opened: list[CacheEngine] = []

    def make(connections: int = 2, clock: Callable[[], float] = lambda: 0.0) -> CacheEngine:
        staging = Store(Arena.create(8 << 20, HugepageMode.OFF))
        backend = RemoteBackend(parse_url(fake.url), staging, connections=connections, timeout_s=20, clock=clock)
        opened.append(CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def shelf(fake: FakeServer, open_engine: Open) -> Iterator[Shelf]:
    """What that server keeps; it takes SETs when the test says so, and before the engines are closed."""
    fake.answer = shelf = Shelf()
    shelf.open.clear()
    yield shelf
    shelf.open.set()


def prompt(number: int, blocks: int = BLOCKS) -> list[int]:
    return [number * 100_000 + position for position in range(blocks * CHUNK)]


def kv_of(number: int, blocks: int = BLOCKS) -> torch.Tensor:
    shape = (4, 2, blocks * CHUNK, 2, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def assert_loads(engine: CacheEngine, number: int, tokens: int, blocks: int = BLOCKS) -> None:
    """So many tokens of the prompt are there, each bit as it was computed."""
    assert engine.lookup(prompt(number, blocks)) == tokens
    out = torch.zeros_like(kv_of(number, blocks))
    assert engine.retrieve(prompt(number, blocks), out) == tokens
    assert torch.equal(out[:, :, :tokens], kv_of(number, blocks)[:, :, :tokens])


def sets(shelf: Shelf) -> list[bytes]:
    return [key for name, key in shelf.log if name == b"SET"]


def test_an_engine_computes_on_while_a_server_takes_nothing_and_what_was_taken_arrives_whole(
    shelf: Shelf, open_engine: Open
) -> None:
    engine = open_engine()
    stored = [engine.store(prompt(step), kv_of(step)) for step in range(10)]
    assert sets(shelf) == [], "ten steps were computed meanwhile"
    assert stored == [TOKENS] * 3 + [0] * 7
    assert engine.stats.dropped_stores == 7 * BLOCKS
    assert engine.backend.stats()["queued"] == FIT
    assert [engine.lookup(prompt(step)) for step in range(10)] == stored
    for step in range(3):
        assert_loads(engine, step, TOKENS)
    shelf.open.set()
    assert engine.flush() == 0
    assert len(shelf.values) == FIT
    for each in (engine, open_engine()):
        for step, tokens in enumerate(stored):
            assert_loads(each, step, tokens)
    assert engine.stats.errors == engine.stats.refused_stores == engine.stats.refused_blocks == 0


def test_of_a_prompt_that_does_not_fit_the_head_goes_and_the_next_time_it_goes_on_from_there(
    shelf: Shelf, open_engine: Open
) -> None:
    engine, blocks = open_engine(), 2 * FIT + 4
    tokens, kv = prompt(1, blocks), kv_of(1, blocks)
    assert engine.store(tokens, kv) == FIT * CHUNK
    assert engine.stats.dropped_stores == blocks - FIT
    assert engine.store(tokens, kv) == 0
    assert_loads(engine, 1, FIT * CHUNK, blocks)
    shelf.open.set()
    assert engine.flush() == 0
    assert_loads(open_engine(), 1, FIT * CHUNK, blocks)
    stored = FIT * CHUNK
    while stored < len(tokens):
        more = engine.store(tokens, kv)
        assert more > 0
        stored += more
        assert engine.flush() == 0
        assert_loads(open_engine(), 1, stored, blocks)
    assert len(set(sets(shelf))) == len(sets(shelf)) == blocks, "none is sent twice"


def test_chunks_reach_the_server_tail_first_with_their_head_touched_before_each(
    shelf: Shelf, open_engine: Open
) -> None:
    engine = open_engine(connections=1)
    shelf.open.set()
    engine.store(prompt(1)[: 2 * CHUNK], kv_of(1))
    assert engine.flush() == 0
    shelf.log.clear()
    shelf.open.clear()
    engine.store(prompt(1), kv_of(1))
    shelf.open.set()
    assert engine.flush() == 0
    keys = [chunk.key for chunk in chunk_keys(prompt(1), engine.layout)]
    order = [entry for entry in shelf.log if entry[0] in (b"SET", b"TOUCH")]
    touch = (b"TOUCH", keys[0])
    # The first touch is match()'s own: this server does not know KV.MATCH.
    assert order[1:] == [touch, (b"SET", keys[4]), touch, (b"SET", keys[3]), touch, (b"SET", keys[2]), touch]


@pytest.mark.parametrize("head", [0, 2, 4])
def test_what_a_full_server_keeps_of_a_prompt_is_a_prefix(shelf: Shelf, open_engine: Open, head: int) -> None:
    engine = open_engine(connections=1)
    shelf.blocks_max = 6
    shelf.open.set()
    engine.store(prompt(1, 10)[: head * CHUNK], kv_of(1, 10))
    engine.flush()
    assert engine.store(prompt(1, 10), kv_of(1, 10)) == (10 - head) * CHUNK
    assert engine.flush() == 0
    assert_loads(open_engine(), 1, 6 * CHUNK, 10)


def test_of_two_prompts_the_later_takes_the_tail_of_the_earlier(shelf: Shelf, open_engine: Open) -> None:
    engine = open_engine(connections=1)
    shelf.blocks_max = 2 * BLOCKS - 2
    for number in (1, 2):
        engine.store(prompt(number), kv_of(number))
    shelf.open.set()
    assert engine.flush() == 0
    other = open_engine()
    assert_loads(other, 2, TOKENS)
    assert_loads(other, 1, TOKENS - 2 * CHUNK)


def test_what_waited_for_a_server_that_is_lost_is_claimed_no_longer_and_stored_when_it_is_back(
    fake: FakeServer, shelf: Shelf, open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    engine = open_engine(clock=lambda: now_s)
    assert engine.store(prompt(1), kv_of(1)) == TOKENS
    fake.answer = lambda args: Leave()
    shelf.open.set()
    assert engine.lookup(prompt(2)) == 0
    refused = engine.flush()
    assert 0 < refused <= BLOCKS
    assert engine.lookup(prompt(1)) == 0
    assert engine.store(prompt(3), kv_of(3)) == 0
    assert engine.stats.dropped_stores == BLOCKS
    assert len(caplog.messages) == 1
    fake.answer = shelf
    now_s = 100.0
    assert engine.store(prompt(3), kv_of(3)) == TOKENS
    assert engine.flush() == 0
    assert_loads(open_engine(), 3, TOKENS)
    assert engine.stats.errors == 0
