"""vLLM's KV connector: it loads stored prefixes into vLLM's pages and stores what it computes.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVRedisConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvredis.adapters.vllm", "kv_load_failure_policy": "recompute"}'

Configured as LMCache is: LMCACHE_CONFIG_FILE, LMCACHE_*, and entries of kv_connector_extra_config, which win. vLLM
makes one object for its scheduler and one for each worker; what a step needs goes from the first to the others as
metadata. Loads and stores run in the background, stores layer by layer where use_layerwise asks for it. What fails is
computed.

This file, metrics.py and tier.py import vLLM; worker.py and config.py look at its objects. Of it only names are
imported that have been there since 0.18; the rest is looked up.
Interface: vllm/distributed/kv_transfer/kv_connector/v1/base.py, 0.26 to 0.33.
"""

import logging
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvredis.adapters.engine.break_even import Worth
from kvredis.adapters.engine.config import for_device, of_rank
from kvredis.adapters.engine.engine import AUTO
from kvredis.adapters.paged.jobs import options_of
from kvredis.backends.base import Tier
from kvredis.backends.config.schema import Config
from kvredis.backends.tiered.backend import LayeredBackend
from kvredis.storage.errors import ConfigError, LayoutError

from .config import HANDED_OVER, configured, groups_of, is_pause, log_as_vllm_does, prompt_of
from .handshake import Handshake, agreed_groups, engine_facts
from .held_pages import HeldPages, StoreOver
from .kv_layout import LayerGroup, NoStates
from .metrics import HIT_RATES, LOAD_SECONDS, LOAD_SPEEDS, KVRedisMetrics, KVRedisStats
from .request import SchedulingOptions, Step
from .scheduler import Scheduling
from .shared import Shared, join, leave
from .stored_events import Removed, Stored
from .weights import KeyWeights, WeightsReport, WeightsWatch
from .worker import PagedWorker, Results, call_around_sleep, models_of, worker_of

_WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", object)
_HandshakeMetadata: Any = getattr(base, "KVConnectorHandshakeMetadata", object)


class HandshakeMetadata(_HandshakeMetadata):  # type: ignore[misc]
    """What a worker's half sends to the scheduler's before the first request."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake


class WorkerMetadata(_WorkerMetadata):  # type: ignore[misc]
    """What the workers' half sends back: requests whose stores so far are over, by rank what is to be known of the
    weights, stores that read no page any more, once for each rank, and keys of stores that have left something out."""

    def __init__(
        self, requests: set[str], weights: dict[int, WeightsReport], over: list[StoreOver], unstored: list[bytes]
    ) -> None:
        self.requests = requests
        self.weights = weights
        self.over = over
        self.unstored = unstored

    def aggregate(self, other: Any) -> "WorkerMetadata":
        """Those of several workers."""
        requests, weights = self.requests | other.requests, self.weights | other.weights
        return WorkerMetadata(requests, weights, self.over + other.over, self.unstored + other.unstored)


class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half sends to the workers'."""

    def __init__(self, step: Step) -> None:
        self.step = step


CPU, STORAGE = getattr(kv_events, "MEDIUM_CPU", "CPU"), getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")


def events_of(told: Iterable[Stored | Removed], kinds: Sequence[Mapping[str, Any]] = ()) -> Iterator[Any]:
    """What vLLM publishes of it, with the fields that this version of vLLM has. `kinds` is what it says of each of its
    groups."""
    for each in told:
        where: dict[str, Any] = {"medium": medium_of(each.tier), "group_idx": each.group}
        if isinstance(each, Removed):
            yield _event(kv_events.BlockRemoved, block_hashes=[each.digest], **where)
            continue
        yield _event(
            kv_events.BlockStored,
            block_hashes=[each.digest],
            parent_block_hash=each.parent,
            token_ids=list(each.tokens),
            block_size=len(each.tokens),
            lora_id=each.origin.adapter[0] if each.origin.adapter else None,
            lora_name=each.origin.adapter[1] if each.origin.adapter else None,
            extra_keys=None if each.extra_keys is None else [each.extra_keys],
            session_id=each.origin.session,
            **where,
            **(kinds[each.group] if each.group < len(kinds) else {}),
        )


def kinds_of(kv_cache_config: Any) -> list[dict[str, Any]]:
    """What vLLM's own events say of each group's layers; nothing where this version has no words for it."""
    try:
        from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
    except ImportError:
        return []
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        {
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }
        for spec in specs
    ]


def sources_of(tokens: Mapping[Tier, int]) -> dict[Any, int]:
    """Tokens by tier as vLLM counts them by where they came from. A server is what it calls external."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    named = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "remote": CacheHitSource.EXTERNAL_UNSPECIFIED}
    return {named[tier]: count for tier, count in tokens.items() if count}


def medium_of(tier: Tier) -> str:
    """vLLM's word for where a block is."""
    return str(CPU if tier == "memory" else STORAGE)


def _event(kind: Any, **fields: Any) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})


logger = logging.getLogger(__name__)

_TransferResults = getattr(base, "KVConnectorTransferResults", None)
_Hybrid: Any = base.SupportsHMA if _TransferResults else object
"""Before 0.30 a failed load of a model with several groups cannot be reported: vLLM then makes one group of them."""

_ASKS_FOR_BLOCKS = hasattr(base.KVConnectorBase_V1, "has_pending_block_frees")
"""Whether vLLM asks for what is held before it preempts a request that runs: since 0.30."""
_TELLS_OF_SLEEP = hasattr(base.KVConnectorBase_V1, "unregister_kv_caches")
"""Since 0.33."""

UNDER_WAY = ("loading_chunks", "storing_chunks")
"""What a worker counts that does not only grow."""
SEEN_MAX = 1024
"""Of what is seen one by one, until vLLM asks for it; older ones are forgotten."""


class KVRedisConnector(base.KVConnectorBase_V1, _Hybrid):  # type: ignore[misc]
    """One half of an engine's connection, by `role`. Raises ConfigError and LayoutError for a configuration or a model
    that cannot be served; after that nothing raises into the engine."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()
        transfer = vllm_config.kv_transfer_config
        is_scheduler = role == base.KVConnectorRole.SCHEDULER
        parallel = vllm_config.parallel_config
        self._ranks = int(parallel.tensor_parallel_size)
        self._stages = int(getattr(parallel, "pipeline_parallel_size", 1))
        is_apart = parallel.world_size > 1 or parallel.distributed_executor_backend not in (None, "uni")
        config = configured(transfer.kv_connector_extra_config or {}, questions_only=is_scheduler and is_apart)
        if not (is_scheduler and is_apart):
            config = for_device(config, str(vllm_config.device_config.device_type))
            replica = int(getattr(parallel, "data_parallel_index", 0))
            config = of_rank(config, _rank(parallel) if is_apart else 0, self._ranks * self._stages, replica)
        if is_apart and config.remote_url is None:
            text = "workers in processes of their own share nothing with the scheduler: name a server that they share"
            raise ConfigError("remote_url", "none", "KVRedisConnector", text)
        self._role_name = str(transfer.kv_role)
        self._rank = 0 if is_scheduler or not is_apart else _rank(parallel)
        """This worker's among those of all stages."""
        self._groups = self._groups_of(vllm_config, kv_cache_config, config, self._rank % self._ranks)
        self._facts = engine_facts(kv_cache_config, self._groups) if self._groups else {}
        self._is_single = len(kv_cache_config.kv_cache_groups) == 1
        self._has_states = any(group.is_state for group in self._groups)
        self._computes_failed = getattr(transfer, "kv_load_failure_policy", "") == "recompute"
        self._by_layers = config.use_layerwise and not self._has_states
        self._has_drafts = getattr(vllm_config, "speculative_config", None) is not None
        self._shares_pages = bool(vllm_config.cache_config.enable_prefix_caching)
        self._config = config
        events = getattr(vllm_config, "kv_events_config", None)
        self._tells_events = bool(events is not None and events.enable_kv_cache_events)
        self._engine = f"{transfer.engine_id} {role.name if is_apart else ''}"
        self._shared: Shared | None = join(self._engine, config, self._groups[0].layout) if self._groups else None
        if is_apart and self._shared is not None and isinstance(self._shared.backend, LayeredBackend):
            self._shared.backend.asks_far = True
        self._told: dict[str, float] = {}
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=SEEN_MAX) for name in (LOAD_SECONDS, LOAD_SPEEDS)}
        self._loads: dict[str, tuple[float, int]] = {}  # when the pages of a load were given, and its tokens
        self._results = Results()
        self._stored: set[str] = set()  # to be told of to the scheduler's half
        self._over: list[StoreOver] = []  # as well
        self._unstored: list[bytes] = []  # as well
        self._held: HeldPages | None = None
        self._worker: PagedWorker | None = None
        self._jobs: list[Any] = []
        self._launched: torch.cuda.Event | None = None  # behind what was launched before a step with loads
        self._requests: dict[str, Any] = {}
        self._scheduling: Scheduling | None = None
        self._worth: Worth | None = None
        self._has_told_of_no_handshake = False
        self._kinds: list[dict[str, Any]] = []  # for events

    @staticmethod
    def _groups_of(vllm_config: Any, kv_cache_config: Any, config: Config, rank: int) -> list[LayerGroup]:
        """As groups_of; none where the engine keeps no states that could be stored, and runs without."""
        try:
            groups = groups_of(vllm_config, kv_cache_config, config, rank)
            if any(group.is_state for group in groups) and not _hands_states_over():
                raise NoStates("this vLLM does not hand over states of recurrent layers; 0.30 does: nothing is stored")
        except NoStates as error:
            logger.warning("KV cache: %s", error)
            return []
        return groups

    # -- the scheduler's half ----------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Here is what counts who uses a block."""
        if self._has_states or (self._groups and _ASKS_FOR_BLOCKS and self._role_name != "kv_consumer"):
            self._held = HeldPages(gpu_block_pool, self._config.blocking_timeout_secs)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """As set_xfer_handshake_metadata, by stage and rank: vLLM hands that over since it serves pipelines with
        connectors."""
        by_rank = {stage * self._ranks + rank: told for (stage, rank), told in metadata.items()}
        self.set_xfer_handshake_metadata(by_rank)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Here is what each worker has told, by rank; from now on requests are served. Raises LayoutError where this
        half and a worker, or two workers, know the engine differently."""
        if not self._groups:
            return
        workers = {rank: told.handshake for rank, told in metadata.items() if isinstance(told, HandshakeMetadata)}
        if self._held is not None:
            self._held.ranks = len(workers)
        groups = agreed_groups(self._facts, workers, self._stages, self._ranks)
        if self._scheduling is not None and groups != self._groups:
            raise LayoutError("the engine's layers have changed while it was running; nothing can be stored")
        self._groups = groups
        if self._scheduling is None and self._shared is not None:
            tables = {rank: told.weights for rank, told in workers.items()}
            tables = tables if all(tables.values()) else {}
            self._schedule(self._shared, self._config, KeyWeights(tables))

    def _schedule(self, shared: Shared, config: Config, weights: KeyWeights) -> None:
        least = config.min_retrieve_tokens
        is_auto = least == AUTO
        knows_states = self._has_states and config.state_bytes_per_prompt is None
        if is_auto or knows_states or config.wait_for_kv:
            self._worth = Worth(shared.backend, shared.break_even, shared.probes)
        options = SchedulingOptions(
            loads=self._role_name != "kv_producer",
            stores=self._role_name != "kv_consumer",
            unfull=config.save_unfull_chunk,
            algorithm=config.pre_caching_hash_algorithm,
            min_load_tokens=least if isinstance(least, int) else 0,
            min_rest_tokens=least if isinstance(least, int) and least else None,  # a number given is the user's word
            state_bytes=config.state_bytes_per_prompt,
            max_load_chunks=config.max_load_chunks,
            waits_for_shared=self._shares_pages,
            lookup_s_max=config.blocking_timeout_secs,
            announces=self._role_name == "kv_producer" or (self._role_name == "kv_both" and config.wait_for_kv),
            waits=self._role_name == "kv_consumer" or (self._role_name == "kv_both" and config.wait_for_kv),
            streams=self._computes_failed and self._is_single and all(g.window is None for g in self._groups),
        )
        narrow = self._worth.narrow if self._worth and is_auto else None
        compute_s = shared.break_even.prefill_s if self._worth and (is_auto or config.wait_for_kv) else None
        pays = shared.break_even.pays_to_store if self._worth else None  # it learns from what Worth tells it alone
        self._scheduling = Scheduling(self._groups, shared.backend, options, narrow, weights, compute_s, pays)
        self._seen[HIT_RATES] = self._scheduling.hit_rates
        if self._tells_events:
            self._kinds = kinds_of(self._kv_cache_config)
            self._scheduling.tell_events()

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed again."""
        return False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load behind those that vLLM has; True: while other requests are computed."""
        prompt = prompt_of(request, generated=self._config.save_decode_cache)
        if self._scheduling is None and self._groups and not self._has_told_of_no_handshake:
            self._has_told_of_no_handshake = True
            logger.error("vLLM has not handed over what its workers tell of their layers: no KV is loaded or stored")
        if prompt is None or self._scheduling is None:
            return 0, False
        tokens = self._scheduling.match(prompt, num_computed_tokens)
        if self._worth is not None:
            self._worth.asked(prompt.request)
        if getattr(request, "skip_reading_prefix_cache", False):
            tokens = 0
        if self._config.save_decode_cache:
            self._requests[request.request_id] = request
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has given a request pages, and says how many tokens of what matched it wants."""
        if self._scheduling is not None and num_external_tokens > 0:
            self._scheduling.allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)
            self._loads[request.request_id] = time.perf_counter(), num_external_tokens
            if self._worth is not None and not self._scheduling.awaits(request.request_id):
                self._worth.load_began(request.request_id)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Where the tokens of a load come from, as vLLM counts them since 0.32: this host's memory, its disk, or a
        server."""
        if self._scheduling is None or not num_external_tokens:
            return {}
        return sources_of(self._scheduling.sources(request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are to do beside this step."""
        if self._scheduling is None:
            return StepMetadata(Step())
        counts = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._scheduling.scheduled(
                new.req_id, new.block_ids, new.num_computed_tokens, counts[new.req_id], anew=True
            )
        cached = scheduler_output.scheduled_cached_reqs
        for name, pages, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in self._requests and self._scheduling.has_grown(name, len(self._requests[name].all_token_ids)):
                longer = prompt_of(self._requests[name], generated=True)
                assert longer is not None
                self._scheduling.follow(longer)
            self._scheduling.scheduled(name, pages, computed, counts[name], anew=name in cached.resumed_req_ids)
        block_state = getattr(scheduler_output, "kv_connector_block_state", None)
        if block_state is not None and block_state.boundary_state_offloads:
            gone = scheduler_output.preempted_req_ids or ()
            self._scheduling.snapshots(self._states_of(block_state.boundary_state_offloads, gone))
        if self._worth is not None:
            self._worth.step_began(scheduler_output.total_num_scheduled_tokens)
        step = self._scheduling.step()
        if self._held is not None:
            stores = step.moves.stores
            if not self._has_states:
                stores = [job for job in stores if self._scheduling.is_for_others(job.request)]
            step.held = self._held.hold(step.number, stores)
        return StepMetadata(step)

    def _states_of(
        self, handed_over: Mapping[str, Sequence[tuple[int, int, int]]], gone: Container[str]
    ) -> dict[str, Sequence[tuple[int, int, int]]]:
        """The states that vLLM hands over, without those whose blocks may be another request's by now, or do not yet
        hold what was accepted of a draft."""
        found = {name: states for name, states in handed_over.items() if name not in gone}
        for name in found.keys() & self._requests.keys() if self._has_drafts else ():
            prompt = self._requests[name].num_prompt_tokens  # of a request whose answer is stored, too
            found[name] = [state for state in found[name] if state[2] <= prompt]
        return found

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have told behind a step."""
        if self._scheduling is None:
            return
        self._scheduling.tell_hits()
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(told, WorkerMetadata):
            self._scheduling.weights_told(told.weights)
            if self._held is not None:
                self._held.over(told.over)
            if self._shared is not None:
                for store in told.over:
                    self._shared.break_even.store_took(store.nbytes, store.seconds)
            if self._scheduling.events is not None:
                self._scheduling.events.over(told.requests)
            self._scheduling.unstored(told.unstored)
        failed = getattr(connector_output, "failed_recving", None) or set()
        if self._is_single and connector_output.invalid_block_ids:
            self._scheduling.lost(set(connector_output.invalid_block_ids))
        has_failed = bool(failed or connector_output.invalid_block_ids)
        for name in connector_output.finished_recving or ():
            self._scheduling.loaded(name, failed=name in failed)
            began_s, tokens = self._loads.pop(name, (0.0, 0))
            if tokens and not has_failed:
                seconds = time.perf_counter() - began_s
                self._seen[LOAD_SECONDS].append(seconds)
                self._seen[LOAD_SPEEDS].append(tokens / max(seconds, 1e-9))
            if self._worth is not None:
                self._worth.load_over(name, failed=has_failed)
        if self._worth is not None:
            self._worth.step_over()

    def has_pending_block_frees(self) -> bool:
        """Whether there are blocks for a request that runs and gets none, in the next step: all that is held. vLLM
        preempts none for it then."""
        return self._held is not None and self._held.give_back()

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on with steps that compute nothing, which tell what has been read."""
        return bool(self._held)

    def take_events(self) -> Iterable[Any]:
        """Blocks that were stored, and that lookups have found gone, where kv_events_config asks for events. A store
        that ends behind the last step is told of in the next."""
        if self._scheduling is None or self._scheduling.events is None:
            return ()
        return events_of(self._scheduling.events.take(), self._kinds)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Free a request's pages at once, but for those that are held: a request that gets one that is still being
        stored has that store ended first. To a router, which has asked for KV for another engine, say how that finds
        it, in the words of vLLM's own connectors."""
        handed_over = ""
        if self._scheduling is not None:
            if (getattr(request, "kv_transfer_params", None) or {}).get("do_remote_decode"):
                handed_over = self._scheduling.handed_over(request.request_id)
            self._scheduling.finished(request.request_id)
        self._requests.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        if self._worth is not None:
            self._worth.forget(request.request_id)
        if not handed_over:
            return False, None
        engine = self._vllm_config.kv_transfer_config.engine_id
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": engine}
        return False, params | {HANDED_OVER: handed_over}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Take the weights for changed, or about to be: what is found from now on is of those that the workers have
        then. Nothing is deleted, and no server is asked. Where a user has asked for it by
        reset_prefix_cache(reset_connector=True), and the weights turn out to be the same, this engine finds nothing of
        what is stored; behind sleep and pause, which call this too, it finds all of it."""
        if self._scheduling is not None:
            self._scheduling.weights.reset(forgets=not is_pause())
        return True

    # -- a worker's half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Here are the pages. Raises LayoutError where they are not what the model's groups say."""
        if self._shared is None:
            return
        options = options_of(self._config, self._role_name)  # type: ignore[arg-type]
        pages = self._kv_cache_config.num_blocks
        worker = worker_of(self._vllm_config)
        if worker is None or not models_of(worker):
            text = "vLLM's model was not found, whose weights are in keys: what this engine stores no other one finds"
            logger.warning(text)
        watch = WeightsWatch(lambda: models_of(worker))
        self._worker = PagedWorker(self._shared.backend, self._groups, kv_caches, pages, options, watch, self._rank)
        if self._config.use_gpu_memory:
            self._worker.use_gpu_memory()
        self._worker.warm_up()
        if getattr(self._vllm_config.model_config, "enable_sleep_mode", False) and not _TELLS_OF_SLEEP:
            if worker is None:
                text = "nothing tells this connector when vLLM unmaps the KV cache: its worker was not found"
                raise ConfigError("enable_sleep_mode", "True", "vLLM", text)
            call_around_sleep(worker, self.unregister_kv_caches, self.restore_kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether vLLM may unmap the KV cache and map it again, as it asks since 0.33."""
        return True

    def unregister_kv_caches(self) -> None:
        """Before the KV cache is unmapped: nothing reads or writes it from here on. A second call does nothing."""
        if self._worker is not None:
            self._worker.rest()

    def restore_kv_caches(self) -> None:
        """The KV cache is mapped where it was, with other bytes in it: what has been loaded has failed by then."""

    def get_handshake_metadata(self) -> HandshakeMetadata:
        """What the scheduler's half must know of this worker before the first request."""
        table = {} if self._worker is None or self._worker.weights is None else self._worker.weights.look()
        return HandshakeMetadata(Handshake(tuple(self._groups), self._facts, table))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of the step is written."""
        if self._worker is not None:
            self._worker.before(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step, which is not launched yet: newer vLLM asks for its loads only behind that."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._jobs = self._worker.stores(connector_metadata.step)
            if self._by_layers:  # the first ones leave before the forward pass is over
                self._jobs = self._worker.compared(connector_metadata.step, self._jobs)
            if connector_metadata.step.moves.loads:
                self._launched = self._worker.launched()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads, whose requests run in a later one."""
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata().step, self._launched)
            self._launched = None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a load is over, and checked, before the step that reads it begins.

        A load beside the forward pass that reads it can fail when it is too late: vLLM's model runner V2 rolls back the
        CPU's copy of a request's position alone, and async scheduling has launched the next step by then."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Let a layer leave whose attention has run, where layers are stored one by one."""
        if self._by_layers and self._jobs and self._worker is not None and layer_name in self._worker.places:
            self._worker.mover.save_layer(self._worker.places[layer_name], self._jobs)

    def wait_for_save(self) -> None:
        """Hand over the stores of a forward pass that is launched. Waits for none of them."""
        if self._worker is None:
            return
        jobs = [] if self._by_layers else self._jobs  # by layers they have left
        self._worker.store(self._get_connector_metadata().step, jobs)
        self._jobs = []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        if self._worker is not None:
            self._results = self._worker.results()
            if self._tells_events:
                self._stored |= self._results.stored
            self._over += self._results.over
            self._unstored += self._results.unstored
        return None, self._results.loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same since 0.30, with those that have failed where pages do not tell (several groups)."""
        assert _TransferResults is not None
        self.get_finished(finished_req_ids)
        failed = set() if self._is_single else self._results.failed & self._results.loaded
        return _TransferResults(finished_recving=self._results.loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What its scheduler's half is told behind a step: of stores that are over, where events are wanted, of the
        weights, where they were looked at, of stores that read no page any more, and of what was not stored."""
        if self._worker is None:
            return None
        stored, self._stored = self._stored, set()
        over, self._over = self._over, []
        unstored, self._unstored = self._unstored, []
        report = None if self._worker.weights is None else self._worker.weights.report()
        weights = {} if report is None else {self._rank: report}
        is_news = stored or weights or over or unstored
        return WorkerMetadata(stored, weights, over, unstored) if is_news else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of the loads that get_finished has just told of which hold nothing."""
        return self._results.failed_pages if self._is_single else set()

    def settle(self, wait_s: float) -> bool:
        """Wait until all that was computed so far is stored, the backend's own work included, so long at most; say
        whether it is. For benches and tests: an engine need not wait."""
        if self._worker is None or self._shared is None:
            return True
        settled = self._worker.mover.settle(wait_s)
        self._shared.backend.flush()
        return settled

    @property
    def counters(self) -> Mapping[str, float]:
        """What this half has counted since it began."""
        if self._scheduling is not None:
            return self._scheduling.counters
        return self._worker.mover.stats() if self._worker is not None else {}

    # -- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVRedisStats | None":
        """What has been counted since the last question, by this half."""
        counters = self.counters
        if counters == self._told and not any(self._seen.values()):
            return None  # a step that moves nothing, as most do
        grown: dict[str, Any] = {name: value - self._told.get(name, 0) for name, value in counters.items()}
        self._told.update(counters)
        grown = {name: value for name, value in grown.items() if value > 0 and name not in UNDER_WAY}
        grown |= {name: list(seen) for name, seen in self._seen.items() if seen}
        for seen in self._seen.values():
            seen.clear()
        return KVRedisStats(grown) if grown else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVRedisStats":
        """Counters that came from another process."""
        return KVRedisStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> "KVRedisMetrics":
        """Counters for /metrics: vllm:kvredis_..._total."""
        return KVRedisMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the hooks of single layers do anything, which a whole graph would leave out."""
        return configured(extra_config).use_layerwise

    def shutdown(self) -> None:
        """End what is under way; a second call does nothing."""
        if self._scheduling is not None:
            self._scheduling.tell_hits()
            self._scheduling.close()
        if self._worker is not None:
            self._worker.close()
        if self._shared is not None:
            leave(self._engine)
        self._worker = self._shared = None


def _hands_states_over() -> bool:
    """Whether this vLLM tells of the states of recurrent layers at block boundaries, and can be told that a load of
    theirs has failed: since 0.30."""
    from vllm.v1.core.sched.output import SchedulerOutput

    return hasattr(SchedulerOutput, "kv_connector_block_state") and _TransferResults is not None


def _rank(parallel: Any) -> int:
    """This worker's number: those of a pipeline's first stage first."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return int(get_pp_group().rank_in_group * parallel.tensor_parallel_size + get_tensor_model_parallel_rank())
