"""What the server counts, for INFO's stats, commandstats, latencystats and errorstats sections and LATENCY HISTOGRAM.

A command's times are kept as counts in powers of two, because `observe` is on the hot path: it is called once for a run
of equal commands, and what a run's commands took each is its mean. Everything finer is left to the slow log.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final, Protocol

from kvredis.server.protocol._hot import CallTimes
from kvredis.storage.stats import POWERS, Times

SAMPLES = 16
"""How many samples, one each tick of the server, the instantaneous figures are the mean of: Redis' number."""

SHOWN_POWER_LOW, SHOWN_POWER_HIGH = 10, 30
"""Buckets end at 1024 ns, 2048 ns and so on up to 1.07 s, which takes what is longer as well: Redis' range."""

ERRORS_MAX = 128
"""Different error codes that are counted by name: Redis' bound on errorstats."""


class CommandStats(CallTimes):
    """One command's share. `nanoseconds` is the time in its handler and in gathering its reply."""

    __slots__ = ()

    def __init__(self, *, calls: int = 0, nanoseconds: int = 0, rejected_calls: int = 0, failed_calls: int = 0) -> None:
        super().__init__(nanoseconds)
        self.calls = calls
        self.rejected_calls = rejected_calls
        """Refused before the handler ran: arity, authentication."""
        self.failed_calls = failed_calls
        """Answered with an error by the handler."""

    def histogram(self) -> list[tuple[int, int]]:
        """(microseconds, calls that took no longer), for every bucket that adds some. The edges are those of Redis,
        which shows the highest value that its histogram of two digits does not tell from the power of two."""
        shown: list[tuple[int, int]] = []
        calls = seen = 0
        for power in range(POWERS):
            calls += self.counts[power]
            if power >= SHOWN_POWER_LOW and calls > seen and (power < SHOWN_POWER_HIGH or power == POWERS - 1):
                edge = min(power, SHOWN_POWER_HIGH)
                shown.append((((1 << edge) + (1 << (edge - 7)) - 1) // 1000, calls))
                seen = calls
        return shown

    def percentile(self, percent: float) -> float:
        """Microseconds that `percent` of the calls did not exceed, as if times were spread evenly in their bucket."""
        calls = sum(self.counts)
        wanted = max(1.0, calls * percent / 100)
        passed = 0
        for power, count in enumerate(self.counts):
            if count and passed + count >= wanted:
                low = 1 << power - 1 if power else 0
                return (low + ((1 << power) - low) * (wanted - passed) / count) / 1000
            passed += count
        return 0.0


class Rate:
    """How much a counter grows in a second, over the last SAMPLES samples."""

    __slots__ = ("_at", "_last_s", "_last_value", "_samples")

    def __init__(self) -> None:
        self._last_s = 0.0
        self._last_value = 0
        self._samples = array("d", bytes(8 * SAMPLES))  # no objects, each of which would hold a page of others
        self._at = 0

    def sample(self, now_s: float, value: int) -> None:
        """Note what the counter is now. One that has gone back has been reset: then that much has come since."""
        if self._last_s and now_s > self._last_s:
            grown = value - self._last_value if value >= self._last_value else value
            self._samples[self._at % SAMPLES] = grown / (now_s - self._last_s)
            self._at += 1
        self._last_s, self._last_value = now_s, value

    @property
    def per_second(self) -> float:
        """The mean of the samples, those that were not taken yet being 0 as in Redis."""
        return sum(self._samples) / SAMPLES


KINDS: Final = ("tcp", "tls", "unix")
"""Of connections."""

NO_LIMIT: Final = (0, 0, 0)
"""No bound in client-output-buffer-limit: hard, soft, seconds above the soft one."""


@dataclass(slots=True)
class Traffic:
    """What went over connections of one kind."""

    input_bytes: int = 0
    output_bytes: int = 0
    reads: int = 0
    """Times that bytes of a client were received."""
    writes: int = 0
    """Times that replies were handed to the transport."""

    def add(self, other: "Exchanging") -> None:
        """Enter what another has counted."""
        self.input_bytes += other.input_bytes
        self.output_bytes += other.output_bytes
        self.reads += other.reads
        self.writes += other.writes

    def negated(self) -> "Traffic":
        """What brings it to zero."""
        return Traffic(-self.input_bytes, -self.output_bytes, -self.reads, -self.writes)


class Exchanging(Protocol):
    """What counts the bytes that it receives and sends: a session, too."""

    input_bytes: int
    output_bytes: int
    reads: int
    writes: int


@dataclass(slots=True)
class ServerStats:
    """Counts since start or since CONFIG RESETSTAT."""

    commands_processed: int = 0
    connections_received: int = 0
    connections_rejected: int = 0
    gone: dict[str, Traffic] = field(default_factory=dict)
    """Of clients that are gone, by the kind of their connection: Server.traffic adds the connected ones."""
    spliced_bytes: int = 0
    """Of replies on unix sockets that go out without a copy, counted when they are begun."""
    threaded_writes: int = 0
    """Replies that a thread beside the loop was given to send."""
    threaded_reads: int = 0
    """Values of which a thread beside the loop was given the rest to receive."""
    put_bytes: int = 0
    """Copied out of memory that clients have lent."""
    putting: Times = field(default_factory=Times)
    """Each of these copies."""
    sending: Times = field(default_factory=Times)
    """What a client did not take at once, until it had taken all of it."""
    evicted_clients: int = 0
    query_limit_disconnections: int = 0
    output_limit_disconnections: int = 0
    sets_existed: int = 0
    """Values not stored because their key was there and the client had asked for that (NX)."""
    sets_duplicate: int = 0
    """Values whose place another one of the same MSET took: the store has counted them as overwritten."""
    handler_exceptions: int = 0
    """Exceptions that a handler should not have let out: each is a mistake of ours and is in the log."""
    error_replies: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Error replies by their first word."""
    commands: dict[str, CommandStats] = field(default_factory=dict)
    """By full command name, `client|id`."""
    floors: dict[str, int] = field(default_factory=dict)
    used_peak_bytes: int = 0
    """The most memory that values held at one of the ticks or when a client asked."""
    saves: int = 0
    last_save_s: int = field(default_factory=lambda: int(time.time()))
    """When SAVE or BGSAVE has last succeeded, in Unix seconds; the start before that."""
    last_save_failed: bool = False
    saving: bool = False
    operations: Rate = field(default_factory=Rate)
    input_rate: Rate = field(default_factory=Rate)
    output_rate: Rate = field(default_factory=Rate)
    ticks: int = 0
    loop_cycles: Rate = field(default_factory=Rate)
    loop_work: Rate = field(default_factory=Rate)
    """In microseconds."""
    loop_from_ns: int = field(default_factory=time.thread_time_ns)
    """What the loop's thread had worked before."""

    @property
    def loop_work_us(self) -> int:
        """What the thread of the event loop has worked, which is the time in the loop without its waiting; to be asked
        for in that thread."""
        return max(0, time.thread_time_ns() - self.loop_from_ns) // 1000

    def reset(self) -> None:
        """Back to zero, in place, because sessions hold on to this object."""
        fresh = ServerStats(last_save_s=self.last_save_s, last_save_failed=self.last_save_failed, saving=self.saving)
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

    def sample(self, now_s: float, received: int, sent: int, reads: int = 0) -> None:
        """To be called every now and then: bytes received and sent so far, and how often bytes were received."""
        self.loop_cycles.sample(now_s, self.ticks + reads)
        self.loop_work.sample(now_s, self.loop_work_us)
        self.operations.sample(now_s, self.commands_processed)
        self.input_rate.sample(now_s, received)
        self.output_rate.sample(now_s, sent)

    def floor(self, name: str, value: int) -> int:
        """The most that `value` has been under this name: for a difference of counters that must only grow."""
        most = self.floors[name] = max(value, self.floors.get(name, 0))
        return most

    def note_used(self, used_bytes: int) -> int:
        """Note what values hold now; returns the peak."""
        if used_bytes > self.used_peak_bytes:
            self.used_peak_bytes = used_bytes
        return self.used_peak_bytes

    def note_save(self, *, saved: bool) -> None:
        """Note that all that is to be on disk is there, or could not be brought there."""
        self.saving = False
        self.last_save_failed = not saved
        if saved:
            self.saves += 1
            self.last_save_s = int(time.time())

    def command(self, name: str) -> CommandStats:
        """The record of a command, a new one at its first call."""
        try:
            return self.commands[name]
        except KeyError:
            record = self.commands[name] = CommandStats()
            return record

    def timed(self) -> Iterator[tuple[str, CommandStats]]:
        """Every command of which times are kept, with its record."""
        for name, record in list(self.commands.items()):
            if any(record.counts):
                yield name, record

    def forget_times(self) -> None:
        """Begin every command's distribution of times anew."""
        for record in self.commands.values():
            record.counts = [0] * POWERS

    def count_error(self, reply: bytes) -> None:
        """Take note of an error reply that is about to be sent."""
        self.error_replies += 1
        code = reply[1:].split(None, 1)[0].decode("latin-1")
        if code in self.errors or len(self.errors) < ERRORS_MAX:
            self.errors[code] = self.errors.get(code, 0) + 1
