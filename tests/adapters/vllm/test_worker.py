"""A scheduler's and a worker's halves together over a real backend and pages on the CPU, step by step, without vLLM."""

import threading
import time
from collections.abc import Callable, Generator, Sequence

import pytest
import torch

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.paged.jobs import MovingOptions
from kvredis.adapters.vllm.kv_layout import layer_groups
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import Scheduling
from kvredis.adapters.vllm.shared import join, leave
from kvredis.adapters.vllm.weights import Check, WeightsWatch
from kvredis.adapters.vllm.worker import PagedWorker, Results
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.fake_backend import FakeBackend, FakeLease, FakeReservation
from tests.adapters.vllm.paged_specs import FullAttentionSpec, KVCacheGroup, SlidingWindowSpec, names

PAGES, PAGE, CHUNK, HEADS, DIM = 40, 16, 64, 2, 8
TOKENS = list(range(300))
WAIT_S = 30


class Halves:
    """One engine's two halves. `caches` are (pages, heads, tokens, K and V), a tensor a layer, filled by `compute`."""

    moving = MovingOptions()

    def __init__(self, windows: tuple[int | None, ...] = (None,), split: int = 1) -> None:
        specs = [
            SlidingWindowSpec(PAGE, HEADS, DIM, sliding_window=window)
            if window
            else FullAttentionSpec(PAGE, HEADS, DIM)
            for window in windows
        ]
        described = [KVCacheGroup(names(2, 2 * number), spec) for number, spec in enumerate(specs)]
        base = ChunkLayout(1, 1, 1, "u8", chunk_tokens=CHUNK, model="m")
        self.groups = layer_groups(described, base, "auto")
        self.caches = {
            name: torch.zeros(PAGES * split, HEADS, PAGE // split, 2 * DIM, dtype=torch.bfloat16)
            for group in self.groups
            for name in group.names
        }
        self.backend = FakeBackend(10_000)
        self.split = split
        self.open()

    def open(self, backend: object = None) -> None:
        chosen: FakeBackend = self.backend if backend is None else backend  # type: ignore[assignment]
        self.scheduling = Scheduling(self.groups, chosen, SchedulingOptions())
        self.worker = PagedWorker(chosen, self.groups, self.caches, PAGES, self.moving)

    def page(self, name: str, page: int) -> torch.Tensor:
        return self.caches[name][page * self.split : (page + 1) * self.split]

    def compute(self, tables: list[list[int]], start: int, stop: int) -> None:
        """What a forward pass writes: for every token something that follows from its layer and place."""
        for group in self.groups:
            for layer, name in enumerate(group.names):
                for at in range(start // PAGE, stop // PAGE):
                    value = float(1000 * group.group + 100 * layer + at)
                    self.page(name, tables[group.group][at]).fill_(value)

    def prompt(self, name: str, tables: list[list[int]], tokens: list[int] = TOKENS) -> int:
        """One prompt in one step behind what is found; how many tokens were."""
        found = self.scheduling.match(Prompt(name, tokens), 0)
        assert found is not None
        if found:
            self.scheduling.allocated(name, tables, found)
            self.step()
            self.until(lambda results: name in results.loaded)
            self.scheduling.loaded(name)
        self.scheduling.scheduled(name, tables, found, len(tokens) - found, anew=True)
        self.step(lambda: self.compute(tables, found, len(tokens)))
        self.scheduling.finished(name)
        return found

    def step(self, forward: Callable[[], object] = lambda: None) -> None:
        """A step as an engine runs it."""
        step = self.scheduling.step()
        self.worker.before(step)
        jobs = self.worker.stores(step)
        self.worker.load(step)
        forward()
        self.worker.store(step, jobs)

    def until(self, condition: Callable[[Results], bool]) -> Results:
        deadline = time.monotonic() + WAIT_S
        while True:
            results = self.worker.results()
            if condition(results):
                return results
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def holds(self, tables: list[list[int]], tokens: int) -> bool:
        """Whether these pages hold what computing would have written."""
        return all(
            bool((self.page(name, tables[group.group][at]) == 1000 * group.group + 100 * layer + at).all())
            for group in self.groups
            for layer, name in enumerate(group.names)
            for at in range(tokens // PAGE)
            if tables[group.group][at]
        )

    def close(self) -> None:
        self.worker.close()
        assert self.backend.leases == 0


def tables_of(halves: Halves, start: int) -> list[list[int]]:
    return [list(range(start, start + 18)) for _ in halves.groups]


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 100)])
def test_what_one_request_computed_is_in_the_pages_of_the_next(windows: tuple[int | None, ...], split: int) -> None:
    halves = Halves(windows, split)
    first, second = tables_of(halves, 1), tables_of(halves, 20)
    assert halves.prompt("a", first) == 0
    assert halves.worker.mover.settle(WAIT_S)
    if len(windows) > 1:
        second[1][:9] = [0] * 9  # what the window has let go of
    before = {name: cache.clone() for name, cache in halves.caches.items()}
    assert halves.prompt("b", second) == 256
    assert halves.holds(second, 256)
    for name, cache in halves.caches.items():
        others = [at for at in range(PAGES * split) if at // split not in range(20, 38)]
        assert torch.equal(cache[others], before[name][others])
    halves.close()


class Gate(FakeBackend):
    """A FakeBackend that gives no room before it is open, and lends nothing but what a worker asks for at its start."""

    def __init__(self) -> None:
        super().__init__(10_000)
        self.opened, self.asked = threading.Event(), threading.Event()

    def reserve(self, key: bytes, length: int) -> FakeReservation | None:
        self.asked.set()
        assert self.opened.wait(WAIT_S)
        return super().reserve(key, length)

    def load(self, keys: Sequence[bytes], *, within_s: float | None = None) -> Generator[FakeLease | None, None, None]:
        assert list(keys) == [b"-"] or self.opened.wait(WAIT_S)
        yield from super().load(keys, within_s=within_s)


def opened_by_cancel(halves: Halves, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose moves are cancelled, which opens the gate."""
    asked, cancel = list[str](), halves.worker.mover.cancel

    def noted(request: str, wait_s: float = 0.0) -> bool:
        asked.append(request)
        gate.opened.set()
        return cancel(request, wait_s)

    monkeypatch.setattr(halves.worker.mover, "cancel", noted)
    return asked


def test_a_page_is_not_stored_any_more_when_it_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves()
    halves.close()
    gate = Gate()
    halves.open(gate)
    mover, asked = halves.worker.mover, opened_by_cancel(halves, gate, monkeypatch)
    tables, other = tables_of(halves, 1), [7 * token for token in TOKENS]
    halves.prompt("a", tables)
    tables[0].reverse()
    halves.prompt("b", tables, other)  # into the same pages, in another order
    assert asked == ["a"]
    gate.opened.set()
    assert mover.settle(WAIT_S)
    for start, tokens in ((1, TOKENS), (20, other)):
        name, into = f"c{start}", tables_of(halves, start)
        found = halves.prompt(name, into, tokens)
        assert halves.holds(into, found)
    assert found == 256
    halves.close()


def test_a_page_that_is_written_though_its_store_is_stuck_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.adapters.vllm.worker.CANCEL_WAIT_S", 0.01)
    halves = Halves()
    halves.close()
    gate = Gate()
    halves.moving = MovingOptions(batch_bytes=1)
    halves.open(gate)
    tables = tables_of(halves, 1)
    halves.prompt("a", tables)
    assert gate.asked.wait(WAIT_S)  # for the last chunk's room
    taken = tables[0][3 * CHUNK // PAGE : 4 * CHUNK // PAGE]
    halves.scheduling.scheduled("b", [taken], 0, CHUNK, anew=True)
    halves.step(lambda: [halves.page(name, page).fill_(-1) for name in halves.caches for page in taken])
    gate.opened.set()
    assert halves.worker.mover.settle(WAIT_S)
    assert not gate.values
    halves.close()


@pytest.mark.parametrize("split", [1, 2])
def test_pages_that_a_window_has_let_go_of_cost_a_store_what_is_in_them_alone(split: int) -> None:
    halves = Halves((None, 100), split)
    halves.close()
    gate = Gate()
    halves.open(gate)
    tables = [list(range(1, 19)), list(range(20, 38))]  # numbers are of one pool
    halves.prompt("a", tables)
    taken = tables[1][: CHUNK // PAGE]  # the window's first chunk, by a request that vLLM never asked about
    halves.scheduling.scheduled("b", [[], taken], 0, CHUNK, anew=True)
    halves.step(lambda: [halves.page(name, page).fill_(-1) for name in halves.groups[1].names for page in taken])
    gate.opened.set()
    assert halves.worker.mover.settle(WAIT_S)
    assert halves.worker.mover.stats()["cancelled_jobs"] == 0
    all_of_it, window = ([chunk.key for chunk in keys] for keys in halves.scheduling.follow(Prompt("a", TOKENS)).keys)
    assert gate.values.keys() == {*all_of_it, *window[1:]}
    into = [list(range(1, 19)), [0] * 9 + list(range(29, 38))]
    for cache in halves.caches.values():
        cache.zero_()
    assert halves.prompt("c", into) == 256
    assert halves.holds(into, 256)
    halves.close()


def test_keys_of_a_store_that_ends_before_its_end_are_told_of_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves()
    halves.close()
    gate = Gate()
    halves.open(gate)
    opened_by_cancel(halves, gate, monkeypatch)
    tables = tables_of(halves, 1)
    halves.prompt("a", tables)
    halves.prompt("b", tables, [7 * token for token in TOKENS])  # into the same pages
    assert halves.worker.mover.settle(WAIT_S)
    asked = [chunk.key for chunk in halves.scheduling.follow(Prompt("a", TOKENS)).keys[0]]
    assert halves.worker.results().unstored == asked
    for name in ("computed", "found"):
        halves.prompt(name, tables_of(halves, 20))
        assert halves.worker.mover.settle(WAIT_S)
        assert halves.worker.results().unstored == []
    halves.close()


def test_a_page_is_watched_until_its_own_store_is_over_not_an_earlier_one_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = Halves()
    halves.close()
    gate = Gate()
    gate.opened.set()
    halves.open(gate)
    tables, other = tables_of(halves, 1), [7 * token for token in TOKENS]
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables, 0, 128, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 128))
    assert halves.worker.mover.settle(WAIT_S)  # over, and the worker has not asked yet
    gate.opened.clear()
    halves.scheduling.scheduled("a", None, 128, 172)
    halves.step(lambda: halves.compute(tables, 128, 300))
    assert halves.worker.results().stored == {"a"}
    halves.scheduling.finished("a")
    asked = opened_by_cancel(halves, gate, monkeypatch)
    halves.prompt("b", [tables[0][::-1]], other)
    assert asked == ["a"]
    gate.opened.set()
    assert halves.worker.mover.settle(WAIT_S)
    into = tables_of(halves, 20)
    assert halves.holds(into, halves.prompt("c", into))
    halves.close()


class NotingWatch(WeightsWatch):
    """Weights that are what keys say; it notes how many loads have begun when it is asked."""

    def begin(self, number: int, digest: str, *, is_full: bool = False) -> Check:
        self.asked.append(self.worker.mover.stats()["loading_chunks"])
        return Check(self, number, None, holds=True)

    worker: PagedWorker

    def __init__(self) -> None:
        super().__init__(list)
        self.asked: list[int | float] = []


def test_a_load_is_under_way_before_weights_are_compared() -> None:
    halves = Halves()
    halves.close()
    gate = Gate()
    gate.opened.set()
    halves.open(gate)
    halves.prompt("a", tables_of(halves, 1))
    assert halves.worker.mover.settle(WAIT_S)
    gate.opened.clear()
    watch = halves.worker.weights = NotingWatch()
    watch.worker = halves.worker
    halves.scheduling.weights.digests = ("of rank 0",)
    tables = tables_of(halves, 20)
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 256
    halves.scheduling.allocated("b", tables, 256)
    halves.step()
    assert watch.asked == [4]
    gate.opened.set()
    assert halves.until(lambda results: "b" in results.loaded).failed == set()
    assert halves.holds(tables, 256)
    halves.close()


def test_weights_are_compared_behind_the_forward_pass_whose_kv_is_stored() -> None:
    halves, seen = Halves(), list[str]()

    class Watch(NotingWatch):
        def begin(self, number: int, digest: str, *, is_full: bool = False) -> Check:
            seen.append("compared")
            return Check(self, number, None, holds=True)

    halves.worker.weights = Watch()
    halves.scheduling.weights.digests = ("of rank 0",)
    halves.scheduling.match(Prompt("a", TOKENS), 0)
    halves.scheduling.scheduled("a", tables_of(halves, 1), 0, len(TOKENS), anew=True)
    halves.step(lambda: seen.append("forward"))
    assert seen == ["forward", "compared"]
    assert halves.worker.mover.settle(WAIT_S)
    assert halves.worker.mover.stats()["stored_chunks"] == 4
    halves.close()


def test_an_engine_that_is_about_to_hear_of_a_load_does_not_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = Halves()
    prompts = {"a": TOKENS, "b": [7 * token for token in TOKENS]}
    for start, (name, tokens) in zip((1, 20), prompts.items(), strict=True):
        halves.prompt(name, tables_of(halves, start), tokens)
        assert halves.worker.mover.settle(WAIT_S)
    waited: list[float] = []
    monkeypatch.setattr(halves.worker.mover, "wait_loaded", waited.append)
    for start, (name, tokens) in zip((1, 20), prompts.items(), strict=True):
        assert halves.scheduling.match(Prompt(f"{name} again", tokens), 0) == 256
        halves.scheduling.allocated(f"{name} again", tables_of(halves, start), 256)
    halves.step()
    assert len(waited) == 1
    over = halves.until(lambda results: bool(results.loaded)).loaded
    halves.step()
    assert len(waited) == 1
    if over != {"a again", "b again"}:
        halves.step()
        assert len(waited) == 2
        halves.until(lambda results: bool(results.loaded))
    halves.close()


def test_pages_of_a_load_that_fails_are_told_of_and_mended() -> None:
    halves = Halves()
    halves.prompt("a", tables_of(halves, 1))
    assert halves.worker.mover.settle(WAIT_S)
    keys = sorted(halves.backend.values, key=halves.backend.written.index, reverse=True)  # tail first
    halves.backend.values[keys[2]] = bytes(halves.backend.values[keys[2]][:-1]) + b"?"
    tables = tables_of(halves, 20)
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 256
    halves.scheduling.allocated("b", tables, 256)
    halves.step()
    results = halves.until(lambda results: "b" in results.loaded)
    assert results.failed == {"b"}
    assert results.failed_pages == set(range(28, 36))  # the third chunk, and the one behind it
    halves.scheduling.loaded("b", failed=True)
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 0
    halves.scheduling.scheduled("b", tables, 128, 172, anew=True)
    halves.step(lambda: halves.compute(tables, 128, 300))
    assert halves.worker.mover.settle(WAIT_S)
    assert halves.prompt("c", tables_of(halves, 1)) == 256
    halves.close()


def spoil(halves: Halves, key: bytes) -> None:
    """Make numbers that are none of a stored block's last ones."""
    halves.backend.values[key] = bytes(halves.backend.values[key][:-64]) + b"\xff" * 64


@pytest.mark.parametrize("split", [1, 2])
def test_what_was_damaged_leaves_no_numbers_that_are_none_in_any_page(split: int) -> None:
    halves = Halves(split=split)
    halves.prompt("a", tables_of(halves, 1), TOKENS[:256])
    assert halves.worker.mover.settle(WAIT_S)
    spoil(halves, halves.backend.written[1])  # of the third chunk: the last was stored first
    tables, scheduling = tables_of(halves, 20), halves.scheduling
    assert scheduling.match(Prompt("b", TOKENS), 0) == 256
    scheduling.allocated("b", tables, 256)
    halves.step()
    halves.until(lambda results: "b" in results.failed)
    assert halves.holds([tables[0][:8]], 128)
    for name in halves.caches:
        assert all(bool((halves.page(name, page) == 0).all()) for page in range(28, 36))
    halves.close()


def test_a_load_that_is_given_up_leaves_zeros() -> None:
    halves = Halves()
    halves.prompt("a", tables_of(halves, 1), TOKENS[:256])
    assert halves.worker.mover.settle(WAIT_S)
    for cache in halves.caches.values():
        cache.fill_(torch.nan)
    halves.scheduling.match(Prompt("b", TOKENS), 0)
    halves.scheduling.allocated("b", tables_of(halves, 20), 256)
    halves.step()
    halves.scheduling.finished("b")
    halves.step()
    halves.until(lambda results: "b" in results.loaded)
    for name in halves.caches:
        assert all(bool((halves.page(name, page) == 0).all()) for page in range(20, 36))
    halves.close()


def test_a_cancelled_load_is_told_of_once_and_writes_no_more() -> None:
    halves = Halves()
    halves.prompt("a", tables_of(halves, 1))
    assert halves.worker.mover.settle(WAIT_S)
    halves.scheduling.match(Prompt("b", TOKENS), 0)
    halves.scheduling.allocated("b", tables_of(halves, 20), 256)
    halves.step()
    halves.scheduling.finished("b")
    halves.step()
    assert halves.until(lambda results: "b" in results.loaded).failed == set()
    assert halves.worker.results() == Results()
    halves.close()


def test_pages_that_are_not_what_the_model_says_are_refused() -> None:
    halves = Halves()
    halves.close()
    halves.caches[halves.groups[0].names[1]] = torch.zeros(PAGES, HEADS, PAGE, 3)
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.self_attn\.attn has shape"):
        halves.open()


def test_halves_in_one_process_share_a_backend_and_the_last_one_closes_it() -> None:
    config = Config.load(env={}, overrides={"max_local_cpu_size": 0.0625})
    layout = ChunkLayout(1, 1, 1, "u8")
    first, second = join("engine", config, layout), join("engine", config, layout)
    other = join("other", config, layout)
    assert first is second
    assert first.backend is not other.backend
    leave("other")
    leave("engine")
    with second.backend.reserve(b"key", 100) as room:  # type: ignore[union-attr]
        room.commit()
    assert second.backend.match([b"key"]) == 1
    leave("engine")
    leave("engine")
    assert join("engine", config, layout) is not first
    leave("engine")
