"""Generation with a server in every kind of trouble: equal tokens, one warning, and the cache again when it is over."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.keys import chunk_keys
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from kvredis.backends.config.url import parse_url
from kvredis.backends.remote.backend import RemoteBackend
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from tests.adapters.slow_backend import settle
from tests.backends.fake_server import Answer, FakeServer, Leave, Shelf

CHUNK = 16
TIMEOUT_S = 0.5

Open = Callable[..., CachedModel]


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )
    made.train(False)
    yield made
    torch.set_num_threads(threads)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def fake(tmp_path: Path, shelf: Shelf) -> Iterator[FakeServer]:
    server = FakeServer(tmp_path, shelf)
    yield server
    server.close()


@pytest.fixture
def open_model(model: LlamaForCausalLM) -> Iterator[Open]:
    """Opens cached models over a server by its URL, and closes them."""
    opened: list[CachedModel] = []

    def make(url: str, clock: Callable[[], float] = lambda: 0.0) -> CachedModel:
        staging = Store(Arena.create(8 << 20, HugepageMode.OFF))
        backend = RemoteBackend(parse_url(url), staging, timeout_s=TIMEOUT_S, clock=clock)
        opened.append(CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout_of(model, "tiny"), backend)))
        return opened[-1]

    yield make
    for cached in opened:
        cached.close()


def prompt(tokens: int = 100) -> torch.Tensor:
    return torch.randint(3, 512, (1, tokens), generator=torch.Generator().manual_seed(0))


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    result = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    return [int(token) for token in result[0]]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refusing(text: bytes, shelf: Shelf) -> Answer:
    """Answers the handshake and refuses all else."""
    return lambda args: shelf(args) if args[0] == b"PING" else b"-" + text + b"\r\n"


def halfway(shelf: Shelf, blocks: int) -> Answer:
    """Gives so many blocks, and dies in the middle of the next."""
    left = [blocks]
    lock = threading.Lock()

    def answer(args: list[bytes]) -> bytes | Leave:
        said = shelf(args)
        if args[0] != b"GET":
            return said
        with lock:
            left[0] -= 1
            assert isinstance(said, bytes)
            return said if left[0] >= 0 else Leave(said[: len(said) // 2])

    return answer


def test_a_server_that_was_never_there_is_a_miss_and_is_used_once_it_is(
    model: LlamaForCausalLM, open_model: Open, tmp_path: Path, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    cached = open_model(f"unix://{tmp_path}/fake", lambda: now_s)
    expected = greedy(model, prompt())
    for _ in range(3):
        assert greedy(cached, prompt()) == expected
    assert len(warnings(caplog)) == 1
    assert cached.engine.stats.dropped_stores == 3 * 6
    assert cached.engine.stats.errors == 0
    server = FakeServer(tmp_path, shelf)
    try:
        now_s = 100.0
        assert greedy(cached, prompt()) == expected
        cached.engine.flush()
        assert greedy(cached, prompt()) == expected
        assert cached.last_loaded == 96
    finally:
        cached.close()
        server.close()


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_server_that_dies_in_the_middle_of_a_load_leaves_a_prefix_and_the_rest_is_computed(
    model: LlamaForCausalLM,
    open_model: Open,
    fake: FakeServer,
    shelf: Shelf,
    blocks: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    cached = open_model(fake.url, lambda: now_s)
    expected = greedy(model, prompt())
    assert greedy(cached, prompt()) == expected
    cached.engine.flush()
    fake.answer = halfway(shelf, blocks)
    assert greedy(cached, prompt()) == expected
    assert cached.last_plan.need_to_load == 96
    assert cached.last_loaded % CHUNK == 0
    assert cached.last_loaded <= blocks * CHUNK
    assert len([line for line in warnings(caplog) if "is lost" in line]) == 1
    fake.answer = shelf
    now_s = 100.0
    assert greedy(cached, prompt()) == expected
    assert cached.last_loaded == 96
    assert cached.engine.stats.errors == cached.engine.stats.refused_blocks == 0


@pytest.mark.parametrize(
    "trouble",
    [
        b"OOM command not allowed when used memory > 'maxmemory'.",
        b"NOAUTH Authentication required.",
        b"LOADING Redis is loading the dataset in memory",
    ],
)
def test_a_server_that_refuses_is_a_miss_said_once_and_used_again(
    model: LlamaForCausalLM,
    open_model: Open,
    fake: FakeServer,
    shelf: Shelf,
    trouble: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cached = open_model(fake.url)
    expected = greedy(model, prompt())
    fake.answer = refusing(trouble, shelf)
    for _ in range(3):
        assert greedy(cached, prompt()) == expected
        cached.engine.flush()
    kind = trouble.decode().split()[0]
    assert [kind in line for line in warnings(caplog)] == [True]
    assert cached.engine.stats.refused_stores > 0
    fake.answer = shelf
    assert greedy(cached, prompt()) == expected
    assert cached.engine.flush() == 0
    assert greedy(cached, prompt()) == expected
    assert cached.last_loaded == 96


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff\x00\xff\r\n", b"*-7\r\n$x\r\n"])
def test_a_server_that_answers_garbage_is_lost_and_nothing_else(
    model: LlamaForCausalLM, open_model: Open, fake: FakeServer, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cached = open_model(fake.url)
    fake.answer = lambda args: garbage
    expected = greedy(model, prompt())
    for _ in range(3):
        assert greedy(cached, prompt()) == expected
    assert len(warnings(caplog)) == 1
    assert cached.engine.stats.errors == 0


def test_a_server_that_hangs_costs_its_timeout_and_not_once_a_request(
    model: LlamaForCausalLM, open_model: Open, fake: FakeServer, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    cached = open_model(fake.url)
    expected = greedy(model, prompt())
    let_go = threading.Event()

    def hang(args: list[bytes]) -> bytes | Leave:
        let_go.wait(60)
        return Leave()

    fake.answer = hang
    try:
        for _ in range(10):
            assert greedy(cached, prompt()) == expected
        assert len(warnings(caplog)) == 1
        assert len(fake.commands) <= 3, "a clock that stands still: it is not asked again"
    finally:
        let_go.set()


def test_with_auto_a_server_that_stops_giving_costs_a_moment_and_is_not_lost_for_it(
    fake: FakeServer, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    skipped_s = 0.0
    layout = ChunkLayout(2, 2, 64, "bf16", model="tiny/llama")
    staging = Store(Arena.create(8 << 20, HugepageMode.OFF))
    backend = RemoteBackend(parse_url(fake.url), staging, timeout_s=60)
    config = Config(chunk_size=CHUNK, min_retrieve_tokens="auto")
    tokens, kv = list(range(CHUNK * 8 + 1)), torch.ones(2, 2, CHUNK * 8 + 1, 2, 64, dtype=torch.bfloat16)
    let_go = threading.Event()

    def keeps_silent(args: list[bytes]) -> bytes | Leave:
        if args[0] == b"GET":
            let_go.wait(60)
            return Leave()
        return shelf(args)

    def load(engine: CacheEngine) -> int:
        plan = engine.plan(tokens)
        return engine.retrieve(tokens, torch.empty_like(kv), stop=plan.stop) if plan.need_to_load else 0

    with CacheEngine(config, layout, backend, clock=lambda: time.perf_counter() + skipped_s) as engine:
        for _ in range(2):
            engine.prefill_took(250, 1.0)  # a chunk is computed in 64 ms
        engine.store(tokens, kv)
        engine.flush()
        try:
            fake.answer = keeps_silent
            began_s = time.monotonic()
            assert load(engine) == 0
            assert load(engine) == 0
            assert time.monotonic() - began_s < 10, "the timeout is a minute"
            assert engine.stats.skipped_tokens > 0
        finally:
            let_go.set()
            fake.answer = shelf
        deadline_s = time.monotonic() + 30
        while not (loaded := load(engine)) and time.monotonic() < deadline_s:
            settle()
            skipped_s += 1000  # not while a probe is timed
        assert loaded == CHUNK * 8
    assert [line.partition(":")[0] for line in warnings(caplog)] == [
        "The remote tier is given up, computing is faster",
        "The remote tier is used again",
    ]


def test_a_block_that_was_damaged_on_the_server_is_computed_again(
    model: LlamaForCausalLM, open_model: Open, fake: FakeServer, shelf: Shelf
) -> None:
    cached = open_model(fake.url)
    expected = greedy(model, prompt())
    assert greedy(cached, prompt()) == expected
    cached.engine.flush()
    third = chunk_keys(prompt()[0], cached.engine.layout)[2].key
    shelf.values[third] = shelf.values[third][:-1]
    assert greedy(cached, prompt()) == expected
    assert cached.last_loaded == 2 * CHUNK
    assert cached.engine.stats.refused_blocks == 1
