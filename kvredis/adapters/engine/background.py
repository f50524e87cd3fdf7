"""The background executor of all adapters: loads and stores that an engine does not wait for.

The engine computes one prompt while the KV of the next comes, or its own leaves. An Executor is a bounded queue with
its threads: an engine that asks for more than comes gets a refusal at once, and computes. Loads and stores have one
each, of one thread where loads are to come in the order in which they were asked for and not to share a link. What is
queued is a Task: CacheEngine's are Load and Save; ChunkMover (paged/mover.py) and TierJobs (paged/pages.py) have their
own. The disk's queue (IoThreads in storage/background.py) orders by urgency and knows no engine; threads of both begin
with start_worker there.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch

from kvredis.backends.fork_guard import Home
from kvredis.storage.background import start_worker
from kvredis.storage.memory.sched import take_long_slices

from .keys import ChunkKey
from .layout import ChunkLayout
from .load import Span
from .tensors import KV, event_on, gpus_of

log = logging.getLogger(__name__)

LOADS_MAX = 64
"""Loads that wait for their turn; as many stores."""

_OWN = threading.local()
"""The streams of a thread that copies."""


class Task:
    """A load or store that was asked for. Until it is `done` the engine's tensors belong to it."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._over = threading.Event()
        self._pid = os.getpid()
        self._cancelled = False
        self.refused = False
        """Whether nothing was done: too many others were waiting, the engine was closed, or our own code has failed."""

    @property
    def tokens(self) -> int:
        """Of a Load how many tokens from position 0 on are valid in `out`, what the caller had until it is done; of a
        Save how many were stored, 0 until it is done."""
        return self._tokens

    @property
    def done(self) -> bool:
        """Whether the tensors are the caller's again."""
        return self._over.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether it is not wanted any more."""
        return self._cancelled

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is done, at most so long; say whether it is. A process that was forked meanwhile has no
        thread that would end it, and does not wait."""
        return self._over.wait(timeout_s if self._pid == os.getpid() else 0)

    def cancel(self) -> None:
        """Want no more of it: it ends behind the block under way, a Save that has begun at its end; the tensors are
        free when it is `done`, not before."""
        self._cancelled = True

    def end(self, tokens: int) -> None:
        """End the task: called once, by what has done it or has turned it away."""
        self._tokens = tokens
        self._over.set()


class _Copied(Task):
    """Something whose tensors `kv` are copied on whichever thread runs it."""

    def __init__(self, tokens: int, kv: KV) -> None:
        super().__init__(tokens)
        self.kv = kv
        self._made: dict[torch.device, torch.cuda.Event] = {}

    def follow(self) -> None:
        """What is on GPUs is to be copied on other streams, behind what the caller's have been given until now."""
        self._made = {gpu: event_on(torch.cuda.current_stream(gpu)) for gpu in gpus_of(self.kv)}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within it copies run on those streams, which are the running thread's own; they end with the thread."""
        streams: dict[torch.device, torch.cuda.Stream] = _OWN.__dict__.setdefault("streams", {})
        with ExitStack() as current:
            for gpu, made in reversed(self._made.items()):  # the first layer's is the current GPU, as it was
                if gpu not in streams:
                    streams[gpu] = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
                current.enter_context(torch.cuda.stream(streams[gpu]))
                streams[gpu].wait_event(made)
            yield


class Load(_Copied):
    """A load of KV of `layout`; the tensors are its own from its first token on."""

    def __init__(self, span: Span, layout: ChunkLayout) -> None:
        super().__init__(span.start, span.out)
        self.span = span
        self.layout = layout


class Save(_Copied):
    """A store of `kv` of `layout`, of a prompt of `total` tokens."""

    def __init__(self, keys: list[ChunkKey], total: int, kv: KV, request: str, layout: ChunkLayout) -> None:
        super().__init__(0, kv)
        self.layout = layout
        self.keys = keys
        self.total = total
        self.request = request


AnyTask = TypeVar("AnyTask", bound=Task)


class Executor(Generic[AnyTask]):
    """A queue and its threads, which begin with the first task. `run` does a task and answers its tokens; it must not
    raise. With `steps_aside` the engine goes first where it wakes on a thread's processor: no request waits for its
    copies."""

    def __init__(
        self,
        run: Callable[[AnyTask], int],
        name: str,
        tasks_max: int = LOADS_MAX,
        *,
        threads: int = 1,
        steps_aside: bool = False,
    ) -> None:
        self._run = run
        self._name = name
        self._tasks_max = tasks_max
        self._steps_aside = steps_aside
        self._changed = threading.Condition()
        self._queue: deque[AnyTask] = deque()
        self._under_way: list[AnyTask] = []
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._home = Home()  # a fork has the queue, and no thread that works it off

    def submit(self, task: AnyTask) -> bool:
        """Queue it; False, and it is done with what the caller has, when there is no room for it. A cancelled task
        takes none."""
        unwanted: list[AnyTask] = []
        if not self._home.is_here():
            task.refused = True
            task.end(task.tokens)
            return False
        with self._changed:
            if len(self._queue) >= self._tasks_max:
                unwanted = [waiting for waiting in self._queue if waiting.cancelled]
                self._queue = deque(waiting for waiting in self._queue if not waiting.cancelled)
            is_queued = not self._closed and len(self._queue) < self._tasks_max and self._has_thread()
            if is_queued:
                self._queue.append(task)
                self._changed.notify_all()
        for waiting in unwanted:
            waiting.end(waiting.tokens)
        if not is_queued:
            task.refused = True
            task.end(task.tokens)
        return is_queued

    def following(self, accept: Callable[[AnyTask], bool]) -> AnyTask | None:
        """Give the task that is done next, for the running one to begin it; None where there is none, or where
        `accept`, which is asked while no task can be cancelled, refuses it."""
        with self._changed:
            task = self._queue[0] if self._queue and not self._closed else None
            return task if task is not None and not task.cancelled and accept(task) else None

    def settle(self) -> None:
        """Wait until all that was added before is done."""
        if not self._home.is_here():
            return
        with self._changed:
            tasks = (*self._under_way, *self._queue)
        for task in tasks:
            task.wait()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way."""
        with self._changed:
            return not self._queue and all(task.done for task in self._under_way)

    def stand_back(self, most_s: float) -> None:
        """For a task whose request goes on: leave the interpreter to the others until the next task is there, so
        long at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, most_s)

    def close(self) -> None:
        """Give up what waits, end what is under way behind its block, and wait for that."""
        if not self._home.is_here():
            return
        with self._changed:
            self._closed = True
            for task in (*self._queue, *self._under_way):
                task.cancel()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _has_thread(self) -> bool:
        try:
            while len(self._threads) < self._threads_max:
                self._threads.append(start_worker(self._turn, self._name))
        except RuntimeError:  # the interpreter ends, or has no threads left
            return bool(self._threads)
        return True

    def _turn(self) -> bool:
        if self._steps_aside:
            take_long_slices()
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            task = self._queue.popleft()
            self._under_way.append(task)
        tokens = task.tokens
        try:
            tokens = task.tokens if task.cancelled else self._run(task)
        except BaseException:  # it ends, and the thread goes on: a caller of settle() would wait for ever
            log.exception("%s: a job ended wildly", self._name)
            task.refused = True
        task.end(tokens)
        with self._changed:
            self._under_way.remove(task)
        del task  # what it has raised may keep this frame, and so what the task holds
        return True
