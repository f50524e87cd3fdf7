"""Streams that do not hold up an engine: which are taken, and on a GPU that trying them leaves nothing behind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

import pytest
import torch

from kvredis.adapters.transfer.cuda.streams import EngineKernels, QuietStreams
from kvredis.adapters.transfer.cuda.tuning import TUNING


def streams(slowed: Iterable[float]) -> QuietStreams[int]:
    """Streams 0, 1, 2, ... beside which kernels take so many times as long."""
    factors = [*slowed]
    return QuietStreams(itertools.count().__next__, factors.__getitem__)


def test_a_stream_beside_which_kernels_take_as_long_as_alone_is_taken_and_louder_ones_are_left() -> None:
    made = streams([1.0, 1.5, 1.01, 3.6, 1.0])
    assert [made.quiet() for _ in range(3)] == [0, 2, 4]


def test_copies_are_given_the_streams_that_kernels_were_not_before_new_ones_are_made() -> None:
    made = streams([1.5, 1.0, 1.5, 1.0])
    assert [made.quiet(), made.quiet()] == [1, 3]
    assert [made.any() for _ in range(3)] == [0, 2, 4]


def test_where_no_stream_is_quiet_the_least_loud_of_a_few_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    quiet = TUNING.quiet_factor
    factors = [quiet + 1, quiet + 0.5, quiet + 2, quiet + 0.6][: TUNING.quiet_tries]
    made = streams([*factors, 1.0])
    with caplog.at_level(logging.INFO):
        assert made.quiet() == 1
    assert f"each of {TUNING.quiet_tries} streams" in caplog.text
    assert sorted(made.any() for _ in range(3)) == [0, 2, 3]
    assert made.quiet() == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_what_cannot_be_tried_is_taken_as_it_comes_and_that_is_said_once(
    failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    def slowed(stream: int) -> float:
        if stream >= failing:
            raise AttributeError("torch has no _sleep")
        return 2.0

    made = QuietStreams(itertools.count().__next__, slowed)
    with caplog.at_level(logging.INFO):
        taken = [made.quiet() for _ in range(3)]
    assert taken == [failing, failing + 1, failing + 2]
    assert caplog.text.count("torch has no _sleep") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_a_quiet_stream_is_found_and_nothing_is_left_under_way() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = EngineKernels(device)
    made = QuietStreams(lambda: torch.cuda.Stream(device), kernels.slowed)  # type: ignore[no-untyped-call]
    taken = [made.quiet() for _ in range(4)]
    assert len({stream.cuda_stream for stream in taken}) == 4
    assert all(stream.query() for stream in (*taken, torch.cuda.current_stream(device)))
    assert kernels.time_ms() > 0
