"""SGLang's own HiCache controller of hybrid models on the CPU, with the storage threads that it starts, over its own
device and host pools; run by program.py.

What SGLang's scheduler and radix cache do around it is done here: the host memory of what is backed up is filled, as a
copy from the device would, the last pages of a pool of windows or states are named, and what a query has found is given
host memory. Of several ranks each is a controller of its own, and their storage threads agree by gloo where they are
processes.
"""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import base_prefix_cache
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.compat.sglang import pages as contents
from tests.compat.sglang.pages import PAGE_TOKENS
from tests.compat.sglang.pools import LAYERS, device_pool, heads, host_pool, latents

WINDOW_PAGES = 2
ANSWER_S = 30


def host_pools(pool: Any, layout: str, draft: str) -> dict[Any, tuple[Any, Any]]:
    """Host and device pools by name, the anchor first; `draft` is "", "packed", "heads" or "latents"."""
    if isinstance(pool, SWAKVPool):
        parts = {PoolName.KV: pool.full_kv_pool, PoolName.SWA: pool.swa_kv_pool}
    elif isinstance(pool, HybridLinearKVPool):
        parts = {PoolName.KV: pool.full_kv_pool, PoolName.MAMBA: pool.mamba_pool}
    else:
        packed = [latents(1) if isinstance(pool, MLATokenToKVPool) else heads(1)] if draft == "packed" else []
        return {PoolName.KV: (host_pool(pool, layout, packed), pool)}
    return {name: (host_pool(each, layout), each) for name, each in parts.items()}


def entry(name: Any, host: Any, device: Any, layers: int) -> Any:
    """SGLang's entry of a pool in its group."""
    build = hybrid_pool_assembler.build_pool_entry
    bound = next(each for each in inspect.signature(build).parameters if each.startswith("transfer_layer"))
    mapping = {place: place for place in range(layers)}
    return build(
        name=name, host_pool=host, device_pool=device, layer_mapping=mapping, is_anchor=name == PoolName.KV,
        **{bound: layers},
    )  # fmt: skip


class Controller:
    """The controller of one rank, and a storage backend that SGLang's factory makes for it."""

    def __init__(
        self,
        model: str,
        extra: dict[str, Any],
        layout: str = "page_first",
        draft: str = "",
        rank: int = 0,
        ranks: int = 1,
        store_file: str = "",
    ) -> None:
        """`store_file` is where the ranks that are processes meet."""
        group = None
        if store_file:
            meeting = f"file://{store_file}"
            torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
            group = torch.distributed.group.WORLD
        # What an engine's start publishes; the gloo groups above, where there are some, are real.
        place = types.SimpleNamespace(
            tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
        )
        runtime_context.get_server_args = lambda: None
        cache_controller.get_parallel = lambda: place
        cache_controller.is_dp_attention_enabled = lambda: False
        self.tp_worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=torch.nn.Module()))
        pool = device_pool(model)
        self.pools = host_pools(pool, layout, draft)
        entries = [entry(name, host, device, LAYERS) for name, (host, device) in self.pools.items()]
        names = {"backend_name": "kvredis", "module_path": "kvredis.adapters.sglang", "class_name": "KVRedisHiCache"}
        self.controller = HybridCacheController(
            types.SimpleNamespace(get_kvcache=lambda: pool), hybrid_pool_assembler.HostPoolGroup(entries),
            PAGE_TOKENS, group, None, write_policy="write_through", storage_backend="dynamic", model_name="org/hybrid",
            prefetch_threshold=1,
            storage_backend_extra_config=names | {"interface_v1": 1} | extra,
        )  # fmt: skip
        self._handles = 0
        if draft in ("heads", "latents"):
            beside = heads(1) if draft == "heads" else latents(1)
            self.pools[PoolName.DRAFT] = (host_pool(beside, layout), beside)
            self.controller.register_host_pool_entry(entry(PoolName.DRAFT, self.pools[PoolName.DRAFT][0], beside, 1))

    def _transfers(self, keys: Sequence[str], *, with_memory: bool) -> list[PoolTransfer]:
        """Those of the pools beside the anchor, as SGLang's radix cache names them for pages `keys`."""
        transfers = []
        for name, (host, _) in self.pools.items():
            if name == PoolName.DRAFT:
                transfers.append(PoolTransfer(name=name, indices_from_pool=PoolName.KV))
            elif name != PoolName.KV:
                last = list(keys[-(1 if name == PoolName.MAMBA else WINDOW_PAGES) :])
                indices = contents.filled(host, last, str(name)) if with_memory else None
                transfers.append(
                    PoolTransfer(name=name, host_indices=indices, keys=last, hit_policy=PoolHitPolicy.TRAILING_PAGES)
                )
        return transfers

    def backup(self, prompt: int, pages: int) -> dict[str, Any]:
        """Have pages of a prompt stored, and the last of the other pools; what SGLang says is stored then."""
        keys = contents.names(prompt, pages)
        anchor, _ = self.pools[PoolName.KV]
        indices = contents.filled(anchor, keys, str(PoolName.KV))
        if PoolName.DRAFT in self.pools:
            contents.fill(self.pools[PoolName.DRAFT][0], keys, str(PoolName.DRAFT), indices)
        transfers = self._transfers(keys, with_memory=True)
        tokens = contents.tokens_of(prompt, pages)
        self.controller.write_storage(indices, tokens, hash_value=keys, extra_pools=transfers or None)
        done = self.controller.ack_backup_queue.get(timeout=ANSWER_S)
        anchor.free(indices)
        for each in transfers:
            if each.indices_from_pool is None:
                self.pools[each.name][0].free(each.host_indices)
        return {"pages": done.completed_tokens // PAGE_TOKENS, **self._told(done)}

    def query(self, prompt: int, pages: int) -> dict[str, Any]:
        """How many pages of a prompt SGLang finds."""
        return {"found": self._ask(prompt, pages).storage_hit_count // PAGE_TOKENS}

    def _ask(self, prompt: int, pages: int) -> Any:
        self._handles += 1
        transfers = self._transfers(contents.names(prompt, pages), with_memory=False)
        handle: Any = f"request {self._handles}"
        if hasattr(base_prefix_cache, "CacheRequestHandle"):  # since 0.5.20
            handle = base_prefix_cache.CacheRequestHandle(handle, 0)
        self.controller.prefetch(handle, contents.tokens_of(prompt, pages), extra_pools=transfers or None)
        return self.controller.prefetch_hit_queue.get(timeout=ANSWER_S)

    def prefetch(self, prompt: int, pages: int) -> dict[str, Any]:
        """Have a prompt fetched as far as it is found, and compare all that has come with what it must be."""
        operation = self._ask(prompt, pages)
        found = operation.storage_hit_count // PAGE_TOKENS
        keys = list(operation.hash_value)
        anchor, _ = self.pools[PoolName.KV]
        indices = torch.empty(0, dtype=torch.int64) if not found else anchor.alloc(found * PAGE_TOKENS)
        self._clear(anchor, indices)
        operation.host_indices = indices
        transfers = operation.pool_transfers or []
        for each in transfers:
            host, _ = self.pools[each.name]
            if each.indices_from_pool is None:
                each.host_indices = host.alloc(min(len(each.keys), found) * host.page_size)
                self._clear(host, each.host_indices)
            else:
                self._clear(host, indices)
        self.controller.prefetch_buffer.put(operation)
        completed, hits = 0, dict[str, int]()
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=ANSWER_S)
            completed = ack.completed_tokens if ack.completed_tokens is not None else completed
            hits |= {name: count for name, count in (ack.pool_hits or {}).items() if count}
            if ack.completed_req:
                break
        come = [place < completed // PAGE_TOKENS for place in range(found)]
        equal = [contents.are_equal(anchor, keys, str(PoolName.KV), indices, come)]
        for each in transfers:
            host, _ = self.pools[each.name]
            if each.indices_from_pool is None:
                there = [place < hits.get(str(each.name), 0) for place in range(len(each.keys))]
                equal.append(contents.are_equal(host, each.keys, str(each.name), each.host_indices, there))
                host.free(each.host_indices)
            else:
                equal.append(contents.are_equal(host, keys, str(each.name), indices, come))
        if found:
            anchor.free(indices)
        hits = {str(name): count for name, count in hits.items()}
        return {"found": found, "come": completed // PAGE_TOKENS, "hits": hits, "equal": all(equal)}

    @staticmethod
    def _clear(host: Any, indices: torch.Tensor) -> None:
        for start in indices.tolist()[:: host.page_size]:
            host.set_from_flat_data_page(start, torch.zeros_like(host.get_dummy_flat_data_page()))

    @staticmethod
    def _told(operation: Any) -> Mapping[str, Any]:
        told = operation.pool_storage_result.extra_pool_hit_pages
        return {"hits": {str(getattr(name, "value", name)): count for name, count in told.items()}}

    def close(self) -> dict[str, Any]:
        """Detach the storage, which ends its threads and closes the backend."""
        self.controller.detach_storage_backend()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return {}
