"""How long does it take to ask for the keys of a whole prompt in one call? EXISTS, and KV.MATCH where there is one.

LMCache asks for every chunk of a prompt before it reads the first, so these calls stand in front of every request. What
is measured is a server's parsing of many arguments and its finding of as many keys; the client encodes the request once
and sends it as it is, so that it costs hardly anything. All keys are present, and every reply is compared.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvredis.bench.core.servers import BASELINE, BEFORE, SUBJECT, Peer, Transport
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratio, percentile, rotated
from kvredis.bench.core.wire import Wire

from .result import LookupRow, LookupSample

_MODEL = b"meta-llama/Llama-3.1-8B-Instruct@1@0@"
_VALUE = memoryview(b"kvredis-16-bytes")
_WARM_UP_CALLS = 20

Samples = dict[tuple[str, str], list[LookupSample]]  # by server and op


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """How many keys one call has and how long each server is asked in each repeat."""

    repeats: int = 5
    keys: int = 1000
    run_s: float = 1.0

    def steps(self) -> int:
        """Give how often `run_lookup` calls its progress."""
        return 2 * self.repeats


def long_keys(count: int) -> list[bytes]:
    """Give keys as LMCache makes them of a model, two ranks and a chunk's hash: 101 bytes."""
    return [_MODEL + hashlib.sha256(b"%d" % index).hexdigest().encode() for index in range(count)]


def short_keys(count: int) -> list[bytes]:
    """Give keys of 32 bytes: so few that it is the number of keys that counts, and not their length."""
    return [key[-32:] for key in long_keys(count)]


def request_of(op: str, keys: Sequence[bytes]) -> bytes:
    """Encode one call."""
    words = [op.encode(), *keys]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def run_lookup(
    plan: LookupPlan, transport: Transport, peers: Sequence[Peer], progress: Callable[[str], None] = lambda _step: None
) -> list[LookupRow]:
    """Measure both kinds of keys over one transport; `peers` speak RESP. Raises WireError at the first wrong count."""
    calls = [(peer, "EXISTS") for peer in peers]
    calls += [(peer, "KV.MATCH") for peer in peers if peer.name in (SUBJECT, BEFORE)]
    rows: list[LookupRow] = []
    for keys in (long_keys(plan.keys), short_keys(plan.keys)):
        samples: Samples = {(peer.name, op): [] for peer, op in calls}
        for peer, op in calls:
            _fill(peer, op, keys)
        for repeat in range(plan.repeats):
            progress(f"{len(keys)} keys of {len(keys[0])} B, {transport}")
            for peer, op in rotated(calls, repeat):
                sample = _measure(peer, request_of(op, keys), len(keys), plan.run_s)
                sample["repeat"] = repeat
                samples[peer.name, op].append(sample)
        for peer in peers:
            with peer.connect() as wire:
                wire.flush()
        rows += summarize(transport, keys, samples)
    return rows


def _fill(peer: Peer, op: str, keys: Sequence[bytes]) -> None:
    """Store all keys, after asking an empty server: one that always says that it has all of them is noticed."""
    with peer.connect() as wire:
        wire.flush()
        wire.call(request_of(op, keys), b":0")
        for key in keys:
            wire.put(key, _VALUE)


def _measure(peer: Peer, request: bytes, count: int, run_s: float) -> LookupSample:
    took_s: list[float] = []
    reply = b":%d" % count
    with peer.connect() as wire:
        _ask(wire, request, reply, _WARM_UP_CALLS)
        before_s = peer.cpu_s()
        end_s = time.perf_counter() + run_s
        while not took_s or time.perf_counter() < end_s:
            took_s.append(_ask(wire, request, reply, 1))
        cpu_s = peer.cpu_s() - before_s
    return LookupSample(
        repeat=0,
        calls=len(took_s),
        p50_us=percentile(took_s, 50) * 1e6,
        p99_us=percentile(took_s, 99) * 1e6,
        server_cpu_us_per_call=cpu_s * 1e6 / len(took_s),
    )


def _ask(wire: Wire, request: bytes, reply: bytes, times: int) -> float:
    start_s = time.perf_counter()
    for _ in range(times):
        wire.call(request, reply)
    return time.perf_counter() - start_s


def summarize(transport: Transport, keys: Sequence[bytes], samples: Samples) -> list[LookupRow]:
    """Sum up one kind of keys over the repeats; one row per server and op."""
    base = samples.get((BASELINE, "EXISTS"), [])
    rows = []
    for (server, op), own in samples.items():
        time_us, cpu_us = by_repeat(own, "p50_us"), by_repeat(own, "server_cpu_us_per_call")
        row = LookupRow(
            server=server,
            op=op,
            transport=transport,
            keys=len(keys),
            key_bytes=len(keys[0]),
            samples=own,
            p50_us=middle(list(time_us.values())),
            p99_us=middle([sample["p99_us"] for sample in own]),
            server_cpu_us_per_call=middle(list(cpu_us.values())),
            ratio_p50=paired_ratio(time_us, by_repeat(base, "p50_us")),
            ratio_server_cpu=paired_ratio(cpu_us, by_repeat(base, "server_cpu_us_per_call")),
        )
        before = samples.get((BEFORE, op))
        if server == SUBJECT and before:
            row["ratio_p50_to_before"] = paired_ratio(time_us, by_repeat(before, "p50_us"))
            row["ratio_server_cpu_to_before"] = paired_ratio(cpu_us, by_repeat(before, "server_cpu_us_per_call"))
        rows.append(row)
    return rows
