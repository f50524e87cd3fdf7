"""/metrics: the figures (figures.py) as Prometheus reads them, in its text format or as OpenMetrics by Accept header.

Beside our own names stand those of LMCache (its lmcache/observability.py, PrometheusLogger), so that a dashboard that
was made for it shows a server too. Only those are offered that a server can say truly. What it cannot: all that counts
an engine's requests, the tokens it asked for, its prompts and its lookups in tokens (num_requested_tokens,
num_lookup_*, num_prompt_tokens, retrieve_hit_rate ...), since a lookup here names keys; times as an engine sees them
(time_to_retrieve, retrieve_speed, retrieve_to_gpu_time ...); its remote_cache_usage (a block in both tiers
is in local_cache_usage and local_storage_usage); and what belongs to its own connectors and peers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

from kvredis import __version__
from kvredis.storage.copying import KIND as COPYING
from kvredis.storage.stats import Times

from .figures import PREFIX, Figure, Kind, Seen, Values, read_all
from .http_door import HttpRequest, HttpResponse, Routes

if TYPE_CHECKING:
    from .server import Server

POWERS_SHOWN: Final = range(10, 35, 2)
"""Edges of the buckets: 1.02 us, 4.1 us and so on, each four times the one before, up to 17 s."""


def routes(server: Server) -> Routes:
    """/metrics, for who may see it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FiguresCollector(server))
    ProcessCollector(registry=registry)

    def metrics(request: HttpRequest) -> HttpResponse:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        if content_type.startswith("application/openmetrics-text"):
            # Asked to escape, it takes the colon of `lmcache:` for something to escape. None of our names needs that.
            body: bytes = openmetrics(registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
            return HttpResponse(200, body, content_type)
        return HttpResponse(200, encode(registry), content_type)

    return {"/metrics": (metrics, True)}


class FiguresCollector(Collector):
    """What a scrape finds."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Every figure that has a value now, what runs here, and LMCache's names."""
        server = self._server
        yield build(server)
        for figure, values in read_all(server):
            yield family(figure, values)
        seen = Seen(server)
        for name, (kind, text, read) in LMCACHE.items():
            value = read(seen)
            if value is not None:
                made = CounterMetricFamily if kind is Kind.COUNTER else GaugeMetricFamily
                yield made(f"lmcache:{name}", text, value=value)


def build(server: Server) -> Metric:
    """Versions and what it is made of: labels of a 1."""
    facts = {
        "version": __version__,
        "python": platform.python_version(),
        "event_loop": "uvloop" if server.transport_lends else "asyncio",
        "copying": COPYING,
        "pages": str(server.store.arena.pages),
        "policy": server.store.policy.name,
    }
    made = GaugeMetricFamily(f"{PREFIX}build_info", "What runs here.", labels=list(facts))
    made.add_metric(list(facts.values()), 1)
    return made


def family(figure: Figure, values: Values) -> Metric:
    """One figure with all its values."""
    labels = [figure.label] if figure.label else []
    name = PREFIX + figure.name
    if figure.kind is Kind.HISTOGRAM:
        times = HistogramMetricFamily(name, figure.help, labels=labels)
        for label, value in values.items():
            assert isinstance(value, Times)
            times.add_metric([label] if labels else [], buckets(value), value.nanoseconds / 1e9)
        return times
    made = (CounterMetricFamily if figure.kind is Kind.COUNTER else GaugeMetricFamily)(name, figure.help, labels=labels)
    for label, value in values.items():
        assert not isinstance(value, Times)
        made.add_metric([label] if labels else [], float(value))
    return made


def buckets(times: Times) -> list[tuple[str, float]]:
    """How many took no longer than each edge, in seconds."""
    counts = list(times.counts)
    shown = [(repr(2**power / 1e9), float(sum(counts[: power + 1]))) for power in POWERS_SHOWN]
    return [*shown, ("+Inf", float(sum(counts)))]


LMCACHE: Final[dict[str, tuple[Kind, str, Callable[[Seen], float | None]]]] = {
    "num_hit_tokens": (
        Kind.COUNTER,
        "Total number of tokens hit: those of blocks that were read whole.",
        lambda seen: seen.server.store.stats.hit_tokens,
    ),
    "num_remote_read_requests": (
        Kind.COUNTER,
        "Total number of reads that found a block on this server.",
        lambda seen: seen.server.store.stats.hits,
    ),
    "num_remote_read_bytes": (
        Kind.COUNTER,
        "Total number of bytes read from this server.",
        lambda seen: seen.server.net_bytes()[1] + seen.server.store.stats.leased_bytes,
    ),
    "num_remote_write_requests": (
        Kind.COUNTER,
        "Total number of values stored on this server.",
        lambda seen: seen.server.store.stats.created + seen.server.store.stats.overwritten,
    ),
    "num_remote_write_bytes": (
        Kind.COUNTER,
        "Total number of bytes written to this server.",
        lambda seen: seen.server.net_bytes()[0] + seen.server.stats.put_bytes,
    ),
    "local_cpu_evict_keys_count": (
        Kind.COUNTER,
        "Total number of keys evicted from memory for want of room.",
        lambda seen: seen.server.store.stats.evicted + seen.tier.get("unloaded", 0),
    ),
    "local_cpu_evict_failed_count": (
        Kind.COUNTER,
        "Total number of values for which nobody could be evicted.",
        lambda seen: seen.server.store.stats.refused,
    ),
    "forced_unpin_count": (
        Kind.COUNTER,
        "Total number of leases ended by their time limit.",
        lambda seen: seen.server.store.stats.leases_revoked,
    ),
    "local_cache_usage": (Kind.GAUGE, "Local cache usage (bytes): memory.", lambda seen: seen.memory["used"]),
    "local_storage_usage": (
        Kind.GAUGE,
        "Local storage usage (bytes): the disk tier.",
        lambda seen: seen.disk["used"] if seen.disk else None,
    ),
    "active_memory_objs_count": (Kind.GAUGE, "Blocks in memory.", lambda seen: seen.memory["entries"]),
    "pinned_memory_objs_count": (Kind.GAUGE, "Holds of readers on blocks.", lambda seen: seen.memory["leases"]),
}
"""LMCache's names without their prefix; counters get the _total that its own exposition gives them."""
