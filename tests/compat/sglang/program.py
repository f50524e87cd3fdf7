"""SGLang's own HiCache classes and host pools on the CPU with kvredis behind; run by test_sglang.py.

A line of JSON on stdin is a request, a line of JSON on the first stdout its answer.
"""

import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import transformers.utils  # noqa: E402, F401  # before the stub: it asks whether torchvision is there

from tests.compat.sglang.stand_ins import Absent  # noqa: E402

sys.meta_path.append(Absent())
import torch  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from tests.compat.sglang.controller import Controller  # noqa: E402
from tests.compat.sglang.pages import PAGE_TOKENS, are_equal, filled, names  # noqa: E402
from tests.compat.sglang.pools import LAYERS, heads, host_pool, latents, states  # noqa: E402

SERVED = {"kv_cache_dtype": "auto", "json_model_override_args": "{}", "revision": None, "quantization": None}
SERVED |= {"model_path": "org/tiny"}
"""ServerArgs, as far as kvredis asks for them."""
CONFIG = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "is_mla_model": False,
    "enable_storage_metrics": True,
    "is_page_first_layout": False,
    "model_name": "org/tiny",
}


def made(kind: str, layout: str, dtype: torch.dtype) -> Any:
    """A host pool of SGLang's over a device pool whose device is the CPU."""
    return host_pool((latents if kind == "mla" else heads)(LAYERS, dtype), layout)


def mamba_pool(**shape: Any) -> Any:
    """A host pool of Mamba states, a page each."""
    return host_pool(states(**shape), "page_first")


def paged_pool(name: str = "deepseek_v4_c4", item_bytes: int = 512, tokens: int = PAGE_TOKENS) -> Any:
    """A host pool of DeepSeek V4, of rows of bytes."""
    buffers = [torch.zeros(8, item_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(name, buffers, item_bytes, 8, tokens, layout="page_first", pin_memory=False)


class Updater:
    """Changes weights as SGLang's WeightUpdater does, whose imports need a GPU."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def update_weights_from_tensor(self, seed: int) -> None:
        """Make all weights others."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for weight in self._model.parameters():
                weight.data.normal_()


def runner(seed: int) -> Any:
    """A ModelRunner, as far as kvredis asks for it."""
    model = torch.nn.Linear(8, 8)
    updater = Updater(model)
    updater.update_weights_from_tensor(seed)
    return types.SimpleNamespace(model=model, weight_updater=updater)


class Worker:
    """A storage backend as SGLang's factory makes it, beneath a scheduler as SGLang's (0.5.23) as far as kvredis looks
    at it, and the pools that it knows."""

    def __init__(
        self,
        kind: str,
        layout: str,
        extra: dict[str, Any],
        config: dict[str, Any],
        dtype: str = "bfloat16",
        sidecars: Sequence[tuple[str, str]] = (),
        served: dict[str, Any] | None = None,
        weights: int | None = 1,
        draft_weights: int | None = None,
        replica: int | None = None,
    ) -> None:
        if weights is not None:
            self.tp_worker = types.SimpleNamespace(model_runner=runner(weights))
        if draft_weights is not None:
            draft = runner(draft_weights)
            self.draft_worker = types.SimpleNamespace(weight_update_runners=lambda: [("draft", draft)])
        runtime_context.get_server_args = lambda: None if served is None else types.SimpleNamespace(**SERVED | served)
        names = {"backend_name": "kvredis", "module_path": "kvredis.adapters.sglang", "class_name": "KVRedisHiCache"}
        whole = CONFIG | {"is_page_first_layout": layout == "page_first", "is_mla_model": kind == "mla"} | config
        storage_config = HiCacheStorageConfig(**whole, extra_config=names | extra)
        self.pools = {str(PoolName.KV): made(kind, layout, getattr(torch, dtype))}
        anchor = self.pools[str(PoolName.KV)]
        before = runtime_context.get_parallel
        runtime_context.get_parallel = lambda: types.SimpleNamespace(dp_rank=replica)
        try:
            self.backend = StorageBackendFactory.create_backend("dynamic", storage_config, anchor)
        finally:
            runtime_context.get_parallel = before
        self.backend.register_mem_pool_host(anchor)
        for name, pool_kind in sidecars:
            self.pools[name] = made(pool_kind, "page_first", torch.bfloat16)
            self.backend.register_mem_host_pool_v2(self.pools[name], PoolName(name))
        if hasattr(self.backend, "on_host_pools_registered"):  # since 0.5.23
            self.backend.on_host_pools_registered()

    def keys_of(self, pool: str, name: str, **shape: Any) -> dict[str, Any]:
        """What the keys of pages of a pool begin with that is registered under this name."""
        makers: dict[str, Any] = {"mamba": mamba_pool, "paged": paged_pool}
        made = makers[pool](**shape)
        self.backend.register_mem_host_pool_v2(made, PoolName(name))
        return {"keys": self.backend._pools[name].prefix.decode()}

    def update_weights(self, seed: int) -> dict[str, Any]:
        """Change the weights, and do not flush yet."""
        self.tp_worker.model_runner.weight_updater.update_weights_from_tensor(seed)
        return {}

    def flush(self) -> dict[str, Any]:
        """Clear the host pools, as SGLang does when it flushes its cache."""
        for pool in self.pools.values():
            pool.clear()
        return {}

    # -- the ways that SGLang takes ----------------------------------------------------------------------------------

    def set(self, prompt: int, pages: int, way: str, first: int = 0) -> dict[str, Any]:
        """Store pages [first, pages) of a prompt."""
        keys = names(prompt, pages)[first:]
        pool = self.pools[str(PoolName.KV)]
        indices = filled(pool, keys, str(PoolName.KV))
        if way == "v1":
            told: Any = self.backend.batch_set_v1(keys, indices)
        else:
            starts = indices.tolist()[::PAGE_TOKENS]
            told = self.backend.batch_set(keys, [pool.get_data_page(start) for start in starts])
        pool.free(indices)
        return {"set": told}

    def get(self, prompt: int, pages: int, way: str) -> dict[str, Any]:
        """Load pages of a prompt, and compare those that have come with what they must be."""
        keys = names(prompt, pages)
        pool = self.pools[str(PoolName.KV)]
        indices = pool.alloc(pages * PAGE_TOKENS)
        if way == "v1":
            come = self.backend.batch_get_v1(keys, indices)
        else:
            tensors = self.backend.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
            come = [tensor is not None for tensor in tensors]
            for start, tensor in zip(indices.tolist()[::PAGE_TOKENS], tensors, strict=True):
                if tensor is not None:
                    pool.set_from_flat_data_page(start, tensor)
        answer = {"come": come, "equal": are_equal(pool, keys, str(PoolName.KV), indices, come)}
        pool.free(indices)
        return answer

    def exists(self, prompt: int, pages: int) -> dict[str, Any]:
        """How many pages of a prompt are found."""
        return {"found": self.backend.batch_exists(names(prompt, pages))}

    def set_v2(self, prompt: int, pages: int, pools: dict[str, list[int]]) -> dict[str, Any]:
        """Store these pages of a prompt from these pools."""
        keys = names(prompt, pages)
        transfers = [transfer(name, [keys[place] for place in places]) for name, places in pools.items()]
        for each in transfers:
            each.host_indices = filled(self.pools[str(each.name)], each.keys, str(each.name))
        return {"set": {str(name): told for name, told in self.backend.batch_set_v2(transfers).items()}}

    def get_v2(self, prompt: int, pages: int, pools: dict[str, list[int]]) -> dict[str, Any]:
        """Load these pages of a prompt into these pools."""
        keys = names(prompt, pages)
        transfers = [transfer(name, [keys[place] for place in places]) for name, places in pools.items()]
        for each in transfers:
            each.host_indices = self.pools[str(each.name)].alloc(len(each.keys) * PAGE_TOKENS)
        come = self.backend.batch_get_v2(transfers)
        equal = [
            are_equal(self.pools[str(each.name)], each.keys, str(each.name), each.host_indices, come[each.name])
            for each in transfers
        ]
        return {"come": {str(name): told for name, told in come.items()}, "equal": all(equal)}

    def exists_v2(self, prompt: int, pages: int, windows: dict[str, int]) -> dict[str, Any]:
        """What can be restored of a prompt, where a pool needs its last pages (a window) or, with 0, all."""
        keys = names(prompt, pages)
        transfers = []
        for name, window in windows.items():
            each = transfer(name, keys[:window] if window else keys)
            each.hit_policy = PoolHitPolicy.TRAILING_PAGES if window else PoolHitPolicy.ALL_PAGES
            transfers.append(each)
        told = self.backend.batch_exists_v2(keys, transfers)
        hits = {str(name): count for name, count in told.extra_pool_hit_pages.items()}
        return {"pages": told.kv_hit_pages, "hits": hits, "restorable": told.restorable_prefix_pages}

    def stats(self) -> dict[str, Any]:
        """SGLang's figures since the last time."""
        told = self.backend.get_stats()
        return {"prefetched": told.prefetch_pgs, "backed_up": told.backup_pgs, "gb_s": told.prefetch_bandwidth}

    def kind(self) -> dict[str, Any]:
        """The class that SGLang has made."""
        return {"class": type(self.backend).__name__}

    def clear(self) -> dict[str, Any]:
        """Take everything away."""
        return {"cleared": self.backend.clear()}

    def close(self) -> dict[str, Any]:
        """End it."""
        self.backend.close()
        return {}


def transfer(name: str, keys: list[str]) -> Any:
    """A transfer of pages of a pool."""
    return PoolTransfer(name=PoolName(name), keys=keys)


def main() -> None:
    """Answer requests until there are none."""
    workers: dict[str, Worker | Controller] = {}
    for line in sys.stdin:
        request = json.loads(line)
        do, worker = request.pop("do"), request.pop("worker")
        try:
            answer: dict[str, Any] = {}
            if do == "open":
                around = dict(os.environ)
                os.environ.update(request.pop("environment", {}))
                try:
                    workers[worker] = Controller(**request) if "model" in request else Worker(**request)
                finally:
                    os.environ.clear()
                    os.environ.update(around)
            else:
                answer = getattr(workers[worker], do)(**request)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"raised": f"{type(error).__name__}: {error}"}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # what SGLang has imported takes long to end, and does nothing
