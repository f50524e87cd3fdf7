"""Whole engines of SGLang 0.5.23 on the CPU load from kvredis what they, or others, have stored, and answer as with
SGLang's own cache: the same tokens, and the same log-probabilities to the bit.

Engine, scheduler, prefix cache, controllers, storage threads, pools and models are SGLang's (sglang/engine.py); kernels
are torch's (sglang/stand_ins.py). Models are tiny, of random weights.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.compat.conftest import RunningServer, start_kvredis, stop
from tests.compat.engine_process import ROOT, Answer, EngineProcess
from tests.compat.side_packages import packages
from tests.gate import nightly

HERE = Path(__file__).parent / "sglang"
PAGE = 16
WHOLE_PAGES = 18
PROMPT = [(place * 7919 + 3) % 500 for place in range(WHOLE_PAGES * PAGE + 2)]
"""With an answer it is short of one more page."""
TOKENS = 12
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "initializer_range": 0.2,
}  # fmt: skip
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA = {"model_type": "llama", **SMALL}
QWEN = {
    "model_type": "qwen3_next", **SMALL, **EXPERTS, "shared_expert_intermediate_size": 64,
    "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v2", **SMALL, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 4, "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
TWO_RANKS = {"tp_size": 2}
DRAFTS = {
    "speculative_algorithm": "STANDALONE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"config": LLAMA},
    "llama on two ranks": {"config": LLAMA, "options": TWO_RANKS},
    "llama and a draft model": {"config": LLAMA, "draft_seed": 1, "options": DRAFTS},
    "mellum": {"config": {"model_type": "mellum", **SMALL, **EXPERTS, **WINDOWS}},
    "gpt_oss": {"config": {"model_type": "gpt_oss", **SMALL, **WINDOWS, "num_local_experts": 4}},
    "qwen3_next": {
        "config": QWEN,
        "options": {"mamba_radix_cache_strategy": "extra_buffer", "max_mamba_cache_size": 64},
    },
    "deepseek_v2": {"config": DEEPSEEK},
    "deepseek_v2 on two ranks": {"config": DEEPSEEK, "options": TWO_RANKS},
}
POOLS = dict.fromkeys(SERVED, 2) | dict.fromkeys(("llama", "deepseek_v2", "deepseek_v2 on two ranks"), 1)
"""Pools that have pages of their own in the store: keys and values, of each rank; latents, which ranks share; those of
a draft model; windows; states of linear attention."""
FOUND = dict.fromkeys(SERVED, WHOLE_PAGES * PAGE) | {"qwen3_next": WHOLE_PAGES * PAGE // 64 * 64}
"""Tokens of the prompt that SGLang's own cache has: of states it keeps each 64th."""

Open = Callable[..., "Engine"]


class Engine:
    """An engine that the process runs."""

    def __init__(self, process: EngineProcess, name: str, server: RunningServer, **opening: Any) -> None:
        self._process, self._name = process, name
        process.ask("open", engine=name, extra={"url": f"redis://127.0.0.1:{server.port}"}, **opening)

    def __call__(self, do: str, **arguments: Any) -> Answer:
        return self._process.ask(do, engine=self._name, **arguments)

    def generate(self, prompt: list[int] = PROMPT) -> tuple[Answer, dict[str, int]]:
        """An answer, and how many tokens of the prompt came from the device, the host and the store."""
        told = self("generate", prompt=prompt, tokens=TOKENS)
        places = {"device": 0, "host": 0, "storage": 0} | (told.pop("cached_tokens_details") or {})
        assert sum(places[place] for place in ("device", "host", "storage")) == told.pop("cached_tokens")
        return told, {place: places[place] for place in ("device", "host", "storage") if places[place]}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folders = [packages(HERE / f"requirements{which}.txt", "sglang") for which in ("-engine", "")]
    environment = {"PYTHONPATH": ":".join(map(str, (*folders, ROOT)))}
    command = [sys.executable, str(HERE / "engine.py")]
    running = EngineProcess(command, tmp_path_factory.mktemp("sglang") / "engine.log", environment)
    yield running
    running.stop()


@pytest.fixture
def opened(
    process: EngineProcess, kvredis: RunningServer, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Open]:
    """Opens an engine; all are closed in the end."""
    engines: list[Engine] = []

    def open_one(model: str = "llama", server: RunningServer = kvredis, **opening: Any) -> Engine:
        name = f"{request.node.name} {len(engines)}"
        engines.append(Engine(process, name, server, folder=str(tmp_path), **SERVED[model] | opening))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine("close")


def is_near(one: Answer, other: Answer) -> bool:
    """Whether two engines that compute a prompt in other parts, and round otherwise, may answer so."""
    first, second = (dict(map(tuple, answer["likely"][0])) for answer in (one, other))
    both = first.keys() & second.keys()
    return bool(both) and all(abs(first[token] - second[token]) < 0.2 for token in both)


def damage(client: redis.Redis, key: bytes) -> None:
    """Change every byte of a page."""
    value = client.get(key)
    assert isinstance(value, bytes)
    client.set(key, bytes(byte ^ 0x55 for byte in value))


@pytest.mark.parametrize("model", ["llama", *map(nightly, [*SERVED][1:])])
def test_a_prompt_is_loaded_from_the_store_and_answered_as_from_sglangs_own_cache(
    model: str, opened: Open, kvredis: RunningServer
) -> None:
    engine = opened(model)
    cold, came = engine.generate()
    assert came == {}
    assert len(set(cold["tokens"])) > TOKENS // 2, "an answer depends on what is before it"
    own, came = engine.generate()
    assert came == {"device": FOUND[model]}
    engine("flush")
    warm, came = engine.generate()
    assert came == {"storage": FOUND[model]}
    assert own == warm
    assert is_near(own, cold)
    with redis.Redis(port=kvredis.port, protocol=2) as client:
        pools = {key[:-64]: key for key in sorted(client.keys())}  # a page's own name is its hash
        assert len(pools) == POOLS[model]
        for key in pools.values():
            damage(client, key)
            engine("flush")
            computed, came = engine.generate()
            assert came.get("storage", 0) < FOUND[model], "what is behind the damaged page is computed"
            assert is_near(computed, cold)
            engine("flush")
            again, came = engine.generate()
            assert came == {"storage": FOUND[model]}, "the page was stored anew"
            assert is_near(again, cold)


@pytest.mark.nightly
def test_as_many_drafts_are_taken_as_with_sglangs_own_cache(opened: Open) -> None:
    """More of a draft model with the model's own weights, which has to see the prompt for that, than of another."""
    lengths = []
    for draft_seed in (1, 2):
        engine = opened("llama and a draft model", draft_seed=draft_seed)
        engine.generate()
        own, came = engine.generate()
        assert came == {"device": WHOLE_PAGES * PAGE}
        engine("flush")
        warm, came = engine.generate()
        assert came == {"storage": WHOLE_PAGES * PAGE}
        assert warm == own
        lengths.append(warm["spec_accept_length"])
    of_its_own, of_another = lengths
    assert of_its_own > of_another


@pytest.mark.nightly
def test_another_engine_loads_it_if_its_weights_are_the_same(opened: Open) -> None:
    one = opened()
    one.generate()
    own, came = one.generate()
    assert came == {"device": WHOLE_PAGES * PAGE}
    one("flush")
    warm, came = opened().generate()
    assert came == {"storage": WHOLE_PAGES * PAGE}
    assert warm == own
    other, came = opened(seed=2).generate()
    assert came == {}
    assert not is_near(other, own)


@pytest.mark.nightly
def test_an_engine_goes_on_without_its_server(opened: Open, tmp_path: Path) -> None:
    running, server = start_kvredis(tmp_path)
    try:
        engine = opened(server=server)
        cold, _ = engine.generate()
        engine("flush")
        running.kill()
        running.wait()
        computed, came = engine.generate()
        assert came == {}
        assert computed == cold
        own, came = engine.generate()
        assert came == {"device": WHOLE_PAGES * PAGE}
        assert is_near(own, cold)
    finally:
        stop(running)
