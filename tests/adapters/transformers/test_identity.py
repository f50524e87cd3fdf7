"""Everything that KV depends on, walked: each change is made, and is seen, refused, or leaves tokens as they are."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvredis.adapters.engine.engine import CacheEngine
from kvredis.adapters.engine.identity import ADAPTERS, DEPENDENCES, WORDS, Dependence, table
from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.adapters.transformers.cache import CACHE
from kvredis.adapters.transformers.generate import CachedModel, layout_of
from kvredis.adapters.transformers.model import identity_of
from kvredis.adapters.vllm.config import groups_of
from kvredis.backends.config.schema import Config
from kvredis.storage.errors import KVRedisError, LayoutError
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.tiny_models import tiny
from tests.adapters.transformers.test_other import adapted, changed
from tests.adapters.vllm.test_config import caches, engine

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[3]
CHUNK = 16
NAMES = [each.name for each in DEPENDENCES]


def prompt(tokens: int = 70, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 500, (1, tokens), generator=torch.Generator().manual_seed(seed))


def cached_over(model: PreTrainedModel, backend: FakeBackend, **settings: Any) -> CachedModel:
    return CachedModel(model, CacheEngine(Config(chunk_size=CHUNK, **settings), layout_of(model, "tiny"), backend))


def answer(model: Any, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    always = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    result = model.generate(ids, **always | options)
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    return [[int(token) for token in row] for row in sequences]


# -- the changes -----------------------------------------------------------------------------------------------------

Change = Callable[[Any], AbstractContextManager[dict[str, Any]]]
"""Changes a model while it lasts, and says the options that generate() is called with."""


def weight_edit(edit: Callable[[torch.Tensor], Any], name: str = "model.layers.0.self_attn.k_proj.weight") -> Change:
    @contextmanager
    def change(model: Any) -> Iterator[dict[str, Any]]:
        weight = model.get_parameter(name).data
        before, version = weight.clone(), model.get_parameter(name)._version
        edit(weight)
        yield {}
        weight.copy_(before)
        assert model.get_parameter(name)._version == version, "torch tells nothing of such a change"

    return change


@contextmanager
def stepped(model: Any) -> Iterator[dict[str, Any]]:
    """An optimizer's step."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(prompt(), labels=prompt()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    yield {}
    model.load_state_dict(before)


def attribute(name: str, value: Any, path: str = "model.layers.1.self_attn") -> Change:
    @contextmanager
    def change(model: Any) -> Iterator[dict[str, Any]]:
        module = model.get_submodule(path)
        before = getattr(module, name)
        setattr(module, name, value)
        yield {}
        setattr(module, name, before)

    return change


@contextmanager
def another_window(model: Any) -> Iterator[dict[str, Any]]:
    model.config.sliding_window = 24
    yield {}
    model.config.sliding_window = 32


@contextmanager
def stretched(model: Any) -> Iterator[dict[str, Any]]:
    model.model.rotary_emb.inv_freq.mul_(0.5)
    yield {}
    model.model.rotary_emb.inv_freq.mul_(2.0)


def implementation(name: str) -> Change:
    @contextmanager
    def change(model: Any) -> Iterator[dict[str, Any]]:
        before = model.config._attn_implementation
        model.set_attn_implementation(name)
        yield {}
        model.set_attn_implementation(before)

    return change


def half_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    out, weights = sdpa_attention_forward(module, query, key, value * 0.5, mask, **kwargs)
    return out, weights


@contextmanager
def under_autocast(model: Any) -> Iterator[dict[str, Any]]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield {}


@contextmanager
def less_precise(model: Any) -> Iterator[dict[str, Any]]:
    torch.set_float32_matmul_precision("medium")
    yield {}
    torch.set_float32_matmul_precision("highest")


@contextmanager
def in_training(model: Any) -> Iterator[dict[str, Any]]:
    model.model.layers[1].train()
    yield {}
    model.eval()


@contextmanager
def steered(model: Any) -> Iterator[dict[str, Any]]:
    def add(module: Any, args: Any, output: Any) -> Any:
        return output + 0.5

    hook = model.model.layers[0].mlp.register_forward_hook(add)
    yield {}
    hook.remove()


@contextmanager
def replaced(model: Any) -> Iterator[dict[str, Any]]:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda hidden: before(hidden) * 0.5
    yield {}
    del mlp.forward


@contextmanager
def replaced_as_a_whole(model: Any) -> Iterator[dict[str, Any]]:
    before = model.forward

    @functools.wraps(before)
    def rolled(input_ids: Any, inputs_embeds: Any = None, **words: Any) -> Any:
        return before(inputs_embeds=model.get_input_embeddings()(input_ids).roll(1, -1), **words)

    model.forward = rolled
    yield {}
    del model.forward


@contextmanager
def given_other_inputs(model: Any) -> Iterator[dict[str, Any]]:
    before = model.prepare_inputs_for_generation

    def shifted(input_ids: Any, **kwargs: Any) -> Any:
        inputs = before(input_ids, **kwargs)
        return inputs | {"input_ids": (inputs["input_ids"] + 1) % 512}

    model.prepare_inputs_for_generation = shifted
    yield {}
    del model.prepare_inputs_for_generation


@contextmanager
def replaced_in_the_class(model: Any) -> Iterator[dict[str, Any]]:
    kind = type(model.model.layers[0].mlp)
    before = kind.forward
    kind.forward = lambda self, hidden: before(self, hidden) * 0.5
    try:
        yield {}
    finally:
        kind.forward = before


def asked(**options: Any) -> Change:
    return lambda model: nullcontext(options)


@contextmanager
def another_adapter(model: Any) -> Iterator[dict[str, Any]]:
    layer = model.model.layers[0].self_attn.k_proj
    layer.active_adapter = []
    yield {}
    layer.active_adapter = ["poet"]


@contextmanager
def virtual_tokens(model: Any) -> Iterator[dict[str, Any]]:
    model.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}
    yield {}
    del model.peft_config


def pretending(owner: Any, name: str, value: Any) -> Change:
    @contextmanager
    def change(model: Any) -> Iterator[dict[str, Any]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            yield {}

    return change


@contextmanager
def quantized(model: Any) -> Iterator[dict[str, Any]]:
    model.config.quantization_config = {"bits": 4}
    yield {}
    del model.config.quantization_config


@contextmanager
def with_a_cache_of_autocast(model: Any) -> Iterator[dict[str, Any]]:
    past: Any = DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(prompt()[:, :40], **{CACHE: past})
    for layer in past.layers:
        layer.keys, layer.values = layer.keys.float(), layer.values.float()
    yield {CACHE: past}


def bias(model: Any) -> None:
    model.model.embed_tokens.weight.data[:, 3] += 0.5


TRANSFORMERS = identity_of.__globals__["transformers"]
"""As the adapter has imported it. transformers imports itself once more (processing_utils does so), and what stands in
sys.modules from then on is another module."""

CASES: dict[str, list[tuple[str, Change]]] = {
    "shape and type of KV": [],
    "weights": [
        ("llama", weight_edit(lambda weight: weight[:, 7].mul_(1.5))),
        ("llama", weight_edit(lambda weight: weight[3, 5].add_(1e-3))),
        ("llama", weight_edit(lambda weight: weight.copy_(weight.flip(0)))),
        ("llama", weight_edit(lambda weight: weight.copy_(weight.flip(1)), "model.layers.2.mlp.down_proj.weight")),
        ("llama", weight_edit(lambda weight: weight[9].zero_(), "model.embed_tokens.weight")),
        ("llama", weight_edit(lambda weight: weight.mul_(1.01), "model.norm.weight")),
        ("llama", stepped),
    ],
    "weights that change while a prompt is computed": [],
    "settings of modules and configuration": [
        ("llama", attribute("scaling", 0.5)),
        ("llama", attribute("variance_epsilon", 1e-2, "model.layers.0.input_layernorm")),
        ("llama", attribute("act_fn", nn.ReLU().eval(), "model.layers.0.mlp")),
    ],
    "rotary positions": [("llama", stretched), ("llama", attribute("attention_scaling", 1.5, "model.rotary_emb"))],
    "rotary positions by the prompt's length": [],
    "windows of attention": [("mistral", another_window)],
    "attention implementation": [("llama", implementation("eager")), ("llama", implementation("half"))],
    "autocast": [("llama", under_autocast)],
    "precision of products": [("llama", less_precise)],
    "training mode": [("llama", in_training)],
    "quantization": [("llama", quantized)],
    "adapters": [("adapted", another_adapter)],
    "virtual tokens": [("llama", virtual_tokens)],
    "hooks and replaced forward methods": [
        ("llama", steered),
        ("llama", replaced),
        ("llama", replaced_as_a_whole),
        ("llama", replaced_in_the_class),
        ("llama", given_other_inputs),
    ],
    "input beside tokens": [
        ("llama", asked(inputs_embeds=torch.zeros(1, 70, 64))),
        ("llama", asked(position_ids=torch.arange(1, 71)[None])),
        ("llama", asked(token_type_ids=torch.ones(1, 70, dtype=torch.long))),
        ("llama", asked(adapter_names=["poet"])),
        ("llama", asked(images=["a picture"])),
    ],
    "holes in the attention mask": [
        ("llama", asked(attention_mask=torch.ones(1, 70, dtype=torch.long).index_fill(1, torch.tensor([20]), 0)))
    ],
    "padding": [],
    "a cache that the caller brings": [],
    "how the engine keeps KV": [("llama", asked(cache_implementation="static"))],
    "results of all positions": [
        ("llama", asked(output_hidden_states=True, return_dict_in_generate=True)),
        ("llama", asked(output_attentions=True, return_dict_in_generate=True)),
    ],
    "state of earlier prompts": [],
    "several devices": [],
    "kind of device": [],
    "version of the engine and the model's code": [("llama", pretending(TRANSFORMERS, "__version__", "9.9.9"))],
    "other prompts in the batch, and where a prompt is cut": [],
}
"""By the name of a dependence: a model's kind and a change. Those without one have a test of their own."""


def made(kind: str) -> Any:
    return adapted(["poet"]) if kind == "adapted" else tiny(kind)


@pytest.fixture(autouse=True)
def attention_of_an_application() -> Iterator[None]:
    AttentionInterface.register("half", half_attention)
    transformers.AttentionMaskInterface.register("half", transformers.masking_utils.sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop("half")
    transformers.AttentionMaskInterface._global_mapping.pop("half")


def is_refused(model: Any, cached: CachedModel, ids: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether it is, at open or when it is asked."""
    try:
        layout_of(model, "tiny")
    except LayoutError:
        return True
    with pytest.raises(ValueError, match=r"cannot be cached|must be on the left"):
        answer(cached, ids, **options)
    return True


@pytest.mark.parametrize("dependence", DEPENDENCES, ids=NAMES)
def test_each_dependence_is_treated_as_the_list_says(dependence: Dependence) -> None:
    how = dependence.transformers.how
    for kind, change in CASES[dependence.name]:
        model, ids, backend = made(kind), prompt(), FakeBackend()
        cached = cached_over(model, backend)
        before, own = answer(model, ids), identity_of(model)
        assert answer(cached, ids) == before
        written = len(backend.written)
        with change(model) as options:
            if how == "refused":
                assert is_refused(model, cached, ids, options)
                continue
            for loaded in (0, 64) if how == "in the key" else (0, 0) if how == "not stored" else (64, 64):
                assert answer(cached, ids, **options) == answer(model, ids, **options)
                assert cached.last_loaded == loaded
            assert (identity_of(model) != own) == (how == "in the key")
            assert (len(backend.written) > written) == (how == "in the key")
        assert identity_of(model) == own
        assert answer(cached, ids) == before
        assert cached.last_loaded == 64, "what was stored first is found again"


def test_the_list_has_an_answer_of_each_adapter_and_a_case_or_a_test_of_its_own_here() -> None:
    assert list(CASES) == NAMES
    assert len(set(NAMES)) == len(NAMES)
    for each in DEPENDENCES:
        for adapter in ADAPTERS:
            found = getattr(each, adapter)
            assert found.how in WORDS
            assert found.what
        assert each.transformers.how != "open", each.name
        walked = each.transformers.proof.endswith(test_each_dependence_is_treated_as_the_list_says.__name__)
        assert walked == bool(CASES[each.name]), each.name
        assert each.transformers.proof


def test_each_proof_that_the_list_names_is_there() -> None:
    proofs = {getattr(each, adapter).proof for each in DEPENDENCES for adapter in ADAPTERS} - {""}
    for proof in proofs:
        path, _, name = proof.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), proof


def test_the_documentation_has_the_list() -> None:
    assert "\n".join(table()) in (ROOT / "docs/engines.md").read_text()


# -- what has a test of its own --------------------------------------------------------------------------------------


def test_an_engine_whose_layout_is_of_another_shape_is_refused() -> None:
    layout = layout_of(tiny("llama"), "tiny")
    for other in ({"layers": 2}, {"kv_heads": 1}, {"dtype": "bf16"}):
        facts: Any = {name: getattr(layout, name) for name in ("layers", "kv_heads", "head_dim", "dtype")} | other
        with pytest.raises(LayoutError, match="the engine's layout is"):
            CachedModel(tiny("llama"), CacheEngine(Config(chunk_size=CHUNK), ChunkLayout(**facts), FakeBackend()))


def test_a_layout_that_the_caller_made_tells_weights_apart_too() -> None:
    model, backend, ids = tiny("llama"), FakeBackend(), prompt()
    layout = ChunkLayout(3, 2, 16, "fp32", model="mine")
    cached = CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout, backend))
    answer(cached, ids)
    bias(model)
    assert answer(cached, ids) == answer(model, ids)
    assert cached.last_loaded == 0
    assert re.fullmatch(r"mine\+[0-9a-f]{16}", cached.engine.layout.model)


def test_another_process_with_the_weights_that_training_made_finds_what_training_stored() -> None:
    model, backend, ids = tiny("llama"), FakeBackend(), prompt()
    cached = cached_over(model, backend)
    bias(model)
    answer(cached, ids)
    other = tiny("llama")
    other.load_state_dict(model.state_dict())
    fresh = cached_over(other, backend)
    assert answer(fresh, ids) == answer(model, ids)
    assert fresh.last_loaded == 64


def test_states_of_linear_attention_are_of_the_weights_too() -> None:
    if not hasattr(transformers.cache_utils, "LinearAttentionLayer"):
        pytest.skip("this transformers keeps states in caches of the models' own, which are refused")
    model, backend, ids = tiny("lfm2"), FakeBackend(), prompt()
    cached = cached_over(model, backend)
    answer(cached, ids)
    bias(model)
    for loaded in (0, 64):
        assert answer(cached, ids) == answer(model, ids)
        assert cached.last_loaded == loaded


def test_a_prompt_whose_weights_change_while_it_is_computed_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        """Writes weights when the first token comes, as a thread of a trainer might."""

        def put(self, value: torch.Tensor) -> None:
            bias(model)

        def end(self) -> None: ...

    model, backend, ids = tiny("llama"), FakeBackend(), prompt()
    cached = cached_over(model, backend)
    answer(cached, ids, streamer=Trainer())
    assert backend.written == []
    assert "changed while it was computed (said once)" in caplog.text
    assert answer(cached, ids) == answer(model, ids)
    assert len(backend.written) == 4


def test_a_cache_from_elsewhere_is_used_and_what_follows_it_is_not_stored() -> None:
    model, backend, ids = tiny("llama"), FakeBackend(), prompt()
    cached = cached_over(model, backend)
    for _ in range(2):
        with with_a_cache_of_autocast(model) as options, with_a_cache_of_autocast(model) as again:
            assert answer(cached, ids, **options) == answer(model, ids, **again)
    assert (cached.last_loaded, backend.written) == (0, [])


@pytest.mark.parametrize("how", ["weights", "autocast", "other tokens"])
def test_a_cache_that_generate_gave_back_is_not_stored_from_when_something_else_has_taken_part(how: str) -> None:
    model, backend, ids = tiny("llama"), FakeBackend(), prompt()
    cached = cached_over(model, backend)
    always: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    first: Any = cached.generate(ids, return_dict_in_generate=True, **always)
    longer = torch.cat([first.sequences, prompt(40, 1)], dim=1)
    if how == "weights":
        bias(model)
    elif how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer(cached, longer[:, :90], **{CACHE: first[CACHE]})
    else:
        longer[0, 3] = 5
    backend.written.clear()
    answer(cached, longer, **{CACHE: first[CACHE]})
    assert backend.written == []
    assert answer(cached, longer) == answer(model, longer)


def test_hidden_states_and_attentions_are_of_all_positions() -> None:
    model, ids = tiny("llama"), prompt()
    cached = cached_over(model, FakeBackend())
    answer(cached, ids)
    asked: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    result: Any = cached.generate(ids, max_new_tokens=2, pad_token_id=0, **asked)
    assert result.hidden_states[0][0].shape[1] == 70
    model.generation_config.output_hidden_states = True
    result = cached.generate(ids, max_new_tokens=2, pad_token_id=0, return_dict_in_generate=True)
    assert result.hidden_states[0][0].shape[1] == 70


def test_each_reason_to_do_without_the_store_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny("llama"), prompt()
    cached = cached_over(model, FakeBackend())
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer(cached, ids)
        answer(cached, ids, output_hidden_states=True)
    lines = [record.getMessage() for record in caplog.records if "neither loads nor stores" in record.getMessage()]
    assert len(lines) == 2
    assert "torch.autocast is on for cpu (said once)" in lines[0]
    assert "output_hidden_states" in lines[1]


def test_a_model_that_is_opened_in_training_or_under_autocast_is_looked_at_as_it_will_be_served() -> None:
    model: Any = tiny("llama")
    expected = layout_of(model, "tiny")
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layout_of(model, "tiny") == expected
    assert all(module.training for module in model.modules())
    model.config.layer_types = ["chunked_attention"] * 3
    model.config.attention_chunk_size = 32
    with pytest.raises(LayoutError, match="chunked_attention"):
        layout_of(model, "tiny")


def test_a_change_that_makes_the_model_one_that_is_refused_is_refused_when_it_is_asked() -> None:
    model, ids = tiny("llama"), prompt()
    cached = cached_over(model, FakeBackend())
    answer(cached, ids)
    model.config.is_encoder_decoder = True
    with pytest.raises(LayoutError, match="encoder-decoder"):
        answer(cached, ids)


def test_offloaded_weights_are_refused() -> None:
    model: Any = tiny("llama")
    layout = layout_of(model, "tiny")
    model.model.layers[1].to("meta")
    with pytest.raises(LayoutError, match="its weights are on cpu, meta"):
        CachedModel(model, CacheEngine(Config(chunk_size=CHUNK), layout, FakeBackend()))


def test_another_kind_of_device_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    own = identity_of(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert identity_of(model) != own


def test_a_batch_and_a_cut_change_kv_by_rounding_alone() -> None:
    model, backend = tiny("llama"), FakeBackend()
    rows = torch.cat([prompt(), prompt(70, 1), prompt(70, 2)])
    answer(cached_over(model, backend), rows)
    for seed in (0, 1, 2):
        alone = cached_over(model, backend)
        options: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
        plain: Any = model
        expected = plain.generate(prompt(70, seed), pad_token_id=0, **options).logits[0]
        assert (alone.generate(prompt(70, seed), pad_token_id=0, **options).logits[0] - expected).abs().max() < 1e-4
        assert alone.last_loaded == 64


# -- vLLM's door -----------------------------------------------------------------------------------------------------

VLLM: dict[str, dict[str, Any]] = {
    "weights": {"model": {"revision": "v2"}},
    "settings of modules and configuration": {"model": {"hf_overrides": {"rms_norm_eps": 1e-3}}},
    "rotary positions": {"model": {"hf_overrides": {"rope_theta": 1}}},
    "windows of attention": {"model": {"hf_overrides": {"sliding_window": 128}}},
    "quantization": {"model": {"quantization": "fp8", "hf_config": SimpleNamespace()}},
    "how the engine keeps KV": {"cache_dtype": "fp8_e4m3"},
    "several devices": {"parallel": {"tensor_parallel_size": 2}},
}


@pytest.mark.parametrize("name", VLLM)
def test_what_vllms_configuration_says_of_it_is_in_vllms_keys(name: str) -> None:
    plain, other = (groups_of(made, caches(), Config(), 0)[0].layout for made in (engine(), engine(**VLLM[name])))
    assert plain != other
    assert next(each.vllm.how for each in DEPENDENCES if each.name == name) in ("in the key", "by name")


def test_errors_of_the_door_are_kvredis_own() -> None:
    assert issubclass(LayoutError, KVRedisError)
    with pytest.raises(LayoutError):
        layout_of(changed(is_encoder_decoder=True), "org/tiny")
