"""The connector's own methods where the rest of vLLM is stubs: what needs several ranks, or processes, to be seen."""

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvredis.adapters.engine.keys import key_prefix
from kvredis.adapters.vllm.request import Prompt
from kvredis.adapters.vllm.stored_events import Origin, Stored
from kvredis.adapters.vllm.worker import Results
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.storage.errors import ConfigError, LayoutError
from tests.adapters.vllm.paged_specs import (
    FullAttentionSpec,
    KVCacheGroup,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    names,
)
from tests.adapters.vllm.test_config import engine, request
from tests.backends.nodes import free_ports

SEVERAL = dict(zip(names(2), (SlidingWindowSpec(), FullAttentionSpec()), strict=True))
MODULES = ("connector", "metrics")


class Half:
    """KVConnectorBase_V1, as far as its parts here go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config


class Role(Enum):
    """KVConnectorRole."""

    SCHEDULER = 0
    WORKER = 1


class Named:
    """Whatever vLLM has under a name that is only inherited from."""


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kvredis.adapters.vllm, over stubs of what it imports."""

    def put(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        return module

    above = "vllm.distributed.kv_transfer.kv_connector.v1"
    rooms = above.split(".")
    for count in range(1, len(rooms)):
        put(".".join(rooms[:count]))
    base = put(
        f"{above}.base",
        KVConnectorBase_V1=Half, KVConnectorRole=Role, KVConnectorMetadata=Named, SupportsHMA=Named,
        KVConnectorTransferResults=SimpleNamespace, KVConnectorWorkerMetadata=Named,
    )  # fmt: skip
    put(above, base=base)
    put(f"{above}.metrics", KVConnectorPromMetrics=Named, KVConnectorStats=Named)
    put("vllm.distributed.kv_events", BlockStored=SimpleNamespace, BlockRemoved=SimpleNamespace)
    ranks = {"get_tensor_model_parallel_rank": lambda: 0, "get_pp_group": lambda: SimpleNamespace(rank_in_group=0)}
    put("vllm.distributed.parallel_state", **ranks)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"kvredis.adapters.vllm.{name}", raising=False)
    import kvredis.adapters.vllm.connector as found

    yield found
    for name in MODULES:
        sys.modules.pop(f"kvredis.adapters.vllm.{name}", None)


def opened(
    door: Any,
    role: str,
    spec: object,
    ranks: int = 2,
    *,
    name: str = "",
    shake: bool = True,
    stages: int = 1,
    layers: tuple[str, ...] = tuple(names(2)),
    kv_role: str = "kv_both",
    replica: int = 0,
    **extra: object,
) -> Any:
    """One half of an engine of so many ranks in each stage, before a server that is not there."""
    parallel = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "world_size": ranks * stages}
    parallel |= {"data_parallel_index": replica}
    told = engine(parallel=parallel | {"distributed_executor_backend": None})
    told.device_config = SimpleNamespace(device_type="cpu")
    extra = {"remote_url": f"redis://127.0.0.1:{free_ports(1)[0]}", "max_local_cpu_size": 0.0625} | extra
    told.kv_transfer_config = SimpleNamespace(kv_role=kv_role, engine_id=name or role, kv_connector_extra_config=extra)
    caches = SimpleNamespace(kv_cache_groups=[KVCacheGroup(list(layers), spec)], num_blocks=40)
    half = door.KVRedisConnector(told, Role[role], caches)
    if role == "SCHEDULER" and shake:  # as vLLM does with what it has asked its workers for
        half.set_xfer_handshake_metadata(dict.fromkeys(range(ranks), half.get_handshake_metadata()))
    return half


def matched(half: Any, prompt: Prompt) -> int | None:
    """What a scheduler's half is told at last of a prompt that it must ask a server for."""
    found: int | None = half._scheduling.match(prompt, 0)
    if found is None:  # the answer takes longer than a moment
        assert half._scheduling.follow(prompt).lookup.wait(10)
        found = half._scheduling.match(prompt, 0)
    return found


def test_workers_elsewhere_look_on_the_server_too(door: Any) -> None:
    worker = opened(door, "WORKER", FullAttentionSpec())
    assert isinstance(worker._shared.backend, LayeredBackend)
    assert worker._shared.backend.asks_far
    alone = opened(door, "WORKER", FullAttentionSpec(), ranks=1)
    assert not alone._shared.backend.asks_far
    for half in (worker, alone):
        half.shutdown()


def test_data_parallel_replicas_that_are_told_of_one_disk_open_it_side_by_side(door: Any, tmp_path: Path) -> None:
    disk: dict[str, Any] = {"local_disk": str(tmp_path), "max_local_disk_size": "32MB"}
    replicas = [
        opened(door, "WORKER", FullAttentionSpec(), ranks=1, name=f"replica {each}", replica=each, **disk)
        for each in range(2)
    ]
    assert sorted(each.parent for each in tmp_path.rglob("lock")) == [tmp_path, tmp_path / "replica-1"]
    for half in replicas:
        half.shutdown()


def test_ranks_that_are_told_of_one_disk_open_it_side_by_side(
    door: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"local_disk": str(tmp_path), "max_local_disk_size": "32MB"}
    workers = []
    for rank in range(2):
        monkeypatch.setattr(door, "_rank", lambda _, rank=rank: rank)
        workers.append(opened(door, "WORKER", FullAttentionSpec(), name=f"process {rank}", **disk))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), **disk)
    for half in (*workers, scheduler):
        half.shutdown()


@pytest.mark.parametrize("is_pause", [True, False])
def test_a_reset_needs_no_server_and_gives_keys_of_their_own_where_a_user_asks_for_it(
    is_pause: bool, door: Any
) -> None:
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec())

    def _reset_caches() -> object:  # as vLLM's EngineCore calls it for sleep and pause
        return scheduler.reset_cache()

    assert (_reset_caches() if is_pause else scheduler.reset_cache()) is True
    assert scheduler._scheduling.weights.suffix.startswith("+reset") != is_pause
    scheduler.shutdown()
    assert scheduler.reset_cache() is True


class Runner:
    """A worker of vLLM's, whose model is one matrix."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(64, 64)

    def get_model(self) -> torch.nn.Module:
        return self.model


def caches_of(spec: FullAttentionSpec) -> dict[str, torch.Tensor]:
    shape = (40, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    return {name: torch.zeros(shape, dtype=spec.dtype) for name in names(2)}


def test_weights_are_in_keys_from_the_start_and_what_ranks_tell_of_new_ones_reaches_them(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners, workers = [Runner(), Runner()], []
    for rank, runner in enumerate(runners):
        monkeypatch.setattr(door, "_rank", lambda _, rank=rank: rank)
        monkeypatch.setattr(door, "worker_of", lambda config, runner=runner: runner)
        worker = opened(door, "WORKER", FullAttentionSpec(), name=f"process {rank}")
        worker.register_kv_caches(caches_of(FullAttentionSpec()))
        workers.append(worker)
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), shake=False)
    scheduler.set_xfer_handshake_metadata(dict(enumerate(each.get_handshake_metadata() for each in workers)))
    suffix = scheduler._scheduling.weights.suffix
    assert suffix.startswith("+w")
    prompt = Prompt("a", list(range(300)))
    assert suffix.replace("+", "_").encode() in scheduler._scheduling.follow(prompt).keys[0][0].key
    runners[1].model.weight.data.neg_()
    assert scheduler.reset_cache() is True
    assert scheduler._scheduling.match(prompt, 0) is None
    step = scheduler._scheduling.step()
    for worker in workers:
        worker.handle_preemptions(SimpleNamespace(step=step))
    told = workers[0].build_connector_worker_meta().aggregate(workers[1].build_connector_worker_meta())
    assert {rank: report.table is not None for rank, report in told.weights.items()} == {0: False, 1: True}
    scheduler.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=told, invalid_block_ids=set(), finished_recving=None)
    )
    assert scheduler._scheduling.weights.suffix not in ("", suffix)
    assert matched(scheduler, prompt) == 0
    assert workers[0].build_connector_worker_meta() is None
    for half in (*workers, scheduler):
        half.shutdown()


def test_the_scheduler_hears_of_what_workers_have_not_stored(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[bytes]] = []
    monkeypatch.setattr(door, "worker_of", lambda config: Runner())
    worker = opened(door, "WORKER", FullAttentionSpec(), ranks=1)
    worker.register_kv_caches(caches_of(FullAttentionSpec()))
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1, shake=False)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    worker.build_connector_worker_meta()
    monkeypatch.setattr(scheduler._scheduling, "unstored", heard.append)
    monkeypatch.setattr(worker._worker, "results", lambda: Results(unstored=[b"k"]))
    worker.get_finished(set())
    told = worker.build_connector_worker_meta()
    both = told.aggregate(door.WorkerMetadata(set(), {}, [], [b"l"]))
    scheduler.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=both, invalid_block_ids=set(), finished_recving=None)
    )
    assert heard == [[b"k", b"l"]]
    assert worker.build_connector_worker_meta() is None
    for half in (worker, scheduler):
        half.shutdown()


def test_an_engine_whose_model_is_not_found_says_so_and_keeps_what_it_stores_to_itself(
    door: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "worker_of", lambda config: None)
    suffixes = []
    for name in ("one", "other"):
        worker = opened(door, "WORKER", FullAttentionSpec(), ranks=1, name=name)
        worker.register_kv_caches(caches_of(FullAttentionSpec()))
        scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1, name=name, shake=False)
        scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
        suffixes.append(scheduler._scheduling.weights.suffix)
        worker.shutdown()
        scheduler.shutdown()
    assert suffixes[0] != suffixes[1]
    assert "vLLM's model was not found, whose weights are in keys" in caplog.text


@pytest.mark.parametrize("tells", [True, False])
def test_copies_are_clear_of_pages_that_sleep_takes_away_whichever_way_vllm_tells(
    tells: bool, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = Runner()
    runner.sleep, runner.wake_up = (lambda level=1: "asleep"), (lambda tags=None: "awake")
    monkeypatch.setattr(door, "_TELLS_OF_SLEEP", tells)
    monkeypatch.setattr(door, "worker_of", lambda config: runner)
    worker = opened(door, "WORKER", FullAttentionSpec(), ranks=1)
    worker._vllm_config.model_config.enable_sleep_mode = True
    worker.register_kv_caches(caches_of(FullAttentionSpec()))
    worker.get_handshake_metadata()
    assert worker.supports_sleep_mode(None)
    if tells:
        worker.unregister_kv_caches()
        worker.unregister_kv_caches()
        worker.restore_kv_caches()
    else:
        assert (runner.sleep(level=2), runner.wake_up()) == ("asleep", "awake")
    assert worker._worker.weights.is_suspect
    before = worker._worker.weights.table
    assert worker.get_handshake_metadata().handshake.weights is before, "0.33 asks while weights may be unmapped still"
    worker.shutdown()
    worker.unregister_kv_caches()


def test_vllm_that_does_not_tell_of_sleep_is_refused_where_its_worker_is_not_found(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_TELLS_OF_SLEEP", False)
    monkeypatch.setattr(door, "worker_of", lambda config: None)
    worker = opened(door, "WORKER", FullAttentionSpec(), ranks=1)
    worker._vllm_config.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        worker.register_kv_caches(caches_of(FullAttentionSpec()))
    worker.shutdown()


class Told(SimpleNamespace):
    """A struct of kv_events.py."""

    __struct_fields__ = (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "medium"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    )


def test_events_say_what_vllm_s_own_do_and_nothing_that_this_version_does_not_know(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Origin((7, "french"), "tenant", (), "session")
    stored = Stored(b"d", None, (1, 2), 1, "remote", origin, origin.extra_keys(0, 2))
    caches = SimpleNamespace(kv_cache_groups=[KVCacheGroup(names(2), spec) for spec in SEVERAL.values()])
    assert door.kinds_of(caches) == [], "an older vLLM has no words for it"
    interface = ModuleType("vllm.v1.kv_cache_interface")
    interface.__dict__.update(
        get_kv_cache_spec_kind=lambda spec: SimpleNamespace(value=type(spec).__name__),
        get_kv_cache_spec_sliding_window=lambda spec: getattr(spec, "sliding_window", None),
    )
    monkeypatch.setitem(sys.modules, "vllm.v1", ModuleType("vllm.v1"))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", interface)
    monkeypatch.setattr(door.kv_events, "BlockStored", Told)
    (event,) = door.events_of([stored], door.kinds_of(caches))
    assert (event.lora_id, event.lora_name, event.extra_keys) == (7, "french", [("french", "tenant")])
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("FullAttentionSpec", None)
    assert not hasattr(event, "session_id")
    monkeypatch.setattr(Told, "__struct_fields__", ("block_hashes", "lora_name", "session_id"))
    (event,) = door.events_of([stored], [])
    assert vars(event) == {"block_hashes": [b"d"], "lora_name": "french", "session_id": "session"}


def test_tokens_of_a_load_are_counted_by_where_they_come_from(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = ModuleType("vllm.v1.metrics.cache_hit_source")
    sources.__dict__["CacheHitSource"] = Enum("CacheHitSource", ["HOST", "DISK", "EXTERNAL_UNSPECIFIED"])
    for name in ("vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", sources)
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1)
    scheduler._scheduling.follow(Prompt("r", list(range(600))))
    asked = request(request_id="r")
    assert scheduler.get_external_cache_hit_sources(asked, 0) == {}
    found = scheduler.get_external_cache_hit_sources(asked, 512)
    assert {source.name: tokens for source, tokens in found.items()} == {"EXTERNAL_UNSPECIFIED": 512}
    scheduler.shutdown()


def test_the_scheduler_looks_for_the_chunks_of_the_layers_that_its_worker_has(door: Any) -> None:
    worker = opened(door, "WORKER", UniformTypeKVCacheSpecs(SEVERAL), ranks=1)
    scheduler = opened(door, "SCHEDULER", next(iter(SEVERAL.values())), ranks=1)
    assert len(scheduler._groups) == 1, "vLLM shows its scheduler the first layer's spec for all"
    scheduler.shutdown()
    scheduler = opened(door, "SCHEDULER", next(iter(SEVERAL.values())), ranks=1, shake=False)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    prompt = Prompt("a", list(range(300)))
    assert matched(scheduler, prompt) == 0
    keys = scheduler._scheduling.follow(prompt).keys
    assert [each[0].key.partition(b"{")[0] for each in keys] == [
        key_prefix(group.layout).partition(b"{")[0] for group in worker._groups
    ]
    assert len(keys) == 2
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})  # 0.33 does so after each wake-up
    assert scheduler._scheduling.follow(prompt).keys is keys
    other = opened(door, "WORKER", FullAttentionSpec(), ranks=1, name="other")
    with pytest.raises(LayoutError, match="layers have changed"):
        scheduler.set_xfer_handshake_metadata({0: other.get_handshake_metadata()})
    for half in (worker, other, scheduler):
        half.shutdown()


def test_the_scheduler_looks_for_what_all_ranks_of_all_stages_have(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [tuple(names(2)), tuple(names(3, start=2))]
    of_stages: dict[str, Any] = {"stages": 2, "ranks": 2}
    workers = []
    for stage in range(2):
        for rank in range(2):
            place = sys.modules["vllm.distributed.parallel_state"]
            monkeypatch.setattr(place, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr(place, "get_pp_group", lambda stage=stage: SimpleNamespace(rank_in_group=stage))
            name = f"process {stage} {rank}"
            workers.append(opened(door, "WORKER", FullAttentionSpec(), name=name, layers=layers[stage], **of_stages))
    assert [worker._rank for worker in workers] == [0, 1, 2, 3]
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), shake=False, layers=layers[0], **of_stages)
    told = {(at // 2, at % 2): worker.get_handshake_metadata() for at, worker in enumerate(workers)}
    scheduler.set_xfer_handshake_metadata_pp_aware(told)
    (group,) = scheduler._groups
    assert (group.layout.layers, group.names) == (5, tuple(names(5)))
    assert group.shards() == [b"0/2:0-1", b"1/2:0-1", b"0/2:2-4", b"1/2:2-4"]
    scheduler.set_xfer_handshake_metadata_pp_aware(told)  # 0.33 does so after each wake-up
    for half in (*workers, scheduler):
        half.shutdown()


def test_a_router_is_told_how_another_engine_finds_what_it_has_asked_for(door: Any) -> None:
    half, prompts = opened(door, "SCHEDULER", FullAttentionSpec(), name="prefill"), list(range(300))
    shared = {"prompt_token_ids": prompts, "all_token_ids": prompts}
    asked = request(**shared, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    half.get_num_new_matched_tokens(asked, 0)
    keeps, told = half.request_finished(asked, [])
    assert not keeps
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "kvredis_chunk": told["kvredis_chunk"],
    }
    assert told["kvredis_chunk"].startswith("kvredis:org/model")
    for other in (request(**shared), request(kv_transfer_params={"do_remote_decode": True})):  # of the last no chunk
        half.get_num_new_matched_tokens(other, 0)
        assert half.request_finished(other, []) == (False, None)
    half.shutdown()


@pytest.mark.parametrize(
    ("role", "wait_for_kv", "announces", "waits"),
    [
        ("kv_both", False, False, False),
        ("kv_both", True, True, True),
        ("kv_producer", False, True, False),
        ("kv_consumer", True, False, True),
    ],
)
def test_engines_share_what_they_compute_by_their_role_and_where_they_are_told_to(
    role: str, wait_for_kv: bool, announces: bool, waits: bool, door: Any
) -> None:
    half = opened(door, "SCHEDULER", FullAttentionSpec(), kv_role=role, wait_for_kv=wait_for_kv)
    options = half._scheduling.options
    assert (options.announces, options.waits) == (announces, waits)
    half.shutdown()


def test_a_scheduler_that_has_not_heard_of_its_workers_asks_for_nothing_and_says_so_once(
    door: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1, shake=False)
    asked = request(num_prompt_tokens=3)
    assert [scheduler.get_num_new_matched_tokens(asked, 0) for _ in range(2)] == [(0, False)] * 2
    assert scheduler.build_connector_meta(SimpleNamespace()).step.is_idle
    scheduler.update_connector_output(SimpleNamespace())
    assert scheduler.request_finished_all_groups(asked, ()) == (False, None)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "vLLM has not handed over what its workers tell of their layers" in caplog.text
    scheduler.shutdown()
