"""What computing takes, as far as an engine's forward passes tell: a fixed cost of each pass, and a cost per token.

A pass takes a while however little it computes: on a GPU one of a hundred tokens is as long as one of a single token.
A pass follows a load in either case, so what loading saves is the cost of its tokens alone. The shortest passes tell
what a pass costs at all; of a longer one, what goes beyond that is the tokens'.

A pass of few tokens says little of one of many, since most of it is the fixed cost: an engine that loads all it can
sees nothing but short rests, and would take computing for many times slower than it is. So a question is answered from
passes of about its size. A much smaller one will do where the fixed cost is known: what is left of it for its tokens is
rather too little, and who computes for that reason learns better from what was computed.
"""

from collections import deque
from statistics import median_low
from typing import NamedTuple

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
        """Whether to compute so many tokens, though they are there, because nobody knows how long that takes. Of each
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
