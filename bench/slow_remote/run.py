"""`kvredis bench slow-remote`: what a cache costs behind a link that is slower than computing, and gains on a fast one.

A real server behind a proxy that throttles both ways (core/throttle.py). Three arms answer the same prompts, all of
which are stored: `none` computes, `plain` loads what it finds, `auto` decides (min_retrieve_tokens = auto). Then the
throttle ends, and they do it again. Computing is simulated by sleeping at a stated rate, so that no model's noise hides
a per cent; every byte that was loaded is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvredis import install_line
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.servers import ServerProcess, kvredis_recipe
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratio, rotated
from kvredis.bench.core.throttle import Throttle
from kvredis.bench.server.transfer import MIB, Progress

from .result import AUTO, FREE, NONE, PLAIN, SCHEMA, THROTTLED, Recovery, Row, Sample, SlowRemoteResult
from .result import slow_remote_gate as slow_remote_gate

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis import CacheEngine

ARMS = (NONE, PLAIN, AUTO)
RECOVERY_S_MAX = 120.0
_LAYERS, _HEADS, _HEAD_DIM = 4, 4, 128
_SEED = 5


@dataclass(frozen=True, slots=True)
class SlowRemotePlan:
    """What one call of the bench does. A token has 8 KiB of KV, a chunk 256 tokens: 2 MiB a block. Computing is as fast
    as a model of 7 billion parameters on a large desktop GPU."""

    repeats: int = 5
    prompts: int = 8
    prompt_tokens: int = 8192
    prefill_tokens_per_s: float = 10_000.0
    link_bytes_per_s: float = 50e6

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, K and V, 16 bits each."""
        return 2 * _LAYERS * _HEADS * _HEAD_DIM * 2

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        return self.repeats * (2 * len(ARMS) + 1)

    def options(self) -> dict[str, object]:
        """Give what a reader must know to repeat it."""
        return {
            "repeats": self.repeats,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "chunk_tokens": 256,
            "bytes_per_token": self.bytes_per_token,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "link_bytes_per_s": self.link_bytes_per_s,
        }


QUICK = SlowRemotePlan(repeats=2, prompts=3, prompt_tokens=4096)


class Engines:
    """The arms that have an engine, new for each repeat, over one server; and the prompts that they are asked."""

    def __init__(self, plan: SlowRemotePlan, url: str) -> None:
        import torch

        self._plan = plan
        self._url = url
        self.verified_bytes = 0
        generator = torch.Generator().manual_seed(_SEED)
        shape = (_LAYERS, 2, plan.prompt_tokens, _HEADS, _HEAD_DIM)
        self._prompts: list[tuple[list[int], Tensor]] = [
            (
                [number * 1_000_000 + position for position in range(plan.prompt_tokens)],
                torch.randint(-32768, 32767, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16),
            )
            for number in range(plan.prompts)
        ]
        self._out = torch.empty(shape, dtype=torch.bfloat16)
        self._open: dict[str, CacheEngine] = {}

    def fill(self, url: str) -> None:
        """Store all prompts, by a way that is not throttled."""
        with self._engine(url, 0) as engine:
            for tokens, kv in self._prompts:
                while engine.store(tokens, kv):
                    if engine.flush():
                        raise BenchError("the server has not taken what the bench stores")
                if engine.lookup(tokens) != len(tokens):
                    raise BenchError("the server does not hold what the bench has stored")

    def renew(self) -> None:
        """Begin again with engines that know nothing, as those of a fresh process."""
        self.close()
        self._open = {PLAIN: self._engine(self._url, 0), AUTO: self._engine(self._url, "auto")}

    def close(self) -> None:
        """End the engines."""
        for engine in self._open.values():
            engine.close()
        self._open = {}

    def measure(self, arm: str, repeat: int) -> Sample:
        """Answer every prompt once; the clock stands while bytes are compared."""
        engine = self._open.get(arm)
        skipped = engine.stats.skipped_tokens if engine is not None else 0
        seconds, loaded = 0.0, 0
        for number in range(self._plan.prompts):
            took_s, tokens = self.answer(arm, number)
            seconds += took_s
            loaded += tokens
        skipped = engine.stats.skipped_tokens - skipped if engine is not None else 0
        return Sample(repeat=repeat, seconds=seconds, loaded_tokens=loaded, skipped_tokens=skipped)

    def answer(self, arm: str, number: int) -> tuple[float, int]:
        """One request: seconds, and the tokens that were loaded. Raises VerificationError at a wrong byte."""
        import torch

        tokens, kv = self._prompts[number]
        engine = self._open.get(arm)
        self._out.zero_()
        began_s = time.perf_counter()
        loaded = 0
        if engine is not None:
            plan = engine.plan(tokens)
            loaded = engine.retrieve(tokens, self._out, stop=plan.stop) if plan.need_to_load else 0
        compute_s = (len(tokens) - loaded) / self._plan.prefill_tokens_per_s
        time.sleep(compute_s)
        if engine is not None:
            engine.prefill_took(len(tokens) - loaded, compute_s)
            engine.store(tokens, kv)
        took_s = time.perf_counter() - began_s
        if not torch.equal(self._out[:, :, :loaded].view(torch.int16), kv[:, :, :loaded].view(torch.int16)):
            raise VerificationError(f"{arm}: prompt {number} came back with other bytes than were stored")
        self.verified_bytes += loaded * self._plan.bytes_per_token
        return took_s, loaded

    def recover(self, repeat: int) -> Recovery:
        """Ask auto until it loads again. Raises BenchError when it does not."""
        began_s, requests = time.perf_counter(), 0
        while not self.answer(AUTO, requests % self._plan.prompts)[1]:
            requests += 1
            if time.perf_counter() - began_s > RECOVERY_S_MAX:
                raise BenchError(f"auto has not loaded again {RECOVERY_S_MAX:.0f} s after the throttle ended")
        return Recovery(repeat=repeat, seconds=time.perf_counter() - began_s, requests=requests)

    def _engine(self, url: str, least: int | str) -> CacheEngine:
        from kvredis import CacheEngine, ChunkLayout, Config

        staging = f"{4 * self._plan.prompt_tokens * self._plan.bytes_per_token // MIB}MB"
        overrides: dict[str, Any] = {"remote_url": url, "local_cpu": False, "min_retrieve_tokens": least}
        overrides |= {"max_local_cpu_size": staging, "chunk_size": 256, "hugepages": "off"}
        layout = ChunkLayout(_LAYERS, _HEADS, _HEAD_DIM, "bf16", model="bench/slow-remote")
        return CacheEngine(Config.load(env={}, overrides=overrides), layout)


def run(plan: SlowRemotePlan, progress: Progress) -> SlowRemoteResult:
    """Measure everything in `plan`.

    Raises KVRedisError, VerificationError at a wrong byte; leaves no process behind.
    """
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"the bench's engines need torch: {install_line('engine')}") from error
    torch.set_num_threads(1)
    start_s = time.monotonic()
    arena = max(2 * plan.prompts * plan.prompt_tokens * plan.bytes_per_token // MIB, 64)
    result = SlowRemoteResult(
        schema=SCHEMA,
        machine=machine_facts(),
        options=plan.options(),
        break_even_bytes_per_s=plan.bytes_per_token * plan.prefill_tokens_per_s,
        rows=[_row(link, arm) for link in (THROTTLED, FREE) for arm in ARMS],
        recovery=[],
        verified_bytes=0,
        gate=[],
        seconds=0.0,
    )
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(kvredis_recipe("slow", "--max-local-cpu-size", f"{arena}MB"), "tcp"))
        proxy = stack.enter_context(Throttle(server.address))
        engines = Engines(plan, f"redis://127.0.0.1:{proxy.address.port}")
        stack.callback(engines.close)
        engines.fill(f"redis://127.0.0.1:{server.address.port}")

        def limit(bytes_per_s: float) -> None:
            """Set the link's speed. BenchError when the server is gone, since engines go on without it."""
            with server.connect() as wire:
                wire.ping()
            proxy.limit(bytes_per_s)

        for repeat in range(plan.repeats):
            _repeat(repeat, engines, limit, plan, result, progress)
        limit(0.0)
        result["verified_bytes"] = engines.verified_bytes
    for row in result["rows"]:
        _conclude(row, result["rows"])
    result["gate"] = [line.json() for line in slow_remote_gate(result)]
    result["seconds"] = time.monotonic() - start_s
    return result


def _repeat(
    repeat: int,
    engines: Engines,
    limit: Callable[[float], None],
    plan: SlowRemotePlan,
    result: SlowRemoteResult,
    progress: Progress,
) -> None:
    engines.renew()
    for link, bytes_per_s in ((THROTTLED, plan.link_bytes_per_s), (FREE, 0.0)):
        limit(bytes_per_s)
        if link == FREE:
            progress("recovering")
            result["recovery"].append(engines.recover(repeat))
        for arm in rotated(ARMS, repeat):
            progress(f"{link}, {arm}")
            row = next(row for row in result["rows"] if (row["link"], row["arm"]) == (link, arm))
            row["samples"].append(engines.measure(arm, repeat))


def _row(link: str, arm: str) -> Row:
    return Row(link=link, arm=arm, samples=[], seconds=0.0, ratio_to_none=None, ratio_to_plain=None)


def _conclude(row: Row, rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    seconds = {each["arm"]: by_repeat(each["samples"], "seconds") for each in rows if each["link"] == row["link"]}
    row["seconds"] = middle(list(seconds[row["arm"]].values()))
    row["ratio_to_none"] = paired_ratio(seconds[row["arm"]], seconds[NONE])
    row["ratio_to_plain"] = paired_ratio(seconds[row["arm"]], seconds[PLAIN])
