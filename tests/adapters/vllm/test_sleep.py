"""An engine that goes to sleep takes its pages away: nothing of ours reads them, or lies where they lie."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvredis.adapters.engine.tensors import outside_pools
from kvredis.adapters.vllm.scheduler import Prompt
from kvredis.adapters.vllm.worker import call_around_sleep, worker_of
from tests.adapters.vllm.test_worker import PAGES, TOKENS, WAIT_S, Gate, Halves, tables_of


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
