"""What min_retrieve_tokens = auto needs to know of an engine that computes in steps and loads behind their backs.

The scheduler sees neither the model nor the loads at work, only when a step was asked for and when its output came.
That is what an engine waits for, so it is what is measured. Steps follow each other: one takes from when it was asked
for, or from when the one before was over, whichever is later, until its output comes.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from kvredis.adapters.vllm.shared import Shared
from kvredis.backends.base import Tier

from .block import block_bytes
from .break_even import Piece

PREFILLS_ASKED_MAX = 64
"""How many hits of a size may be computed to see how long that takes. A server's first requests come together, before
any of them can tell."""
NEAREST_FIRST: Sequence[Tier] = ("memory", "disk", "remote")


class Worth:
    """Measures steps and loads, and says which chunks come sooner than they are computed. One thread calls it."""

    def __init__(self, shared: Shared, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shared = shared
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._over_s = 0.0
        self._loads: dict[str, tuple[float, Tier, int]] = {}
        self._latest: list[Piece] | None = None  # chosen, and not yet said for whom
        self._chosen: dict[str, list[Piece]] = {}

    def narrow(self, keys: Sequence[bytes], tokens: int, rest: int) -> int:
        """Of these chunks of `tokens` tokens each, how many to load, from the first on, where `rest` tokens are to be
        computed without them. None while nobody knows how long that takes."""
        layout = self._shared.break_even.layout
        tiers = self._shared.backend.tiers_of(keys)
        for tier in set(tiers):
            there = (key for key, where in zip(keys, tiers, strict=True) if where == tier)
            self._shared.probes.found(tier, there)
        self._shared.probes.begin()
        pieces = [Piece(tier, block_bytes(layout, layout.chunk_tokens), tokens) for tier in tiers]
        break_even, count = self._shared.break_even, 0
        if break_even.ask_prefill(rest, PREFILLS_ASKED_MAX):
            self._shared.probes.begin(of_unmeasured=True)
        else:
            count = break_even.worth(pieces, rest)
        self._latest = pieces[:count]
        return count

    def asked(self, request: str) -> None:
        """A request was asked for: what `narrow` has chosen since the last one is its own. Others may be asked for
        before it is loaded, and it need not be."""
        latest, self._latest = self._latest, None
        if latest is not None:
            self._chosen[request] = latest

    def load_began(self, request: str) -> None:
        """The chunks chosen for a request are being loaded."""
        chosen = self._chosen.pop(request, [])
        if chosen:
            self._loads[request] = (self._clock(), *_farthest(chosen))

    def load_over(self, request: str, *, failed: bool) -> None:
        """That load is over; a failed one says nothing of its tier's speed."""
        began_s, tier, nbytes = self._loads.pop(request, (0.0, "memory", 0))
        if nbytes and not failed:
            self._shared.break_even.load_took(tier, nbytes, self._clock() - began_s)

    def forget(self, request: str) -> None:
        """A request has ended. A load that is under way is not waited for any more, and ends when it likes."""
        self._chosen.pop(request, None)
        self._loads.pop(request, None)

    def step_began(self, tokens: int) -> None:
        """A step that computes so many tokens is handed to the workers. One of none, in which an engine waits for loads
        alone, is not noted: vLLM tells of its output only where there is news in it."""
        if tokens:
            self._steps.append((self._clock(), tokens))

    def step_over(self) -> None:
        """The output of the oldest step has come."""
        now_s = self._clock()
        if self._steps:
            began_s, tokens = self._steps.popleft()
            self._shared.break_even.prefill_took(tokens, now_s - max(began_s, self._over_s))
        self._over_s = now_s


def _farthest(pieces: Sequence[Piece]) -> tuple[Tier, int]:
    """The tier that a load is put down to, and all of its bytes."""
    farthest = max(pieces, key=lambda piece: NEAREST_FIRST.index(piece.tier))
    return farthest.tier, sum(piece.nbytes for piece in pieces)
