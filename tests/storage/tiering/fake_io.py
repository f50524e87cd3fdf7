"""Disk threads without threads: jobs run when the test says so, in the order in which the real ones would take them.

It is the real queue, so a test of what stands on it meets the real bounds, priorities and deadlines too.
"""

from typing import Any, Final

from kvredis.storage.background import IoThreads, _Job
from tests.storage.small_store import Clock

PLENTY: Final = 1 << 40


class ManualIo(IoThreads):
    """IoThreads whose jobs run in the test's own thread; `clock` moves when the test moves it."""

    def __init__(self, queue_jobs_max: int = PLENTY, queue_bytes_max: int = PLENTY) -> None:
        self.clock = Clock()
        super().__init__(0, queue_jobs_max, queue_bytes_max, clock_s=self.clock.seconds)
        self._failures: list[BaseException] = []

    def run(self, jobs_max: int = PLENTY) -> int:
        """Run the most urgent jobs, and what they queue in turn; says how many that were."""
        count = 0
        while count < jobs_max and self.run_next():
            count += 1
        return count

    def run_next(self) -> bool:
        """Run the most urgent job; False when there is none, or while paused."""
        job = self._take(wait=False)
        if job is not None:
            self._run(job)
        return job is not None

    def fail_next(self, error: BaseException) -> None:
        """Let the next job to run raise this instead of running; said twice, the next two."""
        self._failures.append(error)

    def drain(self, timeout_s: float = 0.0) -> bool:
        """Run all there is; nothing is waited for."""
        self.run()
        return super().drain(0.0)

    def _run(self, job: _Job) -> None:
        if self._failures:
            job.call = _raises(self._failures.pop(0))
        super()._run(job)


def _raises(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call
