"""kvredis as a tier below the CPU memory of vLLM's own OffloadingConnector; one class, for vLLM 0.28 to 0.33.

vLLM copies between GPU and CPU, knows its groups of layers and names each chunk (block hash and group); the tier keeps
rows of CPU memory under those names. `secondary_tiers` of a TieringOffloadingSpec holds

    {"type": "KVRedisTier", "module_path": "kvredis.adapters.vllm_tier", "host": "127.0.0.1", "port": 6379}

beside which any key of Config may stand, and what LMCACHE_* says holds too (engine/config.py).

vLLM calls all of it in the scheduler's thread, where every wait is a wait for the GPU: here nothing asks the network.
Lookups are collected by vLLM's AsyncLookupManager and asked once per step and request, bytes are moved by TierJobs.

WHY attributes are looked up by several names: 0.28 says block where 0.30 says chunk, and JobResult has grown.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvredis.adapters.engine.config import config_from, of_rank
from kvredis.adapters.paged.pages import Done, Page, PageFormat, PageStore, TierJobs, page_prefix
from kvredis.backends.factory import open_backend

logger = logging.getLogger(f"vllm.{__name__}")

SOURCE: Final = "secondary_tiers KVRedisTier"
WAITING_PART: Final = 4
"""A quarter of vLLM's CPU memory may wait for the server to take it: rows that wait are of no use to vLLM."""
METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "corrupt": ("vllm:kvredis_tier_corrupt_chunks", "Chunks that were not what had been stored, and were deleted."),
    "refused": ("vllm:kvredis_tier_refused_chunks", "Chunks that the server has not taken."),
    "missed": ("vllm:kvredis_tier_missed_chunks", "Chunks that were found, and not there when they were loaded."),
    "already_stored": ("vllm:kvredis_tier_known_chunks", "Chunks that another engine had stored."),
    "dropped_jobs": ("vllm:kvredis_tier_dropped_jobs", "Loads and stores turned away because too many waited."),
}
"""Our counters -> the Prometheus counters that vLLM shows, beside its own of every tier, and what they say."""
_RESULT_FIELDS: Final = frozenset(each.name for each in fields(JobResult))
_EVENT_FIELDS: Final = frozenset(each.name for each in fields(OffloadingEvent))


class Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM has no types that we can see
    """vLLM's thread that asks which chunks there are, with what has been collected in a step."""

    def __init__(self, tier_type: str, store: PageStore, prefix: bytes) -> None:
        self._store = store
        self._prefix = prefix
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """Say for each key whether it is there; in the thread of this object."""
        return self._store.present([self._prefix + key.hex().encode("ascii") for key in keys])

    def mark_miss(self, keys: Collection[bytes]) -> None:
        """Make what was found a miss. WHY not what is being asked for: until 0.33 vLLM's own took the answer to that,
        when it came, for a broken invariant, and the engine ended."""
        answered = [key for key in keys if getattr(self._lookup_state.get(key), "result", None) is not None]
        super().mark_miss(answered)


class KVRedisTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. `namespace` tells apart what a model's name does not (other weights under the same name). Raises
    ConfigError for arguments that cannot be used.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        namespace: str = "",
        enable_kv_events: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **arguments: Any,
    ) -> None:
        replica = int(getattr(offloading_spec.config.parallel, "data_parallel_index", 0))
        config = of_rank(config_from(arguments, SOURCE), 0, 1, replica)
        if backpressure_detector is None:
            super().__init__(offloading_spec, primary_kv_view, tier_type)
        else:
            super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        assert primary_kv_view.strides is not None
        self._row_bytes = primary_kv_view.strides[0]
        self._rows = primary_kv_view.cast("B")  # rows of a view of two dimensions cannot be sliced
        model = str(offloading_spec.config.model.name)
        self._prefix = page_prefix(model, facts_of(offloading_spec.config, self._row_bytes, namespace))
        self._format = PageFormat({"engine": "vllm", "model": model}, self._row_bytes)
        self._store = PageStore(open_backend(config), verify=config.verify_blocks)
        self._jobs = TierJobs(self._store, pages_max=max(len(primary_kv_view) // WAITING_PART, 1))
        self._lookups = Lookups(tier_type, self._store, self._prefix)
        self._keys: dict[int, list[bytes]] = {}
        self._told: dict[str, int | float] = {}
        self._events: list[Any] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        elif enable_kv_events:
            logger.warning("%s: enable_kv_events has no effect, vLLM's KV events are off", tier_type)
        logger.info("%s keeps rows of %d bytes under %s*", tier_type, self._row_bytes, self._prefix.decode("ascii"))

    # -- what the scheduler asks -----------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY until the thread has an answer."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Nothing special is wanted: chunks as they come."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was looked up for it."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Let the thread ask for what this step has looked up."""
        self._lookups.flush()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Tell the server later that these were used."""
        self._jobs.touch([self._key(key) for key in keys])

    # -- what is moved ---------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Have rows stored, those of them that are not there yet."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Have rows filled."""
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[Any]:
        """What has ended. A chunk that has not come is a miss from now on, so that no request waits for it again."""
        return [self._result(done) for done in self._jobs.take_done()]

    def drain_jobs(self) -> None:
        """Wait for everything that was submitted."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End threads and connections; what waits to be stored is given up, what is under way ends."""
        self._lookups.shutdown()
        self._jobs.close()
        self._store.close()
        self._rows.release()

    # -- what is told ----------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """The chunks stored since the last call, when events are wanted."""
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    @classmethod
    def build_metric_definitions(cls, extra_config: Any) -> dict[str, Any]:
        """The counters of METRICS, by tier."""
        return {
            name: OffloadingCounterMetadata(documentation=text, labelnames=("tier",)) for name, text in METRICS.values()
        }

    def get_stats(self) -> Any:
        """What the counters have grown by since the last call; None: by nothing."""
        now = {**self._store.stats(), "dropped_jobs": self._jobs.dropped_jobs}
        grown = {name: now[name] - self._told.get(name, 0) for name in METRICS}
        self._told = now
        if not any(grown.values()):
            return None
        stats = OffloadingConnectorStats()
        for name, by in grown.items():
            if by:
                stats.increase_counter(METRICS[name][0], by, (self.tier_type,))
        return stats

    # ----------------------------------------------------------------------------------------------------------------

    def _key(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode("ascii")

    def _submit(self, job: Any, *, is_load: bool) -> None:
        ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        keys = [bytes(key) for key in job.keys]
        self._keys[job.job_id] = keys
        rows = [int(each) * self._row_bytes for each in ids]
        pages = [
            Page(self._key(key), self._format, (self._rows[row : row + self._row_bytes],))
            for key, row in zip(keys, rows, strict=True)
        ]
        self._jobs.submit(job.job_id, pages, is_load=is_load)

    def _result(self, done: Done) -> Any:
        keys = self._keys.pop(done.job)
        come = [key for key, has in zip(keys, done.come, strict=True) if has]
        told: dict[str, Any] = {"job_id": done.job, "success": all(done.come)}
        told |= {"transfer_time": done.seconds, "transfer_bytes": done.nbytes}
        if done.is_load and len(come) < len(keys):
            told["successful_keys"] = tuple(come) or None
            self._lookups.mark_miss([key for key, has in zip(keys, done.come, strict=True) if not has])
        elif not done.is_load and come and self._events is not None:
            event = {"keys": come, "medium": self.medium, "removed": False, "locality": self.locality}
            self._events.append(OffloadingEvent(**{name: event[name] for name in event if name in _EVENT_FIELDS}))
        return JobResult(**{name: told[name] for name in told if name in _RESULT_FIELDS})


def facts_of(config: Any, row_bytes: int, namespace: str) -> dict[str, Any]:
    """What a row's bytes depend on beside the tokens, which vLLM's hashes have: `config` is an OffloadingConfig."""
    parallel = config.parallel
    is_replicated = bool(getattr(config, "replicated_layout", False))
    facts: dict[str, Any] = {
        "engine": "vllm-tier",
        "namespace": namespace,
        "dtype": str(config.model.dtype),
        "row_bytes": row_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": getattr(config, "kv_cache_layout", None),
        "canonical": bool(getattr(config, "canonical_layout", False)),
        "replicated": is_replicated,
    }
    if not (parallel.is_parallelism_agnostic or is_replicated):
        facts |= {name: getattr(parallel, name) for name in ("tp_size", "pp_size", "pcp_size", "dcp_size", "rank")}
    return facts
