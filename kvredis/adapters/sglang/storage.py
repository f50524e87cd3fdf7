"""kvredis as the third level of SGLang's HiCache: a `dynamic` storage backend that moves pages of its host pools.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvredis", "module_path": "kvredis.adapters.sglang", "class_name": "KVRedisHiCache",
      "interface_v1": 1, "host": "127.0.0.1", "port": 6379}'

beside which any key of Config may stand, and what LMCACHE_* says holds too (engine/config.py). With interface_v1 pages
are copied between the pools and the server's memory, or over a socket our staging memory, where they are received;
without, SGLang copies each page itself first.

SGLang calls this from its own threads for prefetch and backup, which may wait, and takes what is False for a miss: no
call raises. Pages of one key are one value, whatever the pool's layout cuts them into.

What a page's bytes depend on beside its tokens is in its key:

    the engine's arguments (SERVED_AS, DRAFT_SERVED_AS)      the model's path and configuration
    its weights, and a draft's where its KV is in the page   the ranks, and the layers that are theirs
    the pool: class, layout, page, widths, every dtype       SGLang's version, where only its kernels know the bytes

LoRA adapters, `extra_key` and images are in SGLang's own hash of a page's tokens. How large the pools are, when pages
are written (hicache-write-policy), which data-parallel replica writes them, and which attention backend computes them
(but for rounding) changes no byte's meaning.
"""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvredis.adapters.engine.config import config_from, of_rank
from kvredis.adapters.paged.pages import Page, PageStore
from kvredis.backends.factory import open_backend
from kvredis.storage.errors import LayoutError

from .pools import FlatPages, PoolPages, anchor_of, has_draft_layers, is_logical, is_opaque, pool_facts
from .weights import EngineWeights, caller

logger = logging.getLogger(__name__)

SOURCE: Final = "hicache-storage-backend-extra-config"
OWN_ARGUMENTS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys"})  # fmt: skip
"""What SGLang itself reads of the extra config."""
REPLICATED_CLASSES: Final = ("MLA", "DeepSeekV4")
"""In the name of a draft pool's class: all ranks hold the same, as they do of the model's own pool."""
SERVED_AS: Final = {
    "kv_cache_dtype": "auto", "dtype": "auto", "json_model_override_args": "{}", "revision": None, "quantization": None,
    "quantization_param_path": None, "modelopt_quant": None, "torchao_config": None, "rl_quant_profile": None,
    "quantize_and_serve": False, "kt_method": None, "kt_weight_path": None, "kt_num_gpu_experts": None,
    "kt_max_deferred_experts_per_token": None, "context_length": None, "forward_hooks": None,
    "model_impl": "auto", "enable_tf32_matmul": False, "rl_on_policy_target": None,
    "mamba_ssm_dtype": None, "enable_int8_mamba_checkpoint": False, "enable_mamba_cache_stochastic_rounding": False,
    "enable_deepseek_v4_fp4_indexer": False, "enable_encoder_swa_bounded_replay": False,
    "enable_decoder_swa_bounded_replay": None,
}  # fmt: skip
"""What else of an engine's arguments its KV depends on, and what stands for nothing. A pool of fp8 says uint8,
whichever of the fp8 types its bytes are."""
STATE_SERVED_AS: Final[Mapping[str, Any]] = dict.fromkeys(
    ("mamba_backend", "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend")
)
"""Arguments that choose the kernels which lay out a Mamba state."""
DRAFT_SERVED_AS: Final[Mapping[str, Any]] = dict.fromkeys((
    "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision",
    "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_window_size",
))  # fmt: skip
"""What the KV of a draft model depends on, beside its target's."""
BLOCK_GROUPS: Final = getattr(PoolHitPolicy, "BLOCK_GROUPS", None)
"""Since 0.5.23."""
GIGA: Final = 1e9


class KVRedisHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types that we can see
    """See the module. `namespace` in the extra config tells apart what a model's name does not (other weights under the
    same name). Raises ConfigError for arguments that cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        arguments = {name: value for name, value in extra.items() if name not in OWN_ARGUMENTS}
        namespace = str(arguments.pop("namespace", ""))
        rank, ranks = 0, 1
        for name in ("pp", "attn_cp", "tp"):
            size = getattr(storage_config, f"{name}_size", 1)
            rank, ranks = rank * size + getattr(storage_config, f"{name}_rank", 0), ranks * size
        config = of_rank(config_from(arguments, SOURCE), rank, ranks, _replica(storage_config))
        self._store = PageStore(open_backend(config), verify=config.verify_blocks)
        self._is_v1 = bool(extra.get("interface_v1"))
        self._config = storage_config
        self._model = str(storage_config.model_name or "")
        self._namespace = namespace
        self._served = _served(SERVED_AS | {"model_path": self._model})
        self._generation = ""
        self._weights = self._weights_of_engine()
        self._anchor_pool: Any = None
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[str, PoolPages] = {}
        self._anchor: PoolPages | None = None
        self._is_anchor_logical = False
        self._flat = FlatPages(self._model, self._facts(str(PoolName.KV)))
        self._told = self._store.stats()

    # -- pools -----------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the model's own KV."""
        super().register_mem_pool_host(mem_pool_host)
        if self._served is None and not self._namespace and getattr(mem_pool_host, "dtype", None) == torch.uint8:
            logger.warning(
                "This SGLang does not say which fp8 its KV is: give engines of each a namespace of their own"
            )
        self._anchor_pool = anchor_of(mem_pool_host)
        self._is_anchor_logical = is_logical(self._anchor_pool)
        self._call_keys()
        if self._weights is not None:
            _call_after(self._anchor_pool, self._flushed)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take one of the pools of a hybrid model, or of a draft model beside it. Raises LayoutError for one of which
        SGLang would store what one rank has, though each has its own."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if not is_logical(host_pool):
            self._refuse_what_one_rank_stores(str(host_pool_name), host_pool)
            self._host_pools[str(host_pool_name)] = host_pool
            self._call_keys()

    def _refuse_what_one_rank_stores(self, pool: str, host_pool: Any) -> None:
        """Beside latents (MLA) SGLang has the first rank store for all, but for the states of Mamba. The others would
        find nothing of their own heads, and SGLang loads what all ranks find."""
        ranks = getattr(self._config, "tp_size", 1)
        if not self._config.is_mla_model or ranks < 2 or self._is_replicated(pool, host_pool):
            return
        if pool == PoolName.MAMBA:
            if _stores_states_of_all_ranks():
                return
            way_out = "take SGLang 0.5.18 or newer"
        else:
            way_out = "take a draft model of latents, or none"
        raise LayoutError(
            f"no prompt would be found: beside latents (MLA) SGLang stores {pool} pages of one rank alone, and each of "
            f"{ranks} ranks has its own; {way_out}, or DP attention with a rank to each group"
        )

    def _call_keys(self) -> None:
        """Give all pools the keys of what the engine is now. A call under way goes on with those that it began with."""
        name = str(PoolName.KV)
        if self._anchor_pool is not None:
            facts = self._facts(name, self._anchor_pool)
            self._flat = FlatPages(self._model, {**facts, **pool_facts(self._anchor_pool)})
            self._anchor = None if self._is_anchor_logical else PoolPages(self._anchor_pool, self._model, facts)
        self._pools = {
            name: PoolPages(pool, self._model, self._facts(name, pool)) for name, pool in self._host_pools.items()
        }

    # -- weights ---------------------------------------------------------------------------------------------------

    def _weights_of_engine(self) -> EngineWeights | None:
        scheduler = caller()
        if scheduler is not None:
            return EngineWeights(scheduler, self._pause)
        if not self._namespace:
            self._generation = uuid.uuid4().hex
            logger.warning(
                "This SGLang does not show kvredis its model: its KV is found by no other engine without a namespace"
            )
        return None

    def _pause(self) -> None:
        """Leave the store alone: weights are about to change, and host memory has pages of the old ones."""
        self._store.is_paused = True

    def _flushed(self) -> None:
        """Go on with the keys of the weights as they are. SGLang has emptied its cache, on all ranks at the same time,
        and what its storage threads do from now on is of these weights."""
        if not self._store.is_paused or self._weights is None or self._weights.are_away:
            return
        self._weights.refresh()
        self._call_keys()
        self._store.is_paused = False

    def _facts(self, pool: str, host_pool: Any = None) -> dict[str, Any]:
        """What a page's bytes depend on beside its tokens and its pool. Where all ranks of tensor parallelism hold the
        same, one of them writes for all, and the rank is no part of the key."""
        config = self._config
        facts: dict[str, Any] = {"engine": "sglang", "namespace": self._namespace, "pool": pool}
        pairs = ["pp", "attn_cp", "dcp"]
        if not (config.is_mla_model and self._is_replicated(pool, host_pool)):
            pairs.append("tp")
        for name in pairs:
            facts[name] = [getattr(config, f"{name}_rank", 0), getattr(config, f"{name}_size", 1)]
        facts["dcp_page"] = getattr(config, "logical_page_size", None)
        if self._served:
            facts["served"] = self._served
        facts["generation"] = self._generation
        weights, draft_weights = self._weights.facts if self._weights is not None else ("", "")
        facts["weights"] = weights
        if host_pool is None:
            return facts
        if has_draft_layers(host_pool, pool):
            facts["draft"] = [draft_weights, _served(DRAFT_SERVED_AS)]
        if pool == PoolName.MAMBA:
            facts["state"] = _served(STATE_SERVED_AS)
        if is_opaque(host_pool):
            facts["sglang"] = str(getattr(sglang, "__version__", ""))
        return facts

    @staticmethod
    def _is_replicated(pool: str, host_pool: Any) -> bool:
        if pool == PoolName.MAMBA:
            return False
        if not pool.startswith("draft"):
            return True
        classes = [each.__name__ for each in type(host_pool).__mro__]
        return any(part in name for part in REPLICATED_CLASSES for name in classes)

    # -- what is there -----------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether there is a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the pages are there, from the first on without a gap; one round trip."""
        if self._is_anchor_logical:
            return len(keys)
        return self._store.match(self._kv_keys(keys))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that can be restored from all pools, how far each of them goes, and all prefixes that can:
        a pool that needs its last pages only (TRAILING_PAGES) can be restored here and there."""
        kv_pages = self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        transfers = list(pool_transfers or ()) if kv_pages else []
        named = [self._pool_keys(transfer, keys[:kv_pages]) for transfer in transfers]
        found = iter(self._store.present([key for part in named for key in part]))
        for transfer, part in zip(transfers, named, strict=True):
            there = [next(found) for _ in part]
            possible = _restorable(transfer, there, kv_pages)
            boundary = _groups_boundary(transfer, there) if possible is None else max(possible, default=0)
            if boundary:
                hits[transfer.name] = boundary
            if possible is not None:
                restorable &= possible
        found_pages = max(restorable, default=0)
        if "restorable_prefix_pages" not in PoolTransferResult.__dataclass_fields__:  # 0.5.17
            return PoolTransferResult(found_pages, hits)
        return PoolTransferResult(found_pages, hits, sorted(restorable))

    def _pool_keys(self, transfer: Any, keys: Sequence[str]) -> list[bytes]:
        pool = self._pool(transfer.name)
        names = (transfer.keys or ()) if transfer.hit_policy == BLOCK_GROUPS else keys
        return [] if pool is None else [pool.key(name) for name in names]

    def _kv_keys(self, keys: Sequence[str]) -> list[bytes]:
        key = self._anchor.key if self._is_v1 and self._anchor is not None else self._flat.key
        return [key(name) for name in keys]

    # -- pages of pools ------------------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the pool; after the first that is missing none is asked for."""
        if self._is_anchor_logical:
            return [True] * len(keys)
        return self._get(self._anchor, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the pool, and wait for the server; whether each is there now."""
        if self._is_anchor_logical:
            return [True] * len(keys)
        return self._set(self._anchor, keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_get_v1, for each transfer's pool."""
        return {each.name: self._get(self._pool(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """As batch_set_v1, for each transfer's pool."""
        return {each.name: self._set(self._pool(each.name), each.keys or [], each.host_indices) for each in transfers}

    def _pool(self, name: Any) -> PoolPages | None:
        found = self._pools.get(str(name))
        return self._anchor if found is None and name == PoolName.KV else found

    def _get(self, pool: PoolPages | None, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        if not self._is_usable(pool, keys, host_indices):
            return [False] * len(keys)
        assert pool is not None
        assert host_indices is not None
        if pool.is_addressed:
            return self._store.load(pool.pages(keys, host_indices), until_missing=True)
        copies = pool.copies(keys)
        come = self._store.load([page for page, _ in copies], until_missing=True)
        starts = host_indices.tolist()[:: pool.page_tokens]
        for has, start, (_, tensor) in zip(come, starts, copies, strict=True):
            if has:
                pool.host_pool.set_from_flat_data_page(start, tensor)
        return come

    def _set(self, pool: PoolPages | None, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        if not self._is_usable(pool, keys, host_indices):
            return [False] * len(keys)
        assert pool is not None
        assert host_indices is not None
        if pool.is_addressed:
            return self._store.store(pool.pages(keys, host_indices))
        return self._store.store([page for page, _ in pool.copies(keys, host_indices)])

    @staticmethod
    def _is_usable(pool: PoolPages | None, keys: Sequence[str], host_indices: torch.Tensor | None) -> bool:
        if pool is not None and pool.fits(keys, host_indices):
            return True
        given = "no indices" if host_indices is None else f"{host_indices.numel()} indices"
        logger.error("kvredis: %d pages with %s, of %s", len(keys), given, "a pool" if pool else "no pool it knows")
        return False

    # -- pages that SGLang has copied ---------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill the tensor `target_location` and give it back; None: it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """As `get` for each; those behind the first that is missing are None too."""
        tensors = list(target_locations or [])
        come = self._store.load(self._flat_pages(keys, tensors), until_missing=True)
        come += [False] * (len(keys) - len(come))
        return [tensors[place] if has else None for place, has in enumerate(come)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a tensor; whether it is there now."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store tensors; whether all of them are there now."""
        given = target_locations if values is None else values
        tensors = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in given or []]
        pages = self._flat_pages(keys, tensors)
        return len(pages) == len(keys) and all(self._store.store(pages))

    def _flat_pages(self, keys: Sequence[str], tensors: Sequence[Any]) -> list[Page]:
        """The pages up to the first without a tensor in host memory."""
        pages: list[Page] = []
        for key, tensor in zip(keys, tensors, strict=False):
            try:
                pages.append(self._flat.page(key, tensor))
            except (ValueError, AttributeError) as error:
                logger.error("kvredis: no page can be in %s: %s", type(tensor).__name__, error)
                break
        return pages

    # -- the rest ------------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Find nothing that has been stored until now: this engine's keys are others from here on, which needs no
        server. Other engines keep theirs; `kvredis rm --match` deletes for all."""
        mine = [uuid.uuid4().hex]
        self._generation = (self._weights.agreed(mine) if self._weights is not None else mine)[0]
        self._call_keys()
        return True

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call: pages and GB/s each way; None where there is no such thing."""
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            return None
        now = self._store.stats()
        grown = {name: now[name] - self._told[name] for name in now}
        self._told = now
        metrics = StorageMetrics()
        if grown["loaded"]:
            metrics.prefetch_pgs.append(int(grown["loaded"]))
            metrics.prefetch_bandwidth.append(grown["bytes_in"] / GIGA / max(grown["load_s"], 1e-9))
        if grown["stored"]:
            metrics.backup_pgs.append(int(grown["stored"]))
            metrics.backup_bandwidth.append(grown["bytes_out"] / GIGA / max(grown["store_s"], 1e-9))
        return metrics

    def close(self) -> None:
        """End the connections."""
        self._store.close()


def _restorable(transfer: Any, there: Sequence[bool], kv_pages: int) -> set[int] | None:
    """Of which lengths a prefix can be restored as far as this pool goes; None: it has no say (BLOCK_GROUPS)."""
    if transfer.hit_policy == BLOCK_GROUPS:
        return None
    if not there:
        return set()  # of a pool that was not registered
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, [*there, False].index(False) + 1))
    window = max(1, len(transfer.keys or ()))
    return {end for end in range(1, kv_pages + 1) if all(there[max(0, end - window) : end])}


def _groups_boundary(transfer: Any, there: Sequence[bool]) -> int:
    """The pages that the leading whole groups of a BLOCK_GROUPS pool cover."""
    whole = [*there, False].index(False) // max(transfer.group_pages, 1)
    return int(whole * transfer.block_pages)


def _replica(storage_config: Any) -> int:
    """Which of several data-parallel processes this is: of attention's groups the configuration tells it, of whole
    replicas SGLang's runtime."""
    group = int(getattr(storage_config, "dp_rank", 0))
    try:
        from sglang.srt.runtime_context import get_parallel

        return group or int(get_parallel().dp_rank or 0)
    except Exception as error:  # whatever another release says, or one that serves nothing yet
        logger.debug("SGLang's replica is not known: %s", error)
        return group


def _served(usual: Mapping[str, Any]) -> dict[str, str] | None:
    """Of the engine's arguments named in `usual` those that are given and are another. None where this SGLang
    gives its arguments elsewhere."""
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
        if arguments is None:
            return None
        given = {name: getattr(arguments, name, value) for name, value in usual.items()}
        return {name: str(value) for name, value in given.items() if value not in (usual[name], "", None)}
    except Exception as error:  # whatever another release says, or one that serves nothing yet
        logger.debug("SGLang's arguments are not known: %s", error)
        return None


def _stores_states_of_all_ranks() -> bool:
    """Whether SGLang has the states of Mamba stored by each rank, though one stores the latents: since 0.5.18."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    return hasattr(HybridCacheController, "should_backup")


def _call_after(host_pool: Any, then: Callable[[], None]) -> None:
    """Have `then` called when SGLang has cleared a host pool."""
    clear = host_pool.clear

    def clear_and_tell() -> None:
        clear()
        then()

    host_pool.clear = clear_and_tell
