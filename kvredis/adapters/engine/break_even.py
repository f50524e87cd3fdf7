"""Loading is worth its while only from a tier that is faster than the model: learn both speeds, and choose.

A token's KV can be loaded, bytes_per_token / bandwidth, or computed again, 1 / prefill rate. Where the two are equal is
the break-even bandwidth, bytes_per_token x tokens/s: a hit on a slower tier costs time. Neither speed is known in
advance, and both change: so what the engine waits for is measured, the first load from a tier is a trial, every load is
watched, and a tier that was given up is tried again behind the engine's back (probes.py).

As long as the prefill rate is unknown, what was found is computed: that costs what no cache at all costs, and tells the
rate, while a block is loaded behind the engine's back, which tells of the tier. A load would cost nobody knows what,
and leave a short rest to compute, which tells nothing (compute_cost.py).

What is computed is charged at the prefill rate alone: the forward pass that follows is there in either case. What is
loaded is charged with all that the engine waits, copies into its tensors included.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median_high
from typing import NamedTuple

from kvredis.backends.base import Tier

from .compute_cost import Passes
from .layout import ChunkLayout

logger = logging.getLogger(__name__)

LOADS_KEPT = 3
"""A tier is as fast as the middle one of its latest three loads, so that one hiccup is not the end of it. After a load
that was stopped the others are forgotten: then two fast ones have to follow."""
PREFILLS_ASKED_MAX = 4
"""How many hits of a size may be computed all the same, to see how long that takes: one to warm up, one to measure, and
for engines that do not tell not for ever."""
QUESTIONS_KEPT = 8
USED_AGAIN_SHARE = 0.8
"""A tier that was given up must need no more than this share of the time that computing takes, or it would come and go
with the noise."""
TRIAL_TIMES = 4
"""A trial, of one block of a tier that nobody has measured or that was given up, waits for this many times as long as
computing takes. What is slower still need not be known any better."""
ALLOWANCE_SHARE = 1 / 16
"""A load may fall behind by this share of what it is to save before it is stopped."""
ALLOWANCE_S_MIN = 0.005
KNOWN_CHUNKS = 4
"""While a load is under way, what was known of its tier before weighs as much as so many chunks of it."""
LATENCY_SHARE_MAX = 0.9
"""Of a load's time this much may be put down to latency; the rest at least is the bytes'."""
GB = 1e9


def break_even_bytes_per_s(bytes_per_token: int, tokens_per_s: float) -> float:
    """Give the bandwidth at which loading a token's KV takes as long as computing it; a prefill makes KV at this rate,
    too."""
    return bytes_per_token * tokens_per_s


class Piece(NamedTuple):
    """One chunk to be loaded: where it is, the bytes that move, and the tokens that need not be computed then."""

    tier: Tier
    nbytes: int
    tokens: int


class _Speed:
    """What is known of one tier."""

    __slots__ = ("given_up", "loads")

    def __init__(self) -> None:
        self.loads: deque[float] = deque(maxlen=LOADS_KEPT)  # seconds per byte, inf: nothing came
        self.given_up = False

    @property
    def seconds_per_byte(self) -> float:
        """0 while nothing is known: then it is worth a trial."""
        return median_high(self.loads) if self.loads else 0.0


class BreakEven:
    """The speeds of tiers and model as one engine has seen them, and what follows. Any thread may call anything.

    `clock` gives seconds and is read by watches. Of an engine that has never told of a prefill, though it was asked to,
    nothing is known, and everything is loaded. A load of less than a chunk says little of a speed and is not counted.
    """

    def __init__(self, layout: ChunkLayout, clock: Callable[[], float] = time.perf_counter) -> None:
        self.layout = layout
        self.clock = clock
        self._lock = threading.Lock()
        self._speeds: dict[Tier, _Speed] = {}
        self._passes = Passes(layout.chunk_tokens)
        self._questions: deque[float] = deque(maxlen=QUESTIONS_KEPT)

    # -- what is measured --------------------------------------------------------------------------------------------

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """Note a forward pass over `tokens`. Short ones count too, of single tokens even: they tell what a pass costs
        at all."""
        with self._lock:
            self._passes.took(tokens, seconds)

    def ask_prefill(self, tokens: int, at_most: int = PREFILLS_ASKED_MAX) -> bool:
        """Whether to compute `tokens` though some of them are there, because the prefill rate is unknown: where every
        prompt is found nobody would ever compute one. Counts how often it said yes, by size, up to `at_most`."""
        with self._lock:
            return self._passes.ask(tokens, at_most)

    def question_took(self, seconds: float) -> None:
        """Note how long the remote tier took to answer a question: a load from it waits so long before a byte comes."""
        with self._lock:
            self._questions.append(seconds)

    def load_took(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """Note a load, or a probe, of `nbytes` that came from `tier`; 0 bytes: they did not come in time."""
        if 0 < nbytes < self.layout.chunk_bytes():
            return
        latency_s = min(self.latency_s(tier), seconds * LATENCY_SHARE_MAX)
        seconds_per_byte = (seconds - latency_s) / nbytes if nbytes else math.inf
        with self._lock:
            self._speeds.setdefault(tier, _Speed()).loads.append(seconds_per_byte)
            self._judge(tier)

    def load_stopped(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """Note a load that was stopped, because `tier` had brought no more than `nbytes` by then: it is given up."""
        with self._lock:
            self._speeds.setdefault(tier, _Speed()).loads.clear()
        self.load_took(tier, nbytes, seconds)
        with self._lock:
            self._give_up(tier)

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float | None:
        """The prefill rate of the largest passes that are known, less what a pass costs at all. None: unknown."""
        with self._lock:
            return self._tokens_per_s()

    def prefill_s(self, tokens: int) -> float | None:
        """How long a forward pass over so many takes, as far as is known."""
        with self._lock:
            return self._passes.seconds(tokens)

    @property
    def bytes_per_s(self) -> float | None:
        """The break-even bandwidth; None while the prefill rate is unknown."""
        rate = self.tokens_per_s
        return None if rate is None else break_even_bytes_per_s(self.layout.bytes_per_token, rate)

    def given_up(self) -> list[Tier]:
        """The tiers that are slower than computing, as far as is known."""
        with self._lock:
            for tier in self._speeds:
                self._judge(tier)
            return [tier for tier, speed in self._speeds.items() if speed.given_up]

    def unmeasured(self, tiers: Iterable[Tier]) -> list[Tier]:
        """Those of which nobody knows how fast they are."""
        with self._lock:
            return [tier for tier in tiers if tier not in self._speeds]

    # -- what follows ------------------------------------------------------------------------------------------------

    def worth(self, pieces: Sequence[Piece], tokens: int | None = None) -> int:
        """How many of `pieces`, from the first on, to load so that most time is saved, where `tokens` (default: those
        of the pieces) are to be computed without them.

        A slow piece is loaded where faster ones behind it make up for it, since a prefix has no gaps. What is behind
        the best place costs more than it saves.
        """
        seconds_per_token = self._seconds_per_token(pieces, tokens)
        if seconds_per_token is None:
            return len(pieces)
        with self._lock:
            seconds_per_token *= 1 - self._passes.unknown_share
        return self._best(pieces, seconds_per_token, self._costs(seconds_per_token))

    def first_part(self, pieces: Sequence[Piece]) -> int:
        """How many of `pieces` to load at first: up to the first of a tier that nobody has measured, which is a trial,
        or all of them. A trial by itself leaves nothing on the way when it fails."""
        with self._lock:
            if self._tokens_per_s() is not None:
                for count, piece in enumerate(pieces, 1):
                    if piece.tier not in self._speeds:
                        return count
        return len(pieces)

    def trial_s(self, tier: Tier) -> float:
        """How long to wait for one block of a tier that may be slow; for ever while no prefill is known."""
        rate = self.tokens_per_s
        return math.inf if rate is None else TRIAL_TIMES * self.layout.chunk_tokens / rate + self.latency_s(tier)

    def watch(self, pieces: Sequence[Piece], tokens: int | None = None) -> "Watch":
        """Watch a load of `pieces`, which begins now; `tokens` as in `worth`."""
        return Watch(self, pieces, self._seconds_per_token(pieces, tokens))

    def _best(self, pieces: Sequence[Piece], seconds_per_token: float, costs: dict[Tier, float]) -> int:
        best, best_s, saved_s = 0, 0.0, 0.0
        waited: set[Tier] = set()
        for count, piece in enumerate(pieces, 1):
            saved_s += piece.tokens * seconds_per_token - piece.nbytes * costs.get(piece.tier, 0.0)
            if piece.tier not in waited:
                waited.add(piece.tier)
                saved_s -= self.latency_s(piece.tier)
            if saved_s == -math.inf:
                break
            if saved_s > best_s:
                best, best_s = count, saved_s
        return best

    def _costs(self, seconds_per_token: float) -> dict[Tier, float]:
        """Seconds per byte of each tier that is known. One that was given up counts as slower than computing until it
        is used again."""
        slow = seconds_per_token / self.layout.bytes_per_token / USED_AGAIN_SHARE
        with self._lock:
            return {
                tier: max(speed.seconds_per_byte, slow) if speed.given_up else speed.seconds_per_byte
                for tier, speed in self._speeds.items()
            }

    def _seconds_per_token(self, pieces: Sequence[Piece], tokens: int | None) -> float | None:
        with self._lock:
            return self._passes.seconds_per_token(sum(piece.tokens for piece in pieces) if tokens is None else tokens)

    def latency_s(self, tier: Tier) -> float:
        """The quickest of the latest answers: what else was slower in the others has nothing to do with the way."""
        with self._lock:
            return min(self._questions) if self._questions and tier == "remote" else 0.0

    def _tokens_per_s(self) -> float | None:
        seconds_per_token = self._passes.seconds_per_token()
        return None if seconds_per_token is None else 1 / seconds_per_token

    # -- giving up, and using again; the lock is held ----------------------------------------------------------------

    def _judge(self, tier: Tier) -> None:
        speed, rate = self._speeds[tier], self._tokens_per_s()
        if rate is None:
            return
        # Of the time that computing takes.
        share = speed.seconds_per_byte * break_even_bytes_per_s(self.layout.bytes_per_token, rate)
        if not speed.given_up and share > 1:
            self._give_up(tier)
        elif speed.given_up and share <= USED_AGAIN_SHARE:
            speed.given_up = False
            logger.warning("The %s tier is used again: %s", tier, self._figures(speed))

    def _give_up(self, tier: Tier) -> None:
        speed = self._speeds[tier]
        if not speed.given_up:
            speed.given_up = True
            logger.warning("The %s tier is given up, computing is faster: %s", tier, self._figures(speed))

    def _figures(self, speed: _Speed) -> str:
        measured = 1 / speed.seconds_per_byte / GB if speed.seconds_per_byte else math.inf
        even = break_even_bytes_per_s(self.layout.bytes_per_token, self._tokens_per_s() or 0.0) / GB
        return f"{measured:.3f} GB/s measured, break-even is {even:.3f} GB/s"


class _Pace:
    """What one tier has done in one load."""

    __slots__ = ("nbytes", "seconds", "stopped", "tokens")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.nbytes = 0
        self.tokens = 0
        self.stopped = False


class Watch:
    """One load as it goes, for one thread. Call `lap` behind each piece, in order, and `end` once.

    `within_s` bounds what the load may wait for in all: as long as computing takes, or a trial; None while that is
    unknown. `stopped` says that the load was not worth going on with.
    """

    def __init__(self, break_even: BreakEven, pieces: Sequence[Piece], seconds_per_token: float | None) -> None:
        self._break_even = break_even
        self._pieces = pieces
        self._next = 0
        self._paces: dict[Tier, _Pace] = {}
        self._at_s = break_even.clock()
        self.stopped = False
        self._seconds_per_token = seconds_per_token
        self._allowance_s = 0.0
        self.within_s: float | None = None
        if self._seconds_per_token is not None:
            compute_s = sum(piece.tokens for piece in pieces) * self._seconds_per_token
            self._allowance_s = max(ALLOWANCE_S_MIN, compute_s * ALLOWANCE_SHARE)
            latency_s = max((break_even.latency_s(piece.tier) for piece in pieces), default=0.0)
            trial_s = max((break_even.trial_s(piece.tier) for piece in pieces), default=0.0)
            self.within_s = max(compute_s + latency_s, trial_s)

    def lap(self, came: bool) -> bool:
        """Note that the next piece has come, or has not; say whether it is worth going on."""
        now_s = self._break_even.clock()
        piece = self._pieces[self._next]
        self._next += 1
        pace = self._paces.setdefault(piece.tier, _Pace())
        pace.seconds += now_s - self._at_s
        self._at_s = now_s
        if came:
            pace.nbytes += piece.nbytes
            pace.tokens += piece.tokens
        if self._seconds_per_token is None or not self._is_behind(piece.tier, pace):
            return came
        if not came or (self._next < len(self._pieces) and not self._rest_is_worth(self._seconds_per_token)):
            self.stopped = pace.stopped = True
        return not pace.stopped

    def end(self) -> None:
        """Tell what was measured."""
        for tier, pace in self._paces.items():
            if pace.stopped:
                self._break_even.load_stopped(tier, pace.nbytes, pace.seconds)
            elif pace.nbytes:
                self._break_even.load_took(tier, pace.nbytes, pace.seconds)
        self._paces.clear()

    def _is_behind(self, tier: Tier, pace: _Pace) -> bool:
        assert self._seconds_per_token is not None
        allowed_s = pace.tokens * self._seconds_per_token + self._allowance_s + self._break_even.latency_s(tier)
        return pace.seconds > allowed_s

    def _rest_is_worth(self, seconds_per_token: float) -> bool:
        """Whether what is left would still save time at the pace of this load. What was waited for is spent."""
        costs = self._break_even._costs(seconds_per_token)
        known_bytes = KNOWN_CHUNKS * self._break_even.layout.chunk_bytes()
        for tier, pace in self._paces.items():
            if tier in costs:
                costs[tier] = (costs[tier] * known_bytes + pace.seconds) / (known_bytes + pace.nbytes)
            else:
                costs[tier] = pace.seconds / pace.nbytes if pace.nbytes else math.inf
        return self._break_even._best(self._pieces[self._next :], seconds_per_token, costs) > 0
