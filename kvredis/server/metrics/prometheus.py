"""/metrics: the figures (metrics.py) as Prometheus reads them, in its text format or as OpenMetrics by Accept header.

Beside our own names stand those of LMCache (its lmcache/observability.py, PrometheusLogger), so that a dashboard that
was made for it shows a server too. Only those are offered that a server can say truly. What it cannot: all that counts
an engine's requests, the tokens it asked for, its prompts and its lookups in tokens (num_requested_tokens,
num_lookup_*, num_prompt_tokens, retrieve_hit_rate ...), since a lookup here names keys; times as an engine sees them
(time_to_retrieve, retrieve_speed, retrieve_to_gpu_time ...); its remote_cache_usage (a block in both tiers
is in local_cache_usage and local_storage_usage); and what belongs to its own connectors and peers.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

from kvredis import __version__
from kvredis.server.context import Context
from kvredis.server.http.page.slices import in_slices
from kvredis.server.http.server import HttpRequest, HttpResponse, Routes
from kvredis.storage.memory.copy import KIND as COPYING
from kvredis.storage.stats import Times

from .metrics import PREFIX, Figure, Kind, Seen, Values, read_all

POWERS_SHOWN: Final = range(10, 35, 2)
"""Edges of the buckets: 1.02 us, 4.1 us and so on, each four times the one before, up to 17 s."""

PART_LABELS: Final = 4
"""So many labels' values are written before others have a turn: of times that takes a millisecond."""

END: Final = b"# EOF\n"
"""Of OpenMetrics."""


def routes(server: Context) -> Routes:
    """/metrics, for users who may see it."""
    process = ProcessCollector(registry=None)
    turn = asyncio.Lock()

    async def metrics(request: HttpRequest) -> HttpResponse:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        is_open = content_type.startswith("application/openmetrics-text")
        if is_open:
            # Asked to escape, it takes the colon of `lmcache:` for something to escape. None of our names needs that.
            encode = partial(openmetrics, escaping=ALLOWUTF8)
        texts: list[bytes] = []

        def take(some: Sequence[Part]) -> None:
            for part in some:
                lines = encode(part).removesuffix(END).splitlines(keepends=True)
                texts.extend(lines if part.begins else filterfalse(is_comment, lines))

        async with turn:  # many scrapes at a time would each have a slice before another client has a turn
            await in_slices(parts(server), take, batch=1)
        texts.append(encode(process).removesuffix(END))
        return HttpResponse(200, b"".join(texts) + (END if is_open else b""), content_type)

    return {"/metrics": (metrics, True)}


@dataclass(frozen=True, slots=True)
class Part(Collector):
    """Some values of one figure. To make and write a value takes 20 us and there may be thousands, so that it is done
    part by part; values are those of one moment, but times go on meanwhile."""

    make: Callable[[], Metric]
    begins: bool = True
    """Whether these are the figure's first values, before which its help and type are told."""

    def collect(self) -> Iterator[Metric]:
        """For an encoder, the figure with no other values."""
        yield self.make()


def parts(server: Context) -> list[Part]:
    """Every figure that has a value now, what runs here, and LMCache's names."""
    found = [Part(partial(build, server))]
    for figure, values in read_all(server):
        labels = list(values)
        for at in range(0, len(labels), PART_LABELS):
            some = {label: values[label] for label in labels[at : at + PART_LABELS]}
            found.append(Part(partial(family, figure, some), begins=at == 0))
    seen = Seen(server)
    for name, (kind, text, read) in LMCACHE.items():
        value = read(seen)
        if value is not None:
            made = CounterMetricFamily if kind is Kind.COUNTER else GaugeMetricFamily
            found.append(Part(partial(made, f"lmcache:{name}", text, value=value)))
    return found


def is_comment(line: bytes) -> bool:
    """Whether a line of a scrape is HELP or TYPE."""
    return line.startswith(b"#")


def build(server: Context) -> Metric:
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
        lambda seen: seen.server.stats.floor(
            "left_memory",
            seen.server.store.stats.evicted - seen.server.store.stats.evicted_away + seen.tier.get("unloaded", 0),
        ),
    ),
    "local_cpu_evict_failed_count": (
        Kind.COUNTER,
        "Total number of values for which no block could be evicted.",
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
