"""Runs of many strangers at one server, and the way from a run that failed to the shortest stream that does harm.

A run has a fresh server. When it fails, its last batch is played again alone, then that batch's cases one by one, then
what shrinking leaves of the one to blame, each on a fresh server; so the report names a stream to make a test of.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.fuzz.mutator import shrink
from tests.fuzz.served import ServedProcess
from tests.fuzz.strangers import ARENA_MIB, BATCH, PROFILES, Case, Host, LiveDoor, ProcessDoor, make_case
from tests.server.live import LOOPS, MIB, LiveServer

RUN_CASES: Final = 250
"""Cases of one run, and so of one server."""

RUN_LIMIT_S: Final = 300
SHRINK_TRIES: Final = 120
MEMORY_GROWTH_BYTES: Final = 48 * MIB
"""What a server process may keep of a run: the interpreter's free lists, and what malloc does not give back."""

Group = Sequence[Case]


def groups_of(seed: int, numbers: range, profile: str) -> list[Group]:
    """The cases in the batches in which they come."""
    cases = [make_case(seed, number, profile) for number in numbers]
    return [cases[at : at + BATCH] for at in range(0, len(cases), BATCH)]


def run_socket_cases(loop: str, profile: str, seed: int, numbers: range) -> None:
    """Play the cases at a server on a loop of this process. AssertionError names the stream that did harm."""
    groups = groups_of(seed, numbers, profile)
    played: list[Group] = []
    try:
        _play(loop, profile, groups, played)
    except Exception as error:
        blame = _blame(loop, profile, played[-1] if played else [])
        raise AssertionError(f"{error!r}\n{_again(loop, profile, seed, numbers)}\n{blame}") from error


def run_process_cases(loop: str, profile: str, seed: int, numbers: range) -> None:
    """Play the cases at a server in a process of its own, whose memory must be back where it was afterwards."""

    async def story(served: ServedProcess) -> None:
        async with Host(ProcessDoor(served), PROFILES[profile]) as host:
            groups = groups_of(seed, numbers, profile)
            warm_up = len(groups) // 3
            before = 0
            for at, group in enumerate(groups):
                if at == warm_up:
                    before = served.memory_bytes()
                await host.receive(group)
            await host.part()
            grown = served.memory_bytes() - before
            assert grown < MEMORY_GROWTH_BYTES, f"{grown} bytes more after {len(groups) - warm_up} batches"

    try:
        with TemporaryDirectory() as folder, ServedProcess(Path(folder), loop, ARENA_MIB) as served:
            asyncio.run(asyncio.wait_for(story(served), RUN_LIMIT_S))
    except Exception as error:
        raise AssertionError(f"{error!r} in a server process\n{_again(loop, profile, seed, numbers)}") from error


def _again(loop: str, profile: str, seed: int, numbers: range) -> str:
    """The command line that plays a run again."""
    which = f"--seed {seed} --first {numbers.start} --cases {len(numbers)}"
    return f"scripts/fuzz --loop {loop} --profile {profile} {which}"


def _play(loop: str, profile: str, groups: Sequence[Group], played: list[Group]) -> None:
    """Play batches at a fresh server; `played` tells how far it went."""

    async def story(folder: Path) -> None:
        async with LiveServer(folder, ARENA_MIB * MIB) as live, Host(LiveDoor(live), PROFILES[profile]) as host:
            for group in groups:
                played.append(group)
                await host.receive(group)
            await host.part()

    with TemporaryDirectory() as folder:
        _run(loop, story(Path(folder)))


def _run(loop: str, story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.wait_for(story, RUN_LIMIT_S))


def _blame(loop: str, profile: str, group: Group) -> str:
    """Which stream of a batch did it, as short as can be found."""

    def harmful(*cases: Case) -> bool:
        try:
            _play(loop, profile, [cases], [])
        except Exception:
            return True
        return False

    if not harmful(*group):
        return "the last batch alone does no harm: it takes those before it"
    culprit = next((case for case in group if harmful(case)), None)
    if culprit is not None:
        found = culprit

        def fails(stream: bytes) -> bool:
            return harmful(replace(found, stream=stream, cuts=_within(found.cuts, stream)))

        shortest = shrink(found.stream, fails, SHRINK_TRIES)
        return f"{found.kind}, {found.ending}, cut at {_within(found.cuts, shortest)}: {shortest[:3000]!r}"
    return f"only together: {[(case.kind, case.ending, case.cuts, case.stream[:500]) for case in group]}"


def _within(cuts: Sequence[int], stream: bytes) -> tuple[int, ...]:
    return tuple(at for at in cuts if at < len(stream))
