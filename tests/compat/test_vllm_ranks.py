"""KVRedisConnector in vLLM with several tensor-parallel ranks or pipeline stages, each in a process of its own: who
stores what, what one's trouble is to the others, and what engines of other sizes make of it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.engine_process import Answer
from tests.compat.test_vllm_real import MODELS, far, prompt
from tests.compat.vllm_process import PATIENT, VLLMProcess, site

pytestmark = pytest.mark.nightly

CHUNKS = 15
"""Of a whole prompt, whose first 320 tokens are five."""


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
    return sorted(key for key in map(str, client.keys("*")) if f"{{{rank}@" in key or f"{{{rank}/" in key)


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


def nearly(answer: Answer, cold: Answer) -> bool:
    """Whether an answer is another's but for how ranks add up: in float32 a few units of the sixth digit."""
    return bool(answer["tokens"] == cold["tokens"] and answer["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3))


@pytest.mark.parametrize("model", ["wide", "gemma", "latent"])
def test_what_two_ranks_have_stored_one_and_four_load_and_the_other_way_round(
    engine: VLLMProcess, server: RunningServer, model: str
) -> None:
    exactly: dict[str, Any] = MODELS["deepseek" if model == "latent" else "llama"] | {"dtype": "float32"}
    sizes = {"wide": (2, 1, 4), "gemma": (2, 1), "latent": (2, 1)}[model]  # Gemma here has two heads
    with redis.Redis(port=server.port) as client:
        for order in (sizes, (1, 2)):
            client.flushall()
            cold: Answer = {}
            for ranks in order:
                engine.open(model, far(server.port, **PATIENT), tensor_parallel_size=ranks, **exactly)
                if not cold:
                    cold = engine.generate(prompt())[0]
                    engine.stored()
                    there = client.dbsize()
                found = engine.generate(prompt())[0]
                assert found["cached"] == 960
                assert nearly(found, cold)
                stats = engine.ask("stats")["worker"]
                assert stats["loaded_chunks"]
                assert (stats["failed_chunks"], stats["errors"]) == (0, 0)
                engine.stored()
                assert client.dbsize() == there, "what was found is not stored again"


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_stages_of_a_pipeline_load_what_they_have_stored_and_what_one_lacks_all_compute(
    engine: VLLMProcess, server: RunningServer, model: str
) -> None:
    exactly: dict[str, Any] = MODELS[model] | {"dtype": "float32"}
    engine.open(model, far(server.port, **PATIENT), **exactly)
    alone = engine.generate(prompt(seed=1))[0]
    engine.open(model, far(server.port, **PATIENT), pipeline_parallel_size=2, **exactly)
    with redis.Redis(port=server.port, decode_responses=True) as client:
        cold = engine.generate(prompt(seed=1))[0]
        assert cold["cached"] == 0, "one engine of all layers has stored other blocks"
        assert nearly(cold, alone)
        client.flushall()
        cold = engine.generate(prompt())[0]
        engine.stored()
        second = [key for key in map(str, client.keys("*")) if f"{{0:{2 if model == 'llama' else 5}-" in key]
        assert second
        warm = engine.generate(prompt())[0]
        assert warm["cached"] == 960
        assert nearly(warm, cold)

        client.delete(*second[::3])
        part = engine.generate(prompt())[0]
        assert part["cached"] < 960
        assert nearly(part, cold)
        engine.stored()
        for key in second[1::3]:
            client.setrange(key, client.strlen(key) - 100, "?" * 100)
        assert nearly(engine.generate(prompt())[0], cold)
        engine.stored()

        engine.open(model, far(server.port, **PATIENT), pipeline_parallel_size=2, **exactly)
        fresh = engine.generate(prompt())[0]
        assert fresh["cached"] == 960
        assert nearly(fresh, cold)


@pytest.mark.parametrize(
    ("model", "spread"), [("qwen3.5", {"tensor_parallel_size": 2}), ("lfm2", {"pipeline_parallel_size": 2})]
)
def test_ranks_and_stages_of_a_model_with_recurrent_layers_load_their_states_and_other_sizes_find_none(
    engine: VLLMProcess, server: RunningServer, model: str, spread: dict[str, Any]
) -> None:
    exactly: dict[str, Any] = {"dtype": "float32" if model == "lfm2" else "bfloat16", "enable_prefix_caching": True}
    asked, cold = prompt(500), Answer()
    for _ in range(2):
        engine.open(model, far(server.port, **PATIENT), **exactly, **spread)
        if not cold:
            cold = engine.generate(asked)[0]
            assert cold["cached"] == 0
            engine.stored()
            assert engine.ask("reset")["reset"]
        found = engine.generate(asked)[0]
        assert found["cached"] == 480
        assert nearly(found, cold)
        assert all(rank["loaded_chunks"] and not rank["failed_chunks"] for rank in engine.ask("stats")["ranks"])
    engine.open(model, far(server.port, **PATIENT), **exactly)
    assert engine.generate(asked)[0]["cached"] == 0
