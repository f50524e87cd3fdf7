"""Whatever type of model transformers maps, opening it ends in service with the model's tokens, or in a LayoutError.

Types with recurrent states, and a few of other kinds, are tried each time; all types by night.
"""

import contextlib
from typing import Any

import pytest
import torch
import transformers

from kvredis.adapters.transformers.generate import CachedModel
from kvredis.adapters.transformers.model import identity_of
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import LayoutError
from tests.adapters.model_types import ALL_TYPES, NOT_TINY, TINY_TYPES, tiny_of

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("cannot go on from a stored one", {"attn_layer_indices": [1]}),
    "falcon_h1": ("served", {}),
    "falcon_mamba": ("no layer keeps K and V", {}),
    "granitemoehybrid": ("served", {"layer_types": ["mamba", "attention"]}),
    "jamba": ("cannot go on from a stored one", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": ("no layer keeps K and V", {}),
    "lfm2": ("served", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("no layer keeps K and V", {}),
    "minimax": ("uses cache of its own|layers of linear_attention", {}),
    "nemotron_h": ("served", {}),
    "olmo_hybrid": ("served", LINEAR_AND_FULL),
    "qwen3_5_text": ("served", LINEAR_AND_FULL),
    "qwen3_next": ("served", LINEAR_AND_FULL),
    "recurrent_gemma": ("its linear attention keeps its state elsewhere", {"num_hidden_layers": 3}),
    "rwkv": ("its state is in a cache of its own", {}),
    "xlstm": ("its state is in a cache of its own", {}),
}
"""All types that have recurrent states and can be made small: what becomes of them with transformers 5.23, and what
makes one of their layers keep K and V."""
OTHERS: dict[str, str] = {
    "bert": "depends on those behind it",
    "deepseek_v3": "served",
    "gemma4_text": "served",
    "gpt2": "served",
    "llama4_text": "layers of chunked_attention",
    "mixtral": "served",
    "openai-gpt": "keeps no KV in a cache",
}
SLOW_OR_LARGE = ("blt", "gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal")
"""Types with parts that SIZES does not make small."""
IS_KNOWN_VERSION = transformers.__version__.startswith("5.23.")


def outcome(model: Any) -> str:
    """Say `served` where a model gives its own tokens cold and warm, else what a LayoutError says. Any other error, and
    other tokens, are raised."""
    config = Config.load(env={}, overrides={"max_local_cpu_size": "16MB", "hugepages": "off", "chunk_size": 16})
    try:
        cached = CachedModel.open(model, config, "tiny")
    except LayoutError as error:
        return str(error)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    own = identity_of(model)
    for seed in range(2):
        ids = torch.randint(3, 250, (1, 70), generator=torch.Generator().manual_seed(seed))
        expected = model.generate(ids, **options)
        for loaded in (0, 64):
            got = cached.generate(ids, **options)
            assert cached.last_loaded == loaded
            assert torch.equal(got.sequences, expected.sequences)
            assert (got.logits[0] - expected.logits[0]).abs().max() < 1e-3 * expected.logits[0].abs().max()
    assert identity_of(model) == own, "its use leaves its keys as they are"
    cached.close()
    return "served"


def made(kind: str, **own: Any) -> Any:
    if kind not in ALL_TYPES:
        pytest.skip(f"this transformers has no {kind}")
    try:
        return tiny_of(kind, **own)
    except Exception as error:
        if IS_KNOWN_VERSION:
            raise
        pytest.skip(f"{kind} cannot be made as small as this: {error}")


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_type_with_recurrent_states_is_served_exactly_or_refused(kind: str) -> None:
    expected, own = RECURRENT[kind]
    found = outcome(made(kind, **own))
    if IS_KNOWN_VERSION:
        assert any(part in found for part in expected.split("|")), found


def test_a_scan_that_does_not_read_its_state_shows_in_bfloat16_too() -> None:
    model = made("jamba", **RECURRENT["jamba"][1]).to(torch.bfloat16)
    assert outcome(model) != "served"


@pytest.mark.parametrize("kind", OTHERS)
def test_a_type_of_another_kind_is_served_exactly_or_refused(kind: str) -> None:
    found = outcome(made(kind))
    if IS_KNOWN_VERSION:
        assert any(part in found for part in OTHERS[kind].split("|")), found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [kind for kind in TINY_TYPES if kind not in SLOW_OR_LARGE])
def test_any_type_is_served_exactly_or_refused(kind: str) -> None:
    assert outcome(made(kind))


@pytest.mark.nightly
@pytest.mark.skipif(not IS_KNOWN_VERSION, reason="the list is of transformers 5.23")
def test_what_is_listed_as_not_to_be_made_small_cannot_be() -> None:
    made_all_the_same = []
    for kind in NOT_TINY:
        with contextlib.suppress(Exception):
            tiny_of(kind)
            made_all_the_same.append(kind)
    assert made_all_the_same == []
