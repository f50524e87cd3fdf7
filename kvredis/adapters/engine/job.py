"""The handle of a prefetch, counted in the chunks of a prompt."""

from kvredis.backends.base import Prefetch


class Job:
    """A prefetch that was asked for: `tokens` of the prompt that chunks can cover, and what became of its chunks.

    Of these `queued` are on their way or have come, `resident` were near already, `missing` are stored nowhere, and
    for `no_room` there is no room where they should come. `refused` says why nothing is fetched at all, else "". What
    has come is held by nobody: it may leave again. A job may be let go of at any time.
    """

    def __init__(self, tokens: int, prefetch: Prefetch) -> None:
        self.tokens = tokens
        self.refused = prefetch.refused
        self._prefetch = prefetch

    @property
    def queued(self) -> int:
        """Chunks that are on their way or have come."""
        return self._prefetch.queued

    @property
    def resident(self) -> int:
        """Chunks that were near already."""
        return self._prefetch.resident

    @property
    def missing(self) -> int:
        """Chunks that are stored nowhere."""
        return self._prefetch.missing

    @property
    def no_room(self) -> int:
        """Chunks that would not fit."""
        return self._prefetch.no_room

    @property
    def done(self) -> bool:
        """Whether nothing is on its way any more. With a server this asks it."""
        return self._prefetch.is_finished

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done, at most so long; say whether it is."""
        return self._prefetch.wait(timeout_s)

    def cancel(self) -> None:
        """Want no more of it: what has not begun is not fetched."""
        self._prefetch.cancel()
