"""The connector's own methods where the rest of vLLM is stubs: what needs several ranks, or processes, to be seen."""

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvredis.adapters.keys import key_prefix
from kvredis.adapters.scheduling_options import Prompt
from kvredis.backends.layered import LayeredBackend
from kvredis.storage.errors import LayoutError
from tests.adapters.paged_specs import (
    FullAttentionSpec,
    KVCacheGroup,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    names,
)
from tests.adapters.test_vllm_reading import engine, request
from tests.backends.nodes import free_ports

SEVERAL = dict(zip(names(2), (SlidingWindowSpec(), FullAttentionSpec()), strict=True))
DOORS = ("vllm", "vllm_events", "vllm_metadata", "vllm_metrics")


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
    put("vllm.distributed.parallel_state", get_tensor_model_parallel_rank=lambda: 0)
    for name in DOORS:
        monkeypatch.delitem(sys.modules, f"kvredis.adapters.{name}", raising=False)
    import kvredis.adapters.vllm as found

    yield found
    for name in DOORS:
        sys.modules.pop(f"kvredis.adapters.{name}", None)


def opened(
    door: Any, role: str, spec: object, ranks: int = 2, *, name: str = "", shake: bool = True, **extra: object
) -> Any:
    """One half of an engine of so many ranks, before a server that is not there."""
    told = engine(parallel={"tensor_parallel_size": ranks, "world_size": ranks, "distributed_executor_backend": None})
    told.device_config = SimpleNamespace(device_type="cpu")
    extra = {"remote_url": f"redis://127.0.0.1:{free_ports(1)[0]}", "max_local_cpu_size": 0.0625} | extra
    told.kv_transfer_config = SimpleNamespace(
        kv_role="kv_both", engine_id=name or role, kv_connector_extra_config=extra
    )
    caches = SimpleNamespace(kv_cache_groups=[KVCacheGroup(names(2), spec)], num_blocks=40)
    half = door.KVRedisConnector(told, Role[role], caches)
    if role == "SCHEDULER" and shake:  # as vLLM does with what it has asked its workers for
        half.set_xfer_handshake_metadata(dict.fromkeys(range(ranks), half.get_handshake_metadata()))
    return half


def test_workers_elsewhere_look_on_the_server_too_and_hear_of_new_weights_with_the_next_step(door: Any) -> None:
    worker = opened(door, "WORKER", FullAttentionSpec())
    assert isinstance(worker._shared.backend, LayeredBackend)
    assert worker._shared.backend.asks_far
    alone = opened(door, "WORKER", FullAttentionSpec(), ranks=1)
    assert not alone._shared.backend.asks_far
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec())
    assert scheduler.reset_cache() is False, "the server that is not there may have some"
    assert scheduler._scheduling.match(Prompt("a", list(range(300))), 0) == 0
    step = scheduler._scheduling.step()
    assert step.forget == {key_prefix(scheduler._groups[0].layout).partition(b"{")[0]}
    for half in (worker, alone, scheduler):
        half.shutdown()


def test_ranks_that_are_told_of_one_disk_open_it_side_by_side(
    door: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"local_disk": str(tmp_path), "max_local_disk_size": "32MB"}
    workers = []
    for rank in range(2):
        monkeypatch.setattr(door, "_rank", lambda rank=rank: rank)
        workers.append(opened(door, "WORKER", FullAttentionSpec(), name=f"process {rank}", **disk))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), **disk)
    for half in (*workers, scheduler):
        half.shutdown()


def test_a_worker_in_the_scheduler_s_process_forgets_at_once(door: Any) -> None:
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1)
    told = list[set[bytes]]()
    scheduler._shared.forget = told.append
    assert scheduler.reset_cache() is False, "the server that is not there may have some"
    assert told == [{key_prefix(scheduler._groups[0].layout).partition(b"{")[0]}]
    assert not scheduler._scheduling.step().forget
    scheduler.shutdown()
    assert scheduler.reset_cache() is False


def test_memory_alone_is_forgotten_and_that_is_said(door: Any) -> None:
    scheduler = opened(door, "SCHEDULER", FullAttentionSpec(), ranks=1, remote_url=None, local_cpu=True)
    assert scheduler.reset_cache() is True
    scheduler.shutdown()


def test_the_scheduler_looks_for_the_chunks_of_the_layers_that_its_worker_has(door: Any) -> None:
    worker = opened(door, "WORKER", UniformTypeKVCacheSpecs(SEVERAL), ranks=1)
    scheduler = opened(door, "SCHEDULER", next(iter(SEVERAL.values())), ranks=1)
    assert len(scheduler._groups) == 1, "vLLM shows its scheduler the first layer's spec for all"
    scheduler.shutdown()
    scheduler = opened(door, "SCHEDULER", next(iter(SEVERAL.values())), ranks=1, shake=False)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    prompt = Prompt("a", list(range(300)))
    assert scheduler._scheduling.match(prompt, 0) == 0
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
