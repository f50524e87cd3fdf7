"""Loads behind the engine's back: it computes one prompt while the KV of the next comes.

One thread, so that loads come in the order in which they were asked for and do not share a link, and a bounded queue:
an engine that asks for more than comes gets a refusal at once, and computes.
"""

import threading
from collections import deque
from collections.abc import Callable

from .loading import Span

LOADS_MAX = 64
"""Loads that wait for their turn."""


class Load:
    """A load that was asked for. Until it is `done` the engine's tensors belong to it, from its first token on."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self._tokens = span.start
        self._over = threading.Event()
        self._cancelled = False
        self.refused = False
        """Whether nothing was loaded because too many others were waiting, or the engine was closed."""

    @property
    def tokens(self) -> int:
        """How many tokens from position 0 on are valid in `out`; what the caller had until it is done."""
        return self._tokens

    @property
    def done(self) -> bool:
        """Whether `out` is the caller's again."""
        return self._over.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._cancelled

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done, at most so long; say whether it is."""
        return self._over.wait(timeout_s)

    def cancel(self) -> None:
        """Want no more of it: it ends behind the block under way, so `out` is free when it is `done`, not before."""
        self._cancelled = True

    def end(self, tokens: int) -> None:
        """It is over, for whoever has loaded."""
        self._tokens = tokens
        self._over.set()


class Loader:
    """The thread; it begins with the first load. `run` loads and answers how far it came; it must not raise."""

    def __init__(self, run: Callable[[Load], int], loads_max: int = LOADS_MAX) -> None:
        self._run = run
        self._loads_max = loads_max
        self._changed = threading.Condition()
        self._queue: deque[Load] = deque()
        self._under_way: Load | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, load: Load) -> bool:
        """Queue it; False, and it is done with what the caller has, when there is no room for it."""
        with self._changed:
            if not self._closed and len(self._queue) < self._loads_max and self._has_thread():
                self._queue.append(load)
                self._changed.notify_all()
                return True
        load.refused = True
        load.end(load.span.start)
        return False

    def close(self) -> None:
        """Give up what waits, end what is under way behind its block, and wait for that."""
        with self._changed:
            self._closed = True
            for load in (*self._queue, self._under_way):
                if load is not None:
                    load.cancel()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="kvredis loads", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or has no threads left
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._under_way = None
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                load = self._under_way = self._queue.popleft()
            load.end(load.span.start if load.cancelled else self._run(load))
