"""Mutated sessions on several connections at once do no harm to other clients.

5,000 cases on both loops and in four settings (strangers.py says which), and some at a server process whose memory is
looked at. `scripts/fuzz` plays many more. A failure names its seed and the shortest stream that repeats it.
"""

import pytest
from _pytest.mark import ParameterSet

from tests.fuzz.socket_run import run_process_cases, run_socket_cases
from tests.fuzz.strangers import PROFILES

pytestmark = pytest.mark.usefixtures("threads")

CASES = 625
"""By loop and setting: 5,000 in all."""

PROCESS_CASES = 400


def nightly(profile: str) -> ParameterSet:
    """A setting that the gate leaves to the night."""
    return pytest.param(profile, marks=pytest.mark.nightly)


@pytest.mark.parametrize("profile", [each if each == "open" else nightly(each) for each in PROFILES])
def test_strangers_do_no_harm(loop: str, profile: str) -> None:
    run_socket_cases(loop, profile, seed=0, numbers=range(CASES))


@pytest.mark.parametrize("profile", [nightly("open"), "restricted"])
def test_a_server_process_survives_strangers_and_keeps_no_memory_of_them(loop: str, profile: str) -> None:
    run_process_cases(loop, profile, seed=1, numbers=range(PROCESS_CASES))
