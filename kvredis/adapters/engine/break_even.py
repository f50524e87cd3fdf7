"""Whether a hit is worth loading: the speeds of the tiers and of the model, as one engine has measured them.

A token's KV can be loaded, bytes_per_token / bandwidth, or computed again, 1 / prefill rate. Where the two are equal is
the break-even bandwidth, bytes_per_token x tokens/s: a hit on a slower tier costs time. Neither speed is known in
advance, and both change: so what the engine waits for is measured, the first load from a tier is a trial, every load is
watched, and a tier that was given up is tried again in the background.

    Passes      what computing takes, as an engine's forward passes tell
    BreakEven   what is known of the tiers and the model, and how much of a hit to load
    Watch       one load as it goes
    Probes      single blocks that a background thread loads from tiers that were given up or never measured
    Worth       the same for an engine that computes in steps and loads in the background

As long as the prefill rate is unknown, what was found is computed: that costs what no cache at all costs, and tells the
rate, while a probe tells of the tier. A load would take an unknown time and leave a short rest to compute, which tells
nothing. What is computed is charged at the prefill rate alone: the forward pass that follows is there in either case.
What is loaded is charged with all that the engine waits, copies into its tensors included.

A pass takes a while however little it computes: on a GPU one of a hundred tokens is as long as one of a single token.
What loading saves is the cost of its tokens alone. The shortest passes tell what a pass costs at all; of a longer one,
what goes beyond that is the tokens'. A pass of few tokens says little of one of many, since most of it is the fixed
cost: so a question is answered from passes of about its size, or of a much smaller one where the fixed cost is known,
which rather overrates loading, and then the engine learns from what it computes.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from itertools import islice
from statistics import median_high, median_low
from typing import NamedTuple

from kvredis.backends.base import Backend, Tier
from kvredis.storage.background import start_thread

from .block import block_bytes
from .layout import ChunkLayout

SMALL_TOKENS = 256
"""Fewer tokens than this, or than a chunk, are computed for the fixed cost, more or less."""
SMALL_KEPT = 9
KEPT = 5
"""Of each size, between a power of two and the next, so many passes are kept, the latest."""
NEEDED = 2
"""A pass by itself may be the one in which kernels were compiled and memory was found. Of two the shorter counts, of
more the middle one."""
NEAR = 2
"""Passes of half to twice as many tokens are of about the same size."""
FIXED_SHARE_GUESSED = 0.5
"""Of a pass so much may be the fixed cost while that is unknown. A tier must be twice as fast as computing then; the
first load from one that is leaves a short rest, and so tells."""
GUESSES = 32
"""Behind so many passes without a short one it counts as nothing: then one load too many costs little, and tells."""
FIXED_SHARE_MAX = 0.97
"""Of a pass no more than this is put down to the fixed cost: the rest at least is the tokens'."""


class Pass(NamedTuple):
    """A forward pass; the quicker one is the smaller."""

    seconds: float
    tokens: int


class Passes:
    """The passes of one engine, whose chunks have `chunk_tokens`. One thread at a time may call it."""

    def __init__(self, chunk_tokens: int) -> None:
        self._small_tokens = min(chunk_tokens, SMALL_TOKENS)
        self._small: deque[Pass] = deque(maxlen=SMALL_KEPT)
        self._sizes: dict[int, deque[Pass]] = {}  # by the bits that the number of tokens has
        self._guesses_left = GUESSES
        self._asked: dict[int, int] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """Note a pass over `tokens`; of nothing or of no time it is none."""
        if tokens <= 0 or seconds <= 0:
            return
        of_its_size = self._small
        if tokens >= self._small_tokens:
            of_its_size = self._sizes.setdefault(tokens.bit_length(), deque(maxlen=KEPT))
            self._guesses_left -= self._guesses_left > 0
        of_its_size.append(Pass(seconds, tokens))

    def is_sure(self, tokens: int) -> bool:
        """Whether `seconds_per_token` of so many tokens is no more than they take, as far as can be known."""
        if len(self._near(tokens)) >= NEEDED:
            return True
        return len(self._small) >= NEEDED and any(size <= tokens.bit_length() for size in self._known())

    def ask(self, tokens: int, at_most: int) -> bool:
        """Whether to compute so many tokens, though they are there, because it is unknown how long that takes. Of each
        size no more than `at_most` times: not every engine tells."""
        size = tokens.bit_length()
        asks = not self.is_sure(tokens) and self._asked.get(size, 0) < at_most
        self._asked[size] = self._asked.get(size, 0) + asks
        return asks

    def seconds_per_token(self, tokens: int | None = None) -> float | None:
        """What each token takes in a pass over so many (None: in the largest known), beyond the fixed cost. As long as
        that is unknown it counts as nothing. None: no such pass is known.

        It is of passes of about that size, else of the next smaller ones, else of the next larger ones.
        """
        passes = [] if tokens is None else self._near(tokens)
        if len(passes) < NEEDED:
            passes = self._next_to(tokens)
        return median_low(map(self._per_token, passes)) if passes else None

    def seconds(self, tokens: int) -> float | None:
        """What a pass over so many takes in all; None as `seconds_per_token`."""
        each = self.seconds_per_token(tokens)
        if each is None:
            return None
        least = min(self._small) if len(self._small) >= NEEDED else Pass(0.0, 0)
        return least.seconds + each * max(tokens - least.tokens, 0)

    @property
    def unknown_share(self) -> float:
        """The share of `seconds_per_token` that may yet turn out to be fixed cost."""
        is_known = len(self._small) >= NEEDED or not self._guesses_left
        return 0.0 if is_known else FIXED_SHARE_GUESSED

    def _near(self, tokens: int) -> list[Pass]:
        tokens = max(tokens, self._small_tokens)
        size = tokens.bit_length()
        passes = [each for bits in range(size - 1, size + 2) for each in self._sizes.get(bits, ())]
        return [each for each in passes if tokens <= each.tokens * NEAR and each.tokens <= tokens * NEAR]

    def _next_to(self, tokens: int | None) -> list[Pass]:
        sizes = self._known() or sorted(self._sizes)
        if not sizes:
            return []
        smaller = [size for size in sizes if tokens is None or size <= tokens.bit_length()]
        return list(self._sizes[smaller[-1] if smaller else sizes[0]])

    def _known(self) -> list[int]:
        """The sizes of which there are passes enough."""
        return sorted(size for size, passes in self._sizes.items() if len(passes) >= NEEDED)

    def _per_token(self, one: Pass) -> float:
        least = min(self._small) if len(self._small) >= NEEDED else Pass(0.0, 0)
        beyond_s = max(one.seconds - least.seconds, one.seconds * (1 - FIXED_SHARE_MAX))
        # Where the two are of nearly the same size what lies between them is mostly noise, and for very few tokens.
        return min(beyond_s / (one.tokens - least.tokens), one.seconds / one.tokens)


logger = logging.getLogger(__name__)

LOADS_KEPT = 3
"""A tier is as fast as the middle one of its latest three loads, so that one hiccup is not the end of it. After a load
that was stopped the others are forgotten: then two fast ones have to follow."""
PREFILLS_ASKED_MAX = 4
"""How many hits of a size may be computed all the same, to see how long that takes: one to warm up, one to measure, and
not for ever for engines that do not tell."""
QUESTIONS_KEPT = 8
USED_AGAIN_SHARE = 0.8
"""A tier that was given up must need no more than this share of the time that computing takes, or it would come and go
with the noise."""
TRIAL_TIMES = 4
"""A trial, of one block of a tier that was never measured or was given up, waits for this many times as long as
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
        self._stores: deque[float] = deque(maxlen=KEPT)  # seconds per byte

    # -- what is measured --------------------------------------------------------------------------------------------

    def prefill_took(self, tokens: int, seconds: float) -> None:
        """Note a forward pass over `tokens`. Short ones count too, of single tokens even: they tell what a pass costs
        at all."""
        with self._lock:
            self._passes.took(tokens, seconds)

    def ask_prefill(self, tokens: int, at_most: int = PREFILLS_ASKED_MAX) -> bool:
        """Whether to compute `tokens` though some of them are there, because the prefill rate is unknown: where every
        prompt is found none would ever be computed. Counts how often it said yes, by size, up to `at_most`."""
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

    def store_took(self, nbytes: int, seconds: float) -> None:
        """Note a store; one of less than a chunk says little."""
        if nbytes >= self.layout.chunk_bytes():
            with self._lock:
                self._stores.append(seconds / nbytes)

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
        """The tiers whose speed is unknown."""
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

    def pays_to_store(self, nbytes: int, tokens: int) -> bool | None:
        """Whether storing so many bytes, of one rank, takes less than computing the tokens that they save; None while
        one of the two is unknown."""
        with self._lock:
            each_s = self._passes.seconds_per_token(tokens)
            if each_s is None or len(self._stores) < NEEDED:
                return None
            return nbytes * median_low(self._stores) < tokens * each_s

    def first_part(self, pieces: Sequence[Piece]) -> int:
        """How many of `pieces` to load at first: up to the first of a tier that was never measured, which is a trial,
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


PROBE_EVERY_S = 1.0
PROBE_PART = 100
"""Behind a probe comes a rest of a hundred times what it took."""
WAITED_SHARE = 0.9
"""A load that has waited for nearly as long as was allowed has met a slow tier, not a gap; clocks differ a little."""
FIRST_BLOCKS = 3
"""Blocks of the first probe: the middle one counts (break_even.py)."""
QUICK_S = 0.01
"""A block that takes longer has not waited for the interpreter alone, whose threads take turns of 5 ms."""
KEYS_KEPT = 32
"""Keys that were found lately, in each tier."""
KEYS_A_LOOKUP = 4
"""Of each prompt the first few: they stay longest."""


class Probes:
    """The probes of one engine: at most one is under way. Any thread may call anything.

    A probe loads one block in a thread of its own and drops it; of a tier that was never measured up to three, as long
    as they come quickly: the first may wait for a connection, and any for a busy interpreter. Blocks are those that
    lookups have found. A probe begins when the engine asks for something anyway, so an idle engine sends nothing; it
    waits a few times as long as computing takes at most, and all of them together take a hundredth of the time, and so
    of the tier's bandwidth.
    """

    def __init__(self, backend: Backend, break_even: BreakEven, clock: Callable[[], float] = time.perf_counter) -> None:
        self.count = 0
        self._backend = backend
        self._break_even = break_even
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[Tier, deque[bytes]] = {}
        self._due_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def found(self, tier: Tier, keys: Iterable[bytes]) -> None:
        """Note that these whole chunks, head of the prompt first, are in `tier`, as a lookup has found."""
        with self._lock:
            self._found.setdefault(tier, deque(maxlen=KEYS_KEPT)).extend(islice(keys, KEYS_A_LOOKUP))

    def begin(self, *, of_unmeasured: bool = False) -> None:
        """Begin a probe of a tier that was given up, or with `of_unmeasured` of one that was
        never measured, if there is such a one and the last was long enough ago; never waits."""
        with self._lock:
            found = list(self._found)
        wanted = self._break_even.unmeasured(found) if of_unmeasured else self._break_even.given_up()
        if not wanted:
            return
        with self._lock:
            known = [tier for tier in wanted if self._found.get(tier)]
            if self._closed or self._thread is not None or not known or self._clock() < self._due_s:
                return
            tier = known[self.count % len(known)]
            self.count += 1
            blocks = FIRST_BLOCKS if of_unmeasured else 1
            with suppress(RuntimeError):  # the interpreter ends, or has no threads left
                self._thread = start_thread(lambda: self._probe(tier, blocks), "kvredis probe")

    def close(self) -> None:
        """Begin no more, and wait for the one under way."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _probe(self, tier: Tier, blocks: int) -> None:
        began_s = self._clock()
        try:
            with suppress(Exception):  # the engine's next question meets the same trouble, and reports it
                while blocks and (key := self._next(tier)) is not None:
                    blocks = blocks - 1 if self._load(tier, key) < QUICK_S else 0
        finally:
            now_s = self._clock()
            with self._lock:
                self._due_s = now_s + max(PROBE_EVERY_S, (now_s - began_s) * PROBE_PART)
                self._thread = None

    def _next(self, tier: Tier) -> bytes | None:
        """The next key, without those that have come nearer: they say nothing of where they were."""
        with self._lock:
            keys = self._found[tier]
            near = self._backend.tiers_of(list(keys))
            while keys and near.pop(0) != tier:
                keys.popleft()
            return keys.popleft() if keys else None

    def _load(self, tier: Tier, key: bytes) -> float:
        """Give the seconds that it took; inf where nothing was learnt."""
        layout, within_s, began_s = self._break_even.layout, self._break_even.trial_s(tier), self._clock()
        with closing(self._backend.load([key], within_s=within_s if math.isfinite(within_s) else None)) as leases:
            lease = next(leases, None)
            seconds = self._clock() - began_s
            if lease is not None:
                lease.release()
        if (
            lease is None and seconds < within_s * WAITED_SHARE
        ):  # evicted, or no server answers: neither tells of the speed
            return math.inf
        self._break_even.load_took(tier, 0 if lease is None else block_bytes(layout, layout.chunk_tokens), seconds)
        with self._lock:
            self._found[tier].append(key)
        return seconds


STEP_PREFILLS_ASKED_MAX = 64
"""How many hits of a size may be computed to see how long that takes. A server's first requests come together, before
any of them can tell."""
NEAREST_FIRST: Sequence[Tier] = ("memory", "disk", "remote")


class Worth:
    """Measures steps and loads, and says which chunks come sooner than they are computed. One thread calls it: that of
    a scheduler, which sees neither the model nor the loads at work, only when a step was asked for and when its output
    came. That is what an engine waits for. Steps follow each other: one takes from when it was asked for, or from when
    the one before was over, whichever is later, until its output comes.
    """

    def __init__(
        self, backend: Backend, break_even: BreakEven, probes: Probes, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._backend = backend
        self._break_even = break_even
        self._probes = probes
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._over_s = 0.0
        self._loads: dict[str, tuple[float, Tier, int]] = {}
        self._latest: list[Piece] | None = None  # chosen, and not yet said for which request
        self._chosen: dict[str, list[Piece]] = {}

    def narrow(self, keys: Sequence[bytes], tokens: int, rest: int) -> int:
        """Of these chunks of `tokens` tokens each, how many to load, from the first on, where `rest` tokens are to be
        computed without them."""
        layout = self._break_even.layout
        tiers = self._backend.tiers_of(keys)
        for tier in set(tiers):
            there = (key for key, where in zip(keys, tiers, strict=True) if where == tier)
            self._probes.found(tier, there)
        self._probes.begin()
        pieces = [Piece(tier, block_bytes(layout, layout.chunk_tokens), tokens) for tier in tiers]
        count = 0
        if self._break_even.ask_prefill(rest, STEP_PREFILLS_ASKED_MAX):
            self._probes.begin(of_unmeasured=True)
        else:
            count = self._break_even.worth(pieces, rest)
        self._latest = pieces[:count]
        return count

    def asked(self, request: str) -> None:
        """Note that a request was asked for: what `narrow` has chosen since the last one is its own. Others may be
        asked for before it is loaded, and it need not be."""
        latest, self._latest = self._latest, None
        if latest is not None:
            self._chosen[request] = latest

    def load_began(self, request: str) -> None:
        """Note that the chunks chosen for a request are being loaded."""
        chosen = self._chosen.pop(request, [])
        if chosen:
            self._loads[request] = (self._clock(), *_farthest(chosen))

    def load_over(self, request: str, *, failed: bool) -> None:
        """Note the end of that load; a failed one says nothing of its tier's speed."""
        began_s, tier, nbytes = self._loads.pop(request, (0.0, "memory", 0))
        if nbytes and not failed:
            self._break_even.load_took(tier, nbytes, self._clock() - began_s)

    def forget(self, request: str) -> None:
        """Forget a request that has ended. Nothing waits any more for a load that is under way, which ends when it
        likes."""
        self._chosen.pop(request, None)
        self._loads.pop(request, None)

    def step_began(self, tokens: int) -> None:
        """A step that computes so many tokens is handed to the workers. One of none, in which an engine waits for loads
        alone, is not noted: vLLM tells of its output only where there is news in it."""
        if tokens:
            self._steps.append((self._clock(), tokens))

    def step_over(self) -> None:
        """Note that the output of the oldest step has come."""
        now_s = self._clock()
        if self._steps:
            began_s, tokens = self._steps.popleft()
            self._break_even.prefill_took(tokens, now_s - max(began_s, self._over_s))
        self._over_s = now_s


def _farthest(pieces: Sequence[Piece]) -> tuple[Tier, int]:
    """The tier that a load is put down to, and all of its bytes."""
    farthest = max(pieces, key=lambda piece: NEAREST_FIRST.index(piece.tier))
    return farthest.tier, sum(piece.nbytes for piece in pieces)
