"""vLLM's configuration and requests, as objects with their attributes, and what they become here."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvredis.adapters.vllm.config import configured, groups_of, log_as_vllm_does, prompt_of
from kvredis.adapters.vllm.stored_events import Origin
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import ConfigError
from tests.adapters.vllm.paged_specs import FullAttentionSpec, KVCacheGroup, names

LORA = SimpleNamespace(lora_int_id=7, lora_name="poet", lora_path="/adapters/poet")


def engine(**changes: Any) -> SimpleNamespace:
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | changes.pop("parallel", {})
    model = {"model": "org/model", "revision": None, "hf_overrides": {}} | changes.pop("model", {})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto", "enable_prefix_caching": False} | changes),
    )


def caches(block: int = 16) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroup(names(2), FullAttentionSpec(block))])


def request(**changes: Any) -> SimpleNamespace:
    always = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "all_token_ids": [1, 2, 3, 4], "num_preemptions": 0}
    return SimpleNamespace(**always | changes)


def test_entries_of_the_connector_win_over_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    assert configured({}).chunk_size == 64
    assert configured({"chunk_size": 128}).chunk_size == 128
    assert configured({"lmcache.chunk_size": 32, "lmcache.use_layerwise": True}).use_layerwise
    configured({"lmcache.mp.port": 5555})
    assert "kv_connector_extra_config.lmcache.mp.port has no meaning here" in caplog.text
    with pytest.raises(ConfigError, match="chunk_size"):
        configured({"chunk_size": "abc"})
    apart = configured({"local_cpu": True, "local_disk": "/nowhere", "max_local_cpu_size": 5}, questions_only=True)
    assert (apart.local_cpu, apart.local_disk, apart.max_local_cpu_size) == (False, None, 0.0625)


def test_chunks_are_made_of_whole_blocks(caplog: pytest.LogCaptureFixture) -> None:
    (group,) = groups_of(engine(), caches(16), Config(), 0)
    assert (group.layout.chunk_tokens, group.layout.model, caplog.text) == (256, "org/model", "")
    (group,) = groups_of(engine(), caches(48), Config(), 0)
    assert group.layout.chunk_tokens == 768
    assert "chunk_size 256 is not made of whole blocks of 48 tokens: 768 is used" in caplog.text


def test_models_whose_kv_differs_have_names_of_their_own() -> None:
    changes: list[dict[str, Any]] = [{}, {"revision": "v2"}, {"hf_overrides": {"rope_theta": 1}}]
    layouts = [groups_of(engine(model=change), caches(), Config(), 0)[0].layout for change in changes]
    assert len({layout.model for layout in layouts}) == 3


def test_weights_that_are_quantized_when_they_are_loaded_have_names_of_their_own() -> None:
    plain, quantized = SimpleNamespace(), SimpleNamespace(quantization_config={"quant_method": "awq"})
    models: list[dict[str, Any]] = [
        {"quantization": None, "hf_config": plain},
        {"quantization": "awq_marlin", "hf_config": quantized},  # as the checkpoint has it, by whichever kernel
        {"quantization": "fp8", "hf_config": plain},
        {"quantization": "online", "quantization_config": {"bits": 8}, "hf_config": plain},
        {"quantization": "online", "quantization_config": {"bits": 4}, "hf_config": plain},
    ]
    found = [groups_of(engine(model=model), caches(), Config(), 0)[0].layout.model for model in models]
    assert found[:2] == ["org/model"] * 2
    assert len(set(found)) == 4


@pytest.mark.parametrize("nested", [False, True])
def test_a_model_whose_rotary_factors_depend_on_the_longest_prompt_has_a_name_for_each_set(nested: bool) -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    rotary: dict[str, Any] = {"full_attention": longrope, "sliding_attention": None} if nested else longrope
    text = SimpleNamespace(rope_parameters=rotary)
    models = [{"hf_text_config": text, "max_model_len": length} for length in (2048, 4096, 4097, 131072)]
    found = [groups_of(engine(model=model), caches(), Config(), 0)[0].layout.model for model in models]
    assert found == ["org/model+short"] * 2 + ["org/model+long"] * 2
    plain = {"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}), "max_model_len": 4097}
    assert groups_of(engine(model=plain), caches(), Config(), 0)[0].layout.model == "org/model"


def looking(**changes: Any) -> dict[str, Any]:
    """A model_config that takes pictures, as vLLM has it when nothing is said."""
    always = {"language_model_only": False, "mm_processor_cache_gb": 4, "mm_processor_kwargs": None}
    return {"multimodal_config": SimpleNamespace(**always | {"video_pruning_rate": None} | changes)}


def test_models_that_are_shown_pictures_in_another_way_have_names_of_their_own() -> None:
    ways: list[dict[str, Any]] = [{}, {"mm_processor_kwargs": {"do_normalize": False}}]
    ways += [{"video_pruning_rate": 0.5, "video_pruning_method": method} for method in ("evs", "vidcom2")]
    models: list[dict[str, Any]] = [{"hf_overrides": {"do_normalize": False}}, *(looking(**way) for way in ways)]
    layouts = [groups_of(engine(model=model), caches(), Config(), 0)[0].layout for model in models]
    assert layouts[1].model == "org/model"
    assert len({layout.model for layout in layouts}) == 5


def test_pictures_that_are_known_by_their_order_of_arrival_are_refused() -> None:
    counted = looking(mm_processor_cache_gb=0)
    with pytest.raises(ConfigError, match="mm_processor_cache_gb: without this cache and without prefix caching"):
        groups_of(engine(model=counted), caches(), Config(), 0)
    groups_of(engine(model=counted, enable_prefix_caching=True), caches(), Config(), 0)
    groups_of(engine(model=looking(mm_processor_cache_gb=0, language_model_only=True)), caches(), Config(), 0)


@pytest.mark.parametrize("name", ["prefill_context_parallel_size", "decode_context_parallel_size"])
def test_a_model_that_is_spread_in_an_unknown_way_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*leave it at 1; tensor and pipeline parallelism are served"):
        groups_of(engine(parallel={name: 2}), caches(), Config(), 0)
    ranks = [groups_of(engine(parallel={"tensor_parallel_size": 2}), caches(), Config(), rank)[0] for rank in (0, 1)]
    assert [(group.layout.rank, group.layout.world_size) for group in ranks] == [(0, 2), (1, 2)]


def test_a_request_is_its_tokens_and_whatever_else_its_kv_depends_on() -> None:
    plain = prompt_of(request(), generated=False)
    assert plain is not None
    assert (list(plain.tokens), plain.extras, plain.attempt) == ([1, 2, 3], (), 0)
    longer = prompt_of(request(num_preemptions=2), generated=True)
    assert longer is not None
    assert (list(longer.tokens), longer.attempt) == ([1, 2, 3, 4], 2)
    image = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=7, length=5))
    growing = request()
    before = prompt_of(growing, generated=True)
    growing.all_token_ids.append(5)
    assert before is not None
    assert list(before.tokens) == [1, 2, 3, 4], "vLLM's own list goes on growing"
    rich = prompt_of(request(lora_request=LORA, cache_salt="tenant", mm_features=[image]), generated=False)
    assert rich is not None
    assert [position for position, _ in rich.extras] == [0, 0, 7]
    assert len({extra for _, extra in rich.extras}) == 3


@pytest.mark.parametrize("change", [{"prompt_token_ids": None}, {"prompt_embeds": object()}])
def test_what_tokens_do_not_describe_is_left_alone(change: dict[str, Any]) -> None:
    assert prompt_of(request(**change), generated=False) is None


def test_our_lines_go_where_vllms_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, root = logging.getLogger("kvredis"), logging.getLogger("vllm"), logging.getLogger()
    handler = logging.NullHandler()
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(root, "handlers", [])
    level = ours.level
    try:
        log_as_vllm_does()
        assert (ours.handlers, ours.propagate, ours.level) == ([handler], False, logging.INFO)
        log_as_vllm_does()
        assert ours.handlers == [handler]
    finally:
        ours.setLevel(level)


def test_events_say_of_a_request_what_vllm_does() -> None:
    where = SimpleNamespace(offset=1, length=2)
    asked = request(
        lora_request=SimpleNamespace(lora_name="french", lora_path="/french", lora_int_id=7),
        cache_salt="tenant",
        mm_features=[SimpleNamespace(identifier="cat", mm_position=where)],
        session_id="session",
    )
    told = prompt_of(asked, generated=False)
    assert told is not None
    assert told.origin == Origin((7, "french"), "tenant", (("cat", 1, 2),), "session")
    plain = prompt_of(request(), generated=False)
    assert plain is not None
    assert plain.origin == Origin()


def test_a_router_s_words_say_whose_kv_a_prompt_is_of() -> None:
    def told(**words: object) -> tuple[bool, str, bool]:
        prompt = prompt_of(request(kv_transfer_params=words), generated=False)
        assert prompt is not None
        return prompt.for_others, prompt.handed_over, prompt.is_promised

    assert told() == (False, "", False)
    assert told(do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None) == (True, "", False)
    assert told(do_remote_prefill=True, remote_engine_id="p", kvredis_chunk="m@1") == (False, "m@1", False)
    assert told(do_remote_prefill=True, remote_engine_id="p") == (False, "", True)
    assert told(do_remote_prefill=False, kvredis_chunk="m@1") == (False, "", False)
