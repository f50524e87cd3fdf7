"""Stores in the background: in order, bounded, whole after a flush, and without a byte that was written too late."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kvredis.adapters.engine.background import LOADS_MAX
from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend, FakeReservation

LAYOUT = ChunkLayout(3, 2, 8, "bf16", model="tiny/llama")
CHUNK = 16
TOKENS = list(range(CHUNK * 8))
WAIT_S = 20


class GatedBackend(FakeBackend):
    """Gives room for a block when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.asking = threading.Event()

    def reserve(self, key: bytes, length: int) -> FakeReservation | None:
        self.asking.set()
        assert self.gate.acquire(timeout=WAIT_S)
        return super().reserve(key, length)


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def engine(backend: GatedBackend) -> Iterator[CacheEngine]:
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend) as made:
        yield made
        backend.gate.release(10_000)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvredis stores"]


def kv_of() -> torch.Tensor:
    shape = (3, 2, len(TOKENS), 2, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_an_engine_computes_while_its_tokens_leave(engine: CacheEngine, backend: GatedBackend) -> None:
    save = engine.store_later(TOKENS, kv_of())
    assert backend.asking.wait(WAIT_S)
    assert (save.done, save.tokens) == (False, 0)
    backend.gate.release(8)
    assert save.wait(WAIT_S)
    assert save.tokens == len(TOKENS) == engine.stats.stored_tokens
    out = torch.zeros_like(kv_of())
    assert engine.retrieve(TOKENS, out) == len(TOKENS)
    assert torch.equal(out, kv_of())


def test_a_prompt_handed_over_step_by_step_is_stored_once(engine: CacheEngine, backend: GatedBackend) -> None:
    backend.gate.release(8)
    saves = [engine.store_later(TOKENS[:stop], kv_of()) for stop in range(CHUNK, len(TOKENS) + 1, CHUNK)]
    engine.flush()
    assert [(save.done, save.tokens) for save in saves] == [(True, CHUNK)] * 8
    assert engine.lookup(TOKENS) == len(TOKENS)


def test_a_flush_waits_for_what_was_handed_over(engine: CacheEngine, backend: GatedBackend) -> None:
    saves = [engine.store_later(TOKENS[:stop], kv_of()) for stop in (CHUNK, len(TOKENS))]
    flushing = threading.Thread(target=engine.flush)
    flushing.start()
    assert backend.asking.wait(WAIT_S)
    assert flushing.is_alive()
    backend.gate.release(8)
    flushing.join(WAIT_S)
    assert all(save.done for save in saves)
    assert engine.lookup(TOKENS) == len(TOKENS)


def test_a_full_queue_refuses_at_once_and_the_next_prefix_makes_up_for_it(
    engine: CacheEngine, backend: GatedBackend
) -> None:
    first = engine.store_later(TOKENS[:CHUNK], kv_of())
    assert backend.asking.wait(WAIT_S)
    waiting = [engine.store_later(TOKENS[:CHUNK], kv_of()) for _ in range(LOADS_MAX)]
    refused = engine.store_later(TOKENS[: 2 * CHUNK], kv_of())
    assert (refused.refused, refused.done, refused.tokens) == (True, True, 0)
    assert engine.stats.refused_saves == 1
    backend.gate.release(8)
    assert all(save.wait(WAIT_S) for save in (first, *waiting))
    engine.store_later(TOKENS[: 3 * CHUNK], kv_of())
    engine.flush()
    assert engine.lookup(TOKENS) == 3 * CHUNK


def test_closing_ends_what_is_under_way_and_drops_what_waits(backend: GatedBackend) -> None:
    engine = CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend)
    saves = [engine.store_later(TOKENS[:stop], kv_of()) for stop in (CHUNK, len(TOKENS))]
    assert backend.asking.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert not backend.closed, "a store that writes comes first"
    assert not saves[0].done
    while not saves[1].cancelled:
        assert closing.is_alive()
    backend.gate.release(1)
    closing.join(WAIT_S)
    assert backend.closed
    assert [(save.done, save.tokens) for save in saves] == [(True, CHUNK), (True, 0)]
    late = engine.store_later(TOKENS, kv_of())
    assert (late.refused, late.done) == (True, True)


def test_nothing_to_store_is_done_at_once(backend: GatedBackend) -> None:
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend, role="kv_consumer") as consumer:
        assert consumer.store_later(TOKENS, kv_of()).done
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend) as engine:
        save = engine.store_later(TOKENS[:3], [])
        assert (save.done, save.refused, engine.stats.refused_saves) == (True, False, 0)


def test_a_forked_process_is_refused_at_once_and_waits_for_no_store_of_the_other(
    engine: CacheEngine, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = engine.store_later(TOKENS, kv_of())
    assert backend.asking.wait(WAIT_S)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        another, load = engine.store_later(TOKENS, kv_of()), engine.retrieve_later(TOKENS, kv_of())
        assert (another.done, another.refused, another.tokens) == (load.done, load.refused, load.tokens)
        assert (load.done, load.refused, load.tokens) == (True, True, 0)
        assert engine.flush() == 0
    assert not save.done
    backend.gate.release(8)
    assert save.wait(WAIT_S)
    assert save.tokens == len(TOKENS)


def test_a_forked_process_does_not_wait_for_a_store_that_the_other_has_begun(
    engine: CacheEngine, backend: GatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = engine.store_later(TOKENS, kv_of())
    assert backend.asking.wait(WAIT_S)
    told: list[bool] = []
    waiting = threading.Thread(target=lambda: told.append(save.wait()), daemon=True)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        waiting.start()
        waiting.join(WAIT_S)
    assert told == [False]
    backend.gate.release(8)
    assert save.wait(WAIT_S)


def test_the_callers_mistake_raises_where_it_was_made(engine: CacheEngine) -> None:
    with pytest.raises(LayoutError):
        engine.store_later(TOKENS, kv_of()[:, :, :50])


def test_trouble_of_the_backend_ends_the_store_and_not_the_thread(engine: CacheEngine, backend: GatedBackend) -> None:
    backend.broken = True
    save = engine.store_later(TOKENS, kv_of())
    assert save.wait(WAIT_S)
    assert save.tokens == 0
    assert engine.stats.errors == 1
    backend.broken = False
    backend.gate.release(8)
    save = engine.store_later(TOKENS, kv_of())
    assert save.wait(WAIT_S)
    assert save.tokens == len(TOKENS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_kv_that_a_gpu_is_still_making_is_stored_as_it_will_be(engine: CacheEngine, backend: GatedBackend) -> None:
    backend.gate.release(8)
    kv, made = torch.zeros_like(kv_of()).cuda(), kv_of().cuda()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]  # the stream is busy
    kv.copy_(made)
    engine.store_later(TOKENS, kv)
    engine.flush()
    out = torch.zeros_like(kv_of())
    assert engine.retrieve(TOKENS, out) == len(TOKENS)
    assert torch.equal(out, kv_of())
