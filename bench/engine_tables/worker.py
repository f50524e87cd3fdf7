"""One process of `kvredis bench prefill`, `hit-sweep` and `long-prefill`: an engine that serves passes as it is told.

A line of JSON on stdin is a Task, a line on stdout its answer: a Pass, or {"error": text}. The first line is the plan:
shape, columns, chunk_tokens and the (rows, budget) to warm up with; its answer says what computes. What is no error of
ours ends the process, and what it held of an accelerator with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypedDict

from kvredis.backends.shm.arena import wait_locked
from kvredis.bench.core.errors import MissingHits
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.core.shapes import ModelShape
from kvredis.storage.errors import KVRedisError

from .compute import Engine, Spent, compare
from .result import DEVICE, RECOMPUTE
from .subjects import NoCache, OnDevice, Subject, Tiered

if TYPE_CHECKING:
    from kvredis import CacheEngine


class Task(TypedDict):
    """One pass over the prompts of a point."""

    arm: str
    what: str  # for errors
    model: str  # in the keys: which arm, point and repeat
    prompts: int
    tokens: int
    hit_rate: float
    seed: int
    output: int
    budget: int
    rows: int
    engine: dict[str, Any] | None  # the configuration, None where no CacheEngine is behind it
    keep: bool  # the engine stays for the next task, which has it
    checks: list[list[int]]  # of the pass that stored, [] in that one
    full: bool  # every prompt must be a hit


class Pass(TypedDict):
    """What a pass took."""

    seconds: float
    load_seconds: float
    alone_load_seconds: float  # of loads beside which nothing was computed
    alone_hit_tokens: int  # that these brought
    prefill_seconds: float
    decode_seconds: float
    drain_seconds: float
    hit_tokens: int
    computed_tokens: int
    lone_steps: int  # of decoding, and passes, that were not in a graph
    dropped_chunks: int  # by the cache, which counts what it could not keep
    verified_tokens: int
    checks: list[list[int]]


class Worker:
    """The model, and between two tasks the cache that the first has filled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: tuple[Subject, CacheEngine | None] | None = None

    def run(self, task: Task) -> Pass:
        """Serve every prompt of the task. Raises MissingHits, and VerificationError at other bytes than were stored."""
        subject, cache = self._kept or self._opened(task)
        self._kept = None
        try:
            made = list(prompts(PromptPlan(task["tokens"], task["hit_rate"], task["prompts"], task["seed"])))
            spent, checks, verified = Spent(), list[list[int]](), 0
            before = 0 if cache is None else dropped_chunks(cache, task["tokens"])
            batches = groups(made, task["rows"], shared=task["hit_rate"] > 0)
            rows = {len(group) for group in batches}
            self._engine.prepare(rows, task["tokens"], task["output"], task["budget"], self._starts(task))
            for group, following in zip(batches, [*batches[1:], []], strict=True):
                is_head = (
                    task["hit_rate"] > 0 and not checks
                )  # what the others share with it is a hit once it is stored
                known = [] if is_head else following
                checks += self._engine.batch(subject, group, task["output"], task["budget"], spent, known)
                spent.wait_s += self._engine.settle() if is_head else 0.0
            began_s = time.perf_counter()
            self._engine.settle()
            if cache is not None:
                cache.flush()
            least = self._engine.checked_tokens(task["tokens"]) * len(made)
            if task["full"] and spent.hit_tokens < least:
                raise MissingHits(f"{spent.hit_tokens} tokens were hits, of {least} stored")
            if task["checks"]:
                length = self._engine.layout.chunk_tokens
                loaded = [hit // length for hit in spent.hits]
                verified = length * compare(checks, task["checks"], loaded, task["what"])
            dropped = 0 if cache is None else dropped_chunks(cache, task["tokens"]) - before
            if task["keep"]:
                self._kept, cache = (subject, cache), None
        finally:
            self._engine.settle()
            if cache is not None:
                cache.close()  # a disk is written now
        return Pass(
            seconds=spent.seconds,
            load_seconds=spent.load_s,
            alone_load_seconds=spent.alone_load_s,
            alone_hit_tokens=spent.alone_hit_tokens,
            prefill_seconds=spent.prefill_s,
            decode_seconds=spent.decode_s,
            drain_seconds=spent.wait_s + time.perf_counter() - began_s,
            hit_tokens=spent.hit_tokens,
            computed_tokens=spent.computed_tokens,
            lone_steps=spent.lone_steps,
            dropped_chunks=dropped,
            verified_tokens=verified,
            checks=checks,
        )

    def _starts(self, task: Task) -> set[int]:
        """Where passes begin: behind no hit, behind what all prompts share, and behind a hit of all that is stored."""
        tokens, length = task["tokens"], self._engine.layout.chunk_tokens
        shared = round(tokens * task["hit_rate"])
        return {min(hit // length * length, tokens - 1) for hit in (0, shared, tokens)}

    def _opened(self, task: Task) -> tuple[Subject, CacheEngine | None]:
        from kvredis import CacheEngine, Config

        layout = replace(self._engine.layout, model=task["model"])
        if task["arm"] == RECOMPUTE:
            return NoCache(), None
        if task["arm"] == DEVICE:
            return OnDevice(layout), None
        is_gpu = self._engine.device.type == "cuda"
        over = {"prefault": min(os.cpu_count() or 1, 8) if is_gpu else 0, "page_lock": is_gpu}
        cache = CacheEngine(Config.load(env={}, overrides=over | (task["engine"] or {})), layout)
        cache.lookup([1] * self._engine.layout.chunk_tokens)  # connected, as that of a process that has run
        wait_locked()
        return Tiered(cache), cache


def dropped_chunks(cache: CacheEngine, tokens: int) -> int:
    """Chunks of prompts of so many tokens that the cache was given and did not keep, by its own counters: a queue was
    full, there was no room, or a disk was too slow for what came."""
    stats = cache.stats
    left = int(cache.backend.stats().get("spill_dropped", 0)) + stats.dropped_stores + stats.refused_stores
    return left + stats.refused_saves * (tokens // cache.layout.chunk_tokens)


def groups(made: list[list[int]], rows: int, *, shared: bool) -> list[list[list[int]]]:
    """The batches; a head that all prompts share is computed by the first one, which goes alone then."""
    first = 1 if shared and rows > 1 else 0
    rest = made[first:]
    return [*([made[:1]] if first else []), *(rest[at : at + rows] for at in range(0, len(rest), rows))]


def main() -> None:
    """Serve lines until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        told = json.loads(line)
        answer: Any
        try:
            if worker is None:
                _alone()
                engine = Engine(ModelShape(**told["shape"]), told["columns"], told["chunk_tokens"])
                for rows, budget in told["warm_up"]:
                    engine.warm_up(rows, budget)
                worker, answer = Worker(engine), {"device": _device(engine)}
            else:
                answer = worker.run(told)
        except KVRedisError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        answers.write(json.dumps(answer) + "\n")


def first_line(shape: ModelShape, columns: int, chunk_tokens: int, warm_up: list[tuple[int, int]]) -> dict[str, Any]:
    """What a worker is told first."""
    return {"shape": asdict(shape), "columns": columns, "chunk_tokens": chunk_tokens, "warm_up": warm_up}


def _alone() -> None:
    """Two processes, and a tiny model where there is no GPU: threads of its own would only be in each other's way."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def _device(engine: Engine) -> str:
    import torch

    return torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
