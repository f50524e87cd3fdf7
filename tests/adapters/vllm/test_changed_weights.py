"""An engine whose weights change in place: no KV of others is loaded, nor stored under keys of these."""

import copy
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvredis.adapters.engine.tensors import outside_pools
from kvredis.adapters.paged.jobs import MovingOptions
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import Scheduling
from kvredis.adapters.vllm.weights import WAIT_STEPS_MAX, KeyWeights, WeightsWatch
from kvredis.adapters.vllm.worker import PagedWorker, Results, call_around_sleep, worker_of
from tests.adapters.vllm.test_worker import PAGES, TOKENS, WAIT_S, Gate, Halves, tables_of


class Changing(Halves):
    """Halves whose weights are one matrix, and whose worker's words reach the scheduler behind each step."""

    def __init__(self, options: SchedulingOptions | None = None, of: "Changing | None" = None) -> None:
        self.options = options or SchedulingOptions()
        self.model: torch.nn.Linear = torch.nn.Linear(64, 64) if of is None else copy.deepcopy(of.model)
        self.of = of
        super().__init__()

    def open(self, backend: object = None) -> None:
        self.backend = self.backend if self.of is None else self.of.backend
        self.watch = WeightsWatch(lambda: [self.model])
        weights = KeyWeights({0: self.watch.look()})
        self.scheduling = Scheduling(self.groups, self.backend, self.options, None, weights)
        self.worker = PagedWorker(self.backend, self.groups, self.caches, PAGES, MovingOptions(), self.watch)

    def step(self, forward: object = lambda: None) -> None:
        super().step(forward)  # type: ignore[arg-type]
        self.hear()

    def hear(self) -> None:
        report = self.watch.report()
        self.scheduling.weights_told({} if report is None else {0: report})

    def change(self, factor: float = -1.0) -> None:
        self.model.weight.data.mul_(factor)

    def stored(self) -> int:
        assert self.worker.mover.settle(WAIT_S)
        return len(self.backend.values)

    def load(self, name: str, tables: list[list[int]]) -> Results:
        """A load of what is found, to its end."""
        found = self.scheduling.match(Prompt(name, TOKENS), 0)
        assert found == 256
        self.scheduling.allocated(name, tables, found)
        self.step()
        results = self.until(lambda results: name in results.loaded)
        self.scheduling.loaded(name, failed=name in results.failed)
        return results


@pytest.fixture
def halves() -> Changing:
    return Changing()


def test_what_other_weights_have_stored_is_not_loaded_and_what_was_computed_instead_is_stored(halves: Changing) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4
    halves.change()
    tables = tables_of(halves, 20)
    assert halves.load("b", tables).failed == {"b"}
    assert halves.worker.mover.stats()["loads"] in (0, 1)
    halves.step()  # adds the weights up
    halves.scheduling.scheduled("b", tables, 0, 300, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 300))
    assert halves.stored() == 8, "under keys of their own"
    assert halves.prompt("c", tables_of(halves, 1)) == 256
    halves.change()
    assert halves.load("d", tables_of(halves, 20)).failed == {"d"}
    halves.step()
    assert halves.prompt("e", tables_of(halves, 1)) == 256, "the first weights' keys are the first ones"
    assert halves.stored() == 8
    halves.close()


def test_a_step_that_stores_sees_the_change_and_its_request_is_stored_behind_it(halves: Changing) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4
    halves.change()
    tables, other = tables_of(halves, 20), [7 * token for token in TOKENS]
    assert halves.scheduling.match(Prompt("b", other), 0) == 0
    halves.scheduling.scheduled("b", tables, 0, 128, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 128))
    assert halves.stored() == 4, "its keys were of the weights before"
    halves.scheduling.scheduled("b", None, 128, 172)
    halves.step(lambda: halves.compute(tables, 128, 300))
    assert halves.stored() == 4, "still those: the workers have been heard behind this step"
    halves.scheduling.scheduled("b", None, 300, 1)
    halves.step()
    assert halves.stored() == 8
    into = tables_of(halves, 1)
    assert halves.prompt("c", into, other) == 256
    halves.close()


def test_an_engine_that_stores_nothing_finds_what_engines_with_its_new_weights_have_stored(halves: Changing) -> None:
    reader = Changing(SchedulingOptions(stores=False), halves)
    halves.change()
    reader.change()
    halves.prompt("a", tables_of(halves, 1))
    halves.step()
    halves.prompt("b", tables_of(halves, 1))
    assert halves.stored() == 4
    assert reader.prompt("a", tables_of(reader, 1)) == 0, "its keys are of the weights before"
    reader.step()
    assert reader.scheduling.weights.suffix == halves.scheduling.weights.suffix
    assert reader.prompt("b", tables_of(reader, 1)) == 256
    reader.close()
    halves.close()


def test_a_request_in_flight_is_not_stored_any_more_nor_what_is_computed_behind_its_pages(halves: Changing) -> None:
    tables = tables_of(halves, 1)
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables, 0, 128, anew=True)
    halves.step(lambda: halves.compute(tables, 0, 128))
    assert halves.stored() == 2
    halves.change()
    for start in (128, 192, 256):
        halves.scheduling.scheduled("a", None, start, 64 if start < 256 else 44)
        halves.step()
    assert halves.stored() == 2
    halves.scheduling.finished("a")
    assert halves.scheduling.match(Prompt("b", TOKENS), 256) == 0
    halves.scheduling.scheduled("b", tables, 256, 44, anew=True)  # behind pages that the engine has of a
    halves.step()
    assert halves.stored() == 2
    halves.scheduling.finished("b")
    halves.prompt("c", tables_of(halves, 20))  # computes all of it
    assert halves.stored() == 6
    halves.scheduling.match(Prompt("d", TOKENS + TOKENS), 256)
    pages = [[*tables_of(halves, 20)[0][:16], *range(1, 22)]]
    halves.scheduling.scheduled("d", pages, 256, 344, anew=True)  # behind pages of c, which are of these weights
    halves.step()
    assert halves.stored() == 11
    halves.close()


def test_after_a_reset_requests_wait_until_the_weights_are_known_and_find_what_is_theirs(halves: Changing) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4
    for factor in (1.0, -1.0):
        halves.scheduling.weights.reset(forgets=False)
        halves.change(factor)
        assert halves.scheduling.match(Prompt("b", TOKENS), 0) is None
        halves.step()
        assert halves.scheduling.match(Prompt("b", TOKENS), 0) == (256 if factor > 0 else 0)
        halves.scheduling.finished("b")
    tables = tables_of(halves, 20)
    assert halves.prompt("c", tables) == 0
    assert halves.stored() == 8, "what comes behind a reset is stored at once"
    halves.close()


def test_a_user_s_reset_gives_keys_of_their_own_unless_the_weights_are_others(halves: Changing) -> None:
    weights, first = halves.scheduling.weights, halves.scheduling.weights.suffix
    weights.reset(forgets=True)
    halves.step()
    assert weights.suffix.startswith(f"{first}+reset")
    own = weights.suffix
    weights.reset(forgets=False)
    halves.step()
    assert weights.suffix == own
    halves.change()
    weights.reset(forgets=True)
    halves.step()
    assert "reset" not in weights.suffix
    assert weights.suffix != first
    halves.change()
    weights.reset(forgets=False)
    halves.step()
    assert weights.suffix == first
    halves.close()


def test_a_reset_without_known_weights_gives_keys_of_their_own_where_it_is_a_user_s() -> None:
    weights = KeyWeights({})
    weights.reset(forgets=False)
    assert (weights.suffix, weights.is_waiting, weights.epoch) == ("", False, 0)
    weights.reset(forgets=True)
    assert weights.suffix.startswith("+reset")
    assert (weights.is_waiting, weights.epoch) == (False, 1)


def test_workers_that_do_not_answer_are_not_waited_for_for_ever(halves: Changing) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4
    halves.scheduling.weights.reset(forgets=False)
    for _ in range(WAIT_STEPS_MAX):
        halves.scheduling.step()
        assert halves.scheduling.match(Prompt("b", TOKENS), 0) is None
    halves.scheduling.step()
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 0
    halves.watch.begin(1, halves.watch.digest, is_full=True)
    halves.hear()
    assert halves.scheduling.match(Prompt("c", TOKENS), 0) == 256
    halves.close()


def test_a_step_that_moves_nothing_looks_at_no_weights(halves: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    halves.prompt("a", tables_of(halves, 1))
    looked = list[int]()
    monkeypatch.setattr(halves.watch.__class__, "begin", lambda self, number, *_, **__: looked.append(number))
    halves.scheduling.match(Prompt("b", TOKENS[:40]), 0)
    halves.scheduling.scheduled("b", tables_of(halves, 20), 0, 40, anew=True)
    halves.step()
    assert not looked
    halves.close()


def test_weights_that_cannot_be_compared_move_nothing_and_raise_nothing(
    halves: Changing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(halves.watch.__class__, "begin", fail)
    assert halves.load("b", tables_of(halves, 20)).failed == {"b"}
    assert "The model's weights cannot be compared: nothing is loaded or stored: out of memory" in caplog.text
    assert halves.watch.is_suspect
    halves.close()


class Slow:
    """A probe whose answer comes when it is asked to."""

    def __init__(self) -> None:
        self.is_known = False

    def done(self) -> bool:
        return self.is_known

    def result(self) -> tuple[int, ...]:
        return (1,)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_load_is_over_when_it_is_known_whose_weights_it_is_of(
    is_same: bool, halves: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves.prompt("a", tables_of(halves, 1))
    assert halves.stored() == 4
    halves.worker.results()
    slow = Slow()
    monkeypatch.setattr(halves.watch._prober, "probe", lambda models, **_: slow)
    halves.watch._seen = (1,) if is_same else (2,)
    tables = tables_of(halves, 20)
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 256
    halves.scheduling.allocated("b", tables, 256)
    halves.step()
    assert halves.worker.mover.settle(WAIT_S)
    assert halves.worker.results() == Results()
    slow.is_known = True
    results = halves.worker.results()
    assert (results.loaded, results.failed) == ({"b"}, set() if is_same else {"b"})
    assert results.failed_pages == (set() if is_same else set(range(20, 36)))
    assert halves.holds(tables, 256) == is_same
    halves.close()


@pytest.mark.parametrize("by_layers", [True, False])
def test_a_store_whose_probe_answers_later_is_dropped_where_the_weights_were_others(
    by_layers: bool, halves: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(halves.watch._prober, "probe", lambda models, **_: slow)
    halves.watch._seen = (2,)
    assert halves.scheduling.match(Prompt("a", TOKENS), 0) == 0
    halves.scheduling.scheduled("a", tables_of(halves, 1), 0, 300, anew=True)
    step = halves.scheduling.step()
    halves.worker.before(step)
    jobs = halves.worker.stores(step)
    assert len(jobs[0].moves) == 4
    if not by_layers:
        halves.worker.store(step, jobs)
    else:
        jobs = halves.worker.compared(step, jobs)
        for place in (0, 1):
            halves.worker.mover.save_layer(place, jobs)
        halves.worker.mover.end_layers()
    assert halves.stored() == 0
    assert halves.worker.mover.stats()["dropped_stores"] == 4
    assert halves.watch.is_suspect
    halves.close()


# An engine that goes to sleep takes its pages away: nothing of ours reads them, or lies where they lie.


def test_memory_is_taken_in_a_thread_that_has_chosen_no_pool_and_no_inference_mode() -> None:
    with torch.inference_mode():
        made, thread = outside_pools(lambda: (torch.zeros(1), threading.get_ident()))
    assert not made.is_inference()
    assert thread != threading.get_ident()


def test_what_is_raised_outside_pools_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        outside_pools(lambda: 1 // 0)


def test_a_store_under_way_is_over_before_the_engine_sleeps_and_is_stored() -> None:
    halves = Halves()
    halves.close()
    gate = Gate()
    halves.open(gate)
    halves.prompt("a", tables_of(halves, 1))
    resting = threading.Thread(target=halves.worker.rest)
    resting.start()
    gate.opened.set()
    resting.join(WAIT_S)
    assert not resting.is_alive()
    assert halves.worker.mover.stats()["storing_chunks"] == 0
    for cache in halves.caches.values():
        cache.fill_(torch.nan)
    into = tables_of(halves, 20)
    assert halves.prompt("b", into) == 256
    assert halves.holds(into, 256)
    halves.close()


def test_a_store_that_does_not_end_is_broken_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvredis.adapters.vllm.worker.REST_WAIT_S", 0.0)
    halves = Halves()
    halves.close()
    gate = Gate()
    halves.open(gate)
    halves.prompt("a", tables_of(halves, 1))
    opening = threading.Timer(0.05, gate.opened.set)
    opening.start()
    halves.worker.rest()
    assert halves.worker.mover.stats()["storing_chunks"] == 0
    assert "A store is not over after 0 s: the engine sleeps without it" in caplog.text
    opening.join()
    halves.close()


@pytest.mark.parametrize("has_come", [True, False])
def test_a_load_of_which_the_scheduler_has_not_heard_when_the_engine_sleeps_has_failed(has_come: bool) -> None:
    halves = Halves()
    halves.prompt("a", tables_of(halves, 1))
    assert halves.worker.mover.settle(WAIT_S)
    tables = tables_of(halves, 20)
    assert halves.scheduling.match(Prompt("b", TOKENS), 0) == 256
    halves.scheduling.allocated("b", tables, 256)
    halves.step()
    if has_come:
        assert halves.worker.mover.settle(WAIT_S)
    halves.worker.rest()
    halves.worker.rest()  # vLLM says: idempotent
    for cache in halves.caches.values():
        cache.fill_(torch.nan)  # other memory, mapped in the same place
    results = halves.until(lambda results: "b" in results.loaded)
    assert results.failed == {"b"}
    assert results.failed_pages == set(range(20, 36))
    assert all(bool((halves.page(name, page) == 0).all()) for name in halves.caches for page in range(20, 36))
    assert PAGES > 36
    halves.close()


class WorkerBase:
    """vLLM's, as far as it is asked."""

    def __init__(self, vllm_config: object = None) -> None:
        self.vllm_config = vllm_config
        self.called = list[object]()

    def sleep(self, level: int = 1) -> str:
        self.called.append(level)
        return "asleep"

    def wake_up(self, tags: list[str] | None = None) -> str:
        self.called.append(tags)
        return "awake"


class GPUWorker(WorkerBase):
    """One of its kinds."""


def test_before_0_33_a_worker_s_own_methods_say_when_its_pages_go_and_come() -> None:
    worker = GPUWorker()
    call_around_sleep(worker, lambda: worker.called.append("before"), lambda: worker.called.append("behind"))
    assert worker.sleep(level=2) == "asleep"
    assert worker.wake_up(["weights"]) == "awake"
    assert worker.wake_up(tags=["kv_cache"]) == "awake"
    assert worker.wake_up() == "awake"
    assert worker.called == ["before", 2, ["weights"], ["kv_cache"], "behind", None, "behind"]


def test_a_connector_finds_the_worker_whose_configuration_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.v1.worker.worker_base")
    module.WorkerBase = WorkerBase  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", module)
    configs = [SimpleNamespace(compilation_config=object()) for _ in range(3)]
    workers = [GPUWorker(config) for config in configs[:2]]
    assert worker_of(configs[0]) is workers[0]
    assert worker_of(SimpleNamespace(compilation_config=configs[1].compilation_config)) is workers[1]
    assert worker_of(configs[2]) is None
