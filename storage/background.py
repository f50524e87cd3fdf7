"""Background threads that outlive what their work raises, and that do not end without a line in the log.

Python prints what ends a thread to standard error, where no log has it, and says nothing at all of SystemExit; a caller
who waits for what the thread was to do next then waits for ever. An exception may be the work's own, or come from
outside: PyThreadState_SetAsyncExc throws one into a thread at whatever step it is, also while it waits for work.
"""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread that calls `run` once; what that raises is logged, and ends the thread. Raises RuntimeError
    when the interpreter ends or the system has no thread left."""

    def once() -> bool:
        run()
        return False

    return _start(once, name, goes_on=False)


def start_worker(turn: Callable[[], bool], name: str) -> threading.Thread:
    """Start a daemon thread that calls `turn` again and again until it answers False; what a turn raises is logged, and
    the next turn follows. A turn waits for a job and does it; it takes the job out of its queue first, or would fail at
    the same job without end. Raises as start_thread."""
    return _start(turn, name, goes_on=True)


def _start(turn: Callable[[], bool], name: str, *, goes_on: bool) -> threading.Thread:
    def work() -> None:
        is_wanted = True
        while is_wanted:
            try:
                is_wanted = turn()
            except BaseException:  # SystemExit too: it is the thread's alone, and the process goes on
                is_wanted = goes_on
                log.exception("the thread %r failed in its work and %s", name, "goes on" if goes_on else "ends")

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
