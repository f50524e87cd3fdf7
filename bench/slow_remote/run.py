"""What does a cache cost behind a link that is slower than computing, and does it notice when the link is fast again?
`kvredis bench slow-remote` answers for loading everything and for `min_retrieve_tokens: auto`.

A real server behind a proxy that throttles both ways (throttle.py). Three arms answer the same prompts, all of
which are stored: `none` computes, `plain` loads what it finds, `auto` decides (min_retrieve_tokens = auto). Then the
throttle ends, and they do it again. Computing is simulated: an arm that has not loaded a token sleeps
1/prefill_tokens_per_s for it, so `none` is exact and the others have everything else in them: lookups, loads, copies,
stores. Every byte that was loaded is compared.

A sample is one arm's requests of one repeat, one after another. A ratio is the median of the ratios to another arm in
the same repeat. Every repeat begins with new engines, so what it costs to find out that a link is slow is in each.

The file, kvredis.bench.slow-remote/1, has beside what every result has
    break_even_bytes_per_s  bytes of a token x tokens per second
    rows                    link (throttled, free), arm, samples, seconds, ratio_to_none, ratio_to_plain
    recovery                how long after the end of the throttle auto loaded again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

from kvredis import install_line
from kvredis.bench.core.errors import BenchError, VerificationError
from kvredis.bench.core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    summed,
    table,
    verified_line,
)
from kvredis.bench.core.servers import ServerProcess, kvredis_recipe
from kvredis.bench.core.statistics import MIB, by_repeat, middle, paired_ratio, rotated

from .throttle import Throttle

if TYPE_CHECKING:
    from torch import Tensor

    from kvredis import CacheEngine


SCHEMA: Final = "kvredis.bench.slow-remote/1"
NONE, PLAIN, AUTO = "none", "plain", "auto"
THROTTLED, FREE = "throttled", "free"
AUTO_MOST = 1.03
"""While the link is slow, auto takes no longer than this times no cache at all."""
FREE_MOST = 1.10
"""On a fast link auto takes no longer than this times loading everything."""


class Sample(TypedDict):
    repeat: int
    seconds: float
    loaded_tokens: int
    skipped_tokens: int  # found, and not loaded


class Recovery(TypedDict):
    """From the end of the throttle to the first request that auto has loaded, in one repeat."""

    repeat: int
    seconds: float
    requests: int  # computed meanwhile


class SlowRemoteResult(Result):
    break_even_bytes_per_s: float
    rows: list[Row]
    recovery: list[Recovery]


def slow_remote_gate(result: SlowRemoteResult) -> list[GateLine]:
    """Judge every line; a figure that is missing does not pass."""
    rows = {(row["link"], row["arm"]): row for row in result["rows"]}
    return [
        gate_line("throttled: auto / none", f"<= {AUTO_MOST:.2f}x", rows[THROTTLED, AUTO]["ratio_to_none"]),
        gate_line("throttled: plain / none", "> 1.00x", rows[THROTTLED, PLAIN]["ratio_to_none"]),
        gate_line("free: auto / plain", f"<= {FREE_MOST:.2f}x", rows[FREE, AUTO]["ratio_to_plain"]),
        *(gate_line(f"free: {arm} / none", "< 1.00x", rows[FREE, arm]["ratio_to_none"]) for arm in (PLAIN, AUTO)),
    ]


_COLUMNS: Final[tuple[Column, ...]] = (
    ("link", "link", ""),
    ("arm", "arm", ""),
    ("seconds", "seconds", ".3f"),
    ("x none", "ratio_to_none", ".3fx"),
    ("x plain", "ratio_to_plain", ".3fx"),
    ("loaded tokens", lambda row: middle([sample["loaded_tokens"] for sample in row["samples"]]), ".0f"),
    ("skipped", lambda row: middle([sample["skipped_tokens"] for sample in row["samples"]]), ".0f"),
)


def table_lines(result: SlowRemoteResult) -> Iterator[str]:
    """Give the report, line by line, with the gate."""
    options = result["options"]
    yield from machine_lines(result["machine"])
    yield (
        f"{options['prompts']} prompts of {options['prompt_tokens']} tokens of {options['bytes_per_token']} bytes;"
        f" computing is simulated: {options['prefill_tokens_per_s']:.0f} tokens/s of sleep"
    )
    yield (
        f"Link of {options['link_bytes_per_s'] / 1e6:.0f} MB/s while throttled;"
        f" break-even is {result['break_even_bytes_per_s'] / 1e6:.0f} MB/s"
    )
    yield ""
    yield from table(_COLUMNS, result["rows"])
    again = summed(result["recovery"], ("seconds", "requests"))
    yield (
        f"After the throttle auto loads again within {again['seconds']:.1f} s, behind {again['requests']:.0f} requests"
        " (medians)."
    )
    yield verified_line(result)
    yield from gate_lines(result["gate"])


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
        **new_result(SCHEMA, plan.options()),
        break_even_bytes_per_s=plan.bytes_per_token * plan.prefill_tokens_per_s,
        rows=[{"link": link, "arm": arm, "samples": []} for link in (THROTTLED, FREE) for arm in ARMS],
        recovery=[],
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
    result["gate"] = slow_remote_gate(result)
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


def _conclude(row: Row, rows: list[Row]) -> None:
    """Fill in what follows from the samples."""
    seconds = {each["arm"]: by_repeat(each["samples"], "seconds") for each in rows if each["link"] == row["link"]}
    row["seconds"] = middle(list(seconds[row["arm"]].values()))
    row["ratio_to_none"] = paired_ratio(seconds[row["arm"]], seconds[NONE])
    row["ratio_to_plain"] = paired_ratio(seconds[row["arm"]], seconds[PLAIN])
