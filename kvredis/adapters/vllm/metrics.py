"""What the vLLM connector tells of itself: in vLLM's log, and in /metrics under our names and under LMCache's.

Every counter of the connector is vllm:kvredis_NAME_total. Those of LMCache's metrics that are true here stand beside
them under LMCache's own names and types, so that its dashboards go on; labels are vLLM's (model_name, engine).
Names, types and buckets: lmcache/observability.py, 0.5.6.
"""

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

logger = logging.getLogger(__name__)

HIT_RATES, LOAD_SECONDS, LOAD_SPEEDS = "hit_rates", "load_waits_seconds", "load_tokens_per_second"
"""Seen one by one: the share of a prompt that was found, where any was, and how long each load was waited for, how many
tokens a second that was (not where layers come one by one)."""

LMCACHE_COUNTERS = {
    "lookups": ("num_lookup_requests",),
    "lookup_tokens": ("num_lookup_tokens", "num_prompt_tokens"),  # every prompt is looked up once
    "hit_tokens": ("num_lookup_hits",),
    "lookups_without_hit": ("lookup_0_hit_requests",),
    "engine_tokens": ("num_vllm_hit_tokens",),
    "loads": ("num_retrieve_requests",),
    "load_tokens": ("num_requested_tokens",),
    "loaded_tokens": ("num_hit_tokens",),
    "stores": ("num_store_requests",),
    "store_tokens": ("num_stored_tokens",),
}
_RETRIEVE_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LMCACHE_HISTOGRAMS = {
    HIT_RATES: ("request_cache_hit_rate", tuple(at / 10 for at in range(1, 11))),
    LOAD_SECONDS: ("time_to_retrieve", _RETRIEVE_SECONDS),
    LOAD_SPEEDS: ("retrieve_speed", (1, *(2**power for power in range(3, 17)))),
}
LMCACHE_HIT_RATE = "lookup_hit_rate"

_made: dict[tuple[Any, str], Any] = {}
"""By class and name: engines that follow each other in one process share them, as nothing may be registered twice."""


class KVRedisStats(KVConnectorStats):  # type: ignore[misc]
    """What has grown and what was seen, by name."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> "KVRedisStats":
        """Add another's."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the periodic log line shows: of what was seen one by one the mean."""
        return {
            name: round(sum(value) / len(value), 4) if isinstance(value, list) else value
            for name, value in self.data.items()
            if value != []
        }

    def is_empty(self) -> bool:
        """Whether nothing has grown."""
        return not self.data


class KVRedisMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus: ours made when they first grow, LMCache's at once, as LMCache has them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mine: dict[str, Any] = {}
        self._lmcache = {
            ours: [self._lmcaches(self._counter_cls, name, ours) for name in names]
            for ours, names in LMCACHE_COUNTERS.items()
        }
        self._seen = {
            ours: self._lmcaches(self._histogram_cls, name, ours, buckets=buckets)
            for ours, (name, buckets) in LMCACHE_HISTOGRAMS.items()
        }
        self._rate = self._lmcaches(
            self._gauge_cls, LMCACHE_HIT_RATE, "hit_tokens / lookup_tokens", multiprocess_mode="livemostrecent"
        )
        counters = [counter for counters in self._lmcache.values() for counter in counters]
        for values in self.per_engine_labelvalues.values():
            for metric in (*counters, *self._seen.values(), self._rate):
                if metric is not None:
                    metric.labels(*values)  # 0 is told too

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what has grown."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if isinstance(value, list):
                if (histogram := self._seen.get(name)) is not None:
                    for each in value:
                        histogram.labels(*values).observe(each)
                continue
            if name not in self._mine:
                text = f"{name.replace('_', ' ')} of the KV cache behind KVRedisConnector"
                self._mine[name] = self._counter_cls(
                    name=f"vllm:kvredis_{name}", documentation=text, labelnames=self._labelnames
                )
            for counter in (self._mine[name], *self._lmcache.get(name, ())):
                if counter is not None:
                    counter.labels(*values).inc(value)
        if self._rate is not None and (tokens := transfer_stats_data.get("lookup_tokens")):
            self._rate.labels(*values).set(transfer_stats_data.get("hit_tokens", 0) / tokens)

    def _lmcaches(self, kind: Any, name: str, ours: str, **more: Any) -> Any:
        """One of LMCache's; None where LMCache itself is in this process and has it."""
        if (kind, name) not in _made:
            text = f"LMCache's name for {ours} of KVRedisConnector"
            try:
                made = kind(name=f"lmcache:{name}", documentation=text, labelnames=self._labelnames, **more)
            except ValueError as error:
                logger.warning("lmcache:%s is another's here: %s", name, error)
                return None
            _made[kind, name] = made
        return _made[kind, name]
