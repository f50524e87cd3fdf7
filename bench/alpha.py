"""How much of a prompt's KV may lie on another GPU while a model decodes behind it? `kvredis bench alpha` measures what
`kvredis plan` predicts (the rules are in plan.py's head): up to the share `a_max` the link hides behind the step, which
takes longer by what it takes to write the share to GPU memory; past it the step takes what the link takes.

A Llama with random weights decodes one token for each of several prompts, of which the first `share` lies on another
GPU, or in the host's page-locked memory where there is no other, and comes layer by layer while the layers before
compute (kvredis.adapters.transformers.StreamedCache). A step is one CUDA graph, copies included: launched from Python
it would wait for the CPU, and the link would hide behind that. `none` is the same model with transformers' own layout,
all of it local. All shares are measured in turns, in each repeat, and a share's ratio is to `none` of the same repeat.

The rule takes from the same machine, minutes before at most:
    hbm_gb_per_s    GPU memory: a copy within the GPU, read and written
    link_gb_per_s   a copy of 256 MiB from where shares lie, by the GPU that decodes
    overhead_ms     what a step's copies, two a layer, take if they are of 16 bytes
    kv_gb           KV that a step reads, of all prompts
    other_ms        none's step less kv_gb / hbm_gb_per_s
A step with a share is predicted to take as long as none and its bytes / hbm_gb_per_s, or overhead_ms + its bytes /
link_gb_per_s if that is longer. The gate judges the largest share within a_max and within plan's landing_share.
How many prompts there are decides where a_max is: the weights are read once for all of them, so each prompt more leaves
the link less time for its KV. Unless told, there are as many as put a_max near A_MAX_WANTED by the speeds alone.

Logits are compared after each sample, bit by bit, with those of share 0, whose memory has the same layout; `equal` is
the part of samples that were alike, and `apart` by how much, of the largest logit, a share's differ from none's, whose
kernels may add up in another order. More than APART_MAX is a VerificationError.

The file, kvredis.bench.alpha/1, has beside what every result has
    torch, device, link   what computes, and where shares lie: the GPU's name, or CPU
    speeds                the figures above, and weights_gb, prompts, is_graph, none_ms, a_max and landing_share
    rows                  share (None: none), share_tokens, local_gb (GPU memory for KV), step_gb (brought in a step),
                          samples; medians of ms; ratio, predicted, of_predicted (ratio / predicted), equal, apart
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final, TypedDict

from .core.compute import TINY, Graphed, forward_of, llama, use_attention
from .core.errors import BenchError, VerificationError
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
    spread,
    table,
)
from .core.shapes import SHAPES, ModelShape
from .core.statistics import GB, MIB, by_repeat, counted, paired_ratios, rotated
from .cuda import Cuda, Place, open_cuda
from .plan import Pipeline, landing_share, remote_share

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA: Final = "kvredis.bench.alpha/1"
CPU: Final = "CPU"
PLAIN: Final = "none"
A_MAX_WANTED: Final = 0.25
"""By speeds alone; a step takes longer than its bytes do, so what is measured lies above it, and below 0.5."""
RATIO_BAR: Final = 1.05
PREDICTED_BAR: Final = (0.85, 1.15)
PROMPTS_MAX: Final = 16
_MEMORY_SHARE: Final = 0.85
"""Of the GPU's free memory, that weights and KV may take."""
APART_MAX: Final = 0.05
_TRIALS: Final = 3
_LINK_BYTES: Final = 256 * MIB
_PASSES: Final = 8
_TOKEN_BYTES: Final = 16
_TOKENS: Final = 100
_SEED: Final = 20250107
_CPU_SHAPE: Final = replace(TINY, layers=4)
_WITHOUT_GPU: Final = "There is no GPU: shares lie in the CPU's memory as all does, and only logits are judged"


class Speeds(TypedDict, total=False):
    """What the rule takes; `link` is where shares lie."""

    link: str
    hbm_gb_per_s: float
    link_gb_per_s: float
    copy_us: float  # a copy of 16 bytes, one of many
    weights_gb: float
    prompts: int
    kv_gb: float
    is_graph: bool
    none_ms: float
    other_ms: float
    overhead_ms: float
    a_max: float
    landing_share: float


class AlphaResult(Result):
    torch: str
    device: str
    speeds: Speeds
    rows: list[Row]


class Sample(TypedDict):
    repeat: int
    ms: float
    equal: bool
    apart: float


@dataclass(frozen=True, slots=True)
class AlphaPlan:
    """What one call does. None: `shape` 8b and `tokens` 15,400, without a GPU a tiny model's and 192; `prompts` as many
    as the head says, without a GPU two; `steps` of a sample 20, without a GPU two. Shares lie on another GPU where
    there is one, with `through_host` in the host's memory all the same."""

    shape: ModelShape | None = None
    tokens: int | None = None
    prompts: int | None = None
    shares: tuple[float, ...] = tuple(round(0.05 * at, 2) for at in range(11))
    repeats: int = 5
    steps: int | None = None
    through_host: bool = False
    graphs: bool = True

    def count(self) -> int:
        """Give how often `run` calls its progress, at most."""
        return 3 + len(self.shares) + 2 + self.repeats * (len(self.shares) + 2)


QUICK: Final = AlphaPlan(shares=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5), repeats=3)


def run(plan: AlphaPlan, progress: Progress, cuda: Cuda | str | None = None) -> AlphaResult:
    """Measure. VerificationError at logits that are others, BenchError for what cannot be measured; `cuda` defaults to
    this machine's GPUs, and is closed."""
    import torch

    began_s = time.perf_counter()
    if any(not 0 <= share <= 1 for share in plan.shares):
        raise BenchError("a share is 0 to 1")
    cuda = open_cuda(2) if cuda is None else cuda
    progress("memory and link")
    speeds = host_speeds() if isinstance(cuda, str) else gpu_speeds(cuda, through_host=plan.through_host)
    on_gpu = torch.cuda.is_available() and not isinstance(cuda, str)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    shape = plan.shape or (SHAPES["8b"] if on_gpu else _CPU_SHAPE)
    tokens = plan.tokens or (15_400 if on_gpu else 192)
    progress("weights")
    model = llama(shape, tokens + 1, device)
    use_attention(model)
    speeds["weights_gb"] = sum(own.numel() * own.element_size() for own in model.parameters()) / GB
    each_gb = shape.block_bytes(tokens) / GB
    speeds["prompts"] = plan.prompts or 2
    if on_gpu and plan.prompts is None:
        free_gb = torch.cuda.mem_get_info(device)[0] / GB
        speeds["prompts"] = prompts_for(each_gb, speeds, caches(plan.shares), free_gb)
    speeds["kv_gb"] = speeds["prompts"] * each_gb
    result = AlphaResult(
        **new_result(
            SCHEMA, asdict(plan) | {"shape": shape.name, "tokens": tokens, "prompts": speeds["prompts"]},
            [] if on_gpu else [_WITHOUT_GPU],
        ),
        torch=str(torch.__version__), device=torch.cuda.get_device_name(device) if on_gpu else "No GPU",
        speeds=speeds, rows=[],
    )  # fmt: skip
    with torch.inference_mode():
        _measure(plan, progress, _Bench(model, shape, tokens, speeds, device, plan), result)
    result["gate"] = alpha_gate(result["rows"], speeds if on_gpu else None)
    result["seconds"] = time.perf_counter() - began_s
    return result


def _measure(plan: AlphaPlan, progress: Progress, bench: _Bench, result: AlphaResult) -> None:
    speeds = bench.speeds
    progress("KV")
    arms = [bench.plain()]
    trial_ms = median([bench.sample(arms[0], -1)["ms"] for _ in range(_TRIALS)])
    at_most = math.floor(100 * min(_pipeline(speeds, trial_ms, bench.layers)[1:])) / 100
    for share in sorted({0.0, *plan.shares, *([at_most] if at_most <= max(plan.shares, default=0.0) else [])}):
        progress(f"KV with {share:.0%} elsewhere")
        arms.append(bench.streamed(share))
    bench.refer_to(arms[1])
    speeds["is_graph"] = all(arm.step.is_graph for arm in arms)
    if bench.device.type == "cuda" and not speeds["is_graph"]:
        result["notes"].append("Steps are launched one by one, and not as CUDA graphs: the link hides behind the CPU")
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    for repeat in range(plan.repeats):
        for arm in rotated(arms, repeat):
            progress(f"a step with {arm.name}")
            samples[arm.name].append(bench.sample(arm, repeat))
    speeds["none_ms"] = median([sample["ms"] for sample in samples[PLAIN]])
    pipeline, speeds["a_max"], speeds["landing_share"] = _pipeline(speeds, speeds["none_ms"], bench.layers)
    speeds["other_ms"], speeds["overhead_ms"] = pipeline.other_ms, pipeline.overhead_ms
    result["rows"] = [_row(arm, samples[arm.name], samples[PLAIN], speeds) for arm in arms]
    result["verified_bytes"] = bench.verified_bytes


def _pipeline(speeds: Speeds, none_ms: float, layers: int) -> tuple[Pipeline, float, float]:
    """Give what the rules take, and what they say: a_max and landing_share."""
    pipeline = Pipeline(
        speeds["hbm_gb_per_s"], speeds["link_gb_per_s"],
        other_ms=none_ms - 1e3 * speeds["kv_gb"] / speeds["hbm_gb_per_s"],
        overhead_ms=2 * layers * speeds["copy_us"] / 1e3, kv_gb=speeds["kv_gb"],
    )  # fmt: skip
    return pipeline, remote_share(pipeline, speeds["kv_gb"]), landing_share(pipeline, speeds["kv_gb"])


def prompts_for(each_gb: float, speeds: Speeds, caches_count: float, free_gb: float) -> int:
    """Give how many prompts, of `each_gb` of KV, put a_max near where it is wanted, and leave room for all caches.

    a_max = link x (weights / hbm + KV / hbm) / KV, solved for the number of prompts whose KV that is.
    """
    link, hbm = speeds["link_gb_per_s"], speeds["hbm_gb_per_s"]
    left = A_MAX_WANTED - link / hbm
    wanted = PROMPTS_MAX if left <= 0 else round(speeds["weights_gb"] / hbm * link / left / each_gb)
    return max(1, min(wanted, PROMPTS_MAX, int(_MEMORY_SHARE * free_gb / (each_gb * caches_count))))


def caches(shares: Sequence[float]) -> float:
    """Give how many times a prompt's KV all caches take: none's, each share's local part, share 0's and a_max's, which
    is at most as much."""
    return 3 + sum(1 - share for share in shares if share)


def _row(arm: _Arm, samples: Sequence[Sample], plain: Sequence[Sample], speeds: Speeds) -> Row:
    ratios = paired_ratios(by_repeat(samples, "ms"), by_repeat(plain, "ms"))
    predicted = None
    if arm.share is not None:
        came_ms = speeds["overhead_ms"] + 1e3 * arm.step_gb / speeds["link_gb_per_s"] if arm.step_gb else 0.0
        landed_ms = 1e3 * arm.step_gb / speeds["hbm_gb_per_s"]
        predicted = max(speeds["none_ms"] + landed_ms, came_ms) / speeds["none_ms"]
    row = Row(
        share=arm.share, share_tokens=arm.share_tokens, local_gb=arm.local_gb, step_gb=arm.step_gb, samples=samples,
        predicted=predicted, equal=sum(sample["equal"] for sample in samples) / len(samples),
        apart=max(sample["apart"] for sample in samples),
    )  # fmt: skip
    row |= spread("ms", [sample["ms"] for sample in samples]) | spread("ratio", ratios)
    row["of_predicted"] = None if predicted is None else row["ratio"] / predicted
    return row


def alpha_gate(rows: Sequence[Row], speeds: Speeds | None) -> list[GateLine]:
    """Judge: logits, and on a GPU, whose `speeds` are told, what a share within both rules costs, and one past them."""
    shared = [row for row in rows if row["share"] is not None]
    lines = [gate_line("samples with the logits of share 0, least", "= 1", min(row["equal"] for row in shared))]
    if speeds is None:
        return lines
    a_max = speeds["a_max"]
    most_within = min(a_max, speeds["landing_share"])
    below = max((row for row in shared if row["share"] <= most_within), key=_share)  # share 0, if none else
    past = [row for row in shared if row["share"] > a_max]
    lines.append(
        gate_line(
            f"up to {most_within:.3f}: share {_share(below):.2f}, step / none", f"<= {RATIO_BAR}x", below["ratio"]
        )
    )
    if not past:
        return [*lines, gate_line("no share is past it: more --prompts, or larger --shares", f"> {RATIO_BAR}x", None)]
    most = max(past, key=_share)
    lines.append(gate_line(f"past it: share {_share(most):.2f}, step / none", f"> {RATIO_BAR}x", most["ratio"]))
    low, high = PREDICTED_BAR
    worst = max((float(row["of_predicted"]) for row in past), key=lambda part: abs(math.log(part)))
    lines.append(gate_line("past it: step / predicted, farthest from 1", f"{low} to {high}", worst))
    return lines


def _share(row: Row) -> float:
    return float(row["share"])


_COLUMNS: Final[tuple[Column, ...]] = (
    ("alpha", lambda row: PLAIN if row["share"] is None else f"{row['share']:.2f}", ""),
    ("tokens there", "share_tokens", ","),
    ("KV here GB", "local_gb", ".2f"),
    ("step ms", "ms", ".3f"),
    ("least to most", ("ms_min", "ms_max"), ".3f"),
    ("/ none", "ratio", ".3f"),
    ("least to most", ("ratio_min", "ratio_max"), ".3f"),
    ("predicted", "predicted", ".3f"),
    ("/ predicted", "of_predicted", ".3f"),
    ("equal", "equal", ".2f"),
)


def table_lines(result: AlphaResult) -> Iterator[str]:
    """Give the report, line by line."""
    speeds, options = result["speeds"], result["options"]
    yield from machine_lines(result["machine"], f"{result['device']}; ")
    yield f"torch {result['torch']}"
    yield from result["notes"]
    yield (
        f"{options['shape']}, {counted(speeds['prompts'], 'prompt')} of {options['tokens']:,} tokens:"
        f" {speeds['kv_gb']:.2f} GB of KV and {speeds['weights_gb']:.2f} GB of weights a step"
    )
    yield (
        f"Memory {speeds['hbm_gb_per_s']:.0f} GB/s, link to {speeds['link']} {speeds['link_gb_per_s']:.1f} GB/s;"
        f" of a step {speeds['other_ms']:.2f} ms beside reading KV, {speeds['overhead_ms']:.3f} ms for its copies alone"
    )
    yield f"a_max = {speeds['a_max']:.3f}, landing_share = {speeds['landing_share']:.3f}"
    yield ""
    yield from table(_COLUMNS, result["rows"])
    yield ""
    shared = [row for row in result["rows"] if row["share"] is not None]
    yield (
        f"Logits: {sum(sample['equal'] for row in shared for sample in row['samples'])} of"
        f" {sum(len(row['samples']) for row in shared)} samples as with share 0, bit by bit; apart from none's by"
        f" {max(row['apart'] for row in shared):.1e} of the largest"
    )
    yield from gate_lines(result["gate"])


# -- speeds ------------------------------------------------------------------------------------------------------------


def gpu_speeds(cuda: Cuda, *, through_host: bool = False, nbytes: int = _LINK_BYTES) -> Speeds:
    """Measure the first GPU's memory, and its link to the second, if it reaches that, or else to the host's memory.
    Closes `cuda`. Raises BenchError where the driver fails."""
    with closing(cuda):
        peer = not through_host and len(cuda.names) > 1 and cuda.peers[0][1]
        own, other = cuda.device_memory(0, nbytes), cuda.device_memory(0, nbytes)
        away = cuda.device_memory(1, nbytes) if peer else cuda.host_memory(nbytes)
        pairs = [(0, 1), (1, 0)] if peer else []
        for pair in pairs:
            cuda.allow_peer(*pair, True)
        stream = cuda.stream(0)
        start, end = cuda.event(0), cuda.event(0)

        def row_us(source: Place, size: int, times: int) -> float:
            """Of many copies in a row, by the GPU's clock, one."""
            cuda.copy(other, own, nbytes, stream)  # while that is done the others are enqueued
            cuda.record(start, stream)
            for _ in range(times):
                cuda.copy(other, source, size, stream)
            cuda.record(end, stream)
            cuda.wait(stream)
            return cuda.elapsed_us(start, end) / times

        def middle_us(source: Place, size: int, times: int) -> float:
            row_us(source, size, 1)
            return median(row_us(source, size, times) for _ in range(_TRIALS))

        speeds = Speeds(
            link=cuda.names[1] if peer else CPU,
            hbm_gb_per_s=2 * nbytes / GB / (1e-6 * middle_us(own, nbytes, _PASSES)),
            link_gb_per_s=nbytes / GB / (1e-6 * middle_us(away, nbytes, _PASSES)),
            copy_us=middle_us(away, _TOKEN_BYTES, _TOKENS),
        )
        for pair in pairs:  # torch has its own way to it
            cuda.allow_peer(*pair, False)
        return speeds


def host_speeds(nbytes: int = 16 * MIB) -> Speeds:
    """Measure the CPU's copies, for a rule that nothing is judged by."""
    here, there = (ctypes.create_string_buffer(nbytes) for _ in range(2))
    times_s = []
    for _ in range(1 + _TRIALS):
        began_s = time.perf_counter()
        ctypes.memmove(here, there, nbytes)
        times_s.append(time.perf_counter() - began_s)
    rate = nbytes / GB / median(times_s[1:])
    return Speeds(link=CPU, hbm_gb_per_s=2 * rate, link_gb_per_s=rate, copy_us=0.0)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arm:
    """A way to decode: `share` None is none."""

    name: str
    share: float | None
    step: Graphed
    share_tokens: int = 0
    local_gb: float = 0.0
    step_gb: float = 0.0


class _Bench:
    """A model, prompts' random KV, and steps of decoding behind it, each the same: the new token's KV is forgotten."""

    def __init__(
        self, model: Any, shape: ModelShape, tokens: int, speeds: Speeds, device: Any, plan: AlphaPlan
    ) -> None:
        import torch

        self.speeds = speeds
        self.device = device
        self.layers = shape.layers
        self.verified_bytes = 0
        self._model = model
        self._forward = forward_of(model)
        self._tokens = tokens
        self._steps = plan.steps or (20 if device.type == "cuda" else 2)
        self._graphs_on = device if plan.graphs else torch.device("cpu")
        self._away = "cpu" if speeds["link"] == CPU else "cuda:1"
        prompts = speeds["prompts"]
        self._need(plan.shares)
        generator = torch.Generator(device).manual_seed(_SEED)
        size = (2, prompts, shape.kv_heads, tokens + 1, shape.head_dim)
        self._kv = [
            torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
            for _ in range(shape.layers)
        ]
        self._ids = torch.arange(1, prompts + 1, device=device)[:, None]
        self._reference: Tensor | None = None
        self._plain_logits: Tensor | None = None

    def _need(self, shares: Sequence[float]) -> None:
        import torch

        if self.device.type != "cuda":
            return
        need_gb = self.speeds["kv_gb"] * caches(shares)
        free_gb = torch.cuda.mem_get_info(self.device)[0] / GB
        if need_gb > free_gb:
            raise BenchError(
                f"{counted(self.speeds['prompts'], 'prompt')} want {need_gb:.0f} GB for the KV of all shares, and"
                f" {free_gb:.0f} GB are free: fewer --prompts or --shares"
            )

    def plain(self) -> _Arm:
        """None: transformers' own layout."""

        def compute(ids: Tensor) -> Tensor:
            return self._forward(ids, self._plain_cache())

        local_gb = sum(own.numel() * own.element_size() for own in self._kv) / GB
        return _Arm(PLAIN, None, self._graphed(compute), local_gb=local_gb)

    def streamed(self, share: float) -> _Arm:
        """A share elsewhere."""
        from kvredis.adapters.transformers import StreamedCache

        cache = StreamedCache(self._model, self._plain_cache(), share, share_device=self._away, new_tokens=1)

        def compute(ids: Tensor) -> Tensor:
            cache.crop(self._tokens - cache.get_seq_length())
            logits = self._forward(ids, cache)
            cache.join()
            return logits

        step = self._graphed(compute)
        return _Arm(
            f"{share:.2f} elsewhere", share, step, cache.share_tokens, cache.local_bytes / GB, cache.step_bytes / GB
        )

    def refer_to(self, arm: _Arm) -> None:
        """Take an arm's logits for those that all shares' must be."""
        self._reference = arm.step.run(self._ids).clone()

    def sample(self, arm: _Arm, repeat: int) -> Sample:
        """Time steps, and compare the last one's logits. Raises VerificationError."""
        import torch

        arm.step.run(self._ids)
        ms, logits = self._timed(arm.step)
        logits = logits.clone()
        if arm.share is None:
            self._plain_logits = logits
        if self._reference is None or self._plain_logits is None:
            return Sample(repeat=repeat, ms=ms, equal=True, apart=0.0)
        self.verified_bytes += logits.numel() * logits.element_size()
        plain = self._plain_logits.float()
        apart = float((logits.float() - plain).abs().max() / plain.abs().max())
        if not apart <= APART_MAX:  # NaN, too
            raise VerificationError(f"with {arm.name} logits differ from those of a whole cache by {apart:.3f}")
        is_equal = arm.share is None or torch.equal(logits, self._reference)
        return Sample(repeat=repeat, ms=ms, equal=is_equal, apart=apart)

    def _timed(self, step: Graphed) -> tuple[float, Tensor]:
        """Give a step's milliseconds, by the GPU's clock where there is one, and the last one's logits."""
        import torch

        if self.device.type != "cuda":
            began_s = time.perf_counter()
            for _ in range(self._steps):
                logits = step.run(self._ids)
            return 1e3 * (time.perf_counter() - began_s) / self._steps, logits
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(self._steps):
            logits = step.run(self._ids)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / self._steps, logits

    def _graphed(self, compute: Callable[[Tensor], Tensor]) -> Graphed:
        return Graphed(compute, (self.speeds["prompts"], 1), self._graphs_on)

    def _plain_cache(self) -> Any:
        from transformers import DynamicCache

        from kvredis.adapters.transformers.cache import RoomyLayer

        cache: Any = DynamicCache(config=self._model.config)
        cache.layers = [RoomyLayer(own[0], own[1], self._tokens) for own in self._kv]
        return cache
