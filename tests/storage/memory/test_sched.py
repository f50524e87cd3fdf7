"""A thread that copies in the background has a long time slice, and is otherwise what it was."""

import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvredis.storage.memory.sched import SLICE_NS, take_long_slices

from .asked_slices import attributes, has_slices, slice_ns

Found = TypeVar("Found")


def in_a_thread(work: Callable[[], Found]) -> Found:
    found: list[Found] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_the_calling_thread_has_long_slices_and_no_other() -> None:
    def work() -> int:
        take_long_slices()
        return slice_ns()

    before = slice_ns()
    assert before < SLICE_NS
    assert in_a_thread(work) == (SLICE_NS if has_slices() else 0)
    assert slice_ns() == before
    assert in_a_thread(slice_ns) == before, "nor one that begins later"


def test_its_niceness_and_what_its_children_get_stay() -> None:
    def work() -> tuple[int, int, int]:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        take_long_slices()
        found = attributes(0)
        return found.nice, found.flags, os.sched_getscheduler(0)

    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    assert in_a_thread(work) == (nice, 1, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK)


@pytest.mark.parametrize("policy", [os.SCHED_BATCH, os.SCHED_IDLE])
def test_a_thread_of_another_policy_is_left_alone(policy: int) -> None:
    def work() -> tuple[int, int, int]:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        before = slice_ns()
        take_long_slices()
        return os.sched_getscheduler(0), before, slice_ns()

    found, before, after = in_a_thread(work)
    assert (found, after) == (policy, before)


def test_it_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> int:
        for _ in range(3):
            take_long_slices()
        return len(asked)

    asked: list[int] = []

    def scheduler(thread_id: int) -> int:
        asked.append(thread_id)
        return os.SCHED_BATCH

    monkeypatch.setattr(os, "sched_getscheduler", scheduler)
    assert in_a_thread(work) == 1


def test_a_sandbox_that_forbids_it_stops_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(thread_id: int) -> int:
        raise PermissionError(thread_id)

    def work() -> bool:
        take_long_slices()
        return True

    monkeypatch.setattr(os, "sched_getscheduler", forbidden)
    assert in_a_thread(work)


def test_where_the_systems_call_has_no_known_number_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> int:
        take_long_slices()
        return slice_ns_here()

    number = platform.machine()
    before = in_a_thread(slice_ns)

    def slice_ns_here() -> int:
        monkeypatch.setattr(platform, "machine", lambda: number)
        return slice_ns()

    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert in_a_thread(work) == before
