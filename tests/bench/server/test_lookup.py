"""A call with many keys is timed only where the server counts them right; ratios pair what ran in one repeat."""

from __future__ import annotations

import pytest

from kvredis.bench.core.wire import WireError
from kvredis.bench.server.latency import LookupPlan, LookupSample, long_keys, request_of, run_lookup, short_keys
from kvredis.bench.server.latency import summarize_lookups as summarize
from tests.bench.fake_server import FakePeer

PLAN = LookupPlan(repeats=2, keys=10, run_s=0.001)


def samples(*p50_us: float, cpu_us: float = 1.0) -> list[LookupSample]:
    return [
        LookupSample(repeat=repeat, calls=1, p50_us=each, p99_us=each, server_cpu_us_per_call=cpu_us)
        for repeat, each in enumerate(p50_us)
    ]


def test_the_keys_are_those_of_a_model_and_short_ones_all_different() -> None:
    long, short = long_keys(1000), short_keys(1000)
    assert {len(key) for key in long} == {101}
    assert {len(key) for key in short} == {32}
    assert len(set(long)) == len(set(short)) == 1000
    assert all(key.startswith(b"meta-llama/Llama-3.1-8B-Instruct@1@0@") for key in long)


def test_a_request_is_one_command_with_all_keys() -> None:
    assert request_of("KV.MATCH", [b"a", b"bc"]) == b"*3\r\n$8\r\nKV.MATCH\r\n$1\r\na\r\n$2\r\nbc\r\n"


def test_both_kinds_of_keys_are_asked_for_and_only_kvredis_for_its_own_command(peers: list[FakePeer]) -> None:
    peers += [FakePeer("kvredis"), FakePeer("before"), FakePeer("redis")]
    steps: list[str] = []
    rows = run_lookup(PLAN, "unix", peers, steps.append)
    asked = [("kvredis", "EXISTS"), ("before", "EXISTS"), ("redis", "EXISTS")]
    asked += [("kvredis", "KV.MATCH"), ("before", "KV.MATCH")]
    assert [(row["server"], row["op"], row["key_bytes"]) for row in rows] == [
        (*each, nbytes) for nbytes in (101, 32) for each in asked
    ]
    for row in rows:
        assert (row["transport"], row["keys"]) == ("unix", 10)
        assert [sample["repeat"] for sample in row["samples"]] == [0, 1]
        assert all(sample["calls"] >= 1 and 0 < sample["p50_us"] <= sample["p99_us"] for sample in row["samples"])
        assert ("ratio_p50_to_before" in row) == (row["server"] == "kvredis")
    assert len(steps) == PLAN.steps()
    assert all(not peer.store.values for peer in peers)


@pytest.mark.parametrize("fault", ["claims all keys", "misses a key"])
def test_a_server_that_counts_wrong_stops_the_bench(peers: list[FakePeer], fault: str) -> None:
    peers.append(FakePeer("redis", fault))
    with pytest.raises(WireError, match="expected b':"):
        run_lookup(PLAN, "tcp", peers)


def test_every_command_is_compared_with_exists_of_redis_and_with_itself_before() -> None:
    rows = summarize(
        "tcp",
        [b"key"],
        {
            ("kvredis", "EXISTS"): samples(10, 30, 20),
            ("redis", "EXISTS"): samples(10, 10, 5, cpu_us=2.0),
            ("kvredis", "KV.MATCH"): samples(5, 5, 5),
            ("before", "KV.MATCH"): samples(10, 5, 20, cpu_us=4.0),
        },
    )
    exists, redis, match, before = rows
    assert (exists["p50_us"], exists["ratio_p50"], exists["ratio_server_cpu"]) == (20, 3.0, 0.5)
    assert "ratio_p50_to_before" not in exists, "EXISTS of the commit before did not run"
    assert match["ratio_p50"] == 0.5
    assert (match.get("ratio_p50_to_before"), match.get("ratio_server_cpu_to_before")) == (0.5, 0.25)
    assert redis["ratio_p50"] == 1.0
    assert "ratio_p50_to_before" not in before
