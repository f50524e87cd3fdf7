"""Which kinds of models and which ways to generate are served, each tried: docs/engines.md has the table made here.

What a model does with KV that was stored is judged by the logits of what follows, cold and warm, beside those of
model.generate() alone.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
import transformers

from kvredis.adapters.transformers.cache import CACHE
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.model_types import ALL_TYPES, tiny_of
from tests.gate import nightly

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT: Final = Path(__file__).parents[3]
NEAR: Final = 2e-5
"""Of the largest logit: what the same sums in another order were seen to differ by is 1e-6 to 5e-6."""
TURN: Final = 64
LONGROPE: Final[dict[str, Any]] = {
    "original_max_position_embeddings": TURN,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": TURN,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
SLIDING_AND_FULL: Final = ["sliding_attention", "full_attention"]
SHARED: Final[dict[str, Any]] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SLIDING_AND_FULL * 2}
LINEAR_AND_FULL: Final = {"layer_types": ["linear_attention", "full_attention"]}
ZAMBA: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    **{"n_mamba_heads": 8, "mamba_headdim": 16, "num_mem_blocks": 1, "attention_head_dim": 32},
}

SERVED, WHOLE, REFUSED, THEIRS = "loaded", "computed whole", "refused", "transformers refuses"
WORDS: Final = {
    SERVED: "what is stored is loaded, and the logits are those of `model.generate()`",
    WHOLE: "as `model.generate()` does it: nothing is loaded or stored, and the log says why once",
    REFUSED: "a `LayoutError` when the model is opened, which says why and what to do",
    THEIRS: "`model.generate()` raises, with kvredis and without",
}


class Kind(NamedTuple):
    """A kind of model: its type, what a small one needs beside SIZES, and why it is refused if it is."""

    name: str
    type: str
    own: dict[str, Any]
    why: str = ""
    is_stateful: bool = False
    """Whether transformers refuses assisted decoding and quantized caches for it."""
    is_slow: bool = False


KINDS: Final = (
    Kind("Llama, Qwen3, Mistral and the like", "llama", {}),
    Kind("MLA: DeepSeek V2", "deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "greedy"}),
    Kind("MLA: DeepSeek V3", "deepseek_v3", {"first_k_dense_replace": 1}),
    Kind("LongRoPE: Phi-3, Phi-4-mini", "phi3", LONGROPE),
    Kind("Gemma 3n", "gemma3n_text", {**SHARED, "activation_sparsity_pattern": None, "intermediate_size": 128}),
    Kind("Gemma 4", "gemma4_text", {**SHARED, "global_head_dim": 32}),
    Kind("Falcon-H1", "falcon_h1", {}, is_stateful=True, is_slow=True),
    Kind("Zamba2", "zamba2", ZAMBA, is_stateful=True, is_slow=True),
    Kind("Nemotron-H", "nemotron_h", {}, is_stateful=True, is_slow=True),
    Kind("Granite 4", "granitemoehybrid", {"layer_types": ["mamba", "attention"]}, is_stateful=True, is_slow=True),
    Kind("Qwen3-Next", "qwen3_next", LINEAR_AND_FULL, is_stateful=True),
    Kind("Qwen3.5", "qwen3_5_text", LINEAR_AND_FULL, is_stateful=True, is_slow=True),
    Kind("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"]}),
    Kind("Jamba", "jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "cannot go on from a stored one: use its"),
    Kind("Bamba", "bamba", {"attn_layer_indices": [1]}, "cannot go on from a stored one: use its"),
    Kind("Mamba", "mamba", {}, "no layer keeps K and V by token.*: use generate"),
    Kind("Mamba2", "mamba2", {"num_heads": 8, "head_dim": 16}, "no layer keeps K and V by token.*: use generate"),
)
QUICK_BATCHES: Final = ("deepseek_v3", "phi3", "gemma4_text", "qwen3_next", "lfm2")
IS_KNOWN_VERSION: Final = transformers.__version__.startswith("5.23.")


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 250, (1, tokens), generator=torch.Generator().manual_seed(seed))


def batch(*rows: torch.Tensor) -> dict[str, Any]:
    """Prompts padded on the left, and their mask."""
    width = max(row.shape[1] for row in rows)
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.cat([pad(row, (width - row.shape[1], 0)) for row in rows]),
        "attention_mask": torch.cat([pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]),
    }


WAYS: Final[dict[str, dict[str, Any]]] = {
    "one prompt": {},
    "a batch with padding": {},
    "`cache_implementation` dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "assisted": {"assistant_model": None},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def expected(kind: Kind, way: str) -> str:
    """What becomes of it, as the table says."""
    if kind.why:
        return REFUSED
    if way in ("one prompt", "a batch with padding", "`cache_implementation` dynamic"):
        return SERVED
    if way == "quantized":
        return THEIRS if kind.is_stateful or kind.type in ("lfm2", "gemma3n_text", "gemma4_text") else WHOLE
    return THEIRS if kind.is_stateful and way != "static" else WHOLE


def table() -> list[str]:
    """The lines of the table in docs/engines.md."""
    lines = [f"| {' | '.join(('transformers 5.23', *WAYS))} |", f"|{' --- |' * (len(WAYS) + 1)}"]
    lines += [f"| {' | '.join((kind.name, *(expected(kind, way) for way in WAYS)))} |" for kind in KINDS]
    return lines


def made(kind: Kind) -> Any:
    if kind.type not in ALL_TYPES:
        pytest.skip(f"this transformers has no {kind.type}")
    try:
        return tiny_of(kind.type, **kind.own)
    except Exception as error:
        if IS_KNOWN_VERSION:
            raise
        pytest.skip(f"{kind.type} cannot be made as small as this: {error}")


def opened(model: Any) -> CachedModel:
    settings = {"max_local_cpu_size": "16MB", "hugepages": "off", "chunk_size": 16}
    return CachedModel.open(model, Config.load(env={}, overrides=settings), "tiny")


def options_of(way: str) -> dict[str, Any]:
    options = {**WAYS[way], "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if way == "assisted":
        options["assistant_model"] = tiny_of("llama")
    if way not in ("assisted", "prompt lookup"):
        options["output_logits"] = True
    return options | {"eos_token_id": None, "return_dict_in_generate": True}


def assert_same(got: Any, plain: Any, near: float = NEAR) -> None:
    assert torch.equal(got.sequences, plain.sequences)
    for one, other in zip(got.logits or (), plain.logits or (), strict=True):
        assert (one - other).abs().max() < near * other.abs().max()


def outcome(model: Any, way: str) -> str:
    """What becomes of a prompt, of one that shares its beginning, and of a batch; other tokens or logits than those of
    the model alone are an AssertionError."""
    cached, options = opened(model), options_of(way)
    asked: list[dict[str, Any]] = [{"input_ids": ids(65)}, {"input_ids": torch.cat([ids(40), ids(30, 1)], dim=1)}]
    if way == "a batch with padding":
        asked = [batch(ids(70), ids(50, 2)), batch(ids(20, 3), ids(70))]
    loaded = 0
    for inputs in asked:
        try:
            plain = model.generate(**inputs, **options)
        except (ValueError, RuntimeError) as error:
            with pytest.raises(type(error), match=re.escape(str(error)[:60])):
                cached.generate(**inputs, **options)
            return THEIRS
        for _ in ("cold", "warm"):
            assert_same(
                cached.generate(**inputs, **options), plain, 2e-4 if model.config.model_type == "zamba2" else NEAR
            )
        loaded += cached.last_loaded
    cached.close()
    return SERVED if loaded else WHOLE


def cases() -> list[Any]:
    found = []
    for kind in KINDS:
        for way in WAYS:
            is_quick = way in ("one prompt", "a batch with padding") and not kind.is_slow
            is_quick &= way == "one prompt" or kind.type in QUICK_BATCHES
            is_quick |= kind.type == "llama"
            name = f"{kind.type}, {way}"
            found.append(pytest.param(kind, way, id=name) if is_quick else nightly(kind, way, id=name))
    return found


@pytest.mark.parametrize(("kind", "way"), cases())
def test_each_cell_of_the_table_is_so(kind: Kind, way: str) -> None:
    model = made(kind)
    if kind.why and IS_KNOWN_VERSION:
        with pytest.raises(ValueError, match=f"^tiny: .*{kind.why}"):
            opened(model)
        return
    try:
        found = outcome(model, way)
    except LayoutError:
        if IS_KNOWN_VERSION:
            raise
        return
    assert found == expected(kind, way) or not IS_KNOWN_VERSION


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs/engines.md").read_text()
    assert "\n".join(table()) in text
    for word, meaning in WORDS.items():
        assert f"*{word}*: {meaning}" in text.replace("\n", " ")


def test_longrope_has_keys_for_each_set_of_angles() -> None:
    model, text = made(next(kind for kind in KINDS if kind.type == "phi3")), ids(200)
    cached, options = opened(model), options_of("one prompt")
    for tokens, loaded in (
        (40, 0),  # the short set's
        (100, 0),  # the long set's, which does not find what the short one's prompt stored
        (50, 32),
        (TURN - 2, 48),  # it generates beyond the turn
        (150, 96),
        (TURN + 1, 0),  # transformers forgets a cache of this length, so nothing is loaded or stored
        (TURN + 2, TURN),
        (180, 144),
    ):
        got = cached.generate(text[:, :tokens], **options)
        assert (tokens, cached.last_loaded) == (tokens, loaded)
        assert_same(got, model.generate(text[:, :tokens], **options))
    rows = batch(text[:, :120], text[:, :50])
    assert_same(cached.generate(**rows, **options), model.generate(**rows, **options))
    assert cached.last_loaded == 112 + (112 - 70)
    cached.close()


def test_threads_do_not_turn_the_angles_of_each_others_prompts() -> None:
    model, text = made(next(kind for kind in KINDS if kind.type == "phi3")), ids(200)
    cached, lengths, interval = opened(model), (40, 50, TURN + 30, TURN + 60), sys.getswitchinterval()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(text[:, :tokens], **options).tolist() for tokens in lengths]
    order = [(first + step) % len(lengths) for first in range(4) for step in range(24)]
    sys.setswitchinterval(1e-6)  # threads change within a call
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda place: cached.generate(text[:, : lengths[place]], **options).tolist(), order))
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected[place] for place in order]
    cached.close()


def test_dynamic_ntk_is_served_within_its_length_and_computed_whole_beyond() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, text = tiny_of("llama", max_position_embeddings=TURN, rope_parameters=rope), ids(100)
    cached, options = opened(model), options_of("one prompt")
    for tokens, loaded in ((40, 0), (100, 0), (50, 32), (60, 48), (TURN, 0)):
        got = cached.generate(text[:, :tokens], **options)
        assert (tokens, cached.last_loaded) == (tokens, loaded)
        if tokens < TURN - 6:  # beyond, transformers itself goes by what it has seen before
            assert_same(got, model.generate(text[:, :tokens], **options))
    cached.close()


def test_k_and_v_of_several_shapes_are_one_vector_a_token() -> None:
    model = made(next(kind for kind in KINDS if kind.type == "gemma4_text"))
    layout = layout_of(model, "tiny")
    assert (layout.layers, layout.planes, layout.kv_heads) == (1, 1, 1)
    assert layout.head_dim == 2 * 2 * 16 + 2 * 2 * 32, "of a window's layer and one that sees all; two more share these"


def test_a_cache_that_is_not_in_a_room_is_stored_as_one_that_is() -> None:
    model = made(next(kind for kind in KINDS if kind.type == "deepseek_v3"))
    cached, options = opened(model), options_of("one prompt")
    first = cached.generate(ids(40), **options)
    longer = torch.cat([first.sequences, ids(80, 1)], dim=1)
    past = first[CACHE]
    assert_same(cached.generate(longer, **{CACHE: past}, **options), model.generate(longer, **options))
    assert_same(cached.generate(longer, **options), model.generate(longer, **options))
    assert cached.last_loaded == 112
    cached.close()


def test_a_prompt_of_one_token_in_a_batch_of_a_model_with_states_is_computed_whole() -> None:
    model = made(next(kind for kind in KINDS if kind.type == "lfm2"))
    cached, options, rows = opened(model), options_of("one prompt"), batch(ids(33), ids(1, 1))
    for _ in range(2):
        assert_same(cached.generate(**rows, **options), model.generate(**rows, **options))
        assert cached.last_loaded == 0
    cached.close()


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "prefill_chunk_size"])
def test_what_goes_wrong_behind_a_cache_is_refused_behind_the_callers(option: str) -> None:
    model = tiny_of("llama")
    cached = opened(model)
    past: Any = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids(20), **{CACHE: past})
    with pytest.raises(ValueError, match=f"{option}: .* behind a cache that is not empty: give none"):
        cached.generate(ids(40), **{CACHE: past, option: 3}, max_new_tokens=2)
    cached.close()
