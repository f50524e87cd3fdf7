"""vLLM as it is, on the CPU, with models most of whose layers are recurrent: their states are stored and loaded with
the KV of the others, and the tokens and their probabilities are those of an engine that computes all.

vLLM keeps states only with its own prefix caching, behind whole blocks. So "cold" is a prompt that vLLM has computed
itself, and before each load it forgets what it has.
"""

import json
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import CONFIG_MAPPING

from kvredis.bench.core.shapes import shape_of
from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.engine_process import Answer
from tests.compat.vllm_process import PATIENT, VLLMProcess, site
from tests.gate import nightly

MODELS = ("qwen3-next", "qwen3.5", "lfm2")
PASSES_A_STATE = 10
"""Storing the states of a boundary takes so many passes where it is to be slow: five would do on a steady machine."""
FIRST, SECOND = ([3 + (at * 7919 + seed * 104729) % 1000 for at in range(500)] for seed in range(2))


@pytest.fixture(scope="module")
def engine(vllm: VLLMProcess) -> Iterator[VLLMProcess]:
    yield vllm
    vllm.ask("close")  # its threads would look for work until all tests have ended


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    process, server = start_kvredis(tmp_path_factory.mktemp("server"))
    yield server
    stop(process)


@pytest.fixture
def client(running: RunningServer) -> Iterator[redis.Redis]:
    """Of a server that has no block."""
    with redis.Redis(port=running.port) as client:
        client.flushall()
        yield client


def far(client: redis.Redis) -> dict[str, str]:
    port = client.connection_pool.connection_kwargs["port"]
    return {
        "LMCACHE_LOCAL_CPU": "false", "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.125",
        "LMCACHE_REMOTE_URL": f"redis://127.0.0.1:{port}", "LMCACHE_BLOCKING_TIMEOUT_SECS": "5",
    }  # fmt: skip


def opened(engine: VLLMProcess, model: str, variables: dict[str, str], **more: Any) -> Answer:
    exactly = {"dtype": "float32" if model == "lfm2" else "bfloat16", "enable_prefix_caching": True}
    return engine.open(model, variables, **(exactly | {"num_gpu_blocks_override": 256} | more))


def whole_blocks(tokens: int, opened: Answer) -> int:
    """How many of these tokens a hit can have. vLLM makes a block as long as a state is large, which has elements of
    two or four bytes, by the processor."""
    return tokens // opened["block_tokens"] * opened["block_tokens"]  # type: ignore[no-any-return]


def cold_and_warm(engine: VLLMProcess, *prompts: list[int]) -> tuple[list[Answer], list[Answer]]:
    """What comes of the prompts, and what comes of them when vLLM itself has forgotten them."""
    cold = engine.generate(*prompts)
    engine.stored()
    assert engine.ask("reset")["reset"]
    return cold, engine.generate(*prompts)


def said(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each["tokens"], each["logprobs"]) for each in answers]


def deviation(one: Answer, other: Answer) -> float:
    """How far log-probabilities lie apart, up to the first token that is another, which must be as near as that."""
    pairs = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True)
    return max(float(abs(mine - its)) for _, _, mine, its in takewhile(lambda pair: pair[0] == pair[1], pairs))


def value_of(client: redis.Redis, key: bytes) -> bytes:
    value = client.get(key)
    assert isinstance(value, bytes)
    return value


def states(client: redis.Redis) -> list[bytes]:
    """The keys of states: their blocks have bytes for elements."""
    return sorted(key for key in client.keys("*") if isinstance(key, bytes) and b'"U8"' in value_of(client, key)[:512])


PLANNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "jamba": ("jamba:JambaForCausalLM", "auto", {}),
    "granitemoehybrid": (
        "granitemoehybrid:GraniteMoeHybridForCausalLM", "auto",
        {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    ),
    "nemotron_h": (
        "nemotron_h:NemotronHForCausalLM", "float32",
        {"layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": 3},
    ),
    "falcon_h1": ("falcon_h1:FalconH1ForCausalLM", "auto", {}),
    "zamba2": ("zamba2:Zamba2ForCausalLM", "auto", {}),
    "qwen3_next": ("qwen3_next:Qwen3NextForCausalLM", "auto", {}),
    "lfm2": (
        "lfm2:Lfm2ForCausalLM", "auto",
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "conv_dim": 2560},
    ),
}  # fmt: skip
"""Of types of models: vLLM's class, the type it gives what recurs, and what the type's defaults leave out."""


@pytest.mark.parametrize("kind", PLANNED)
def test_a_plan_counts_the_states_that_vllm_keeps(engine: VLLMProcess, tmp_path: Path, kind: str) -> None:
    named, ssm_dtype, more = PLANNED[kind]
    config = CONFIG_MAPPING[kind]().to_dict() | more
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}, default=str))
    planned = shape_of(str(tmp_path))
    assert planned.states > 0
    each = engine.ask(
        "state_bytes", named=named, config=json.loads(json.dumps(config, default=str)), ssm_dtype=ssm_dtype
    )
    assert planned.snapshot_bytes == planned.states * each["bytes"]


def open_any(value: bytes) -> bytes:
    """The tensor of a block (safetensors)."""
    return value[8 + int.from_bytes(value[:8], "little") :]


@pytest.mark.parametrize("model", [MODELS[0], *map(nightly, MODELS[1:])])
def test_what_is_loaded_gives_the_tokens_of_what_is_computed_in_a_fresh_engine_too(
    engine: VLLMProcess, client: redis.Redis, model: str
) -> None:
    opened(engine, model, {}, connector=None)
    alone = engine.generate(FIRST)
    made = opened(engine, model, far(client))
    cold, warm = cold_and_warm(engine, FIRST)
    assert sum(len(open_any(value_of(client, key))) for key in states(client)) == made["state_bytes"] > 0
    assert shape_of(made["folder"]).snapshot_bytes == 2 * made["state_elements"], "bfloat16, as its file says"
    opened(engine, model, far(client))
    fresh = engine.generate(FIRST)
    hit = whole_blocks(len(FIRST) - 1, made)
    assert [each[0]["cached"] for each in (cold, warm, fresh)] == [0, hit, hit]
    assert said(cold) == said(warm) == said(fresh) == said(alone)
    # That the tokens would be others with another prompt's states, which stand here under the keys of this one's:
    mine = states(client)
    engine.generate(SECOND)
    engine.stored()
    others = [key for key in states(client) if key not in mine]
    assert len(mine) == len(others) > 0
    for key in mine:
        layers = key.split(b"{")[0]
        client.set(key, value_of(client, next(each for each in others if each.split(b"{")[0] == layers)))
    opened(engine, model, far(client), extra={"verify_blocks": False})
    believed = engine.generate(FIRST)
    assert believed[0]["cached"] == hit
    assert said(believed) != said(cold)


def test_a_state_that_is_damaged_or_missing_is_computed_again(engine: VLLMProcess, client: redis.Redis) -> None:
    opened(engine, "qwen3-next", far(client))
    cold, _ = cold_and_warm(engine, FIRST)
    kept = {key: value_of(client, key) for key in states(client)}
    assert len(kept) == 3, "one of each group of recurrent layers"
    for key, value in kept.items():
        client.set(key, value[:-1] + bytes([value[-1] ^ 1]))
        engine.ask("reset")
        assert said(engine.generate(FIRST)) == said(cold)
        engine.stored()
        client.delete(key)
        engine.ask("reset")
        missing = engine.generate(FIRST)
        assert (missing[0]["cached"], said(missing)) == (0, said(cold)), "of two groups a state is no use"
        engine.stored()
        assert client.exists(key), "what was computed is stored again"
    assert engine.ask("stats")["worker"]["corrupt_chunks"] == 3


def test_prompts_computed_in_parts_side_by_side_and_preempted_find_what_they_share(
    engine: VLLMProcess, client: redis.Redis
) -> None:
    prompts = [FIRST[:200] + SECOND[: 40 * at] for at in range(4)] + [SECOND]
    small: dict[str, Any] = {"max_num_batched_tokens": 256, "max_model_len": 640}
    opened(engine, "qwen3.5", {}, connector=None, **small)
    alone = engine.generate(*prompts, tokens=100)
    made = opened(engine, "qwen3.5", far(client), num_gpu_blocks_override=20, **small)
    for number in range(10):  # so small an engine may take the pages of a store that is slow, which then ends
        together = engine.generate(*prompts, tokens=100)
        # As far as rounding bfloat16 goes in a hundred tokens, where prompts are cut elsewhere: 0.04 to 0.13 were seen.
        assert max(map(deviation, alone, together)) < 0.25
        engine.stored()
        engine.ask("reset")
        if number > 1 and min(each["cached"] for each in together) >= whole_blocks(200, made):
            break
    stats = engine.ask("stats")
    assert stats["preemptions"] > 0
    assert min(each["cached"] for each in together) >= whole_blocks(200, made), "the blocks of what they share"
    assert (stats["worker"]["failed_chunks"], stats["left"], stats["free"]) == (0, 0, 19)


def test_states_take_as_much_as_is_allowed_and_the_last_ones_are_always_stored(
    engine: VLLMProcess, client: redis.Redis
) -> None:
    made = opened(engine, "qwen3-next", {}, connector=None)
    block, hit = made["block_tokens"], whole_blocks(len(FIRST) - 1, made)
    assert hit // block > 2
    for allowed, count in ((1, 2), (10**9, hit // block)):
        client.flushall()
        options = {"max_num_batched_tokens": block, "prefix_cache_retention_interval": block}  # hands over each block's
        opened(engine, "qwen3-next", far(client), extra={"state_bytes_per_prompt": allowed}, **options)
        _, warm = cold_and_warm(engine, FIRST)
        assert (len(states(client)), warm[0]["cached"]) == (3 * count, hit)


@pytest.mark.nightly
def test_where_storing_is_slower_than_computing_only_the_last_states_are_stored(
    engine: VLLMProcess, client: redis.Redis
) -> None:
    block = opened(engine, "qwen3-next", {}, connector=None)["block_tokens"]
    options = {"max_num_batched_tokens": block, "prefix_cache_retention_interval": block}  # hands over each block's
    opened(engine, "qwen3-next", far(client), **options)
    first, second = ([each + 1 for each in prompt * 2][: 6 * block + 1] for prompt in (FIRST, SECOND))
    passes_s = []
    for prompt in (first, second):
        began_s = time.monotonic()
        engine.generate(prompt)
        passes_s.append((time.monotonic() - began_s) / 6)
        engine.stored()
    state_bytes = 3 * len(value_of(client, states(client)[0]))
    slow = {"bandwidth_gb_s": max(state_bytes / (PASSES_A_STATE * max(passes_s)) / 1e9, 1e-5)}
    client.flushall()
    opened(engine, "qwen3-next", far(client) | PATIENT, extra=slow, **options)
    engine.generate(first)
    engine.stored()
    known = len(states(client))
    assert known > 3 * 2, "as many as the KV allows, since it is unknown what they cost"
    engine.generate(second)
    engine.stored()
    assert len(states(client)) - known == 3 * 2, "those of the last two boundaries"


def test_blocks_that_a_store_reads_are_no_other_requests_until_it_has_read_them(
    engine: VLLMProcess, client: redis.Redis
) -> None:
    made = opened(engine, "qwen3-next", far(client) | PATIENT, num_gpu_blocks_override=64)
    prompts = [[3 + (at * 7919 + seed * 104729) % 1000 for at in range(500)] for seed in range(24)]
    engine.ask("stall", is_stalled=True)
    for each in prompts:
        engine.generate(each, tokens=1)
    blocks = engine.ask("stats")
    one = len(FIRST) // made["block_tokens"] + 3  # and a state of each group of recurrent layers
    assert (blocks["held"], blocks["free"]) == (one, 63 - one), "more is an eighth of all"
    assert blocks["worker"]["cancelled_jobs"] > 0, "others' have been taken"
    assert engine.ask("reset")["reset"], "what is held goes back"
    engine.ask("stall", is_stalled=False)
    engine.stored()
    assert engine.generate(prompts[0], tokens=1)[0]["cached"] == whole_blocks(len(FIRST) - 1, made)


def test_without_prefix_caching_the_engine_runs_and_one_line_says_what_to_do(
    engine: VLLMProcess, client: redis.Redis
) -> None:
    began = len(engine.log)
    opened(engine, "qwen3-next", far(client), enable_prefix_caching=False)
    first, second = (engine.generate(FIRST) for _ in range(2))
    assert (said(first), second[0]["cached"]) == (said(second), 0)
    assert engine.log[began:].count("enable prefix caching (--enable-prefix-caching)") == 2, "a half each"
    assert client.dbsize() == 0


@pytest.mark.nightly
def test_another_process_finds_what_this_one_has_stored(
    engine: VLLMProcess, client: redis.Redis, tmp_path: Path
) -> None:
    other = VLLMProcess(site(), tmp_path / "other.log")
    try:
        for model in MODELS:
            made = opened(engine, model, far(client))
            cold, _ = cold_and_warm(engine, FIRST)
            opened(other, model, far(client))
            warm = other.generate(FIRST)
            assert (said(warm), warm[0]["cached"]) == (said(cold), whole_blocks(len(FIRST) - 1, made))
    finally:
        other.stop()
