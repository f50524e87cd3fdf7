"""One, two, four, eight connections at once: GET one by one and pipelined, over TCP and over a unix socket.

Each connection is a client thread with its share of every turn's blocks; socket calls release the GIL. Connections are
new in every repeat and warmed up before the clock starts. The cell itself is server/transfer.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvredis.bench.core.shapes import ModelShape
from kvredis.bench.core.statistics import by_repeat, middle, paired_ratio, rotated
from kvredis.bench.core.wire import Wire
from kvredis.bench.core.workload import Job
from kvredis.bench.server.result import TransferSample
from kvredis.bench.server.transfer import IN_FLIGHT, timed

from .blocks import Blocks, Turn
from .result import ScalingRow

_Cell = tuple[str, str, int]  # transport, op, connections


class Doors(Protocol):
    """What this part needs of the server."""

    def connect_to(self, transport: str) -> Wire: ...
    def cpu_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """Which cells are measured."""

    connections: Sequence[int] = (1, 2, 4, 8)
    transports: Sequence[str] = ("tcp", "unix")
    ops: Sequence[str] = ("GET", "GETP")
    warm_up_blocks: int = 8


class Scaling:
    """The samples of one shape, repeat by repeat."""

    def __init__(self, plan: ScalingPlan, shape: ModelShape, blocks: Blocks, server: Doors) -> None:
        self._plan, self._shape, self._blocks, self._server = plan, shape, blocks, server
        self._samples: dict[_Cell, list[TransferSample]] = {
            (transport, op, connections): []
            for transport in plan.transports
            for op in plan.ops
            for connections in plan.connections
        }
        self._base_s: dict[int, float] = {}
        self.verified_bytes = 0

    def repeat(self, repeat: int, turn: Turn, base_s: float, shift: int) -> None:
        """Measure every cell once; `base_s` is what T0 took for the same turn, `shift` the pass that the keys hold."""
        self._base_s[repeat] = base_s
        for cell in rotated(list(self._samples), repeat * 3):
            self._blocks.wipe()
            sample = self._measure(cell, turn)
            sample["repeat"] = repeat
            sample["verified_bytes"] = self._blocks.verify_pairs(turn.pairs, shift, f"kvredis over {cell[0]}")
            self.verified_bytes += sample["verified_bytes"]
            self._samples[cell].append(sample)

    def _measure(self, cell: _Cell, turn: Turn) -> TransferSample:
        transport, op, connections = cell
        keys, place = self._blocks.keys, self._blocks.place
        with ExitStack() as stack:
            wires = [stack.enter_context(self._server.connect_to(transport)) for _ in range(connections)]
            for wire in wires:
                for index in range(self._plan.warm_up_blocks):
                    wire.get(keys[index % len(keys)], place(index % len(keys)))
            self._blocks.wipe()
            jobs = [
                [Job(keys[source], place(to)) for source, to in turn.pairs[part::connections]]
                for part in range(connections)
            ]
            return timed(self._server, wires, jobs, op, IN_FLIGHT if op == "GETP" else 1)

    def rows(self) -> list[ScalingRow]:
        """Sum up."""
        return [self._row(cell, own) for cell, own in self._samples.items()]

    def _row(self, cell: _Cell, own: list[TransferSample]) -> ScalingRow:
        transport, op, connections = cell
        return ScalingRow(
            shape=self._shape.name,
            block_bytes=self._blocks.size_bytes,
            transport=transport,
            op=op,
            connections=connections,
            samples=own,
            gb_per_s=middle([sample["gb_per_s"] for sample in own]),
            server_cpu_ms_per_gb=middle([sample["server_cpu_ms_per_gb"] for sample in own]),
            client_cpu_ms_per_gb=middle([sample["client_cpu_ms_per_gb"] for sample in own]),
            ratio_t0=paired_ratio(by_repeat(own, "seconds"), self._base_s),
        )
