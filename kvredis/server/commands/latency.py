"""LATENCY: when the server kept clients waiting, and how long commands take.

Two things of one name, as in Redis. Events (`command`, `fast-command`, `expire-cycle`, ...) are noted when they reach
`latency-monitor-threshold` milliseconds, which is off by default. Distributions of all commands' times are always kept,
by metrics/stats.py; HISTOGRAM shows them here, INFO latencystats their percentiles. `latency-tracking no` hides both,
and switching it on again begins anew.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvredis.server.client.client import ClientOf, Host
from kvredis.server.metrics.stats import CommandStats
from kvredis.server.protocol.replies import EMPTY_ARRAY, Reply, array, bulk, error, integer, map_reply, verbatim

from .command import help_reply
from .registry import COMMANDS, container, subcommand
from .slowlog import SlowLog

SAMPLES_MAX: Final = 160
"""Seconds with a spike that are remembered of an event: Redis' number."""

EVENTS_MAX: Final = 32
"""Events have names that this program gives them, so this is a bound and no limit."""

GRAPH_COLUMNS: Final = 80
GRAPH_ROWS: Final = 4


@dataclass(slots=True)
class Spikes:
    """One event's history: (Unix second, highest milliseconds in it), oldest first, and the highest of all time."""

    samples: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    highest_ms: int = 0

    def add(self, unix_s: int, milliseconds: int) -> None:
        """Note one; of those in one second the highest stays."""
        self.highest_ms = max(self.highest_ms, milliseconds)
        if self.samples and self.samples[-1][0] == unix_s:
            milliseconds = max(milliseconds, self.samples.pop()[1])
        self.samples.append((unix_s, milliseconds))


class LatencyMonitor:
    """Events that took at least `threshold_ms`; 0 notes none."""

    def __init__(self, threshold_ms: int = 0) -> None:
        self.threshold_ms = threshold_ms
        self.events: dict[str, Spikes] = {}

    def note(self, event: str, milliseconds: float) -> None:
        """`event` has kept the server busy for so long."""
        if not self.threshold_ms or milliseconds < self.threshold_ms:
            return
        spikes = self.events.get(event)
        if spikes is None:
            if len(self.events) >= EVENTS_MAX:
                return
            spikes = self.events[event] = Spikes()
        spikes.add(int(time.time()), int(milliseconds))

    def reset(self, events: list[str]) -> int:
        """Forget the events named, or all of them; returns how many there were."""
        forgotten = [self.events.pop(name, None) for name in events or list(self.events)]
        return sum(each is not None for each in forgotten)


container(
    "latency",
    group="server",
    since="2.8.13",
    complexity="Depends on subcommand.",
    summary="What kept the server busy, and how long commands take.",
)


class _Server(Host, Protocol):
    latency: LatencyMonitor
    slowlog: SlowLog


Caller = ClientOf[_Server]

_ADMIN = {"flags": "admin noscript loading stale", "acl": "admin slow dangerous"}
_TIPS = "nondeterministic_output request_policy:all_nodes response_policy:special"


@subcommand(
    "latency|latest", arity=2, since="2.8.13", tips=_TIPS, summary="Each event's latest and highest spike.", **_ADMIN
)
def latency_latest(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY LATEST: [event, Unix second, milliseconds, highest milliseconds] each."""
    return array(
        [
            array([bulk(name), *map(integer, spikes.samples[-1]), integer(spikes.highest_ms)])
            for name, spikes in session.server.latency.events.items()
        ]
    )


@subcommand(
    "latency|history",
    arity=3,
    since="2.8.13",
    tips=_TIPS,
    syntax="event",
    summary="The spikes of one event: Unix second and milliseconds.",
    **_ADMIN,
)
def latency_history(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY HISTORY event."""
    spikes = _spikes(session, args[2])
    if spikes is None:
        return EMPTY_ARRAY
    return array([array([*map(integer, sample)]) for sample in spikes.samples])


@subcommand(
    "latency|reset",
    arity=-2,
    since="2.8.13",
    tips="request_policy:all_nodes response_policy:agg_sum",
    syntax="[event [event ...]]",
    summary="Forget the spikes of some events, or of all.",
    **_ADMIN,
)
def latency_reset(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY RESET [event ...]."""
    return integer(session.server.latency.reset([arg.decode("latin-1") for arg in args[2:]]))


@subcommand(
    "latency|graph",
    arity=3,
    since="2.8.13",
    tips=_TIPS,
    syntax="event",
    summary="The spikes of one event as a picture.",
    **_ADMIN,
)
def latency_graph(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY GRAPH event."""
    spikes = _spikes(session, args[2])
    if spikes is None:
        return error(b"ERR No samples available for event '%b'" % args[2].split(b"\0")[0])
    return verbatim(session, graph(args[2].decode("latin-1"), spikes, int(time.time())))


@subcommand("latency|doctor", arity=2, since="2.8.13", tips=_TIPS, summary="What the spikes say, in words.", **_ADMIN)
def latency_doctor(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY DOCTOR."""
    return verbatim(session, report(session.server.latency, session.server.slowlog.threshold_us))


@subcommand(
    "latency|histogram",
    arity=-2,
    since="7.0.0",
    tips=_TIPS,
    complexity="O(N) where N is the number of commands that have run",
    syntax="[command [command ...]]",
    summary="How many calls of each command took no longer than 1, 2, 4, 8, ... microseconds.",
    **_ADMIN,
)
def latency_histogram(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY HISTOGRAM [command ...]: a container's name stands for its subcommands."""
    hidden = session.server.settings.get("latency-tracking") == "no"
    timed = {} if hidden else dict(session.server.stats.timed())
    names = [name for arg in args[2:] for name in _names_of(arg)] if len(args) > 2 else list(timed)
    found = [(name, timed[name]) for name in names if name in timed]
    return map_reply(session, [(bulk(name), _distribution(session, record)) for name, record in found])


@subcommand("latency|help", arity=2, flags="loading stale", acl="slow", since="2.8.13", summary="Print this help.")
def latency_help(session: Caller, args: list[bytes]) -> Reply:
    """LATENCY HELP."""
    return help_reply("latency")


def _spikes(session: Caller, event: bytes) -> Spikes | None:
    return session.server.latency.events.get(event.decode("latin-1"))


def _names_of(arg: bytes) -> list[str]:
    """The full names that one argument of HISTOGRAM stands for."""
    name = arg.lower().decode("latin-1")
    found = COMMANDS.get(arg.upper())
    return [name, *(part.name for part in found.subcommands.values())] if found is not None else [name]


def _distribution(session: Caller, record: CommandStats) -> Reply:
    buckets = record.histogram()
    pairs: list[tuple[Reply, Reply]] = [
        (bulk("calls"), integer(buckets[-1][1])),  # those since the distributions were begun
        (bulk("histogram_usec"), map_reply(session, [(integer(edge), integer(count)) for edge, count in buckets])),
    ]
    return map_reply(session, pairs)


def graph(event: str, spikes: Spikes, now_s: int) -> str:
    """The last GRAPH_COLUMNS spikes as columns of up to GRAPH_ROWS marks, each with its age written below it."""
    samples = list(spikes.samples)[-GRAPH_COLUMNS:]
    low = min(each for _, each in samples)
    high = max(each for _, each in samples)
    text = f"{event} - high {high} ms, low {low} ms (all time high {spikes.highest_ms} ms)\n{'-' * GRAPH_COLUMNS}\n"
    heights = [1 + (GRAPH_ROWS - 1) * (each - low) // (high - low or 1) for _, each in samples]
    rows = ["".join("#" if height >= row else " " for height in heights) for row in range(GRAPH_ROWS, 0, -1)]
    ages = [_age(now_s - unix_s) for unix_s, _ in samples]
    rows += ["".join(age[at : at + 1] or " " for age in ages) for at in range(max(map(len, ages)))]
    return text + "".join(row.rstrip() + "\n" for row in rows)


def _age(seconds: int) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s}{unit}"
    return f"{max(0, seconds)}s"


_ADVICE: Final = {
    "command": "Look at SLOWLOG GET: it names the slow commands, their arguments and who sent them.",
    "fast-command": "Commands that cost little were late: look for a busy or swapping machine, and at their payloads.",
    "expire-cycle": "Many keys end at the same instant: give them ends that differ a little.",
    "eviction-cycle": "Large values need many small ones to leave: a larger arena or values of one size help.",
}


def report(latency: LatencyMonitor, slowlog_us: int) -> str:
    """The text of LATENCY DOCTOR."""
    if not latency.threshold_ms:
        return (
            "Latency is not monitored: latency-monitor-threshold is 0. "
            "CONFIG SET latency-monitor-threshold 100 notes whatever takes 100 ms or longer.\n"
        )
    if not latency.events:
        return f"Nothing has taken {latency.threshold_ms} ms or longer since the start or the last LATENCY RESET.\n"
    lines = [f"Spikes of {latency.threshold_ms} ms or longer:", ""]
    for number, (name, spikes) in enumerate(latency.events.items(), 1):
        values = [each for _, each in spikes.samples]
        mean = sum(values) / len(values)
        deviation = sum(abs(each - mean) for each in values) / len(values)
        period_s = (int(time.time()) - spikes.samples[0][0]) / len(values)
        lines.append(
            f"{number}. {name}: {len(values)} spikes, {mean:.0f} ms on average (mean deviation {deviation:.0f} ms), "
            f"one in {period_s:.1f} s, {spikes.highest_ms} ms at the highest."
        )
    advice = [text for name, text in _ADVICE.items() if name in latency.events]
    if "command" in latency.events and not 0 <= slowlog_us <= latency.threshold_ms * 1000:
        advice.append(
            "The slow log leaves out what the monitor notes: "
            f"CONFIG SET slowlog-log-slower-than {latency.threshold_ms * 1000}."
        )
    return "\n".join([*lines, "", *advice]) + "\n"
