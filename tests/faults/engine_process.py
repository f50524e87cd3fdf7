"""An engine process of its own, which a test kills.

To load torch takes longer than all else that such a process does: so these are forked from a server that has loaded it.
"""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from tests.backends.nodes import WAIT_S

START_S: Final = 120
"""A bound on loading torch on a machine that has other things to do."""

_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.faults.engine_runs"])


class EngineProcess:
    """A process that answers `prompts` through an engine of its own and then waits; a context manager, at whose end it
    is gone. The arguments are those of engine_runs.Subject.
    """

    def __init__(self, url: str | None, prompts: list[int], mode: str = "remote", **overrides: Any) -> None:
        self._said, says = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_run, args=(says, url, prompts, mode, overrides), daemon=True)
        self._process.start()
        says.close()
        self.answers: dict[int, tuple[int, ...]] = {}
        self.loaded: dict[int, int] = {}

    def wait_answer(self) -> bool:
        """Wait until it has answered one more prompt; False when it has answered all and its remote has them."""
        assert self._said.poll(START_S), "an engine that says nothing"
        said = self._said.recv()  # EOFError: it has ended with an exception, which stands in the output
        if said is None:
            return False
        number, tokens, self.loaded[number] = said
        self.answers[number] = tuple(tokens)
        return True

    def wait_done(self) -> None:
        """Wait until it has answered all prompts and its remote has all that it stored."""
        while self.wait_answer():
            pass

    def kill(self) -> None:
        """End it without a goodbye."""
        self._process.kill()
        self._process.join(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.close()
        self._said.close()


def _run(
    says: "Connection[Any, Any]", url: str | None, prompts: list[int], mode: Any, overrides: dict[str, Any]
) -> None:
    from tests.faults.engine_runs import Subject, greedy

    with Subject(url, mode, **overrides) as subject:
        for number in prompts:
            tokens = greedy(subject.cached, number)
            says.send((number, tokens, subject.cached.last_loaded))
        subject.engine.flush()
        says.send(None)
        multiprocessing.Event().wait()
