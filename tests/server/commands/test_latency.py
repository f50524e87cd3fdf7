"""LATENCY: spikes that are remembered, distributions that are counted, and what is said of both."""

import time

import pytest

from kvredis.server.commands.latency import EVENTS_MAX, SAMPLES_MAX, LatencyMonitor, Spikes, graph, report
from kvredis.server.metrics.stats import CommandStats
from tests.server.fake_session import FakeSession


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `time.time` tells; a test moves it."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_nothing_is_noted_below_the_threshold_or_without_one() -> None:
    latency = LatencyMonitor()
    latency.note("command", 1e9)
    assert not latency.events
    latency = LatencyMonitor(100)
    latency.note("command", 99.9)
    assert not latency.events
    latency.note("command", 100)
    assert list(latency.events) == ["command"]


def test_of_the_spikes_in_one_second_the_highest_stays(clock: list[float]) -> None:
    latency = LatencyMonitor(1)
    for milliseconds in (5, 9, 7):
        latency.note("command", milliseconds)
    clock[0] += 1
    latency.note("command", 3)
    spikes = latency.events["command"]
    assert list(spikes.samples) == [(1_700_000_000, 9), (1_700_000_001, 3)]
    assert spikes.highest_ms == 9


def test_samples_and_events_are_bounded(clock: list[float]) -> None:
    latency = LatencyMonitor(1)
    for number in range(SAMPLES_MAX + 10):
        clock[0] += 1
        latency.note("command", 1000 - number)
    assert len(latency.events["command"].samples) == SAMPLES_MAX
    assert latency.events["command"].highest_ms == 1000
    for number in range(EVENTS_MAX + 10):
        latency.note(f"event{number}", 5)
    assert len(latency.events) == EVENTS_MAX


def test_latest_and_history_tell_seconds_and_milliseconds(session: FakeSession, clock: list[float]) -> None:
    latency = session.server.latency
    latency.threshold_ms = 1
    latency.note("command", 20)
    clock[0] += 10
    latency.note("command", 5)
    assert session.ask("LATENCY LATEST") == b"*1\r\n*4\r\n$7\r\ncommand\r\n:1700000010\r\n:5\r\n:20\r\n"
    assert session.ask("LATENCY HISTORY command") == (b"*2\r\n*2\r\n:1700000000\r\n:20\r\n*2\r\n:1700000010\r\n:5\r\n")
    assert session.ask("LATENCY HISTORY nope") == b"*0\r\n"
    assert session.ask("LATENCY RESET nope command") == b":1\r\n"
    assert session.ask("LATENCY LATEST") == b"*0\r\n"
    latency.note("a", 5)
    latency.note("b", 5)
    assert session.ask("LATENCY RESET") == b":2\r\n"


def test_a_graph_has_a_column_for_each_spike() -> None:
    spikes = Spikes()
    for unix_s, milliseconds in ((100, 10), (130, 20), (190, 40)):
        spikes.add(unix_s, milliseconds)
    lines = graph("command", spikes, 200).splitlines()
    assert lines[0] == "command - high 40 ms, low 10 ms (all time high 40 ms)"
    assert lines[1] == "-" * 80
    assert lines[2:6] == ["  #", "  #", " ##", "###"]
    assert lines[6:] == ["111", "mm0", "  s"]


def test_a_graph_of_nothing_is_an_error_and_of_one_spike_is_drawn(session: FakeSession) -> None:
    assert session.ask("LATENCY GRAPH x") == b"-ERR No samples available for event 'x'\r\n"
    session.server.latency.threshold_ms = 1
    session.server.latency.note("x", 7)
    assert b"x - high 7 ms, low 7 ms (all time high 7 ms)\n" in session.ask("LATENCY GRAPH x")


def test_the_doctor_says_what_is_off_what_is_quiet_and_what_is_wrong(session: FakeSession) -> None:
    assert b"latency-monitor-threshold is 0" in session.ask("LATENCY DOCTOR")
    latency = LatencyMonitor(50)
    assert "50 ms or longer since" in report(latency, 10_000)
    latency.note("command", 60)
    latency.note("command", 80)
    text = report(latency, 100_000)
    assert "1. command: 1 spikes, 80 ms on average (mean deviation 0 ms)" in text
    assert "CONFIG SET slowlog-log-slower-than 50000" in text
    assert "slowlog-log-slower-than" not in report(latency, 10_000)
    session.speak(3)
    assert session.ask("LATENCY DOCTOR").startswith(b"=")


def test_a_histogram_counts_up_over_redis_own_edges() -> None:
    record = CommandStats()
    for calls, each_ns in ((1, 1), (1, 1023), (3, 1024), (2, 70_000), (1, 10**12)):
        record.observe(calls, calls * each_ns)
    assert record.histogram() == [(1, 2), (2, 5), (132, 7), (1082130, 8)]
    assert record.calls == 8


def test_edges_are_those_that_redis_prints() -> None:
    record = CommandStats()
    for power in range(10, 21):
        record.observe(1, (1 << power) - 1)
    assert [edge for edge, _ in record.histogram()] == [1, 2, 4, 8, 16, 33, 66, 132, 264, 528, 1056]


def test_percentiles_lie_in_the_bucket_of_the_call_that_they_name() -> None:
    record = CommandStats()
    assert record.percentile(50) == 0.0
    record.observe(98, 98 * 1000)  # 512..1023 ns
    record.observe(2, 2 * 1_000_000)  # 524..1048 us
    assert 0.5 < record.percentile(50) < 1.1
    assert 524 < record.percentile(99) <= 1049
    assert record.percentile(99) < record.percentile(100) <= 1049
    assert record.percentile(0) > 0


def test_histogram_names_commands_their_containers_and_subcommands(session: FakeSession) -> None:
    stats = session.server.stats
    stats.command("get").observe(2, 3000)
    stats.command("config|get").observe(1, 5000)
    stats.command("set").rejected_calls = 1
    one = b"$3\r\nget\r\n*4\r\n$5\r\ncalls\r\n:2\r\n$14\r\nhistogram_usec\r\n*2\r\n:2\r\n:2\r\n"
    other = b"$10\r\nconfig|get\r\n*4\r\n$5\r\ncalls\r\n:1\r\n$14\r\nhistogram_usec\r\n*2\r\n:8\r\n:1\r\n"
    assert session.ask("LATENCY HISTOGRAM") == b"*4\r\n" + one + other
    assert session.ask("LATENCY HISTOGRAM GET nope set") == b"*2\r\n" + one
    assert session.ask("LATENCY HISTOGRAM config") == b"*2\r\n" + other
    assert session.ask("LATENCY HISTOGRAM config|get") == b"*2\r\n" + other
    session.speak(3)
    assert session.ask("LATENCY HISTOGRAM get").startswith(b"%1\r\n$3\r\nget\r\n%2\r\n")
    assert session.ask("LATENCY HISTOGRAM nope") == b"%0\r\n"
    session.ask("CONFIG SET latency-tracking no")
    assert session.ask("LATENCY HISTOGRAM") == b"%0\r\n"
