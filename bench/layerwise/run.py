"""`kvredis bench layerwise`: a model's layers leave for a store, and come from it, while its other layers compute.

Four questions: has the first layer left before the last is computed; how long does a device wait for a prefix that
comes layer by layer; is a bound on the bandwidth kept; and what does a step take when a share of the layers has its KV
elsewhere, beside what `kvredis plan` says. Every output and every byte is compared.

The result of `kvredis bench layerwise`: the JSON file's schema, kvredis.bench.layerwise/2, its table and its gate.

Moments are the device's own. A point's figures are medians over its samples, one a repeat; ratios pair what ran in the
same repeat. Milliseconds where a name says so, else seconds; GB/s are 1e9 bytes.

push    a prompt prefilled in steps: nothing stored (none), whole chunks behind each step (behind), or each layer behind
        its attention (layered). `steps_ahead` counts the steps in which layer 0 had left the engine's pages before the
        last layer was computed, by `lead_ms` at least; `tail_ms` is how long the last layer took to follow.
load    the rest of a prompt is computed behind a prefix that is there (alone), that is loaded before (before), or layer
        by layer meanwhile: leased when the step begins (layered), or for `prepare_ms` before, in which the engine
        prepares the step (prepared; vLLM's connector). `ratio` is what was asked for of load / compute time, by a bound
        on the bandwidth; 0: no bound. Of either way `ms` is what the step took from its begin, `gained` before / that,
        `exposed` how long the device was idle for loads, and `quotient` that / (load / layers).
cap     a bound on the bandwidth, and what was measured: storing, loading, and a load that comes while stores are under
        way (both), where `load_gb_per_s` is the load's own. `asked_gb_per_s` None: the same without a bound.
share   decoding while `layers` of the model's layers have no KV in the engine between two steps, and load it in each.
        `predicted_ms` is the plan's: max(step without, share x M / B_link + T_overhead); `pipeline` has what goes into
        it, measured in the same run, and a_max.
Top level
        schema, machine (see core/machine.py), device, torch, options, notes, the four, pipeline, verified_bytes (KV
        compared in full; outputs are compared besides, bit by bit), gate, seconds
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvredis import install_line
from kvredis.bench.core.errors import BenchError
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
    table,
    verified_line,
)
from kvredis.bench.core.servers import ServerProcess, kvredis_recipe
from kvredis.bench.core.shapes import BLOCK_TOKENS, SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, MIB, middle, rotated
from kvredis.bench.plan import Pipeline, PipelineJson, remote_share

from .model import SMALL, Marks, PagedModel, synchronize
from .rig import (
    CAPS,
    LAYERED,
    NAME,
    NONE,
    PUSHES,
    CapSample,
    LoadSample,
    Prefix,
    PushSample,
    Remote,
    Rig,
    ShareSample,
    cap,
    load,
    prefix,
    push,
    remote_places,
    share,
)

if TYPE_CHECKING:
    from kvredis.adapters.paged.mover import ChunkMover
    from kvredis.backends.base import Backend


SCHEMA: Final = "kvredis.bench.layerwise/2"
EXPOSED_MOST: Final = 1.3
"""Of one layer's share of the load's time, where loading is faster than computing; of the prepared arm."""
CAP_BOUNDS: Final = (0.9, 1.1)
"""Of the bandwidth that was asked for."""

_Sample = TypeVar("_Sample")


class LayerwiseResult(Result):
    torch: str
    device: str
    push: list[Row]
    load: list[Row]
    cap: list[Row]
    share: list[Row]
    pipeline: PipelineJson | None


def push_points(samples: dict[str, list[PushSample]]) -> list[Row]:
    """Make a point of each arm; they have as many samples, in the same order."""
    return [
        Row(
            arm=arm, samples=mine,
            seconds=_of(mine, lambda each: each["seconds"]),
            drain_seconds=_of(mine, lambda each: each["drain_seconds"]),
            ratio=middle([one["seconds"] / base["seconds"] for one, base in zip(mine, samples[NONE], strict=True)]),
            ahead=min(each["steps_ahead"] / max(each["steps"], 1) for each in mine),
            lead_ms=_of(mine, lambda each: each["lead_ms"]),
            tail_ms=_of(mine, lambda each: each["tail_ms"]),
        )
        for arm, mine in samples.items()
    ]  # fmt: skip


def load_point(ratio: float, cap_bytes_per_s: float | None, layers: int, samples: list[LoadSample]) -> Row:
    """Make a point of its samples."""
    load_s = _of(samples, lambda each: each["load_seconds"])
    return Row(
        ratio=ratio, cap_gb_per_s=None if cap_bytes_per_s is None else cap_bytes_per_s / 1e9, samples=samples,
        alone_ms=_of(samples, lambda each: each["alone_seconds"] * 1e3),
        before_ms=_of(samples, lambda each: each["before_seconds"] * 1e3),
        load_ms=load_s * 1e3, layer_ms=load_s * 1e3 / layers,
        load_per_compute=_of(samples, lambda each: each["load_seconds"] / each["alone_seconds"]),
        layered=_by_layers(
            layers, samples, lambda each: each["layered_seconds"], lambda each: each["layered_exposed_seconds"]
        ),
        prepared=_by_layers(
            layers, samples, lambda each: each["prepared_seconds"], lambda each: each["prepared_exposed_seconds"]
        ),
    )  # fmt: skip


def _by_layers(
    layers: int,
    samples: list[LoadSample],
    seconds: Callable[[LoadSample], float],
    exposed_s: Callable[[LoadSample], float],
) -> Row:
    exposed = [exposed_s(each) * 1e3 for each in samples]
    return Row(
        ms=_of(samples, lambda each: seconds(each) * 1e3),
        gained=_of(samples, lambda each: each["before_seconds"] / seconds(each)),
        exposed_ms=middle(exposed), exposed_ms_min=min(exposed), exposed_ms_max=max(exposed),
        quotient=_of(samples, lambda each: exposed_s(each) / (each["load_seconds"] / layers)),
    )  # fmt: skip


def cap_point(way: str, asked_gb_per_s: float | None, samples: list[CapSample]) -> Row:
    """Make a point of its samples."""
    rates = [each["gb_per_s"] for each in samples]
    loads = [each["load_gb_per_s"] for each in samples if each["load_gb_per_s"] is not None]
    return Row(
        way=way, asked_gb_per_s=asked_gb_per_s, samples=samples,
        gb_per_s=middle(rates), gb_per_s_min=min(rates), gb_per_s_max=max(rates),
        load_gb_per_s=middle(loads) if loads else None,
    )  # fmt: skip


def share_point(asked: float, remote: tuple[int, int], samples: list[ShareSample], bases: list[ShareSample]) -> Row:
    """Make a point of its samples, without the prediction; `remote` is (remote layers, all layers), `bases` are the
    samples of share 0."""
    steps = [each["step_seconds"] * 1e3 for each in samples]
    return Row(
        asked=asked, share=remote[0] / remote[1], layers=remote[0], samples=samples,
        step_ms=middle(steps), step_ms_min=min(steps), step_ms_max=max(steps),
        exposed_ms=_of(samples, lambda each: each["exposed_seconds"] * 1e3),
        ratio=middle([one["step_seconds"] / base["step_seconds"] for one, base in zip(samples, bases, strict=True)]),
        predicted_ms=0.0,
    )  # fmt: skip


def _of(samples: Sequence[_Sample], figure: Callable[[_Sample], float]) -> float:
    return middle([figure(each) for each in samples])


def layerwise_gate(result: LayerwiseResult) -> list[GateLine]:
    """Judge every line of what was measured. No bar applies where loads take longer than computing, nor to a bound on
    what is no faster without."""
    name = "push: layer 0 is out before the last is computed"
    judged = [gate_line(name, ">= 1.00", point["ahead"]) for point in result["push"] if point["arm"] == LAYERED]
    for each in result["load"]:
        if each["load_per_compute"] <= 1:
            quotient = each["prepared"]["quotient"]
            judged.append(gate_line(f"load: exposed, {_asked(each)}", f"<= {EXPOSED_MOST:.2f}", quotient))
    free = {point["way"]: point["gb_per_s"] for point in result["cap"] if point["asked_gb_per_s"] is None}
    for point in result["cap"]:
        asked = point["asked_gb_per_s"]
        if asked is not None and free[point["way"]] >= asked * CAP_BOUNDS[1]:
            bound = f"{asked * CAP_BOUNDS[0]:.2f} to {asked * CAP_BOUNDS[1]:.2f}"
            judged.append(gate_line(f"cap: {point['way']}, GB/s", bound, point["gb_per_s"]))
    return judged


def table_lines(result: LayerwiseResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    yield from machine_lines(result["machine"], f"{result['device']}; ")
    yield f"torch {result['torch']}"
    yield "; ".join(f"{name} {value}" for name, value in result["options"].items())
    yield from result["notes"]
    yield from _push_lines(result["push"])
    yield from _load_lines(result["load"])
    yield from _cap_lines(result["cap"])
    yield from _share_lines(result)
    yield ""
    yield verified_line(result, "of KV compared in full and every output")
    yield from gate_lines(result["gate"], "medians")


def _of_layered(figure: str) -> Callable[[Row], object]:
    """A figure that only the layered arm has."""
    return lambda row: row[figure] if row["arm"] == LAYERED else None


_PUSH: Final[tuple[Column, ...]] = (
    ("prefill", "arm", ""),
    ("s", "seconds", ".3f"),
    ("x none", "ratio", ".3f"),
    ("drain s", "drain_seconds", ".3f"),
    ("ahead", _of_layered("ahead"), ".0%"),
    ("lead ms", _of_layered("lead_ms"), ".2f"),
    ("tail ms", _of_layered("tail_ms"), ".2f"),
)
_LOAD: Final[tuple[Column, ...]] = (
    ("load beside compute", lambda row: _asked(row), ""),
    ("load ms", "load_ms", ".2f"),
    ("/compute", "load_per_compute", ".2f"),
    ("alone ms", "alone_ms", ".2f"),
    ("before ms", "before_ms", ".2f"),
    ("leased", "leased", ""),
    ("layers ms", "ms", ".2f"),
    ("gained", "gained", ".2fx"),
    ("exposed ms", "exposed_ms", ".2f"),
    ("least to most", ("exposed_ms_min", "exposed_ms_max"), ".2f"),
    ("x load/L", "quotient", ".2f"),
)
_SHARE: Final[tuple[Column, ...]] = (
    ("share", "share", ".2f"),
    ("layers", "layers", "d"),
    ("step ms", "step_ms", ".2f"),
    ("least to most", ("step_ms_min", "step_ms_max"), ".2f"),
    ("x none", "ratio", ".2f"),
    ("plan ms", "predicted_ms", ".2f"),
    ("idle ms", "exposed_ms", ".2f"),
)


def _push_lines(points: list[Row]) -> Iterator[str]:
    if points:
        yield ""
        yield from table(_PUSH, points)


def _load_lines(points: list[Row]) -> Iterator[str]:
    if points:
        yield ""
        rows = [
            each | {"leased": leased} | each[way]
            for each in points
            for leased, way in (("then", "layered"), ("before", "prepared"))
        ]
        yield from table(_LOAD, rows)


def _cap_lines(points: list[Row]) -> Iterator[str]:
    if points:
        yield ""
    for point in points:
        own = "" if point["load_gb_per_s"] is None else f"; the load at {point['load_gb_per_s']:.3f}"
        asked = "no bound" if point["asked_gb_per_s"] is None else f"at most {point['asked_gb_per_s']:g} GB/s"
        yield (
            f"  {asked:<18} {point['way']:<5} {point['gb_per_s']:8.3f} GB/s"
            f" ({point['gb_per_s_min']:.3f} to {point['gb_per_s_max']:.3f}){own}"
        )


def _share_lines(result: LayerwiseResult) -> Iterator[str]:
    line = result["pipeline"]
    if line is None:
        return
    yield ""
    yield (
        f"  Decoding: {line['kv_gb'] * 1e3:.1f} MB of KV a step; link {line['link_gb_per_s']:.2f} GB/s, attention reads"
        f" {line['hbm_gb_per_s']:.2f} GB/s, other work {line['other_ms']:.2f} ms, overhead {line['overhead_ms']:.2f}"
        f" ms: a_max {line['a_max']:.2f}"
    )
    yield from table(_SHARE, result["share"])


def _asked(point: Row) -> str:
    return "no bound" if point["cap_gb_per_s"] is None else f"load/compute {point['ratio']:g}"


LOCAL, LANE, REMOTE = "local", "lane", "remote"
TIERS: Final = (LOCAL, LANE, REMOTE)
"""The engine's own memory, a server's through shared memory, a server's over TCP."""
PARTS: Final = ("push", "load", "cap", "share")
_SLACK_BYTES: Final = 128 * MIB


@dataclass(frozen=True, slots=True)
class LayerwisePlan:
    """What one call of the bench does. `shape` None: 7b, and without a GPU a small one."""

    shape: ModelShape | None = None
    parts: tuple[str, ...] = PARTS
    tier: str = LOCAL
    prefix_tokens: int = 2048
    suffix_tokens: int = 256
    """Tokens computed behind the prefix, and in each step of a prefill."""
    chunk_tokens: int = 256
    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 0.0)
    """Time to load / time to compute, by a bound on the bandwidth; 0: no bound."""
    prepare_ms: float = 3.0
    """How long an engine prepares a step whose loads it has told of; vLLM 0.26 does for 3.7, seen in a profile."""
    cap_gb_per_s: float = 1.0
    cap_bytes: int = 256 * MIB
    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    decode_steps: int = 8
    link_gb_per_s: float | None = None
    """Bound on what decoding loads; None: as fast as it comes."""
    repeats: int = 5

    def __post_init__(self) -> None:
        """Raises BenchError for tokens that are no whole chunks, or chunks that are no whole pages."""
        if self.chunk_tokens % BLOCK_TOKENS or self.prefix_tokens % self.chunk_tokens:
            raise BenchError(
                f"a prefix of {self.prefix_tokens} tokens is not made of chunks of {self.chunk_tokens}, and these of"
                f" pages of {BLOCK_TOKENS}"
            )

    def steps(self) -> int:
        """Give how often `run` calls its progress."""
        each = {"push": len(PUSHES), "load": len(self.ratios), "cap": 2, "share": 1 + len({0.0, *self.shares})}
        return self.repeats * sum(each[part] for part in self.parts)

    def options(self) -> dict[str, object]:
        """Give what a reader must know to repeat it."""
        names = (
            *("tier", "prefix_tokens", "suffix_tokens", "chunk_tokens", "prepare_ms", "cap_gb_per_s"),
            *("decode_steps", "link_gb_per_s", "repeats"),
        )
        return {name: getattr(self, name) for name in names}


QUICK = LayerwisePlan(
    prefix_tokens=512,
    suffix_tokens=128,
    chunk_tokens=128,
    ratios=(0.5, 1.0, 0.0),
    cap_bytes=64 * MIB,
    decode_steps=4,
    repeats=3,
)


def run(plan: LayerwisePlan, progress: Progress) -> LayerwiseResult:
    """Measure everything in `plan`. Raises BenchError, and VerificationError at a wrong byte or output; leaves no
    process behind."""
    try:
        import torch
    except ImportError as error:
        raise BenchError(f"the bench's model needs torch: {install_line('engine')}") from error
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    shape = plan.shape or (SHAPES["7b"] if on_gpu else SMALL)
    torch.set_num_threads(1)  # the other cores are for what moves
    began_s = time.monotonic()
    tokens = plan.prefix_tokens + max(plan.suffix_tokens, plan.decode_steps)
    model = PagedModel(shape, tokens, device)
    with ExitStack() as stack:
        rig = Rig(model, stack.enter_context(_backend(plan, shape, on_gpu)), plan.chunk_tokens)
        result = LayerwiseResult(
            **new_result(
                SCHEMA,
                {"shape": shape.name, "bytes_per_token": shape.bytes_per_token(), **plan.options()},
                [] if on_gpu else ["There is no GPU: one thread computes, and what moves shares its memory with it"],
            ),
            torch=str(torch.__version__),
            device=torch.cuda.get_device_name() if on_gpu else "No GPU",
            push=[],
            load=[],
            cap=[],
            share=[],
            pipeline=None,
        )
        if "push" in plan.parts:
            _push(rig, plan, result, progress)
        known = prefix(rig, plan.prefix_tokens, plan.suffix_tokens, plan.decode_steps)
        if "load" in plan.parts:
            _load(rig, plan, known, result, progress)
        if "cap" in plan.parts:
            _cap(rig, plan, known, result, progress)
        if "share" in plan.parts:
            _share(rig, plan, known, result, progress)
        result["verified_bytes"] = rig.verified_bytes
    result["gate"] = layerwise_gate(result)
    result["seconds"] = time.monotonic() - began_s
    return result


@contextmanager
def _backend(plan: LayerwisePlan, shape: ModelShape, on_gpu: bool) -> Iterator[Backend]:
    """Memory for all that is stored at one time: a prompt, the prefix, each share of it, and what the bound is for."""
    from kvredis.backends.config.schema import Config
    from kvredis.backends.factory import open_backend

    one = shape.block_bytes(plan.prefix_tokens)
    need = int(one * (2 + sum(plan.shares))) + 2 * (plan.cap_bytes + one)
    size = f"{(need + need // 4 + _SLACK_BYTES) // MIB}MB"
    over: dict[str, Any] = {
        "chunk_size": plan.chunk_tokens,
        "local_cpu": plan.tier == LOCAL,
        "max_local_cpu_size": size,
        "prefault": min(os.cpu_count() or 1, 8),
        "page_lock": on_gpu,
    }
    with ExitStack() as stack:
        if plan.tier != LOCAL:
            recipe = kvredis_recipe(NAME, "--max-local-cpu-size", size)
            server = stack.enter_context(ServerProcess(recipe, "tcp"))
            scheme = "kvredis" if plan.tier == LANE else "redis"
            over["remote_url"] = f"{scheme}://127.0.0.1:{server.address.port}"
        backend = open_backend(Config.load(env={}, overrides=over))
        stack.callback(backend.close)
        yield backend


def _push(rig: Rig, plan: LayerwisePlan, result: LayerwiseResult, progress: Progress) -> None:
    tokens, budget = plan.prefix_tokens, plan.suffix_tokens
    steps = [range(start, min(start + budget, tokens)) for start in range(0, tokens, budget)]
    samples: dict[str, list[PushSample]] = {arm: [] for arm in PUSHES}
    rig.model.forward(rig.model.tokens(budget), 0)  # kernels are chosen and loaded
    for repeat in range(plan.repeats):
        for arm in rotated(PUSHES, repeat):
            progress(f"push, {arm}")
            samples[arm].append(push(rig, arm, steps, repeat))
    result["push"] = push_points(samples)


def _load(rig: Rig, plan: LayerwisePlan, known: Prefix, result: LayerwiseResult, progress: Progress) -> None:
    alone_s = middle([rig.forward(known.ids, known.tokens).seconds for _ in range(3)])
    caps = {ratio: known.nbytes / (ratio * alone_s) if ratio else None for ratio in plan.ratios}
    samples: dict[float, list[LoadSample]] = {ratio: [] for ratio in plan.ratios}
    with ExitStack() as stack:
        movers = {ratio: stack.enter_context(rig.mover(bytes_per_s=caps[ratio])) for ratio in plan.ratios}
        for repeat in range(plan.repeats):
            for ratio in rotated(plan.ratios, repeat):
                progress(f"load, {ratio:g} of compute" if ratio else "load, no bound")
                samples[ratio].append(load(rig, movers[ratio], known, plan.prepare_ms / 1e3, repeat))
    layers = rig.model.shape.layers
    result["load"] = [load_point(ratio, caps[ratio], layers, samples[ratio]) for ratio in plan.ratios]


def _cap(rig: Rig, plan: LayerwisePlan, known: Prefix, result: LayerwiseResult, progress: Progress) -> None:
    asked = (None, plan.cap_gb_per_s)
    samples: dict[tuple[str, float | None], list[CapSample]] = {(way, bound): [] for bound in asked for way in CAPS}
    with ExitStack() as stack:
        movers = {
            bound: stack.enter_context(rig.mover(bytes_per_s=None if bound is None else bound * GB)) for bound in asked
        }
        for repeat in range(plan.repeats):
            for bound in rotated(asked, repeat):
                progress("cap, no bound" if bound is None else f"cap, {bound:g} GB/s")
                for way, sample in cap(rig, movers[bound], known, plan.cap_bytes, repeat).items():
                    samples[way, bound].append(sample)
    result["cap"] = [cap_point(way, bound, mine) for (way, bound), mine in samples.items()]
    for point in result["cap"]:
        if point["asked_gb_per_s"] is None and point["gb_per_s"] < plan.cap_gb_per_s * CAP_BOUNDS[1]:
            result["notes"].append(f"Without a bound {point['way']} reaches no more than the bound: not judged")


def _share(rig: Rig, plan: LayerwisePlan, known: Prefix, result: LayerwiseResult, progress: Progress) -> None:
    layers = rig.model.shape.layers
    chunks = range(len(known.moves))
    shares = sorted({0.0, *plan.shares})
    bound = None if plan.link_gb_per_s is None else plan.link_gb_per_s * GB
    with ExitStack() as stack:
        remotes: dict[float, Remote | None] = {0.0: None}
        for asked in shares[1:]:
            places = remote_places(layers, asked)
            mover = stack.enter_context(rig.mover(places, bound))
            remotes[asked] = Remote(mover, places, rig.moves(f"share/{asked}", chunks))
            rig.store(mover, rig.moves(f"share/{asked}", chunks))
        samples: dict[float, list[ShareSample]] = {asked: [] for asked in shares}
        whole = stack.enter_context(rig.mover(bytes_per_s=bound))
        speeds: list[tuple[float, float, float]] = []
        for repeat in range(plan.repeats):
            progress("share, speeds")
            speeds.append(_speeds(rig, whole, known))
            for asked in rotated(shares, repeat):
                progress(f"share, {asked:g}")
                samples[asked].append(share(rig, remotes[asked], known, repeat))
    points = []
    for asked in shares:
        remote = remotes[asked]
        count = 0 if remote is None else len(remote.places)
        points.append(share_point(asked, (count, layers), samples[asked], samples[0.0]))
    line = _pipeline(speeds, known, points[0]["step_ms"])
    for point in points:
        fetch_ms = point["share"] * line["kv_gb"] / line["link_gb_per_s"] * 1e3 + line["overhead_ms"]
        point["predicted_ms"] = max(points[0]["step_ms"], fetch_ms) if point["layers"] else points[0]["step_ms"]
    result["share"], result["pipeline"] = points, line


def _speeds(rig: Rig, mover: ChunkMover, known: Prefix) -> tuple[float, float, float]:
    """Seconds to load all KV of the prefix, to load one chunk, and for attention to read all of it."""
    loads = [_load_seconds(rig, mover, known, count) for count in (len(known.moves), 1)]
    rig.model.read_all(known.tokens)
    synchronize(rig.model.device)
    marks = Marks(rig.model.device)
    marks.mark()
    rig.model.read_all(known.tokens)
    marks.mark()
    begun, ended = marks.seconds()
    return loads[0], loads[1], ended - begun


def _load_seconds(rig: Rig, mover: ChunkMover, known: Prefix, count: int) -> float:
    from kvredis.adapters.paged.jobs import LoadJob

    moves = known.moves[:count]
    rig.spoil(moves)
    began_s = time.monotonic()
    mover.load_now(LoadJob(NAME, moves))
    seconds = time.monotonic() - began_s
    rig.check_loaded(mover, "prefix")
    rig.compare(known.moves, known.held, "prefix")
    return seconds


def _pipeline(speeds: Sequence[tuple[float, float, float]], known: Prefix, step_ms: float) -> PipelineJson:
    """What plan/planning.py wants to know, and its a_max. What one chunk takes beyond its bytes' time is the
    overhead."""
    all_s, one_s, read_s = (middle(each) for each in zip(*speeds, strict=True))
    kv_gb = known.nbytes / GB
    line = Pipeline(
        hbm_gb_per_s=kv_gb / read_s,
        link_gb_per_s=kv_gb / all_s,
        other_ms=max(step_ms - read_s * 1e3, 0.0),
        overhead_ms=max(one_s - all_s / len(known.moves), 0.0) * 1e3,
        kv_gb=kv_gb,
    )
    return PipelineJson(
        hbm_gb_per_s=line.hbm_gb_per_s,
        link_gb_per_s=line.link_gb_per_s,
        other_ms=line.other_ms,
        overhead_ms=line.overhead_ms,
        kv_gb=kv_gb,
        a_max=remote_share(line, kv_gb),
    )
