"""Loads in the background: in order, bounded, ended by cancel and close, and never a byte into what was given back."""

import threading
import weakref
from collections.abc import Generator, Iterator, Sequence

import pytest
import torch

from kvredis.adapters.engine.background import LOADS_MAX, Executor, Task
from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import event_on
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from kvredis.storage.memory.sched import SLICE_NS
from tests.adapters.fake_backend import FakeBackend, FakeLease
from tests.backends.nodes import wait_until
from tests.storage.memory.asked_slices import has_slices, slice_ns

LAYOUT = ChunkLayout(3, 2, 8, "bf16", model="tiny/llama")
CHUNK = 16
TOKENS = list(range(CHUNK * 8))
WAIT_S = 20


class GatedBackend(FakeBackend):
    """Gives each block when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.given = 0
        self.asking = threading.Event()

    def let(self, blocks: int) -> None:
        self.gate.release(blocks)

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        for lease in super().load(keys):
            self.asking.set()
            assert self.gate.acquire(timeout=WAIT_S)
            self.given += 1
            yield lease


@pytest.fixture
def backend() -> GatedBackend:
    return GatedBackend()


@pytest.fixture
def engine(backend: GatedBackend) -> Iterator[CacheEngine]:
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend) as made:
        made.store(TOKENS, kv_of())
        yield made
        backend.let(10_000)
    assert backend.leases == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvredis loads"]


def kv_of() -> torch.Tensor:
    shape = (3, 2, len(TOKENS), 2, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_an_engine_in_inference_mode_has_its_layers_filled_by_a_thread_that_is_not(
    engine: CacheEngine, backend: GatedBackend
) -> None:
    with torch.inference_mode():
        out = [[torch.zeros(len(TOKENS), 2, 8, dtype=torch.bfloat16) for _ in "KV"] for _ in range(3)]
        load = engine.retrieve_later(TOKENS, out)
    backend.let(8)
    assert load.wait(WAIT_S)
    assert load.tokens == len(TOKENS)
    assert torch.equal(torch.stack([torch.stack(pair) for pair in out]), kv_of())


def test_an_engine_computes_while_its_tokens_come(engine: CacheEngine, backend: GatedBackend) -> None:
    out, kv = torch.zeros_like(kv_of()), kv_of()
    load = engine.retrieve_later(TOKENS, out, start=20, stop=100)
    assert (load.done, load.tokens, load.wait(0)) == (False, 20, False)
    assert engine.lookup(TOKENS) == len(TOKENS), "everything else goes on meanwhile"
    assert engine.store([*range(500, 532)], kv) == 32
    backend.let(8)
    assert load.wait(WAIT_S)
    assert (load.done, load.tokens, load.refused) == (True, 100, False)
    assert torch.equal(out[:, :, 20:100], kv[:, :, 20:100])
    assert not out[:, :, :20].any()
    assert not out[:, :, 100:].any()
    assert engine.stats.loaded_tokens == 80


def test_the_tensors_of_a_load_that_is_over_are_not_kept(engine: CacheEngine, backend: GatedBackend) -> None:
    out = torch.zeros_like(kv_of())
    kept = weakref.ref(out)
    load = engine.retrieve_later(TOKENS, out)
    backend.let(8)
    assert load.wait(WAIT_S)
    del load, out
    wait_until(lambda: kept() is None, "a GPU has the memory back before the next load")


def test_loads_come_in_the_order_in_which_they_were_asked_for(engine: CacheEngine, backend: GatedBackend) -> None:
    outs = [torch.zeros_like(kv_of()) for _ in range(3)]
    loads = [engine.retrieve_later(TOKENS, out) for out in outs]
    for turn, load in enumerate(loads):
        backend.let(8)
        assert load.wait(WAIT_S)
        assert [each.done for each in loads] == [place <= turn for place in range(3)]
        assert torch.equal(outs[turn], kv_of())


def test_a_cancelled_load_ends_behind_its_block_and_writes_no_more(engine: CacheEngine, backend: GatedBackend) -> None:
    out = torch.zeros_like(kv_of())
    load, next_one = (engine.retrieve_later(TOKENS, each) for each in (out, torch.zeros_like(out)))
    assert backend.asking.wait(WAIT_S)
    load.cancel()
    next_one.cancel()
    backend.let(1)
    assert load.wait(WAIT_S)
    assert next_one.wait(WAIT_S)
    assert (load.tokens, next_one.tokens) == (CHUNK, 0)
    assert torch.equal(out[:, :, :CHUNK], kv_of()[:, :, :CHUNK])
    assert not out[:, :, CHUNK:].any()
    assert backend.given == 1
    backend.let(8)
    assert engine.retrieve_later(TOKENS, out).wait(WAIT_S), "others are not its business"


def test_a_full_queue_refuses_at_once_and_counts(engine: CacheEngine, backend: GatedBackend) -> None:
    out = torch.zeros_like(kv_of())
    first = engine.retrieve_later(TOKENS, out)
    assert backend.asking.wait(WAIT_S)
    waiting = [engine.retrieve_later(TOKENS, out) for _ in range(LOADS_MAX)]
    refused = engine.retrieve_later(TOKENS, out, start=5)
    assert (refused.refused, refused.done, refused.tokens) == (True, True, 5)
    assert engine.stats.refused_loads == 1
    for load in waiting[1:]:
        load.cancel()
    backend.let(16)
    assert all(load.wait(WAIT_S) for load in (first, *waiting))
    backend.let(8)
    assert engine.retrieve_later(TOKENS, out).wait(WAIT_S)
    assert engine.stats.refused_loads == 1


def test_closing_ends_what_is_under_way_and_what_waits(backend: GatedBackend) -> None:
    engine = CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend)
    engine.store(TOKENS, kv_of())
    loads = [engine.retrieve_later(TOKENS, torch.zeros_like(kv_of())) for _ in range(3)]
    assert backend.asking.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert not backend.closed, "a load that holds a lease comes first"
    backend.let(1)
    closing.join(WAIT_S)
    assert backend.closed
    assert [load.done for load in loads] == [True] * 3
    assert [load.tokens for load in loads][1:] == [0, 0]
    late = engine.retrieve_later(TOKENS, torch.zeros_like(kv_of()))
    assert (late.refused, late.done, late.tokens) == (True, True, 0)


def test_nothing_to_load_is_done_at_once(engine: CacheEngine) -> None:
    out = torch.zeros_like(kv_of())
    for load in (
        engine.retrieve_later([1, 2], out),
        engine.retrieve_later(TOKENS, out, start=len(TOKENS)),
        engine.retrieve_later(TOKENS, out, start=50, stop=50),
    ):
        assert load.done
        assert not load.refused
    assert engine.stats.refused_loads == 0


def test_the_callers_mistake_raises_where_it_was_made(engine: CacheEngine) -> None:
    with pytest.raises(LayoutError):
        engine.retrieve_later(TOKENS, kv_of()[:, :, :50])


def test_trouble_of_the_backend_ends_the_load_and_not_the_thread(engine: CacheEngine, backend: GatedBackend) -> None:
    backend.broken = True
    load = engine.retrieve_later(TOKENS, torch.zeros_like(kv_of()), start=3)
    assert load.wait(WAIT_S)
    assert load.tokens == 3
    backend.broken = False
    backend.let(8)
    load = engine.retrieve_later(TOKENS, torch.zeros_like(kv_of()))
    assert load.wait(WAIT_S)
    assert load.tokens == len(TOKENS)
    assert engine.stats.errors == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_load_comes_behind_what_its_tensors_were_given_before_and_beside_what_follows(
    engine: CacheEngine, backend: GatedBackend
) -> None:
    backend.let(16)
    wanted, out = kv_of(), torch.empty_like(kv_of()).cuda()
    first = engine.retrieve_later(TOKENS, torch.empty_like(out))
    assert first.wait(WAIT_S)  # a kernel's first use waits for all others
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the stream is busy
    out.fill_(7)
    load = engine.retrieve_later(TOKENS, out)
    torch.cuda._sleep(20_000_000_000)  # type: ignore[no-untyped-call]  # some 10 s
    busy = event_on(torch.cuda.current_stream())
    assert load.wait(WAIT_S)
    assert not busy.query()  # type: ignore[no-untyped-call]
    assert load.tokens == len(TOKENS)
    busy.synchronize()
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))],
)
@pytest.mark.parametrize("as_pairs", [False, True])
def test_of_chunks_at_the_ends_only_what_is_wanted_is_written(
    engine: CacheEngine, backend: GatedBackend, device: str, as_pairs: bool
) -> None:
    backend.let(100)
    wanted, out = kv_of(), torch.full_like(kv_of(), 7).to(device)
    start, stop = 3, len(TOKENS) - 2
    load = engine.retrieve_later(TOKENS, list(out) if as_pairs else out, start=start, stop=stop)
    assert load.wait(WAIT_S)
    assert load.tokens == stop
    found = out.cpu()
    assert torch.equal(found[:, :, start:stop], wanted[:, :, start:stop])
    assert (found[:, :, :start] == 7).all()
    assert (found[:, :, stop:] == 7).all()


def test_counters_are_right_when_loads_and_calls_meet(backend: GatedBackend) -> None:
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend) as engine:
        engine.store(TOKENS, kv_of())
        backend.let(100_000)
        loads = []
        for _ in range(50):
            loads.append(engine.retrieve_later(TOKENS, torch.zeros_like(kv_of())))
            assert engine.retrieve(TOKENS, torch.zeros_like(kv_of())) == len(TOKENS)
        assert all(load.wait(WAIT_S) for load in loads)
        assert {load.tokens for load in loads} == {len(TOKENS)}
        assert engine.stats.loaded_tokens == 100 * len(TOKENS)
        assert engine.stats.loaded_bytes == 100 * len(TOKENS) * LAYOUT.bytes_per_token


@pytest.mark.parametrize("steps_aside", [False, True])
def test_what_steps_aside_lets_the_engine_in_on_its_processor(steps_aside: bool) -> None:
    found: list[int] = []

    def run(job: Task) -> int:
        found.append(slice_ns())
        return 1

    executor: Executor[Task] = Executor(run, "copies", steps_aside=steps_aside)
    job = Task(0)
    assert executor.submit(job)
    assert job.wait(WAIT_S)
    executor.close()
    assert found == [SLICE_NS if steps_aside and has_slices() else slice_ns()]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_job_that_fails_in_our_own_code_ends_refused_and_the_next_one_is_done(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def run(job: Task) -> int:
        if job.tokens == 5:
            raise error
        return 7

    executor: Executor[Task] = Executor(run, "copies")
    bad, good = Task(5), Task(0)
    assert executor.submit(bad)
    executor.settle()
    assert executor.submit(good)
    executor.settle()
    executor.close()
    assert (bad.done, bad.refused, bad.tokens) == (True, True, 5)
    assert (good.done, good.refused, good.tokens) == (True, False, 7)
    assert caplog.messages == ["copies: a job ended wildly"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_job_that_stands_back_goes_on_when_the_next_one_comes_or_none_will(is_closed: bool) -> None:
    ended: list[tuple[Task, bool]] = []

    def run(job: Task) -> int:
        job.end(1)
        executor.stand_back(10 * WAIT_S)
        ended.append((job, bool(executor._queue) or executor._closed))
        return 1

    executor: Executor[Task] = Executor(run, "copies")
    first, second = Task(0), Task(0)
    assert executor.submit(first)
    assert first.wait(WAIT_S)
    assert not ended
    if not is_closed:
        assert executor.submit(second)
        assert second.wait(WAIT_S)
        assert ended == [(first, True)]
    executor.close()
    assert ended == [(first, True)] + [(second, True)] * (not is_closed)


def test_an_engine_goes_before_its_stores_and_not_before_its_loads(backend: GatedBackend) -> None:
    with CacheEngine(Config(chunk_size=CHUNK), LAYOUT, backend) as engine:
        assert (engine._saver._steps_aside, engine._loader._steps_aside) == (True, False)
