"""`kvredis bench links` as a whole: what copies between any two places of this machine, and how long a token takes.

Parts: memory (memory.py), processes (process.py, with peer.py as the other one) and gpus
(gpu.py), which a machine without any says it has not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvredis.bench.core.machine import machine_facts
from kvredis.bench.core.result import Progress
from kvredis.bench.core.statistics import MIB

from . import gpu
from .memory import run_memory
from .process import COPY_WAYS, peer_of, run_copies, run_tokens
from .result import SCHEMA, LinksResult

PARTS = ("memory", "processes", "gpus")
_PLACES_MOST = 5


@dataclass(frozen=True, slots=True)
class LinksPlan:
    """How much is moved: `nbytes` one way in each repeat of each link, and `rounds` of each token."""

    parts: Sequence[str] = PARTS
    repeats: int = 5
    nbytes: int = 256 * MIB
    rounds: int = 2000

    def steps(self) -> int:
        """Give how often `run` calls its progress at most."""
        steps = self.repeats * _PLACES_MOST if "memory" in self.parts else 0
        steps += self.repeats * (len(COPY_WAYS) + 1) if "processes" in self.parts else 0
        gpus = "gpus" in self.parts and gpu.obstacle() is None
        return steps + (gpu.steps(self.repeats) if gpus else 0)


QUICK = LinksPlan(repeats=3, nbytes=64 * MIB, rounds=300)


def run(plan: LinksPlan, progress: Progress) -> LinksResult:
    """Measure all of `plan`. Raises KVRedisError, VerificationError at a wrong byte; no process is left behind."""
    start_s = time.monotonic()
    result = LinksResult(
        schema=SCHEMA,
        machine=machine_facts(),
        options={**asdict(plan), "parts": list(plan.parts)},
        notes=[],
        gpus=[],
        peers=[],
        copies=[],
        latencies=[],
        verified_bytes=0,
        seconds=0.0,
    )
    if "memory" in plan.parts:
        result["copies"] += run_memory(plan.nbytes, plan.repeats, progress, result["notes"])
    if "processes" in plan.parts:
        with peer_of(plan.nbytes) as peer:
            result["copies"] += run_copies(peer, plan.repeats, progress)
            result["latencies"] += run_tokens(peer, plan.repeats, plan.rounds, progress)
    if "gpus" in plan.parts:
        _gpus(plan, progress, result)
    result["verified_bytes"] = sum(sample["verified_bytes"] for row in result["copies"] for sample in row["samples"])
    result["seconds"] = time.monotonic() - start_s
    return result


def _gpus(plan: LinksPlan, progress: Progress, result: LinksResult) -> None:
    obstacle = gpu.obstacle()
    if obstacle is not None:
        result["notes"].append(obstacle)
        return
    found = gpu.run_gpus(plan.nbytes, plan.repeats, plan.rounds, progress)
    result["gpus"], result["peers"] = found.names, found.peers
    result["copies"] += found.copies
    result["latencies"] += found.latencies
