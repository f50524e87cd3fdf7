"""Transfers: one in flight for a block, joined by callers that ask again, and cancelled when no caller wants it any
more."""

import logging
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvredis.storage.background import Priority
from kvredis.storage.tiering.transfers import Kind, State, Transfer, Transfers

from .fake_io import ManualIo


class Disk:
    """Starts transfers on a ManualIo, and says what was begun and what ran."""

    def __init__(self, io: ManualIo | None = None) -> None:
        self.io = io or ManualIo()
        self.transfers: Transfers[str] = Transfers(self.io)
        self.started: list[str] = []
        self.ran: list[str] = []
        self.heard: list[tuple[State, str | None]] = []

    def start(self, name: str, priority: Priority, deadline_s: float | None = None) -> Callable[[], Future[str] | None]:
        """What submits the job `name`, which returns its name."""

        def job() -> str:
            self.ran.append(name)
            return name

        def submit() -> Future[str] | None:
            self.started.append(name)
            return self.io.submit(priority, 1, job, deadline_s=deadline_s)

        return submit

    def ask(
        self, kind: Kind, key: bytes = b"k", done: Callable[[Transfer[str]], None] | None = None, space: int = 0
    ) -> Transfer[str]:
        """Ask for `key` as `kind`; the job is named after both."""
        return self.transfers.join_or_start(
            kind, key, space, self.start(f"{kind.value} {key.decode()} {space}", kind.priority), done
        )

    def hear(self, transfer: Transfer[str]) -> None:
        """A callback."""
        self.heard.append((transfer.state, transfer.result))

    def hear_too(self, transfer: Transfer[str]) -> None:
        """Another one."""
        self.hear(transfer)


# ---- one in flight ---------------------------------------------------------------------------------------------------


def test_a_caller_that_asks_again_joins_and_each_hears_of_it_once() -> None:
    disk = Disk()
    first = disk.ask(Kind.PROMOTE, done=disk.hear)
    assert disk.ask(Kind.PROMOTE, done=disk.hear_too) is first
    assert (first.state, first.is_over, len(disk.transfers)) == (State.QUEUED, False, 1)
    disk.transfers.check_integrity()
    disk.io.run()
    assert disk.ran == ["promote k 0"]
    assert disk.heard == [(State.DONE, "promote k 0")] * 2
    assert (first.state, first.is_over, len(disk.transfers)) == (State.DONE, True, 0)
    figures = disk.transfers.figures()[Kind.PROMOTE]
    assert (figures["started"], figures["joined"], figures["done"]) == (1, 1, 1)


def test_another_key_and_another_database_are_other_blocks() -> None:
    disk = Disk()
    transfers = {disk.ask(Kind.PROMOTE), disk.ask(Kind.PROMOTE, b"k2"), disk.ask(Kind.PROMOTE, space=1)}
    assert len(transfers) == len(disk.transfers) == disk.io.run() == 3


def test_a_caller_that_asks_after_the_end_starts_anew_even_in_a_callback() -> None:
    disk = Disk()
    seen: list[Transfer[str]] = []
    first = disk.ask(Kind.PROMOTE, done=lambda transfer: seen.append(disk.ask(Kind.SPILL)))
    disk.io.run()
    assert seen[0] is not first
    assert disk.ran == ["promote k 0", "spill k 0"]


def test_a_callback_added_after_the_end_is_called_at_once() -> None:
    disk = Disk()
    transfer = disk.ask(Kind.SPILL)
    disk.io.run()
    transfer.add_done(disk.hear)
    assert disk.heard == [(State.DONE, "spill k 0")]
    assert not transfer.withdraw(disk.hear)


def test_a_transfer_under_way_says_so_and_can_be_joined() -> None:
    disk, states = Disk(), list[tuple[State, bool]]()

    def job() -> str:
        states.append((transfer.state, disk.ask(Kind.PROMOTE, done=disk.hear) is transfer))
        return "done"

    transfer = disk.transfers.join_or_start(Kind.PREFETCH, b"k", 0, lambda: disk.io.submit(Priority.PREFETCH, 1, job))
    disk.io.run()
    assert states == [(State.RUNNING, True)]
    assert disk.heard == [(State.DONE, "done")]


# ---- urgency ---------------------------------------------------------------------------------------------------------


def test_a_demand_that_joins_makes_a_prefetch_as_urgent_as_itself() -> None:
    disk = Disk()
    for key in (b"a", b"b", b"c"):
        disk.ask(Kind.PREFETCH, key)
    joined = disk.ask(Kind.PROMOTE, b"c")
    assert (joined.kind, joined.priority) == (Kind.PREFETCH, Priority.DEMAND)
    disk.ask(Kind.PROMOTE, b"d")
    disk.io.run()
    assert disk.ran == ["prefetch c 0", "promote d 0", "prefetch a 0", "prefetch b 0"]


def test_a_spill_that_joins_a_demand_does_not_slow_it_down() -> None:
    disk = Disk()
    disk.ask(Kind.PROMOTE)
    assert disk.ask(Kind.SPILL).priority is Priority.DEMAND
    disk.ask(Kind.PREFETCH, b"other")
    disk.io.run()
    assert disk.ran == ["promote k 0", "prefetch other 0"]


def test_one_that_is_joined_outlives_the_deadline_of_the_first() -> None:
    disk = Disk()
    start = disk.start("late", Priority.PREFETCH, deadline_s=disk.io.clock.now_s + 1)
    disk.transfers.join_or_start(Kind.PREFETCH, b"k", 0, start, disk.hear)
    disk.ask(Kind.PROMOTE, done=disk.hear_too)
    disk.io.clock.now_s += 2
    disk.io.run()
    assert disk.heard == [(State.DONE, "late")] * 2


def test_a_demand_that_joins_while_the_job_is_being_submitted_hastens_it_too() -> None:
    disk = Disk()
    disk.ask(Kind.PREFETCH, b"other")

    def start() -> Future[str] | None:
        disk.ask(Kind.PROMOTE, done=disk.hear)  # as another thread would
        return disk.start("k", Priority.PREFETCH)()

    disk.transfers.join_or_start(Kind.PREFETCH, b"k", 0, start)
    disk.io.run()
    assert disk.ran == ["k", "prefetch other 0"]
    assert disk.heard == [(State.DONE, "k")]


# ---- other ends ------------------------------------------------------------------------------------------------------


def test_no_room_is_an_answer_that_those_that_wait_hear_as_well() -> None:
    disk = Disk(ManualIo(queue_jobs_max=1))
    disk.ask(Kind.SPILL, b"a")
    refused = disk.ask(Kind.SPILL, b"b", disk.hear)
    assert refused.state is State.REFUSED
    assert disk.heard == [(State.REFUSED, None)]
    assert len(disk.transfers) == 1
    assert disk.transfers.figures()[Kind.SPILL]["refused"] == 1


def test_a_failure_is_told_with_its_error() -> None:
    disk, error = Disk(), OSError("EIO")
    transfer = disk.ask(Kind.PROMOTE, done=disk.hear)
    disk.io.fail_next(error)
    disk.io.run()
    assert disk.heard == [(State.FAILED, None)]
    assert transfer.error is error
    assert disk.ask(Kind.PROMOTE) is not transfer


def test_one_not_begun_by_its_deadline_is_overdue() -> None:
    disk = Disk()
    start = disk.start("late", Priority.PREFETCH, deadline_s=disk.io.clock.now_s + 1)
    disk.transfers.join_or_start(Kind.PREFETCH, b"k", 0, start, disk.hear)
    disk.io.clock.now_s += 1
    assert disk.io.drop_overdue() == 1
    assert (disk.heard, disk.ran) == ([(State.OVERDUE, None)], [])


def test_what_start_raises_reaches_the_caller_and_fails_those_that_had_joined() -> None:
    disk = Disk()

    def start() -> None:
        disk.ask(Kind.PROMOTE, done=disk.hear)
        raise OSError("no thread")

    with pytest.raises(OSError, match="no thread"):
        disk.transfers.join_or_start(Kind.PROMOTE, b"k", 0, start)
    assert disk.heard == [(State.FAILED, None)]
    assert len(disk.transfers) == 0


def test_transfers_are_cancelled_with_the_threads() -> None:
    disk = Disk()
    disk.ask(Kind.PROMOTE, done=disk.hear)
    disk.io.close()
    assert disk.heard == [(State.CANCELLED, None)]
    assert disk.ask(Kind.PROMOTE).state is State.REFUSED


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_fails_does_not_keep_the_others_from_theirs(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(transfer: Transfer[str]) -> None:
        raise error

    disk = Disk()
    disk.ask(Kind.PROMOTE, done=fail).add_done(disk.hear)
    disk.io.run()
    assert disk.heard == [(State.DONE, "promote k 0")]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


# ---- no caller wants it any more -------------------------------------------------------------------------------------


def test_the_last_caller_that_waits_cancels_it() -> None:
    disk = Disk()
    transfer = disk.ask(Kind.PROMOTE, done=disk.hear)
    disk.ask(Kind.PROMOTE, done=disk.hear_too)
    assert transfer.withdraw(disk.hear)
    assert not transfer.withdraw(disk.hear), "taken back already"
    assert len(disk.transfers) == 1, "a caller still waits"
    assert transfer.withdraw(disk.hear_too)
    assert transfer.state is State.CANCELLED
    assert (len(disk.transfers), disk.io.run(), disk.heard) == (0, 0, [])
    assert disk.ask(Kind.PROMOTE) is not transfer


def test_one_wanted_without_waiting_is_not_cancelled_by_callers_that_wait() -> None:
    disk = Disk()
    transfer = disk.ask(Kind.SPILL)
    transfer.add_done(disk.hear)
    assert transfer.withdraw(disk.hear)
    disk.io.run()
    assert disk.ran == ["spill k 0"]


def test_one_under_way_goes_on_to_its_end_though_no_caller_waits() -> None:
    disk, answers = Disk(), list[bool]()

    def job() -> str:
        answers.append(transfer.withdraw(disk.hear))
        answers.append(disk.transfers.find(b"k", 0) is transfer)
        return "done"

    transfer = disk.transfers.join_or_start(
        Kind.PROMOTE, b"k", 0, lambda: disk.io.submit(Priority.DEMAND, 1, job), disk.hear
    )
    disk.io.run()
    assert answers == [True, True]
    assert (transfer.state, transfer.result, disk.heard) == (State.DONE, "done", [])


def test_one_that_is_unwanted_by_the_time_it_is_submitted_is_cancelled() -> None:
    disk = Disk()

    def start() -> Future[str] | None:
        transfer = disk.transfers.find(b"k", 0)
        assert transfer is not None
        assert transfer.withdraw(disk.hear)  # as another thread would: a client that hung up
        return disk.start("k", Priority.DEMAND)()

    transfer = disk.transfers.join_or_start(Kind.PROMOTE, b"k", 0, start, disk.hear)
    assert transfer.state is State.CANCELLED
    assert (disk.io.run(), len(disk.transfers)) == (0, 0)


def test_what_was_reserved_for_a_cancelled_job_is_given_back_by_a_callback_that_may_ask_again() -> None:
    disk, seen = Disk(), list[Transfer[str]]()

    def start() -> Future[str] | None:
        future = disk.start("k", Priority.DEMAND)()
        assert future is not None
        future.add_done_callback(lambda _: seen.append(disk.ask(Kind.PROMOTE)))
        return future

    transfer = disk.transfers.join_or_start(Kind.PROMOTE, b"k", 0, start, disk.hear)
    assert transfer.withdraw(disk.hear)
    assert transfer.state is State.CANCELLED
    assert seen == [disk.transfers.find(b"k", 0)]
    disk.io.run()
    assert disk.ran == ["promote k 0"]


# ---- keys that change meanwhile --------------------------------------------------------------------------------------


def test_no_caller_joins_the_transfer_of_a_replaced_value_but_those_that_wait_hear_its_end() -> None:
    disk = Disk()
    old = disk.ask(Kind.PROMOTE, done=disk.hear)
    assert disk.transfers.forget(b"k", 0) is old
    assert disk.transfers.forget(b"k", 0) is None
    new = disk.ask(Kind.SPILL)
    assert new is not old
    disk.io.run(1)
    assert disk.heard == [(State.DONE, "promote k 0")]
    assert disk.transfers.find(b"k", 0) is new, "the old one's end leaves the new one where it is"
    disk.transfers.check_integrity()
    disk.io.run()
    assert disk.ran == ["promote k 0", "spill k 0"]


def test_a_flush_forgets_one_database_or_all() -> None:
    disk = Disk()
    for space in (0, 1, 1, 2):
        disk.ask(Kind.PREFETCH, space=space)
    assert [disk.transfers.forget_all(1), disk.transfers.forget_all(1), disk.transfers.forget_all()] == [1, 0, 2]
    assert (len(disk.transfers), disk.io.run()) == (0, 3)
