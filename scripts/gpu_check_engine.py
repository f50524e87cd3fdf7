"""One vLLM engine of gpu_check.py, in a process that obeys lines: JSON on stdin is a request, on stdout its answer.

It imports vLLM and uses its public API alone (LLM, its engine and collective_rpc), so that the engine may be what vLLM
makes by default: a core in a process of its own, model runner V2, async scheduling, CUDA graphs. Models have random
weights that follow from a seed; each is saved once, as a checkpoint that every process loads.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kvredis.bench.vllm.worker import Ranks

Answer = dict[str, Any]
SETTLE_S = 60.0
RESET_TRIES = 200
TOP = 5
"""Log-probs of so many tokens are told for every token that is generated."""


class Engine:
    """The engine that is open in this process."""

    def __init__(self) -> None:
        from vllm import LLM as LLM  # before it is asked for: that takes as long as opening an engine

        self._llm: Any = None
        self._number = 0

    def open(self, folder: str, config: Answer, options: Answer, connector: Answer | None) -> Answer:
        """Open an engine of the model that `config` describes, and say what vLLM has chosen for it."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        made = saved(Path(folder), config)
        if connector is not None:
            options = options | {"kv_transfer_config": KVTransferConfig(**connector)}
        self._llm = LLM(
            model=str(made), skip_tokenizer_init=True, enable_prefix_caching=True, disable_log_stats=False, **options
        )
        return self._facts()

    def generate(self, prompts: list[list[int]], tokens: int) -> Answer:
        """Complete prompts side by side, greedily: of each its tokens, how many of the prompt were cached, how it
        ended, and for every token the log-probs of the best ones."""
        from vllm import SamplingParams

        engine, answers = self._llm.llm_engine, [Answer() for _ in prompts]
        names: dict[str, int] = {}
        began_s = time.monotonic()
        for place, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=TOP)
            names[self._add(prompt, sampling)] = place
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id.partition("-")[0]
                if name not in names:  # a request that was aborted
                    continue
                place = names[name]
                made = output.outputs[0]
                if made.token_ids and "first_s" not in answers[place]:
                    answers[place]["first_s"] = time.monotonic() - began_s
                if output.finished:
                    best = [{str(token): each.logprob for token, each in step.items()} for step in made.logprobs or ()]
                    answers[place] |= {
                        "tokens": list(made.token_ids),
                        "cached": int(output.num_cached_tokens or 0),
                        "finish": str(made.finish_reason),
                        "logprobs": best,
                    }
        return {"answers": answers, "seconds": time.monotonic() - began_s, "preemptions": self._preemptions()}

    def abort(self, prompt: list[int], after_s: float) -> Answer:
        """Begin a prompt, and abort it after so many seconds."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        name = self._add(prompt, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))
        until_s, answered = time.monotonic() + after_s, False
        if has_core_apart():
            time.sleep(after_s)
        else:
            while time.monotonic() < until_s:
                answered = any(output.outputs[0].token_ids for output in engine.step()) or answered
        engine.abort_request([name])
        return {"answered": answered}

    def settle(self) -> Answer:
        """Wait until all that was computed is stored."""
        if not Ranks(self._llm).settle(SETTLE_S):
            raise RuntimeError(f"not everything was stored within {SETTLE_S:.0f} s")
        return {}

    def reset(self) -> Answer:
        """Empty vLLM's own prefix cache; blocks that a connector still reads are not let go of at once."""
        for _ in range(RESET_TRIES):
            if self._llm.reset_prefix_cache():
                return {}
            time.sleep(0.02)
        raise RuntimeError("vLLM does not empty its prefix cache")

    def sleep(self) -> Answer:
        """Sleep at level 1 and wake up."""
        began_s = time.monotonic()
        try:
            self._llm.sleep(level=1)
        except Exception as error:
            # vLLM compares what is free of the whole GPU, of which another engine may have taken some meanwhile. Its
            # worker sleeps by then, and its executor has not heard of that.
            if "Memory usage increased" not in str(error):
                raise
            self._llm.collective_rpc("wake_up")
        slept_s = time.monotonic()
        self._llm.wake_up()
        return {"sleep_s": slept_s - began_s, "wake_s": time.monotonic() - slept_s}

    def counters(self) -> Answer:
        """Of the worker's half of our connector, all ranks added up."""
        return Ranks(self._llm).counters

    def _add(self, prompt: list[int], sampling: Any) -> str:
        """Hand a request over, and give its name, behind which vLLM may put random digits of its own."""
        self._number += 1
        name = f"check{self._number}"
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def _preemptions(self) -> int:
        return int(sum(each.value for each in self._llm.get_metrics() if each.name == "vllm:num_preemptions"))

    def _facts(self) -> Answer:
        import torch
        import vllm

        config = self._llm.llm_engine.vllm_config
        runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "runner": runner,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "graphs": str(config.compilation_config.cudagraph_mode),
            "core_apart": has_core_apart(),
            "block_size": config.cache_config.block_size,
        }


def has_core_apart() -> bool:
    """Whether the engine's core runs in a process of its own, as it does by default."""
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"


def saved(folder: Path, config: Answer) -> Path:
    """The checkpoint in `folder`, made if it is not there: in a process of its own, since vLLM forks its core from this
    one, and a process that was forked behind parallel work of OpenMP waits for ever in its own."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            told = json.dumps(config)
            subprocess.run([sys.executable, __file__, "--save", str(folder)], input=told, text=True, check=True)
    return folder


def save(folder: Path, config: Answer) -> None:
    """Write a checkpoint of random weights. `embedding_scale` in `config` makes embeddings smaller: Gemma uses one
    matrix twice, and would have it drown everything else."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    scale = config.pop("embedding_scale", 1.0)
    torch.manual_seed(7)
    described: Any = AutoConfig.for_model(config.pop("model_type"), **config)
    made: Any = AutoModelForCausalLM
    weights: Any = made.from_config(described).to(torch.bfloat16)
    if scale != 1.0:
        weights.get_input_embeddings().weight.data.mul_(scale)
    scratch = folder.with_suffix(".scratch")
    weights.save_pretrained(scratch)
    scratch.rename(folder)


def facts(package: str) -> Answer:
    """What computes, and with what; `package` is the engine's."""
    import torch

    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    driver = ""
    with suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.partition("\n")[0].strip()
    return {"devices": names, "driver": driver, package: import_module(package).__version__, "torch": torch.__version__}


def serve(package: str, make: Callable[[], object]) -> None:
    """Have what `make` gives do what lines say until stdin ends; with --facts say what computes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    if sys.argv[1:] == ["--facts"]:
        answers.write(json.dumps(facts(package)) + "\n")
        return
    engine = make()
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = getattr(engine, told.pop("do"))(**told)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        save(Path(sys.argv[2]), json.load(sys.stdin))
    else:
        serve("vllm", Engine)
