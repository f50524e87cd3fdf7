"""redis-benchmark's answer is read by its column names, and anything else it prints is an error."""

import pytest

from kvredis.bench.core.errors import BenchError
from kvredis.bench.server.latency import OPS, VALUE, SmallPlan, parse_csv

PRINTED = (
    '"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"\n'
    '"EXISTS bench:small","42555.32","0.021","0.008","0.023","0.031","0.047","0.159"\n'
)


def test_rate_and_percentiles_are_read() -> None:
    sample = parse_csv(PRINTED)
    assert (sample["rps"], sample["p50_ms"], sample["p99_ms"]) == (42555.32, 0.023, 0.047)


@pytest.mark.parametrize("printed", ["", "ERROR: no\n", PRINTED.splitlines()[0], PRINTED + PRINTED.splitlines()[1]])
def test_anything_else_is_an_error(printed: str) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        parse_csv(printed)


def test_the_value_has_a_hundred_bytes_and_needs_no_quoting() -> None:
    assert len(VALUE) == 100
    assert OPS["SET"][2].encode() == VALUE
    assert not set(VALUE) & set(b" \"'\\")


def test_no_run_has_fewer_requests_than_are_in_flight() -> None:
    plan = SmallPlan(run_s=0.0001)
    assert plan.requests(50, 16) == 800
    assert plan.requests(1, 1) == 3
