"""The result of `kvredis bench layerwise`: the JSON file's schema, kvredis.bench.layerwise/2, its table and its gate.

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

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypedDict, TypeVar

from kvredis.bench.core.statistics import middle
from kvredis.bench.plan.planning import PipelineJson
from kvredis.bench.server.result import GateJson

SCHEMA: Final = "kvredis.bench.layerwise/2"
NONE, BEHIND, LAYERED = "none", "behind", "layered"
PUSHES: Final = (NONE, BEHIND, LAYERED)
ALONE, BEFORE, PREPARED = "alone", "before", "prepared"
LOADS: Final = (ALONE, BEFORE, LAYERED, PREPARED)
STORE, LOAD, BOTH = "store", "load", "both"
CAPS: Final = (STORE, LOAD, BOTH)
EXPOSED_MOST: Final = 1.3
"""Of one layer's share of the load's time, where loading is faster than computing; of the prepared arm."""
CAP_BOUNDS: Final = (0.9, 1.1)
"""Of the bandwidth that was asked for."""

_Sample = TypeVar("_Sample")


class PushSample(TypedDict):
    repeat: int
    seconds: float  # from the first step's begin to the last one's end
    drain_seconds: float  # from then on until all is stored
    steps: int
    steps_ahead: int
    lead_ms: float  # least of the steps; negative: layer 0 was late
    tail_ms: float  # most


class PushPoint(TypedDict):
    arm: str
    samples: list[PushSample]
    seconds: float
    drain_seconds: float
    ratio: float  # seconds / none
    ahead: float  # steps_ahead / steps, of the worst sample
    lead_ms: float
    tail_ms: float


class LoadSample(TypedDict):
    repeat: int
    alone_seconds: float
    before_seconds: float
    load_seconds: float  # of the arm that loads before
    layered_seconds: float
    layered_exposed_seconds: float  # begin, each layer, end
    prepared_seconds: float
    prepared_exposed_seconds: float


class ByLayers(TypedDict):
    ms: float
    gained: float
    exposed_ms: float
    exposed_ms_min: float
    exposed_ms_max: float
    quotient: float


class LoadPoint(TypedDict):
    ratio: float
    cap_gb_per_s: float | None
    samples: list[LoadSample]
    alone_ms: float
    before_ms: float
    load_ms: float
    layer_ms: float  # load / layers
    load_per_compute: float
    layered: ByLayers
    prepared: ByLayers


class CapSample(TypedDict):
    repeat: int
    nbytes: int
    seconds: float
    gb_per_s: float
    load_gb_per_s: float | None


class CapPoint(TypedDict):
    way: str
    asked_gb_per_s: float | None
    samples: list[CapSample]
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    load_gb_per_s: float | None


class ShareSample(TypedDict):
    repeat: int
    step_seconds: float  # median of the steps
    exposed_seconds: float  # likewise


class SharePoint(TypedDict):
    asked: float
    share: float  # layers / all layers
    layers: int
    samples: list[ShareSample]
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    exposed_ms: float
    ratio: float  # step / that of share 0
    predicted_ms: float


class LayerwiseResult(TypedDict):
    schema: str
    machine: dict[str, str | int]
    torch: str
    device: str
    options: dict[str, object]
    notes: list[str]
    push: list[PushPoint]
    load: list[LoadPoint]
    cap: list[CapPoint]
    share: list[SharePoint]
    pipeline: PipelineJson | None
    verified_bytes: int
    gate: list[GateJson]
    seconds: float


def push_points(samples: dict[str, list[PushSample]]) -> list[PushPoint]:
    """Make a point of each arm; they have as many samples, in the same order."""
    return [
        PushPoint(
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


def load_point(ratio: float, cap_bytes_per_s: float | None, layers: int, samples: list[LoadSample]) -> LoadPoint:
    """Make a point of its samples."""
    load_s = _of(samples, lambda each: each["load_seconds"])
    return LoadPoint(
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
) -> ByLayers:
    exposed = [exposed_s(each) * 1e3 for each in samples]
    return ByLayers(
        ms=_of(samples, lambda each: seconds(each) * 1e3),
        gained=_of(samples, lambda each: each["before_seconds"] / seconds(each)),
        exposed_ms=middle(exposed), exposed_ms_min=min(exposed), exposed_ms_max=max(exposed),
        quotient=_of(samples, lambda each: exposed_s(each) / (each["load_seconds"] / layers)),
    )  # fmt: skip


def cap_point(way: str, asked_gb_per_s: float | None, samples: list[CapSample]) -> CapPoint:
    """Make a point of its samples."""
    rates = [each["gb_per_s"] for each in samples]
    loads = [each["load_gb_per_s"] for each in samples if each["load_gb_per_s"] is not None]
    return CapPoint(
        way=way, asked_gb_per_s=asked_gb_per_s, samples=samples,
        gb_per_s=middle(rates), gb_per_s_min=min(rates), gb_per_s_max=max(rates),
        load_gb_per_s=middle(loads) if loads else None,
    )  # fmt: skip


def share_point(
    asked: float, remote: tuple[int, int], samples: list[ShareSample], bases: list[ShareSample]
) -> SharePoint:
    """Make a point of its samples, without the prediction; `remote` is (remote layers, all layers), `bases` are the
    samples of share 0."""
    steps = [each["step_seconds"] * 1e3 for each in samples]
    return SharePoint(
        asked=asked, share=remote[0] / remote[1], layers=remote[0], samples=samples,
        step_ms=middle(steps), step_ms_min=min(steps), step_ms_max=max(steps),
        exposed_ms=_of(samples, lambda each: each["exposed_seconds"] * 1e3),
        ratio=middle([one["step_seconds"] / base["step_seconds"] for one, base in zip(samples, bases, strict=True)]),
        predicted_ms=0.0,
    )  # fmt: skip


def _of(samples: Sequence[_Sample], figure: Callable[[_Sample], float]) -> float:
    return middle([figure(each) for each in samples])


def gate_lines(result: LayerwiseResult) -> list[GateJson]:
    """Judge every line of what was measured. No bar applies where loads take longer than computing, nor to a bound on
    what is no faster without."""
    judged = [
        GateJson(
            name="push: layer 0 is out before the last is computed",
            bound=">= 1.00", measured=point["ahead"], passed=point["ahead"] >= 1,
        )
        for point in result["push"] if point["arm"] == LAYERED
    ]  # fmt: skip
    for each in result["load"]:
        if each["load_per_compute"] <= 1:
            name, quotient = f"load: exposed, {_asked(each)}", each["prepared"]["quotient"]
            passed = quotient <= EXPOSED_MOST
            judged.append(GateJson(name=name, bound=f"<= {EXPOSED_MOST:.2f}", measured=quotient, passed=passed))
    free = {point["way"]: point["gb_per_s"] for point in result["cap"] if point["asked_gb_per_s"] is None}
    for cap in result["cap"]:
        asked, rate = cap["asked_gb_per_s"], cap["gb_per_s"]
        if asked is not None and free[cap["way"]] >= asked * CAP_BOUNDS[1]:
            low, high = (asked * factor for factor in CAP_BOUNDS)
            bound, passed = f"{low:.2f} to {high:.2f}", low <= rate <= high
            judged.append(GateJson(name=f"cap: {cap['way']}, GB/s", bound=bound, measured=rate, passed=passed))
    return judged


def table_lines(result: LayerwiseResult) -> Iterator[str]:
    """Give the report, line by line: everything in it is in the JSON."""
    machine, options = result["machine"], result["options"]
    yield (
        f"{result['device']}; {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load"
        f" {machine['load_1min']} before; torch {result['torch']}"
    )
    yield "; ".join(f"{name} {value}" for name, value in options.items())
    yield from result["notes"]
    yield from _push_lines(result["push"])
    yield from _load_lines(result["load"])
    yield from _cap_lines(result["cap"])
    yield from _share_lines(result)
    yield ""
    yield f"Verified: {result['verified_bytes'] / 1e9:.2f} GB of KV compared in full and every output, 0 wrong."
    for line in result["gate"]:
        verdict = "held" if line["passed"] else "MISSED"
        yield f"  {verdict:<6}  {line['name']:<50} {line['bound']:>12} {line['measured']:7.2f}"


def _push_lines(points: list[PushPoint]) -> Iterator[str]:
    if points:
        yield ""
        yield f"  {'prefill':<10} {'s':>8} {'x none':>7} {'drain s':>8} {'ahead':>7} {'lead ms':>9} {'tail ms':>9}"
    for point in points:
        line = f"  {point['arm']:<10} {point['seconds']:8.3f} {point['ratio']:7.3f} {point['drain_seconds']:8.3f}"
        if point["arm"] == LAYERED:
            line += f" {point['ahead']:7.0%} {point['lead_ms']:9.2f} {point['tail_ms']:9.2f}"
        yield line


def _load_lines(points: list[LoadPoint]) -> Iterator[str]:
    if points:
        yield ""
        yield (
            f"  {'load beside compute':<20} {'load ms':>9} {'/compute':>9} {'alone ms':>9} {'before ms':>10}"
            f" {'leased':<8} {'layers ms':>10} {'gained':>7} {'exposed ms':>11} {'least to most':>16} {'x load/L':>9}"
        )
    for each in points:
        line = (
            f"  {_asked(each):<20} {each['load_ms']:9.2f} {each['load_per_compute']:9.2f} {each['alone_ms']:9.2f}"
            f" {each['before_ms']:10.2f}"
        )
        yield f"{line} {'then':<8}{_by_layers_cells(each['layered'])}"
        yield f"{'':{len(line)}} {'before':<8}{_by_layers_cells(each['prepared'])}"


def _by_layers_cells(point: ByLayers) -> str:
    spread = f"{point['exposed_ms_min']:.2f} to {point['exposed_ms_max']:.2f}"
    cells = f" {point['ms']:10.2f} {point['gained']:6.2f}x {point['exposed_ms']:11.2f} {spread:>16}"
    return f"{cells} {point['quotient']:9.2f}"


def _cap_lines(points: list[CapPoint]) -> Iterator[str]:
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
    yield (
        f"  {'share':>5} {'layers':>7} {'step ms':>9} {'least to most':>16} {'x none':>7} {'plan ms':>9} {'idle ms':>9}"
    )
    for point in result["share"]:
        spread = f"{point['step_ms_min']:.2f} to {point['step_ms_max']:.2f}"
        yield (
            f"  {point['share']:5.2f} {point['layers']:7} {point['step_ms']:9.2f} {spread:>16} {point['ratio']:7.2f}"
            f" {point['predicted_ms']:9.2f} {point['exposed_ms']:9.2f}"
        )


def _asked(point: LoadPoint) -> str:
    return "no bound" if point["cap_gb_per_s"] is None else f"load/compute {point['ratio']:g}"
