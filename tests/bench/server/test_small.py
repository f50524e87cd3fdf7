"""redis-benchmark's answer is read by its column names, and anything else it prints is an error."""

import pytest

from kvredis.bench.core.errors import BenchError
from kvredis.bench.server.latency import LONG, OPS, VALUE, SmallPlan, parse_csv

PRINTED = (
    '"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"\n'
    '"EXISTS bench:small","42555.32","0.021","0.008","0.023","0.031","0.047","0.159"\n'
)


def test_rate_and_percentiles_are_read() -> None:
    sample = parse_csv(PRINTED)
    assert (sample["rps"], sample["p50_ms"], sample["p99_ms"]) == (42555.32, 0.023, 0.047)


def test_a_command_may_be_long() -> None:
    words = " ".join(map(bytes.decode, OPS["MSET 16 KiB"].words))
    assert parse_csv(PRINTED.replace("EXISTS bench:small", words))["rps"] == 42555.32


@pytest.mark.parametrize("printed", ["", "ERROR: no\n", PRINTED.splitlines()[0], PRINTED + PRINTED.splitlines()[1]])
def test_anything_else_is_an_error(printed: str) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        parse_csv(printed)


def test_the_values_have_the_lengths_that_are_said_and_need_no_quoting() -> None:
    assert (len(VALUE), len(LONG)) == (100, 16 * 1024)
    assert OPS["SET"].words[2] == VALUE
    assert OPS["SET 16 KiB"].words[2] == OPS["SET 16 KiB"].value == LONG
    assert not set(VALUE + LONG) & set(b" \"'\\")


@pytest.mark.parametrize("op", ["MSET", "MSET 16 KiB"])
def test_mset_has_ten_keys_and_writes_the_one_that_is_looked_at(op: str) -> None:
    words = OPS[op].words
    assert len(set(words[1::2])) == 10
    assert set(words[2::2]) == {OPS[op].value}
    assert OPS["GET"].words[1] in words[1::2]


@pytest.mark.parametrize("op", OPS)
def test_no_run_has_fewer_requests_than_are_in_flight(op: str) -> None:
    assert SmallPlan(run_s=0.00001).requests(op, 50, 16) == 800


def test_large_values_are_asked_for_less_often() -> None:
    plan = SmallPlan()
    assert plan.requests("PING", 1, 1) > plan.requests("SET 16 KiB", 1, 1) > plan.requests("MSET 16 KiB", 1, 1) > 0
