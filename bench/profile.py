"""What disturbs an engine that computes while its KV leaves and comes? `kvredis bench profile` takes a trace of it.

A model of the shape prefills by steps; what each step made is stored while the next one computes. Then it does so again
for one prompt while another's chunks are loaded. A thread moves the chunks, as in an engine. torch.profiler writes a
Chrome trace; copies are counted in it, and how much of their time passed while the model computed. The KV that moves
lies in pages beside the model's own cache, as many bytes as its own.

schema kvredis.bench.profile/1: machine, torch, device, options, notes, trace, rows (a phase each; of a trace without a
GPU no rows), gate. `copies` are those that the trace shows, page numbers on their way up among them; a call of
cudaMemcpyBatchAsync is one there, however many pieces of host memory it names. `beside_forward_percent` is the copies'
time between the first and the last kernel of a forward (gaps between kernels of up to FORWARD_GAP_US belong to it: a
model launched from Python leaves many); in `beside_kernels_percent` they do not.
`gap_alone_us` and `gap_beside_us` are the medians of what the GPU takes from one piece of the model's work to the next
while nothing of ours runs, and within our copies; None where there is no such gap. A kernel that is launched by itself
is fetched from the host: over the link that loads fill, so each begins later beside them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Final

from .core.compute import TINY, Modelled
from .core.errors import BenchError
from .core.prompts import PromptPlan, prompts
from .core.result import (
    Column,
    GateLine,
    Progress,
    Result,
    Row,
    gate_line,
    gate_lines,
    machine_lines,
    new_result,
    table,
)
from .core.shapes import SHAPES, ModelShape
from .swap import HostMemory, Swap, settle

SCHEMA: Final = "kvredis.bench.profile/1"
FORWARD_GAP_US: Final = 1000.0
COPIES_MAX: Final = 8.0
"""For each 1,024 tokens."""
BESIDE_MIN_PERCENT: Final = 90.0
_SEED: Final = 3
_PHASES: Final = {"store": "DtoH", "load": "HtoD"}
_WORKS: Final = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What one call does: `steps` steps of `step_tokens` are stored, and loaded again."""

    shape: ModelShape = field(default_factory=lambda: SHAPES["8b"])
    step_tokens: int = 2048
    chunk_tokens: int = 256
    steps: int = 4


class ProfileResult(Result):
    torch: str
    device: str
    trace: str
    rows: list[Row]


def run(plan: ProfilePlan, out: Path, progress: Progress) -> ProfileResult:
    """Trace both phases into `out`, and read them. VerificationError when what moved has other bytes."""
    import torch

    on_gpu = torch.cuda.is_available()
    shape = plan.shape if on_gpu else TINY
    tokens = plan.steps * plan.step_tokens
    device = torch.device("cuda" if on_gpu else "cpu")
    result = ProfileResult(
        **new_result(
            SCHEMA,
            {
                "shape": shape.name, "step_tokens": plan.step_tokens, "chunk_tokens": plan.chunk_tokens,
                "steps": plan.steps,
            },
            [] if on_gpu else ["There is no GPU: the trace has no copies to count and no overlap to measure"],
        ),
        torch=str(torch.__version__), device=torch.cuda.get_device_name() if on_gpu else "No GPU", trace=str(out),
        rows=[],
    )  # fmt: skip
    phases = traced(plan, Swap(shape, tokens, device), out, progress)
    if on_gpu:
        result["rows"] = [phase_row(name, phases[name], tokens) for name in _PHASES if name in phases]
        result["gate"] = profile_gate(result["rows"])
    return result


def traced(plan: ProfilePlan, swap: Swap, out: Path, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Run both phases under the profiler. Give each one's events; `out` holds those of both."""
    from kvredis.adapters.transfer import open_transfer

    device = swap.paged.device
    prompt = list(prompts(PromptPlan(swap.tokens + plan.step_tokens, 0.0, 1, seed=_SEED)))
    model = Modelled(swap.shape, prompt)
    host = HostMemory(swap.host_bytes(plan.chunk_tokens), lock=device.type == "cuda")
    transfer = open_transfer(swap.paged)
    parts = swap.parts(host.view, plan.chunk_tokens)
    count = plan.step_tokens // plan.chunk_tokens
    steps = [parts[at : at + count] for at in range(0, len(parts), count)]
    events: dict[str, list[dict[str, Any]]] = {}
    kept: dict[str, Any] = {}
    try:
        for name in ("warm-up", "traced"):  # the first: kernels are chosen and compiled, and the profiler is loaded
            for phase in _PHASES:
                progress(f"{phase}, {name}")
                if phase == "load":
                    swap.wipe()
                settle(device)
                with _Behind(transfer, phase) as behind:
                    kept = _under_profiler(lambda to=behind: _forward(model, to, steps, plan.step_tokens), out, device)
                events[phase] = kept["traceEvents"]
                if phase == "store":
                    swap.check_out(parts)
                else:
                    swap.check_in()
    finally:
        transfer.close()
        host.close()
    kept["traceEvents"] = [event for phase_events in events.values() for event in phase_events]
    with _written(out):
        out.write_text(json.dumps(kept))
    return events


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """Tell in a line what keeps the trace from its file. torch tells its log alone, and leaves none or half of one."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise BenchError(f"{out}: cannot write the trace: {error}") from error


class _Behind:
    """A thread that moves what it is given, one step's parts after another: as an engine's stores and loads are moved,
    so that the thread that launches the model's kernels enqueues no copies. Raises on exit what failed."""

    def __init__(self, transfer: Any, phase: str) -> None:
        self._transfer = transfer
        self._phase = phase
        self._steps: SimpleQueue[tuple[Sequence[Any], Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvredis bench profile", daemon=True)
        self._failure: Exception | None = None

    def __enter__(self) -> _Behind:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        if self._failure is not None:
            raise BenchError(f"{self._phase}: nothing was moved: {self._failure}") from self._failure

    def add(self, parts: Sequence[Any], after: Any) -> None:
        """Move these too; a store comes behind `after`."""
        self._steps.put((parts, after))

    def finish(self) -> None:
        """Wait until all has moved; nothing may be added afterwards."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                parts, after = step
                if self._phase == "store":
                    self._transfer.store(parts, after=after).wait()
                else:
                    self._transfer.load(parts).wait()
        except Exception as error:
            self._failure = error


def _forward(model: Modelled, behind: _Behind, steps: Sequence[Any], tokens: int) -> None:
    """Compute a prompt by steps. What a step made leaves behind its event, while the next is computed; loads are for
    another prompt, a step's worth beside each."""
    model.begin(0)
    for at, parts in enumerate(steps):
        model.enqueue(at * tokens, (at + 1) * tokens)
        behind.add(parts, _event())
    model.enqueue(len(steps) * tokens, (len(steps) + 1) * tokens)
    behind.finish()


def _event() -> Any:
    import torch

    return torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None


def _under_profiler(work: Any, out: Path, device: Any) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        work()
        settle(device)
    with _written(out):
        profiler.export_chrome_trace(str(out))
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def phase_row(name: str, events: Sequence[Mapping[str, Any]], tokens: int) -> Row:
    """Read one phase. The model's kernels are those of the stream that has most of their time; copies on any other
    stream are ours, of both directions: the page numbers that go up are one as well."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    times: dict[object, float] = {}
    for event in kernels:
        times[event["args"]["stream"]] = times.get(event["args"]["stream"], 0.0) + event["dur"]
    model = max(times, key=lambda stream: times[stream], default=None)
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"]["stream"] != model]
    computed = [(event["ts"], event["ts"] + event["dur"]) for event in kernels if event["args"]["stream"] == model]
    moved = [(e["ts"], e["ts"] + e["dur"]) for e in copies if _PHASES[name] in e["name"] and e["args"]["bytes"] > 4096]
    total = sum(end - begin for begin, end in moved)
    forward, strict = (100 * shared(moved, joined(computed, gap)) / (total or 1.0) for gap in (FORWARD_GAP_US, 0.0))
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in events:
        if event.get("cat") in _WORKS:
            spans[event["args"]["stream"] == model].append((event["ts"], event["ts"] + event["dur"]))
    alone, beside = gaps(spans[True], joined(moved, 0.0), joined(spans[False], 0.0))
    return Row(
        phase=name, tokens=tokens, copies=len(copies), copies_per_1024=len(copies) * 1024 / tokens,
        nbytes=sum(e["args"]["bytes"] for e in copies), copy_ms=total / 1000,
        beside_forward_percent=forward, beside_kernels_percent=strict,
        gap_alone_us=median(alone) if alone else None, gap_beside_us=median(beside) if beside else None,
    )  # fmt: skip


def joined(spans: Sequence[Span], gap: float) -> list[Span]:
    """Give the spans in order, those that overlap or are no further than `gap` apart as one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def shared(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Give how long `spans` run within `others`, which are joined."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in spans for since, until in others)


def gaps(works: Sequence[Span], moved: Sequence[Span], ours: Sequence[Span]) -> tuple[list[float], list[float]]:
    """Give how long it is from each work of one stream to its next: where nothing of `ours` runs, and within one of
    those that are `moved`."""
    alone, beside = list[float](), list[float]()
    for (_, end), (begin, _) in pairwise(sorted(works)):
        gap = max(begin - end, 0.0)
        if all(until <= end or begin <= since for since, until in ours):
            alone.append(gap)
        elif any(since <= end and begin <= until for since, until in moved):
            beside.append(gap)
    return alone, beside


def profile_gate(rows: Sequence[Row]) -> list[GateLine]:
    """Judge copies and overlap of each phase; a phase in which nothing was seen to move holds nothing."""
    found = []
    for row in rows:
        copies = row["copies_per_1024"] or None
        found.append(gate_line(f"{row['phase']}: copies for 1,024 tokens", f"<= {COPIES_MAX:g}", copies))
        beside = row["beside_forward_percent"]
        found.append(gate_line(f"{row['phase']}: beside the forward", f">= {BESIDE_MIN_PERCENT:g} %", beside))
    return found


_COLUMNS: Final[tuple[Column, ...]] = (
    ("phase", "phase", ""),
    ("tokens", "tokens", "d"),
    ("MB", lambda row: row["nbytes"] / 1e6, ".0f"),
    ("copies", "copies", "d"),
    ("for 1,024 tokens", "copies_per_1024", ".1f"),
    ("copying ms", "copy_ms", ".2f"),
    ("beside the forward %", "beside_forward_percent", ".1f"),
    ("beside its kernels %", "beside_kernels_percent", ".1f"),
    ("us between kernels", "gap_alone_us", ".1f"),
    ("within copies", "gap_beside_us", ".1f"),
)


def table_lines(result: ProfileResult) -> Iterator[str]:
    """Give the report, line by line."""
    options = result["options"]
    yield from machine_lines(result["machine"], f"{result['device']}; ")
    yield f"torch {result['torch']}; {options['shape']}, steps of {options['step_tokens']} tokens"
    yield from result["notes"]
    if result["rows"]:
        yield from table(_COLUMNS, result["rows"])
    yield from gate_lines(result["gate"], "of each phase")
    yield f"Trace: {result['trace']} (chrome://tracing, ui.perfetto.dev)"
