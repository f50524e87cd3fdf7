"""vLLM's own engine on the CPU with its OffloadingConnector and a KVRedisTier below; run by test_vllm_tier.py.

A line of JSON on stdin is a request, a line of JSON on the first stdout its answer. Models are tiny and random, made in
the folder given as the first argument where they are not there yet, so that all processes compute with the same.
"""

import gc
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

from kvredis.adapters.vllm.tier import KVRedisTier  # noqa: E402
from tests.compat.vllm.program import YARN, saved, uncollected  # noqa: E402

MODELS = Path(sys.argv[1])
CPU_BYTES = 64 << 20
COMMON = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
GEMMA = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128}
GEMMA |= {"query_pre_attn_scalar": 4}  # attention that picks, or every token is much the same
MLA: dict[str, Any] = {"num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None}
MLA |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4}
MLA |= {"n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1}
MLA |= {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "rope_scaling": YARN}


def model_folder(kind: str) -> str:
    """The folder of a model, made if need be."""
    if kind == "qwen3-next":
        return str(saved(kind))
    folder = MODELS / kind
    if not folder.is_dir():
        transformers: Any = importlib.import_module("transformers")
        torch.manual_seed(0)
        if kind == "llama":
            config: Any = transformers.LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, head_dim=64, **COMMON)
        elif kind == "gemma3":
            layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
            config = transformers.Gemma3TextConfig(**COMMON, **GEMMA, layer_types=layers)
        else:
            config = transformers.DeepseekV2Config(**COMMON, **MLA)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        if kind == "gemma3":  # it scales embeddings up: without this the last token alone decides what comes next
            model.get_input_embeddings().weight.data *= 0.02
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder)
    return str(folder)


TIERS: list[Any] = []
"""Those that vLLM has made; it gives no way to them."""


class SeenTier(KVRedisTier):
    """A tier as it is, which the program can ask afterwards what it did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        TIERS.append(self)


class Engine:
    """An LLM, and the tier that vLLM has made for it."""

    def __init__(self, kind: str, tier: dict[str, Any], engine_id: str) -> None:
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_spec",
            "cpu_bytes_to_use": CPU_BYTES,
            "secondary_tiers": [{"type": "SeenTier", "module_path": "program", "enable_kv_events": True, **tier}],
        }
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id=engine_id,
            kv_connector_extra_config=extra,
        )
        self._region = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
        with uncollected():
            self.llm = LLM(
                model=model_folder(kind),
                skip_tokenizer_init=True,
                dtype="bfloat16"
                if kind in ("gemma3", "qwen3-next")
                else "float32",  # which computes the same with others beside it
                attention_backend="CPU_MLA" if kind == "mla" else None,  # a processor's AMX would take one for bfloat16
                enforce_eager=True,
                max_model_len=2048,
                block_size=16 if kind == "mla" else 32,
                max_num_batched_tokens=2048,
                max_num_seqs=4,
                num_gpu_blocks_override=512,
                disable_log_stats=False,
                kv_transfer_config=transfer,
            )
        self._region = next(Path("/dev/shm").glob(f"vllm_offload_{engine_id}*.mmap"), self._region)
        self.tier: Any = TIERS.pop()

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Generate greedily for prompts that come together."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def settle(self) -> dict[str, Any]:
        """Let what was computed reach the server: vLLM hands a step's blocks on in the next one."""
        self.generate([[5, 6, 7]], 2)
        self.tier.drain_jobs()
        self.generate([[5, 6, 7]], 2)
        return self.told()

    def told(self) -> dict[str, Any]:
        """The tier's counters, and the metrics that vLLM would show."""
        metrics = [each.name for each in self.llm.get_metrics() if "kvredis" in each.name]
        block_tokens = self.llm.llm_engine.vllm_config.cache_config.block_size
        return {"stats": self.tier._store.stats(), "metrics": metrics, "block_tokens": block_tokens}

    def close(self) -> dict[str, Any]:
        """End the engine and what it leaves in /dev/shm."""
        TIERS.clear()
        with uncollected():
            self.llm.llm_engine.engine_core.shutdown()
        self._region.unlink(missing_ok=True)
        return {"threads": [each.name for each in threading.enumerate() if "kvredis" in each.name]}


def main() -> None:
    """Answer requests until there are none."""
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["program"] = sys.modules["__main__"]
    engine: Engine | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer: dict[str, Any] = {}
            if do == "open":
                engine = Engine(**request)
            elif do == "close":
                assert engine is not None
                answer = engine.close()
                engine = None
                gc.collect()
            else:
                answer = getattr(engine, do)(**request)
        except Exception as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
            import traceback

            traceback.print_exc()
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    main()
