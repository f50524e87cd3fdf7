"""Questions to a server and the scheduler that asks them: it waits for none, and gives up what takes too long."""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvredis.adapters.paged.jobs import ChunkMove
from kvredis.adapters.vllm import lookup
from kvredis.adapters.vllm.lookup import LOOKUP_THREADS
from kvredis.adapters.vllm.request import Prompt, SchedulingOptions
from kvredis.adapters.vllm.scheduler import LOOKUP_S_LEAST, Scheduling
from kvredis.backends.base import Tier
from kvredis.backends.config.schema import Config
from kvredis.backends.factory import open_backend
from tests.adapters.fake_backend import FakeBackend
from tests.adapters.vllm.test_scheduler import CHUNK, STATE, TOKENS, Engine, groups_of
from tests.backends.conftest import ServerProcess

WAIT_S = 10


class Server(FakeBackend):
    """A backend behind a socket, that answers while `is_running`; `near` are the keys that this process has itself."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.is_running = threading.Event()
        self.is_running.set()
        self.near: set[bytes] = set()
        self.questions: list[list[bytes]] = []
        self.began = threading.Semaphore(0)

    def match(self, keys: Sequence[bytes]) -> int:
        self._wait(keys)
        return super().match(keys)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self._wait(keys)
        return super().present(keys)

    def tiers_of(self, keys: Sequence[bytes]) -> list[Tier]:
        return ["memory" if key in self.near else "remote" for key in keys]

    def _wait(self, keys: Sequence[bytes]) -> None:
        if self.near.issuperset(keys):
            return
        self.questions.append(list(keys))
        self.began.release()
        assert self.is_running.wait(WAIT_S), "the test does not let the server go on"


class Asking(Engine):
    """An engine before a server, with a clock of its own."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), **options: Any) -> None:
        super().__init__(windows, **options)
        self.server = self.backend = Server()
        self.now_s = 0.0
        self.compute_s: float | None = None
        self.scheduling = Scheduling(
            self.groups,
            self.server,
            SchedulingOptions(**options),
            compute_s=lambda tokens: self.compute_s,
            clock=lambda: self.now_s,
        )

    def stored(self, tokens: list[int] = TOKENS) -> None:
        """Have a prompt stored, whose request is over."""
        self.server.near = set()
        self.answered(tokens, name="before")
        self.put(self.compute_as("before", tokens))
        self.scheduling.finished("before")
        self.server.questions.clear()
        self.server.began = threading.Semaphore(0)

    def compute_as(self, name: str, tokens: list[int]) -> list[ChunkMove]:
        """Compute a prompt in one step, and say what is stored of it."""
        self.scheduling.scheduled(name, self.tables(len(tokens)), 0, len(tokens), anew=True)
        return [move for job in self.scheduling.step().moves.stores for move in job.moves]

    def answered(self, tokens: list[int] = TOKENS, name: str = "r", attempt: int = 0) -> int | None:
        """Ask for a request, and again when the answer is there."""
        found = self.match(tokens, name=name, attempt=attempt)
        lookup = self.scheduling.follow(Prompt(name, tokens, attempt=attempt)).lookup
        if lookup is not None:
            assert lookup.wait(WAIT_S)
            found = self.match(tokens, name=name, attempt=attempt)
        return found


@pytest.fixture
def asking() -> Iterator[Asking]:
    engine = Asking()
    engine.stored()
    yield engine
    engine.server.is_running.set()
    engine.scheduling.close()


def test_a_server_that_hangs_holds_up_the_request_that_asks_it_and_no_other(asking: Asking) -> None:
    asking.server.is_running.clear()
    asking.server.near = {chunk.key for chunk in asking.scheduling.follow(Prompt("near", TOKENS)).keys[0][:4]}
    assert asking.match(TOKENS, name="far") is None
    assert asking.server.began.acquire(timeout=WAIT_S)
    for _ in range(100):
        assert asking.match(TOKENS, name="far") is None
    assert asking.match(TOKENS[:256], name="near") == 256, "what this process has itself is answered at once"
    assert len(asking.server.questions) == 1
    asking.server.is_running.set()
    assert asking.answered(name="far") == 960


@pytest.mark.parametrize(
    ("compute_s", "patience_s"), [(None, 10), (2, 2), (100, 10), (0, LOOKUP_S_LEAST)], ids=["", "known", "long", "none"]
)
def test_an_answer_that_takes_as_long_as_computing_is_given_up_and_the_prompt_is_computed(
    compute_s: float | None, patience_s: float, asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    asking.server.is_running.clear()
    asking.compute_s = compute_s
    assert asking.match(TOKENS) is None
    asking.now_s = patience_s * 0.99
    assert asking.match(TOKENS) is None
    asking.now_s = patience_s
    assert asking.match(TOKENS) == 0
    assert asking.match(TOKENS) == 0, "it is not asked for again"
    assert asking.scheduling.counters["lookups_given_up"] == 1
    asking.match(TOKENS, name="next")
    asking.now_s *= 2
    assert asking.match(TOKENS, name="next") == 0
    assert [
        record.getMessage().partition(" was")[0] for record in caplog.records if record.levelno == logging.WARNING
    ] == ["KV cache lookup of r"], "the log is told once"
    asking.server.is_running.set()
    assert asking.answered(attempt=1) == 960, "a preempted request is looked up anew"
    moves = asking.compute_as("next", TOKENS)
    assert len(moves) == 15, "what it computes is offered for storing"


def test_an_answer_is_waited_for_a_moment_unless_the_last_one_took_longer(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "GRACE_S", float(WAIT_S))
    assert asking.match(TOKENS, name="quick") == 960, "in one pass of the scheduler"
    asking.server.is_running.clear()
    monkeypatch.setattr(lookup, "GRACE_S", 0.001)
    assert asking.match(TOKENS, name="slow") is None
    monkeypatch.setattr(lookup, "GRACE_S", float(WAIT_S))
    assert asking.match(TOKENS, name="next") is None, "while the last one has no answer none is waited for"
    asking.server.is_running.set()
    assert asking.answered(name="next") == 960
    assert asking.match(TOKENS, name="quick again") == 960


def test_a_request_that_ends_while_its_question_waits_is_not_asked_for_any_more(asking: Asking) -> None:
    asking.server.is_running.clear()
    for number in range(LOOKUP_THREADS):
        assert asking.match(TOKENS, name=f"r{number}") is None
        assert asking.server.began.acquire(timeout=WAIT_S)
    assert asking.match(TOKENS, name="gone") is None
    assert asking.match(TOKENS, name="stays") is None
    waiting = asking.scheduling.follow(Prompt("gone", TOKENS)).lookup
    asking.scheduling.finished("gone")
    asking.server.is_running.set()
    assert asking.answered(name="stays") == 960
    assert waiting is not None
    assert waiting.wait(WAIT_S)
    assert len(asking.server.questions) == LOOKUP_THREADS + 1
    asking.scheduling.finished("r0")
    assert asking.answered(name="r0") == 960, "a request of the same name is another one"


def test_an_open_question_answers_the_next_attempt_too_and_not_a_prompt_that_has_grown(asking: Asking) -> None:
    asking.server.is_running.clear()
    assert asking.match(TOKENS[:500]) is None
    assert asking.server.began.acquire(timeout=WAIT_S)
    assert asking.match(TOKENS[:500], attempt=1) is None
    assert len(asking.server.questions) == 1
    assert asking.match(TOKENS, attempt=1) is None
    asking.server.is_running.set()
    assert asking.answered(attempt=1) == 960
    assert [len(names) for names in asking.server.questions] == [7, 15]


def test_what_the_engine_has_itself_by_the_time_of_the_answer_is_not_loaded(asking: Asking) -> None:
    asking.server.is_running.clear()
    assert asking.match(TOKENS) is None
    asking.server.is_running.set()
    assert asking.answered() == 960
    assert asking.match(TOKENS, 320) == 640
    assert len(asking.server.questions) == 1


@pytest.mark.parametrize(("windows", "questions"), [((None, STATE), 1), ((None, 100), 2), ((100, 200), 2)])
def test_a_shorter_load_of_several_groups_is_chosen_from_the_same_answer(
    windows: tuple[int, ...], questions: int
) -> None:
    engine = Asking(windows, max_load_chunks=16)
    keys = engine.scheduling.follow(Prompt("r", TOKENS)).keys
    for group in keys:
        for chunk in group:
            engine.server.put(chunk.key, b"")
    engine.server.delete([keys[1][at].key for at in (3, 5, 6, 14)])
    found = engine.answered()
    # Sixteen chunks are eight of each group that has KV by token, or fifteen and a state; the last chunk is not whole.
    assert found == (14 if STATE in windows else 3) * CHUNK
    assert len(engine.server.questions) == questions  # without layers that see all, whether other sizes have more
    engine.scheduling.close()


def test_stored_blocks_are_asked_for_beside_the_steps(asking: Asking) -> None:
    asking.scheduling.tell_events()
    events = asking.scheduling.events
    assert events is not None
    other = [7, *TOKENS[:199]]
    assert asking.answered(other, name="s") == 0
    moves = asking.compute_as("s", other)
    asking.put(moves)
    asking.server.is_running.clear()
    asking.server.questions.clear()
    events.over({"s"})
    for _ in range(10):
        assert not events.take(), "a step does not wait for the answer"
    assert events._question is not None
    asking.server.is_running.set()
    assert events._question.wait(WAIT_S)
    assert len(events.take()) == 3
    assert len(asking.server.questions) == 1


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server as a process of its own."""
    started = ServerProcess("kvredis", tmp_path)
    started.start()
    yield started
    started.kill()


def test_a_server_that_is_stopped_costs_other_requests_no_step_and_is_asked_again_when_it_goes_on(
    process: ServerProcess,
) -> None:
    now_s = 0.0
    options = Config(local_cpu=False, max_local_cpu_size=0.0625, remote_url=process.url, blocking_timeout_secs=WAIT_S)
    with closing(open_backend(options)) as backend:
        scheduling = Scheduling(groups_of(), backend, SchedulingOptions(lookup_s_max=1), clock=lambda: now_s)
        for chunk in scheduling.follow(Prompt("before", TOKENS)).keys[0]:
            hold = backend.reserve(chunk.key, 100)
            assert hold is not None
            hold.view[:] = bytes(100)
            hold.commit()
        assert backend.flush() == 0
        process.signal(signal.SIGSTOP)
        assert scheduling.match(Prompt("held", TOKENS), 0) is None
        lookup = scheduling.follow(Prompt("held", TOKENS)).lookup
        assert lookup is not None
        for number in range(100):
            short = f"short {number}"
            assert scheduling.match(Prompt("held", TOKENS), 0) is None
            assert scheduling.match(Prompt(short, TOKENS[:40]), 0) == 0
            scheduling.scheduled(short, [[1, 2, 3]], 0, 40, anew=True)
            assert not scheduling.step().is_idle
            scheduling.finished(short)
        assert not lookup.done, "a hundred requests are through while the server says nothing"
        now_s = 1
        assert scheduling.match(Prompt("held", TOKENS), 0) == 0
        process.signal(signal.SIGCONT)
        assert lookup.wait(WAIT_S)
        again = Prompt("held", TOKENS, attempt=1)
        found = scheduling.match(again, 0)
        if found is None:  # the answer takes longer than a moment
            waiting = scheduling.follow(again).lookup
            assert waiting is not None
            assert waiting.wait(WAIT_S)
            found = scheduling.match(again, 0)
        assert found == 960
        scheduling.close()
