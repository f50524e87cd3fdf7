"""`scripts/fuzz`: as many mutated sessions as one has time for, at the parser and at the socket, on every core.

It prints the seed that it took, and for a failure the case, the shortest stream and the line that plays it again.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

from tests.fuzz.parser_run import run_parser_cases
from tests.fuzz.socket_run import RUN_CASES, run_process_cases, run_socket_cases
from tests.fuzz.strangers import PROFILES
from tests.server.live import LOOPS

Run = Callable[[], None]
PROCESS_SHARE = 20
"""Of so many runs at the socket one is at a server process."""


def main() -> int:
    """Play the cases that the command line asks for; 1 when one did harm."""
    options = _options()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    runs = list(_runs(options, seed))
    print(f"seed {seed}: {options.cases} cases in {len(runs)} runs", flush=True)
    failures = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(run) for run in runs]
        for done, future in enumerate(as_completed(waiting), 1):
            error = future.exception()
            if error is not None:
                failures += 1
                print(f"FAILED\n{error}\n", flush=True)
            elif sys.stdout.isatty():
                print(f"\r{done}/{len(runs)} runs", end="", flush=True)
    print(f"seed {seed}: {len(runs) - failures} of {len(runs)} runs did no harm")
    return 1 if failures else 0


def _runs(options: argparse.Namespace, seed: int) -> Sequence[Run]:
    """The cases as runs: a half at the parser, a half at the socket, there in turn on each loop in each setting."""
    at_socket = options.cases - options.cases // 2
    if options.profile or options.loop:
        at_socket = options.cases
    runs: list[Run] = []
    settings = [
        (loop, profile)
        for profile in ([options.profile] if options.profile else PROFILES)
        for loop in ([options.loop] if options.loop else LOOPS)
    ]
    for at, start in enumerate(range(options.first, options.first + at_socket, RUN_CASES)):
        loop, profile = settings[at % len(settings)]
        play = run_process_cases if at % PROCESS_SHARE == PROCESS_SHARE - 1 else run_socket_cases
        numbers = range(start, min(start + RUN_CASES, options.first + at_socket))
        runs.append(partial(play, loop, profile, seed, numbers))
    at_parser = options.cases - at_socket
    for start in range(options.first, options.first + at_parser, 20 * RUN_CASES):
        runs.append(
            partial(run_parser_cases, seed, range(start, min(start + 20 * RUN_CASES, options.first + at_parser)))
        )
    return runs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200_000, help="how many (200,000)")
    parser.add_argument("--seed", type=int, help="another seed gives other cases; without one it is drawn and printed")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat a run")
    parser.add_argument("--loop", choices=LOOPS, help="only the socket, only this event loop")
    parser.add_argument("--profile", choices=PROFILES, help="only the socket, only this setting")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at work (one for each core)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
