"""Which of vLLM's workers a connector belongs to, and what is asked of it that no hook of a connector's gives.

A connector is made and called by its worker, and is not told which it is. The worker has the model, whose weights are
part of what keys stand for, and before 0.33 it alone knows that the KV cache is about to be unmapped.
Interface: vllm/v1/worker/worker_base.py (get_model since 0.9), gpu_worker.py (get_draft_model, sleep, wake_up).
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any


def worker_of(vllm_config: Any) -> Any:
    """The worker in this process that runs the engine of that configuration; None where there is none. Looks at all
    objects of the process once: some 0.1 s."""
    from vllm.v1.worker.worker_base import WorkerBase

    for found in gc.get_objects():
        # By the type itself: isinstance would ask proxies for what they stand for.
        if issubclass(type(found), WorkerBase):
            theirs = getattr(found, "vllm_config", None)
            # A connector that holds several gives each a copy of the configuration, whose parts are the same.
            if theirs is not None and theirs.compilation_config is vllm_config.compilation_config:
                return found
    return None


def models_of(worker: Any) -> list[Any]:
    """The model that a worker runs, and the one that drafts for it; none where there is no worker, or no model yet."""
    if worker is None:
        return []
    found = [getattr(worker, name, lambda: None)() for name in ("get_model", "get_draft_model")]
    return [model for model in found if hasattr(model, "named_modules")]


def call_around_sleep(worker: Any, before: Callable[[], None], behind: Callable[[], None]) -> None:
    """Have `before` called before the worker's memory is unmapped, and `behind` when its KV cache is mapped again, as
    vLLM calls unregister_kv_caches and restore_kv_caches since 0.33."""
    sleep, wake_up = worker.sleep, worker.wake_up

    def sleep_behind(*args: Any, **kwargs: Any) -> Any:
        before()
        return sleep(*args, **kwargs)

    def wake_up_before(tags: Sequence[str] | None = None) -> Any:
        woken = wake_up(tags)
        if tags is None or "kv_cache" in tags:
            behind()
        return woken

    worker.sleep, worker.wake_up = sleep_behind, wake_up_before
