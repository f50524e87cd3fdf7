"""What goes between CPU memory and GPUs, and between GPUs, with torch: the copy engines, one way and both at once.

Page-locked memory is copied by the GPU itself; pageable memory goes through the driver's own. GPUs that can reach one
another's memory copy directly, others through the CPU's. Every copy is compared in full, on the CPU. torch is imported
when a GPU is looked for, not before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

from kvredis import install_line
from kvredis.bench.core.errors import VerificationError
from kvredis.bench.core.result import Progress, Row
from kvredis.bench.core.statistics import GB, percentile

from .memory import CopySample, LatencySample, Link, copy_row, latency_row, timed_together

CPU: Final = "CPU"
GPUS_MAX: Final = 8
PASSES: Final = 8
"""So often in a row each copy is made, or starting it and waiting for it would be part of a GPU's bandwidth."""
_SEED: Final = 20250106
_TOKEN_BYTES: Final = 16


@dataclass(slots=True)
class Gpus:
    """What is known of the GPUs: their names, who reaches whom, and what was measured."""

    names: list[str] = field(default_factory=list)
    peers: list[list[bool]] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)
    latencies: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One tensor to another of the same bytes, by the copy engine of a stream of its own."""

    source: Any
    target: Any
    stream: Any

    def begin(self) -> None:
        import torch

        with torch.cuda.stream(self.stream):
            for _ in range(PASSES):
                self.target.copy_(self.source, non_blocking=True)

    def run(self) -> None:
        self.begin()
        self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Arm:
    """One link and its copies: one, or one each way."""

    link: Link
    copies: Sequence[_Copy]


def obstacle() -> str | None:
    """Say why there is nothing to measure: no torch, or no GPU; None when there is one."""
    if find_spec("torch") is None:
        return f"no GPU part: torch is not installed ({install_line('bench')})"
    import torch

    return None if torch.cuda.is_available() else "no GPU"


def run_gpus(nbytes: int, repeats: int, rounds: int, progress: Progress) -> Gpus:
    """Measure every pair; VerificationError at a wrong byte. There is a GPU, as `obstacle` says."""
    import torch

    count = min(GPUS_MAX, torch.cuda.device_count())
    found = Gpus([torch.cuda.get_device_name(at) for at in range(count)])
    found.peers = [
        [at == to or bool(torch.cuda.can_device_access_peer(at, to)) for to in range(count)] for at in range(count)
    ]
    arms = _arms(nbytes, count)
    for arm in arms:  # contexts, peer access and staging are made by the first copy
        _timed(arm)
    samples: list[list[CopySample]] = [[] for _ in arms]
    tokens: list[list[LatencySample]] = [[] for _ in range(2 * count)]
    for repeat in range(repeats):
        for arm, own in zip(arms, samples, strict=True):
            progress(f"GPUs: {arm.link['way']}")
            own.append(_sample(arm, nbytes, repeat))
        for at in range(count):
            for back in (0, 1):
                tokens[2 * at + back].append(_token(at, back, repeat, rounds))
    found.copies = [copy_row(arm.link, nbytes, own) for arm, own in zip(arms, samples, strict=True)]
    for at in range(count):
        for back, ends in enumerate(((CPU, f"GPU {at}"), (f"GPU {at}", CPU))):
            found.latencies.append(latency_row("gpu", "pinned", ends, tokens[2 * at + back]))
    return found


def steps(repeats: int) -> int:
    """Give how often `run_gpus` calls its progress here."""
    import torch

    count = min(GPUS_MAX, torch.cuda.device_count())
    return repeats * (6 * count + count + 2 * count * (count - 1))


def _arms(nbytes: int, count: int) -> list[_Arm]:
    """Lay out memory and links: to, from and both, pinned and pageable, for each GPU; within each; each pair of two."""
    import torch

    random = torch.Generator().manual_seed(_SEED)
    known = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
    arms = []
    for at in range(count):
        gpu = torch.device("cuda", at)
        streams = [_stream(gpu) for _ in range(2)]
        there, room = known.to(gpu), torch.empty(nbytes, dtype=torch.uint8, device=gpu)
        for way in ("pinned", "pageable"):
            near = known.pin_memory() if way == "pinned" else known.clone()
            into = torch.empty(nbytes, dtype=torch.uint8, pin_memory=way == "pinned")
            out, back = _Copy(near, room, streams[0]), _Copy(there, into, streams[1])
            arms += _both((way, CPU, f"GPU {at}"), out, back)
        arms.append(_Arm(_link("device", f"GPU {at}", f"GPU {at}", "uni"), [_Copy(there, room, streams[0])]))
        for to in range(count):
            if to != at:
                other = torch.device("cuda", to)
                far, room_far = known.to(other), torch.empty(nbytes, dtype=torch.uint8, device=other)
                out = _Copy(there, room_far, streams[0])
                back = _Copy(far, room, _stream(other))
                uni, _, bi = _both(("peer", f"GPU {at}", f"GPU {to}"), out, back)
                arms += [uni, bi]
    return arms


def _stream(device: Any) -> Any:
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _both(ends: tuple[str, str, str], out: _Copy, back: _Copy) -> list[_Arm]:
    way, source, target = ends
    return [
        _Arm(_link(way, source, target, "uni"), [out]),
        _Arm(_link(way, target, source, "uni"), [back]),
        _Arm(_link(way, source, target, "bi"), [out, back]),
    ]


def _link(way: str, source: str, target: str, direction: Any) -> Link:
    return Link(part="gpu", way=way, source=source, target=target, direction=direction)


def _timed(arm: _Arm) -> float:
    """Give the seconds of all copies of an arm, made at once.

    A thread that begins a pageable one goes on only when it is as good as done, so two of them need a thread each.
    Others get none: waking it up would be part of their bandwidth.
    """
    _settle()
    if arm.link["way"] == "pageable" and len(arm.copies) > 1:
        return timed_together([copy.run for copy in arm.copies])
    start_s = time.perf_counter()
    for copy in arm.copies:
        copy.begin()
    _settle()
    return time.perf_counter() - start_s


def _settle() -> None:
    import torch

    for at in range(torch.cuda.device_count()):
        torch.cuda.synchronize(at)


def _sample(arm: _Arm, nbytes: int, repeat: int) -> CopySample:
    for copy in arm.copies:
        copy.target.fill_(repeat & 0xFF)
    seconds = _timed(arm)
    for copy in arm.copies:
        if not bool((copy.source.cpu() == copy.target.cpu()).all()):
            raise VerificationError(f"a copy from {arm.link['source']} to {arm.link['target']} has a wrong byte")
    total = nbytes * len(arm.copies)
    rate = total * PASSES / seconds / GB
    return CopySample(repeat=repeat, seconds=seconds, gb_per_s=rate, verified_bytes=total)


def _token(at: int, back: int, repeat: int, rounds: int) -> LatencySample:
    import torch

    near = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.zeros(_TOKEN_BYTES, dtype=torch.uint8, device=torch.device("cuda", at))
    ends: tuple[Any, Any] = (there, near) if back else (near, there)
    wait: Callable[[], None] = torch.cuda.current_stream(at).synchronize
    times_us = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        ends[1].copy_(ends[0], non_blocking=True)
        wait()
        times_us.append((time.perf_counter() - start_s) * 1e6)
    return LatencySample(repeat=repeat, rounds=rounds, p50_us=percentile(times_us, 50), p99_us=percentile(times_us, 99))
