"""A tier that was given up must be found out when it is fast again, and the engine must not wait for that. Nor need it
wait to learn of a tier that nobody has measured, while it computes to learn how long that takes.

So one block at a time is loaded by a thread of its own and dropped; of a tier that nobody has measured up to three, as
long as they come quickly: the first may wait for a connection, and any for an interpreter that is busy, which says
nothing of the tier. Blocks are those that lookups have found there. A probe begins when the engine asks for something
anyway, so an idle engine asks nobody; it waits a few times as long as computing takes at most, and all of them together
take a hundredth of the time, and so of the tier's bandwidth.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from itertools import islice

from kvredis.backends.base import Backend, Tier
from kvredis.storage.background import start_thread

from .block import block_bytes
from .break_even import BreakEven

PROBE_EVERY_S = 1.0
PROBE_PART = 100
"""Behind a probe comes a rest of a hundred times what it took."""
WAITED_SHARE = 0.9
"""Who has waited for nearly as long as was allowed has met a slow tier, not a gap; clocks differ a little."""
FIRST_BLOCKS = 3
"""Blocks of the first probe: the middle one counts (break_even.py)."""
QUICK_S = 0.01
"""A block that takes longer has not waited for the interpreter alone, whose threads take turns of 5 ms."""
KEYS_KEPT = 32
"""Keys that were found lately, in each tier."""
KEYS_A_LOOKUP = 4
"""Of each prompt the first few: they stay longest."""


class Probes:
    """The probes of one engine: at most one is under way. Any thread may call anything."""

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
        """Begin a probe of a tier that was given up, or that nobody has measured if it is to be one, if there is such a
        one and the last was long enough ago; never waits."""
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
        ):  # evicted, or nobody is there to ask: neither tells of the speed
            return math.inf
        self._break_even.load_took(tier, 0 if lease is None else block_bytes(layout, layout.chunk_tokens), seconds)
        with self._lock:
            self._found[tier].append(key)
        return seconds
