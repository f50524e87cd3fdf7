"""`config.json` of each type of model that transformers has a causal LM for: bytes a token as the type keeps them, or a
refusal by name.

RECORDED is what models of transformers 5.23 kept in their caches, made of their types' defaults on the meta device and
asked for two tokens: elements of K and V a token, summed over all layers. 36 of 192 types cannot be made so.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache

from kvredis.adapters.transformers.model import layout_of
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.shapes import shape_from_config
from kvredis.storage.errors import LayoutError
from tests.adapters.model_types import TINY_TYPES, tiny_of

RECORDED: Final = """
afmoe=131072 apertus=262144 arcee=163840 aria_text=262144 axk1=35136 axk2=7680 bailing_hybrid=4032 bart=24576
beam=106496 bert=0 bert-generation=0 bigbird_pegasus=32768 biogpt=49152 bitnet=38400 blenderbot-small=8192
bloom=256 camembert=0 codegen=229376 cohere=655360 cohere2=655360 cohere2_moe=655360 cpmant=393216 ctrl=122880
cwm=131072 data2vec-text=0 deepseek_v3=35136 deepseek_v32=35136 deepseek_v4=44032 diffllama=65536 doge=65536
dots3_note=43392 dots3_note_text=43392 electra=0 emu3=65536 ernie=0 ernie4_5=9216 ernie4_5_moe=28672
exaone4=262144 exaone_moe=262144 falcon=4096 falcon_h1=65536 falcon_mamba=0 flex_olmo=262144 flint=50176
fuyu=294912 gemma=229376 gemma2=53248 gemma3=53248 gemma3_text=53248 gemma4_text=71680 gemma4_unified_text=71680
git=9216 glm=20480 glm4=20480 glm4_moe=30912 glm4_moe_lite=27072 glm_moe_dsa=44928 got_ocr2=49152 gpt-sw3=18432
gpt2=18432 gpt_bigcode=1536 gpt_neo=98304 gpt_neox=540672 gpt_neox_japanese=163840 gpt_oss=36864 gptj=229376
granite=262144 granite_swa=24576 granitemoe=262144 granitemoe_swa=262144 granitemoeshared=262144 helium=122880
hrm_text=393216 hy_v3=163840 hy_v4=19584 hyperclovax=262144 inkling2_text=98304 inkling_text=247808
internlm3=24576 iquestcoder=163840 jais2=212992 jamba=8192 kimi_linear=3456 kolibri1=51200 laguna=81920
lfm2=40960 lfm3=11264 llama=262144 llama4=98304 llama4_text=98304 mamba=0 mamba2=0 marian=24576 mbart=24576
mellum=28672 mimo_v2_flash=111360 minicpm3=17856 minimax=32768 minimax_m2=126976 minimax_m3_vl_text=61440
ministral3=69632 mistral=65536 mixtral=65536 mllama=65536 modernbert-decoder=33792 moss_transcribe_diarize=57344
mpt=98304 mvp=24576 nanochat=18432 nemotron_h=2048 olmo=262144 olmo2=262144 olmo3=262144 olmo_hybrid=61440
olmoe=65536 openai-gpt=0 opt=18432 pegasus=24576 persimmon=294912 phi=98304 phi3=196608 phi4_multimodal=49152
phimoe=65536 plbart=9216 prophetnet=24576 qwen2=262144 qwen2_moe=98304 qwen3=262144 qwen3_5=16384
qwen3_5_moe=10240 qwen3_5_moe_text=10240 qwen3_5_text=16384 qwen3_moe=12288 qwen3_next=12288 recurrent_gemma=0
roberta=0 roberta-prelayernorm=0 roc_bert=0 rwkv=0 seed_oss=131072 smollm3=36864 solar_open=98304
stablelm=163840 starcoder2=15360 trocr=24576 vaultgemma=53248 whisper=3072 xglm=49152 xlm-roberta=0
xlm-roberta-xl=0 xlstm=0 youtu=18432 zamba=193024 zamba2=92160 zaya=20480
"""

NOT_COUNTED: Final = {
    "encoder": """bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert
        xlm-roberta xlm-roberta-xl""",
    "encoder-decoder": "bart bigbird_pegasus blenderbot-small marian mbart mvp pegasus plbart whisper",
    "another model": "prophetnet trocr",
    "a state of all tokens": "falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm",
    "no K and V by token": "openai-gpt",
    "an index": "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text",
    "of another size|of several sizes": "gemma4 gemma4_text gemma4_unified gemma4_unified_text inkling_text",
    "another width": "mimo_v2_flash",
    "attend to a picture": "mllama",
}
"""What a refusal says -> the types that are refused so."""

TRIED_TYPES: Final = {
    "falcon": {},
    "gpt2": {},
    "bloom": {},
    "gpt_bigcode": {},
    "gemma3_text": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_neox": {},
    "opt": {},
}
"""Types of which a tiny model computes each time."""


def bytes_of(folder: Path, config: dict[str, Any]) -> int:
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"} | config))
    return shape_from_config(folder / "config.json").bytes_per_token()


def recorded() -> dict[str, int]:
    return {kind: int(size) for kind, _, size in (word.rpartition("=") for word in RECORDED.split())}


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the record is of transformers 5.23")
@pytest.mark.parametrize(("kind", "elements"), recorded().items())
def test_the_defaults_of_a_type_are_as_large_as_its_models_kv_or_refused_by_name(
    tmp_path: Path, kind: str, elements: int
) -> None:
    told = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=True))
    for reason, kinds in NOT_COUNTED.items():
        if kind in kinds.split():
            with pytest.raises(BenchError, match=reason):
                bytes_of(tmp_path, told)
            return
    assert bytes_of(tmp_path, told) == 2 * elements


@pytest.mark.nightly
@pytest.mark.parametrize("kind", recorded())
@pytest.mark.parametrize("names", ["num_key_value_heads num_kv_heads", "head_dim kv_channels attention_head_dim"])
def test_a_size_that_the_file_leaves_out_is_what_transformers_takes_or_refused(
    tmp_path: Path, kind: str, names: str
) -> None:
    told = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=True))
    for part in (told, told.get("text_config") or {}):
        for name in ("num_attention_heads", "n_head"):
            if isinstance(part.get(name), int) and "kv_heads" in names:
                part[name] *= 2  # so that a default that does not follow shows
        for name in names.split():
            part.pop(name, None)
    try:
        found = bytes_of(tmp_path, told)
    except BenchError:
        return
    whole = None
    with contextlib.suppress(Exception):  # a class of transformers checks its keys, each in its own way
        whole = json.loads(CONFIG_MAPPING[kind].from_dict(told).to_json_string(use_diff=True))
    assert whole is None or found == bytes_of(tmp_path, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind, size in recorded().items() if size])
def test_without_any_one_of_its_keys_a_file_is_read_as_transformers_reads_it_or_refused(
    tmp_path: Path, kind: str
) -> None:
    whole = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=True))
    wrong = []
    for part in ("", "text_config"):
        for key in (whole.get(part) or {} if part else whole).keys() - {"num_layers_per_stack"}:  # HRM counts by it
            told = json.loads(json.dumps(whole))
            (told[part] if part else told).pop(key)
            try:
                found = bytes_of(tmp_path, told)
            except BenchError:
                continue
            with contextlib.suppress(Exception):  # a class of transformers checks its keys, each in its own way
                read = json.loads(CONFIG_MAPPING[kind].from_dict(told).to_json_string(use_diff=True))
                if found != bytes_of(tmp_path, read):
                    wrong.append(key)
    assert wrong == []


@torch.no_grad()
def kept_bytes(model: Any) -> int:
    """Bytes a token that a model keeps in a cache which it is given."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[3, 4]]), use_cache=True, past_key_values=cache)
    return sum(
        tensor[0, :, 0].numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None and tensor.dim() == 4
    )


def tell(model: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    return told | {"torch_dtype": "float32"}


@pytest.mark.parametrize(("kind", "own"), TRIED_TYPES.items())
def test_a_tiny_model_keeps_what_its_configuration_is_read_to_say(
    tmp_path: Path, kind: str, own: dict[str, Any]
) -> None:
    model = tiny_of(kind, **own)
    assert bytes_of(tmp_path, tell(model)) == kept_bytes(model) == layout_of(model, "tiny").bytes_per_token


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in TINY_TYPES if kind != "blt"])  # which takes 23 GB, however small
def test_any_tiny_model_is_refused_by_the_adapter_or_keeps_what_is_read(tmp_path: Path, kind: str) -> None:
    model = tiny_of(kind)
    try:
        layout = layout_of(model, "tiny")
    except LayoutError:
        return
    try:
        read = bytes_of(tmp_path, tell(model))
    except BenchError:
        assert kind in " ".join(NOT_COUNTED.values()).split()
    else:
        assert read == layout.bytes_per_token


FALCON: Final = {
    **{"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71},
    **{"hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False},
}
FALCON_40B: Final = FALCON | {
    **{"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8},
    "new_decoder_architecture": True,
}
QWEN3_NEXT: Final = {
    **{"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16},
    **{"num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048, "linear_num_key_heads": 16},
}
JAMBA: Final = {
    **{"model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16},
}
DEEPSEEK: Final = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
SOME: Final = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (FALCON, 32 * 1 * 64 * 2 * 2),
        (FALCON | {"multi_query": False}, 32 * 71 * 64 * 2 * 2),
        (FALCON_40B, 60 * 8 * 64 * 2 * 2),
        (QWEN3_NEXT, 12 * 2 * 256 * 2 * 2),
        (JAMBA, 4 * 8 * 128 * 2 * 2),
        (DEEPSEEK, 61 * (512 + 64) * 2),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 12 * 64 * 2 * 2),
        ({"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112, "n_embed": 14336}, 70 * 112 * 128 * 2 * 2),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {"alibi": True}},
         32 * 32 * 128 * 2 * 2),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {"kv_n_heads": 8}},
         32 * 8 * 128 * 2 * 2),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-M-*", "head_dim": 128, **SOME},
         2 * 8 * 128 * 2 * 2),
        ({"model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128,
          **SOME}, 3 * 8 * 128 * 2 * 2),
        ({"model_type": "minimax", "num_hidden_layers": 8, "attn_type_list": [0, 0, 0, 1] * 2, **SOME},
         2 * 8 * 128 * 2 * 2),
        ({"model_type": "kimi_linear", "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}}, 7 * 576 * 2),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_kv_shared_layers": 15, "head_dim": 256, **SOME,
          "num_key_value_heads": 2}, 20 * 2 * 256 * 2 * 2),
        ({"model_type": "hf_olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32, "n_kv_heads": 8}, 32 * 8 * 128 * 4),
        ({"model_type": "hf_olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32, "multi_query_attention": True},
         32 * 1 * 128 * 4),
        ({"model_type": "codeshell", "n_layer": 42, "n_head": 32, "n_embd": 4096, "num_query_groups": 8},
         42 * 8 * 128 * 4),
        ({"model_type": "step3_text", "num_hidden_layers": 61, "num_attention_heads": 64, "num_attention_groups": 1,
          "head_dim": 256, "hidden_size": 7168}, 61 * 1 * 256 * 4),
        ({"model_type": "gpt2", "n_layer": 24, "n_head": 16, "n_embd": 2048, "attention_head_type": "multiquery"},
         24 * 1 * 128 * 4),
        ({"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192},
         60 * 8 * 64 * 4),
        ({key: value for key, value in FALCON.items() if key != "multi_query"}, 32 * 1 * 64 * 4),
        ({"model_type": "chatglm", "architectures": ["ChatGLMModel"], "num_layers": 28, "num_attention_heads": 32,
          "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2},
         28 * 2 * 128 * 4),
        ({"model_type": "bert", "is_decoder": True, "num_hidden_layers": 12, "num_attention_heads": 12,
          "hidden_size": 768, "type_vocab_size": 2}, 12 * 12 * 64 * 4),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"model_type": "qwen2_5_omni_text",
          "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}}},
         28 * 4 * 128 * 2 * 2),
    ],
)  # fmt: skip
def test_a_published_configuration_is_read_as_it_is_kept(tmp_path: Path, config: dict[str, Any], nbytes: int) -> None:
    assert bytes_of(tmp_path, config) == nbytes


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_next", "num_hidden_layers": 48, "head_dim": 256, **SOME}, "nothing says which"),
        ({"model_type": "my_hybrid", "num_hidden_layers": 8, "ssm_state_size": 16, **SOME}, "ssm_state_size tells of"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention", "fancy"], **SOME}, "layers of fancy"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"], **SOME}, "tells of 1 layers, and there are 3"),
        ({"num_hidden_layers": 1, "layer_types": ["conv"], **SOME}, "no layer keeps"),
        ({"model_type": "gemma", "num_hidden_layers": 18, "num_attention_heads": 8, "hidden_size": 2048},
         "lacking: num_key_value_heads, head_dim"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 512, **SOME}, "lacking: qk_rope_head_dim"),
        ({"num_hidden_layers": 2, **SOME, "num_kv_heads": [1, 2], "num_key_value_heads": None},
         "num_kv_heads is another for each layer"),
        ({"num_hidden_layers": 2, "block_configs": [{}], **SOME}, "block_configs"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "deci", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096,
          "num_key_value_heads_per_layer": [8, 4]}, "num_key_value_heads_per_layer: tells of KV in a form"),
        ({"model_type": "plamo", "num_hidden_layers": 40, "num_attention_heads": 40, "n_shared_head": 8,
          "hidden_size": 5120}, "n_shared_head: tells of KV in a form"),
        ({"model_type": "hunyuan", "num_hidden_layers": 64, "use_cla": True, "cla_share_factor": 2, **SOME},
         "cla_share_factor: tells of KV in a form"),
        ({"model_type": "yoco", "num_hidden_layers": 26, "yoco_cross_layers": 13, **SOME}, "yoco_cross_layers: tells"),
        ({"model_type": "stripedhyena", "num_layers": 32, "attn_layer_idxs": [1], "hyena_layer_idxs": [0], **SOME},
         "hyena_layer_idxs tells of"),
        ({"model_type": "gla", "attn_mode": "chunk", "num_hidden_layers": 24, "num_heads": 4, "hidden_size": 2048},
         "attn_mode tells of"),
        ({"model_type": "rwkv7", "num_hidden_layers": 24, "head_dim": 64, "hidden_size": 2048}, "a state of all"),
        ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "num_hidden_layers": 22,
          "num_attention_heads": 12, "hidden_size": 768}, "ModernBertForMaskedLM: a model that makes no text"),
        ({"model_type": "vit", "architectures": ["ViTModel"], "num_hidden_layers": 12, "num_attention_heads": 12,
          "hidden_size": 768, "image_size": 224, "num_channels": 3}, "num_channels: a model that makes no text"),
        ({"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512,
          "text_config": {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 512}}, "projection_dim: a"),
        ({"model_type": "deberta-v2", "num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024,
          "type_vocab_size": 0}, "type_vocab_size: a model that makes no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_refused_by_name(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError, match=says):
        bytes_of(tmp_path, config)
