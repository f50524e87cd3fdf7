"""A vLLM engine that does what it is told, for tests to see what comes out with KVRedisConnector and without.

Run by vllm_process.py in an environment that has vLLM; a line of JSON on stdin is a request, a line of JSON on stdout
its answer. Models are tiny, of random weights that follow from a seed, so every process computes the same tokens.
"""

import copy
import faulthandler
import gc
import hashlib
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.compat.vllm import inputs

Answer = dict[str, Any]
COMMON = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": 1024, "rms_norm_eps": 1e-5}
COMMON |= {"initializer_range": 0.2}  # large: what comes out depends on what went in
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707}
"""As DeepSeek-V2 has it. Without it vLLM 0.32 on a CPU turns MLA's keys by a kernel that takes them for contiguous, and
they are not: which rows it turns depends on how many tokens a forward pass has."""
MODELS: dict[str, Answer] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    },
    "gemma": {  # two layers with a sliding window, then one without, twice over
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 4096, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128, "query_pre_attn_scalar": 64, "rope_theta": 10000.0, "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "deepseek": {  # multi-head latent attention
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256,
        "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 3, "max_position_embeddings": 4096, "hidden_act": "silu",
        "rope_theta": 10000.0, "rope_scaling": YARN,
    },
}  # fmt: skip
DELTA_NET = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "hidden_act": "silu",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "tie_word_embeddings": False, "partial_rotary_factor": 0.25,
}  # fmt: skip
MODELS |= {  # most layers recurrent
    "qwen3-next": DELTA_NET | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3.5": DELTA_NET | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "norm_eps": 1e-5, "conv_L_cache": 3,
        "conv_dim": 256, "conv_bias": False, "block_dim": 256, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 64,
        "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip
MODELS["wide"] = MODELS["llama"] | {"num_key_value_heads": 4}
MODELS["latent"] = MODELS["deepseek"] | {"num_attention_heads": 16, "num_key_value_heads": 16}
STRETCHED = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1 + at / 4 for at in range(32)]}
MODELS["phi"] = MODELS["llama"] | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
MODELS["phi"] |= {"rope_scaling": STRETCHED, "original_max_position_embeddings": 1024}
MODELS["idefics"] = inputs.idefics(COMMON | MODELS["llama"])


class Program:
    """The engine that is open, if one is."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._subscriber: Any = None

    def open(self, model: str, variables: dict[str, str], connector: Answer | None, engine: Answer) -> Answer:
        """Open an engine, and say what its connector has made of the model, and vLLM: how many groups of layers it
        has, the tokens of a block, and of all recurrent layers the elements and the bytes of a state."""
        self.close()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
            del os.environ[name]
        os.environ.update(variables)
        options: Answer = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
        options |= {"block_size": 32, "num_gpu_blocks_override": 512, "enable_prefix_caching": False}
        options |= {"dtype": "bfloat16"} | engine
        if "kv_events" in options:
            from vllm.config import KVEventsConfig

            options["kv_events_config"] = KVEventsConfig(**options.pop("kv_events"))
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        with uncollected():
            folder = str(saved(model))
            try:
                self._llm = LLM(model=folder, enforce_eager=True, seed=7, disable_log_stats=False, **options)
            except BaseException:
                clean_up()
                raise
        rest_in_between()
        self._llm.collective_rpc(rest_in_between)
        if options.get("pipeline_parallel_size", 1) > 1:
            self._llm.collective_rpc(make_room_for_a_stage)
        groups = self._of_ranks("groups")[0] if connector is not None else []
        return {"folder": folder, "groups": groups} | self._made_of_the_model()

    def _made_of_the_model(self) -> Answer:
        groups = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        found: Answer = {"kv_groups": len(groups), "block_tokens": 1, "state_elements": 0, "state_bytes": 0}
        for group in groups:
            spec = group.kv_cache_spec
            found["block_tokens"] = math.lcm(found["block_tokens"], spec.block_size)
            for shape, dtype in zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True):
                elements = len(group.layer_names) * math.prod(shape)
                found["state_elements"] += elements
                found["state_bytes"] += elements * dtype.itemsize
        return found

    def state_bytes(self, named: str, config: Answer, ssm_dtype: str) -> Answer:
        """How many bytes of state vLLM gives a layer of a class of models ("module:class") with this configuration."""
        import torch

        module, _, name = named.partition(":")
        of_model: Any = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
        text = SimpleNamespace(**config)
        told: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            model_config=SimpleNamespace(hf_config=text, hf_text_config=text, dtype=torch.bfloat16),
            cache_config=SimpleNamespace(
                mamba_cache_dtype="auto", mamba_ssm_cache_dtype=ssm_dtype, use_replayssm=False
            ),
            num_speculative_tokens=0,
            speculative_config=None,
        )
        shapes, dtypes = (
            of_model.get_mamba_state_shape_from_config(told),
            of_model.get_mamba_state_dtype_from_config(told),
        )
        return {"bytes": sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))}

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        salt: str | None = None,
        pictures: list[int] | None = None,
        adapter: list[Any] | None = None,
        told: Answer | None = None,
    ) -> Answer:
        """Complete prompts side by side, greedily: each with pictures of these seeds, all by one adapter, which is a
        name, a number and a folder, and all `told` something as kv_transfer_params. Of each the tokens, their
        log-probabilities, and how many were cached."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        sampling.extra_args = {"kv_transfer_params": told} if told else None
        more: Answer = {"cache_salt": salt} if salt else {}
        if pictures:
            more["multi_modal_data"] = {"image": [inputs.picture(seed) for seed in pictures]}
        asked = [{"prompt_token_ids": prompt} | more for prompt in prompts]
        lora = LoRARequest(*adapter) if adapter else None
        outputs = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return {
            "outputs": [
                {
                    "tokens": list(each.outputs[0].token_ids),
                    "logprobs": [next(iter(at.values())).logprob for at in each.outputs[0].logprobs],
                    "cached": each.num_cached_tokens,
                }
                for each in outputs
            ]
        }

    def abort(self, prompt: list[int], after_s: float) -> Answer:
        """Begin a prompt, let the engine step for a while, abort it, and run on until nothing is left to do."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        engine.add_request("aborted", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8))
        began_s = time.monotonic()
        while time.monotonic() < began_s + after_s:
            engine.step()
        engine.abort_request(["aborted"])
        core = engine.engine_core.engine_core
        began_s, states = time.monotonic(), [str(each.status) for each in core.scheduler.requests.values()]
        while core.scheduler.has_requests() and time.monotonic() < began_s + 60:
            core.step()
        return {"states": states, "left": len(core.scheduler.requests), "seconds": time.monotonic() - began_s}

    def beside(self, held: list[list[int]], others: list[list[int]], tokens: int = 32) -> Answer:
        """Begin prompts, those `held` first, and step until the others are complete: what became of the held ones by
        then, and the seconds of each step. The held ones are aborted."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for name, prompts in (("held", held), ("other", others)):
            for number, prompt in enumerate(prompts):
                engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, sampling)
        left, seconds = {f"other-{number}" for number in range(len(others))}, []
        while left:
            began_s = time.perf_counter()
            outputs = engine.step()
            seconds.append(time.perf_counter() - began_s)
            left -= {each.request_id for each in outputs if each.finished}
        requests = engine.engine_core.engine_core.scheduler.requests
        states = [str(each.status) for each in requests.values()]
        engine.abort_request([f"held-{number}" for number in range(len(held))])
        while engine.has_unfinished_requests():
            engine.step()
        return {"states": states, "seconds": seconds}

    def stall(self, is_stalled: bool) -> Answer:
        """Let no store read a page until told otherwise."""
        self._of_ranks("stall" if is_stalled else "go on")
        return {}

    def settle(self) -> Answer:
        """Wait until all stores are over, the backend's included."""
        ranks = self._of_ranks("settle")
        return {"settled": all(settled for settled, _ in ranks), "refused": sum(refused for _, refused in ranks)}

    def stats(self) -> Answer:
        """Counters of both halves, those of all ranks added up, and the leases and rooms that are held."""
        ranks = self._of_ranks("stats")
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return {
            "worker": {name: sum(rank[name] for rank in ranks) for name in ranks[0]},
            "ranks": ranks,
            "scheduler": dict(scheduler.connector._scheduling.counters),
            "left": len(scheduler.connector._scheduling._requests),
            "steps": len(scheduler.connector._worth._steps) if scheduler.connector._worth else 0,
            "measured": list(scheduler.connector._shared.break_even._speeds),
            "held": len(scheduler.connector._held or ()),
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "preemptions": sum(
                metric.value for metric in self._llm.get_metrics() if metric.name == "vllm:num_preemptions"
            ),
        }

    def listen(self, endpoint: str) -> Answer:
        """Subscribe to the KV events that are published there; what is published before that is lost."""
        import zmq

        self._subscriber = zmq.Context.instance().socket(zmq.SUB)
        self._subscriber.subscribe(b"")
        connecting = self._subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._subscriber.connect(endpoint)
        connected = bool(connecting.poll(30_000))
        self._subscriber.disable_monitor()
        connecting.close()
        return {"connected": connected}

    def events(self, medium: str, count: int, pause_ms: int = 30_000) -> Answer:
        """Wait for so many events of a medium, or until none has come for so long: each one's type, hashes, parent,
        tokens and group."""
        import msgspec
        from vllm.distributed import kv_events

        kinds = kv_events.BlockStored | kv_events.BlockRemoved | kv_events.AllBlocksCleared
        batches = msgspec.msgpack.Decoder(list[Any])
        found: list[Answer] = []
        while len(found) < count and self._subscriber.poll(pause_ms):
            for raw in batches.decode(self._subscriber.recv_multipart()[-1])[1]:
                event: Any = msgspec.convert(raw, kinds)
                if getattr(event, "medium", None) == medium:
                    parent = getattr(event, "parent_block_hash", None)
                    found.append(
                        {
                            "kind": type(event).__name__,
                            "hashes": [each.hex() if isinstance(each, bytes) else each for each in event.block_hashes],
                            "parent": parent.hex() if isinstance(parent, bytes) else parent,
                            "tokens": getattr(event, "token_ids", None),
                            "group": event.group_idx,
                            "adapter": [getattr(event, "lora_id", None), getattr(event, "lora_name", None)],
                            "extra_keys": getattr(event, "extra_keys", None),
                            "kind of layers": getattr(event, "kv_cache_spec_kind", None),
                            "window": getattr(event, "kv_cache_spec_sliding_window", None),
                        }
                    )
        return {"events": found}

    def save(self, model: str) -> Answer:
        """Make a model, and say where it is."""
        return {"folder": str(saved(model))}

    def adapter(self, folder: str, seed: int) -> Answer:
        """Make an adapter of the model `llama` in a folder that is not there."""
        inputs.save_adapter(Path(folder), seed, MODELS["llama"])
        return {}

    def reset(self, connector: bool = False) -> Answer:
        """Forget vLLM's own prefix cache, and what its connector has."""
        return {"reset": self._llm.reset_prefix_cache(reset_connector=connector)}

    def change(self, how: str) -> Answer:
        """Change the weights in place, in each rank, as training between two requests does: `step` (by torch, as an
        optimizer), `load` (behind torch's back, as vLLM's loaders), `column` (one of one matrix), `keep` what there is
        for later, `back` to that."""
        self._llm.collective_rpc(change_weights, args=(how,))
        return {}

    def identity(self) -> Answer:
        """What the scheduler's keys say of the weights."""
        return {"suffix": self._llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduling.weights.suffix}

    def pause(self) -> Answer:
        """Empty all caches as `sleep` and `pause` do."""
        self._llm.llm_engine.engine_core.engine_core._reset_caches()
        return {}

    def close(self) -> Answer:
        """Close the engine."""
        if self._llm is not None:
            with uncollected():
                self._llm.llm_engine.engine_core.shutdown()
                clean_up()
            self._llm = None
            gc.collect()
        return {}

    def _of_ranks(self, question: str) -> list[Any]:
        """What the worker's half of each rank answers, in its own process where there are several."""
        return list(self._llm.collective_rpc(rank_answer, args=(question,)))


def uncollected() -> AbstractContextManager[Any]:
    """While an engine opens or closes. vLLM looks for garbage eight times then, each time among all that it has
    imported: 2.8 s of the 4.5 in which one engine takes another's place. Who closes an engine looks once."""
    return mock.patch.object(gc, "collect")


def clean_up() -> None:
    """Let go of what an engine leaves in its process, so that the next one makes its own."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def rest_in_between(worker: Any = None) -> None:
    """Asked within each process of an engine. Those that wait for each other yield their processors for a second in a
    loop, and beside that Linux 6.18 lets others on two cores wait as long, or for half a minute: a server, too."""
    import time

    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.001)


def make_room_for_a_stage(worker: Any) -> None:
    """Asked within a worker: make what a stage receives into. vLLM 0.32 makes it in a run for warming up, which its CPU
    worker leaves out for an eager engine."""
    runner = worker.model_runner
    if hasattr(runner.model, "make_empty_intermediate_tensors") and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def rank_answer(worker: Any, question: str) -> Any:
    """Asked within a worker: it names nothing of this file, which workers do not import."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group()
    if question == "groups":
        return [[len(group.names), group.window, group.layout.planes] for group in half._groups]
    if question == "stats":
        return dict(half._worker.mover.stats())
    if question == "stall":
        import threading

        half.going_on = threading.Event()
        half._worker.mover._context.bandwidth.take = lambda *_, **__: half.going_on.wait(60)
        return None
    if question == "go on":
        return half.going_on.set()
    return half._worker.mover.settle(60), half._shared.backend.flush()


def change_weights(worker: Any, how: str) -> None:
    """Asked within a worker, as rank_answer."""
    import torch

    model = worker.get_model()
    with torch.no_grad():
        if how == "keep":
            worker.kept = {name: tensor.clone() for name, tensor in model.named_parameters()}
        for name, tensor in model.named_parameters():
            if how == "step" and tensor.ndim > 1:
                tensor.mul_(-1.25)
            elif how == "load":
                tensor.data.copy_(tensor.data * 0.5)
            elif how == "column" and name.endswith("embed_tokens.weight"):  # a matrix on every processor
                tensor.data[:, 17] += 4
            elif how == "back":
                tensor.data.copy_(worker.kept[name])


def saved(model: str) -> Path:
    """The folder of a model, made if it is not there: the same in every process, since it is in the keys."""
    config: Answer = copy.deepcopy(COMMON | MODELS[model])  # transformers writes into what it is given
    name = f"kvredis-{model}-{hashlib.sha256(json.dumps(config).encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / name
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(7)
    described: Any = AutoConfig.for_model(config.pop("model_type"), **config)
    kind: Any = AutoModelForImageTextToText if model == "idefics" else AutoModelForCausalLM
    weights: Any = kind.from_config(described).to(torch.bfloat16)
    if model == "gemma":  # whose embeddings, made large and used twice, would drown everything else
        weights.get_input_embeddings().weight.data.mul_(0.02)
    scratch = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
    weights.save_pretrained(scratch)
    (inputs.processor() if model == "idefics" else tokenizer()).save_pretrained(scratch)
    try:
        scratch.rename(folder)
    except OSError:  # another process was quicker
        shutil.rmtree(scratch)
    return folder


def tokenizer() -> Any:
    """Bytes and a few words, for who talks to a server in text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet)
    made.train_from_iterator(["blocks are stored and loaded " * 4] * 20, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def main() -> None:
    """Serve requests until stdin ends. What vLLM prints goes to stderr."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(program, request.pop("do"))(**request)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"raised": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    program.close()


if __name__ == "__main__":
    main()
