"""Whole engines of SGLang on the CPU with kvredis below their hierarchical cache; run by test_sglang_engine.py.

A line of JSON on stdin is a request, a line of JSON on the first stdout its answer. SGLang is imported once: each
engine, and each process of an engine, is a fork of this one, and knows nothing of the engines before it.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}

import transformers.utils  # noqa: E402  # before the stand-ins: it asks whether torchvision is there

from tests.compat.sglang import stand_ins  # noqa: E402

stand_ins.install()
import torch  # noqa: E402
from sglang.srt.entrypoints.engine import Engine  # noqa: E402
from sglang.srt.models import registry  # noqa: E402, F401  # all models, which each engine would import
from sglang.srt.utils import kill_itself_when_parent_died  # noqa: E402

stand_ins.replace()

FORK = multiprocessing.get_context("fork")
FLUSHED_S, STEP_S = 30.0, 0.02
OPTIONS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "intel_amx", "sampling_backend": "pytorch", "grammar_backend": "none",
    "skip_tokenizer_init": True, "dtype": "bfloat16", "disable_cuda_graph": True, "disable_overlap_schedule": True,
    "max_total_tokens": 4096, "context_length": 2048, "max_running_requests": 4, "mem_fraction_static": 0.2,
    "page_size": 16, "random_seed": 7, "served_model_name": "tiny", "log_level": "info", "watchdog_timeout": 120,
    "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct", "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip
EXTRA: dict[str, Any] = {
    "backend_name": "kvredis", "module_path": "kvredis.adapters.sglang", "class_name": "KVRedisHiCache",
    "interface_v1": 1, "prefetch_threshold": 16,
}  # fmt: skip
FACTS = ("cached_tokens", "cached_tokens_details", "spec_accept_length", "spec_verify_ct")
"""Of an answer's meta_info, beside its log-probabilities."""


def checkpoint(folder: Path, config: dict[str, Any], seed: int) -> str:
    """Write a model of random weights in the place of the one that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(**config)
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(made, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


class Serving:
    """An engine, in a process of its own."""

    def __init__(
        self,
        folder: str,
        config: dict[str, Any],
        extra: dict[str, Any],
        seed: int = 1,
        draft_seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        given = OPTIONS | (options or {})
        given["model_path"] = checkpoint(Path(folder) / "model", config, seed)
        if draft_seed is not None:
            given["speculative_draft_model_path"] = checkpoint(Path(folder) / "draft", config, draft_seed)
        if (ranks := given.get("tp_size", 1)) > 1:
            processors = cycle(sorted(os.sched_getaffinity(0)))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(next(processors)) for _ in range(ranks))
        given["hicache_storage_backend_extra_config"] = json.dumps(EXTRA | extra)
        self._engine = Engine(**given)

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """What the engine says behind a prompt, how likely the first few tokens are each time, and what it says of
        where the prompt came from."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        told = self._engine.generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=4
        )
        meta = told["meta_info"]
        likely = [[(token, logprob) for logprob, token, _ in each] for each in meta["output_top_logprobs"]]
        return {"tokens": told["output_ids"], "likely": likely} | {name: meta.get(name) for name in FACTS}

    def flush(self) -> dict[str, Any]:
        """Have the engine forget its own cache, which it does once all of it has been stored."""
        until = time.monotonic() + FLUSHED_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > until:
                raise TimeoutError("SGLang does not flush its cache")
            time.sleep(STEP_S)
        return {}

    def close(self) -> dict[str, Any]:
        """End the engine."""
        self._engine.shutdown()
        return {}


def serve(requests: Connection) -> None:
    """Open an engine, and answer requests to it until it is closed."""
    kill_itself_when_parent_died()
    ANSWERS.close()
    serving: Serving | None = None
    is_open = True
    while is_open:
        request = requests.recv()
        do = request.pop("do")
        try:
            if serving is None:
                serving, answer = Serving(**request), {}
            else:
                answer = getattr(serving, do)(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"raised": f"{type(error).__name__}: {error}"}
        requests.send(answer)
        is_open = serving is not None and do != "close"
    os._exit(0)


def main() -> None:
    """Answer requests until there are none."""
    engines: dict[str, Connection] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("engine")
        try:
            if request["do"] == "open":
                engines[name], theirs = FORK.Pipe()
                FORK.Process(target=serve, args=(theirs,)).start()
                theirs.close()
            engines[name].send(request)
            answer = engines[name].recv()
        except (EOFError, OSError) as error:
            answer = {"raised": f"the engine has ended: {type(error).__name__}"}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # an engine asks for processes that import all anew
    main()
    os._exit(0)  # its engines end with it
