"""One load of chunks that another engine stores meanwhile: each is loaded as soon as it is there.

A decode engine that is asked while the prompt is being computed so has nearly all of it when the last chunk is stored.
The thread that runs this waits, and copies nothing: what has come is a part, which the loads' own thread moves.
"""

from collections.abc import Callable
from time import monotonic

from .jobs import ChunkMove, JobState, MoverContext, MoverTask
from .load import touch_loaded

WAIT_SLICE_S = 0.5
"""How long the server is asked to wait at a time: so long ending a load may take that is not wanted any more."""


class AwaitedLoad(MoverTask):
    """Waits for a job's moves, head first, and has `load` load those that have come, as a part; those that come before
    it is begun `join` it. Ends with the last one, or where the next is not announced by another engine, does not come
    in `waits_s`, or a part could not be loaded."""

    def __init__(
        self,
        context: MoverContext,
        job: JobState,
        waits_s: float,
        load: Callable[[JobState], None],
        join: Callable[[JobState, list[ChunkMove]], bool],
    ) -> None:
        super().__init__(context, [job])
        self._job = job
        self._waits_s = waits_s
        self._load = load
        self._join = join

    def run(self) -> None:
        """Wait. Takes no turn of the bandwidth's, which its parts take."""
        job, at, part = self._job, 0, None
        keys = [move.key for move in job.moves]
        while at < len(keys) and (come := self._come(keys[at:])):
            moves = job.moves[at : at + come]
            if part is None or not self._join(part, moves):
                part = JobState(job.request, moves, part_of=job)
                self._load(part)
            at += come

    def clean_up(self) -> None:
        """Touch what its parts have brought."""
        touch_loaded(self._context, self._job)

    def _come(self, keys: list[bytes]) -> int:
        """How many of these have come, from the first on; waits for one."""
        until_s, is_announced = monotonic() + self._waits_s, True
        while not self._job.cancelled and not self._job.is_torn:
            if (run := self._context.backend.match(keys)) or not is_announced:
                return run
            began_s = monotonic()
            if began_s >= until_s:
                break
            slice_s = min(until_s - began_s, WAIT_SLICE_S)
            has_come = self._context.backend.wait_for(keys[:1], slice_s) > 0
            # Else it is not announced any more; it may have been stored between the two questions.
            is_announced = has_come or monotonic() - began_s > slice_s / 2
        return 0
