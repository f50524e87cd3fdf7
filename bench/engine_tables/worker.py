"""How does an engine use each cache that `kvredis bench prefill`, `hit-sweep` and `long-prefill` compare? This is one
small enough to read, in a process of its own.

Prompts come in batches of equal length. A batch loads what its cache has of each prompt, as far as all of them have it,
computes the rest in forward passes of `budget` tokens (all rows together), hands the prompts' KV to be stored as soon
as these are launched, and generates greedily. While it generates, what the cache has of the batch after it comes
already, as with an engine that loads for prompts that wait. The model is a Llama of the shape with random weights.

A line of JSON on stdin is a Task, a line on stdout its answer: a Pass, or {"error": text}. The first line is the plan:
shape, columns, chunk_tokens and the (rows, budget) to warm up with; its answer says what computes. What is no error of
ours ends the process, and what it held of an accelerator with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict

from kvredis.adapters.engine.keys import chunk_keys
from kvredis.backends.shm.arena import wait_locked
from kvredis.bench.core.compute import DTYPES, Graphed, Passes, Place, forward_of, llama, steps_of, use_attention
from kvredis.bench.core.errors import MissingHits, VerificationError
from kvredis.bench.core.prompts import PromptPlan, prompts
from kvredis.bench.core.shapes import ModelShape
from kvredis.storage.errors import KVRedisError

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis import CacheEngine, ChunkLayout
    from kvredis.adapters.engine.background import Save

RECOMPUTE, DEVICE, CPU, LANE, REMOTE, DISK = "recompute", "gpu", "cpu", "lane", "remote", "disk"


class Subject(Protocol):
    """A cache under test, for one prompt at a time."""

    def hit(self, tokens: list[int], together: int) -> int:
        """Tokens of the stored prefix, less than all; as many prompts as that are served together."""
        ...

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        """Begin to load up to `stop` into KV of (layers, 2, tokens, kv_heads, head_dim); what it gives waits for the
        end, and tells how many are valid then."""
        ...

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        """Store a prompt's whole chunks; the tensor is its own until the Save is done."""
        ...

    def computed(self, tokens: int, seconds: float) -> None:
        """Hear how long computing took: all of a prompt that was not loaded, or a token of each."""
        ...


class NoCache:
    """The row that others are compared with."""

    def hit(self, tokens: list[int], together: int) -> int:
        return 0

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        return lambda: 0

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        return None

    def computed(self, tokens: int, seconds: float) -> None:
        """As Subject.computed."""


class OnDevice(NoCache):
    """An engine's own cache in the accelerator's memory, which nothing leaves: what a hit is worth at most."""

    def __init__(self, layout: ChunkLayout) -> None:
        self._layout = layout
        self._chunks: dict[bytes, Tensor] = {}

    def hit(self, tokens: list[int], together: int) -> int:
        found = 0
        for chunk in chunk_keys(tokens, self._layout):
            if chunk.key not in self._chunks:
                break
            found = chunk.stop
        return min(found, len(tokens) - 1)

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        from kvredis.adapters.engine.tensors import scatter

        for chunk in chunk_keys(tokens, self._layout):
            if chunk.start < stop:
                scatter(self._chunks[chunk.key], kv, chunk.start, slice(stop - chunk.start))
        return lambda: stop

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        from kvredis.adapters.engine.tensors import gather

        for chunk in chunk_keys(tokens, self._layout):
            if chunk.key not in self._chunks:
                held = self._chunks[chunk.key] = kv.new_empty(self._layout.shape(chunk.stop - chunk.start))
                gather(kv, chunk.start, chunk.stop, held)
        return None


class Tiered:
    """A CacheEngine, whatever is behind it."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine

    def hit(self, tokens: list[int], together: int) -> int:
        """As Subject.hit; with min_retrieve_tokens = auto what is worth loading."""
        return self._engine.plan(tokens, together=together).stop

    def load(self, tokens: list[int], kv: Tensor, stop: int, together: int) -> Callable[[], int]:
        load = self._engine.retrieve_later(tokens, kv, stop=stop, together=together)

        def wait() -> int:
            load.wait()
            if load.refused:  # more prompts are served together than may wait
                return self._engine.retrieve(tokens, kv, stop=stop, together=together)
            return load.tokens

        return wait

    def store(self, tokens: list[int], kv: Tensor) -> Save | None:
        return self._engine.store_later(tokens, kv)

    def computed(self, tokens: int, seconds: float) -> None:
        self._engine.prefill_took(tokens, seconds)


_WEIGHT: Final = 2_654_435_761  # Knuth's: spreads a place's number over all bits
_ROOMS: Final = 2


@dataclass(slots=True)
class Spent:
    """What a pass took so far: seconds on a clock that waits for the accelerator. `load_s` is what loads were waited
    for, `alone_load_s` that of loads for which nothing was computed meanwhile, which were of `alone_hit_tokens`. `hits`
    has the loaded tokens of each prompt, in order; `wait_s` is what batches waited for memory that earlier ones were
    still being stored from; `lone_steps` were launched one by one."""

    load_s: float = 0.0
    alone_load_s: float = 0.0
    alone_hit_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    computed_tokens: int = 0
    lone_steps: int = 0
    hits: list[int] = field(default_factory=list)

    @property
    def hit_tokens(self) -> int:
        """Of all prompts."""
        return sum(self.hits)

    @property
    def seconds(self) -> float:
        """All of it, but the waits."""
        return self.load_s + self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class _Coming:
    """A batch of prompts whose KV is on its way into a room; on a GPU what copies there was given to `stream`."""

    prompts: Sequence[list[int]]
    place: Place
    room: Any
    waits: list[Callable[[], int]]
    stream: Any


class Engine:
    """The model, and memory for batches of up to `columns` tokens a row, prompt and answer."""

    def __init__(self, shape: ModelShape, columns: int, chunk_tokens: int) -> None:
        import torch

        from kvredis import ChunkLayout

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.layout = ChunkLayout(
            shape.layers, shape.kv_heads, shape.head_dim, DTYPES[shape.dtype_bytes], chunk_tokens=chunk_tokens
        )
        self._columns = columns
        self._model = llama(shape, columns, self.device)
        use_attention(self._model)
        self._forward = forward_of(self._model)
        self._rooms: dict[Place, Any] = {}
        self._passes = Passes(self._forward, lambda place, tokens: self._cache(self._rooms[place], tokens), self.device)
        self._steps: dict[tuple[Place, int, int], Graphed] = {}
        self._saves: dict[Place, list[Save]] = {}
        self._turn = 0
        self._coming: _Coming | None = None
        self._weights = torch.zeros(0, dtype=torch.int32, device=self.device)

    def warm_up(self, rows: int, budget: int) -> None:
        """Run a pass and a step of this size: kernels are chosen and loaded."""
        tokens = min(max(2 * budget // rows, 2), self._columns - 2)
        self.batch(NoCache(), [[row + 1] * tokens for row in range(rows)], 2, budget)

    def prepare(
        self, rows: Collection[int], tokens: int, output: int, budget: int = 1, starts: Collection[int] = ()
    ) -> None:
        """Take memory for batches of so many rows, and make their steps, and their passes of `budget` tokens that begin
        behind hits of `starts` tokens: nothing may be on its way then. The next batch is in the first of these memories
        whatever was served before: one may be slower than the other."""
        self.settle()
        self._turn = _ROOMS - 1
        for count in rows:
            for _ in range(_ROOMS):
                place, room = self._room(count)
                self._passes.make(place, starts, tokens, max(budget // count, 1))
                self._steps_of((place, tokens, output - 1), room)

    def batch(
        self,
        subject: Subject,
        prompts: Sequence[list[int]],
        output: int,
        budget: int,
        spent: Spent | None = None,
        following: Sequence[list[int]] = (),
    ) -> list[list[int]]:
        """Serve prompts of equal length together; adds to `spent`, and gives the checksums of each one's KV.

        They are of the whole chunks that leave a token to compute; taking them is not in the time. What the cache has
        of the prompts that are served next, `following`, begins to come while these generate, if that was prepared.
        """
        import torch

        spent = Spent() if spent is None else spent
        asked_s = time.perf_counter()
        coming, self._coming = self._coming, None
        place, room = self._room(len(prompts)) if coming is None else (coming.place, coming.room)
        ids = torch.tensor(prompts, device=self.device)
        total = ids.shape[1]
        kind = place, total, output - 1
        if kind not in self._steps:
            self.settle()  # a store that is under way and a graph that is made would be in each other's way
        spent.wait_s += time.perf_counter() - asked_s
        steps = self._steps_of(kind, room)
        with torch.inference_mode():
            began_s = self._now_s()
            start = self._loaded(subject, prompts, room, coming)
            loaded_s = self._now_s()
            logits, lone_passes = self._passes.run(place, ids, start, max(budget // len(prompts), 1))
            token = logits[:, -1:].argmax(dim=-1)
            # While the GPU computes, as engines do: what is copied comes behind that by itself.
            saves = [subject.store(prompt, room.row(row, 0)) for row, prompt in enumerate(prompts)]
            self._saves[place] = [save for save in saves if save is not None]
            computed_s = self._now_s()
        computed = (total - start) * len(prompts)
        subject.computed(computed, computed_s - loaded_s)
        checks = [self._checksums(room.row(row, 0), total) for row in range(len(prompts))]
        with torch.inference_mode():
            decode_s = self._now_s()
            self._generate(steps, token, lambda stream: self._begin(subject, following, output, stream))
            ended_s = self._now_s()
        if output > 1 and not steps.is_graph:  # else a step tells nothing of what a pass costs
            subject.computed(len(prompts), (ended_s - decode_s) / (output - 1))
        spent.load_s += loaded_s - began_s
        if coming is None:
            spent.alone_load_s += loaded_s - began_s
            spent.alone_hit_tokens += start * len(prompts)
        spent.prefill_s += computed_s - loaded_s
        spent.decode_s += ended_s - decode_s
        spent.hits += [start] * len(prompts)
        spent.computed_tokens += computed
        spent.lone_steps += lone_passes + (0 if steps.is_graph else output - 1)
        return checks

    def settle(self) -> float:
        """Wait until the memory of all batches is our own again, and nothing comes; gives the seconds that it took."""
        began_s = time.perf_counter()
        if self._coming is not None:
            for wait in self._coming.waits:
                wait()
            self._coming = None
        for place in list(self._saves):
            self._wait(place)
        return time.perf_counter() - began_s

    def checked_tokens(self, total: int) -> int:
        """Tokens of a prompt that checksums cover, and that a full hit has at least."""
        return (total - 1) // self.layout.chunk_tokens * self.layout.chunk_tokens

    def _generate(self, steps: Graphed, token: Tensor, begin: Callable[[Any], None]) -> None:
        """Take the steps, and meanwhile begin what comes next: behind what was launched before, not behind them."""
        if not steps.is_graph:
            begin(None)
            steps.run(token)
            return
        import torch

        beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self.device))
        steps.run(token)
        with torch.cuda.stream(beside):
            begin(beside)

    def _begin(self, subject: Subject, prompts: Sequence[list[int]], output: int, stream: Any) -> None:
        """Begin to load for the prompts that are served next, if their room is free and their steps are made."""
        if not prompts or output <= 1:
            return
        place = self._next_place(len(prompts))
        is_free = all(save.done for save in self._saves.get(place, []))
        if is_free and (place, len(prompts[0]), output - 1) in self._steps:
            place, room = self._room(len(prompts))
            self._coming = _Coming(prompts, place, room, self._asked(subject, prompts, room), stream)

    def _asked(self, subject: Subject, prompts: Sequence[list[int]], room: Any) -> list[Callable[[], int]]:
        coming = []
        for row, prompt in enumerate(prompts):  # one comes while the next is asked for
            stop = subject.hit(prompt, len(prompts))
            coming.append(subject.load(prompt, room.row(row, 0), stop, len(prompts)) if stop else lambda: 0)
        return coming

    def _loaded(self, subject: Subject, prompts: Sequence[list[int]], room: Any, coming: _Coming | None) -> int:
        """Wait for what the cache has of all prompts, which begins to come now unless it has begun before."""
        if coming is None:
            return min([wait() for wait in self._asked(subject, prompts, room)])
        if coming.prompts is not prompts:
            raise ValueError("other prompts were said to follow")
        start = min([wait() for wait in coming.waits])
        if coming.stream is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_stream(coming.stream)
        return start

    def _next_place(self, rows: int) -> Place:
        return rows, (self._turn + 1) % _ROOMS

    def _room(self, rows: int) -> tuple[Place, Any]:
        """Memory for a batch, which is not that of the one before it, and which no store reads any more."""
        from kvredis.adapters.transformers.cache import Room

        place = self._next_place(rows)
        self._turn = place[1]
        self._wait(place)
        if place not in self._rooms:
            self._rooms[place] = Room(self.layout, (), rows, self._columns, self.device)
        return place, self._rooms[place]

    def _steps_of(self, kind: tuple[Place, int, int], room: Any) -> Graphed:
        """What takes so many steps behind prompts of so many tokens that are in the room of that place."""
        (rows, _), total, count = kind
        if kind not in self._steps:
            self._steps[kind] = steps_of(self._forward, lambda: self._cache(room, total), rows, count, self.device)
        return self._steps[kind]

    def _wait(self, place: Place) -> None:
        for save in self._saves.pop(place, []):
            save.wait()

    def _cache(self, room: Any, tokens: int) -> Any:
        from kvredis.adapters.transformers.cache import fresh_cache

        cache = fresh_cache(self._model.config)
        room.furnish(cache, fresh_cache(self._model.config), tokens)
        return cache

    def _checksums(self, kv: Tensor, total: int) -> list[int]:
        """A sum of each chunk's words, each times a number of its place: equal bytes in equal order give equal sums."""
        import torch

        sums, length = [], self.layout.chunk_tokens
        for start in range(0, self.checked_tokens(total), length):
            words = kv[:, :, start : start + length].contiguous().view(-1).view(torch.int32)
            if len(self._weights) < len(words):
                places = torch.arange(1, len(words) + 1, device=self.device)
                self._weights = (places * _WEIGHT).to(torch.int32) | 1
            sums.append((words * self._weights[: len(words)]).sum(dtype=torch.int64))
        return [int(each) for each in sums]

    def _now_s(self) -> float:
        import torch

        if self.device.type == "cuda":  # what is copied beside it is not waited for
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()


def compare(checks: Sequence[list[int]], others: Sequence[list[int]], loaded: Sequence[int], what: str) -> int:
    """Compare each prompt's first `loaded` chunks with those that were computed the first time; gives how many.

    Raises VerificationError where they are not equal. What was computed anew is not compared: in passes that begin
    elsewhere it need not come out to the bit.
    """
    for number, (check, other, count) in enumerate(zip(checks, others, loaded, strict=True)):
        if check[:count] != other[:count]:
            raise VerificationError(f"{what}: prompt {number} came back with other bytes than were stored")
    return sum(min(len(check), count) for check, count in zip(checks, loaded, strict=True))


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
