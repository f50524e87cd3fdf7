"""Everything but tokens that the bits of a position's KV depend on, and what each adapter does about it.

Two positions with equal tokens before them have equal KV only if all of this is equal too. So each of it is in the key,
or refused, or computed without the store, or harmless, which a test proves; or it is told apart by the name that the
operator gives the model, and by nothing else. What is none of these is marked as open.

`tests/adapters/transformers/test_identity.py` walks the list: it makes each change at the transformers adapter, and at
vLLM's where its configuration can be made without vLLM. docs/engines.md shows the list as a table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

How = Literal["in the key", "refused", "not stored", "harmless", "by name", "open"]
WORDS: Final[Mapping[How, str]] = MappingProxyType(
    {
        "in the key": "another of it is another key",
        "refused": "an error that names it, at start or by request",
        "not stored": "computed as without kvredis: nothing is loaded or stored",
        "harmless": "the same KV but for rounding",
        "by name": "told apart by the model's name alone: give other weights another name",
        "open": "not told apart yet: keep such engines on stores of their own",
    }
)
ADAPTERS: Final = ("transformers", "vllm", "sglang", "engine")

_VLLM = "tests/adapters/vllm/test_config.py::"
_VIEWS = "tests/adapters/vllm/test_kv_layout.py::"
_SGLANG = "tests/compat/test_sglang.py::"
_HERE = "tests/adapters/transformers/test_identity.py::"
_WALK = f"{_HERE}test_each_dependence_is_treated_as_the_list_says"
_ARGUMENTS = f"{_SGLANG}test_what_an_engine_with_other_arguments_has_stored_is_not_found"
_POOLS = f"{_SGLANG}test_what_is_stored_under_another_configuration_is_not_found"
_GROUPS = f"{_VIEWS}test_groups_differ_in_their_layouts_and_so_in_their_keys"
_NAMES = f"{_VLLM}test_models_whose_kv_differs_have_names_of_their_own"
_LONGROPE = f"{_VLLM}test_a_model_whose_rotary_factors_depend_on_the_longest_prompt_has_a_name_for_each_set"
_QUANTIZED = f"{_VLLM}test_weights_that_are_quantized_when_they_are_loaded_have_names_of_their_own"
_REQUEST = f"{_VLLM}test_a_request_is_its_tokens_and_whatever_else_its_kv_depends_on"
_SPREAD = f"{_VLLM}test_a_model_that_is_spread_in_an_unknown_way_is_refused_with_the_way_out"
_TURNED = "tests/adapters/transformers/test_support.py::test_longrope_has_keys_for_each_set_of_angles"
_M_ROPE = (
    "tests/adapters/transformers/test_other.py::test_with_m_rope_a_hit_does_not_take_the_positions_of_the_prompt_before"
)
_PADDED = (
    "tests/adapters/transformers/test_kinds.py::test_what_a_batch_stored_serves_a_prompt_alone_and_the_other_way_round"
)
_WEIGHTS = "tests/compat/test_vllm_real.py::"
_RANKS = "tests/adapters/engine/test_keys.py::test_ranks_share_one_chain_and_differ_in_the_readable_part"


class Answer(NamedTuple):
    """What an adapter does about a dependence, in a few words, and which test shows it ("" where by name or open)."""

    how: How
    what: str
    proof: str = ""


class Dependence(NamedTuple):
    """One thing that KV depends on, why, and the answer of each adapter."""

    name: str
    why: str
    transformers: Answer
    vllm: Answer
    sglang: Answer
    engine: Answer


def _walked(how: How, what: str, own: str = "") -> Answer:
    return Answer(how, what, f"{_HERE}{own}" if own else _WALK)


CALLER: Final = Answer("by name", "ChunkLayout.model, which the caller gives; CacheEngine.use_model changes it")
_ONLY_INFERENCE = Answer("harmless", "a server of inference alone never does that")
_ROUNDING = Answer("harmless", "its kernels leave nothing out; they round in other ways, as other batches do")
_VERSION = Answer("open", "no version is in the key: a release that mends a model finds what the one before stored")

DEPENDENCES: Final = (
    Dependence(
        "shape and type of KV",
        "a block of other heads, layers, sizes or types is other bytes",
        _walked(
            "in the key",
            "the layout, checked against the KV of two tokens at open",
            "test_an_engine_whose_layout_is_of_another_shape_is_refused",
        ),
        Answer("in the key", "the layout of each group of layers", _GROUPS),
        Answer(
            "in the key",
            "the pool's class, layout, sizes and every type in it, a Mamba pool's temporal one too",
            "tests/adapters/sglang/test_pools.py::test_every_dtype_that_a_pool_or_what_it_mirrors_has_is_a_fact",
        ),
        Answer(
            "in the key",
            "the layout",
            "tests/adapters/engine/test_keys.py::test_everything_in_the_layout_is_in_the_key",
        ),
    ),
    Dependence(
        "weights",
        "training, a merge or one edited column makes other KV under the same name",
        _walked("in the key", "a checksum of all bytes of parameters and buffers, before each generate()"),
        Answer(
            "in the key",
            "a sum of the weights as loaded, looked at again before each step that moves KV, and behind a reset",
            f"{_WEIGHTS}test_weights_that_change_in_place_between_two_requests_find_nothing_and_find_what_is_theirs_when_"
            "they_are_back",
        ),
        Answer(
            "in the key",
            "a sum of the weights as loaded; `update_weights_*` is heard of, other changes in place are not",
            "tests/adapters/sglang/test_weights.py::test_weights_that_change_are_seen_when_they_are_looked_at_again",
        ),
        CALLER,
    ),
    Dependence(
        "weights that change while a prompt is computed",
        "its KV is of neither",
        _walked(
            "not stored",
            "the checksum is made again before a new prompt is stored",
            "test_a_prompt_whose_weights_change_while_it_is_computed_is_not_stored",
        ),
        Answer(
            "not stored",
            "the step's stores are dropped, and what is computed behind old pages is not stored",
            "tests/adapters/vllm/test_weights.py::test_a_step_is_told_whether_its_keys_are_of_the_weights_that_it_computes_with",
        ),
        Answer(
            "not stored",
            "the store is left alone from the change's begin until SGLang's cache is flushed",
            "tests/adapters/sglang/test_weights.py::test_a_change_is_told_before_it_is_made",
        ),
        CALLER,
    ),
    Dependence(
        "settings of modules and configuration",
        "eps, scaling, windows and activations count as much as weights",
        _walked("in the key", "the configuration and each plain attribute of each module, before each generate()"),
        Answer("in the key", "hf_overrides; the rest is the checkpoint's", _NAMES),
        Answer("in the key", "json_model_override_args; the rest is the checkpoint's", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "rotary positions",
        "another base, scaling or factor turns all keys",
        _walked("in the key", "the configuration and the frequencies, which are a buffer"),
        Answer("in the key", "hf_overrides, and which set of LongRoPE's factors is used", _LONGROPE),
        Answer("in the key", "json_model_override_args", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "rotary positions by the prompt's length",
        "dynamic NTK and LongRoPE give a prefix other keys in a longer prompt",
        Answer(
            "in the key",
            "which of LongRoPE's angles a prompt has; dynamic NTK behind its length is not stored",
            _TURNED,
        ),
        Answer("in the key", "vLLM chooses once, by its longest prompt", _LONGROPE),
        Answer("open", "SGLang gives a batch LongRoPE's long angles where one of its prompts is long"),
        CALLER,
    ),
    Dependence(
        "windows of attention",
        "a token sees more or less of what is before it",
        _walked("in the key", "the configuration, before each generate()"),
        Answer("in the key", "hf_overrides; which layers are in one group", _GROUPS),
        Answer("in the key", "json_model_override_args", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "attention implementation",
        "one leaves out a soft cap or sinks that another has; an application registers its own",
        _walked("in the key", "its name and the function's, before each generate()"),
        _ROUNDING,
        _ROUNDING,
        CALLER,
    ),
    Dependence(
        "autocast",
        "matrices are multiplied in another type than the weights'",
        _walked("not stored", "asked before each generate()"),
        _ONLY_INFERENCE,
        _ONLY_INFERENCE,
        CALLER,
    ),
    Dependence(
        "precision of products",
        "TF32 or bf16 within fp32, sums in fp16: more than rounding",
        _walked("in the key", "torch's settings for the CPU, cuBLAS and cuDNN, before each generate()"),
        Answer("open", "--dtype float32 with TF32 switched on has the keys of float32 without"),
        Answer("in the key", "--enable-tf32-matmul", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "training mode",
        "dropout, noise in routers and skipped layers differ each time",
        _walked("not stored", "asked of each module before each generate()"),
        _ONLY_INFERENCE,
        _ONLY_INFERENCE,
        CALLER,
    ),
    Dependence(
        "quantization",
        "the weights that take part are others than the checkpoint's",
        _walked("in the key", "its configuration, and the bytes of what is quantized"),
        Answer("in the key", "the method and its configuration, where the checkpoint does not say it", _QUANTIZED),
        Answer("in the key", "--quantization", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "adapters",
        "LoRA changes K and V of all layers",
        _walked("in the key", "which are active, their configuration and weights; merged ones by the weights"),
        Answer("in the key", "the adapter's name and path; other weights at one path are told apart by name", _REQUEST),
        Answer("in the key", "SGLang's own name of a page, in releases that put extra_key into it (0.5.23 does)"),
        CALLER,
    ),
    Dependence(
        "virtual tokens",
        "prompt and prefix tuning put KV before each prompt",
        _walked("refused", "at open, for peft's configurations of that kind"),
        Answer("harmless", "vLLM has none"),
        Answer("harmless", "SGLang has none"),
        CALLER,
    ),
    Dependence(
        "hooks and replaced forward methods",
        "an application steers or measures what is between layers",
        _walked("not stored", "unless they are of transformers, accelerate, peft or torch"),
        Answer("open", "vLLM's plugins are not looked at"),
        Answer("in the key", "--forward-hooks; SGLang's plugins are not looked at", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "input beside tokens",
        "embeddings, pictures, positions and names of adapters by row are not in the tokens",
        _walked("refused", "any option that is no token and says nothing of how to generate"),
        Answer("in the key", "pictures by their hash, a tenant's salt; prompts of embeddings are not stored", _REQUEST),
        Answer("in the key", "SGLang puts a picture's hash in place of its tokens"),
        CALLER,
    ),
    Dependence(
        "holes in the attention mask",
        "a token that others do not see is still one of the prompt's",
        _walked("refused", "padding is on the left, by whole tokens"),
        Answer("harmless", "requests have no masks"),
        Answer("harmless", "requests have no masks"),
        CALLER,
    ),
    Dependence(
        "padding",
        "columns are not positions",
        Answer(
            "harmless",
            "a padded prompt's KV is that of the prompt alone; refused where positions are columns",
            _PADDED,
        ),
        Answer("harmless", "requests are not padded"),
        Answer("harmless", "requests are not padded"),
        CALLER,
    ),
    Dependence(
        "a cache that the caller brings",
        "what it holds may be of other weights, of autocast, of other tokens",
        _walked(
            "not stored",
            "unless generate() has given it back and the model is as it was",
            "test_a_cache_from_elsewhere_is_used_and_what_follows_it_is_not_stored",
        ),
        Answer("harmless", "requests bring none"),
        Answer("harmless", "requests bring none"),
        CALLER,
    ),
    Dependence(
        "how the engine keeps KV",
        "a quantized cache holds other numbers",
        _walked("not stored", "cache_implementation and custom_generate keep it in other caches"),
        Answer("in the key", "--kv-cache-dtype", f"{_VIEWS}test_an_fp8_cache_of_the_same_model_has_another_layout"),
        Answer("in the key", "--kv-cache-dtype", _ARGUMENTS),
        CALLER,
    ),
    Dependence(
        "results of all positions",
        "hidden states and attentions of what is loaded are not computed",
        _walked("not stored", "such a call is computed whole, and so is contrastive search"),
        Answer("harmless", "prompt_logprobs are computed: vLLM gives such requests no hit"),
        Answer("open", "logprob_start_len is SGLang's to heed"),
        CALLER,
    ),
    Dependence(
        "state of earlier prompts",
        "M-RoPE's offset of the prompt before moves the next one's positions",
        Answer("harmless", "put right before each prompt", _M_ROPE),
        Answer("harmless", "positions are a request's own"),
        Answer("harmless", "positions are a request's own"),
        CALLER,
    ),
    Dependence(
        "several devices",
        "each rank has its part of the heads or layers",
        _walked(
            "refused",
            "and offloaded weights too",
            "test_offloaded_weights_are_refused",
        ),
        Answer("in the key", "each rank's heads and each stage's layers; context parallelism is refused", _SPREAD),
        Answer("in the key", "rank and size of each kind", _POOLS),
        Answer("in the key", "rank and world_size of the layout", _RANKS),
    ),
    Dependence(
        "kind of device",
        "a CPU's and a GPU's kernels round in other ways",
        _walked(
            "in the key",
            "cpu, cuda, mps",
            "test_another_kind_of_device_has_keys_of_its_own",
        ),
        _ROUNDING,
        _ROUNDING,
        CALLER,
    ),
    Dependence(
        "version of the engine and the model's code",
        "a release mends a model whose results were wrong",
        _walked("in the key", "transformers' version, and the class with the module that it is from"),
        _VERSION,
        _VERSION,
        CALLER,
    ),
    Dependence(
        "other prompts in the batch, and where a prompt is cut",
        "matrices of other sizes are multiplied by other kernels",
        _walked(
            "harmless",
            "rounding; linear attention that goes on otherwise from a state is refused at open",
            "test_a_batch_and_a_cut_change_kv_by_rounding_alone",
        ),
        _ROUNDING,
        _ROUNDING,
        Answer("harmless", "rounding"),
    ),
)
"""In the order in which docs/engines.md has them."""


def table() -> list[str]:
    """The list as lines of a Markdown table, which docs/engines.md has."""
    lines = [
        "| What KV depends on | transformers | vLLM | SGLang | An engine of your own |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in DEPENDENCES:
        cells = [f"**{answer.how}**: {answer.what}" for answer in (each.transformers, each.vllm, each.sglang)]
        lines.append(f"| {each.name}: {each.why} | {' | '.join(cells)} | **{each.engine.how}** |")
    return lines
