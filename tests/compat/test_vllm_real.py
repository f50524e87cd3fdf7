"""vLLM 0.32 as it is, on the CPU, with KVRedisConnector: the tokens that it generates, and what it need not compute.

Few processes, since each takes its time to start: engines of several models are opened in them one after the other.
Models are tiny and of random weights, and what they generate depends on every token before.
"""

import functools
import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from kvredis.adapters.engine.block import checksum_of, encode_header
from kvredis.adapters.engine.keys import key_of_shard
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.engine.tensors import view_tensor
from kvredis.bench.core.errors import BenchError
from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.engine_process import Answer
from tests.compat.vllm_process import CONNECTOR, PATIENT, VLLMProcess, site
from tests.gate import nightly
from tests.proxy import Proxy

CHUNK = 64
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32},
    "gemma": {"block_size": 32},
    "deepseek": {"block_size": 16, "dtype": "float32", "attention_backend": "CPU_MLA"},
}
"""And how each is opened. MLA computes a prompt that is partly there in another order, which rounding would show; where
a processor has AMX vLLM 0.32 would take a backend for it that knows bfloat16 alone."""
LOCAL = {"LMCACHE_CHUNK_SIZE": str(CHUNK), "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25"}
WAIT_S = 60


@pytest.fixture(scope="module")
def first(vllm: VLLMProcess) -> Iterator[VLLMProcess]:
    """The process that all tests have; some have a second one."""
    yield vllm
    vllm.ask("close")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path_factory.mktemp("server"), "--io-threads", "4")
    yield server
    stop(process)


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    """A server that has no block."""
    with redis.Redis(port=running.port) as client:
        client.flushall()
    return running


@pytest.fixture
def proxy(server: RunningServer) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


def prompt(length: int = 1000, seed: int = 0) -> list[int]:
    return [3 + (at * 7919 + seed * 104729) % 1000 for at in range(length)]


def far(port: int, **rest: str) -> dict[str, str]:
    """A server alone, over RESP, which is given up and found again quickly."""
    always = {"LMCACHE_CHUNK_SIZE": str(CHUNK), "LMCACHE_LOCAL_CPU": "false", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.125"}
    always |= {"LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{port}", "LMCACHE_BLOCKING_TIMEOUT_SECS": "5"}
    return always | rest


def until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_is_found_gives_the_tokens_of_one_that_is_computed(first: VLLMProcess, model: str) -> None:
    exactly: dict[str, Any] = MODELS[model] | {"dtype": "float32"}
    first.open(model, LOCAL, **exactly)
    branch = prompt()[:300] + [5] * 300
    apart = first.generate(branch)[0]
    first.stored()
    first.ask("reset", connector=True)
    cold = first.generate(prompt())[0]
    first.stored()
    warm, cut, other = (first.generate(each)[0] for each in (prompt(), branch, prompt(640)))
    assert (apart["cached"], cold["cached"], warm["cached"], cut["cached"]) == (0, 0, 960, 256)
    assert warm["tokens"] == cold["tokens"] != other["tokens"]
    assert cut["tokens"] == apart["tokens"]
    assert other["cached"] == 640  # all of it: the last token is computed again for its logits alone
    assert first.ask("stats")["left"] == 0


@pytest.mark.parametrize("layers", ["false", nightly("true")])
def test_pages_that_another_engine_waits_for_are_no_other_requests_until_they_are_stored(
    first: VLLMProcess, server: RunningServer, layers: str
) -> None:
    variables = far(server.port, LMCACHE_USE_LAYERWISE=layers) | PATIENT
    first.open("llama", variables, num_gpu_blocks_override=257)
    first.ask("stall", is_stalled=True)
    pages = 960 // 32  # of whole chunks
    first.generate(prompt(), tokens=1, told={"do_remote_decode": True, "do_remote_prefill": False})
    stats = first.ask("stats")
    assert (stats["held"], stats["free"], stats["left"]) == (pages, 256 - pages, 0)
    for seed in range(1, 4):  # each gets the pages of the one before: without prefix caching vLLM gives the latest away
        first.generate(prompt(seed=seed), tokens=1)
    assert first.ask("stats")["held"] == pages
    first.ask("stall", is_stalled=False)
    first.stored()
    found = [first.generate(prompt(seed=seed), tokens=1)[0]["cached"] for seed in range(4)]
    assert found == [960, 0, 0, 960]
    stats = first.ask("stats")
    assert (stats["held"], stats["free"]) == (0, 256)
    assert stats["worker"]["cancelled_jobs"] >= 2, "others' have been taken"


def as_two_ranks_store_it(client: redis.Redis, key: bytes) -> None:
    """Put two halves of a block's heads in its place, as an engine of two ranks has them."""
    value: Any = client.getdel(key)
    length = 8 + int.from_bytes(value[:8], "little")
    header = json.loads(value[8:length])
    said, (layers, planes, tokens, heads, dim) = header["__metadata__"], header["kv"]["shape"]
    whole = ChunkLayout(
        layers, heads, dim, "fp32", int(said["chunk_tokens"]), said["model"], planes=planes, splits_heads=True
    )
    assert header["kv"]["dtype"] == "F32"
    kv = view_tensor(memoryview(bytearray(value[length:])), whole, tokens)
    for rank, part in enumerate(kv.chunk(2, dim=3)):
        layout = replace(whole, kv_heads=heads // 2, rank=rank, world_size=2)
        tensor = part.contiguous().view(-1).view(torch.uint8).numpy().data.cast("B")
        name = key_of_shard(key, layout.shard.encode("ascii"))
        client.set(name, encode_header(layout, tokens, checksum_of(tensor)) + bytes(tensor))


def test_an_engine_loads_what_one_of_two_ranks_has_stored(first: VLLMProcess, server: RunningServer) -> None:
    first.open("llama", far(server.port), dtype="float32")
    cold = first.generate(prompt())[0]
    first.stored()
    with redis.Redis(port=server.port) as client:
        keys = list(client.keys("*"))
        for key in keys:
            as_two_ranks_store_it(client, key)
        found = first.generate(prompt())[0]
        assert (found["tokens"], found["cached"]) == (cold["tokens"], 960)
        assert found["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-4), "computed in parts of other sizes"
        first.stored()
        assert client.dbsize() == 2 * len(keys) == 30, "it is not stored again"


@pytest.mark.parametrize("layerwise", ["false", nightly("true")])
def test_tokens_are_those_of_an_engine_without_the_connector(first: VLLMProcess, layerwise: str) -> None:
    prompts = [prompt(300, seed) for seed in range(8)]
    small: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}  # so that rounding plays no part
    small |= {"num_gpu_blocks_override": 61, "max_num_batched_tokens": 512}
    first.open("llama", {}, connector=None, **small)
    alone = [first.generate(each, tokens=32)[0]["tokens"] for each in prompts]
    first.open("llama", LOCAL | {"LMCACHE_USE_LAYERWISE": layerwise}, **small)
    for _ in range(2):
        assert [each["tokens"] for each in first.generate(*prompts, tokens=32)] == alone
    stats = first.ask("stats")
    assert stats["preemptions"] > 0
    assert stats["worker"]["loaded_chunks"] > 0
    assert (stats["left"], stats["free"]) == (0, 60)


def test_a_prompt_that_is_computed_in_parts_is_stored_in_parts(first: VLLMProcess) -> None:
    first.open("llama", LOCAL, max_num_batched_tokens=256)
    began = len(first.log)
    first.generate(prompt())
    first.stored()
    text = first.log[began:]
    assert re.search(r"Reqid: \S+, Total tokens 1000, LMCache hit tokens: 0, need to load: 0", text)
    found = re.findall(r"Storing KV cache for (\d+) out of (\d+) tokens for request", text)
    assert found == [("256", "256"), ("256", "512"), ("256", "768"), ("192", "1000")]
    first.generate(prompt())
    text = first.log[began:]
    assert re.search(r"Reqid: \S+, Total tokens 1000, LMCache hit tokens: 960, need to load: 960", text)


@pytest.mark.parametrize("layerwise", ["false", nightly("true")])
def test_with_auto_every_step_that_computes_is_measured_by_its_own_output_and_loads_are_too(
    first: VLLMProcess, layerwise: str
) -> None:
    first.open("llama", LOCAL | {"LMCACHE_USE_LAYERWISE": layerwise}, extra={"min_retrieve_tokens": "auto"})
    for seed in range(3):
        first.generate(prompt(seed=seed))
        first.stored()
    cached = [first.generate(prompt(seed=seed))[0]["cached"] for seed in range(3)]
    assert max(cached) == 960, "loading takes milliseconds, and computing a tenth of a second"
    stats = first.ask("stats")
    assert stats["steps"] == 0, "those are over in which the engine had nothing to do but to wait for a load"
    assert stats["measured"] == ["memory"]


@pytest.mark.parametrize("model", [nightly("llama"), "gemma"])
def test_layers_are_stored_one_by_one_and_loaded_before_the_step_that_reads_them(
    first: VLLMProcess, model: str
) -> None:
    first.open(model, LOCAL | {"LMCACHE_USE_LAYERWISE": "true"})
    cold = first.generate(prompt())[0]
    first.stored()
    warm = first.generate(prompt())[0]
    assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)
    stats = first.ask("stats")["worker"]
    assert stats["stored_chunks"] >= 15
    assert stats["loaded_chunks"] >= 15


def test_less_than_a_chunk_behind_its_own_prefix_is_computed_and_a_short_prompt_is_loaded(first: VLLMProcess) -> None:
    first.open("llama", LOCAL | {"LMCACHE_SAVE_UNFULL_CHUNK": "true"}, enable_prefix_caching=True)
    cold, short = first.generate(prompt(960))[0], first.generate(prompt(50, seed=1))[0]
    first.stored()

    def loaded() -> int:
        return int(first.ask("stats")["worker"]["loaded_chunks"])

    own = first.generate(prompt(960))[0]  # of which vLLM has all blocks but the last
    assert (own["tokens"], own["cached"], loaded()) == (cold["tokens"], 928, 0)
    assert first.ask("reset")["reset"]
    warm, again = first.generate(prompt(960))[0], first.generate(prompt(50, seed=1))[0]
    assert (warm["tokens"], warm["cached"], again["tokens"], again["cached"]) == (
        cold["tokens"], 960, short["tokens"], 32
    )  # fmt: skip
    assert loaded() == 15 + 1
    first.open("llama", LOCAL | {"LMCACHE_MIN_RETRIEVE_TOKENS": "1"}, enable_prefix_caching=True)
    first.generate(prompt(960))
    first.stored()
    assert (first.generate(prompt(960))[0]["cached"], loaded()) == (960, 1)


@pytest.mark.parametrize("model", [nightly("llama"), "gemma"])
def test_a_second_turn_finds_the_answer_to_the_first(first: VLLMProcess, model: str) -> None:
    question, more = prompt(150), prompt(40, seed=3)
    small: dict[str, Any] = {"dtype": "float32"}  # so that rounding plays no part
    first.open(model, {}, connector=None, **small)
    answer = first.generate(question, tokens=50)[0]["tokens"]
    alone = first.generate([*question, *answer, *more])[0]["tokens"]
    first.open(model, LOCAL | {"LMCACHE_SAVE_DECODE_CACHE": "true"}, **small)
    assert first.generate(question, tokens=50)[0]["tokens"] == answer
    first.stored()
    second = first.generate([*question, *answer, *more])[0]
    assert (second["tokens"], second["cached"]) == (alone, 192)  # of 199 whose KV the first turn has made


def test_what_a_window_lets_go_of_while_a_prompt_is_stored_costs_no_more_than_itself(first: VLLMProcess) -> None:
    small: dict[str, Any] = {"dtype": "float32"}
    first.open("gemma", LOCAL | {"LMCACHE_SAVE_DECODE_CACHE": "true"}, **small)
    first.generate(prompt(100, seed=1), tokens=2)
    first.stored()
    first.ask("stall", is_stalled=True)
    answer = first.generate(prompt(150), tokens=50)[0]["tokens"]  # without prefix caching its own pages are taken first
    first.ask("stall", is_stalled=False)
    first.stored()
    asked = [*prompt(150), *answer, 7]
    found = first.generate(asked)[0]
    stats = first.ask("stats")["worker"]
    assert (found["cached"], stats["cancelled_jobs"]) == (192, 0)
    first.open("gemma", {}, connector=None, **small)
    assert first.generate(asked)[0]["tokens"] == found["tokens"]


def heard(first: VLLMProcess, medium: str, count: int) -> list[Answer]:
    """The next events of a medium, which are told in steps of the engine: it takes them until they have come."""
    found: list[Answer] = []

    def have_come() -> bool:
        first.generate(prompt(20), tokens=16)
        found.extend(first.ask("events", medium=medium, count=count - len(found), pause_ms=100)["events"])
        return len(found) >= count

    until(have_come, f"{count} events of {medium} are not told")
    return found


def test_a_listener_to_kv_events_hears_what_is_stored_and_what_is_gone(
    first: VLLMProcess, server: RunningServer, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    first.open("llama", far(server.port), kv_events=events)
    assert first.ask("listen", endpoint=endpoint)["connected"]
    with redis.Redis(port=server.port, decode_responses=True) as client:
        first.generate(prompt(200))
        first.stored()
        until(lambda: client.dbsize() == 3, "what was stored did not leave for the server")
        told = heard(first, "STORAGE", 3)
        assert [event["kind"] for event in told] == ["BlockStored"] * 3
        assert [event["tokens"] for event in told] == [prompt()[at : at + CHUNK] for at in (0, 64, 128)]
        hashes = [event["hashes"][0] for event in told]
        assert [event["parent"] for event in told] == [None, *hashes[:2]]
        assert {str(key).rpartition("}")[2] for key in client.keys("*")} == set(hashes)
        client.delete(next(key for key in client.keys("*") if str(key).endswith(hashes[1])))
        first.generate(prompt(200))
        gone = heard(first, "STORAGE", 1)[0]
        assert (gone["kind"], gone["hashes"]) == ("BlockRemoved", [hashes[1]])


@pytest.mark.parametrize("model", ["llama", nightly("gemma")])
def test_events_say_of_blocks_what_vllm_s_own_events_do(first: VLLMProcess, tmp_path: Path, model: str) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    groups = first.open(model, LOCAL, kv_events=events, enable_prefix_caching=True)["kv_groups"]
    assert first.ask("listen", endpoint=endpoint)["connected"]
    first.generate(prompt(200), salt="tenant")
    theirs = first.ask("events", medium="GPU", count=groups)["events"]
    first.stored()
    ours = heard(first, "CPU", 3 * groups)
    said = ("group", "adapter", "kind of layers", "window")
    assert {tuple(map(str, map(each.get, said))) for each in ours} == {
        tuple(map(str, map(each.get, said))) for each in theirs
    }
    heads = [each["extra_keys"][0] for each in theirs if each["parent"] is None and each["group"] == groups - 1]
    assert heads == [["tenant"]], "of the first block, which windows have let go of"
    assert [each["extra_keys"] for each in ours if each["parent"] is None] == [[["tenant"]]] * groups
    assert {str(each["extra_keys"]) for each in ours if each["parent"] is not None} == {"None"}


def test_a_salt_keeps_tenants_apart_and_roles_are_kept(first: VLLMProcess, server: RunningServer) -> None:
    first.open("llama", far(server.port), connector=CONNECTOR | {"kv_role": "kv_producer"})
    first.generate(prompt(), salt="a")
    first.stored()
    assert first.generate(prompt(), salt="a")[0]["cached"] == 0
    first.open("llama", far(server.port), connector=CONNECTOR | {"kv_role": "kv_consumer"})
    assert first.generate(prompt(), salt="a")[0]["cached"] == 960
    assert [first.generate(prompt(), salt="b")[0]["cached"] for _ in range(2)] == [0, 0]
    assert first.ask("reset", connector=True)["reset"]
    assert first.generate(prompt(), salt="a")[0]["cached"] == 0


def test_a_block_that_was_damaged_is_computed_again(first: VLLMProcess, proxy: Proxy, server: RunningServer) -> None:
    first.open("llama", far(proxy.port))
    cold = first.generate(prompt())[0]
    first.stored()
    with redis.Redis(port=server.port) as client:
        keys = sorted(client.keys("*"))
        assert len(keys) == 15
        for key in keys:
            stored = client.get(key)
            assert isinstance(stored, bytes)
            value = bytearray(stored)
            value[-1000:] = bytes(255 - byte for byte in value[-1000:])
            client.set(key, bytes(value))
        damaged = first.generate(prompt())[0]
        assert damaged["tokens"] == cold["tokens"]
        assert first.ask("stats")["worker"]["corrupt_chunks"] >= 1
        first.stored()
        assert first.generate(prompt())[0]["tokens"] == cold["tokens"]
        # That the tokens would be others without the check:
        for key in client.keys("*"):
            stored = client.get(key)
            assert isinstance(stored, bytes)
            value = bytearray(stored)
            value[4096:] = bytes(len(value) - 4096)
            client.set(key, bytes(value))
        first.open("llama", far(proxy.port), extra={"verify_blocks": False})
        believed = first.generate(prompt())[0]
        assert believed["cached"] == 960
        assert believed["tokens"] != cold["tokens"]


@pytest.mark.nightly
def test_with_tokens_guessed_ahead_a_layer_that_was_damaged_is_known_of_before_its_step_has_an_answer(
    server: RunningServer, tmp_path: Path
) -> None:
    ahead = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    exactly: dict[str, Any] = {"dtype": "float32"}  # so that rounding plays no part
    guessing = VLLMProcess(site(), tmp_path / "guessing.log")  # where numba is vLLM opens no second engine
    try:
        guessing.open("llama", far(server.port, LMCACHE_USE_LAYERWISE="true"), speculative_config=ahead, **exactly)
        with redis.Redis(port=server.port) as client:
            cold = guessing.generate(prompt(), tokens=24)[0]
            guessing.stored()
            for key in client.keys("*"):  # one after the other, so that in each load one is damaged
                value = client.get(key)
                assert isinstance(value, bytes)
                client.setrange(key, len(value) - 3000, bytes(255 - byte for byte in value[-3000:]))
                assert guessing.generate(prompt(), tokens=24)[0]["tokens"] == cold["tokens"]
                guessing.stored()
            warm = guessing.generate(prompt(), tokens=24)[0]
        assert (warm["tokens"], warm["cached"]) == (cold["tokens"], 960)
        assert guessing.ask("stats")["worker"]["corrupt_chunks"] == 15
    finally:
        guessing.stop()


@pytest.mark.parametrize("layerwise", ["false", nightly("true")])
def test_a_connection_that_ends_in_the_middle_of_a_load_costs_hits_and_no_tokens(
    first: VLLMProcess, proxy: Proxy, layerwise: str
) -> None:
    first.open("llama", far(proxy.port, LMCACHE_USE_LAYERWISE=layerwise))
    cold = first.generate(prompt())[0]
    first.stored()
    proxy.cut(after_bytes=500_000)  # of 2 MB
    assert first.generate(prompt())[0]["tokens"] == cold["tokens"]
    worker = first.ask("stats")["worker"]
    assert worker["failed_chunks"] > 0
    proxy.heal()

    def is_back() -> bool:
        again = first.generate(prompt())[0]
        assert again["tokens"] == cold["tokens"]
        return bool(again["cached"] == 960)

    until(is_back, "the server is not used again")


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing_behind(first: VLLMProcess, proxy: Proxy) -> None:
    first.open("llama", far(proxy.port))
    cold = first.generate(prompt())[0]
    first.stored()
    free = first.ask("stats")["free"]
    proxy.throttle(down=500_000)
    aborted = first.ask("abort", prompt=prompt(), after_s=1.0)
    assert (aborted["states"], aborted["left"]) == (["FINISHED_ABORTED"], 0)
    worker = first.ask("stats")["worker"]
    assert (worker["cancelled_jobs"], worker["loading_chunks"]) == (1, 0)
    proxy.heal()
    assert first.generate(prompt())[0]["tokens"] == cold["tokens"]
    stats = first.ask("stats")
    assert (stats["free"], stats["left"]) == (free, 0)


def test_requests_are_computed_while_another_waits_for_a_server_that_is_stopped(
    first: VLLMProcess, tmp_path: Path
) -> None:
    process, server = start_kvredis(tmp_path)
    variables = far(server.port) | PATIENT
    first.open("llama", variables, **MODELS["llama"])
    (computed,) = first.generate(prompt())
    first.stored()
    process.send_signal(signal.SIGSTOP)
    beside = first.ask("beside", held=[prompt()], others=[prompt(60, seed) for seed in range(4)])
    assert beside["states"] == ["WAITING"]
    process.send_signal(signal.SIGCONT)
    (found,) = first.generate(prompt())
    assert (found["tokens"], found["cached"]) == (computed["tokens"], 960)
    stop(process)


@pytest.mark.parametrize("models", [["llama"], nightly([*MODELS])], ids=len)
def test_a_server_that_is_killed_and_started_again_serves_a_fresh_engine_from_its_disk(
    first: VLLMProcess, tmp_path_factory: pytest.TempPathFactory, models: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    flags = ("--local-disk", str(folder / "tier"), "--max-local-disk-size", "512MB")
    process, server = start_kvredis(folder, *flags)
    cold = {}
    try:
        for model in models:
            first.open(model, far(server.port), **MODELS[model])
            cold[model] = first.generate(prompt())[0]["tokens"]
            first.stored()
        with redis.Redis(port=server.port) as client:
            client.save()
            blocks = client.dbsize()
        process.send_signal(signal.SIGKILL)
    finally:
        stop(process)
    assert first.generate(prompt())[0]["tokens"] == cold[models[-1]]  # no server is there
    process, server = start_kvredis(folder, *flags)
    # An engine's process takes as long to start as all that it is then asked: one that goes on opens a fresh engine.
    second = first if len(models) == 1 else VLLMProcess(site(), folder / "second.log")
    try:
        with redis.Redis(port=server.port) as client:
            assert client.dbsize() == blocks
        for model in models:
            second.open(model, far(server.port), **MODELS[model])
            warm = second.generate(prompt())[0]
            assert (warm["tokens"], warm["cached"]) == (cold[model], 960)
    finally:
        if second is not first:
            second.stop()
        stop(process)


def test_a_configuration_that_cannot_be_served_says_why(first: VLLMProcess) -> None:
    with pytest.raises(BenchError, match="chunk_size"):
        first.open("llama", {"LMCACHE_CHUNK_SIZE": "abc"})
    began = len(first.log)
    first.open("llama", {"LMCACHE_CHUNK_SIZE": "48", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25"})
    assert "chunk_size 48 is not made of whole blocks of 32 tokens: 96 is used" in first.log[began:]


def asked(first: VLLMProcess, seed: int = 0) -> tuple[list[int], int]:
    """The tokens behind a prompt, and how many of it were found; what was computed is stored."""
    answer = first.generate([token + seed for token in prompt()])[0]
    first.stored()
    return answer["tokens"], answer["cached"]


@functools.cache
def alone(first: VLLMProcess, *changes: str) -> list[int]:
    """What an engine without a cache makes of the prompt with these weights."""
    first.open("llama", {}, connector=None)
    for change in changes:
        first.ask("change", how=change)
    return list(first.generate(prompt())[0]["tokens"])


@pytest.mark.parametrize("how", [nightly("step"), "load", nightly("column")])
def test_weights_that_change_in_place_between_two_requests_find_nothing_and_find_what_is_theirs_when_they_are_back(
    how: str, first: VLLMProcess, server: RunningServer
) -> None:
    changed = alone(first, how)
    first.open("llama", far(server.port))
    before = first.ask("identity")["suffix"]
    cold, found = asked(first)
    assert found == 0
    assert asked(first) == (cold, 960)
    first.ask("change", how="keep")
    first.ask("change", how=how)
    assert changed != cold
    for found in (0, 960):  # the load that was begun for the old weights' hit has failed, and was computed
        assert asked(first) == (changed, found)
    assert first.ask("identity")["suffix"] != before
    first.ask("change", how="back")
    asked(first, seed=1)  # finds out
    assert first.ask("identity")["suffix"] == before
    assert asked(first) == (cold, 960)


def test_a_pause_with_the_same_weights_loses_nothing_and_with_others_finds_nothing(
    first: VLLMProcess, server: RunningServer
) -> None:
    changed = alone(first, "load")
    first.open("llama", far(server.port))
    cold, _ = asked(first)
    first.ask("pause")
    assert asked(first) == (cold, 960)
    first.ask("pause")
    first.ask("change", how="load")
    failed = first.ask("stats")["worker"]["failed_chunks"]
    assert asked(first) == (changed, 0)
    assert asked(first) == (changed, 960), "what was computed first is stored"
    assert first.ask("stats")["worker"]["failed_chunks"] == failed, "no engine has begun to load the other's"


def test_a_reset_forgets_for_this_engine_alone_and_needs_no_server(first: VLLMProcess, tmp_path: Path) -> None:
    process, server = start_kvredis(tmp_path)
    first.open("llama", far(server.port, LMCACHE_BLOCKING_TIMEOUT_SECS="1"))
    cold, _ = asked(first)
    with redis.Redis(port=server.port) as client:
        stored = client.dbsize()
        assert first.ask("reset", connector=True)["reset"] is True
        assert client.dbsize() == stored > 0
        assert asked(first) == (cold, 0)
        assert asked(first) == (cold, 960)
        assert client.dbsize() == 2 * stored
    first.open("llama", far(server.port, LMCACHE_BLOCKING_TIMEOUT_SECS="1"))
    assert asked(first) == (cold, 960), "another engine finds what there was"
    stop(process)
    assert first.ask("reset", connector=True)["reset"] is True
    lost = first.generate(prompt())[0]
    assert (lost["tokens"], lost["cached"]) == (cold, 0)


@pytest.mark.nightly
def test_two_ranks_know_their_weights_as_one_does_and_change_them_together(
    first: VLLMProcess, server: RunningServer
) -> None:
    first.open("llama", far(server.port, **PATIENT))
    one = first.ask("identity")["suffix"]
    first.open("llama", far(server.port, **PATIENT), tensor_parallel_size=2)
    assert first.ask("identity")["suffix"] == one
    cold, _ = asked(first)
    assert asked(first) == (cold, 960)
    first.ask("change", how="step")
    changed, found = asked(first)
    assert (changed != cold, found) == (True, 0)
    assert asked(first) == (changed, 960)
    two = first.ask("identity")["suffix"]
    first.open("llama", far(server.port, **PATIENT))
    first.ask("change", how="step")
    first.ask("pause")
    asked(first)
    assert first.ask("identity")["suffix"] == two
