"""`kvredis bench layerwise`: a model's layers leave for a store, and come from it, while its other layers compute.

Four questions: has the first layer left before the last is computed; how long does a device wait for a prefix that
comes layer by layer; is a bound on the bandwidth kept; and what does a step take when a share of the layers has its KV
elsewhere, beside what `kvredis plan` says. Every output and every byte is compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvredis import install_line
from kvredis.bench.core.errors import BenchError
from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.result import Progress
from kvredis.bench.core.servers import ServerProcess, kvredis_recipe
from kvredis.bench.core.shapes import BLOCK_TOKENS, SHAPES, ModelShape
from kvredis.bench.core.statistics import GB, MIB, middle, rotated
from kvredis.bench.plan.planning import Pipeline, PipelineJson, remote_share

from .arms import Prefix, cap, load, prefix, push, remote_places, share
from .model import SMALL, Marks, PagedModel, synchronize
from .result import (
    CAP_BOUNDS,
    CAPS,
    PUSHES,
    SCHEMA,
    CapSample,
    LayerwiseResult,
    LoadSample,
    PushSample,
    ShareSample,
    cap_point,
    gate_lines,
    load_point,
    push_points,
    share_point,
)
from .rig import NAME, Remote, Rig

if TYPE_CHECKING:
    from kvredis.adapters.paged.mover import ChunkMover
    from kvredis.backends.base import Backend

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
            schema=SCHEMA,
            machine=machine_facts(),
            torch=str(torch.__version__),
            device=torch.cuda.get_device_name() if on_gpu else "No GPU",
            options={"shape": shape.name, "bytes_per_token": shape.bytes_per_token(), **plan.options()},
            notes=[] if on_gpu else ["There is no GPU: one thread computes, and what moves shares its memory with it"],
            push=[], load=[], cap=[], share=[], pipeline=None, gate=[], verified_bytes=0, seconds=0.0,
        )  # fmt: skip
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
    result["gate"] = gate_lines(result)
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
