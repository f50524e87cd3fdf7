"""KVRedisConnector in vLLM with two tensor-parallel ranks, each in a process of its own: who stores what, and what one
rank's trouble is to the other."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.test_vllm_real import MODELS, far, prompt
from tests.compat.vllm_process import VLLMProcess, site

pytestmark = pytest.mark.nightly

CHUNKS = 15
"""Of a whole prompt, whose first 320 tokens are five."""
PATIENT = {"LMCACHE_BLOCKING_TIMEOUT_SECS": "60", "LMCACHE_EXTRA_CONFIG": '{"connection_timeout": 60}'}
"""Ranks that wait for each other yield their processors in a loop, beside which, on Linux 6.18, all others on two busy
cores may not run for 5 s and more: a server is not gone then."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    process = VLLMProcess(site(), tmp_path_factory.mktemp("vllm") / "ranks.log")
    yield process
    process.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path)
    yield server
    stop(process)


def keys_of(client: redis.Redis, rank: int) -> list[str]:
    return sorted(key for key in map(str, client.keys("*")) if f"{{{rank}@" in key)


def test_ranks_with_the_same_bytes_store_them_once_and_both_load_them_or_compute_them(
    engine: VLLMProcess, server: RunningServer
) -> None:
    engine.open("deepseek", far(server.port, **PATIENT), tensor_parallel_size=2, **MODELS["deepseek"])
    cold = engine.generate(prompt())[0]
    engine.stored()
    with redis.Redis(port=server.port, decode_responses=True) as client:
        keys = keys_of(client, 0)
        assert (len(keys), client.dbsize()) == (CHUNKS, CHUNKS)
        warm = engine.generate(prompt())[0]
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)
        assert [rank["loaded_chunks"] for rank in engine.ask("stats")["ranks"]] == [CHUNKS, CHUNKS]

        for key in keys[::5]:  # wherever in the prompt they are: what is behind the first of them is computed by both
            client.setrange(key, client.strlen(key) - 100, "?" * 100)
        assert engine.generate(prompt())[0]["tokens"] == cold["tokens"]
        assert all(rank["failed_chunks"] for rank in engine.ask("stats")["ranks"])
        engine.stored()
        assert keys_of(client, 0) == keys, "what was damaged is deleted, and stored again"
        warm = engine.generate(prompt())[0]
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)


def test_what_one_rank_cannot_load_no_rank_takes_and_what_is_computed_in_its_place_is_stored_when_it_is_right(
    engine: VLLMProcess, server: RunningServer
) -> None:
    engine.open("llama", far(server.port, LMCACHE_USE_LAYERWISE="true", **PATIENT), tensor_parallel_size=2)
    cold = engine.generate(prompt())[0]
    engine.stored()
    with redis.Redis(port=server.port, decode_responses=True) as client, client.pubsub() as stored:
        assert [len(keys_of(client, rank)) for rank in range(2)] == [CHUNKS, CHUNKS], engine.ask("stats")
        warm = engine.generate(prompt())[0]
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)

        client.flushall()
        engine.generate(prompt(320))
        engine.stored()
        before = engine.ask("stats")["ranks"]
        damaged = keys_of(client, 1)[2]
        client.setrange(damaged, client.strlen(damaged) - 100, "?" * 100)
        client.config_set("notify-keyspace-events", "E$")
        stored.subscribe("__keyevent@0__:set")
        again = engine.generate(prompt())[0]
        assert again["tokens"] == cold["tokens"]
        engine.stored()
        client.set("the last", "")
        sets: Counter[str] = Counter()
        while not sets["the last"]:
            message = stored.get_message(timeout=10)
            assert message is not None
            sets.update([message["data"]] if message["type"] == "message" else [])

        ranks = engine.ask("stats")["ranks"]
        failed = [now["failed_chunks"] - then["failed_chunks"] for now, then in zip(ranks, before, strict=True)]
        assert failed[0] == 0 < failed[1], "each rank tells of its own, and vLLM takes the least"
        new = [key for rank in range(2) for key in keys_of(client, rank) if sets[key]]
        assert len(new) >= 2 * (CHUNKS - 5), "all that was behind the damage has been stored"
        assert {sets[key] for key in new} == {1}, "and nothing before it was right"
        assert [len(keys_of(client, rank)) for rank in range(2)] == [CHUNKS, CHUNKS]
        warm = engine.generate(prompt())[0]
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)

    engine.open("llama", far(server.port, **PATIENT))
    assert engine.generate(prompt())[0]["cached"] == 0, "one rank has all heads of a layer, and nothing of theirs fits"
