"""What vLLM's objects mean here: its configuration, its groups of layers, its requests, its loggers.

They are read by their attributes, as kv_layout.py reads specs, so that tests can hand in their like without vLLM.
"""

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from kvredis.adapters.engine.layout import ChunkLayout
from kvredis.backends.config.schema import KEYS, Config
from kvredis.storage.errors import ConfigError

from .kv_layout import LayerGroup, is_recurrent, layer_groups
from .request import Prompt
from .stored_events import PLAIN, Origin

logger = logging.getLogger(__name__)

ENTRY_NAMES = {"kvredis_bandwidth_gb_s": "bandwidth_gb_s"}
"""Entries of kv_connector_extra_config that stand for keys, as in LMCache's extra_config."""
HANDED_OVER = "kvredis_chunk"
"""The entry of kv_transfer_params that names what a prefill engine has stored."""
SCHEDULER_MEMORY_GIB = 0.0625
"""A scheduler apart from its workers asks questions only."""


def configured(extra: Mapping[str, Any], *, questions_only: bool = False) -> Config:
    """LMCACHE_CONFIG_FILE and LMCACHE_*, under kv_connector_extra_config: keys as they are, or behind `lmcache.`, as
    LMCache has them. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for entry, value in extra.items():
        name = entry.removeprefix("lmcache.")
        name = ENTRY_NAMES.get(name, name)
        if name in KEYS:
            overrides[name] = value
        else:
            logger.warning("kv_connector_extra_config.%s has no meaning here", entry)
    if questions_only:
        overrides |= {"local_cpu": False, "local_disk": None, "max_local_cpu_size": SCHEDULER_MEMORY_GIB}
    return Config.load(overrides=overrides)


def groups_of(vllm_config: Any, kv_cache_config: Any, config: Config, rank: int) -> list[LayerGroup]:
    """The layers whose KV is stored, with chunks made of whole pages of each: as the tensor-parallel rank of a number
    has them, and of a pipeline one stage. Raises ConfigError for ways to spread a model over devices that are not known
    here, and for pictures without names; LayoutError for layers that cannot be stored."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (value := getattr(parallel, name, 1)) != 1:
            text = (
                "its ranks take turns with a prompt's tokens, and KVRedisConnector has no chunks of that: leave it at 1"
            )
            raise ConfigError(name, str(value), "vLLM", f"{text}; tensor and pipeline parallelism are served")
    pages = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    if any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        chunk = math.lcm(*pages)  # vLLM keeps states behind a prompt's last whole block: a longer chunk would miss it
    else:
        chunk = math.lcm(config.chunk_size, *pages)
    if chunk != config.chunk_size:
        text = "chunk_size %d is not made of whole blocks of %s tokens: %d is used"
        logger.warning(text, config.chunk_size, " and ".join(map(str, sorted(set(pages)))), chunk)
    name = str(model.model) if not model.revision else f"{model.model}@{model.revision}"
    overrides = getattr(model, "hf_overrides", None)
    if overrides:  # other rotary positions, other KV
        name += "+" + _digits(overrides)
    name += _stretched(model) + _quantized(model)
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None and (facts := _looks(multimodal, vllm_config.cache_config)):
        name += "+mm" + _digits(facts)
    world = int(parallel.tensor_parallel_size)
    layout = ChunkLayout(1, 1, 1, "u8", chunk_tokens=chunk, model=name, rank=rank, world_size=world)
    is_stage = int(getattr(parallel, "pipeline_parallel_size", 1)) > 1
    dtype = str(vllm_config.cache_config.cache_dtype)
    return layer_groups(kv_cache_config.kv_cache_groups, layout, dtype, is_stage=is_stage)


def _stretched(model: Any) -> str:
    """Which of LongRoPE's two sets of factors turns all keys, "" for other positions. vLLM does not choose by a prompt,
    but by the length of the longest it may be asked for, which is no part of the model."""
    rotary = getattr(getattr(model, "hf_text_config", None), "rope_parameters", None) or {}
    for each in (rotary, *rotary.values()):  # some models have one for each kind of layer
        if isinstance(each, Mapping) and each.get("rope_type") == "longrope":
            return "+long" if model.max_model_len > each["original_max_position_embeddings"] else "+short"
    return ""


def _quantized(model: Any) -> str:
    """What stands for weights that are quantized when they are loaded, "" for those that are as their checkpoint has
    them."""
    method = getattr(model, "quantization", None)
    if method is None or getattr(getattr(model, "hf_config", None), "quantization_config", None) is not None:
        return ""
    return "+" + _digits([method, getattr(model, "quantization_config", None)])


def _looks(multimodal: Any, cache: Any) -> dict[str, Any]:
    """What an engine does to all pictures beside what is usual. vLLM's hashes of pictures leave that out.

    Raises ConfigError where there are no hashes: unless prefix caching or the cache of its processor needs them, vLLM
    numbers the pictures of each process from 1, and what a request says of its own goes into a hash with the number.
    """
    cache_gb = getattr(multimodal, "mm_processor_cache_gb", None)
    if cache_gb == 0 and not cache.enable_prefix_caching and not getattr(multimodal, "language_model_only", False):
        text = "without this cache and without prefix caching vLLM does not hash images, and no key can tell them apart"
        raise ConfigError("mm_processor_cache_gb", cache_gb, "vLLM", text)
    facts = {"mm_processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None)}
    if rate := getattr(multimodal, "video_pruning_rate", None):
        facts["video_pruning"] = [rate, getattr(multimodal, "video_pruning_method", None)]
    return {name: value for name, value in facts.items() if value}


def _digits(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=lambda made: getattr(made, "__qualname__", repr(made)))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def prompt_of(request: Any, *, generated: bool) -> Prompt | None:
    """A vLLM request as Scheduling knows one; None for what tokens do not describe (embeddings as a prompt)."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    extras: list[tuple[int, Any]] = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        extras.append((0, ["lora", lora.lora_name, lora.lora_path]))
    if getattr(request, "cache_salt", None):
        extras.append((0, ["salt", request.cache_salt]))
    for feature in getattr(request, "mm_features", None) or ():
        extras.append((feature.mm_position.offset, ["mm", feature.identifier, feature.mm_position.offset]))
    origin = _origin_of(request)
    spelled = tuple((position, json.dumps(extra).encode()) for position, extra in extras)
    # The list of all tokens grows beneath its holder: a copy says what there was.
    tokens = list(request.all_token_ids) if generated else request.prompt_token_ids
    transfer = getattr(request, "kv_transfer_params", None) or {}
    from_other = bool(transfer.get("do_remote_prefill"))
    handed_over = str(transfer.get(HANDED_OVER) or "") if from_other else ""
    return Prompt(
        request.request_id,
        tokens,
        spelled,
        request.num_preemptions,
        origin,
        for_others=bool(transfer.get("do_remote_decode")),
        handed_over=handed_over,
        is_promised=from_other and not handed_over,
    )


def _origin_of(request: Any) -> Origin:
    lora = getattr(request, "lora_request", None)
    pictures = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in getattr(request, "mm_features", None) or ()
    ]
    salt, session = getattr(request, "cache_salt", None), getattr(request, "session_id", None)
    if lora is None and not pictures and salt is None and session is None:
        return PLAIN
    adapter = None if lora is None else (lora.lora_int_id, lora.lora_name)
    return Origin(adapter, salt, tuple(pictures), session)


def is_pause() -> bool:
    """Whether vLLM's EngineCore empties caches of its own accord: for `sleep` and `pause`, behind which weights may be
    others or the same. A connector is told so and of a user's reset_prefix_cache by the same call, so that only who
    calls which tells them apart (v1/engine/core.py, _reset_caches, 0.26 to 0.33)."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_reset_caches":
            return True
        frame = frame.f_back
    return False


def log_as_vllm_does() -> None:
    """vLLM gives handlers to its own loggers alone; ours join them, unless the application has set them up."""
    ours, theirs = logging.getLogger("kvredis"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False
